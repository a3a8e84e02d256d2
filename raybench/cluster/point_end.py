"""The end of a point: collect the answers of its ranks, stop all ranks after a failure, say why.

When a rank fails, the other ranks fail with broken connections or give no answer. These ranks get
the cause PeerFailed, so that the failure of the point is the failure of the rank that caused it.
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

# Error types and words by which NCCL and gloo report that another rank is gone.
_PEER_LOSS_TYPES = (Cause.PEER_FAILED, Cause.SCRIPT_ENDED, "DistBackendError", "DistNetworkError")
_PEER_LOSS_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# Error types that always mean a lost connection. DistBackendError also reports wrong calls of NCCL,
# so its text decides.
_LOST_CONNECTION_TYPES = (Cause.PEER_FAILED, "DistNetworkError")
_NCCL_LOSS_WORDS = ("ncclRemoteError", "remote process exited or there was a network error")
# Lines that Python's and Ray's handlers write when a signal ends the process.
_FATAL_SIGNAL = re.compile(r"Fatal Python error: (.+)|\*\*\* (SIG[A-Z]+) received")
# Description of a signal, such as "Segmentation fault" -> its name.
_SIGNAL_NAMES = {signal.strsignal(number): number.name for number in signal.Signals}
# The most likely cause of the point's failure first. Errors are late, because ranks report the
# death of another rank as an error.
_MOST_LIKELY_CAUSES = (Status.OOM, Status.LOST, Status.ERROR, Status.TIMEOUT)
_MIN_RANGE_LENGTH = 4
_WORKLOADS_FOLDER = "/raybench/workloads/"
_SCRIPT_FILE = f"{_WORKLOADS_FOLDER}scripts/child.py"
_DEATHS = tuple(cause for cause in Cause if cause.is_death)
# A frame in the output of faulthandler.
_FRAME = re.compile(r'^\s*File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True, slots=True)
class Loss:
    """Why no process can use a device any more."""

    # NODE_LOST or WORKER_LOST.
    cause: Cause
    message: str


class RunningRanks(WatchedRanks, Protocol):
    """The ranks of one running point; each kind of cluster implements it."""

    # In rank order.
    devices: Sequence[Device]

    def answers(self, timeout_s: float) -> Mapping[int, RankAnswer]:
        """Return rank -> answer, for the answers since the last call.

        A rank whose process or node is gone has a Failure.

        Args:
            timeout_s: longest wait for the first answer.
        """

    def abort(self) -> None:
        """Tell all ranks to abort their process group; do not wait."""

    def kill(self, ranks: Collection[int]) -> None:
        """Kill the processes of some ranks; `answers` ignores their answers from now on."""

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        """Return rank -> the last 60 lines of output of its process; stdout comes first."""

    def wait_until_free(self, ranks: Collection[int], timeout_s: float) -> Sequence[str]:
        """Wait until the memory of the devices of killed ranks is free again.

        Returns:
            A sentence for each device that still has memory in use after `timeout_s`.
        """
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a point ended."""

    # In rank order.
    answers: tuple[RankAnswer, ...]
    # Ranks whose processes cannot run another point. They are killed, except on lost nodes, and not
    # yet replaced.
    unfit: frozenset[int]
    # Whether the process group was aborted, so that no other point can use the group.
    group_is_gone: bool


