"""The end of a point: collect each rank's answer, and after a failure stop all the others.

A cluster implements `RunningRanks` to reach the ranks of a point.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from raybench.cluster import failures
from raybench.cluster.failures import PointObservation
from raybench.cluster.timeouts import DEFAULT_TIMEOUTS, ClusterTimeouts
from raybench.records import Answer, Cause, Device, Failure, Task


class RunningRanks(ABC):
    """The ranks of one point while it runs, as their cluster reaches them.

    devices: of the ranks, in their order.
    """

    devices: Sequence[Device]

    @abstractmethod
    def answers(self, timeout_s: float) -> Mapping[int, Answer]:
        """Return the answers since the last call, by rank, in the order in which they came.

        Wait at most so long, and return as soon as there is an answer; it may also return early
        without one. The answer of a rank whose process has died, or whose node is gone, is a
        Failure.
        """

    @abstractmethod
    def abort(self) -> None:
        """Tell all ranks to give up their process group, if they have one. Does not wait."""

    @abstractmethod
    def kill(self, ranks: Collection[int]) -> None:
        """Kill the processes of these ranks; `answers` returns nothing of them any more."""

    @abstractmethod
    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        """Return the last lines that the process of each rank wrote, where they can be had."""

    def wait_until_free(self, ranks: Collection[int], timeout_s: float) -> Sequence[str]:
        """Wait until the devices of killed ranks have their memory back.

        Return a sentence for each that has not in time.
        """
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a point ended. answers: one per rank. unfit: ranks whose processes must be replaced.

    group_is_gone: the process group of these ranks cannot be used again.
    """

    answers: tuple[Answer, ...]
    unfit: frozenset[int]
    group_is_gone: bool


def finish_point(
    ranks: RunningRanks, task: Task, timeouts: ClusterTimeouts = DEFAULT_TIMEOUTS
) -> Outcome:
    """Collect the answers; after a failure, or when the time is up, end the point on all ranks.

    Ranks that can go on keep their processes; the others are killed, and the memory of their
    devices is free when this returns, or their failure says that it is not.
    """
    point = _Point(ranks)
    limit_s = task.settings.timeout_s
    point.collect(limit_s, enough=lambda: point.failures)
    answers = point.in_order()
    # A rank that fails takes the group down, also where the others have answered before.
    is_whole = not (point.missing or point.failures)
    if is_whole and all(answer.worker_reusable for answer in answers):
        return Outcome(answers=answers, unfit=frozenset(), group_is_gone=False)
    is_timeout = bool(point.missing) and not point.failures
    if not is_timeout:
        point.collect(timeouts.abort_s, enough=lambda: failures.own_failure(point.failures))
    finished = frozenset(point.answers)
    ranks.abort()
    # NCCL's abort wakes all ranks that wait for each other. A gloo collective wakes only when the
    # process that it waits for ends; so does one of a script, which nobody else can abort. Before
    # that, a rank whose time is up writes its stack.
    by_killing = is_timeout and (task.is_script or ranks.devices[0].kind == "cpu")
    point.collect(timeouts.stack_dump_s if by_killing else timeouts.abort_s)
    if by_killing:
        hanging = failures.hanging(point.observe(finished))
        point.missing.difference_update(hanging)
        ranks.kill(hanging)
        point.collect(timeouts.abort_s)
    observed = point.observe(finished)
    answers = (
        failures.after_timeout(observed, limit_s)
        if is_timeout
        else failures.after_failure(observed)
    )
    unfit = frozenset(answer.rank for answer in answers if not answer.worker_reusable)
    answers = _kill_unfit(ranks, answers, unfit, timeouts.memory_free_s)
    return Outcome(answers=answers, unfit=unfit, group_is_gone=True)


class _Point:
    """The answers of a point so far. answers: by rank, in the order in which they came.

    missing: ranks whose answers are still waited for.
    """

    def __init__(self, ranks: RunningRanks) -> None:
        self.answers: dict[int, Answer] = {}
        self.failures: list[Failure] = []
        self.missing = set(range(len(ranks.devices)))
        self._ranks = ranks
        self._log_tails: dict[int, str] = {}

    def in_order(self) -> tuple[Answer, ...]:
        return tuple(self.answers[rank] for rank in sorted(self.answers))

    def collect(self, timeout_s: float, enough: Callable[[], object] = lambda: False) -> None:
        """Take in answers until none is missing, `enough` returns a true value, or time is up."""
        deadline_s = time.monotonic() + timeout_s
        while self.missing and not enough() and (left_s := deadline_s - time.monotonic()) > 0:
            for rank, answer in self._ranks.answers(left_s).items():
                if rank in self.missing:
                    self.missing.remove(rank)
                    self.answers[rank] = answer
                    self.failures += [answer] if isinstance(answer, Failure) else []

    def observe(self, finished: frozenset[int]) -> PointObservation:
        """Return all that is known of the ranks. finished: as of a `PointObservation`."""
        died = [rank for rank, answer in self.answers.items() if failures.is_death(answer)]
        self._log_tails |= self._ranks.log_tails([*self.missing, *died])
        return PointObservation(
            world_size=len(self._ranks.devices),
            answers={
                rank: failures.explain_death(answer, self._log_tails.get(rank, ""))
                for rank, answer in self.answers.items()
            },
            finished=finished,
            log_tails=self._log_tails,
        )


def _kill_unfit(
    ranks: RunningRanks, answers: tuple[Answer, ...], unfit: frozenset[int], timeout_s: float
) -> tuple[Answer, ...]:
    """Kill the processes of unfit ranks, and wait until the memory of their devices is free.

    Return the answers; failures of unfit ranks name memory that is not free in time.
    """
    # Processes of a lost node can neither be reached nor waited for.
    there = [
        answer.rank
        for answer in answers
        if answer.rank in unfit
        and not (isinstance(answer, Failure) and answer.error_type == Cause.NODE_LOST)
    ]
    if not there:
        return answers
    ranks.kill(there)
    kept = "\n".join(ranks.wait_until_free(there, timeout_s))
    return tuple(
        replace(answer, detail=f"{answer.detail}\n{kept}".strip())
        if kept and isinstance(answer, Failure) and answer.rank in unfit
        else answer
        for answer in answers
    )
