"""The tables of a report: one of the step times, and one of where the step goes. Pure.

Points are compared within a table: those of training by throughput, a table for each set of
parameters. Where a step finishes no samples (collectives, matrix products, memory) nothing is
compared: parameters that are numbers, as a message's size, are read down a column, and only names,
as an operation's, make tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

from raybench.analysis import rows as metrics
from raybench.analysis.rows import PARTS, RATES, SCALING, workload_metrics
from raybench.analysis.settings import (
    EXECUTION,
    OPTIONAL,
    batch_column,
    is_numeric,
    setting,
    setting_order,
    varying,
)
from raybench.records.metric import Metric
from raybench.report import formatting, plain_text
from raybench.report.document import MARK_COLUMN, Table
from raybench.report.rank_steps import COLUMNS as RANK_COLUMNS
from raybench.report.rank_steps import MEANING as RANKS_MEAN
from raybench.report.rank_steps import rank_lines
from raybench.results.metrics.parts import is_slowed_by_one_rank
from raybench.results.metrics.steps import is_imprecise

Row = Any
_Column = tuple[str, Callable[[Row], str]]

_SETTINGS = (*EXECUTION, "batch", "world_size")
REGION_COLUMN = "region"
REGION_SHARE = "of step"
COLD = "cold"
COLLECTIVE_COLUMN = "collective"
_BUSBW = "busbw GB/s"
# Of a line of a table of ranks: its cells.
_RANK = "rank"
_TEXTS = (MARK_COLUMN, REGION_COLUMN, COLLECTIVE_COLUMN)


def marks(row: Row) -> str:
    """List what makes a point doubtful, a letter each; formatting.MARKS explains them."""
    found = {
        "u": formatting.has_value(row["stable"]) and not row["stable"],
        "w": is_imprecise(row),
        "h": formatting.is_set(row["host_bound"]),
        "t": formatting.is_set(row["throttled"]),
        "s": is_slowed_by_one_rank(row),
        "c": row["status"] == "ok" and formatting.is_set(row["crowded"]),
        "n": row["status"] == "ok" and formatting.has_entries(row["neighbours"]),
        "q": row["status"] == "ok" and formatting.is_set(row["quick"]),
        "b": has_no_breakdown(row),
    }
    return "".join(mark for mark, is_set in found.items() if is_set)


def has_no_breakdown(row: Mapping[str, Any]) -> bool:
    """Whether the parts of the step are left out because they contradict it."""
    return formatting.has_value(row["why_no_breakdown"])


_BROKEN_DOWN = ("compute_ms", "optimizer_ms", "comm_exposed_ms", "achieved_tflops_per_device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is the same for all tables of a report.

    shared: parameters that are the same in all points. compared: settings of the baseline.
    ranks: what a rank runs on. has_throughput: whether any point has one. unit: of all times.
    """

    shared: Mapping[str, str]
    compared: Sequence[str]
    ranks: str
    has_throughput: bool
    unit: formatting.Unit

    def params_of_a_table(self, row: Row) -> dict[str, str]:
        """Parameters that make a table of their own."""
        return {
            name: value
            for name, value in row["params"].items()
            if name not in self.shared and not self._is_column(name, value)
        }

    def columns(self, rows: Sequence[Row]) -> list[str]:
        """List the settings that are columns of the table that holds `rows`."""
        first = rows[0]
        params = [
            name
            for name, value in first["params"].items()
            if self._is_column(name, value) and (self.has_throughput or name not in self.shared)
        ]
        apart = varying(rows)
        varied = [name for name in _SETTINGS if name in apart]
        if not self.has_throughput:
            # Small messages are often replayed from a graph and large ones not: size goes first.
            return sorted([*varied, *params], key=lambda name: name in OPTIONAL)
        names = [n for n in _SETTINGS if n in apart or n not in OPTIONAL]
        if not any(formatting.has_value(row["batch"]) for row in rows):
            names.remove("batch")
        # What is compared varies fastest, so that it is read from one line to the next.
        return sorted([*params, *names], key=lambda name: _setting_of(name, first) in self.compared)

    def _is_column(self, name: str, value: str) -> bool:
        if self.has_throughput:
            return name in self.compared
        return setting_order(value)[0] == 0


def make_tables(rows: Sequence[Row], layout: Layout) -> tuple[Table, ...]:
    """Make the tables of all points: after each the one of where its steps go, if that is known."""
    return tuple(table for group in _groups(rows, layout) for table in _tables(group, layout))