def finish_point(
    ranks: RunningRanks, task: Task, tell_hang: Callable[[HangVerdict], None] = lambda _: None
) -> Outcome:
    """Collect the answers of all ranks and return how the point ended.

    Ends the point on all ranks after a failure or a timeout, or `hang_s` after a rank was found to
    hang.

    Args:
        tell_hang: gets the verdict as soon as a rank is found to hang.
    """
    collector = _AnswerCollector(ranks)
    settings = task.settings
    has_peers = len(ranks.devices) > 1
    watch = HangWatch(ranks, settings.hang_s, tell_hang) if has_peers else None
    began_s = time.monotonic()
    collector.collect_watched(settings.timeout_s, watch)
    # True after a failure, and if the point was ended because a rank hangs.
    is_before_limit = time.monotonic() < began_s + settings.timeout_s
    answers = tuple(collector.answers[rank] for rank in sorted(collector.answers))
    # A failed rank breaks the process group, even if the other ranks have answered before.
    is_group_usable = not (collector.missing or collector.failures)
    if is_group_usable and all(answer.worker_reusable for answer in answers):
        return Outcome(answers=answers, unfit=frozenset(), group_is_gone=False)
    is_timeout = bool(collector.missing) and not collector.failures
    hang_finding = watch.finding if watch and is_timeout else None
    if not is_timeout:
        # Wait for the failure of the rank that caused the failures of other ranks.
        collector.collect(timeouts.ABORT_S, is_enough=lambda: _own_failure(collector.failures))
    finished = frozenset(collector.answers)
    ranks.abort()
    # NCCL's abort wakes all waiting ranks. A gloo collective, or any collective of a script, wakes
    # only when the process that it waits for ends. Give the ranks time to write their stacks first.
    needs_kill = is_timeout and (task.is_script or ranks.devices[0].kind == "cpu")
    collector.collect(timeouts.STACK_DUMP_S if needs_kill else timeouts.ABORT_S)
    if needs_kill:
        to_kill = [rank for rank in _ranks_of_verdict(hang_finding) if rank in collector.missing]
        to_kill = to_kill or _hanging_ranks(collector.observe(finished))
        # Expect no answer from a killed rank.
        collector.missing.difference_update(to_kill)
        ranks.kill(to_kill)
        collector.collect(timeouts.ABORT_S)
    observed = collector.observe(finished)
    if is_timeout and is_before_limit:
        # Ranks write their stacks at the time limit, so the logs may have stacks of earlier points.
        observed = replace(observed, log_tails={})
    if is_timeout:
        limit = TimeLimit(
            timeout_s=settings.timeout_s, hang_s=settings.hang_s if is_before_limit else None
        )
        answers = after_timeout(observed, limit, hang_finding)
    else:
        answers = after_failure(observed)
    unfit = frozenset(answer.rank for answer in answers if not answer.worker_reusable)
    # Processes of a lost node cannot be reached.
    on_lost_nodes = {
        answer.rank
        for answer in answers
        if isinstance(answer, Failure) and answer.error_type == Cause.NODE_LOST
    }
    to_kill = sorted(unfit - on_lost_nodes)
    if to_kill:
        ranks.kill(to_kill)
        in_use = "\n".join(ranks.wait_until_free(to_kill, timeouts.MEMORY_FREE_S))
        if in_use:
            answers = tuple(_with_detail(answer, in_use, unfit) for answer in answers)
    return Outcome(answers=answers, unfit=unfit, group_is_gone=True)


def _with_detail(answer: RankAnswer, text: str, failed_ranks: Collection[int]) -> RankAnswer:
    """Append a text to the detail of the answer, if the answer is a Failure of a failed rank."""
    if isinstance(answer, Failure) and answer.rank in failed_ranks:
        return replace(answer, detail=f"{answer.detail}\n{text}".strip())
    return answer


