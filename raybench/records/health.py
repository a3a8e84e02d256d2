"""What a health check reads of devices, paths, nodes and the cluster, and what it says of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from raybench.records.metric import Column

SubjectKind = Literal["device", "pair", "node", "cluster"]
# What tests have in common that are run for one question; `raybench health --only` takes them.
Stage = Literal[
    "facts", "alone", "host-links", "pairs", "together", "smoke", "straggler", "burn-in"
]

# How the problem of a subject begins that was not read because of another one.
NOT_READ = "not read: "
# How the problem of a test begins that ran and came to a wrong result.
WRONG_RESULT = "wrong result: "
# The tests of the stage "straggler", in ms a step of each device: what it computes, how long it
# waits for others, how long it communicates.
COMPUTE_TEST, WAIT_TEST, COMM_TEST = "step compute", "step wait", "step communication"


class Verdict(StrEnum):
    """What is said of one subject in one test; the worst first."""

    BAD = "bad"
    UNTESTED = "untested"
    SUSPECT = "suspect"
    UNKNOWN = "unknown"
    HEALTHY = "healthy"

    @property
    def is_slow(self) -> bool:
        """Whether the figure is beyond the limit of its test."""
        return self in (Verdict.SUSPECT, Verdict.BAD)


class Action(StrEnum):
    """What a person does next about a subject that is not healthy."""

    REPLACE = "replace"
    RESET = "reset"
    SETTING = "setting"
    WATCH = "watch"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTest:
    """One figure that is read of every subject of a kind.

    name: such as "gemm bf16 8192". stage: that it belongs to.
    unit: of its values. is_time: whether less is better; else more is.
    floor: the noise of the figure on a healthy device, as a share of it; no spread between
    subjects counts as less. bad_ratio: how many times as long as those alike a bad device takes.
    meaning: what it is good for, one sentence.
    """

    name: str
    stage: Stage
    kind: SubjectKind
    unit: str
    is_time: bool
    floor: float
    meaning: str
    bad_ratio: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a test says something of.

    uuids: of its devices; of a pair, from and to. name: as people read it, "node7 GPU 3".
    model: of its devices, by which alike are compared with alike; of CPUs their name.
    """

    kind: Annotated[SubjectKind, Column("", "device, pair, node or cluster")]
    name: Annotated[str, Column("", "its name", name="subject")]
    model: Annotated[str, Column("", "of its devices")]
    uuids: Annotated[tuple[str, ...], Column("", "of its devices; of a pair from and to")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one pass of one test read of one subject.

    pass_number: counts from 1. value: None where the test did not run.
    problem: what is wrong whatever the value, as wrong bits, grown errors, or why it did not run.
    A fact, which is never held against those of others, has neither where nobody tells it.
    point_id: of the row of `points` that holds its samples; None for a fact.
    """

    test: HealthTest
    subject: Subject
    pass_number: int
    value: float | None
    problem: str | None = None
    point_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is said of one subject in one test: a row of the table `health`.

    value: the median of its passes, in `unit`. expected: what it was held against, in words.
    ratio: of the time it took to that of the subjects alike (above 1 is slower); None where there
    are none.
    reason: one sentence; empty where healthy. evidence: with whom it was tried, and what held.
    culprit: the name of the subject that this one is slow because of; empty where it is itself.
    action, command: what to do, and what to type (a line each), which is never run.
    """

    test: Annotated[str, Column("", "what was read")]
    stage: Annotated[Stage, Column("", "tests that it is one of")]
    subject: Subject
    passes: Annotated[int, Column("", "in which it was read")]
    value: Annotated[float | None, Column("", "median of the passes, in `unit`; null: did not run")]
    unit: Annotated[str, Column("", "of value")]
    expected: Annotated[str, Column("", "what it was held against")]
    ratio: Annotated[float | None, Column("", "its time to that of those alike; null: none are")]
    verdict: Annotated[Verdict, Column("", "bad, untested, suspect, unknown or healthy")]
    reason: Annotated[str, Column("", "why it is not healthy")] = ""
    evidence: Annotated[str, Column("", "with whom it was tried, and what held")] = ""
    culprit: Annotated[str, Column("", "what it is slow because of; empty: itself")] = ""
    action: Annotated[Action | None, Column("", "replace, reset, setting or watch")] = None
    command: Annotated[str, Column("", "what to type; never run")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one direction of a pair carried: a row of the table `links`, the median of its passes.

    from_uuid, to_uuid: devices, or "host" for the memory of the device's node.
    kind: how the bytes went, as "copy", "nccl", "gloo", "h2d", "d2h".
    message_bytes: of one message. gb_per_s, latency_us: None where not measured.
    """

    from_uuid: Annotated[str, Column("", "device, or host")]
    to_uuid: Annotated[str, Column("", "device, or host")]
    from_name: Annotated[str, Column("", "its name")]
    to_name: Annotated[str, Column("", "its name")]
    kind: Annotated[str, Column("", "how the bytes went")]
    message_bytes: Annotated[int, Column("bytes", "of one message")]
    gb_per_s: Annotated[float | None, Column("GB/s", "bandwidth")]
    latency_us: Annotated[float | None, Column("us", "of the smallest message")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastValue:
    """What an earlier check read of a subject that it called healthy. Fields as of `Finding`."""

    run_id: str
    test: str
    subject: Subject
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """One figure of two checks: the same test of the same subject.

    ratio: of the time in `new` to that in `base` (above 1 is slower). limit: up to this ratio, and
    its inverse, days differ by themselves.
    """

    base: Finding
    new: Finding
    ratio: float
    limit: float

    @property
    def is_slower(self) -> bool:
        """Whether it takes longer by more than days differ."""
        return self.ratio > self.limit

    @property
    def is_faster(self) -> bool:
        """Whether it takes less by more than days differ."""
        return self.ratio * self.limit < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureTrend:
    """One figure over several checks, two at least.

    values: of each check that has it, in order of time. last: the last one beside the median of
    those before.
    """

    values: tuple[float, ...]
    last: FigureChange


def figure(value: float) -> str:
    """Write a figure with as many digits as it is good for."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".removesuffix(".")
