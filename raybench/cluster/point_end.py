"""The end of a point: each rank's answer, all others stopped after a failure, and who is to blame.

A cluster implements `RunningRanks` to reach the ranks of a point. A failure of one rank shows on
the others too, as broken connections or as no answer at all. These become PeerFailed, so that the
failure of the point is their cause.
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
from raybench.records.device import Device
from raybench.records.measurement import Failure, RankAnswer
from raybench.records.status import Cause, Status
from raybench.records.task import Task

# How NCCL's and gloo's collectives report the loss of a peer.
_LOSS_TYPES = (Cause.PEER_FAILED, Cause.SCRIPT_ENDED, "DistBackendError", "DistNetworkError")
_LOSS_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# NCCL's error has one type for lost peers and for wrong calls.
_LOST_TYPES = (Cause.PEER_FAILED, "DistNetworkError")
_NCCL_LOSSES = ("ncclRemoteError", "remote process exited or there was a network error")
# Lines of Python's and Ray's handlers in the log of a process that a signal ends.
_FATAL = re.compile(r"Fatal Python error: (.+)|\*\*\* (SIG[A-Z]+) received")
_SIGNALS = {signal.strsignal(one): one.name for one in signal.Signals}
# Which of several failures is the cause: the peers of a dead rank report broken connections, and
# those of a slow one nothing at all.
_LIKELY_FIRST = (Status.OOM, Status.LOST, Status.ERROR, Status.TIMEOUT)
# From this number on, consecutive ranks are named by the first and the last of them.
_MANY_RANKS = 4
_WORKLOADS = "/raybench/workloads/"
_SCRIPT = f"{_WORKLOADS}scripts/child.py"
_DEATHS = tuple(cause for cause in Cause if cause.is_death)
_FRAME = re.compile(r'^\s*File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')


class RunningRanks(Protocol):
    """The ranks of one running point; a class for each kind of cluster. devices: by rank."""

    devices: Sequence[Device]

    def answers(self, timeout_s: float) -> Mapping[int, RankAnswer]:
        """Return rank -> answer for those that came since the last call, in any order.

        Waits up to `timeout_s` for the first one; may also return early without one. A rank whose
        process has died, or whose node is gone, has a Failure. Raises as `Cluster.run`.
        """

    def abort(self) -> None:
        """Tell all ranks to give up their process group, if they have one. Does not wait."""

    def kill(self, ranks: Collection[int]) -> None:
        """Kill the processes of these ranks; `answers` never returns an answer of them again."""

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        """Return rank -> last 60 lines, stdout then stderr, of any point; "" or absent if none."""

    def wait_until_free(self, ranks: Collection[int], timeout_s: float) -> Sequence[str]:
        """Wait until the memory of killed ranks is freed on their devices.

        Return a sentence for each device where it is not after `timeout_s`; () if free or unknown.
        """
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a point ended. answers: one per rank, in rank order.

    unfit: ranks whose processes can run no other point: killed (but on lost nodes), not replaced.
    group_is_gone: the process group of all ranks cannot be used again.
    """

    answers: tuple[RankAnswer, ...]
    unfit: frozenset[int]
    group_is_gone: bool