def region_tables(
    rows: Sequence[Row], regions: Mapping[str, Sequence[Row]], layout: Layout
) -> tuple[Table, ...]:
    """Make the tables of the regions that steps name: a line for each region of a point.

    regions: by point_id, as `raybench.analysis.step_times.regions_by_point` gives them.
    """
    tables = []
    for group in _groups(rows, layout):
        names = layout.columns(group)
        lines = [
            {**row, **region}
            for row in _in_order(group, names)
            for region in regions.get(row["point_id"], ())
        ]
        if lines:
            kind = f"regions of the step, {layout.unit.name}"
            columns = _regions(layout.unit)
            tables.append(_table(lines, names, layout, columns, kind=kind, shows=metrics.PARTS))
    return tuple(tables)


def rank_tables(rows: Sequence[Row], layout: Layout) -> tuple[Table, ...]:
    """Make the tables of what each rank does, of the points in which one rank slows the others."""
    apart = [row for row in rows if row["status"] == "ok" and is_slowed_by_one_rank(row)]
    tables = []
    for group in _groups(apart, layout):
        names = layout.columns(group)
        lines = [
            {**row, _RANK: cells}
            for row in _in_order(group, names)
            for cells in rank_lines(row, layout.unit)
        ]
        if lines:
            kind = f"where ranks differ, {layout.unit.name} of each"
            columns: list[_Column] = [
                (head, lambda row, place=place: str(row[_RANK][place]))  # type: ignore[misc]
                for place, head in enumerate(RANK_COLUMNS)
            ]
            tables.append(_table(lines, names, layout, columns, kind=kind, shows=metrics.PARTS))
    return tuple(tables)


