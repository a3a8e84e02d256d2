"""A check beside an earlier one, figure by figure: the monthly baseline. Pure.

The passes of a check are run in the same workers, so they tell nothing of another day. A figure is
slower than it was by the limit that its verdict has against the subject's earlier checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median

from raybench.health.suite import tests_by_name
from raybench.health.verdicts import limit_elsewhere
from raybench.records.health import COMM_TEST, WAIT_TEST, FigureChange, FigureTrend, Finding

_TIMES = ("µs", "ms")
# A test of another version of the suite.
_USUAL_LIMIT = 1.1


def compare_figures(
    base: Iterable[Finding], new: Iterable[Finding], kinds: Iterable[str], least: float
) -> tuple[FigureChange, ...]:
    """Pair what both checks have read, in the order of the new one.

    kinds: "cuda" or "cpu", of the devices. least: of the limits, as a ratio.
    """
    limits = _limits(kinds)
    before = dict(_figures(base))
    pairs = [(before[key], one) for key, one in _figures(new) if key in before]
    return tuple(_change(earlier, one, limits, least) for earlier, one in pairs)


def trace_figures(
    checks: Iterable[Iterable[Finding]], kinds: Iterable[str], least: float
) -> tuple[FigureTrend, ...]:
    """Follow what two checks or more have read. checks: in order of time. Others as above."""
    limits = _limits(kinds)
    found: dict[object, list[Finding]] = {}
    for findings in checks:
        for key, one in _figures(findings):
            found.setdefault(key, []).append(one)
    trends = []
    for *earlier, last in found.values():
        if earlier:
            typical = replace(earlier[-1], value=median(_values(earlier)))
            change = _change(typical, last, limits, least)
            trends.append(FigureTrend(values=_values([*earlier, last]), last=change))
    return tuple(trends)


def _limits(kinds: Iterable[str]) -> dict[str, float]:
    """Find by how many times each test of these devices differs from day to day, at most."""
    tests = [
        test
        for kind in ("cuda", "cpu")
        if kind in set(kinds)
        for test in tests_by_name(kind).values()
    ]
    return {test.name: limit_elsewhere(test) for test in tests}


def _change(base: Finding, new: Finding, limits: Mapping[str, float], least: float) -> FigureChange:
    earlier, now = _values([base, new])
    time, time_before = (now, earlier) if new.unit in _TIMES else (earlier, now)
    limit = max(least, limits.get(new.test, _USUAL_LIMIT))
    ratio = time / time_before if time_before else math.inf
    return FigureChange(base=base, new=new, ratio=ratio, limit=limit)


def _values(findings: Iterable[Finding]) -> tuple[float, ...]:
    return tuple(one.value for one in findings if one.value is not None)


def _figures(findings: Iterable[Finding]) -> Iterator[tuple[object, Finding]]:
    """Yield what says how fast a subject is, by test and subject."""
    for one in findings:
        is_figure = one.unit and one.value is not None and one.stage != "facts"
        if is_figure and one.test not in (WAIT_TEST, COMM_TEST):
            subject = one.subject
            yield (one.test, subject.kind, subject.uuids or subject.name), one
