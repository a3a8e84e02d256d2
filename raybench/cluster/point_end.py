"""The end of a point: collect the answers of its ranks, stop the others after a failure, say why.

A cluster implements `RunningRanks` to reach the ranks of a point. The failure of one rank shows on
its peers as broken connections or missing answers. Peers get the cause PeerFailed, so that the
failure of the point is the failure of the rank that caused it.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal, Protocol

from raybench.cluster import timeouts
from raybench.cluster.hang_watch import HangFinding, HangWatch, WatchedRanks
from raybench.records.device import Device
from raybench.records.hang import HangVerdict
from raybench.records.measurement import Failure, RankAnswer
from raybench.records.status import Cause, Status
from raybench.records.task import Task

# How NCCL's and gloo's collectives report the loss of a peer: by type, or by words in the message.
_LOSS_TYPES = (Cause.PEER_FAILED, Cause.SCRIPT_ENDED, "DistBackendError", "DistNetworkError")
_LOSS_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# Types that always mean a lost connection. NCCL's DistBackendError does not: it also reports wrong
# calls, so its text decides.
_LOST_TYPES = (Cause.PEER_FAILED, "DistNetworkError")
_NCCL_LOSSES = ("ncclRemoteError", "remote process exited or there was a network error")
# What the handlers of Python and Ray write when a signal ends the process.
_FATAL = re.compile(r"Fatal Python error: (.+)|\*\*\* (SIG[A-Z]+) received")
_SIGNALS = {signal.strsignal(number): number.name for number in signal.Signals}
# Priority of failures as the cause of the point's failure: the peers of a dead rank report broken
# connections as errors.
_LIKELY_FIRST = (Status.OOM, Status.LOST, Status.ERROR, Status.TIMEOUT)
# Write at least so many consecutive ranks as a range.
_RANGE_LENGTH = 4
_WORKLOADS = "/raybench/workloads/"
_SCRIPT = f"{_WORKLOADS}scripts/child.py"
_DEATHS = tuple(cause for cause in Cause if cause.is_death)
_FRAME = re.compile(r'^\s*File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')


class RunningRanks(WatchedRanks, Protocol):
    """The ranks of one running point; each kind of cluster implements it."""

    # In rank order.
    devices: Sequence[Device]

    def answers(self, timeout_s: float) -> Mapping[int, RankAnswer]:
        """Return rank -> answer, for the answers since the last call.

        A rank whose process or node is gone has a Failure. Raises as `Cluster.run`.

        Args:
            timeout_s: how long to wait for the first answer; it may return earlier without one.
        """

    def abort(self) -> None:
        """Tell all ranks to abort their process group; does not wait."""

    def kill(self, ranks: Collection[int]) -> None:
        """Kill the processes of these ranks; `answers` returns none of their answers any more."""

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        """Return rank -> the last 60 lines of its process, stdout then stderr, if there are any."""

    def wait_until_free(self, ranks: Collection[int], timeout_s: float) -> Sequence[str]:
        """Wait until the devices of killed ranks have free memory again.

        Return a sentence for each device that still has memory in use after `timeout_s`.
        """
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a point ended."""

    # In rank order.
    answers: tuple[RankAnswer, ...]
    # Ranks whose processes cannot run another point. They are killed, except on lost nodes; not yet
    # replaced.
    unfit: frozenset[int]
    # Whether the process group is unusable.
    group_is_gone: bool


