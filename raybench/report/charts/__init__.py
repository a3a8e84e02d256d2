"""Charts of a run: their data, its points as bars or as lines, and which charts apply.

Each module of this folder but `grammar` lists its charts in CHARTS. The page shows those that apply
in the order of their `place`; it begins with the one that answers the question of the job, which
`--chart` draws as a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Sequence
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
    Figure,
    Mark,
    Spec,
    bar_panels,
    draw_figure,
    line_panel,
)
from raybench.report.documents import Table
from raybench.report.point_settings import settings_words, short_name
from raybench.report.words.reasons import not_compared_words
from raybench.report.words.run import machine

# Up to so many lines can be told apart in one panel.
_FEW_LINES = 4
# Settings that are read along the bars of one panel.
_ALONG = ("batch", "world_size", "size_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Step times of a point, as `rank_by_iteration` returns them, and the median of all samples."""

    row: ScaledRow
    times_ms: pd.DataFrame
    median_ms: float


@dataclass(frozen=True, kw_only=True)
class ChartData:
    """The data of the charts of a run.

    devices: the run's table `devices`. telemetry: its table `telemetry`, with TELEMETRY_COLUMNS of
    `charts.devices`; empty if not sampled. rank_times: of the points that `heat_points` chooses.
    """

    answer: RunAnswer
    devices: pd.DataFrame = field(default_factory=pd.DataFrame)
    telemetry: pd.DataFrame = field(default_factory=pd.DataFrame)
    rank_times: Sequence[RankTimes] = ()

    @cached_property
    def rows(self) -> list[ScaledRow]:
        """Return one row per point, whatever its status, its rounds as one: `RunData.rows`."""
        return list(self.answer.data.rows)

    @property
    def ranks(self) -> str:
        """Return what the ranks of the run are, in the plural: `GPUs` or `workers`."""
        return self.answer.data.ranks

    @property
    def rate(self) -> str:
        """Return the unit of the throughput, as the job names it: `samples/s`, `tokens/s`."""
        return f"{self.answer.asked.items}/s"

    @property
    def measured(self) -> list[ScaledRow]:
        """Return the points that are ok and have a step time."""
        return [row for row in self.rows if row.status == "ok" and row.step_ms_p50 is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of a run.

    draw: returns the figure, or None where the chart does not apply to the run. place: charts of
    a page are sorted by it. answers: charts are tried as the first picture in this order; None
    where the chart never is the first picture. is_of_ratios: whether it is the first picture only
    where the answer is one of RATIOS. is_only_first: whether the page leaves it out unless it is
    the first picture.
    """

    draw: Callable[[ChartData], Figure | None]
    place: int
    answers: int | None = None
    is_of_ratios: bool = False
    is_only_first: bool = False


@cache
def _all_charts() -> tuple[Chart, ...]:
    """Return the CHARTS of all modules of this folder, in the order of the page."""
    names = (module.name for module in pkgutil.iter_modules(__path__, f"{__name__}."))
    found = [getattr(importlib.import_module(name), "CHARTS", ()) for name in names]
    return tuple(sorted((one for some in found for one in some), key=lambda one: one.place))


def main_figure(data: ChartData) -> Figure | None:
    """Return the picture that answers the question of the job; None if nothing was measured."""
    is_ratio = data.answer.asked.metric in RATIOS
    usable = [one for one in _all_charts() if one.answers and (is_ratio or not one.is_of_ratios)]
    usable.sort(key=lambda one: one.answers or 0)
    return next((figure for one in usable if (figure := one.draw(data))), None)


def other_figures(data: ChartData, first: Figure | None) -> list[Figure]:
    """Return the figures of the page in its order, without `first`, which is its `main_figure`."""
    drawn = (one.draw(data) for one in _all_charts() if not one.is_only_first)
    return [one for one in drawn if one and (first is None or one.anchor != first.anchor)]


def draw_main_figure(data: ChartData, kind: str) -> bytes | None:
    """Return the `main_figure` as the bytes of a file; None without one. kind: `svg` or `png`."""
    figure = main_figure(data)
    if figure is None:
        return None
    run, found = data.answer.data.run, data.answer.data.versions
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "nccl") if name in found)
    below = (machine(data.answer.data), versions, formatting.plain(run.run_id))
    return draw_figure(
        figure,
        kind,
        title=f"{figure.title} ({formatting.plain(run.job_name)})",
        below="; ".join(filter(None, below)),
    )


def why_no_figure(data: RunData) -> str:
    """Return why a run whose `main_figure` is None has none, as the end of a sentence."""
    if not data.rows:
        return "no point of this run has been finished yet"
    ended = dict.fromkeys(formatting.STATUS_WORDS[row.status] for row in data.rows)
    return f"no point of this run was measured ({', '.join(ended)})"


def in_order(rows: Sequence[ScaledRow], last: Collection[str] = ()) -> list[ScaledRow]:
    """Return points sorted by `distinguishing_settings`; settings named in `last` vary fastest."""
    names = sorted(distinguishing_settings(rows), key=lambda name: name in last)
    return sorted(rows, key=lambda row: [setting_order(setting_of(row, name)) for name in names])


def point_name(row: ScaledRow, names: Iterable[str], ranks: str) -> str:
    """Return lines of a tip: `settings_words` if any, then `point ID`. ranks: `ChartData.ranks`."""
    return f"{settings_words(row, names, ranks)}\npoint {row.point_id}".strip()


def line_name(row: ScaledRow, names: Sequence[str], ranks: str) -> str:
    """Return `settings_words`, or the workload if they are empty. ranks: `ChartData.ranks`."""
    return settings_words(row, names, ranks) or formatting.plain(row.workload)


def drawn_of(drawn: int, count: int) -> str:
    """Return " 3 of 5 points are drawn; the table has all." for 3 and 5; "" if all are drawn."""
    return f" {drawn} of {count} points are drawn; the table has all." if drawn < count else ""


def why_not_drawn(row: ScaledRow) -> str:
    """Return a point's status in words if it is not ok, else its `why`, else "was not measured"."""
    if row.status != "ok":
        return formatting.STATUS_WORDS[row.status]
    return (
        formatting.plain(not_compared_words(row.why)) if row.why is not None else "was not measured"
    )


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
    **of_bars: Any,
) -> Figure:
    """Return a figure with a bar for each point, in the order of `rows`.

    Bars of one panel differ in batch, number of ranks and size; each combination of other settings
    has panels of its own. If combinations had fewer than two bars on average, no panel has a title,
    and bars have the `short_name` of all settings. Only the first 72 are drawn; the note says so.
    rows: one at least. marks: returns one or more for a point; its second argument is its
    `point_name`, for their tips. x, of_bars: arguments of `bar_panels`.
    """
    shown, names, ranks = rows[:MOST_BARS], distinguishing_settings(rows), data.ranks
    along = [name for name in names if name in _ALONG]
    rest = [name for name in names if name not in along]
    panels_of = [settings_words(row, rest, ranks) for row in shown]
    bars_of = [settings_words(row, along, ranks) for row in shown]
    if len(shown) < 2 * len(set(panels_of)):
        panels_of, bars_of = [""] * len(shown), [short_name(row, names, ranks) for row in shown]
    bars = [
        (panel, bar, marks(row, point_name(row, names, ranks)))
        for panel, bar, row in zip(panels_of, bars_of, shown, strict=True)
    ]
    note += drawn_of(len(shown), len(rows))
    panels = bar_panels(bars, x, **of_bars)
    return Figure(anchor=anchor, title=title, note=note, panels=panels, table=table)