def finish_point(ranks: RunningRanks, task: Task) -> Outcome:
    """Collect the answers of all ranks and return how the point ended.

    After a failure, or after `task.settings.timeout_s`, it ends the point on all ranks. Ranks that
    can go on keep their processes; others are killed, except on lost nodes, also after a success.
    Details of their failures say which devices have memory in use 10 s later. Raises as `ranks`.
    """
    point = _Point(ranks)
    limit_s = task.settings.timeout_s
    point.collect(limit_s, enough=lambda: point.failures)
    answers = tuple(point.answers[rank] for rank in sorted(point.answers))
    # A rank that fails takes the group down, also where the others have answered before.
    is_whole = not (point.missing or point.failures)
    if is_whole and all(answer.worker_reusable for answer in answers):
        return Outcome(answers=answers, unfit=frozenset(), group_is_gone=False)
    is_timeout = bool(point.missing) and not point.failures
    if not is_timeout:
        point.collect(timeouts.ABORT_S, enough=lambda: _own_failure(point.failures))
    finished = frozenset(point.answers)
    ranks.abort()
    # NCCL's abort wakes all ranks that wait for each other. A gloo collective wakes only when the
    # process that it waits for ends; so does one of a script, which nobody else can abort. Before
    # that, a rank whose time is up writes its stack.
    by_killing = is_timeout and (task.is_script or ranks.devices[0].kind == "cpu")
    point.collect(timeouts.STACK_DUMP_S if by_killing else timeouts.ABORT_S)
    if by_killing:
        to_kill = _hanging(point.observe(finished))
        point.missing.difference_update(to_kill)
        ranks.kill(to_kill)
        point.collect(timeouts.ABORT_S)
    observed = point.observe(finished)
    answers = after_timeout(observed, limit_s) if is_timeout else after_failure(observed)
    unfit = frozenset(answer.rank for answer in answers if not answer.worker_reusable)
    # Processes of a lost node can neither be reached nor waited for.
    there = [
        answer.rank
        for answer in answers
        if answer.rank in unfit
        and not (isinstance(answer, Failure) and answer.error_type == Cause.NODE_LOST)
    ]
    if there:
        ranks.kill(there)
        kept = "\n".join(ranks.wait_until_free(there, timeouts.MEMORY_FREE_S))
        answers = tuple(
            replace(answer, detail=f"{answer.detail}\n{kept}".strip())
            if kept and isinstance(answer, Failure) and answer.rank in unfit
            else answer
            for answer in answers
        )
    return Outcome(answers=answers, unfit=unfit, group_is_gone=True)


