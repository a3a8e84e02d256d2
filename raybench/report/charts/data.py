"""The data of the charts of a run, and figures of its points as bars or lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from raybench.analysis.rows import ScaledRow
from raybench.analysis.settings import batch_column, setting, setting_order, varying
from raybench.report import formatting, plain_text
from raybench.report.blocks import Table
from raybench.report.charts.grammar import (
    HEIGHT,
    MOST_BARS,
    MOST_LINES,
    MOST_PANELS,
    Figure,
    Mark,
    Panel,
    Spec,
    bar_panels,
    legend_height,
    line_chart,
)
from raybench.report.point_settings import distinguishing_settings, short_name
from raybench.report.summary import Summary

# Up to so many lines can be told apart in one panel.
_FEW_LINES = 4
# Settings that are read along the bars of one panel.
_ALONG = ("batch", "world_size", "size_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Step times of a point in ms: a row for each rank, a column for each range of iterations."""

    row: ScaledRow
    times_ms: pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class ChartData:
    """The data of the charts of a run.

    devices: the table of the run. telemetry: its TELEMETRY_COLUMNS, empty where not sampled.
    rank_times: of the points that `heat_points` chooses.
    """

    summary: Summary
    devices: pd.DataFrame = field(default_factory=pd.DataFrame)
    telemetry: pd.DataFrame = field(default_factory=pd.DataFrame)
    rank_times: Sequence[RankTimes] = ()

    @cached_property
    def rows(self) -> list[ScaledRow]:
        """Return the latest attempt at each point, with what was derived from it."""
        return list(self.summary.rows)

    @property
    def ranks(self) -> str:
        """Return what a rank runs on, in the plural: `GPUs`."""
        return self.summary.ranks

    @property
    def measured(self) -> list[ScaledRow]:
        """Return the points that are ok and have a step time."""
        return [row for row in self.rows if row.status == "ok" and row.step_ms_p50 is not None]


def in_order(rows: Sequence[ScaledRow], last: Collection[str] = ()) -> list[ScaledRow]:
    """Return points sorted by their settings; those named in `last` vary fastest."""
    names = sorted(distinguishing_settings(rows), key=lambda name: name in last)
    return sorted(rows, key=lambda row: [setting_order(setting(row, name)) for name in names])


def point_name(row: ScaledRow, names: Iterable[str], ranks: str) -> str:
    """Return the first lines of a tip: the settings of the point, and its id."""
    return f"{formatting.settings_words(row, names, ranks)}\npoint {row.point_id}".strip()


def line_name(row: ScaledRow, names: Sequence[str], ranks: str) -> str:
    """Return the settings of a point in words; its workload where there are none."""
    return formatting.settings_words(row, names, ranks) or plain_text.plain(row.workload)


def batch_title(rows: Sequence[ScaledRow]) -> str:
    """Return what the batch of these rows counts, as the title of an axis."""
    found = {batch_column(row) for row in rows}
    return "global batch size" if found == {"global_batch_size"} else "batch size per device"


def bar_figure(
    data: ChartData,
    rows: Sequence[ScaledRow],
    marks: Callable[[ScaledRow, str], list[Mark]],
    x: Spec,
    *,
    anchor: str,
    title: str,
    note: str,
    table: Table | None = None,
    **settings: Any,
) -> Figure:
    """Return a figure with a bar for each point, at most 72; its note says where there are more.

    marks: return those of a point, whose settings and id are the second argument.
    settings: of `grammar.bar_chart`.
    """
    shown, names = rows[:MOST_BARS], distinguishing_settings(rows)
    bars = [
        (panel, bar, marks(row, point_name(row, names, data.ranks)))
        for row, (panel, bar) in zip(shown, _bar_names(shown, data.ranks), strict=True)
    ]
    return Figure(
        anchor=anchor,
        title=title,
        note=note + drawn_of(len(shown), len(rows)),
        panels=bar_panels(bars, x, **settings),
        table=table,
    )


def _bar_names(rows: Sequence[ScaledRow], ranks: str) -> list[tuple[str, str]]:
    """Return the title of the panel and the name of the bar of each point.

    Batches, numbers of ranks and sizes are read along the bars of a panel, and all other settings
    tell the panels; where that leaves fewer than two bars a panel, there is one panel for all.
    """
    names = distinguishing_settings(rows)
    along = [name for name in names if name in _ALONG]
    rest = [name for name in names if name not in along]
    titles = [formatting.settings_words(row, rest, ranks) for row in rows]
    if len(rows) < 2 * len(set(titles)):
        return [("", short_name(row, names, ranks)) for row in rows]
    bars = [formatting.settings_words(row, along, ranks) for row in rows]
    return list(zip(titles, bars, strict=True))


def drawn_of(drawn: int, count: int) -> str:
    """Return the sentence that not all points are drawn, after a blank; empty where all are."""
    return f" {drawn} of {count} points are drawn; the table has all." if drawn < count else ""


