"""What charts of a run draw, and how its points become lines over one of their settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from raybench.analysis.rows import ScaledRow
from raybench.analysis.settings import OPTIONAL, batch_column, setting, setting_order, varying
from raybench.report import formatting, plain_text
from raybench.report.charts.grammar import (
    HEIGHT,
    MOST_LINES,
    MOST_PANELS,
    Figure,
    Mark,
    Panel,
    Spec,
    legend_height,
    line_chart,
)
from raybench.report.summary import Summary

Row = ScaledRow

# Up to so many lines can be told apart in one panel.
_LINES_OF_A_LONE_PANEL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Step times of a point in ms: a row for each rank, a column for each range of iterations."""

    row: Row
    times_ms: pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class ChartData:
    """What the charts of a run draw.

    devices: the table of the run. telemetry: its TELEMETRY_COLUMNS, empty where not sampled.
    rank_times: of the points that `heat_points` chooses. against: a run that this one is laid over.
    """

    summary: Summary
    devices: pd.DataFrame = field(default_factory=pd.DataFrame)
    telemetry: pd.DataFrame = field(default_factory=pd.DataFrame)
    rank_times: Sequence[RankTimes] = ()
    against: Summary | None = None

    @cached_property
    def rows(self) -> list[Row]:
        """The latest attempt at each point, with what was derived from it."""
        return rows_of(self.summary)

    @cached_property
    def others(self) -> list[Row]:
        """The points of the run that this one is laid over; empty where there is none."""
        return [] if self.against is None else rows_of(self.against)

    @property
    def ranks(self) -> str:
        """What a rank runs on, in the plural: `GPUs`."""
        return self.summary.ranks

    @property
    def measured(self) -> list[Row]:
        """The points that ended well and have a step time."""
        return [row for row in self.rows if row.status == "ok" and row.step_ms_p50 is not None]


def rows_of(summary: Summary) -> list[Row]:
    """Return the latest attempt at each point of a run, with what was derived from it."""
    return list(summary.rows)


def in_order(rows: Sequence[Row], last: Collection[str] = ()) -> list[Row]:
    """Sort points by their settings; those named in `last` vary fastest."""
    names = sorted(distinguishing_settings(rows), key=lambda name: name in last)
    return sorted(rows, key=lambda row: [setting_order(setting(row, name)) for name in names])


def distinguishing_settings(rows: Sequence[Row]) -> list[str]:
    """Return the settings that are needed to tell the points apart.

    Optional settings are left out where the others suffice: small messages are replayed from a
    graph and large ones not, but their size tells them apart.
    """
    names = varying(rows)
    rest = [name for name in names if name not in OPTIONAL]
    is_enough = len({tuple(str(setting(row, n)) for n in rest) for row in rows}) == len(rows)
    return rest if is_enough else names


def point_name(row: Row, names: Iterable[str], ranks: str, *, is_other: bool = False) -> str:
    """Return the first lines of a tip: the settings of the point, and its id."""
    of = " of the other run" if is_other else ""
    return f"{formatting.settings_words(row, names, ranks)}\npoint {row.point_id}{of}".strip()


def line_name(row: Row, names: Sequence[str], ranks: str) -> str:
    """Return the settings of a point in words; its workload where there are none."""
    return formatting.settings_words(row, names, ranks) or plain_text.plain(row.workload)


def batch_title(rows: Sequence[Row]) -> str:
    """Return what the batch of these rows counts, as the title of an axis."""
    found = {batch_column(row) for row in rows}
    return "global batch size" if found == {"global_batch_size"} else "batch size per device"