class _AnswerCollector:
    """Collects the answers of the ranks of one point."""

    def __init__(self, ranks: RunningRanks) -> None:
        # Rank -> answer, in order of arrival.
        self.answers: dict[int, RankAnswer] = {}
        self.failures: list[Failure] = []
        self.missing = set(range(len(ranks.devices)))
        self._ranks = ranks
        self._log_tails: dict[int, str] = {}

    def collect(self, timeout_s: float, is_enough: Callable[[], object] = lambda: False) -> None:
        """Add answers until all ranks have answered, `is_enough` is true, or the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while self.missing and not is_enough():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            for rank, answer in self._ranks.answers(left_s).items():
                if rank in self.missing:
                    self.missing.remove(rank)
                    self.answers[rank] = answer
                    if isinstance(answer, Failure):
                        self.failures.append(answer)

    def collect_watched(self, timeout_s: float, watch: HangWatch | None) -> None:
        """Add answers until all ranks have answered, a rank has failed, or the time is up.

        Args:
            watch: also ends the collection `hang_s` after its verdict.
        """
        if watch is None:
            self.collect(timeout_s, is_enough=lambda: self.failures)
            return
        deadline_s = time.monotonic() + timeout_s
        is_over = False
        while self.missing and not self.failures and not is_over:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            self.collect(min(left_s, watch.poll_s), is_enough=lambda: self.failures)
            is_over = watch.is_over(self.missing)

    def observe(self, finished: frozenset[int]) -> PointObservation:
        """Return the answers so far; failures of dead processes get the signal and the log's end.

        Args:
            finished: ranks that answered before the point was ended.
        """
        deaths = [failure for failure in self.failures if failure.error_type in _DEATHS]
        # Rank -> last lines; lines of earlier calls are kept.
        tails = self._log_tails
        tails |= self._ranks.log_tails([*self.missing, *(failure.rank for failure in deaths)])
        answers = dict(self.answers)
        for failure in deaths:
            tail, message = tails.get(failure.rank, ""), failure.message
            if failure.error_type == Cause.WORKER_DIED and (match := _FATAL_SIGNAL.search(tail)):
                # Python writes a description of the signal, Ray its name; the other group is None.
                python_text, signal_name = match.groups()
                signal_name = signal_name or _SIGNAL_NAMES.get(python_text, python_text)
                # Keep a message that names a signal: the worker of a script writes it, and the log
                # of that worker may have older signals.
                if " died by " not in message:
                    message = f"the worker process died by {signal_name}"
            answers[failure.rank] = replace(failure, message=message, detail=tail or failure.detail)
        world_size = len(self._ranks.devices)
        return PointObservation(
            world_size=world_size, answers=answers, finished=finished, log_tails=tails
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointObservation:
    """The answers and logs of a point that was ended."""

    world_size: int
    # Rank -> answer, in order of arrival. Ranks without an answer are called stuck.
    answers: Mapping[int, RankAnswer]
    # Ranks that answered before the point was ended.
    finished: frozenset[int]
    # Rank -> last lines of the process, for stuck and dead ranks.
    log_tails: Mapping[int, str]


def _stuck_ranks(point: PointObservation) -> list[int]:
    return [rank for rank in range(point.world_size) if rank not in point.answers]


def _waits_for(log_tail: str) -> Literal["nothing", "device", "peers", "collective"]:
    """Return what a stuck rank waits for, by the stack in its log; "peers" while it connects."""
    # (path, function) of each frame, innermost first.
    calls = [(frame["path"], frame["function"]) for frame in _main_thread_frames(log_tail)]
    if not calls:
        return "nothing"
    # A script that waits for its parent in `receive` has run its steps; the other ranks have not.
    if any(path.endswith(_SCRIPT_FILE) and name == "receive" for path, name in calls):
        return "collective"
    if any(name == "init_process_group" for _, name in calls):
        return "peers"
    path, function = calls[0]
    # A backward pass counts as a collective, because DDP runs its collectives in the backward pass.
    if "/torch/distributed/" in path or "/torch/autograd/" in path:
        return "collective"
    return "device" if "/torch/cuda/" in path and function == "synchronize" else "nothing"


def _stuck_at(point: PointObservation, rank: int) -> str:
    """Return where a rank is stuck, as `, at net.py:60 in spin`; "" if unknown."""
    if rank in point.answers:
        return ""
    frames = _main_thread_frames(point.log_tails.get(rank, ""))
    if not frames:
        return ""
    # The innermost frame of the workload says more than a frame of Python's or torch's library.
    frame = frames[0]
    for candidate in frames:
        if _WORKLOADS_FOLDER in candidate["path"] or "/lib/python3" not in candidate["path"]:
            frame = candidate
            break
    # `ProcessGroup._form` waits until all ranks have connected.
    if frame["function"] == "_form":
        return ", while it connects to the others: is the network between the hosts open?"
    return f", at {PurePath(frame['path']).name}:{frame['line']} in {frame['function']}"


def _main_thread_frames(log_tail: str) -> list[re.Match[str]]:
    """Return the frames of the main thread, innermost first, in the output of faulthandler."""
    # faulthandler writes the main thread last.
    _, thread_header, frames = log_tail.rpartition("(most recent call first):")
    if not thread_header:
        return []
    return [match for line in frames.splitlines() if (match := _FRAME.match(line))]


def _own_failure(answers: Collection[RankAnswer]) -> Failure | None:
    """Return the first failure that does not come from the loss of another rank, if any."""
    for answer in answers:
        if isinstance(answer, Failure) and not _is_loss_of_peer(answer):
            return answer
    return None


def cause_of(answers: Collection[RankAnswer]) -> Failure | None:
    """Return the failure that most likely made the point fail; None without a failure."""
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    # A rank with PeerFailed has only noticed the failure of another rank.
    own_failures = [failure for failure in failures if failure.error_type != Cause.PEER_FAILED]
    return min(
        own_failures or failures,
        key=lambda failure: _MOST_LIKELY_CAUSES.index(failure.status),
        default=None,
    )


def _hanging_ranks(point: PointObservation) -> list[int]:
    """Return the stuck ranks for which the other ranks most likely wait; by default all."""
    waits = {rank: _waits_for(point.log_tails.get(rank, "")) for rank in _stuck_ranks(point)}
    # The most suspicious first: ranks in the user's code, ranks whose device may run an endless
    # kernel, and ranks that cannot connect although the other ranks have connected.
    for suspicious in ("nothing", "device", "peers"):
        hanging = [rank for rank, waits_for in waits.items() if waits_for == suspicious]
        if hanging:
            return hanging
    return list(waits)


def after_failure(point: PointObservation) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order, of a point that failed before its limit.

    Ranks keep their own failures, and measurements from before the point was ended. The other ranks
    get PeerFailed.
    """
    failures = [answer for answer in point.answers.values() if isinstance(answer, Failure)]
    # `RunningRanks.abort` may have killed these processes, so their ranks are blamed last.
    late_deaths = [
        failure
        for failure in failures
        if failure.rank not in point.finished and failure.error_type == Cause.WORKER_DIED
    ]
    own_failure = _own_failure([failure for failure in failures if failure not in late_deaths])
    if own_failure is not None:
        # No rank is blamed, because the failure is among the answers.
        return _final_answers(
            point,
            blamed={},
            cause=Cause.NO_ANSWER,
            peer_message=f"rank {own_failure.rank} failed",
            peer_status=Status.LOST,
        )
    # No rank has a failure of its own, so blame the stuck ranks.
    if stuck := _stuck_ranks(point):
        message = "no answer, and the others lost the connection to it"
        return _final_answers(
            point,
            blamed={rank: message + _stuck_at(point, rank) for rank in stuck},
            cause=Cause.NO_ANSWER,
            peer_message=f"{_name_ranks(stuck)} failed",
            peer_status=Status.LOST,
        )
    # No rank is stuck, so blame the ranks whose script has ended.
    ended_scripts = {
        failure.rank: failure.message
        for failure in failures
        if failure.error_type == Cause.SCRIPT_ENDED
    }
    if ended_scripts:
        return _final_answers(
            point,
            blamed=ended_scripts,
            cause=Cause.SCRIPT_ENDED,
            peer_message=f"the script of {_name_ranks(sorted(ended_scripts))} had ended",
            peer_status=Status.LOST,
        )
    if late_deaths:
        death = late_deaths[0]
        return _final_answers(
            point,
            blamed={death.rank: death.message},
            cause=Cause.WORKER_DIED,
            peer_message=f"rank {death.rank} failed",
            peer_status=Status.LOST,
        )
    # All ranks have lost another rank, and no rank says why.
    answers = []
    for _, answer in sorted(point.answers.items()):
        if isinstance(answer, Failure) and _is_lost_connection(answer):
            answer = replace(answer, status=Status.LOST)
        answers.append(answer)
    return tuple(answers)


