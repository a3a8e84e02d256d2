"""Charts of a run: their data, its points as bars or as lines, and which charts apply.

Each module of this folder except `grammar` lists its charts in CHARTS. The page shows the charts
that apply, in the order of their `position`, after the chart that answers the question of the job.
`--chart` draws only this first chart.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import pandas as pd

from raybench.analysis.answer import RATIOS, RunAnswer
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

# More lines cannot be told apart in one panel.
_FEW_LINES = 4
# Settings in which the bars of one panel differ.
_ALONG = ("batch", "world_size", "size_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Step times of a point by rank and iteration."""

    row: ScaledRow
    # As `rank_by_iteration` returns them.
    times_ms: pd.DataFrame
    # The median of all samples.
    median_ms: float


@dataclass(frozen=True, kw_only=True)
class ChartData:
    """The data of the charts of a run."""

    answer: RunAnswer
    # The table `devices` of the run.
    devices: pd.DataFrame = field(default_factory=pd.DataFrame)
    # The table `telemetry` with TELEMETRY_COLUMNS of `charts.devices`; empty if not sampled.
    telemetry: pd.DataFrame = field(default_factory=pd.DataFrame)
    # Step times of the points that `heat_points` chooses.
    rank_times: Sequence[RankTimes] = ()

    @cached_property
    def rows(self) -> list[ScaledRow]:
        """Return one row per point of any status; its rounds are combined."""
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
    # Charts are tried as the first picture in this order; None: never the first picture.
    answers: int | None = None
    # The first picture only where the answer is one of RATIOS.
    is_of_ratios: bool = False
    # The page omits the chart unless it is the first picture.
    is_only_first: bool = False


@cache
def _all_charts() -> tuple[Chart, ...]:
    """Return the CHARTS of all modules of this folder, in the order of the page."""
    charts: list[Chart] = []
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        charts += getattr(importlib.import_module(module.name), "CHARTS", ())
    return tuple(sorted(charts, key=lambda chart: chart.position))


def main_figure(data: ChartData) -> Figure | None:
    """Return the picture that answers the question of the job; None if nothing was measured."""
    is_ratio = data.answer.asked.metric in RATIOS
    charts = [chart for chart in _all_charts() if chart.answers]
    for chart in sorted(charts, key=lambda chart: chart.answers or 0):
        if is_ratio or not chart.is_of_ratios:
            figure = chart.draw(data)
            if figure is not None:
                return figure
    return None


def other_figures(data: ChartData, first: Figure | None) -> list[Figure]:
    """Return the figures of the page in its order, without `first`, its `main_figure`."""
    figures = []
    for chart in _all_charts():
        figure = None if chart.is_only_first else chart.draw(data)
        if figure is not None and (first is None or figure.anchor != first.anchor):
            figures.append(figure)
    return figures


def draw_main_figure(data: ChartData, kind: str) -> bytes | None:
    """Return the `main_figure` as the bytes of a file, or None. kind: `svg` or `png`."""
    figure = main_figure(data)
    if figure is None:
        return None
    run, versions = data.answer.data.run, data.answer.data.versions
    names = [name for name in ("torch", "nccl") if name in versions]
    software = ", ".join(f"{name} {versions[name]}" for name in names)
    below = (machine_of_run(data.answer.data), software, formatting.plain(run.run_id))
    return draw_figure(
        figure,
        kind,
        title=f"{figure.title} ({formatting.plain(run.job_name)})",
        below="; ".join(filter(None, below)),
    )


def why_no_figure(data: RunData) -> str:
    """Return why `main_figure` returned None, as the end of a sentence."""
    if not data.rows:
        return "no point of this run has been finished yet"
    ended = dict.fromkeys(formatting.STATUS_WORDS[row.status] for row in data.rows)
    return f"no point of this run was measured ({', '.join(ended)})"


def in_order(rows: Sequence[ScaledRow], last: Collection[str] = ()) -> list[ScaledRow]:
    """Return points sorted by `distinguishing_settings`; settings named in `last` vary fastest."""
    return sorted(rows, key=_order(rows, last))