@dataclass(frozen=True, kw_only=True)
class LineFigure:
    """Declares a figure of points as lines over one of their settings.

    over: the setting along x, and settings that do not matter. lines_by: settings that tell the
    lines of a panel apart; the others that vary tell the panels apart. along, value: where a point
    is drawn; a point without a value is left out, or a cross on the axis where `is_on_axis`.
    tip: what its mark says besides its settings. more: more of its mark, as `low` and `high`.
    among: the points that could be drawn at all. ideal, level: as of `line_chart`.
    """

    anchor: str
    title: str
    note: str
    over: Sequence[str]
    lines_by: Sequence[str]
    x: Spec
    y: Spec
    along: Callable[[ScaledRow], float]
    value: Callable[[ScaledRow], float | None]
    tip: Callable[[ScaledRow], str]
    more: Callable[[ScaledRow], Mark] = lambda row: {}
    among: Callable[[ScaledRow], bool] = lambda row: True
    is_on_axis: Callable[[ScaledRow], bool] = lambda row: False
    ideal: Sequence[tuple[float, float]] = ()
    level: tuple[float, str] | None = None

    def draw(self, data: ChartData) -> Figure | None:
        """Return the figure; None where no line has two points."""
        rows = in_order([row for row in data.rows if self.among(row)], self.over)
        groups, every_line = _panels_and_lines(rows, self.over, self.lines_by, data.ranks)
        lines, names = every_line[:MOST_LINES], varying(rows)

        def mark(line: str, row: ScaledRow) -> Mark:
            name = point_name(row, names, data.ranks)
            place = {"x": self.along(row), "y": self.value(row), "line": line}
            return {**place, "tip": f"{name}\n{self.tip(row)}", **self.more(row)}

        shown = {
            panel: [(line, row) for line, row in some if line in lines]
            for panel, some in [*groups.items()][:MOST_PANELS]
        }
        marks = {
            panel: [mark(line, row) for line, row in some if self._is_drawn(row)]
            for panel, some in shown.items()
        }
        drawn = [(panel, one) for panel, some in marks.items() for one in some]
        places = {(panel, one["line"], one["x"]) for panel, one in drawn if one["y"] is not None}
        if len(places) == len({(panel, line) for panel, line, _ in places}):
            return None
        used = {one["line"] for _, one in drawn}
        legend = [line for line in lines if line in used]
        note = self.note
        counts = ((len(shown), len(groups), "charts"), (len(lines), len(every_line), "lines"))
        few = [f"{some} of {many} {noun}" for some, many, noun in counts if some < many]
        if few:
            note += f" The first {' and '.join(few)} are drawn; the table of the points has all."
        panels = []
        for panel, some in shown.items():
            layers = line_chart(
                marks[panel], legend, self.x, self.y, ideal=self.ideal, level=self.level
            )
            missing = self._missing(some, data)
            height = HEIGHT + legend_height(legend)
            panels.append(Panel(title=panel, layers=layers, missing=missing, height=height))
        return Figure(anchor=self.anchor, title=self.title, note=note, panels=panels)

    def _is_drawn(self, row: ScaledRow) -> bool:
        return self.value(row) is not None or self.is_on_axis(row)

    def _missing(self, members: Sequence[tuple[str, ScaledRow]], data: ChartData) -> str:
        """Return what a panel does not show and why: `Not drawn: batch 256: out of memory`."""
        has_lines = len({line for line, _ in members}) > 1
        reasons: dict[str, list[str]] = {}
        for line, row in members:
            if not self._is_drawn(row):
                place = formatting.settings_words(row, self.over, data.ranks)
                named = ", ".join(filter(None, (line if has_lines else "", place)))
                reasons.setdefault(why_not_drawn(row), []).append(named)
        text = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        return f"Not drawn: {text}." if text else ""


def _panels_and_lines(
    rows: Sequence[ScaledRow], over: Sequence[str], lines_by: Sequence[str], ranks: str
) -> tuple[dict[str, list[tuple[str, ScaledRow]]], list[str]]:
    """Return the lines and rows of each panel, by its title, and the lines of all panels in order.

    A setting that varies tells the lines apart where it is in `lines_by`, else the panels; where
    there are few lines, one panel has them all.
    """
    apart = varying(rows, over)
    of_lines = [name for name in apart if name in lines_by]
    if len({tuple(str(setting(r, name)) for name in apart) for r in rows}) <= _FEW_LINES:
        of_lines = apart
    of_panels = [name for name in apart if name not in of_lines]
    groups: dict[str, list[tuple[str, ScaledRow]]] = {}
    for row in rows:
        title = formatting.settings_words(row, of_panels, ranks)
        groups.setdefault(title, []).append((line_name(row, of_lines, ranks), row))
    by_size = sorted(rows, key=lambda row: [setting_order(setting(row, n)) for n in of_lines])
    return groups, list(dict.fromkeys(line_name(row, of_lines, ranks) for row in by_size))


def why_not_drawn(row: ScaledRow) -> str:
    """Return why a point has no value: its status, or why it has no speed-up."""
    if row.status != "ok":
        return formatting.STATUS_WORDS[row.status]
    return plain_text.plain(row.why) if row.why is not None else "was not measured"
