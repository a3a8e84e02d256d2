"""Charts of a run: their data, points as bars or as lines, and which charts apply.

Each module of this folder except `grammar` lists its charts in CHARTS. The page begins with the
chart that answers the question of the job, which `--chart` draws too; the others follow by their
`position`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import pandas as pd

from raybench.analysis.answer import RATIO_METRICS, RunAnswer
from raybench.analysis.rows import (
    ScaledRow,
    distinguishing_settings,
    setting_of,
    setting_order,
    varying,
)
from raybench.analysis.run_data import RunData
from raybench.report import formatting
from raybench.report.charts.grammar import (
    MOST_BARS,
    MOST_LINES,
    MOST_PANELS,
    Bar,
    BarLayout,
    Figure,
    LineLayout,
    Mark,
    bar_panels,
    draw_figure,
    line_panel,
)
from raybench.report.documents import Table
from raybench.report.point_settings import settings_words, short_name
from raybench.report.words.reasons import not_compared_words
from raybench.report.words.run import machine_of_run

# Up to so many lines share one panel; more cannot be distinguished.
_FEW_LINES = 4
# Settings in which the bars of one panel may differ.
_BAR_SETTINGS = ("batch", "world_size", "size_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Step times of a point by rank and iteration."""

    row: ScaledRow
    # A row for each rank, a column for the first of each group of iterations.
    times_ms: pd.DataFrame
    # The median of all samples.
    median_ms: float


