"""This rank's part of a point's step: the one interface to even steps, uneven steps and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from raybench.job.point import Scalar
from raybench.records.doubts import Doubt
from raybench.records.measurement import Failure, RankShare
from raybench.workloads.base import Context, Workload

Parameters = Mapping[str, Scalar]


class BuildWorkload(Protocol):
    """Builds a workload with a context and the parameters of its class."""

    def __call__(self, context: Context, params: Parameters) -> Workload:
        """Return a new workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """Settings that determine how many operations a step has."""

    workload: str
    params: tuple[tuple[str, Scalar], ...]
    batch_size: int | None
    # Samples of each rank; None if the step is even.
    shares: tuple[int, ...] | None = None


class PartFailedError(Exception):
    """The step cannot run; `failure` says why. The caller must set the rank of the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Part(Protocol):
    """This rank's part of the step of a point."""

    @property
    def context(self) -> Context:
        """The context with which the workload is built."""

    @property
    def share(self) -> RankShare | None:
        """The share of an uneven step; None if the step is even."""

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """Doubts about how the step was divided."""

    @property
    def kind(self) -> StepKind | None:
        """Settings that determine the operations of the step; None if they cannot be counted."""

    @property
    def has_own_process(self) -> bool:
        """Whether the step runs in a child process of the worker."""

    @property
    def has_ended(self) -> bool:
        """Whether the child process has ended by itself, so that other ranks fail."""

    @property
    def ended_processes(self) -> frozenset[int]:
        """Ids of processes that were started for the step and have ended."""

    def build(self) -> Workload:
        """Return a new workload. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPart:
    """The part of a rank whose workload runs in the worker's process."""

    make: BuildWorkload
    context: Context
    kind: StepKind
    share: RankShare | None = None
    doubts: tuple[Doubt, ...] = ()

    @property
    def has_own_process(self) -> bool:
        """False: the step runs in the worker's process."""
        return False

    @property
    def has_ended(self) -> bool:
        """False: there is no child process."""
        return False

    @property
    def ended_processes(self) -> frozenset[int]:
        """An empty set: no processes are started for the step."""
        return frozenset()

    def build(self) -> Workload:
        """Return a new workload. Collective."""
        return self.make(self.context, dict(self.kind.params))
