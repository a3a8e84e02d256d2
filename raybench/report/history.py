"""The step time of points over many runs, as a document and as a picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from raybench.report.comparison import percent
from raybench.report.documents import (
    SETTING_CHARS,
    Block,
    ColumnOf,
    Document,
    Legend,
    Line,
    Listing,
    Table,
    TableColumn,
    make_table,
)
from raybench.report.formatting import counted, plain, some
from raybench.report.point_settings import point_names, setting_columns
from raybench.report.words.compare import NO_CAUSE, before_and_now, fact_name, history_answer

Series = list[HistoryRow]

_BARS = "▁▂▃▄▅▆▇█"
# Narrower ranges are drawn flat: noise is not to look like mountains.
_MIN_RANGE = 0.05
_MAX_BARS = 24
_MAX_CHANGES = 4
_MAX_CHARS = 20
# In the tables, and in the chart.
_MOST_POINTS = 40
_LABEL_CHARS = 60
_CHART_HEIGHT, _COLOR = 180, "var(--s1)"
_LEVEL = "mean step time of the runs between two lasting changes"
_CHANGE = "from the level before, in the first run of a new level"


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Document):
    """The step times of points over several runs: a document (see `raybench.report.documents`).

    rows: as `raybench.analysis.compare.history` gives them, one or more.
    causes: (point_id, run_id of the run with the step) -> what changed since the run before; for a
    step that has no entry, `blocks` says that nothing changed.
    """

    rows: Sequence[HistoryRow]
    causes: Mapping[tuple[str, str], Sequence[Change]]

    @property
    def title(self) -> str:
        """Return how many lasting changes the step times of the points have."""
        changes = sum(row.step is not None for row in self.rows)
        runs = len({row.run_id for row in self.rows})
        points = len({row.point_id for row in self.rows})
        return history_answer(points, runs, changes)

    def blocks(self) -> Iterator[Block]:
        """Yield a table of points for each workload, counts of what is left out, and changes.

        The tables have at most 40 points in all, those with lasting changes first, and none that
        one run alone has. A point counts once for each machine. A single point has bars and a table
        of its runs.
        """
        series = _series(self.rows)
        if len(series) == 1:
            yield Line(text=_bars(series[0]), is_apart=True)
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
            if lone := len(series) - len(with_history):
                verb = "was" if lone == 1 else "were"
                text = f"{counted(lone, 'point')} {verb} measured in one run only."
                yield Line(text=text, is_apart=True)
        steps = []
        for row in (row for rows in series for row in rows if row.step is not None):
            changes = self.causes.get((row.point_id, row.run_id), ())
            phrases = [
                f"{fact_name(one.fact)} {before_and_now(one, _MAX_CHARS)}" for one in changes
            ]
            where = some(phrases, _MAX_CHANGES) or NO_CAUSE
            point = f"{row.point_id} " if len(series) > 1 else ""
            text = f"{formatting.when(row.started_at)}, {row.run_id}: {where}"
            steps.append((f"{point}{percent(row.step)}", text))
        if steps:
            yield Listing(title="Lasting changes of the step time", lines=steps, is_quoted=True)
        yield Legend()

    def members(self) -> Mapping[str, Any]:
        """Return `points`: HISTORY_COLUMNS, machine, level_ms and step of each of `rows`."""
        names = (*HISTORY_COLUMNS, "machine", "level_ms", "step")
        return {"points": [{name: getattr(row, name) for name in names} for row in self.rows]}


def sparkline(values: Sequence[float]) -> str:
    """Return a bar for each of the last 24 values, on a log scale from the least to the largest.

    The scale spans 5 % at least. values: one or more, all above 0.
    """
    logs = np.log(np.asarray(values[-_MAX_BARS:], dtype=np.float64))
    span = max(float(np.ptp(logs)), _MIN_RANGE)
    low = (logs.max() + logs.min() - span) / 2
    places = np.clip(((logs - low) / span * len(_BARS)).astype(int), 0, len(_BARS) - 1)
    return "".join(_BARS[place] for place in places)


def _bars(rows: Series) -> str:
    """Return the sparkline of the step times of a point over its runs."""
    return sparkline([row.step_ms_p50 for row in rows if row.step_ms_p50 is not None])


def _series(rows: Sequence[HistoryRow]) -> list[Series]:
    """Return the rows of each point and machine; those with a step come first."""
    found: dict[tuple[str, int], Series] = {}
    for row in rows:
        found.setdefault((row.point_id, row.machine), []).append(row)
    return sorted(found.values(), key=lambda rows: all(row.step is None for row in rows))


def _table_of_points(series: Sequence[Series]) -> Table:
    """Return a row for each point of one workload; its change is from its first level to its last.

    A point on several machines has a row for each.
    """
    latest = [rows[-1] for rows in series]
    names = varying(latest, params_first=True)
    of_machine = ("device_name", "node_count")
    names += [name for name in of_machine if len({getattr(row, name) for row in latest}) > 1]
    settings = setting_columns(latest, names)

    def change(rows: Series) -> str:
        has_step = any(row.step is not None for row in rows)
        return percent(rows[-1].level_ms / rows[0].level_ms - 1) if has_step else ""

    columns: list[ColumnOf[Series]] = [
        (TableColumn(title="point", is_text=True), lambda rows: rows[-1].point_id),
        *((column, lambda rows, cell=cell: cell(rows[-1])) for column, cell in settings),
        (TableColumn(title="runs"), lambda rows: str(len(rows))),
        (
            TableColumn(title="last ms", meaning="the step time in the newest run"),
            lambda rows: formatting.number(rows[-1].step_ms_p50),
        ),
        (
            TableColumn(
                title="change", meaning="from the first level of the step time to the last"
            ),
            change,
        ),
        (
            TableColumn(title="by run", meaning="one bar per run; higher is slower", is_text=True),
            _bars,
        ),
    ]
    return make_table(series, columns, kind=str(series[0][0].workload))


def _table_of_runs(rows: Series) -> Table:
    """Return a row for each run of one point, in order of time."""
    unit = formatting.unit_of(rows)
    run = TableColumn(title="run", is_text=True, min_chars=SETTING_CHARS * 3)
    columns: list[ColumnOf[HistoryRow]] = [
        (TableColumn(title="started", is_text=True), lambda row: formatting.when(row.started_at)),
        (run, lambda row: row.run_id),
        (TableColumn(title=f"step {unit.name}"), lambda row: formatting.step_in(unit, row)),
        (
            TableColumn(title=f"level {unit.name}", meaning=_LEVEL),
            lambda row: formatting.time_in(unit, row.level_ms),
        ),
        (TableColumn(title="change", meaning=_CHANGE), lambda row: percent(row.step)),
    ]
    return make_table(rows, columns)


def history_figure(rows: Sequence[HistoryRow]) -> Figure:
    """Return a panel for each point and machine, of its step times over the time of the runs.

    Those with a step come first, and 40 at most are drawn. Those that one run alone has are left
    out, unless all are such. rows: of `raybench.analysis.compare.history`; without any, no panels.
    """
    has_models = len({row.device_name for row in rows}) > 1
    has_node_counts = len({row.node_count for row in rows}) > 1
    names = dict(zip((row.point_id for row in rows), point_names(rows), strict=True))
    panels, every = [], _series(rows)
    series = [one for one in every if len(one) > 1] or every
    for one in series[:_MOST_POINTS]:
        row, name = one[-1], names[one[-1].point_id]
        labels = [name if len(name) <= _LABEL_CHARS else row.point_id]
        labels += [plain(row.device_name)] * has_models
        labels += [counted(row.node_count or 1, "node")] * has_node_counts
        panels.append(_history_panel(", ".join(labels), one))
    note = "Dashed line: the level of the step time. Vertical line: a lasting change."
    if hidden := len(series[_MOST_POINTS:]):
        verb = "is" if hidden == 1 else "are"
        note += (
            f" {counted(hidden, 'more point')} {verb} not drawn; choose with --point or --filter."
        )
    return Figure(anchor="history", title="Step time over runs", note=note, panels=panels)


def _history_panel(point: str, rows: Sequence[HistoryRow]) -> Panel:
    """Return the step times of one point as marks, their levels dashed, a rule at each step."""
    marks: list[Mark] = []
    for row in rows:
        when, step_ms = row.started_at, row.step_ms_p50 or 0.0
        tip = f"{point}\n{when:%Y-%m-%d %H:%M}: {formatting.duration(step_ms)}"
        level = {"level": round(row.level_ms, 6), "is_step": row.step is not None}
        place = {"x": when.isoformat(), "y": round(step_ms, 6), "line": point}
        marks.append({**place, **level, "tip": tip})
    x: Spec = {
        "type": "temporal",
        "title": "UTC",
        "axis": {"labelOverlap": True, "tickCount": 3, "format": "%m-%d %H:%M"},
        "scale": {"type": "utc", "padding": 12},
    }
    y = axis("step time, ms", scale={"zero": False, "padding": 12})
    color, at, data = {"value": _COLOR}, {"field": "x", **x}, {"data": {"values": marks}}
    steps: Spec = {
        **data,
        "transform": [{"filter": "datum.is_step"}],
        "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.6},
        "encoding": {"x": at, "color": color},
    }
    levels: Spec = {
        **data,
        "mark": {"type": "line", "strokeDash": [5, 4], "interpolate": "step-after"},
        "encoding": {"x": at, "y": {"field": "level", **y}, "color": color},
    }
    layout = ScatterLayout(
        x=x,
        y=y,
        kinds={point: ("circle", _COLOR)},
        height=_CHART_HEIGHT,
        below=[steps, levels],
    )
    return scatter_panel(marks, layout, point)
