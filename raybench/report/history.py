"""The step time of points over many runs, as a document and as a picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from raybench.analysis.compare import HISTORY_COLUMNS, Change, HistoryRow
from raybench.analysis.rows import varying
from raybench.report import formatting
from raybench.report.charts.grammar import (
    Figure,
    Mark,
    Panel,
    ScatterLayout,
    Spec,
    axis,
    scatter_panel,
)
from raybench.report.comparison import change_percent
from raybench.report.documents import (
    SETTING_CHARS,
    Block,
    ColumnOf,
    Document,
    Legend,
    Line,
    Listing,
    ShownColumn,
    Table,
    adapt_column,
    make_table,
)
from raybench.report.formatting import counted, plain, some
from raybench.report.point_settings import point_names, setting_columns
from raybench.report.words.compare import NO_CAUSE, before_and_now, fact_name, history_answer

# The runs of one point on one machine, oldest first.
Series = list[HistoryRow]

_BARS = "▁▂▃▄▅▆▇█"
# Least range of a sparkline as a share, so that noise does not look like mountains.
_MIN_RANGE = 0.05
_MAX_BARS = 24
# Differences that are listed for a lasting change, and the characters of a value.
_MAX_CHANGES = 4
_MAX_CHARS = 20
# Limit of points in the tables, and in the chart.
_MOST_POINTS = 40
_LABEL_CHARS = 60
_CHART_HEIGHT, _COLOR = 180, "var(--s1)"
_LEVEL_MEANING = "mean step time of the runs between two lasting changes"
_CHANGE_MEANING = "from the level before, in the first run of a new level"


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Document):
    """The step times of points over several runs."""

    # At least one.
    rows: Sequence[HistoryRow]
    # (point_id, run_id of a lasting change) -> changes of the environment since the run before.
    causes: Mapping[tuple[str, str], Sequence[Change]]

    @property
    def title(self) -> str:
        """Return how many lasting changes the step times of the points have."""
        changes = sum(row.level_change is not None for row in self.rows)
        runs = len({row.run_id for row in self.rows})
        points = len({row.point_id for row in self.rows})
        return history_answer(points, runs, changes)

    def blocks(self) -> Iterator[Block]:
        """Yield tables of points and their lasting changes; for one point of one machine, runs."""
        series = _series_of_points(self.rows)
        if len(series) == 1:
            yield Line(text=_sparkline_of_steps(series[0]), is_apart=True)
            yield _table_of_runs(series[0])
        else:
            with_history = [rows for rows in series if len(rows) > 1]
            shown = with_history[:_MOST_POINTS]
            for workload in dict.fromkeys(rows[0].workload for rows in shown):
                yield _table_of_points([rows for rows in shown if rows[0].workload == workload])
            if hidden := len(with_history) - len(shown):
                verb = "is" if hidden == 1 else "are"
                text = f"{counted(hidden, 'more point')} {verb} not shown; --json has all."
                yield Line(text=text, is_apart=True)
            if single := len(series) - len(with_history):
                verb = "was" if single == 1 else "were"
                text = f"{counted(single, 'point')} {verb} measured in one run only."
                yield Line(text=text, is_apart=True)
        if lines := self._lasting_changes(series):
            yield Listing(title="Lasting changes of the step time", lines=lines, is_quoted=True)
        yield Legend()

    def _lasting_changes(self, series: Sequence[Series]) -> list[tuple[str, str]]:
        """Return a line for each lasting change: its size, its run, and what else changed."""
        lines = []
        for row in chain.from_iterable(series):
            if row.level_change is None:
                continue
            phrases = []
            for change in self.causes.get((row.point_id, row.run_id), ()):
                phrases.append(f"{fact_name(change.fact)} {before_and_now(change, _MAX_CHARS)}")
            causes = some(phrases, _MAX_CHANGES) or NO_CAUSE
            point = f"{row.point_id} " if len(series) > 1 else ""
            text = f"{formatting.when(row.started_at)}, {row.run_id}: {causes}"
            lines.append((f"{point}{change_percent(row.level_change)}", text))
        return lines

    def members(self) -> Mapping[str, Any]:
        """Return the rows as `points`."""
        names = (*HISTORY_COLUMNS, "machine", "level_ms")
        points = []
        for row in self.rows:
            columns = {name: getattr(row, name) for name in names}
            # In the JSON document, `step` is the lasting change that begins with this run.
            points.append({**columns, "step": row.level_change})
        return {"points": points}


def sparkline(values: Sequence[float]) -> str:
    """Return a bar for each of the last 24 values, on a log scale that spans at least 5 %.

    Args:
        values: at least one, all above 0.
    """
    logs = np.log(np.asarray(values[-_MAX_BARS:], dtype=np.float64))
    span = max(float(np.ptp(logs)), _MIN_RANGE)
    # The values are in the middle of the range.
    low = (logs.max() + logs.min() - span) / 2
    places = ((logs - low) / span * len(_BARS)).astype(int)
    heights = np.clip(places, 0, len(_BARS) - 1)
    return "".join(_BARS[height] for height in heights)


def _sparkline_of_steps(rows: Series) -> str:
    return sparkline([row.step_ms_p50 for row in rows if row.step_ms_p50 is not None])


def _series_of_points(rows: Sequence[HistoryRow]) -> list[Series]:
    """Return the series of each point and machine; series with a lasting change come first."""
    series_of_point: dict[tuple[str, int], Series] = {}
    for row in rows:
        series_of_point.setdefault((row.point_id, row.machine), []).append(row)

    def has_no_change(series: Series) -> bool:
        return all(row.level_change is None for row in series)

    return sorted(series_of_point.values(), key=has_no_change)


def _newest(rows: Series) -> HistoryRow:
    return rows[-1]


def _table_of_points(series: Sequence[Series]) -> Table:
    """Return the table of the points of one workload, with a row for each point and machine."""
    latest = list(map(_newest, series))
    names = varying(latest, params_first=True)
    if len({row.device_name for row in latest}) > 1:
        names.append("device_name")
    if len({row.node_count for row in latest}) > 1:
        names.append("node_count")
    settings = setting_columns(latest, names)

    def change_of_levels(rows: Series) -> str:
        has_change = any(row.level_change is not None for row in rows)
        if not has_change:
            return ""
        return change_percent(rows[-1].level_ms / rows[0].level_ms - 1)

    columns: list[ColumnOf[Series]] = [
        (ShownColumn(title="point", is_text=True), lambda rows: rows[-1].point_id),
        *(adapt_column(setting, _newest) for setting in settings),
        (ShownColumn(title="runs"), lambda rows: str(len(rows))),
        (
            ShownColumn(title="last ms", meaning="the step time in the newest run"),
            lambda rows: formatting.number(rows[-1].step_ms_p50),
        ),
        (
            ShownColumn(
                title="change", meaning="from the first level of the step time to the last"
            ),
            change_of_levels,
        ),
        (
            ShownColumn(title="by run", meaning="one bar per run; higher is slower", is_text=True),
            _sparkline_of_steps,
        ),
    ]
    return make_table(series, columns, kind=str(series[0][0].workload))


def _table_of_runs(rows: Series) -> Table:
    """Return the table of the runs of one point, in order of time."""
    unit = formatting.unit_of(rows)
    run_column = ShownColumn(title="run", is_text=True, min_chars=SETTING_CHARS * 3)
    columns: list[ColumnOf[HistoryRow]] = [
        (ShownColumn(title="started", is_text=True), lambda row: formatting.when(row.started_at)),
        (run_column, lambda row: row.run_id),
        (ShownColumn(title=f"step {unit.name}"), lambda row: formatting.step_in(unit, row)),
        (
            ShownColumn(title=f"level {unit.name}", meaning=_LEVEL_MEANING),
            lambda row: formatting.time_in(unit, row.level_ms),
        ),
        (
            ShownColumn(title="change", meaning=_CHANGE_MEANING),
            lambda row: change_percent(row.level_change),
        ),
    ]
    return make_table(rows, columns)


def history_figure(rows: Sequence[HistoryRow]) -> Figure:
    """Return a panel for each point and machine: step times over the time of the runs.

    At most 40 panels are drawn, points with lasting changes first. Points of a single run are drawn
    only if no point has several runs.
    """
    has_models = len({row.device_name for row in rows}) > 1
    has_node_counts = len({row.node_count for row in rows}) > 1
    point_ids = [row.point_id for row in rows]
    name_of_point = dict(zip(point_ids, point_names(rows), strict=True))
    all_series = _series_of_points(rows)
    of_several_runs = [series for series in all_series if len(series) > 1]
    drawable = of_several_runs or all_series
    panels = []
    for series in drawable[:_MOST_POINTS]:
        latest = series[-1]
        name = name_of_point[latest.point_id]
        labels = [name if len(name) <= _LABEL_CHARS else latest.point_id]
        if has_models:
            labels.append(plain(latest.device_name))
        if has_node_counts:
            labels.append(counted(latest.node_count or 1, "node"))
        panels.append(_history_panel(", ".join(labels), series))
    note = "Dashed line: the level of the step time. Vertical line: a lasting change."
    if hidden := len(drawable[_MOST_POINTS:]):
        verb = "is" if hidden == 1 else "are"
        note += (
            f" {counted(hidden, 'more point')} {verb} not drawn; choose with --point or --filter."
        )
    return Figure(anchor="history", title="Step time over runs", note=note, panels=panels)


def _history_panel(point: str, rows: Sequence[HistoryRow]) -> Panel:
    """Return a panel of step times, dashed levels, and a vertical line at each lasting change."""
    marks: list[Mark] = []
    for row in rows:
        when, step_ms = row.started_at, row.step_ms_p50 or 0.0
        mark = {
            "x": when.isoformat(),
            "y": round(step_ms, 6),
            "line": point,
            "level": round(row.level_ms, 6),
            "is_step": row.level_change is not None,  # the run begins a new level
            "tip": f"{point}\n{when:%Y-%m-%d %H:%M}: {formatting.duration(step_ms)}",
        }
        marks.append(mark)
    x: Spec = {
        "type": "temporal",
        "title": "UTC",
        "axis": {"labelOverlap": True, "tickCount": 3, "format": "%m-%d %H:%M"},
        "scale": {"type": "utc", "padding": 12},
    }
    y = axis("step time, ms", scale={"zero": False, "padding": 12})
    color, time, data = {"value": _COLOR}, {"field": "x", **x}, {"data": {"values": marks}}
    change_lines: Spec = {
        **data,
        "transform": [{"filter": "datum.is_step"}],
        "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.6},
        "encoding": {"x": time, "color": color},
    }
    level_lines: Spec = {
        **data,
        "mark": {"type": "line", "strokeDash": [5, 4], "interpolate": "step-after"},
        "encoding": {"x": time, "y": {"field": "level", **y}, "color": color},
    }
    layout = ScatterLayout(
        x=x,
        y=y,
        kinds={point: ("circle", _COLOR)},
        height=_CHART_HEIGHT,
        below=[change_lines, level_lines],
    )
    return scatter_panel(marks, layout, point)
