"""The letters in tables that say what makes the numbers of a point doubtful."""

from __future__ import annotations

from raybench.analysis.rows import ScaledRow
from raybench.analysis.scaling import NORMAL_LIMITS
from raybench.results.breakdown import is_slowed_by_one_rank
from raybench.results.metrics import is_imprecise

MARKS = {
    "u": "unsteady, the level of the step time still changes",
    "w": "wide, the samples of a start leave more than ±10 % open",
    "h": "host-bound, the device waits for the host",
    "t": "throttled, the clocks were limited by heat or a fault",
    "s": "one rank is slower than the others",
    "c": "crowded, CPU workers share cores",
    "n": "not alone, something else used its devices or nodes at the same time",
    "q": "quick, a short look instead of seconds",
    "b": "no breakdown, the parts exceed the step by more than 10 %",
}


def doubts(row: ScaledRow) -> tuple[str, ...]:
    """Return in words what makes the numbers of a point doubtful, as in ("unsteady", "quick")."""
    found = marks(row)
    words = [MARKS[mark].partition(",")[0] for mark in found if mark in "uwtcnq"]
    if row.is_base_unsteady and "u" not in found:
        words.append("against an unsteady point")
    return tuple(words)


def marks(row: ScaledRow) -> str:
    """Return a letter for each doubt about a point; MARKS explains them."""
    is_ok = row.status == "ok"
    # A GPU at work runs at its power cap: only heat, a fault or an unknown reason is a doubt.
    limits = set(row.throttle_reasons or ("unknown",)) - NORMAL_LIMITS
    found = {
        "u": row.stable is False,
        "w": is_imprecise(row),
        "h": row.host_bound,
        "t": row.throttled and limits,
        "s": is_slowed_by_one_rank(row),
        "c": is_ok and row.crowded,
        "n": is_ok and row.neighbours,
        "q": is_ok and row.quick,
        # The parts of steps that finish no items are not shown.
        "b": row.why_no_breakdown is not None and row.throughput is not None,
    }
    return "".join(mark for mark, is_set in found.items() if is_set)
