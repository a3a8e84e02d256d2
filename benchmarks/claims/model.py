"""A published claim, and how a verdict on it follows from figures of committed runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from raybench.report import formatting

# A published figure without a range holds within this share of it.
NEAR = 0.1
# How far two starts of a point lie apart in 19 of 20 cases, by the three rounds of the flagship run
# on H200s. A figure of one start that is nearer to a limit is left open.
ONE_START = 0.03


class Verdict(Enum):
    """In the order in which they are counted."""

    HOLDS = "holds"
    CONDITION = "holds under a condition"
    FAILS = "does not hold"
    OPEN = "left open by the intervals"
    MEASURED = "measured; no figure is published"
    UNTESTED = "cannot be tested here"
    MISSING = "not answered yet"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number out of the tables of a run.

    low, high: its 95 % interval; None where none is known. is_exact: a count, a size, or text of
    the tables: there is no interval. text: what is shown in place of the number.
    """

    value: float
    runs: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    unit: str = ""
    is_exact: bool = False
    text: str = ""

    def __post_init__(self) -> None:
        assert self.value == self.value, f"a figure of {', '.join(self.runs)} is unknown"

    def __str__(self) -> str:
        """With its unit and half of its interval: `1.91x ±4.7%`."""
        if self.text:
            return self.text
        shown = self._number
        number = f"{shown}{'' if self.unit in ('x', '%') else ' '}{self.unit}".rstrip()
        if self.low is None or self.high is None:
            return number if self.is_exact else f"{number} (± not known)"
        half = (self.high - self.low) / 2
        if self.unit == "%":
            return f"{shown} ±{formatting.number(half, 2)} %"
        return f"{number} {formatting.half_width(half / abs(self.value))}"

    @property
    def _number(self) -> str:
        if self.is_exact and self.value == int(self.value):
            return f"{self.value:,.0f}"
        if 0 < abs(self.value) < 1e-3:
            return f"{self.value:.1e}"
        return formatting.number(self.value, 3)

    @property
    def ends(self) -> tuple[float, float]:
        """The interval; the number itself where none is known."""
        if self.low is None or self.high is None:
            return self.value, self.value
        return self.low, self.high

    @property
    def judged_ends(self) -> tuple[float, float]:
        """The interval; of one start ONE_START to either side, in points where the unit is %."""
        if self.is_exact or self.low is not None:
            return self.ends
        margin = 100 * ONE_START if self.unit == "%" else ONE_START * abs(self.value)
        return self.value - margin, self.value + margin


@dataclass(frozen=True, kw_only=True)
class Within:
    """The rule of a verdict: the whole interval is in a range, outside of it, or neither."""

    least: float = float("-inf")
    most: float = float("inf")

    def holds(self, figure: Figure) -> bool | None:
        """None: the interval crosses an end of the range."""
        low, high = figure.judged_ends
        if self.least <= low and high <= self.most:
            return True
        return False if high < self.least or low > self.most else None


def at_least(least: float) -> Within:
    return Within(least=least)


def at_most(most: float) -> Within:
    return Within(most=most)


def near(published: float) -> Within:
    return Within(least=published * (1 - NEAR), most=published * (1 + NEAR))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One figure and whether it is as published. rule None: shown beside, not judged."""

    name: str
    figure: Figure
    rule: Within | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.rule is None else self.rule.holds(self.figure)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What an article leads its reader to expect.

    published: the figure of the source, or what it says is so. measure: our figures, out of
    committed runs. untested: why nothing here can tell; missing: what was not run yet; then
    measure may be None. says: what the figures are, in words without figures of ours. ask: the
    command or job that answers it.
    """

    id: str
    text: str
    published: str
    ask: str
    measure: Callable[[], Sequence[Case]] | None = None
    untested: str = ""
    missing: str = ""
    says: str = ""

    def find(self) -> Finding:
        """Read the figures, and judge."""
        cases = tuple(self.measure()) if self.measure else ()
        return Finding(claim=self, cases=cases, verdict=_judge(self, cases))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim beside what was measured."""

    claim: Claim
    cases: tuple[Case, ...]
    verdict: Verdict

    @property
    def condition(self) -> str:
        """Where it holds, or may hold, if not everywhere; why it has no verdict."""
        told = {
            Verdict.CONDITION: self._names("only", True),
            Verdict.OPEN: self._names("open", None),
            Verdict.UNTESTED: self.claim.untested,
            Verdict.MISSING: self.claim.missing,
        }
        return told.get(self.verdict, "")

    def _names(self, lead: str, holds: bool | None) -> str:
        names = [case.name for case in self.cases if case.rule and case.holds is holds]
        return f"{lead}: {'; '.join(names)}"

    @property
    def runs(self) -> tuple[str, ...]:
        """Those that its figures are from, each once."""
        return tuple(dict.fromkeys(run for case in self.cases for run in case.figure.runs))


@dataclass(frozen=True, kw_only=True)
class Article:
    """title: what it is about. claims: in its own order."""

    number: int
    title: str
    claims: tuple[Claim, ...]


def _judge(claim: Claim, cases: Sequence[Case]) -> Verdict:
    """All cases decide: one that holds beside one that does not is a condition."""
    if claim.untested or claim.missing:
        return Verdict.UNTESTED if claim.untested else Verdict.MISSING
    found = [case.holds for case in cases if case.rule is not None]
    assert cases, f"claim {claim.id} has no figure"
    if not found:
        return Verdict.MEASURED
    if all(found):
        return Verdict.HOLDS
    if any(found):
        return Verdict.CONDITION
    return Verdict.OPEN if None in found else Verdict.FAILS
