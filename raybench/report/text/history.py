"""The step time of points over many runs, as text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import RenderableType

from raybench.analysis.environment_changes import Change
from raybench.analysis.history import HistoryRow
from raybench.analysis.settings import setting, varying
from raybench.report import formatting, plain_text
from raybench.report.comparison import before_and_now, percent
from raybench.report.plain_text import counted
from raybench.report.text.terminal import SETTING_CHARS, WIDTH, Column, grid, line, pairs, render

Row = HistoryRow
# (point_id, run_id of the run with the step) -> what changed in its environment.
Causes = Mapping[tuple[str, str], Sequence[Change]]

_BARS = "▁▂▃▄▅▆▇█"
# Narrower ranges are drawn flat: noise is not to look like mountains.
_LEAST_RANGE = 0.05
_MOST_BARS = 24
_MOST_CHANGES = 4
_MOST_CHARS = 20
_MOST_POINTS = 40


def format_history(
    rows: Sequence[HistoryRow], causes: Causes, *, width: int = WIDTH, color: bool = False
) -> str:
    """Points with steps first; of one point alone, all its runs.

    rows: as `raybench.analysis.history.history` gives them, with one row or more.
    """
    series = _series(rows)
    parts: list[RenderableType] = [line(_headline(series), "bold")]
    if len(series) == 1:
        parts += [line(""), line(_bars(series[0])), line(""), _runs(series[0])]
    else:
        parts += _tables(series)
    steps = [
        _step(row, len(series) > 1, causes) for rows in series for row in rows if _is_step(row)
    ]
    if steps:
        parts += [line(""), line("Steps", "bold"), pairs(steps)]
    return render(parts, width, color)


def _tables(series: Sequence[list[Row]]) -> list[RenderableType]:
    """Make a table for each workload, of the points that have a history."""
    shown = [rows for rows in series if len(rows) > 1]
    workloads = dict.fromkeys(rows[0]["workload"] for rows in shown[:_MOST_POINTS])
    parts: list[RenderableType] = []
    for workload in workloads:
        members = [rows for rows in shown[:_MOST_POINTS] if rows[0]["workload"] == workload]
        names = varying([rows[-1] for rows in members], params_first=True)
        parts += [line(""), line(plain_text.plain(workload), "bold"), _points(members, names)]
    hidden = len(shown) - _MOST_POINTS
    if hidden > 0:
        parts += [line(""), line(f"{hidden} more points have a history; --json has all")]
    if lone := len(series) - len(shown):
        noun = "1 point was" if lone == 1 else f"{lone} points were"
        parts += [line(""), line(f"{noun} measured by one run only.")]
    return parts


def _bars(rows: Sequence[Row]) -> str:
    return sparkline([row["step_ms_p50"] for row in rows])


def sparkline(times: Sequence[float]) -> str:
    """Draw a bar for each run, on a scale of 5 % at least; the last ones where there are many."""
    values = np.log(np.asarray(times[-_MOST_BARS:], dtype=np.float64))
    span = max(float(np.ptp(values)), _LEAST_RANGE)
    low = (values.max() + values.min() - span) / 2
    places = np.clip(((values - low) / span * len(_BARS)).astype(int), 0, len(_BARS) - 1)
    return "".join(_BARS[place] for place in places)


def _series(rows: Sequence[HistoryRow]) -> list[list[Row]]:
    """Group the rows of each point on each machine, in order of time; those with steps first."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["point_id"], row["machine"]), []).append(row)
    return sorted(found.values(), key=lambda rows: not any(map(_is_step, rows)))


def _is_step(row: Row) -> bool:
    return formatting.has_value(row["step"])


def _headline(series: Sequence[list[Row]]) -> str:
    steps = sum(_is_step(row) for rows in series for row in rows)
    runs = len({row["run_id"] for rows in series for row in rows})
    points = len({rows[0]["point_id"] for rows in series})
    text = counted(steps, "step") if steps else "no step"
    return f"{counted(points, 'point')} over {counted(runs, 'run')}: {text}."


def _points(series: Sequence[list[Row]], names: Sequence[str]) -> RenderableType:
    machines = len({rows[0]["machine"] for rows in series}) > 1
    columns = [
        Column("point"),
        *(Column(formatting.heading(name), folds_to=SETTING_CHARS) for name in names),
        *([Column("device", folds_to=SETTING_CHARS)] if machines else []),
        *(Column(name, side="right") for name in ("runs", "last ms", "change")),
        Column("by run"),
    ]
    cells = [
        [
            rows[-1]["point_id"],
            *(_setting(rows[-1], name) for name in names),
            *([plain_text.plain(rows[-1]["device_name"])] if machines else []),
            str(len(rows)),
            formatting.number(rows[-1]["step_ms_p50"]),
            # Of the last level from the first one.
            percent(rows[-1]["level_ms"] / rows[0]["level_ms"] - 1)
            if any(map(_is_step, rows))
            else "",
            _bars(rows),
        ]
        for rows in series
    ]
    return grid(columns, cells)


def _setting(row: Row, name: str) -> str:
    value = setting(row, name)
    if not formatting.has_value(value):
        return ""
    # A column of integers with nulls holds floats.
    return formatting.setting(name, int(value) if isinstance(value, float) else value)


def _runs(rows: Sequence[Row]) -> RenderableType:
    unit = formatting.unit_of(rows)
    columns = [
        Column("started, UTC"),
        Column("run", folds_to=SETTING_CHARS * 3),
        Column(f"step {unit.name}", side="right"),
        Column(f"level {unit.name}", side="right"),
        Column("change", side="right"),
    ]
    cells = [
        [
            f"{row['started_at']:%Y-%m-%d %H:%M}",
            plain_text.plain(row["run_id"]),
            formatting.step_in(unit, row),
            formatting.time_in(unit, row["level_ms"]),
            percent(row["step"]) if _is_step(row) else "",
        ]
        for row in rows
    ]
    return grid(columns, cells)


def _step(row: Row, is_named: bool, causes: Causes) -> tuple[str, str]:
    changes = causes.get((row["point_id"], row["run_id"]), ())
    phrases = [
        f"{plain_text.plain(one.name)} {before_and_now(one, _MOST_CHARS)}"
        for one in changes[:_MOST_CHANGES]
    ]
    more = [f"and {len(changes) - _MOST_CHANGES} more"] if len(changes) > _MOST_CHANGES else []
    where = "; ".join([*phrases, *more]) or "nothing changed that the tables tell"
    point = f"{row['point_id']} " if is_named else ""
    return (
        f"{point}{percent(row['step'])}",
        f"{formatting.when(row['started_at'])}, {plain_text.plain(row['run_id'])}: {where}",
    )