def finish_point(
    ranks: RunningRanks, task: Task, tell_hang: Callable[[HangVerdict], None] = lambda _: None
) -> Outcome:
    """Collect the answers of all ranks and return how the point ended.

    After a failure or a timeout, or `hang_s` after a rank was found to hang, the point is ended on
    all ranks. Processes that cannot run another point are killed, except on lost nodes. Raises as
    `Cluster.run`.

    Args:
        tell_hang: gets the verdict as soon as a rank is found to hang.
    """
    point = _Point(ranks)
    settings = task.settings
    watch: HangWatch | None = None
    if settings.hang_s is not None and len(ranks.devices) > 1:
        watch = HangWatch(ranks, settings.hang_s, tell_hang)

    def is_over() -> bool:
        return bool(point.failures) or (watch is not None and watch.is_over(point.missing))

    began_s = time.monotonic()
    point.collect(settings.timeout_s, enough=is_over)
    is_early = time.monotonic() < began_s + settings.timeout_s
    answers = tuple(point.answers[rank] for rank in sorted(point.answers))
    # A failed rank breaks the process group, even if the others have answered before.
    is_whole = not (point.missing or point.failures)
    if is_whole and all(answer.worker_reusable for answer in answers):
        return Outcome(answers=answers, unfit=frozenset(), group_is_gone=False)
    is_timeout = bool(point.missing) and not point.failures
    finding = watch.finding if watch is not None and is_timeout else None
    if not is_timeout:
        point.collect(timeouts.ABORT_S, enough=lambda: _own_failure(point.failures))
    finished = frozenset(point.answers)
    ranks.abort()
    # NCCL's abort wakes all waiting ranks. A gloo collective, or any collective of a script, wakes
    # only when the process that it waits for ends. Give the ranks time to write their stacks first.
    by_killing = is_timeout and (task.is_script or ranks.devices[0].kind == "cpu")
    point.collect(timeouts.STACK_DUMP_S if by_killing else timeouts.ABORT_S)
    if by_killing:
        named = _named(finding)
        to_kill = [rank for rank in named if rank in point.missing] or (
            _hanging(point.observe(finished))
        )
        point.missing.difference_update(to_kill)
        ranks.kill(to_kill)
        point.collect(timeouts.ABORT_S)
    observed = point.observe(finished)
    if is_timeout and is_early:
        # Stacks are written at the time limit, so stacks in the logs are those of earlier points.
        observed = replace(observed, log_tails={})
    if is_timeout:
        limit = TimeLimit(
            timeout_s=settings.timeout_s, hang_s=settings.hang_s if is_early else None
        )
        answers = after_timeout(observed, limit, finding)
    else:
        answers = after_failure(observed)
    unfit = frozenset(answer.rank for answer in answers if not answer.worker_reusable)
    # Processes of a lost node cannot be reached.
    reachable = [
        answer.rank
        for answer in answers
        if answer.rank in unfit
        and not (isinstance(answer, Failure) and answer.error_type == Cause.NODE_LOST)
    ]
    if reachable:
        ranks.kill(reachable)
        in_use = "\n".join(ranks.wait_until_free(reachable, timeouts.MEMORY_FREE_S))
        if in_use:
            answers = tuple(_with_detail(answer, in_use, unfit) for answer in answers)
    return Outcome(answers=answers, unfit=unfit, group_is_gone=True)


def _with_detail(answer: RankAnswer, text: str, ranks: Collection[int]) -> RankAnswer:
    if isinstance(answer, Failure) and answer.rank in ranks:
        return replace(answer, detail=f"{answer.detail}\n{text}".strip())
    return answer


