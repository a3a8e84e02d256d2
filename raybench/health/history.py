"""The figures of a health check beside those of earlier ones: the monthly baseline. Pure.

The passes of a check run in the same workers, so they do not tell how days differ. A figure is
slower than before by the limit that its test has against earlier checks of the subject.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from raybench.health.expected import limit_elsewhere
from raybench.health.suite import COMM_TEST, SUITE, WAIT_TEST
from raybench.health.verdicts import OTHER_PROGRAMS_TEST
from raybench.records.health import Finding, is_time

# For tests of another version of the suite.
_USUAL_LIMIT = 1.1
_NOT_FIGURES = (WAIT_TEST, COMM_TEST, OTHER_PROGRAMS_TEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """One figure of two checks: the same test of the same subject.

    ratio: its time in `new` over that in `base`, above 1 is slower. limit: days differ by this
    ratio without a cause.
    """

    base: Finding
    new: Finding
    ratio: float
    limit: float

    @property
    def is_slower(self) -> bool:
        """Return whether it takes longer by more than days differ."""
        return self.ratio > self.limit

    @property
    def is_faster(self) -> bool:
        """Return whether it takes less time by more than days differ."""
        return self.ratio * self.limit < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureTrend:
    """One figure over two checks or more.

    values: in order of time. last: the last one against the median of those before.
    """

    values: tuple[float, ...]
    last: FigureChange


def compare_figures(
    base: Iterable[Finding], new: Iterable[Finding], kinds: Iterable[str], least: float
) -> tuple[FigureChange, ...]:
    """Return the figures that both checks have, in the order of the new one.

    kinds: "cuda" or "cpu" of the devices. least: the smallest limit, as a ratio.
    """
    limits = _limits(set(kinds))
    before = dict(_figures(base))
    pairs = [(before[key], one) for key, one in _figures(new) if key in before]
    return tuple(_change(earlier, one, limits, least) for earlier, one in pairs)


def trace_figures(
    checks: Iterable[Iterable[Finding]], kinds: Iterable[str], least: float
) -> tuple[FigureTrend, ...]:
    """Return the figures that two checks or more have.

    checks: their findings, in order of time. kinds, least: as of `compare_figures`.
    """
    limits = _limits(set(kinds))
    series: dict[object, list[Finding]] = {}
    for findings in checks:
        for key, one in _figures(findings):
            series.setdefault(key, []).append(one)
    trends = []
    for *earlier, last in series.values():
        if earlier:
            typical = replace(earlier[-1], value=median(_values(earlier)))
            change = _change(typical, last, limits, least)
            trends.append(FigureTrend(values=_values([*earlier, last]), last=change))
    return tuple(trends)


def _limits(kinds: Collection[str]) -> dict[str, float]:
    """Return by how many times the figures of each test of such devices differ between days."""
    return {
        name: limit_elsewhere(test)
        for kind, tests in SUITE.items()
        if kind in kinds
        for test in tests
        for name in (test.name, test.between_nodes.name)
    }


def _change(base: Finding, new: Finding, limits: Mapping[str, float], least: float) -> FigureChange:
    earlier, now = _values([base, new])
    time, time_before = (now, earlier) if is_time(new.unit) else (earlier, now)
    limit = max(least, limits.get(new.test, _USUAL_LIMIT))
    ratio = time / time_before if time_before else math.inf
    return FigureChange(base=base, new=new, ratio=ratio, limit=limit)


def _values(findings: Iterable[Finding]) -> tuple[float, ...]:
    return tuple(one.value for one in findings if one.value is not None)


def _figures(findings: Iterable[Finding]) -> Iterator[tuple[object, Finding]]:
    """Yield the findings that tell how fast a subject is, by test and subject."""
    for one in findings:
        is_figure = one.unit and one.value is not None and one.stage != "facts"
        if is_figure and one.test not in _NOT_FIGURES:
            subject = one.subject
            yield (one.test, subject.kind, subject.uuids or subject.name), one
