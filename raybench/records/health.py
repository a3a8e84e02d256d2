"""What the table `health` holds: the findings of a health check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from raybench.records.metric import Column

SubjectKind = Literal["device", "pair", "node", "cluster"]
# Groups of tests that answer one question; `raybench health --only STAGE` runs one.
Stage = Literal[
    "facts", "alone", "host-links", "pairs", "together", "smoke", "straggler", "burn-in"
]


class Verdict(StrEnum):
    """The result of one test for one subject; the worst first."""

    BAD = "bad"
    UNTESTED = "untested"
    SUSPECT = "suspect"
    UNKNOWN = "unknown"
    HEALTHY = "healthy"

    @property
    def is_slow(self) -> bool:
        """Return whether the figure is beyond the limit of its test."""
        return self in (Verdict.SUSPECT, Verdict.BAD)

    @property
    def is_unhealthy(self) -> bool:
        """Return whether something is to be done about the subject: bad, untested or suspect."""
        return self not in (Verdict.UNKNOWN, Verdict.HEALTHY)


class Action(StrEnum):
    """What to do next about a subject that is not healthy; the gravest first."""

    REPLACE = "replace"
    RESET = "reset"
    SETTING = "setting"
    WATCH = "watch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A device, a pair of devices, a node or the whole cluster, which tests judge.

    uuids: of its devices; of a pair, from and to; empty for the path between two nodes.
    name: for people, "node7 GPU 3". model: of its devices; only subjects of one model are compared.
    """

    kind: Annotated[SubjectKind, Column("", "device, pair, node or cluster")]
    name: Annotated[str, Column("", "its name", name="subject")]
    model: Annotated[str, Column("", "of its devices")]
    uuids: Annotated[tuple[str, ...], Column("", "of its devices; of a pair from and to")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one test for one subject: a row of the table `health`.

    passes: how many of them have a value. value: their median, in `unit`; None where no pass has
    one. expected: what the value was compared with, in words.
    ratio: its time over the time of similar subjects, above 1 is slower; None without any.
    reason: one sentence; empty where healthy. evidence: what else supports the verdict.
    culprit: the name of the subject that makes this one slow; empty where that is itself.
    action: what to do. command: what to type for it, a line each; it is never run.
    """

    test: Annotated[str, Column("", "what was read")]
    stage: Annotated[Stage, Column("", "tests that it is one of")]
    subject: Subject
    passes: Annotated[int, Column("", "in which it was read")]
    value: Annotated[
        float | None, Column("", "median of the passes, in `unit`; null: did not run")
    ] = None
    unit: Annotated[str, Column("", "of value")] = ""
    expected: Annotated[str, Column("", "what it was compared with")] = ""
    ratio: Annotated[
        float | None, Column("", "its time over that of similar subjects; null: there are none")
    ] = None
    verdict: Annotated[Verdict, Column("", "bad, untested, suspect, unknown or healthy")]
    reason: Annotated[str, Column("", "why it is not healthy")] = ""
    evidence: Annotated[str, Column("", "with whom it was tried, and what held")] = ""
    culprit: Annotated[str, Column("", "what it is slow because of; empty: itself")] = ""
    action: Annotated[Action | None, Column("", "replace, reset, setting or watch")] = None
    command: Annotated[str, Column("", "what to type; never run")] = ""


def figure(value: float) -> str:
    """Return a value as text of three digits, or as a whole number from 100 on: `1,234`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".removesuffix(".")


def is_time(unit: str) -> bool:
    """Return whether less is better for figures of this unit: true for all but rates."""
    return not unit.endswith("/s")