class _Point:
    """Collects the answers of the ranks of one point."""

    def __init__(self, ranks: RunningRanks) -> None:
        # Rank -> answer, in order of arrival.
        self.answers: dict[int, RankAnswer] = {}
        self.failures: list[Failure] = []
        # Ranks that have not answered yet.
        self.missing = set(range(len(ranks.devices)))
        self._ranks = ranks
        self._log_tails: dict[int, str] = {}

    def collect(self, timeout_s: float, enough: Callable[[], object] = lambda: False) -> None:
        """Add answers until all ranks have answered, `enough` is true, or the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while self.missing and not enough() and (left_s := deadline_s - time.monotonic()) > 0:
            for rank, answer in self._ranks.answers(left_s).items():
                if rank in self.missing:
                    self.missing.remove(rank)
                    self.answers[rank] = answer
                    self.failures += [answer] if isinstance(answer, Failure) else []

    def observe(self, finished: frozenset[int]) -> PointObservation:
        """Return what is known of the ranks now.

        The failure of a dead process gets the end of its log as detail.
        """
        deaths = [failure for failure in self.failures if failure.error_type in _DEATHS]
        tails = self._log_tails
        tails |= self._ranks.log_tails([*self.missing, *(failure.rank for failure in deaths)])
        answers = dict(self.answers)
        for failure in deaths:
            tail, message = tails.get(failure.rank, ""), failure.message
            if failure.error_type == Cause.WORKER_DIED and (fatal := _FATAL.search(tail)):
                python_text, signal_name = fatal.groups()
                signal_name = signal_name or _SIGNALS.get(python_text, python_text)
                # A message that names a signal stays: it is from the worker of a script, whose log
                # may have older signals.
                if " died by " not in message:
                    message = f"the worker process died by {signal_name}"
            answers[failure.rank] = replace(failure, message=message, detail=tail or failure.detail)
        world_size = len(self._ranks.devices)
        return PointObservation(
            world_size=world_size, answers=answers, finished=finished, log_tails=tails
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointObservation:
    """What is known of a point that failed."""

    world_size: int
    # Rank -> answer, in order of arrival. Ranks without an answer are called stuck.
    answers: Mapping[int, RankAnswer]
    # Ranks that answered before the others were told to stop.
    finished: frozenset[int]
    # Rank -> last lines of the process, for stuck and dead ranks.
    log_tails: Mapping[int, str]


def _stuck(point: PointObservation) -> list[int]:
    return [rank for rank in range(point.world_size) if rank not in point.answers]


def _waits_for(log_tail: str) -> Literal["nothing", "device", "peers", "collective"]:
    """Return what a stuck rank waits for, by the stack in its log.

    A rank that waits for "peers" is still connecting to them. A rank that computes, or whose log
    has no stack, waits for "nothing".
    """
    calls = [(frame["path"], frame["function"]) for frame in _main_thread(log_tail)]
    if not calls:
        return "nothing"
    # The rank of a script has run its steps, and waits until the other ranks have run theirs.
    if any(path.endswith(_SCRIPT) and name == "receive" for path, name in calls):
        return "collective"
    if any(name == "init_process_group" for _, name in calls):
        return "peers"
    path, function = calls[0]
    # A backward pass counts as a collective, because DDP runs its collectives within it.
    if "/torch/distributed/" in path or "/torch/autograd/" in path:
        return "collective"
    return "device" if "/torch/cuda/" in path and function == "synchronize" else "nothing"


def _stuck_at(point: PointObservation, rank: int) -> str:
    """Return where a rank is stuck, as `, at net.py:60 in spin`; "" if unknown."""
    frames = [] if rank in point.answers else _main_thread(point.log_tails.get(rank, ""))
    if not frames:
        return ""
    # The innermost frame of the workload says more than a frame of Python's or torch's library.
    frame = frames[0]
    for candidate in frames:
        if _WORKLOADS in candidate["path"] or "/lib/python3" not in candidate["path"]:
            frame = candidate
            break
    if frame["function"] == "_form":
        return ", while it connects to the others: is the network between the hosts open?"
    return f", at {PurePath(frame['path']).name}:{frame['line']} in {frame['function']}"


def _main_thread(log_tail: str) -> list[re.Match[str]]:
    """Return the frames of the main thread, innermost first, in the output of faulthandler."""
    # faulthandler writes the main thread last.
    _, thread, frames = log_tail.rpartition("(most recent call first):")
    return [match for line in frames.splitlines() if thread and (match := _FRAME.match(line))]


def _own_failure(answers: Collection[RankAnswer]) -> Failure | None:
    """Return the first failure that is not the loss of a peer; None without one."""
    failures = (answer for answer in answers if isinstance(answer, Failure))
    return next((failure for failure in failures if not _is_loss_of_peer(failure)), None)


def cause_of(answers: Collection[RankAnswer]) -> Failure | None:
    """Return the failure that most likely made the point fail; None without a failure.

    PeerFailed comes last. Among the others the order is oom, lost, error, timeout.
    """
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    candidates = [failure for failure in failures if failure.error_type != Cause.PEER_FAILED]
    return min(
        candidates or failures,
        key=lambda failure: _LIKELY_FIRST.index(failure.status),
        default=None,
    )


def _hanging(point: PointObservation) -> list[int]:
    """Return the stuck ranks that the others most likely wait for; all if no rank stands out."""
    waits = {rank: _waits_for(point.log_tails.get(rank, "")) for rank in _stuck(point)}
    # The most suspicious ranks first: ranks that wait for nothing. Then ranks that wait for their
    # device, which may run a collective or an endless kernel. Then ranks that cannot connect while
    # their peers have connected and wait in a collective.
    for harmless in ({"device", "peers", "collective"}, {"peers", "collective"}, {"collective"}):
        hanging = [rank for rank, waits_for in waits.items() if waits_for not in harmless]
        if hanging:
            return hanging
    return list(waits)


def after_failure(point: PointObservation) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order, of a point that failed before its limit.

    Ranks keep their own failures, and measurements from before they were told to stop. The other
    ranks get PeerFailed.
    """
    failures = [answer for answer in point.answers.values() if isinstance(answer, Failure)]
    # `abort` may have killed these processes.
    late_deaths = [
        failure
        for failure in failures
        if failure.rank not in point.finished and failure.error_type == Cause.WORKER_DIED
    ]
    cause = _own_failure([failure for failure in failures if failure not in late_deaths])
    if cause is not None:
        return _judge(point, {}, Cause.NO_ANSWER, f"rank {cause.rank} failed", Status.LOST)
    # No rank has a failure of its own, so blame the stuck ranks.
    if stuck := _stuck(point):
        message = "no answer, and the others lost the connection to it"
        guilty = {rank: message + _stuck_at(point, rank) for rank in stuck}
        return _judge(point, guilty, Cause.NO_ANSWER, f"{_ranks(stuck)} failed", Status.LOST)
    # No rank is stuck, so blame the ranks whose script has ended.
    ended_scripts = {
        failure.rank: failure.message
        for failure in failures
        if failure.error_type == Cause.SCRIPT_ENDED
    }
    if ended_scripts:
        reason = f"the script of {_ranks(sorted(ended_scripts))} had ended"
        return _judge(point, ended_scripts, Cause.SCRIPT_ENDED, reason, Status.LOST)
    if late_deaths:
        rank, message = late_deaths[0].rank, late_deaths[0].message
        return _judge(point, {rank: message}, Cause.WORKER_DIED, f"rank {rank} failed", Status.LOST)
    # All ranks have lost a peer, and no rank says why.
    answers = []
    for _, answer in sorted(point.answers.items()):
        if isinstance(answer, Failure) and _is_lost_connection(answer):
            answer = replace(answer, status=Status.LOST)
        answers.append(answer)
    return tuple(answers)


