"""Results as text for a terminal. What comes from the results is never taken for markup."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from raybench.analysis.scaling import setting
from raybench.records import Run, RunStatus
from raybench.report import wording
from raybench.report.summary import Said, Summary, Table

WIDTH = 80
_REASON_CHARS = 300
# Parameters vary too, but their values belong to the reader who asks for one point.
_SETTINGS = ("precision", "batch_size", "global_batch_size", "world_size")


def format_report(summary: Summary, *, width: int = WIDTH, color: bool = False) -> str:
    """The scaling report."""
    run = summary.run
    parts: list[RenderableType] = [
        _line(f"{wording.plain(run.job_name)}  {wording.plain(run.run_id)}", "bold"),
        _line(summary.machine),
        _line(f"{wording.when(run.started_at)}, {wording.lasted(run)}; {summary.counts}"),
        _line(wording.versions(summary.versions)),
        *([_line(f"in all points: {wording.settings(summary.shared)}")] if summary.shared else []),
    ]
    for table in summary.tables:
        parts += [_line(""), *_series_table(table)]
    if summary.tables:
        parts += [_line(""), _line(summary.explanation, "dim")]
    else:
        parts += [_line(""), _line("No point has been finished yet.")]
    parts += _said("Failed and skipped points", summary.failures)
    parts += _said("Without speed-up", summary.without_speed_up)
    parts += _said("Warnings", summary.warnings)
    return _rendered(parts, width, color)


def _series_table(table: Table) -> list[RenderableType]:
    grid = _grid()
    for column in table.columns[: table.settings]:
        side: Literal["left", "right"] = "left" if column == "precision" else "right"
        grid.add_column(column, justify=side, overflow="fold")
    for column in table.columns[table.settings :]:
        grid.add_column(column, justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    what = f"{table.workload} {wording.settings(table.params)}".strip()
    return [_line(f"{what}: {table.kind}", "bold"), grid]


def _said(title: str, all_said: Sequence[Said]) -> list[RenderableType]:
    if not all_said:
        return []
    lines = [
        _hanging(f"{said.count} x ", wording.shortened(said.text, _REASON_CHARS))
        for said in all_said
    ]
    return [_line(""), _line(title, "bold"), *lines]


def format_runs(runs: Sequence[Run], *, width: int = WIDTH, color: bool = False) -> str:
    """All runs, the newest last. What has been done of a run is known when it has ended."""
    grid = _grid()
    grid.add_column("run", overflow="fold")
    grid.add_column("status")
    for column in ("ok", "failed", "skipped", "took"):
        grid.add_column(column, justify="right")
    for run in runs:
        ended = run.status is not RunStatus.RUNNING
        done = (run.points_ok, run.points_failed, run.points_skipped) if ended else ("", "", "")
        cells = (run.run_id, run.status.value, *done, wording.lasted(run))
        grid.add_row(*(Text(wording.plain(cell)) for cell in cells))
    return _rendered([grid], width, color)


def format_points(points: pd.DataFrame, *, width: int = WIDTH, color: bool = False) -> str:
    """The points of one run: the settings that vary among them, and what was measured."""
    rows = [{str(k): v for k, v in row.items()} for row in points.to_dict("records")]
    names = varying_settings(rows)
    grid = _grid()
    grid.add_column("point")
    for name in names:
        grid.add_column(name, overflow="fold")
    grid.add_column("status")
    grid.add_column("step ms", justify="right")
    grid.add_column("samples/s", justify="right")
    for row in rows:
        cells = [wording.plain(setting(row, name)) for name in names]
        measured = (wording.step_ms(row), wording.number(row["throughput"]))
        status = wording.STATUS_WORDS[row["status"]]
        grid.add_row(*(Text(cell) for cell in (row["point_id"], *cells, status, *measured)))
    return _rendered([grid], width, color)


def varying_settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings and parameters that are not the same in all rows.

    The global batch is left out where it just follows from the batch per device.
    """
    params = dict.fromkeys(name for row in rows for name in row["params"])
    weak = all(row["scaling"] == "weak" for row in rows)
    names = ["workload", *params, *(n for n in _SETTINGS if not (weak and n.startswith("global")))]
    if not weak:
        names.remove("batch_size")
    return [name for name in names if len({str(setting(row, name)) for row in rows}) > 1]


def format_point(
    row: Mapping[str, Any],
    ranks: pd.DataFrame,
    units: Mapping[str, str],
    *,
    width: int = WIDTH,
    color: bool = False,
) -> str:
    """Everything about one attempt at a point: its row (nulls left out) and its ranks."""
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in row.items():
        shown = _value(value, units.get(name, ""))
        if shown:
            grid.add_row(Text(name), Text(shown))
    parts: list[RenderableType] = [grid]
    if not ranks.empty:
        parts += [_line(""), _rank_table(ranks)]
    return _rendered(parts, width, color)


def _value(value: Any, unit: str) -> str:
    """A cell and its unit; empty for null and for what is empty."""
    if isinstance(value, Mapping):
        return wording.settings(value)
    if isinstance(value, list | np.ndarray):
        return "; ".join(wording.plain(item) for item in value)
    if not wording.known(value):
        return ""
    if hasattr(value, "isoformat"):
        return str(value.isoformat(timespec="seconds"))
    if unit == "bytes":
        return f"{wording.gib(value)} GiB"
    shown = wording.number(value) if isinstance(value, float) and unit else wording.plain(value)
    return f"{shown} {unit}".rstrip()


def _rank_table(ranks: pd.DataFrame) -> RichTable:
    grid = _grid()
    for column in ("rank", "iterations", "median ms", "min ms", "max ms"):
        grid.add_column(column, justify="right")
    for rank, iterations, *times_ms in ranks.itertuples(index=False):
        grid.add_row(str(rank), str(iterations), *(wording.number(ms) for ms in times_ms))
    return grid


def _grid() -> RichTable:
    return RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style)


def _hanging(lead: str, text: str) -> RichTable:
    grid = RichTable.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(lead), Text(text))
    return grid


def _rendered(parts: Iterable[RenderableType], width: int, color: bool) -> str:
    """Without colour no escape sequence at all; blanks at the ends of lines are dropped."""
    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"