def _is_lost_connection(failure: Failure) -> bool:
    text = failure.message + failure.detail
    is_in_text = any(words in text for words in (*_PEER_LOSS_WORDS, *_NCCL_LOSS_WORDS))
    return is_in_text or failure.error_type in _LOST_CONNECTION_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The limit at which a point was ended."""

    # `measure.timeout_s` of the job.
    timeout_s: float
    # `measure.hang_s` if the point was ended because a rank was found to hang; else None.
    hang_s: float | None = None


def after_timeout(
    point: PointObservation, limit: TimeLimit, finding: HangFinding | None = None
) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order, of a point whose time is up.

    The blamed ranks get Timeout or Hang. The other ranks keep their own answers, or get PeerFailed
    with the status timeout.

    Args:
        point: at least one rank must be unfinished.
        finding: which rank was found to hang, if any.
    """
    # Ranks without an answer when the point was ended.
    late = [rank for rank in range(point.world_size) if rank not in point.finished]
    late_in_verdict = [rank for rank in _ranks_of_verdict(finding) if rank in late]
    # A verdict that names no late rank says that no rank stands out, so blame all late ranks.
    has_verdict = finding is not None and finding.verdict is not None
    if late_in_verdict:
        blamed = late_in_verdict
    elif has_verdict:
        blamed = late
    else:
        blamed = _hanging_ranks(point) or late
    # Rank that is not blamed -> what the rank waited for.
    waits: dict[int, str] = {}
    for rank in late:
        if rank not in blamed:
            # Only a rank in a collective is stopped by `RunningRanks.abort`.
            has_stopped = rank in point.answers
            tail = point.log_tails.get(rank, "")
            waits[rank] = "collective" if has_stopped else _waits_for(tail)
    # Further parts of the message: what the ranks did.
    facts = [f"{_name_ranks(blamed)} gave none"] if len(blamed) > 1 else []
    for awaited, words in (("collective", "in a collective"), ("device", "for the device")):
        waiting = [rank for rank, waits_for in waits.items() if waits_for == awaited]
        if waiting:
            facts.append(f"{_name_ranks(waiting)} waited {words}")
    if point.finished:
        facts.append(f"{_name_ranks(sorted(point.finished))} had finished")
    message = f"no answer within measure.timeout_s = {limit.timeout_s:g} s"
    if limit.hang_s is not None:
        message = f"ended measure.hang_s = {limit.hang_s:g} s after it was found to hang"
    messages = {rank: "; ".join([message + _stuck_at(point, rank), *facts]) for rank in blamed}
    answers = _final_answers(
        point,
        blamed=messages,
        cause=Cause.TIMEOUT if limit.hang_s is None else Cause.HANG,
        peer_message=f"waited for {_name_ranks(blamed)}",
        peer_status=Status.TIMEOUT,
    )
    return tuple(_with_finding(answer, finding, blamed) for answer in answers)