def _groups(rows: Sequence[Row], layout: Layout) -> list[list[Row]]:
    """Group the points by the table that they are in."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row["workload"], str(row["scaling"]), *layout.params_of_a_table(row).items())
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _in_order(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    return sorted(rows, key=lambda row: [setting_order(setting(row, name)) for name in names])


def _regions(unit: formatting.Unit) -> list[_Column]:
    return [
        (REGION_COLUMN, lambda row: plain_text.plain(row["region"])),
        ("time", lambda row: formatting.part(row["region_ms"], unit)),
        (REGION_SHARE, lambda row: formatting.percent(row["share_pct"] / 100)),
    ]


def _tables(rows: Sequence[Row], layout: Layout) -> list[Table]:
    names = layout.columns(rows)
    ordered = _in_order(rows, names)
    first = rows[0]
    kind, unit = _kind(first, names, layout), layout.unit
    own = workload_metrics(rows)
    if not layout.has_throughput:
        # Parts are not shown, so nothing is missed where they are doubtful.
        marked: _Column = (MARK_COLUMN, lambda row: marks(row).replace("b", ""))
        measured = [_step(unit), marked, *_columns(unit, metrics.RATES, own)]
        return [_table(ordered, names, layout, measured, kind=kind, shows=metrics.RATES)]
    measured = [_step(unit), (MARK_COLUMN, marks), *_columns(unit, metrics.SCALING, own)]
    tables = [_table(ordered, names, layout, measured, kind=kind, shows=metrics.SCALING)]
    broken_down = [
        row
        for row in ordered
        if has_no_breakdown(row) or any(formatting.has_value(row[name]) for name in _BROKEN_DOWN)
    ]
    if broken_down:
        parts: list[_Column] = [
            (MARK_COLUMN, lambda row: "b" if has_no_breakdown(row) else ""),
            ("step", lambda row: formatting.time_in(unit, row["step_ms_p50"])),
            *_columns(unit, metrics.PARTS),
        ]
        kind = f"where the step goes, {unit.name}"
        tables.append(_table(broken_down, names, layout, parts, kind=kind, shows=metrics.PARTS))
    if held := [row for row in ordered if formatting.has_value(row["mem_parameters_bytes"])]:
        columns = _columns(unit, metrics.MEMORY)
        kind = "memory at its peak, GiB"
        tables.append(_table(held, names, layout, columns, kind=kind, shows=metrics.MEMORY))
    return [*tables, *_traffic(ordered, names, layout)]


def _traffic(rows: Sequence[Row], names: Sequence[str], layout: Layout) -> Iterator[Table]:
    """Make a table of what a step sends: a line for each kind of collective of a point."""
    lines = [
        {**row, "collective": name, "calls": calls, "message_bytes": row["comm_bytes"][name]}
        for row in rows
        if isinstance(row["comm_calls"], Mapping)
        for name, calls in row["comm_calls"].items()
    ]
    if lines:
        kind = "communication in a step"
        table = _table(lines, names, layout, _SENT, kind=kind, shows=metrics.PARTS)
        yield replace(table, optional=(_BUSBW,))


def _busbw_cell(row: Row) -> str:
    known = row["comm_busbw_gb_s"]
    found = known.get(row["collective"]) if isinstance(known, Mapping) else None
    return "" if found is None else formatting.number(found)


_SENT: Sequence[_Column] = (
    (COLLECTIVE_COLUMN, lambda row: plain_text.plain(row["collective"])),
    ("calls", lambda row: f"{row['calls']:,.0f}"),
    ("message", lambda row: formatting.size(row["message_bytes"])),
    (_BUSBW, _busbw_cell),
)


def _table(
    rows: Sequence[Row],
    names: Sequence[str],
    layout: Layout,
    measured: Sequence[_Column],
    *,
    kind: str,
    shows: metrics.Columns,
) -> Table:
    """Make a table. shows: the metrics that it is of."""
    shown = [[formatting.setting(name, setting(row, name)) for name in names] for row in rows]
    columns = [(title, [cell(row) for row in rows]) for title, cell in measured]
    # What no row has (memory on a CPU, efficiency of a precision) needs no column.
    kept = [(title, cells) for title, cells in columns if any(cells)]
    cells = zip(without_repeats(rows, shown), *(cells for _, cells in kept), strict=True)
    texts = (_heading(name, layout) for name in names if not is_numeric(rows, name))
    own = workload_metrics(rows)
    return Table(
        workload=plain_text.plain(rows[0]["workload"]),
        params=layout.params_of_a_table(rows[0]),
        kind=kind,
        columns=(*(_heading(name, layout) for name in names), *(title for title, _ in kept)),
        settings=len(names),
        rows=tuple((*settings, *found) for settings, *found in cells),
        optional=tuple(
            formatting.metric_heading(one, layout.unit)
            for one in (*shows.optional, *reversed(own[1:]))
        ),
        texts=frozenset({*texts, *_TEXTS}),
        own=own,
    )


def _columns(
    unit: formatting.Unit, shows: metrics.Columns, own: Sequence[Metric] = ()
) -> list[_Column]:
    """Make the columns of these metrics and of `own`, those that workloads declare."""
    return [_column(metric, unit) for metric in (*shows.metrics, *own)]


def _column(metric: Metric, unit: formatting.Unit) -> _Column:
    return (
        formatting.metric_heading(metric, unit),
        lambda row: formatting.metric(metric, metrics.value_of(row, metric), unit),
    )


def _step(unit: formatting.Unit) -> _Column:
    """Write the step time, or how a point ended that has none."""

    def cell(row: Row) -> str:
        is_ok = row["status"] == "ok"
        return formatting.step_in(unit, row) if is_ok else formatting.STATUS_WORDS[row["status"]]

    return f"step {unit.name}", cell


def _heading(name: str, layout: Layout) -> str:
    return layout.ranks if name == "world_size" else formatting.heading(name)


def _setting_of(name: str, row: Row) -> str | None:
    """Name the setting behind a column of the report."""
    return batch_column(row) if name == "batch" else name


def _kind(first: Row, names: Sequence[str], layout: Layout) -> str:
    """Of training, what is compared; of the rest, the settings that are no columns."""
    if not layout.has_throughput:
        ranks = formatting.ranks_words(first["world_size"], layout.ranks)
        given = {"precision": first["precision"], "world_size": ranks}
        if "dtype" in first["params"]:
            # What has a number format of its own computes nothing in the precision.
            del given["precision"]
        return ", ".join(plain_text.plain(text) for n, text in given.items() if n not in names)
    batch = {"weak": "batch per device", "strong": "global batch"}.get(first["scaling"], "")
    scaling = f"{first['scaling']} scaling" if batch and "world_size" in layout.compared else ""
    return ", ".join(filter(None, (scaling, batch if "batch" in names else "")))


def without_repeats(
    rows: Sequence[Mapping[str, Any]], shown: Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Blank what is as in the row above: of one point all, else up to what tells points apart."""
    blanked = [tuple(cells) for cells in shown[:1]]
    for (above, row), (cells_above, cells) in zip(pairwise(rows), pairwise(shown), strict=True):
        most = len(cells) - (above["point_id"] != row["point_id"])
        alike = zip(cells_above[:most], cells, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], alike))
        blanked.append(("",) * same + tuple(cells[same:]))
    return blanked


