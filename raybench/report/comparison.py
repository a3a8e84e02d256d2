"""What is said of two runs that are compared, whatever the format. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from raybench.analysis.compare import FASTER, SAME, SLOWER, UNCLEAR
from raybench.analysis.environment_changes import Change
from raybench.analysis.point_changes import PointChange
from raybench.analysis.settings import EXECUTION, setting, setting_order, varying
from raybench.records import FAILURES
from raybench.report import formatting
from raybench.results.run import Run

Row = dict[str, Any]

_ORDER = (SLOWER, FASTER, UNCLEAR, SAME)
_NAMES = (*EXECUTION, "world_size")
# A variable may hold a long list; JSON has all of it.
_MOST_CHARS = 60
_MOST_ROWS = 60


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
        rows = [{str(k): v for k, v in row.items()} for row in self.frame.to_dict("records")]
        return sorted(rows, key=_urgency)

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
                formatting.plain(row["why"])
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
    """Select the points that have step times in both runs, and how many of the same ones are left
    out.
    """
    rows = comparison.compared
    told = sum(row["verdict"] != SAME for row in rows)
    most = max(told, _MOST_ROWS)
    return rows[:most], max(0, len(rows) - most)


def table(comparison: Comparison) -> tuple[list[str], int, list[list[str]]]:
    """Columns, how many of them are settings, and cells, of the points in `shown`."""
    rows, _ = shown(comparison)
    names = varying(comparison.compared, params_first=True)
    unit = formatting.unit_of_times(row["base_ms"] for row in rows)
    heads = (f"base {unit.name}", f"new {unit.name}", "change", "seen from")
    columns = [*map(formatting.heading, names), *heads]
    cells = [
        [
            *(formatting.setting(name, setting(row, name)) for name in names),
            formatting.time_in(unit, row["base_ms"]),
            formatting.time_in(unit, row["new_ms"]),
            _change(row),
            f"{row['least_seen']:.1%}" if formatting.has_value(row["least_seen"]) else "",
            row["verdict"],
        ]
        for row in rows
    ]
    return [*columns, "verdict"], len(names), cells


def _change(row: Row) -> str:
    """Write the change and half its interval."""
    low, high = row["ratio_low"], row["ratio_high"]
    half = f" {formatting.half_width((high - low) / 2)}" if formatting.has_value(low) else ""
    return percent(row["ratio"] - 1) + half


def label(row: Row, names: Sequence[str]) -> str:
    """Name a point by the settings that tell it from the others."""
    told = {
        formatting.heading(name): formatting.setting(name, setting(row, name)) for name in names
    }
    return formatting.settings(told) or row["point_id"]


def beside(comparison: Comparison) -> list[tuple[str, str]]:
    """(point, what its verdict lacks and what else changed there), where it is not the same."""
    rows = comparison.compared
    names = varying(rows, params_first=True)
    found = []
    for row in rows:
        told = [*([row["why"]] if formatting.has_value(row["why"]) else [])]
        if row["verdict"] != SAME:
            told += [_point_change(one) for one in comparison.beside.get(row["point_id"], ())]
            if told:
                found.append((label(row, names), "; ".join(map(formatting.plain, told))))
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
    names = varying(rows, params_first=True)
    return [
        (
            label(row, names),
            f"base: {_status(row['status_base'])}; new: {_status(row['status_new'])}",
        )
        for row in rows
    ]


def absent(row: Row) -> str:
    """Name the run that has no row of the point; empty where both have."""
    for side in ("base", "new"):
        if not formatting.has_value(row[f"status_{side}"]):
            return side
    return ""


def _status(status: Any) -> str:
    return formatting.STATUS_WORDS.get(status, formatting.plain(status))


def environment(comparison: Comparison) -> list[tuple[str, str]]:
    """List (what, its values before and now) of everything that changed around the points."""
    return [
        (formatting.plain(one.name), before_and_now(one, _MOST_CHARS)) for one in comparison.changes
    ]


def before_and_now(change: Change, most: int) -> str:
    """Two values of at most so many characters each, such that their difference is seen."""
    values = [formatting.plain(value) for value in (change.base, change.new)]
    short = [formatting.shorten(value, most) for value in values]
    if short[0] == short[1]:
        pairs = enumerate(zip(*values, strict=False))
        alike = next((place for place, (a, b) in pairs if a != b), min(map(len, values)))
        short = [
            formatting.shorten(f"…{value[max(0, alike - most // 3) :]}", most) for value in values
        ]
    return f"{short[0]} -> {short[1]}"