class _Point:
    """The answers of a point so far. answers: by rank, in the order in which they came.

    missing: ranks whose answers are still waited for.
    """

    def __init__(self, ranks: RunningRanks) -> None:
        self.answers: dict[int, RankAnswer] = {}
        self.failures: list[Failure] = []
        self.missing = set(range(len(ranks.devices)))
        self._ranks = ranks
        self._log_tails: dict[int, str] = {}

    def collect(self, timeout_s: float, enough: Callable[[], object] = lambda: False) -> None:
        """Add answers until none is missing, `enough` returns a true value, or time is up."""
        deadline_s = time.monotonic() + timeout_s
        while self.missing and not enough() and (left_s := deadline_s - time.monotonic()) > 0:
            for rank, answer in self._ranks.answers(left_s).items():
                if rank in self.missing:
                    self.missing.remove(rank)
                    self.answers[rank] = answer
                    self.failures += [answer] if isinstance(answer, Failure) else []

    def observe(self, finished: frozenset[int]) -> PointObservation:
        """Return all that is known of the ranks now, with the logs of stuck and dead ones.

        The failure of a dead process gets the end of its log as detail, and its message names the
        signal that the log tells. finished: as in `PointObservation`.
        """
        died = [one for one in self.failures if one.error_type in _DEATHS]
        tails = self._log_tails
        tails |= self._ranks.log_tails([*self.missing, *(failure.rank for failure in died)])
        answers = dict(self.answers)
        for failure in died:
            tail, message = tails.get(failure.rank, ""), failure.message
            if failure.error_type == Cause.WORKER_DIED and (fatal := _FATAL.search(tail)):
                python, name = fatal.groups()
                by = name or _SIGNALS.get(python, python)
                # Its parent may have seen by which, as of a script, whose log has older ones too.
                message = message if " died by " in message else f"the worker process died by {by}"
            answers[failure.rank] = replace(failure, message=message, detail=tail or failure.detail)
        world_size = len(self._ranks.devices)
        return PointObservation(
            world_size=world_size, answers=answers, finished=finished, log_tails=tails
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointObservation:
    """What is known of a point that failed.

    answers: by rank, in the order in which they came; ranks without one are stuck. finished: ranks
    that answered before the others were told to stop. log_tails: by rank, the last lines that
    stuck and dead processes wrote.
    """

    world_size: int
    answers: Mapping[int, RankAnswer]
    finished: frozenset[int]
    log_tails: Mapping[int, str]


def _stuck(point: PointObservation) -> list[int]:
    """Return the ranks without an answer, in ascending order."""
    return [rank for rank in range(point.world_size) if rank not in point.answers]


def _waits_for(log_tail: str) -> Literal["nothing", "device", "peers", "collective"]:
    """Return what a stuck rank waits for, by the stack in its log; "nothing" without a stack.

    "nothing" also if it computes; "peers" while it connects; "collective" in any backward pass.
    """
    calls = [(frame["path"], frame["function"]) for frame in _main_thread(log_tail)]
    if not calls:
        return "nothing"
    # A script has run its steps, while its worker waits for other ranks.
    if any(path.endswith(_SCRIPT) and name == "receive" for path, name in calls):
        return "collective"
    if any(name == "init_process_group" for _, name in calls):
        return "peers"
    path, function = calls[0]
    if "/torch/distributed/" in path or "/torch/autograd/" in path:
        return "collective"
    return "device" if "/torch/cuda/" in path and function == "synchronize" else "nothing"


def _place(point: PointObservation, rank: int) -> str:
    """Return words to append on where a rank is stuck, as `, at net.py:60 in spin`.

    "" if it has answered, or its log has no stack.
    """
    frames = [] if rank in point.answers else _main_thread(point.log_tails.get(rank, ""))
    if not frames:
        return ""
    of_workload = (f for f in frames if _WORKLOADS in f["path"] or "/lib/python3" not in f["path"])
    line = next(of_workload, frames[0])
    if line["function"] == "_form":
        return ", while it connects to the others: is the network between the hosts open?"
    return f", at {PurePath(line['path']).name}:{line['line']} in {line['function']}"


def _main_thread(log_tail: str) -> list[re.Match[str]]:
    """Return the frames of the main thread, the innermost first, where its time was up.

    log_tail: ends with the stacks that faulthandler wrote; empty without them.
    """
    # Of several threads the main one stands last.
    _, thread, frames = log_tail.rpartition("(most recent call first):")
    return [match for line in frames.splitlines() if thread and (match := _FRAME.match(line))]


def _own_failure(answers: Collection[RankAnswer]) -> Failure | None:
    """Return the first failure that is not the loss of a peer; None without one."""
    failures = (answer for answer in answers if isinstance(answer, Failure))
    return next((failure for failure in failures if not _is_loss_of_peer(failure)), None)


def cause_of(answers: Collection[RankAnswer]) -> Failure | None:
    """Return the failure that most likely made the point fail; None if no answer is a failure.

    A failure other than the loss of a peer (PeerFailed) comes first; among those by status: oom,
    lost, error, timeout; then the first in `answers`. Another status raises ValueError.
    """
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    own = [failure for failure in failures if failure.error_type != Cause.PEER_FAILED]
    return min(own or failures, key=lambda one: _LIKELY_FIRST.index(one.status), default=None)


def _hanging(point: PointObservation) -> list[int]:
    """Return the stuck ranks that do not wait for other ranks; all stuck ones if all may wait.

    A rank that waits for its device may be in a collective, or in an endless kernel of its own: it
    hangs only if no rank hangs elsewhere. One that cannot connect hangs where others have, and wait
    in a collective.
    """
    waiting = {rank: _waits_for(point.log_tails.get(rank, "")) for rank in _stuck(point)}
    for harmless in ({"device", "peers", "collective"}, {"peers", "collective"}, {"collective"}):
        if found := [rank for rank, what in waiting.items() if what not in harmless]:
            return found
    return list(waiting)


def after_failure(point: PointObservation) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order, of a point that ended before its limit.

    A rank keeps its own failure, and a measurement from before it was told to stop. The others get
    PeerFailed with status lost. If none has a failure of its own, the first of these is to blame:
    ranks without an answer (NoAnswer), those whose script has ended, one whose process died after
    it was told to stop. Without any, answers stay, but lost connections get the status lost.
    """
    failures = [answer for answer in point.answers.values() if isinstance(answer, Failure)]
    stopped = [one for one in failures if one.rank not in point.finished]
    late = [one for one in stopped if one.error_type == Cause.WORKER_DIED]
    cause = _own_failure([one for one in failures if one not in late])
    if cause is not None:
        return _judge(point, {}, Cause.NO_ANSWER, f"rank {cause.rank} failed", Status.LOST)
    if stuck := _stuck(point):
        unheard = "no answer, and the others lost the connection to it"
        guilty = {rank: unheard + _place(point, rank) for rank in stuck}
        return _judge(point, guilty, Cause.NO_ANSWER, f"{_ranks(stuck)} failed", Status.LOST)
    ended = {one.rank: one.message for one in failures if one.error_type == Cause.SCRIPT_ENDED}
    if ended:
        reason = f"the script of {_ranks(sorted(ended))} had ended"
        return _judge(point, ended, Cause.SCRIPT_ENDED, reason, Status.LOST)
    if late:
        rank, message = late[0].rank, late[0].message
        return _judge(point, {rank: message}, Cause.WORKER_DIED, f"rank {rank} failed", Status.LOST)
    # All ranks lost a peer, and none says why.
    words = (*_LOSS_WORDS, *_NCCL_LOSSES)
    return tuple(
        replace(answer, status=Status.LOST)
        if isinstance(answer, Failure)
        and (
            answer.error_type in _LOST_TYPES
            or any(word in answer.message + answer.detail for word in words)
        )
        else answer
        for _, answer in sorted(point.answers.items())
    )


def after_timeout(point: PointObservation, timeout_s: float) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order, of a point whose time is up.

    Finished ranks keep a measurement; at least one must be unfinished. To blame are the stuck ranks
    not seen to wait, else those that wait for the device, else those that connect, else all stuck
    ones; without any, all unfinished ones. They get Timeout. The others keep a failure of their
    own, or get PeerFailed with the status timeout. timeout_s: for the message.
    """
    late = [rank for rank in range(point.world_size) if rank not in point.finished]
    blamed = _hanging(point) or late
    # One that stopped when it was told to had waited in a collective.
    waited = {
        rank: "collective" if rank in point.answers else _waits_for(point.log_tails.get(rank, ""))
        for rank in late
        if rank not in blamed
    }
    facts = [f"{_ranks(blamed)} gave none"] if len(blamed) > 1 else []
    for what, where in (("collective", "in a collective"), ("device", "for the device")):
        if those := [rank for rank, waited_for in waited.items() if waited_for == what]:
            facts.append(f"{_ranks(those)} waited {where}")
    if point.finished:
        facts.append(f"{_ranks(sorted(point.finished))} had finished")
    message = f"no answer within measure.timeout_s = {timeout_s:g} s"
    guilty = {rank: "; ".join([message + _place(point, rank), *facts]) for rank in blamed}
    return _judge(point, guilty, Cause.TIMEOUT, f"waited for {_ranks(blamed)}", Status.TIMEOUT)


def _judge(
    point: PointObservation, guilty: Mapping[int, str], cause: Cause, reason: str, status: Status
) -> tuple[RankAnswer, ...]:
    """Return the final answer of each rank, in rank order.

    guilty: message of each rank to blame, which fails for `cause`. The others get PeerFailed with
    this reason and status, but what they finished or failed at by themselves stays.
    """
    answers: list[RankAnswer] = []
    for rank in range(point.world_size):
        answer = point.answers.get(rank)
        if rank not in guilty and answer is not None:
            is_own = rank in point.finished
            if isinstance(answer, Failure):
                # The death of a process that was told to stop is no failure of its own.
                is_own = is_own or answer.error_type != Cause.WORKER_DIED
                is_own = is_own and not _is_loss_of_peer(answer)
            if is_own:
                answers.append(answer)
                continue
        message = guilty.get(rank, reason)
        if rank not in guilty and answer is None:
            message += f", and this rank did not stop{_place(point, rank)}"
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
    """Return the answers; ranks lost with their node or device fail as NodeLost or WorkerLost.

    Only failures that have the status lost or timeout change; detail and output stay. reasons: of
    each rank `WorkerHandle.lost_because`, which begins with "node " where the node is lost, or "".
    """
    told = []
    for answer, reason in zip(answers, reasons, strict=True):
        is_loss = isinstance(answer, Failure) and answer.status in (Status.LOST, Status.TIMEOUT)
        if reason and isinstance(answer, Failure) and is_loss:
            cause = Cause.NODE_LOST if reason.startswith("node ") else Cause.WORKER_LOST
            answer = replace(answer, status=Status.LOST, error_type=cause, message=reason)
        told.append(answer)
    return tuple(told)


def _is_loss_of_peer(failure: Failure) -> bool:
    """Return whether the failure is how NCCL or gloo report that another rank is gone."""
    if failure.error_type == "RuntimeError":
        return any(words in failure.message for words in _LOSS_WORDS)
    return failure.error_type in _LOSS_TYPES


def _ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as `rank 1`, `ranks 1, 2 and 5` or `ranks 0 to 1022 and 1024`."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    texts: list[str] = []
    for row in rows:
        texts += [f"{row[0]} to {row[-1]}"] if len(row) >= _MANY_RANKS else map(str, row)
    *others, last = texts
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(others)}{' and ' * bool(others)}{last}"