_STEP = (
    "Step: the median over the iterations; of ranks in lockstep their median, else the slowest "
    "one's. Rates follow the mean of the iterations."
)
STEP_MEANING = (
    "Median over the iterations; of ranks in lockstep their median, else the slowest one's."
)
_REGIONS = (
    "Regions: parts that the step names itself, each on the rank where it takes longest, and their "
    "share of the instrumented step in which they were timed."
)
_SCOPES = (
    "Cold: the first step after the workload was built, on the slowest rank; of several rounds the "
    "median. Warm: the step. Gains: how many times as fast as the baseline; cold only where the "
    "processes of both points were new, which measure.fresh_workers makes them: in others "
    "something is loaded already. Comm, host: exposed communication, and what the device is idle "
    "because the host is late, as shares of the step."
)
_HELD = "Memory: by torch's allocator in a step that was watched, on the device that needs most."
_SENT_IN_A_STEP = (
    "Communication in a step: counted, on the rank that sends most; messages as nccl-tests counts "
    "them, all calls together. Busbw, in the step: of profiled points each call's, on the rank "
    "that waits least; else of the gradients that DDP reduces."
)
_PARTS_FROM = (
    "The parts are those of the slowest rank, from instrumented steps after the timed ones, so "
    "their sum may differ from the step."
)


def explain(
    tables: Sequence[Table],
    baseline: Mapping[str, Any],
    ranks: str,
    plus_minus: str,
) -> tuple[str, ...]:
    """Write a paragraph for the points, one for the parts of their steps and one for the marks.

    plus_minus: a sentence, what ± holds over.
    What no table has is left out, and nothing is said twice.
    """
    # Besides the step there is nothing to explain in a table of failures.
    shown = {
        column
        for table in tables
        if len(table.columns) > table.settings + 1
        for column in table.columns
    }
    step = f"{_STEP} {plus_minus}".rstrip()
    words = {"ranks": ranks, "baseline": formatting.settings(baseline)}
    own = dict.fromkeys(metric for table in tables for metric in table.own)
    points, rates, parts = (
        _meanings(metrics, shown, words)
        for metrics in (
            [*SCALING.metrics, *own],
            RATES.metrics,
            [metric for metric in PARTS.metrics if metric not in RATES.metrics],
        )
    )
    if any(f"step {unit.name}" in shown for unit in formatting.UNITS):
        points.insert(0, step)
    paragraphs = [points, [*parts, *rates, _PARTS_FROM]] if parts else [[*points, *rates]]
    own_memory = [one for one in metrics.MEMORY.metrics if one not in SCALING.metrics]
    if held := _meanings(own_memory, shown, words):
        paragraphs.append([_HELD, *held])
    if COLLECTIVE_COLUMN in shown:
        paragraphs.append([_SENT_IN_A_STEP])
    if REGION_SHARE in shown:
        paragraphs.append([_REGIONS])
    if RANK_COLUMNS[-1] in shown:
        paragraphs.append([RANKS_MEAN])
    if COLD in shown:
        paragraphs.append([_SCOPES])
    return tuple(filter(None, [*map(" ".join, paragraphs), _marks(tables)]))


def _meanings(
    metrics: Sequence[Metric], shown: Collection[str], words: Mapping[str, str]
) -> list[str]:
    """Write a sentence for each of the metrics that a table has."""
    return [
        f"{_name(metric)}: {meaning(metric, words)}."
        for metric in metrics
        if any(formatting.metric_heading(metric, unit) in shown for unit in formatting.UNITS)
    ]


def meaning(metric: Metric, words: Mapping[str, str]) -> str:
    """Say what a metric is, without a full stop.

    words: `ranks`, what a rank runs on, and `baseline`, its settings.
    """
    text = metric.meaning or metric.description
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    return plain_text.plain(text).removesuffix(".")


def _name(metric: Metric) -> str:
    """Write the head of its column as a sentence begins, without the unit behind it."""
    name = plain_text.plain(metric.title).removesuffix(f" {metric.unit}")
    return name[:1].upper() + name[1:]


def _marks(tables: Sequence[Table]) -> str:
    letters = {
        letter
        for table in tables
        if MARK_COLUMN in table.columns
        for row in table.rows
        for letter in row[table.columns.index(MARK_COLUMN)]
    }
    phrases = [f"{mark} {text}" for mark, text in formatting.MARKS.items() if mark in letters]
    return f"{MARK_COLUMN}: " + "; ".join(phrases) + "." if phrases else ""
