"""The sentences that say what came of a comparison, whatever the format. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from raybench.analysis.compare import FASTER, SAME, SLOWER, UNCLEAR
from raybench.analysis.settings import setting, setting_order, varying
from raybench.analysis.start_noise import DOCUMENTED, POINTS, REPEATS, RUNS
from raybench.report import formatting
from raybench.report.comparison import Comparison, absent, percent

Row = dict[str, Any]

_MOST_VALUES = 6
_MOST_LEFT_OUT = 3
_SOURCES = {
    RUNS: "from runs of the same job in the same environment between which no step is found, or "
    "that were named as repeats; drawn towards what is documented",
    REPEATS: "from the repeats in the runs, which differ by more than is documented for starts",
    POINTS: "by more than documented, as the points of these two runs scatter by more",
    DOCUMENTED: "as documented; no other run of the same job in the same environment tells",
}


def headline(comparison: Comparison) -> str:
    """Give the answer in a sentence."""
    rows, verdicts = comparison.compared, comparison.verdicts
    if not rows:
        return "No point was measured in both runs."
    told = [
        f"{verdicts[name]} {name}{_span([row for row in rows if row['verdict'] == name])}"
        for name in (SLOWER, FASTER, SAME, UNCLEAR)
        if verdicts[name] or name == SLOWER
    ]
    broken = f"; {len(comparison.broken)} fail now" if comparison.broken else ""
    middle = percent(float(np.median([row["ratio"] for row in rows])) - 1)
    median = f"; the median change is {middle}" if len(rows) > 1 else ""
    return f"Of {len(rows)} {_points(len(rows))}: {', '.join(told)}{broken}{median}."


def sensitivity(comparison: Comparison) -> str:
    """Say the least change that could have been seen, and by how many runs."""
    least = [
        row["least_seen"] for row in comparison.compared if formatting.has_value(row["least_seen"])
    ]
    if not least:
        return ""
    runs = " and ".join(f"{_runs(comparison, side)} of {side}" for side in ("base", "new"))
    return (
        f"By {runs}, a point that alone became slower by less than {_between(least)} would not "
        "have been called so."
    )


def _runs(comparison: Comparison, side: str) -> str:
    counts = {int(row[f"{side}_runs"]) for row in comparison.compared}
    told = _between(sorted(counts), "d")
    return f"{told} run" if counts == {1} else f"{told} runs"


def _between(values: Sequence[float], form: str = ".1%") -> str:
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def advice(comparison: Comparison) -> list[str]:
    """Say what to do about points that one run a side cannot decide, and about runs left out."""
    return [
        *_unclear(comparison),
        *_documentation_note(comparison),
        *(
            f"{formatting.plain(one.run_id)} is left out: it is no repeat, as it differs in "
            f"{', '.join(map(formatting.plain, one.differs_in))}."
            for one in comparison.left_out[:_MOST_LEFT_OUT]
        ),
        *_more(len(comparison.left_out) - _MOST_LEFT_OUT),
    ]


def _more(count: int) -> list[str]:
    return [f"{count} more runs are left out likewise."] if count > 0 else []


def _unclear(comparison: Comparison) -> list[str]:
    unclear = [r for r in comparison.compared if r["verdict"] == UNCLEAR and _is_tested(r)]
    if not unclear:
        return []
    what = "1 point is" if len(unclear) == 1 else f"{len(unclear)} points are"
    changed = sum(abs(row["ratio"] - 1) > comparison.threshold for row in unclear)
    more = f", {changed} of them changed by more than {_threshold(comparison)}" if changed else ""
    return [
        f"{what} unclear{more}. More runs tell: sweep the job on either side until there are three "
        "or more, each with a --tag of its side, and compare the tags."
    ]


def _documentation_note(comparison: Comparison) -> list[str]:
    """Verdicts on one run a side suppose a machine as quiet as the documented one."""
    called = [
        row
        for row in comparison.compared
        if row["verdict"] in (SLOWER, FASTER) and row["noise_from"] == DOCUMENTED
    ]
    if not called:
        return []
    what = "1 verdict supposes" if len(called) == 1 else f"{len(called)} verdicts suppose"
    floor = _between([row["noise_floor"] for row in called])
    return [
        f"{what} that two runs of the same thing differ by {floor} here, as documented: no other "
        "run of this job tells. On a noisier machine they may be chance."
    ]


def _is_tested(row: Row) -> bool:
    return formatting.has_value(row["p_value"])


def _span(rows: Sequence[Row]) -> str:
    """By how much points are slower or faster."""
    if not rows or rows[0]["verdict"] not in (SLOWER, FASTER):
        return ""
    return f" (by {_between([abs(row['ratio'] - 1) for row in rows])})"


def one_sided(comparison: Comparison) -> str:
    """How many points only one of the runs has, and by what they differ; empty for none."""
    of_base, of_new = (
        [row for row in comparison.rows if absent(row) == other] for other in ("new", "base")
    )
    told = [
        f"{len(rows)} {_points(len(rows))} in {run} only"
        for run, rows in (("BASE", of_base), ("NEW", of_new))
        if rows
    ]
    if not told:
        return ""
    both = [row for row in comparison.rows if not absent(row)]
    if of_base and of_new:
        names = ", ".join(formatting.heading(name) for name in _apart_in(of_base, of_new))
        return f"{', '.join(told)}; they differ in {names}." if names else f"{', '.join(told)}."
    alone = of_base or of_new
    values = [_values(alone, name) for name in _disjoint(alone, both)]
    return f"{told[0]}: {'; '.join(values)}." if values else f"{told[0]}."


def _apart_in(one: Sequence[Row], other: Sequence[Row]) -> list[str]:
    """Find the settings of which the two have no value in common; else those whose values differ.

    Points of different workloads differ in that: their parameters are not the same ones.
    """
    if {row["workload"] for row in one}.isdisjoint(row["workload"] for row in other):
        return ["workload"]
    names = varying([*one, *other], params_first=True)
    return _disjoint(one, other) or [
        name for name in names if _texts(one, name) != _texts(other, name)
    ]


def _disjoint(one: Sequence[Row], other: Sequence[Row]) -> list[str]:
    names = varying([*one, *other], params_first=True)
    return [name for name in names if _texts(one, name).isdisjoint(_texts(other, name))]


def _texts(rows: Sequence[Row], name: str) -> set[str]:
    return {str(setting(row, name)) for row in rows}


def _values(rows: Sequence[Row], name: str) -> str:
    """Write a setting and the values that it has in these rows."""
    known = sorted({setting(row, name) for row in rows}, key=setting_order)
    told = [formatting.setting(name, value) for value in known[:_MOST_VALUES]]
    more = ["…"] if len(known) > _MOST_VALUES else []
    return f"{formatting.heading(name)} {', '.join([*told, *more])}"


def explanation(comparison: Comparison) -> list[str]:
    """How the verdicts were made, and where the noise is from; empty without a verdict."""
    if not comparison.compared:
        return []
    sources = Counter(
        row["noise_from"] for row in comparison.compared if formatting.has_value(row["noise_from"])
    )
    threshold = _threshold(comparison)
    return [
        "change: of the step time (median; slowest rank; mean of the runs of a side), ± half its "
        "90% interval over starts. seen from: the least change of that point alone that would be "
        f"called. slower, faster: by more than {threshold}, and too large to be chance (at most 2% "
        "of such verdicts are, over all points, if starts differ as was estimated). same: the "
        f"interval is within {threshold}. unclear: neither.",
        *(
            f"Noise of starts at {count} {_points(count)}: {_SOURCES[name]}."
            for name, count in sources.items()
        ),
    ]


def _points(count: int) -> str:
    return "point" if count == 1 else "points"


def _threshold(comparison: Comparison) -> str:
    return f"{100 * comparison.threshold:g}%"
