"""Results as text for a terminal. What comes from the results is never taken for markup."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
# Columns are not folded below this: `precision` stays whole, and a run's id can be copied.
_SETTING_CHARS = 9
_RUN_ID_CHARS = 36
# Parameters vary too, but their values belong to the reader who asks for one point.
_SETTINGS = ("precision", "batch_size", "global_batch_size", "world_size")


def format_report(summary: Summary, *, width: int = WIDTH, color: bool = False) -> str:
    """The scaling report."""
    run = summary.run
    parts: list[RenderableType] = [
        _line(wording.title(run), "bold"),
        _line(summary.machine),
        _line(f"{wording.when(run.started_at)}, {wording.course(run)}; {summary.counts}"),
        _line(wording.versions(summary.versions)),
        *([_line(f"in all points: {wording.settings(summary.shared)}")] if summary.shared else []),
    ]
    parts += _findings(summary)
    for table in summary.tables:
        parts += [_line(""), *_series_table(table)]
    if not summary.tables:
        parts += [_line(""), _line("No point has been finished yet.")]
    elif summary.explanation:
        parts += [_line(""), _line(summary.explanation, "dim")]
    parts += _said("Failed and skipped points", summary.failures)
    parts += _said("Without speed-up", summary.without_speed_up)
    parts += _said("Warnings", summary.warnings)
    return _rendered(parts, width, color)


def _findings(summary: Summary) -> list[RenderableType]:
    if not summary.findings:
        return []
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(overflow="fold")
    for what, found in summary.findings:
        grid.add_row(Text(what), Text(found))
    return [_line(""), _line(wording.over(summary.run.baseline), "bold"), grid]


def _series_table(table: Table) -> list[RenderableType]:
    settings = table.columns[: table.settings]
    columns = [
        *(
            _Column(name, folds_to=_SETTING_CHARS, side="left" if name == "precision" else "right")
            for name in settings
        ),
        *(_Column(name, side="right") for name in table.columns[table.settings :]),
    ]
    what = f"{table.workload} {wording.settings(table.params)}".strip()
    return [_line(f"{what}: {table.kind}", "bold"), _grid(columns, table.rows)]


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
    columns = [
        _Column("run", folds_to=_RUN_ID_CHARS),
        _Column("status"),
        *(_Column(name, side="right") for name in ("ok", "failed", "skipped", "took")),
    ]
    rows = []
    for run in runs:
        ended = run.status is not RunStatus.RUNNING
        done = (run.points_ok, run.points_failed, run.points_skipped) if ended else ("", "", "")
        # Compact: at 80 columns the run_id needs the room.
        took = wording.lasted(run).replace(" min", "m").replace(" h", "h").replace(" s", "s")
        cells = (run.run_id, run.status.value, *done, took)
        rows.append([wording.plain(cell) for cell in cells])
    return _rendered([_grid(columns, rows)], width, color)


def format_points(points: pd.DataFrame, *, width: int = WIDTH, color: bool = False) -> str:
    """The points of one run: the settings that vary among them, and what was measured."""
    rows = [{str(k): v for k, v in row.items()} for row in points.to_dict("records")]
    names = varying_settings(rows)
    columns = [
        _Column("point"),
        *(_Column(name, folds_to=_SETTING_CHARS) for name in names),
        _Column("status"),
        _Column("step ms", side="right"),
        _Column("samples/s", side="right"),
    ]
    cells = [
        [
            row["point_id"],
            *(wording.plain(setting(row, name)) for name in names),
            wording.STATUS_WORDS[row["status"]],
            wording.step_ms(row),
            wording.number(row["throughput"]),
        ]
        for row in rows
    ]
    return _rendered([_grid(columns, cells)], width, color)


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
    names = ("rank", "iterations", "median ms", "min ms", "max ms")
    rows = [
        [str(rank), str(iterations), *(wording.number(ms) for ms in times_ms)]
        for rank, iterations, *times_ms in ranks.itertuples(index=False)
    ]
    return _grid([_Column(name, side="right") for name in names], rows)


@dataclass(frozen=True, slots=True)
class _Column:
    """folds_to: how narrow its text may be folded where the table is too wide; None: not at all."""

    name: str
    folds_to: int | None = None
    side: Literal["left", "right"] = "left"


def _grid(columns: Sequence[_Column], rows: Sequence[Sequence[str]]) -> RichTable:
    """A table whose figures are never cut: its `min_width` is what it must have."""
    longest = [max(map(len, cells)) for cells in zip([c.name for c in columns], *rows, strict=True)]
    least = [
        min(size, column.folds_to or size) for column, size in zip(columns, longest, strict=True)
    ]
    grid = RichTable(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="bold",
        min_width=sum(least) + 2 * (len(least) - 1),
    )
    for column, size in zip(columns, least, strict=True):
        grid.add_column(
            column.name,
            justify=column.side,
            overflow="fold",
            no_wrap=column.folds_to is None,
            min_width=size,
        )
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


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
        if isinstance(part, RichTable) and (part.min_width or 0) > width:
            # Lines that the terminal wraps are read more easily than figures that are cut.
            part.width = part.min_width
        console.print(part, crop=False)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"