def _is_lost_connection(failure: Failure) -> bool:
    text = failure.message + failure.detail
    is_named = any(words in text for words in (*_LOSS_WORDS, *_NCCL_LOSSES))
    return is_named or failure.error_type in _LOST_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The limit at which a point was ended."""

    # As in `Measure`.
    timeout_s: float
    # Where the point was ended so long after a rank was found to hang; else None.
    hang_s: float | None = None


def after_timeout(
    point: PointObservation, limit: TimeLimit, finding: HangFinding | None = None
) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order, of a point whose time is up.

    The ranks that `finding` names, else the hanging ranks, or all unfinished ranks if no rank is
    stuck, get Timeout or Hang. The others keep their own answers, or get PeerFailed with the status
    timeout.

    Args:
        point: at least one rank must be unfinished.
        limit: for the message.
        finding: what evidence told of a hang.
    """
    late = [rank for rank in range(point.world_size) if rank not in point.finished]
    named = [rank for rank in _named(finding) if rank in late]
    blamed = named or _hanging(point) or late
    waits: dict[int, str] = {}
    for rank in late:
        if rank not in blamed:
            # Only a rank in a collective stops by `abort`.
            has_stopped = rank in point.answers
            tail = point.log_tails.get(rank, "")
            waits[rank] = "collective" if has_stopped else _waits_for(tail)
    facts = [f"{_ranks(blamed)} gave none"] if len(blamed) > 1 else []
    for waits_for, words in (("collective", "in a collective"), ("device", "for the device")):
        waiting = [rank for rank, what in waits.items() if what == waits_for]
        if waiting:
            facts.append(f"{_ranks(waiting)} waited {words}")
    if point.finished:
        facts.append(f"{_ranks(sorted(point.finished))} had finished")
    message = f"no answer within measure.timeout_s = {limit.timeout_s:g} s"
    if limit.hang_s is not None:
        message = f"ended measure.hang_s = {limit.hang_s:g} s after it was found to hang"
    guilty = {rank: "; ".join([message + _stuck_at(point, rank), *facts]) for rank in blamed}
    cause = Cause.TIMEOUT if limit.hang_s is None else Cause.HANG
    answers = _judge(point, guilty, cause, f"waited for {_ranks(blamed)}", Status.TIMEOUT)
    return tuple(_with_finding(answer, finding, blamed) for answer in answers)


