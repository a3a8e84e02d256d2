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
    """The settings on which the number of operations of a step depends."""

    workload: str
    params: tuple[tuple[str, Scalar], ...]
    batch_size: int | None
    # Samples of each rank; None if the step is even.
    shares: tuple[int, ...] | None = None


class PartFailedError(Exception):
    """The step cannot run, and `failure` says why. The caller must set the rank of the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Part(Protocol):
    """This rank's part of the step of a point."""

    @property
    def context(self) -> Context:
        """What the workload is built with."""

    @property
    def share(self) -> RankShare | None:
        """The share of an uneven step; None if the step is even."""

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """Doubts about how the step was divided."""

    @property
    def kind(self) -> StepKind | None:
        """The kind of step whose operations can be counted; None if they cannot."""

    @property
    def has_own_process(self) -> bool:
        """Whether the step runs in a process of its own, below the worker."""

    @property
    def has_ended(self) -> bool:
        """Whether the program of the step has ended by itself, so that its peers fail."""

    @property
    def ended_processes(self) -> frozenset[int]:
        """The ids of processes that were started for the step and have ended."""

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
        """False: the step is no program."""
        return False

    @property
    def ended_processes(self) -> frozenset[int]:
        """An empty set: no processes are started for the step."""
        return frozenset()

    def build(self) -> Workload:
        """Return a new workload. Collective."""
        return self.make(self.context, dict(self.kind.params))