def _with_finding(
    answer: RankAnswer, finding: HangFinding | None, blamed: Collection[int]
) -> RankAnswer:
    """Add the finding to the answer, if the answer is the Failure of a blamed rank."""
    if finding is None or answer.rank not in blamed or not isinstance(answer, Failure):
        return answer
    # Append, because long details are shortened at their start.
    detail = f"{answer.detail}\n\n{finding.description}".strip()
    return replace(answer, hang=finding.verdict, detail=detail)


def _ranks_of_verdict(finding: HangFinding | None) -> list[int]:
    """Return the ranks that the verdict of a finding names, the main suspect first."""
    if finding is None or finding.verdict is None or finding.verdict.rank is None:
        return []
    return [finding.verdict.rank, *finding.verdict.also]


def _final_answers(
    point: PointObservation,
    *,
    blamed: Mapping[int, str],
    cause: Cause,
    peer_message: str,
    peer_status: Status,
) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order.

    Args:
        blamed: blamed rank -> message; these ranks get a Failure with `cause`.
        peer_message, peer_status: for the PeerFailed of the other ranks. They get no PeerFailed if
            they have finished or have failures of their own.
    """
    answers: list[RankAnswer] = []
    for rank in range(point.world_size):
        answer = point.answers.get(rank)
        has_finished = rank in point.finished
        is_blamed = rank in blamed
        if answer is not None and not is_blamed and _keeps_answer(answer, has_finished):
            answers.append(answer)
            continue
        message = blamed.get(rank, peer_message)
        if answer is None and not is_blamed:
            message += f", and this rank did not stop{_stuck_at(point, rank)}"
        detail = answer.detail if isinstance(answer, Failure) else point.log_tails.get(rank, "")
        answers.append(
            Failure(
                rank=rank,
                status=cause.status if is_blamed else peer_status,
                error_type=cause if is_blamed else Cause.PEER_FAILED,
                message=message,
                detail=detail,
                worker_reusable=answer is not None and answer.worker_reusable,
            )
        )
    return tuple(answers)


def _keeps_answer(answer: RankAnswer, has_finished: bool) -> bool:
    """Return whether the answer is a result of the rank itself, not of the point's end."""
    # A measurement counts only if the rank answered before the point was ended.
    if not isinstance(answer, Failure):
        return has_finished
    # `RunningRanks.abort` may have killed a process that died after the point was ended.
    may_be_killed = answer.error_type == Cause.WORKER_DIED and not has_finished
    return not may_be_killed and not _is_loss_of_peer(answer)


def with_losses(
    answers: Sequence[RankAnswer], losses: Sequence[Loss | None]
) -> tuple[RankAnswer, ...]:
    """Return the answers; failures of ranks that lost their node or device say so.

    Only failures with status lost or timeout are changed.

    Args:
        losses: the loss of each rank's worker; None if the worker is usable.
    """
    result = []
    for answer, loss in zip(answers, losses, strict=True):
        if loss and isinstance(answer, Failure) and answer.status in (Status.LOST, Status.TIMEOUT):
            answer = replace(
                answer, status=Status.LOST, error_type=loss.cause, message=loss.message
            )
        result.append(answer)
    return tuple(result)


def _is_loss_of_peer(failure: Failure) -> bool:
    """Return whether NCCL or gloo report by this failure that another rank is gone."""
    if failure.error_type == "RuntimeError":
        return any(words in failure.message for words in _PEER_LOSS_WORDS)
    return failure.error_type in _PEER_LOSS_TYPES


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as `rank 1`, `ranks 1, 2 and 5` or `ranks 0 to 1022 and 1024`."""
    runs: list[list[int]] = []  # of consecutive ranks
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts: list[str] = []
    for run in runs:
        if len(run) >= _MIN_RANGE_LENGTH:
            texts.append(f"{run[0]} to {run[-1]}")
        else:
            texts += map(str, run)
    noun = "ranks" if len(ranks) > 1 else "rank"
    *others, last = texts
    return f"{noun} {', '.join(others)} and {last}" if others else f"{noun} {last}"
