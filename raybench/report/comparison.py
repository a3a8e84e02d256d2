"""What is said of two runs that are compared, whatever the format. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.compare import FASTER, SAME, SLOWER, UNCLEAR
from raybench.analysis.environment_changes import Change
from raybench.analysis.point_changes import PointChange
from raybench.analysis.rounds import records
from raybench.analysis.settings import EXECUTION, setting, setting_order, varying
from raybench.analysis.start_noise import DOCUMENTED, POINTS, REPEATS, RUNS
from raybench.records import FAILURES
from raybench.report import formatting, plain_text
from raybench.report.document import Line, Table
from raybench.report.point_settings import point_names, setting_columns
from raybench.results.run import Run

Row = dict[str, Any]

_ORDER = (SLOWER, FASTER, UNCLEAR, SAME)
_NAMES = (*EXECUTION, "world_size")
# A variable may hold a long list; JSON has all of it.
_MOST_CHARS = 60
_MOST_ROWS = 60
# What changed around the points, where nothing did.
SAME_AROUND = "nothing that the tables tell: devices, driver, versions, variables, commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A run that was named as a repeat, but differs by more than its start."""

    run_id: str
    differs_in: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps its rows
class Comparison:
    """Two runs, compared.

    frame: as `raybench.analysis.compare.compare` gives it. changes: of the environment.
    beside: point_id -> what else changed there. left_out: runs that are no repeats.
    """

    base: Run
    new: Run
    threshold: float
    frame: pd.DataFrame
    changes: Sequence[Change]
    beside: Mapping[str, Sequence[PointChange]]
    left_out: Sequence[LeftOut] = ()

    @cached_property
    def rows(self) -> list[Row]:
        """One for each point: what got worse first, and what changed most of it first."""
        return sorted(records(self.frame), key=_urgency)

    @cached_property
    def compared(self) -> list[Row]:
        """The points that have a step time in both runs."""
        return [row for row in self.rows if formatting.has_value(row["verdict"])]

    @property
    def verdicts(self) -> Counter[str]:
        """How many points have each verdict."""
        return Counter(row["verdict"] for row in self.compared)

    @property
    def broken(self) -> list[Row]:
        """The points that were measured before and fail now."""
        return [r for r in self.rows if r["status_base"] == "ok" and r["status_new"] in FAILURES]

    @property
    def is_regression(self) -> bool:
        """Whether a point is slower, or fails now."""
        return bool(self.verdicts[SLOWER] or self.broken)

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why pairs of points are no experiment on one thing; empty where all of them are."""
        return tuple(
            dict.fromkeys(
                plain_text.plain(row["why"])
                for row in self.compared
                if formatting.has_value(row["why"]) and row["why"].startswith("other ")
            )
        )


def _urgency(row: Row) -> tuple[Any, ...]:
    verdict = row["verdict"]
    place = _ORDER.index(verdict) if verdict in _ORDER else len(_ORDER)
    size = (
        -abs(row["ratio"] - 1)
        if place < _ORDER.index(SAME) and formatting.has_value(row["ratio"])
        else 0
    )
    return (place, size, *(setting_order(setting(row, name)) for name in (*_NAMES, _batch(row))))


def _batch(row: Row) -> str:
    return "global_batch_size" if row["scaling"] == "strong" else "batch_size"


def percent(relative: float) -> str:
    """Write a change with its sign."""
    return (
        f"{relative:+.{1 if abs(relative) >= 0.0995 else 2}%}"
        if formatting.has_value(relative)
        else ""
    )


def shown(comparison: Comparison) -> tuple[list[Row], int]:
    """Select the points with step times in both runs; also count the same ones left out."""
    rows = comparison.compared
    changed = sum(row["verdict"] != SAME for row in rows)
    most = max(changed, _MOST_ROWS)
    return rows[:most], max(0, len(rows) - most)


def table(comparison: Comparison) -> Table:
    """Make the table of the points in `shown`; the verdicts are its last column."""
    rows, _ = shown(comparison)
    unit = formatting.unit_of_times(row["base_ms"] for row in rows)
    columns = setting_columns(comparison.compared)
    settings = tuple(columns)
    heads = (f"base {unit.name}", f"new {unit.name}", "change", "seen from", "verdict")
    return Table(
        columns=(*settings, *heads),
        settings=len(settings),
        rows=tuple(
            (
                *(cells[place] for cells in columns.values()),
                formatting.time_in(unit, row["base_ms"]),
                formatting.time_in(unit, row["new_ms"]),
                _change(row),
                f"{row['least_seen']:.1%}" if formatting.has_value(row["least_seen"]) else "",
                row["verdict"],
            )
            for place, row in enumerate(rows)
        ),
        texts=frozenset({*settings, "verdict"}),
    )


def _change(row: Row) -> str:
    """Write the change and half its interval."""
    low, high = row["ratio_low"], row["ratio_high"]
    half = f" {formatting.half_width((high - low) / 2)}" if formatting.has_value(low) else ""
    return percent(row["ratio"] - 1) + half


def beside(comparison: Comparison) -> list[tuple[str, str]]:
    """(point, what its verdict lacks and what else changed there), where it is not the same."""
    rows = comparison.compared
    found = []
    for row, name in zip(rows, point_names(rows), strict=True):
        phrases = [*([row["why"]] if formatting.has_value(row["why"]) else [])]
        if row["verdict"] != SAME:
            phrases += [_point_change(one) for one in comparison.beside.get(row["point_id"], ())]
            if phrases:
                found.append((name, "; ".join(map(plain_text.plain, phrases))))
    return found


def _point_change(one: PointChange) -> str:
    if isinstance(one.base, bool):
        return f"{one.name} {'now' if one.new else 'before'}, not {'before' if one.new else 'now'}"
    before, now = (formatting.number(value, 3) for value in (one.base, one.new))
    return f"{one.name} {before} -> {now} {one.unit}"


def unpaired(comparison: Comparison) -> list[tuple[str, str]]:
    """(point, how it ended in each run) of the points of both runs that failed in one of them."""
    rows = [row for row in comparison.rows if not formatting.has_value(row["verdict"])]
    rows = [row for row in rows if not absent(row)]
    return [
        (name, f"base: {_status(row['status_base'])}; new: {_status(row['status_new'])}")
        for row, name in zip(rows, point_names(rows), strict=True)
    ]


def absent(row: Row) -> str:
    """Name the run that has no row of the point; empty where both have."""
    for side in ("base", "new"):
        if not formatting.has_value(row[f"status_{side}"]):
            return side
    return ""


def _status(status: Any) -> str:
    return formatting.STATUS_WORDS.get(status, plain_text.plain(status))


def environment(comparison: Comparison) -> list[tuple[str, str]]:
    """List (what, its values before and now) of everything that changed around the points."""
    return [
        (plain_text.plain(one.name), before_and_now(one, _MOST_CHARS)) for one in comparison.changes
    ]


def before_and_now(change: Change, most: int) -> str:
    """Two values of at most so many characters each, such that their difference is seen."""
    values = [plain_text.plain(value) for value in (change.base, change.new)]
    short = [plain_text.shorten(value, most) for value in values]
    if short[0] == short[1]:
        pairs = enumerate(zip(*values, strict=False))
        alike = next((place for place, (a, b) in pairs if a != b), min(map(len, values)))
        short = [
            plain_text.shorten(f"…{value[max(0, alike - most // 3) :]}", most) for value in values
        ]
    return f"{short[0]} -> {short[1]}"


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
    phrases = [
        f"{verdicts[name]} {name}{_span([row for row in rows if row['verdict'] == name])}"
        for name in (SLOWER, FASTER, SAME, UNCLEAR)
        if verdicts[name] or name == SLOWER
    ]
    broken = f"; {len(comparison.broken)} fail now" if comparison.broken else ""
    middle = percent(float(np.median([row["ratio"] for row in rows])) - 1)
    median = f"; the median change is {middle}" if len(rows) > 1 else ""
    return f"Of {plain_text.counted(len(rows), 'point')}: {', '.join(phrases)}{broken}{median}."


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
    text = _between(sorted(counts), "d")
    return f"{text} run" if counts == {1} else f"{text} runs"


def _between(values: Sequence[float], form: str = ".1%") -> str:
    return plain_text.span(f"{min(values):{form}}", f"{max(values):{form}}")


def advice(comparison: Comparison) -> list[str]:
    """Say what to do about points that one run a side cannot decide, and about runs left out."""
    return [
        *_unclear(comparison),
        *_documentation_note(comparison),
        *(
            f"{plain_text.plain(one.run_id)} is left out: it is no repeat, as it differs in "
            f"{', '.join(map(plain_text.plain, one.differs_in))}."
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
    phrases = [
        f"{plain_text.counted(len(rows), 'point')} in {run} only"
        for run, rows in (("BASE", of_base), ("NEW", of_new))
        if rows
    ]
    if not phrases:
        return ""
    both = [row for row in comparison.rows if not absent(row)]
    if of_base and of_new:
        names = ", ".join(formatting.heading(name) for name in _apart_in(of_base, of_new))
        return f"{', '.join(phrases)}{f'; they differ in {names}' if names else ''}."
    alone = of_base or of_new
    values = [_values(alone, name) for name in _disjoint(alone, both)]
    return f"{phrases[0]}: {'; '.join(values)}." if values else f"{phrases[0]}."


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
    phrases = [formatting.setting(name, value) for value in known[:_MOST_VALUES]]
    more = ["…"] if len(known) > _MOST_VALUES else []
    return f"{formatting.heading(name)} {', '.join([*phrases, *more])}"


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
            f"Noise of starts at {plain_text.counted(count, 'point')}: {_SOURCES[name]}."
            for name, count in sources.items()
        ),
    ]


def _threshold(comparison: Comparison) -> str:
    return f"{100 * comparison.threshold:g}%"


def hidden_line(hidden: int) -> Line:
    """Say how many lines of what has not changed are left out."""
    return Line(text=f"and {hidden} more that are the same; `--format json` has all")
