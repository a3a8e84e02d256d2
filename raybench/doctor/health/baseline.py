"""A check beside an earlier one, figure by figure: the monthly baseline. Pure.

The passes of a check are run in the same workers, so they tell nothing of another day. A figure is
slower than it was by the limit that its verdict has against the subject's earlier checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raybench.doctor.health.suite import tests_by_name
from raybench.doctor.health.verdicts import limit_elsewhere
from raybench.records.health import COMM_TEST, WAIT_TEST, FigureChange, Finding

_TIMES = ("µs", "ms")
# A test of another version of the suite.
_USUAL_LIMIT = 1.1


def compare_figures(
    base: Iterable[Finding], new: Iterable[Finding], kinds: Iterable[str], least: float
) -> tuple[FigureChange, ...]:
    """Pair what both checks have read, in the order of the new one.

    kinds: "cuda" or "cpu", of the devices. least: of the limits, as a ratio.
    """
    tests = {name: test for kind in set(kinds) for name, test in tests_by_name(kind).items()}
    before = dict(_figures(base))
    found = []
    for key, finding in _figures(new):
        if (earlier := before.get(key)) is None:
            continue
        values = (finding.value, earlier.value)
        time, time_before = values if finding.unit in _TIMES else values[::-1]
        test = tests.get(finding.test)
        limit = max(least, limit_elsewhere(test) if test else _USUAL_LIMIT)
        if time is not None and time_before:
            ratio = time / time_before
            found.append(FigureChange(base=earlier, new=finding, ratio=ratio, limit=limit))
    return tuple(found)


def _figures(findings: Iterable[Finding]) -> Iterator[tuple[object, Finding]]:
    """Yield what says how fast a subject is, by test and subject."""
    for one in findings:
        is_figure = one.unit and one.value is not None and one.stage != "facts"
        if is_figure and one.test not in (WAIT_TEST, COMM_TEST):
            subject = one.subject
            yield (one.test, subject.kind, subject.uuids or subject.name), one
