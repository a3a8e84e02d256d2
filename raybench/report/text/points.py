"""The points of a run, and everything about one of them, as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table

from raybench.analysis.rows import BY_NAME, MAIN_RATES, value_of, workload_metrics
from raybench.analysis.step_times import SlowestRegion
from raybench.records.metric import Metric
from raybench.report import formatting, plain_text
from raybench.report.point_settings import setting_columns
from raybench.report.rank_steps import ranks_of_point
from raybench.report.text.terminal import (
    SETTING_CHARS,
    WIDTH,
    Column,
    grid,
    line,
    min_width,
    pairs,
    render,
    whole,
)
from raybench.results.point_row import PointRow

Row = PointRow

_REASON_CHARS = 80
_LEAST_REASON_CHARS = 24
# A model has hundreds of modules; the table `modules` holds the rest.
_MOST_MODULES = 20
_MODULE_CHARS = 20
# The end of a traceback or a log says most; `--json` has all of it.
_DETAIL_LINES = 15
# These have a place of their own.
_APART = ("methods", "error_detail", "workload_metrics", "workload_headings")


@dataclass(frozen=True, slots=True, kw_only=True)
class PointDetails:
    """The latest attempt at a point, and the rows of all attempts at it, in order.

    row: of `points`. steps_ms, ranks, modules, regions, states: as the functions of
    raybench.analysis give them, for modules that were profiled, regions that the step names and
    devices that were sampled. traces: paths.
    wrote_logs: there is text of its ranks.
    """

    row: Row
    ranks: pd.DataFrame
    modules: pd.DataFrame
    states: pd.DataFrame
    traces: Sequence[str]
    wrote_logs: bool = False
    attempts: Sequence[Row] = ()
    regions: Sequence[SlowestRegion] = ()
    steps_ms: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))


def format_points(
    rows: Sequence[PointRow],
    busy_pct: Sequence[float | None],
    *,
    width: int = WIDTH,
    color: bool = False,
) -> str:
    """List the points of one run: the settings that vary among them, and what was measured.

    busy_pct: of each point, as `raybench.analysis.step_times.busy_pct` finds it.
    """
    if not rows:
        return render([line("No point has been finished yet.")], width, color)
    found = [m for m in MAIN_RATES if any(formatting.has_value(row[m.name]) for row in rows)]
    rates = [*found, *workload_metrics(rows)]
    unit = formatting.unit_of(rows)
    columns = {
        Column("point"): [row["point_id"] for row in rows],
        **({Column("round"): [_round(row) for row in rows]} if _has_rounds(rows) else {}),
        **{
            Column(heading, folds_to=None if heading == "workload" else SETTING_CHARS): cells
            for heading, cells in setting_columns(rows).items()
        },
        Column("status"): [formatting.STATUS_WORDS[row["status"]] for row in rows],
        Column(f"step {unit.name}", side="right"): [formatting.step_in(unit, row) for row in rows],
        **{
            _metric_column(metric): [_metric_cell(metric, row) for row in rows]
            for metric in rates[:1]
        },
    }
    p99, memory = (BY_NAME[name] for name in ("step_ms_p99", "peak_mem_allocated_bytes"))
    extras = {
        _metric_column(metric, unit): [_metric_cell(metric, row, unit) for row in rows]
        for metric in (*rates[1:], p99, memory)
    }
    # How much of the time the least busy device of the point ran a kernel.
    extras[Column("busy", side="right")] = [
        "" if share is None else formatting.percent(share / 100) for share in busy_pct
    ]
    known = {column: cells for column, cells in extras.items() if any(cells)}
    reasons = [_reason(row) for row in rows]
    return render([_fitting(columns, known, reasons, width)], width, color)


def _has_rounds(rows: Sequence[Row]) -> bool:
    return any(formatting.has_value(row["round"]) and row["round"] > 1 for row in rows)


def _round(row: Row) -> str:
    """Which round, and whether the point is a control there."""
    number = f"{row['round']:.0f}" if formatting.has_value(row["round"]) else ""
    return f"{number} control" if formatting.has_value(row["control_of"]) else number


def _metric_column(metric: Metric, unit: formatting.Unit = formatting.MILLISECONDS) -> Column:
    return Column(formatting.metric_heading(metric, unit), side="right")


def _metric_cell(metric: Metric, row: Row, unit: formatting.Unit = formatting.MILLISECONDS) -> str:
    return formatting.metric(metric, value_of(row, metric), unit)


def _reason(row: Row) -> str:
    message = row["error_message"]
    if not formatting.has_value(message):
        return ""
    return formatting.failure(row["status"], row["error_type"], message)


def _fitting(
    columns: Mapping[Column, Sequence[str]],
    extras: Mapping[Column, Sequence[str]],
    reasons: Sequence[str],
    width: int,
) -> Table:
    """Lay out the points with reasons of failures and as many extras as there is room for.

    Where there is none, without the rate, then without a status that is ok everywhere.
    """

    def room(shown: Mapping[Column, Sequence[str]]) -> int:
        return width - min_width(list(shown), list(zip(*shown.values(), strict=True))) - 2

    last: dict[Column, Sequence[str]] = {}
    if any(reasons) and (chars := room(columns)) >= _LEAST_REASON_CHARS:
        last[Column("reason")] = [
            plain_text.shorten(reason, min(chars, _REASON_CHARS)) for reason in reasons
        ]
    for column, cells in extras.items():
        if room({**columns, column: cells, **last}) >= -2:
            columns = {**columns, column: cells}
    columns = {**columns, **last}
    titles = {metric.title for metric in MAIN_RATES}
    rates = [column for column in columns if column.name in titles]
    statuses = [c for c, cells in columns.items() if c.name == "status" and {*cells} == {"ok"}]
    shown = dict(columns)
    for dropped in ([], rates, statuses):
        shown = {column: cells for column, cells in shown.items() if column not in dropped}
        table = grid(list(shown), list(zip(*shown.values(), strict=True)))
        if (table.min_width or 0) <= width:
            break
    return table


def format_point(
    point: PointDetails, units: Mapping[str, str], *, width: int = WIDTH, color: bool = False
) -> str:
    """Write everything about the latest attempt at a point, and how the earlier ones ended.

    What is null is left out.
    """
    row = {
        name: value[:12] if name.endswith("_sha256") and isinstance(value, str) else value
        for name, value in point.row.items()
    }
    shown = ((name, _value(value, units.get(name, ""))) for name, value in row.items())
    facts = [(name, text) for name, text in shown if text and name not in _APART]
    facts += [
        (m.title, formatting.metric(m, value_of(point.row, m)))
        for m in workload_metrics([point.row])
    ]
    parts: list[RenderableType] = [pairs(facts)]
    for block in (_detail(point.row["error_detail"]), _attempts(point.attempts)):
        parts += [line(""), *block] if block else []
    methods = point.row["methods"]
    if isinstance(methods, Mapping) and methods:
        parts += [line(""), line("How each was measured", "bold"), pairs(_methods(methods))]
    tables = (
        histogram(point.steps_ms),
        _ranks(point.ranks),
        _rank_parts(point.row),
        _regions(point.regions),
        _states(point.states),
        _modules(point.modules),
    )
    for table in tables:
        parts += [line(""), *table] if table else []
    if point.wrote_logs:
        parts += [line(""), line("What its ranks wrote: the same command with --logs")]
    if point.traces:
        parts += [line(""), line("Traces, for ui.perfetto.dev", "bold"), *map(whole, point.traces)]
    return render(parts, width, color)


def _detail(detail: Any) -> list[RenderableType]:
    if not formatting.has_value(detail) or not (lines := plain_text.plain_lines(detail)):
        return []
    last = lines[-_DETAIL_LINES:]
    cut = f", the last {len(last)} of {len(lines)} lines" if len(lines) > len(last) else ""
    return [line(f"error_detail{cut}", "bold"), *map(line, last)]


def _attempts(attempts: Sequence[Row]) -> list[RenderableType]:
    """All attempts, where there is more than one."""
    if len(attempts) < 2:
        return []
    rounds = ["round"] if _has_rounds(attempts) else []
    columns = [
        *(Column(name) for name in ("attempt", *rounds, "status", "started, UTC")),
        Column("took s", side="right"),
        Column("reason", folds_to=SETTING_CHARS),
    ]
    rows = [
        [
            str(row["attempt"]),
            *(_round(row) for _ in rounds),
            formatting.STATUS_WORDS[row["status"]],
            f"{row['started_at']:%Y-%m-%d %H:%M:%S}",
            formatting.number(row["duration_s"], 3),
            _reason(row),
        ]
        for row in attempts
    ]
    return [line("Attempts", "bold"), grid(columns, rows)]


def _methods(methods: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each column and how it was got; where columns in a row share that, it is said once."""
    last = ""
    for name, text in methods.items():
        yield plain_text.plain(name), "the same" if text == last else plain_text.plain(text)
        last = text