def _order(rows: Sequence[ScaledRow], last: Collection[str]) -> Callable[[ScaledRow], list[Any]]:
    names = sorted(distinguishing_settings(rows), key=lambda name: name in last)
    return lambda row: [setting_order(setting_of(row, name)) for name in names]


def point_name(row: ScaledRow, names: Iterable[str], ranks: str) -> str:
    """Return the first lines of a tip: the settings of a point, then its id."""
    return f"{settings_words(row, names, ranks)}\npoint {row.point_id}".strip()


def line_name(row: ScaledRow, names: Sequence[str], ranks: str) -> str:
    """Return `settings_words`, or the workload where they are empty."""
    return settings_words(row, names, ranks) or formatting.plain(row.workload)


def drawn_of(drawn: int, count: int) -> str:
    """Return the end of a note, " 3 of 5 points are drawn; the table has all.", or ""."""
    return f" {drawn} of {count} points are drawn; the table has all." if drawn < count else ""


def why_not_drawn(row: ScaledRow) -> str:
    """Say why a chart lacks a point, as the end of a sentence."""
    if row.status != "ok":
        return formatting.STATUS_WORDS[row.status]
    if row.why is not None:
        return formatting.plain(not_compared_words(row.why))
    return "was not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class BarFigure:
    """What a figure of bars has besides its points."""

    anchor: str
    title: str
    note: str
    layout: BarLayout
    # Values that the table of all points lacks.
    table: Table | None = None