def lines_over(
    data: ChartData,
    *,
    anchor: str,
    title: str,
    note: str,
    over: Sequence[str],
    lines_by: Sequence[str],
    x: Spec,
    y: Spec,
    along: Callable[[Row], float],
    value: Callable[[Row], float | None],
    tip: Callable[[Row], str],
    more: Callable[[Row], Mark] = lambda row: {},
    among: Callable[[Row], bool] = lambda row: True,
    is_on_axis: Callable[[Row], bool] = lambda row: False,
    ideal: Sequence[tuple[float, float]] = (),
    level: tuple[float, str] | None = None,
) -> Figure | None:
    """Draw points as lines over one of their settings; None where no line has two points.

    over: the setting along x, and settings that do not matter. lines_by: settings that tell the
    lines of a panel apart; the others that vary tell the panels apart. along, value: where a point
    is drawn; a point without a value is left out, or a cross on the axis where `is_on_axis`.
    tip: what its mark says besides its settings. more: more of its mark, as `low` and `high`.
    among: the points that could be drawn at all.
    """
    other_ids = {id(row) for row in data.others}
    rows = in_order([row for row in (*data.rows, *data.others) if among(row)], over)
    apart, names = varying(rows, over), varying(rows)
    of_lines = [name for name in apart if name in lines_by]
    of_panels = [name for name in apart if name not in lines_by]
    if len({tuple(str(setting(row, name)) for name in apart) for row in rows}) <= (
        _LINES_OF_A_LONE_PANEL
    ):
        of_lines, of_panels = apart, []

    def is_drawn(row: Row) -> bool:
        return value(row) is not None or is_on_axis(row)

    by_size = sorted(rows, key=lambda row: [setting_order(setting(row, n)) for n in of_lines])
    every_line = dict.fromkeys(line_name(row, of_lines, data.ranks) for row in by_size)
    lines = [*every_line][:MOST_LINES]
    members: dict[str, list[tuple[str, Row]]] = {}
    for row in rows:
        panel = formatting.settings_words(row, of_panels, data.ranks)
        members.setdefault(panel, []).append((line_name(row, of_lines, data.ranks), row))
    shown = {
        panel: [(line, row) for line, row in some if line in lines]
        for panel, some in [*members.items()][:MOST_PANELS]
    }
    used = {line for some in shown.values() for line, row in some if is_drawn(row)}
    legend = [line for line in lines if line in used]
    marks = {
        panel: [
            {
                "x": along(row),
                "y": value(row),
                "line": line,
                "other": id(row) in other_ids,
                "tip": f"{point_name(row, names, data.ranks, is_other=id(row) in other_ids)}\n"
                + tip(row),
                **more(row),
            }
            for line, row in some
            if is_drawn(row)
        ]
        for panel, some in shown.items()
    }
    places: dict[tuple[str, str], set[float]] = {}
    for panel, some_marks in marks.items():
        for mark in some_marks:
            if mark["y"] is not None:
                places.setdefault((panel, mark["line"]), set()).add(mark["x"])
    if max(map(len, places.values()), default=0) < 2:
        return None
    panels = [
        Panel(
            title=panel,
            layers=line_chart(marks[panel], legend, x, y, ideal=ideal, level=level),
            missing=_missing(
                [(line, row) for line, row in some if id(row) not in other_ids],
                is_drawn,
                over,
                data.ranks,
            ),
            height=HEIGHT + legend_height(legend),
        )
        for panel, some in shown.items()
    ]
    if any(mark["other"] for some in marks.values() for mark in some):
        note += " Hollow points and dotted lines are of the other run."
    counts = ((len(shown), len(members), "charts"), (len(lines), len(every_line), "lines"))
    phrases = [f"{few} of {many} {noun}" for few, many, noun in counts if few < many]
    if phrases:
        note += f" The first {' and '.join(phrases)} are drawn; the table of the points has all."
    return Figure(anchor=anchor, title=title, note=note, panels=panels)


def _missing(
    members: Sequence[tuple[str, Row]],
    is_drawn: Callable[[Row], bool],
    over: Sequence[str],
    ranks: str,
) -> str:
    """Return what a panel does not show and why, as in `Not drawn: batch 256: out of memory`."""
    lines = dict.fromkeys(line for line, _ in members)
    reasons: dict[str, list[str]] = {}
    for line in lines:
        own = [row for found, row in members if found == line]
        lacking = [row for row in own if not is_drawn(row)]
        for why in dict.fromkeys(map(why_not_drawn, lacking)):
            rows = [row for row in lacking if why_not_drawn(row) == why]
            places = (formatting.settings_words(row, over, ranks) for row in rows)
            where = "" if len(lacking) == len(own) else ", ".join(places)
            name = line if len(lines) > 1 or not where else ""
            reasons.setdefault(why, []).append(", ".join(filter(None, (name, where))))
    text = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    return f"Not drawn: {text}." if text else ""


def why_not_drawn(row: Row) -> str:
    """Return why a point has no value: its status, or why it has no speed-up."""
    if row.status != "ok":
        return formatting.STATUS_WORDS[row.status]
    return plain_text.plain(row.why) if row.why is not None else "was not measured"