def _value(value: Any, unit: str) -> str:
    """Write a cell and its unit; empty for null and for what is empty."""
    if isinstance(value, Mapping):
        return formatting.settings({name: _in_few_digits(one) for name, one in value.items()})
    if isinstance(value, list | tuple):
        return "; ".join(plain_text.plain(_in_few_digits(item)) for item in value)
    if not formatting.has_value(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if hasattr(value, "isoformat"):
        return str(value.isoformat(timespec="seconds"))
    if unit == "bytes":
        return formatting.size(value)
    shown = formatting.number(value) if isinstance(value, float) else plain_text.plain(value)
    return f"{shown} {unit}".rstrip()


def _in_few_digits(value: Any) -> Any:
    return formatting.number(value) if isinstance(value, float) else value


def _ranks(ranks: pd.DataFrame) -> list[RenderableType]:
    if ranks.empty:
        return []
    names = ["rank", "iterations", "median ms", "min ms", "max ms", "data ms"]
    if ranks["data_ms"].isna().all():
        ranks, names = ranks.drop(columns="data_ms"), names[:-1]
    rows = [
        [str(rank), str(iterations), *(formatting.number(ms) for ms in times_ms)]
        for rank, iterations, *times_ms in ranks.itertuples(index=False)
    ]
    return [grid([Column(name, side="right") for name in names], rows)]


def _rank_parts(row: Row) -> list[RenderableType]:
    """Show what each rank does in a step, and what a clock of its host says of it."""
    unit = formatting.unit_of([row])
    heads, rows, legend = ranks_of_point(row, unit)
    if not rows:
        return []
    columns = [Column(head, side="right") for head in heads]
    title = f"Each rank's step, {unit.name}, from steps after the timed ones"
    return [line(title, "bold"), grid(columns, rows), *map(line, legend)]


def _regions(regions: Sequence[SlowestRegion]) -> list[RenderableType]:
    if not regions:
        return []
    columns = [
        Column("region", folds_to=_MODULE_CHARS),
        *(Column(name, side="right") for name in ("calls", "ms", "of the step")),
    ]
    rows = [
        [
            plain_text.plain(row["region"]),
            str(row["calls"]),
            formatting.part_ms(row["region_ms"]),
            formatting.percent(row["share_pct"] / 100),
        ]
        for row in regions
    ]
    return [line("Regions of the step, after the timed steps", "bold"), grid(columns, rows)]


def _states(states: pd.DataFrame) -> list[RenderableType]:
    """Show what was sampled of the devices, from the least to the most."""
    if states.empty:
        return []
    heads = {
        "sm_clock_mhz": "SM MHz",
        "memory_clock_mhz": "memory MHz",
        "power_w": "W",
        "temperature_c": "degC",
        "gpu_utilization_pct": "busy %",
    }
    rows = [
        [
            f"{plain_text.plain(row['node_id'])[:8]}:{row['index']}",
            *(_span(row[f"{name}_min"], row[f"{name}_max"]) for name in heads),
            ", ".join(row["throttle_reasons"]),
        ]
        for row in states.to_dict("records")
    ]
    columns = [
        Column("device"),
        *(Column(head, side="right") for head in heads.values()),
        Column("throttled by", folds_to=SETTING_CHARS),
    ]
    title = f"All devices of the run meanwhile, {states['samples'].max()} samples each"
    return [line(title, "bold"), grid(columns, rows)]


def _span(least: float, most: float) -> str:
    if not formatting.has_value(least) or not formatting.has_value(most):
        return ""
    low, high = f"{least:.0f}", f"{most:.0f}"
    return low if low == high else f"{low}-{high}"


def _modules(modules: pd.DataFrame) -> list[RenderableType]:
    if modules.empty:
        return []
    columns = [
        Column("module", folds_to=_MODULE_CHARS),
        Column("class", folds_to=_MODULE_CHARS),
        *(Column(name, side="right") for name in ("calls", "forward ms", "backward ms")),
    ]
    rows = [
        [
            plain_text.plain(row["module"]) or "(the model)",
            plain_text.plain(row["kind"]),
            str(row["calls"]),
            *(formatting.part_ms(row[name]) for name in ("forward_ms", "backward_ms")),
        ]
        for row in modules.head(_MOST_MODULES).to_dict("records")
    ]
    more = len(modules) - len(rows)
    hidden = f"; {more} more are in the table `modules`" if more > 0 else ""
    title = f"Modules with their children, per step{hidden}"
    return [line(title, "bold"), grid(columns, rows)]


Times = NDArray[np.float64]

# Fewer say nothing that their minimum, median and maximum do not say.
_LEAST = 8
_MOST_BARS = 12
_BAR_CHARS = 40
# Of the largest time; nearer ones leave no room for ranges between them.
_SAME = 1e-6
_EIGHTHS = " ▏▎▍▌▋▊▉"
# A few steps that are far slower than the rest would leave one bar for all others.
_FAR_QUARTILES = 4.0


def histogram(times_ms: Times) -> list[RenderableType]:
    """Draw a bar for each of at most 12 equal ranges of step times.

    Empty for fewer than 8 times, and where all are the same, to a millionth.

    Times beyond the third quartile by four times the distance of the quartiles share the last bar,
    whose range is wider than the others: each range is shown with both of its ends.
    """
    if len(times_ms) < _LEAST or np.ptp(times_ms) <= _SAME * times_ms.max():
        return []
    is_short = formatting.is_short(float(np.median(times_ms)))
    times = times_ms * 1000 if is_short else times_ms
    starts, ends, counts = _bars(times)
    # So many that the ends of neighbouring ranges differ.
    digits = max(0, 1 - math.floor(math.log10(float(ends[0] - starts[0]))))
    rows = []
    for start, end, count in zip(starts, ends, counts, strict=True):
        eighths = math.ceil(count / counts.max() * _BAR_CHARS * 8)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        rows.append([f"{start:,.{digits}f}", f"{end:,.{digits}f}", str(count), bar])
    unit = "µs" if is_short else "ms"
    columns = [
        *(Column(f"{word} {unit}", side="right") for word in ("from", "to")),
        Column("steps", side="right"),
        Column(""),
    ]
    return [line("Step times, per iteration of the slowest rank", "bold"), grid(columns, rows)]


def _bars(times: Times) -> tuple[Times, Times, NDArray[np.int64]]:
    """Find the lower and upper ends of the ranges, and how many times are in each."""
    first, third = np.percentile(times, [25, 75])
    limit = third + _FAR_QUARTILES * (third - first) if third > first else times.max()
    near, far = times[times <= limit], times[times > limit]
    bars = min(_MOST_BARS, math.ceil(2 * math.sqrt(len(times))))
    counts, edges = np.histogram(near, bins=bars)
    if not len(far):
        return edges[:-1], edges[1:], counts
    return (
        np.append(edges[:-1], far.min()),
        np.append(edges[1:], far.max()),
        np.append(counts, len(far)),
    )