def line_figure(
    data: ChartData,
    rows: Sequence[ScaledRow],
    value: Callable[[ScaledRow], float | None],
    *,
    anchor: str,
    title: str,
    note: str,
    over: Sequence[str],
    lines_by: Sequence[str],
    x: Spec,
    y: Spec,
    along: Callable[[ScaledRow], float],
    tip: Callable[[ScaledRow], str],
    more: Callable[[ScaledRow], Mark] = lambda row: {},
    is_on_axis: Callable[[ScaledRow], bool] = lambda row: False,
    **of_lines: Any,
) -> Figure | None:
    """Return a figure of points as lines over one of their settings.

    None if no drawn line has values at two x. A point is at x `along` and y `value`; where that is
    None it is a cross on the axis if `is_on_axis`, else it is named below its panel. A panel with
    no mark is left out, and the note says so. over: the setting along x, and settings in which the
    points of a line may differ. lines_by: settings of which each value is a line; each value of
    other settings is a panel. Up to four lines in all share one panel. At most 7 lines and 8 panels
    are drawn; the note says so. tip: returns its text after settings and id. more: returns more
    fields of the mark. x, y: `axis`. of_lines: `ideal` and `level` of `line_panel`.
    """
    rows, ranks = in_order(rows, over), data.ranks
    groups, every_line = _panels_and_lines(rows, over, lines_by, ranks)
    lines, names = every_line[:MOST_LINES], varying(rows)
    shown = {
        panel: [(line, row) for line, row in some if line in lines]
        for panel, some in [*groups.items()][:MOST_PANELS]
    }
    marks: dict[str, list[Mark]] = {panel: [] for panel in shown}
    missing: dict[str, dict[str, list[str]]] = {panel: {} for panel in shown}
    for panel, some in shown.items():
        has_lines = len({line for line, _ in some}) > 1
        for line, row in some:
            if value(row) is None and not is_on_axis(row):
                apart = settings_words(row, [name for name in over if name in names], ranks)
                named = missing[panel].setdefault(why_not_drawn(row), [])
                named.append(", ".join(filter(None, (line if has_lines else "", apart))))
                continue
            mark = {"x": along(row), "y": value(row), "line": line, **more(row)}
            marks[panel].append(mark | {"tip": f"{point_name(row, names, ranks)}\n{tip(row)}"})
    drawn = [(panel, one) for panel, some in marks.items() for one in some]
    places = {(panel, one["line"], one["x"]) for panel, one in drawn if one["y"] is not None}
    if len(places) == len({(panel, line) for panel, line, _ in places}):
        return None
    counts = ((len(shown), len(groups), "charts"), (len(lines), len(every_line), "lines"))
    if few := [f"{some} of {many} {noun}" for some, many, noun in counts if some < many]:
        note += f" The first {' and '.join(few)} are drawn; the table of the points has all."
    legend = [line for line in lines if any(one["line"] == line for _, one in drawn)]
    panels = []
    for panel, whys in missing.items():
        text = "; ".join(f"{', '.join(names)}: {why}" for why, names in whys.items())
        text = f"Not drawn: {text}." if text else ""
        if own := marks[panel]:
            panels.append(line_panel(own, legend, x, y, title=panel, missing=text, **of_lines))
        elif whys:
            note += f" Not drawn: {panel}: {', '.join(whys)}."
    return Figure(anchor=anchor, title=title, note=note, panels=panels)


def _panels_and_lines(
    rows: Sequence[ScaledRow], over: Sequence[str], lines_by: Sequence[str], ranks: str
) -> tuple[dict[str, list[tuple[str, ScaledRow]]], list[str]]:
    """Return (line, row) of the points of each panel by its title, and all lines in order.

    A setting that varies tells the lines apart where it is in `lines_by`, else the panels; where
    there are at most four lines in all, one panel has them.
    """
    apart = varying(rows, over)
    of_lines = [name for name in apart if name in lines_by]
    if len({tuple(str(setting_of(r, name)) for name in apart) for r in rows}) <= _FEW_LINES:
        of_lines = apart
    of_panels = [name for name in apart if name not in of_lines]
    groups: dict[str, list[tuple[str, ScaledRow]]] = {}
    for row in rows:
        title = settings_words(row, of_panels, ranks)
        groups.setdefault(title, []).append((line_name(row, of_lines, ranks), row))
    by_size = sorted(rows, key=lambda row: [setting_order(setting_of(row, n)) for n in of_lines])
    return groups, list(dict.fromkeys(line_name(row, of_lines, ranks) for row in by_size))