def bar_figure(
    data: ChartData, figure: BarFigure, points: Sequence[tuple[ScaledRow, Sequence[Mark]]]
) -> Figure:
    """Return a figure with a bar for each point; only the first 72 are drawn, as the note says.

    Bars of one panel differ in batch, number of ranks and size; each combination of other settings
    has panels of its own. Where combinations have fewer than two bars on average, the panels have
    no titles, and each bar is named by all its settings.

    Args:
        data: the data of the run.
        figure: titles and layout.
        points: at least one, each with its marks as `bar_panels` expects them. The name of the
            point is added to their tips.
    """
    rows = [row for row, _ in points]
    names, ranks = distinguishing_settings(rows), data.ranks
    along = [name for name in names if name in _ALONG]
    rest = [name for name in names if name not in along]
    drawn = points[:MOST_BARS]
    panel_names = [settings_words(row, rest, ranks) for row, _ in drawn]
    has_panels = len(drawn) >= 2 * len(set(panel_names))
    bars = []
    for panel_name, (row, marks) in zip(panel_names, drawn, strict=True):
        begin = point_name(row, names, ranks)
        named = [{**mark, "tip": f"{begin}\n{mark['tip']}"} for mark in marks]
        name = settings_words(row, along, ranks) if has_panels else short_name(row, names, ranks)
        bars.append(Bar(panel=panel_name if has_panels else "", name=name, marks=named))
    return Figure(
        anchor=figure.anchor,
        title=figure.title,
        note=figure.note + drawn_of(len(drawn), len(points)),
        panels=bar_panels(bars, figure.layout),
        table=figure.table,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePoint:
    """A point of a figure of lines."""

    row: ScaledRow
    x: float
    # None: the point is a cross on the axis if `is_on_axis`, else it is named below its panel.
    y: float | None
    # The tip after the settings and the id of the point.
    tip: str = ""
    # Interval of y.
    low: float | None = None
    high: float | None = None
    # Written at the end of a line.
    number: str = ""
    is_on_axis: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFigure:
    """What a figure of lines has besides its points."""

    anchor: str
    title: str
    note: str
    layout: LineLayout
    # The setting along x, and other settings in which the points of a line may differ.
    over: Sequence[str]
    # Settings whose values are lines; each combination of other settings is a panel.
    lines_by: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinesOfPanel:
    """The marks of a panel, and the points that it does not draw."""

    title: str
    marks: Sequence[Mark]
    # Why points are not drawn -> their names.
    missing: Mapping[str, Sequence[str]]

    @property
    def text(self) -> str:
        """Return a sentence that names the points that are not drawn, or ""."""
        text = "; ".join(f"{', '.join(names)}: {why}" for why, names in self.missing.items())
        return f"Not drawn: {text}." if text else ""

    @property
    def has_line(self) -> bool:
        """Return whether any line has values at two x."""
        ends = {(mark["line"], mark["x"]) for mark in self.marks if mark["y"] is not None}
        return len(ends) > len({line for line, _ in ends})


def line_figure(data: ChartData, figure: LineFigure, points: Sequence[LinePoint]) -> Figure | None:
    """Return a figure of points as lines; None if no drawn line has values at two x.

    Up to four lines in all share one panel. At most 7 lines and 8 panels are drawn, as the note
    says. A panel without marks is left out, and the note says so.
    """
    order = _order([point.row for point in points], figure.over)
    points = sorted(points, key=lambda point: order(point.row))
    members_of, every_line = _panels_and_lines(points, figure, data.ranks)
    lines = every_line[:MOST_LINES]
    names = varying([point.row for point in points])
    drawn = []
    for title, members in [*members_of.items()][:MOST_PANELS]:
        shown = [(line, point) for line, point in members if line in lines]
        drawn.append(_lines_of_panel(title, shown, figure.over, names, data.ranks))
    if not any(panel.has_line for panel in drawn):
        return None
    note = figure.note
    limits = []
    if len(drawn) < len(members_of):
        limits.append(f"{len(drawn)} of {len(members_of)} charts")
    if len(lines) < len(every_line):
        limits.append(f"{len(lines)} of {len(every_line)} lines")
    if limits:
        note += f" The first {' and '.join(limits)} are drawn; the table of the points has all."
    with_marks = {mark["line"] for panel in drawn for mark in panel.marks}
    legend = [line for line in lines if line in with_marks]
    panels = []
    for panel in drawn:
        if panel.marks:
            made = line_panel(
                panel.marks, legend, figure.layout, title=panel.title, missing=panel.text
            )
            panels.append(made)
        elif panel.missing:
            note += f" Not drawn: {panel.title}: {', '.join(panel.missing)}."
    return Figure(anchor=figure.anchor, title=figure.title, note=note, panels=panels)


def _lines_of_panel(
    title: str,
    members: Sequence[tuple[str, LinePoint]],
    over: Sequence[str],
    names: Sequence[str],
    ranks: str,
) -> _LinesOfPanel:
    marks: list[Mark] = []
    missing: dict[str, list[str]] = {}
    has_lines = len({line for line, _ in members}) > 1
    for line, point in members:
        if point.y is None and not point.is_on_axis:
            apart = settings_words(point.row, [name for name in over if name in names], ranks)
            name = ", ".join(filter(None, (line if has_lines else "", apart)))
            missing.setdefault(why_not_drawn(point.row), []).append(name)
            continue
        ends = {"low": point.low, "high": point.high, "number": point.number}
        tip = f"{point_name(point.row, names, ranks)}\n{point.tip}"
        marks.append({"x": point.x, "y": point.y, "line": line, **ends, "tip": tip})
    return _LinesOfPanel(title=title, marks=marks, missing=missing)


def _panels_and_lines(
    points: Sequence[LinePoint], figure: LineFigure, ranks: str
) -> tuple[dict[str, list[tuple[str, LinePoint]]], list[str]]:
    """Return the points of each panel, by its title, with their lines; and all lines in order."""
    rows = [point.row for point in points]
    apart = varying(rows, figure.over)
    of_lines = [name for name in apart if name in figure.lines_by]
    if len({_texts_of_settings(row, apart) for row in rows}) <= _FEW_LINES:
        of_lines = apart
    of_panels = [name for name in apart if name not in of_lines]
    members_of: dict[str, list[tuple[str, LinePoint]]] = {}
    for point in points:
        title = settings_words(point.row, of_panels, ranks)
        line = line_name(point.row, of_lines, ranks)
        members_of.setdefault(title, []).append((line, point))

    def order(row: ScaledRow) -> list[Any]:
        return [setting_order(setting_of(row, name)) for name in of_lines]

    lines = [line_name(row, of_lines, ranks) for row in sorted(rows, key=order)]
    return members_of, list(dict.fromkeys(lines))


def _texts_of_settings(row: ScaledRow, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(setting_of(row, name)) for name in names)