def _with_finding(
    answer: RankAnswer, finding: HangFinding | None, blamed: Collection[int]
) -> RankAnswer:
    if finding is None or answer.rank not in blamed or not isinstance(answer, Failure):
        return answer
    # The end of a detail is kept.
    detail = f"{answer.detail}\n\n{finding.description}".strip()
    return replace(answer, hang=finding.verdict, detail=detail)


def _named(finding: HangFinding | None) -> list[int]:
    """Return the ranks that a verdict names; the first is the one it is about."""
    if finding is None or finding.verdict.rank is None:
        return []
    return [finding.verdict.rank, *finding.verdict.also]


def _judge(
    point: PointObservation, guilty: Mapping[int, str], cause: Cause, reason: str, status: Status
) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order.

    Args:
        guilty: rank to blame -> message; these ranks fail for `cause`.
        reason: message of PeerFailed, which the other ranks get unless they have finished or have
            failures of their own.
        status: status of PeerFailed.
    """
    answers: list[RankAnswer] = []
    for rank in range(point.world_size):
        answer = point.answers.get(rank)
        if rank not in guilty and answer is not None:
            keeps_answer = rank in point.finished
            if isinstance(answer, Failure):
                # A process that died after `abort` is not to blame.
                keeps_answer = keeps_answer or answer.error_type != Cause.WORKER_DIED
                keeps_answer = keeps_answer and not _is_loss_of_peer(answer)
            if keeps_answer:
                answers.append(answer)
                continue
        message = guilty.get(rank, reason)
        if rank not in guilty and answer is None:
            message += f", and this rank did not stop{_stuck_at(point, rank)}"
        detail = answer.detail if isinstance(answer, Failure) else point.log_tails.get(rank, "")
        answers.append(
            Failure(
                rank=rank,
                status=cause.status if rank in guilty else status,
                error_type=cause if rank in guilty else Cause.PEER_FAILED,
                message=message,
                detail=detail,
                worker_reusable=answer is not None and answer.worker_reusable,
            )
        )
    return tuple(answers)


def with_losses(answers: Sequence[RankAnswer], reasons: Sequence[str]) -> tuple[RankAnswer, ...]:
    """Return the answers with NodeLost or WorkerLost for ranks that lost their node or device.

    Only failures with status lost or timeout are changed.

    Args:
        reasons: `WorkerHandle.lost_because` of each rank. It begins with "node " if the node is
            lost; "" if the rank is not lost.
    """
    checked = []
    for answer, reason in zip(answers, reasons, strict=True):
        is_loss = isinstance(answer, Failure) and answer.status in (Status.LOST, Status.TIMEOUT)
        if reason and isinstance(answer, Failure) and is_loss:
            cause = Cause.NODE_LOST if reason.startswith("node ") else Cause.WORKER_LOST
            answer = replace(answer, status=Status.LOST, error_type=cause, message=reason)
        checked.append(answer)
    return tuple(checked)


def _is_loss_of_peer(failure: Failure) -> bool:
    """Return whether NCCL or gloo report by this failure that another rank is gone."""
    if failure.error_type == "RuntimeError":
        return any(words in failure.message for words in _LOSS_WORDS)
    return failure.error_type in _LOSS_TYPES


def _ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as `rank 1`, `ranks 1, 2 and 5` or `ranks 0 to 1022 and 1024`."""
    consecutive: list[list[int]] = []
    for rank in ranks:
        if consecutive and rank == consecutive[-1][-1] + 1:
            consecutive[-1].append(rank)
        else:
            consecutive.append([rank])
    texts: list[str] = []
    for row in consecutive:
        texts += [f"{row[0]} to {row[-1]}"] if len(row) >= _RANGE_LENGTH else map(str, row)
    *others, last = texts
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(others)}{' and ' * bool(others)}{last}"
