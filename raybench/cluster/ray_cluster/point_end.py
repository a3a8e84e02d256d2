"""The end of a point: each rank's answer, and after a failure the same end for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from raybench.cluster import failures
from raybench.cluster.failures import PointObservation
from raybench.cluster.ray_cluster.node_agents import NodeAgents
from raybench.cluster.ray_cluster.ray_errors import answer_of, cause_of_death, node_lost
from raybench.records import Answer, Device, Failure, Group

if TYPE_CHECKING:
    from raybench.job.model import Measure

# NCCL's abort takes half a second; a rank that does not answer in this time is stuck.
_GRACE_S = 1.5
_WRITE_S = 0.3
_LOOK_AT_NODES_S = 1.0
# The driver takes back the memory of a process that ended within a second.
_FREE_TIMEOUT_S = 10.0
# Of a process that could replace one.
_START_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """answers: one per rank. unfit: ranks whose processes are dead, and must be replaced.

    group_is_gone: the process group of the point cannot serve another. was_late: as when_late_s.
    """

    answers: tuple[Answer, ...]
    unfit: frozenset[int]
    group_is_gone: bool
    was_late: bool


def finish_point(
    refs: Sequence[Any],
    devices: Sequence[Device],
    group: Group | None,
    settings: Measure,
    tell_abort: Callable[[Group], None],
    agents: NodeAgents,
    prepare: Callable[[Sequence[Device]], None],
) -> Outcome:
    """Collect the answers; after a failure, or when the time is up, end the point on all ranks.

    Ranks that come out of it fit keep their processes; the others' are killed, and the memory of
    their devices is free when this returns, or a failure says that it is not.
    prepare: called when the point is late, so that what will replace these can start meanwhile.
    """
    ranks = _Ranks(refs, devices, agents)
    late_s = when_late_s(settings)
    ranks.collect(late_s, enough=ranks.has_failed)
    was_late = not ranks.has_failed() and len(ranks.answers) < len(refs)
    if was_late:
        prepare(devices)
        ranks.collect(settings.timeout_s - late_s, enough=ranks.has_failed)
    if ranks.has_succeeded():
        return Outcome(
            answers=ranks.in_order(), unfit=frozenset(), group_is_gone=False, was_late=was_late
        )
    is_timeout = not ranks.has_failed() and len(ranks.answers) < len(refs)
    if not is_timeout:
        ranks.collect(_GRACE_S, enough=ranks.has_cause)
    finished = frozenset(ranks.answers)
    if group is not None:
        tell_abort(group)
    # NCCL's abort lets go of all that wait for each other. What ends the wait of a gloo collective
    # is the end of the process that it waits for, and a rank whose time is up writes where it is.
    by_killing = is_timeout and devices[0].kind == "cpu"
    ranks.collect(_WRITE_S if by_killing else _GRACE_S, enough=lambda: False)
    if by_killing:
        ranks.kill(failures.hanging(ranks.seen(finished)))
        ranks.collect(_GRACE_S, enough=lambda: False)
    if is_timeout:
        answers = failures.after_timeout(ranks.seen(finished), settings.timeout_s)
    else:
        answers = failures.after_failure(ranks.seen(finished))
    unfit = frozenset(answer.rank for answer in answers if not answer.worker_reusable)
    answers = ranks.end(answers, unfit)
    return Outcome(answers=answers, unfit=unfit, group_is_gone=group is not None, was_late=was_late)


def when_late_s(settings: Measure) -> float:
    """When a point is late: soon its time is up, and it should have measured what it may.

    The start of other processes disturbs no measurement then, but that of a point that is no good.
    """
    budget_s = settings.repeats * settings.max_seconds
    return min(settings.timeout_s, max(budget_s, settings.timeout_s - _START_S))


class _Ranks:
    """The ranks of a point, as far as they have answered. answers: in the order they came in."""

    def __init__(self, refs: Sequence[Any], devices: Sequence[Device], agents: NodeAgents) -> None:
        self.answers: dict[int, Answer] = {}
        self._waiting = {ref: rank for rank, ref in enumerate(refs)}
        self._devices = devices
        self._agents = agents
        self._looked_s = time.monotonic()
        self._log_tails: dict[int, str] = {}

    def has_failed(self) -> bool:
        return any(isinstance(answer, Failure) for answer in self.answers.values())

    def has_cause(self) -> bool:
        return failures.own_failure(self.answers.values()) is not None

    def has_succeeded(self) -> bool:
        """Whether all have answered and can go on as they are, with their process group.

        A rank that fails takes the group down, also where the others have answered before.
        """
        answers = self.in_order()
        return not (self._waiting or self.has_failed()) and all(a.worker_reusable for a in answers)

    def in_order(self) -> tuple[Answer, ...]:
        return tuple(self.answers[rank] for rank in sorted(self.answers))

    def collect(self, timeout_s: float, enough: Callable[[], bool]) -> None:
        """Take in answers until none is missing, it is enough, or the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while self._waiting and not enough():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            # One by one: `ray.get` of all of them would show one failure and hide the others.
            ready, _ = ray.wait(
                list(self._waiting), num_returns=1, timeout=min(left_s, _LOOK_AT_NODES_S)
            )
            for ref in ready:
                rank = self._waiting.pop(ref)
                self.answers[rank] = answer_of(ref, rank, self._devices[rank])
            self._look_at_nodes()

    def seen(self, finished: frozenset[int]) -> PointObservation:
        died = [rank for rank, answer in self.answers.items() if _is_death(answer)]
        asked = {rank: self._devices[rank] for rank in (*self._waiting.values(), *died)}
        self._log_tails |= self._agents.log_tails(asked)
        return PointObservation(
            world_size=len(self._devices),
            answers={
                rank: _explain(answer, self._log_tails.get(rank, ""))
                for rank, answer in self.answers.items()
            },
            finished=finished,
            log_tails=self._log_tails,
        )

    def kill(self, ranks: Collection[int]) -> None:
        """End their processes; they are not waited for any more."""
        self._waiting = {ref: rank for ref, rank in self._waiting.items() if rank not in ranks}
        self._agents.kill([self._devices[rank] for rank in ranks])

    def end(self, answers: tuple[Answer, ...], unfit: frozenset[int]) -> tuple[Answer, ...]:
        """Kill the processes of the unfit ranks, and wait until their devices are free."""
        lost = {rank for rank, answer in self.answers.items() if _is_lost_node(answer)}
        devices = [self._devices[rank] for rank in sorted(unfit - lost)]
        if not devices:
            return answers
        self._agents.kill(devices)
        kept = "\n".join(self._agents.wait_until_free(devices, _FREE_TIMEOUT_S))
        return tuple(
            replace(answer, detail=f"{answer.detail}\n{kept}".strip())
            if kept and isinstance(answer, Failure) and answer.rank in unfit
            else answer
            for answer in answers
        )

    def _look_at_nodes(self) -> None:
        """A rank on a node that does not answer is lost."""
        if time.monotonic() - self._looked_s < _LOOK_AT_NODES_S:
            return
        self._looked_s = time.monotonic()
        silent = self._agents.silent_nodes()
        for ref, rank in list(self._waiting.items()):
            if self._devices[rank].node_id in silent:
                del self._waiting[ref]
                self.answers[rank] = node_lost(rank, self._devices[rank])


def _explain(answer: Answer, log_tail: str) -> Answer:
    """With the end of its log, if it is that of a process that died."""
    if not (isinstance(answer, Failure) and _is_death(answer)):
        return answer
    explained = replace(answer, detail=log_tail or answer.detail)
    if answer.error_type == "WorkerDied":
        message = f"the worker process {cause_of_death(answer.detail, log_tail)}"
        explained = replace(explained, message=message)
    return explained


def _is_death(answer: Answer) -> bool:
    deaths = ("WorkerDied", "HostOutOfMemory")
    return isinstance(answer, Failure) and answer.error_type in deaths


def _is_lost_node(answer: Answer) -> bool:
    return isinstance(answer, Failure) and answer.error_type == "NodeLost"