@dataclass(frozen=True, kw_only=True)
class ChartData:
    """The data of the charts of a run."""

    answer: RunAnswer
    # The table `devices` of the run.
    devices: pd.DataFrame = field(default_factory=pd.DataFrame)
    # TELEMETRY_COLUMNS of the table `telemetry`; empty if nothing was sampled.
    telemetry: pd.DataFrame = field(default_factory=pd.DataFrame)
    # The points of the heat maps.
    rank_times: Sequence[RankTimes] = ()

    @cached_property
    def rows(self) -> list[ScaledRow]:
        """Return one row per point of any status, over all rounds."""
        return list(self.answer.data.rows)

    @property
    def ranks(self) -> str:
        """Return `GPUs` or `workers`."""
        return self.answer.data.ranks

    @property
    def rate(self) -> str:
        """Return the unit of the throughput, such as `samples/s` or `tokens/s`."""
        return f"{self.answer.asked.items}/s"

    @property
    def measured(self) -> list[ScaledRow]:
        """Return the points that are ok and have a step time."""
        return [row for row in self.rows if row.status == "ok" and row.step_ms_p50 is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of a run."""

    # Returns None if the run has no such chart.
    draw: Callable[[ChartData], Figure | None]
    # The page sorts its charts by this number.
    position: int
    # Order in which charts are tried as the answer to the question; None: never the answer.
    answer_order: int | None = None
    # The chart answers only questions about one of RATIO_METRICS.
    is_of_ratios: bool = False
    # The page omits the chart unless it is the answer.
    is_only_first: bool = False


@cache
def _all_charts() -> tuple[Chart, ...]:
    """Return the CHARTS of all modules of this folder, in the order of the page."""
    charts: list[Chart] = []
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        charts += getattr(importlib.import_module(module.name), "CHARTS", ())
    return tuple(sorted(charts, key=lambda chart: chart.position))


def main_figure(data: ChartData) -> Figure | None:
    """Return the figure that answers the question of the job; None if nothing was measured."""
    asks_for_ratio = data.answer.asked.metric in RATIO_METRICS
    charts = [chart for chart in _all_charts() if chart.answer_order]
    for chart in sorted(charts, key=lambda chart: chart.answer_order or 0):
        if asks_for_ratio or not chart.is_of_ratios:
            figure = chart.draw(data)
            if figure is not None:
                return figure
    return None


def other_figures(data: ChartData, main: Figure | None) -> list[Figure]:
    """Return the figures of the page in order, except the main figure."""
    figures = []
    for chart in _all_charts():
        # Some charts are drawn only as the main figure.
        if chart.is_only_first:
            continue
        figure = chart.draw(data)
        is_main = figure is not None and main is not None and figure.anchor == main.anchor
        if figure is not None and not is_main:
            figures.append(figure)
    return figures


def draw_main_figure(data: ChartData, kind: str) -> bytes | None:
    """Return the main figure as a file of the `kind` svg or png; None if nothing was measured."""
    figure = main_figure(data)
    if figure is None:
        return None
    run, versions = data.answer.data.run, data.answer.data.versions
    names = [name for name in ("torch", "nccl") if name in versions]
    software = ", ".join(f"{name} {versions[name]}" for name in names)
    facts = (machine_of_run(data.answer.data), software, formatting.plain(run.run_id))
    return draw_figure(
        figure,
        kind,
        title=f"{figure.title} ({formatting.plain(run.job_name)})",
        below="; ".join(filter(None, facts)),
    )


def why_no_figure(data: RunData) -> str:
    """Return why a run has no main figure, as the end of a sentence."""
    if not data.rows:
        return "no point of this run has been finished yet"
    statuses = dict.fromkeys(formatting.STATUS_WORDS[row.status] for row in data.rows)
    return f"no point of this run was measured ({', '.join(statuses)})"


def in_order(rows: Sequence[ScaledRow], fastest: Collection[str] = ()) -> list[ScaledRow]:
    """Return points sorted by the settings that vary; settings in `fastest` vary fastest."""
    return sorted(rows, key=_sort_key(rows, fastest))


def _sort_key(
    rows: Sequence[ScaledRow], last_names: Collection[str]
) -> Callable[[ScaledRow], list[Any]]:
    """Return a sort key by the settings in which rows differ, settings in `last_names` last."""
    names = sorted(distinguishing_settings(rows), key=lambda name: name in last_names)
    return lambda row: [setting_order(setting_of(row, name)) for name in names]


def point_name(row: ScaledRow, names: Iterable[str], ranks_noun: str) -> str:
    """Return the first lines of a tooltip: the settings `names` of a point, and its id."""
    return f"{settings_words(row, names, ranks_noun)}\npoint {row.point_id}".strip()


def line_name(row: ScaledRow, names: Sequence[str], ranks_noun: str) -> str:
    """Return the settings `names` in words, for the legend; the workload without settings."""
    return settings_words(row, names, ranks_noun) or formatting.plain(row.workload)


def note_on_drawn(drawn: int, count: int) -> str:
    """Return " 3 of 5 points are drawn; the table has all."; "" if all points are drawn."""
    return f" {drawn} of {count} points are drawn; the table has all." if drawn < count else ""


def why_not_drawn(row: ScaledRow) -> str:
    """Return why a chart lacks a point, as the end of a sentence."""
    if row.status != "ok":
        return formatting.STATUS_WORDS[row.status]
    if row.why is not None:
        return formatting.plain(not_compared_words(row.why))
    return "was not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class BarFigure:
    """Titles, layout and table of a figure of bars."""

    anchor: str
    title: str
    note: str
    layout: BarLayout
    # Values that the table of all points lacks.
    table: Table | None = None


def bar_figure(
    data: ChartData, figure: BarFigure, points: Sequence[tuple[ScaledRow, Sequence[Mark]]]
) -> Figure:
    """Return a figure with a bar for each of the first 72 points.

    Bars of one panel differ in batch, number of ranks or size; other settings make panels.

    Args:
        data: the data of the run.
        figure: titles and layout.
        points: at least one, each with its marks for `bar_panels`.
    """
    rows = [row for row, _ in points]
    names, ranks_noun = distinguishing_settings(rows), data.ranks
    bar_settings = [name for name in names if name in _BAR_SETTINGS]
    panel_settings = [name for name in names if name not in bar_settings]
    drawn = points[:MOST_BARS]
    panel_names = [settings_words(row, panel_settings, ranks_noun) for row, _ in drawn]
    # Panels with a single bar each would waste room: then all settings name the bar.
    has_panels = len(drawn) >= 2 * len(set(panel_names))
    bars = []
    for panel_name, (row, marks) in zip(panel_names, drawn, strict=True):
        first_lines = point_name(row, names, ranks_noun)
        with_name = [{**mark, "tip": f"{first_lines}\n{mark['tip']}"} for mark in marks]
        if has_panels:
            name = settings_words(row, bar_settings, ranks_noun)
            bars.append(Bar(panel=panel_name, name=name, marks=with_name))
        else:
            bars.append(Bar(panel="", name=short_name(row, names, ranks_noun), marks=with_name))
    return Figure(
        anchor=figure.anchor,
        title=figure.title,
        note=figure.note + note_on_drawn(len(drawn), len(points)),
        panels=bar_panels(bars, figure.layout),
        table=figure.table,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePoint:
    """A point of a figure of lines."""

    row: ScaledRow
    x: float
    # A point without y is a cross on the axis if `is_on_axis`, otherwise a name below the panel.
    y: float | None
    # The tooltip after the settings and the id of the point.
    tip: str = ""
    # Interval of y.
    low: float | None = None
    high: float | None = None
    # Text beside the point if the point ends its line.
    number: str = ""
    is_on_axis: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFigure:
    """Titles, layout and settings of a figure of lines."""

    anchor: str
    title: str
    note: str
    layout: LineLayout
    # Settings in which the points of one line may differ, such as the setting along x.
    within_line: Sequence[str]
    # Settings whose values are lines; each combination of other settings is a panel.
    between_lines: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PanelMarks:
    """The marks of a panel, and the points that are not drawn."""

    title: str
    marks: Sequence[Mark]
    # Reason why points are not drawn -> names of the points.
    missing: Mapping[str, Sequence[str]]

    @property
    def missing_sentence(self) -> str:
        """Return a sentence that names the points that are not drawn, or ""."""
        phrases = [f"{', '.join(names)}: {why}" for why, names in self.missing.items()]
        return f"Not drawn: {'; '.join(phrases)}." if phrases else ""

    @property
    def has_line(self) -> bool:
        """Return whether at least one line has values at two x."""
        x_of_line: dict[str, set[float]] = {}
        for mark in self.marks:
            if mark["y"] is not None:
                x_of_line.setdefault(mark["line"], set()).add(mark["x"])
        return any(len(x_values) > 1 for x_values in x_of_line.values())


def line_figure(data: ChartData, figure: LineFigure, points: Sequence[LinePoint]) -> Figure | None:
    """Return points as at most 7 lines in 8 panels; None if no line has values at two x."""
    sort_key = _sort_key([point.row for point in points], figure.within_line)
    points = sorted(points, key=lambda point: sort_key(point.row))
    points_of_panel, all_lines = _panels_and_lines(points, figure, data.ranks)
    lines = all_lines[:MOST_LINES]
    names = varying([point.row for point in points])
    drawn = []
    for title, lines_and_points in list(points_of_panel.items())[:MOST_PANELS]:
        shown = [(line, point) for line, point in lines_and_points if line in lines]
        drawn.append(_marks_of_panel(title, shown, figure.within_line, names, data.ranks))
    if not any(panel.has_line for panel in drawn):
        return None
    note = figure.note
    limits = []
    if len(drawn) < len(points_of_panel):
        limits.append(f"{len(drawn)} of {len(points_of_panel)} charts")
    if len(lines) < len(all_lines):
        limits.append(f"{len(lines)} of {len(all_lines)} lines")
    if limits:
        note += f" The first {' and '.join(limits)} are drawn; the table of the points has all."
    lines_with_marks = {mark["line"] for panel in drawn for mark in panel.marks}
    legend = [line for line in lines if line in lines_with_marks]
    panels = []
    for panel in drawn:
        if panel.marks:
            missing = panel.missing_sentence
            panels.append(
                line_panel(panel.marks, legend, figure.layout, title=panel.title, missing=missing)
            )
        elif panel.missing:
            note += f" Not drawn: {panel.title}: {', '.join(panel.missing)}."
    return Figure(anchor=figure.anchor, title=figure.title, note=note, panels=panels)


def _marks_of_panel(
    title: str,
    lines_and_points: Sequence[tuple[str, LinePoint]],  # (line, point) of the panel
    within_line: Sequence[str],  # settings in which the points of one line may differ
    names: Sequence[str],  # all settings that vary
    ranks_noun: str,  # `GPUs` or `workers`
) -> _PanelMarks:
    """Return the marks of a panel, and the names of points without a value."""
    marks: list[Mark] = []
    missing: dict[str, list[str]] = {}  # reason -> names of points
    has_several_lines = len({line for line, _ in lines_and_points}) > 1
    varying_within_line = [name for name in within_line if name in names]
    for line, point in lines_and_points:
        # A point without y is drawn as a cross on the axis, or only named below the panel.
        if point.y is None and not point.is_on_axis:
            settings = settings_words(point.row, varying_within_line, ranks_noun)
            name = ", ".join(filter(None, (line if has_several_lines else "", settings)))
            missing.setdefault(why_not_drawn(point.row), []).append(name)
            continue
        optional = {"low": point.low, "high": point.high, "number": point.number}
        tip = f"{point_name(point.row, names, ranks_noun)}\n{point.tip}"
        marks.append({"x": point.x, "y": point.y, "line": line, **optional, "tip": tip})
    return _PanelMarks(title=title, marks=marks, missing=missing)


def _panels_and_lines(
    points: Sequence[LinePoint], figure: LineFigure, ranks_noun: str
) -> tuple[dict[str, list[tuple[str, LinePoint]]], list[str]]:
    """Return title of a panel -> its (line, point); and all lines in order."""
    rows = [point.row for point in points]
    names = varying(rows, left_out=figure.within_line)
    combinations = {_texts_of_settings(row, names) for row in rows}
    # A few combinations of settings are lines of a single panel.
    if len(combinations) <= _FEW_LINES:
        line_settings = names
    else:
        line_settings = [name for name in names if name in figure.between_lines]
    panel_settings = [name for name in names if name not in line_settings]
    points_of_panel: dict[str, list[tuple[str, LinePoint]]] = {}
    for point in points:
        title = settings_words(point.row, panel_settings, ranks_noun)
        line = line_name(point.row, line_settings, ranks_noun)
        points_of_panel.setdefault(title, []).append((line, point))

    def line_order(row: ScaledRow) -> list[Any]:
        return [setting_order(setting_of(row, name)) for name in line_settings]

    lines = [line_name(row, line_settings, ranks_noun) for row in sorted(rows, key=line_order)]
    return points_of_panel, list(dict.fromkeys(lines))


def _texts_of_settings(row: ScaledRow, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(setting_of(row, name)) for name in names)
