"""The tables of a run's points: step times, where the step goes, memory and traffic. Pure.

Points that are compared with each other share a table: those of training, by throughput, a table
for each set of parameters. Where a step finishes no samples (collectives, matrix products, memory)
nothing is compared: parameters that are numbers, as the size of a message, become columns, and only
names, as that of an operation, make tables of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, TypeVar

from raybench.analysis import rows as metrics
from raybench.analysis.rows import ScaledRow, value_of, workload_metrics
from raybench.analysis.scaling import NORMAL_LIMITS
from raybench.analysis.settings import (
    EXECUTION,
    OPTIONAL,
    batch_column,
    is_numeric,
    setting,
    setting_order,
    varying,
)
from raybench.job.answer import SAMPLES
from raybench.records.metric import Metric
from raybench.report import formatting
from raybench.report.blocks import (
    MARKS_TITLE,
    SETTING_CHARS,
    Column,
    ColumnOf,
    Table,
    make_table,
    metric_column,
)
from raybench.results.metrics.parts import is_slowed_by_one_rank
from raybench.results.metrics.steps import is_imprecise

T = TypeVar("T")

_SETTINGS = (*EXECUTION, "batch", "world_size")
STEP_MEANING = (
    "the median over the iterations; of ranks in lockstep their median, else the slowest one's"
)
_PARTS_NOTE = (
    "The parts are those of the slowest rank, from instrumented steps after the timed ones, so "
    "their sum may differ from the step."
)
_MEMORY_NOTE = (
    "Memory: by torch's allocator in a step that was watched, on the device that needs most."
)
_TRAFFIC_NOTE = (
    "Communication in a step: counted, on the rank that sends most; messages as nccl-tests counts "
    "them, all calls together. Busbw, in the step: of profiled points each call's, on the rank "
    "that waits least; else of the gradients that DDP reduces."
)


def marks(row: ScaledRow) -> str:
    """Return a letter for each doubt about a point; `formatting.MARKS` explains them."""
    is_ok = row.status == "ok"
    found = {
        "u": row.stable is False,
        "w": is_imprecise(row),
        "h": row.host_bound,
        "t": is_throttled(row),
        "s": is_slowed_by_one_rank(row),
        "c": is_ok and row.crowded,
        "n": is_ok and row.neighbours,
        "q": is_ok and row.quick,
        "b": has_no_breakdown(row),
    }
    return "".join(mark for mark, is_set in found.items() if is_set)


def is_throttled(row: ScaledRow) -> bool:
    """Whether heat, a fault or an unknown reason limited the clocks.

    The power cap is no doubt: a GPU at work runs at it.
    """
    return bool(row.throttled) and not set(row.throttle_reasons or ("unknown",)) <= NORMAL_LIMITS


def has_no_breakdown(row: ScaledRow) -> bool:
    """Whether the parts of the step are left out because their sum contradicts it."""
    return row.why_no_breakdown is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What all tables of a report have in common.

    shared: parameters that are the same in all points. baseline: its settings. ranks: `GPUs` or
    `workers`. has_throughput: whether any point finishes samples. unit: of all times.
    plus_minus: a sentence that says what ± holds over. marks: the meaning of all marks in use.
    items: what a step finishes, in the plural.
    """

    shared: Mapping[str, str]
    baseline: Mapping[str, Any]
    ranks: str
    has_throughput: bool
    unit: formatting.Unit
    plus_minus: str = ""
    marks: str = ""
    items: str = SAMPLES

    @property
    def words(self) -> dict[str, str]:
        """Return the words that stand for {ranks} and {baseline} in the meaning of a metric."""
        return {"ranks": self.ranks, "baseline": formatting.settings(self.baseline)}

    @property
    def marks_column(self) -> Column:
        """Return the column of the marks."""
        return Column(title=MARKS_TITLE, meaning=self.marks, is_text=True)

    def params_of_table(self, row: ScaledRow) -> dict[str, str]:
        """Return the parameters of a point that make its table one of its own."""
        return {
            name: value
            for name, value in row.params.items()
            if name not in self.shared and not self._is_column(name, value)
        }

    def setting_names(self, rows: Sequence[ScaledRow]) -> list[str]:
        """Return the settings that are columns of the table of these points, in order."""
        first = rows[0]
        params = [
            name
            for name, value in first.params.items()
            if self._is_column(name, value) and (self.has_throughput or name not in self.shared)
        ]
        apart = varying(rows)
        if not self.has_throughput:
            varied = [name for name in _SETTINGS if name in apart]
            # Small messages are often replayed from a graph and large ones not: size goes first.
            return sorted([*varied, *params], key=lambda name: name in OPTIONAL)
        names = [name for name in _SETTINGS if name in apart or name not in OPTIONAL]
        if not any(row.batch is not None for row in rows):
            names.remove("batch")
        # What is compared varies fastest, so that it is read from one line to the next.
        column = {"batch": batch_column(first)}
        return sorted([*params, *names], key=lambda name: column.get(name, name) in self.baseline)

    def _is_column(self, name: str, value: str) -> bool:
        return name in self.baseline if self.has_throughput else setting_order(value)[0] == 0


def groups_of_points(
    rows: Sequence[ScaledRow], layout: Layout
) -> Iterator[tuple[list[str], list[ScaledRow]]]:
    """Yield the settings that are columns, and the points in order of them, for each table."""
    groups: dict[tuple[Any, ...], list[ScaledRow]] = {}
    for row in rows:
        key = (row.workload, str(row.scaling), *layout.params_of_table(row).items())
        groups.setdefault(key, []).append(row)
    for members in groups.values():
        names = layout.setting_names(members)
        yield names, sorted(members, key=lambda row: [_order(row, name) for name in names])


def _order(row: ScaledRow, name: str) -> tuple[int, float, str]:
    return setting_order(setting(row, name))


def setting_column(rows: Sequence[ScaledRow], name: str, ranks: str) -> Column:
    """Return the column of a setting; world_size is headed by what a rank runs on."""
    return Column(
        title=ranks if name == "world_size" else formatting.heading(name),
        is_text=not is_numeric(rows, name),
        is_setting=True,
        min_chars=SETTING_CHARS,
    )


def table_of_points(
    rows: Sequence[ScaledRow],
    names: Sequence[str],
    layout: Layout,
    items: Sequence[T],
    columns: Iterable[ColumnOf[T]],
    *,
    kind: str,
    note: str = "",
) -> Table:
    """Make a table with a line for each item: the settings of its point, then `columns` of it.

    rows: the point of each item. Settings that are as in the line above are blank.
    """
    texts = [[formatting.setting(name, setting(row, name)) for name in names] for row in rows]
    lines = list(zip(without_repeats(rows, texts), items, strict=True))
    settings: list[ColumnOf[tuple[Sequence[str], T]]] = [
        (setting_column(rows, name, layout.ranks), lambda line, place=place: line[0][place])  # type: ignore[misc]
        for place, name in enumerate(names)
    ]
    measured: list[ColumnOf[tuple[Sequence[str], T]]] = [
        (column, lambda line, cell=cell: cell(line[1]))  # type: ignore[misc]
        for column, cell in columns
    ]
    params = layout.params_of_table(rows[0]).items()
    apart = {name: value for name, value in params if name not in names}
    return make_table(
        lines,
        [*settings, *measured],
        subject=str(rows[0].workload),
        settings=formatting.settings(apart),
        kind=kind,
        note=note,
    )


def without_repeats(
    rows: Sequence[ScaledRow], texts: Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Return the texts with blanks where a line repeats the one above.

    All settings of a point are said once; of the next point, those after the first that differs,
    and always the last.
    """
    blanked = [tuple(cells) for cells in texts[:1]]
    for (above, row), (cells_above, cells) in zip(pairwise(rows), pairwise(texts), strict=True):
        most = len(cells) - (above.point_id != row.point_id)
        alike = zip(cells_above[:most], cells, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], alike))
        blanked.append(("",) * same + tuple(cells[same:]))
    return blanked


def point_tables(rows: Sequence[ScaledRow], layout: Layout) -> Iterator[Table]:
    """Yield the tables of all points: step times, and where steps go where that is known."""
    for names, ordered in groups_of_points(rows, layout):
        yield _steps(ordered, names, layout)
        if layout.has_throughput:
            yield from _parts(ordered, names, layout)
            yield from _memory(ordered, names, layout)
            yield from _traffic(ordered, names, layout)


def _steps(rows: Sequence[ScaledRow], names: Sequence[str], layout: Layout) -> Table:
    own = workload_metrics(rows)
    is_measured = any(row.status == "ok" for row in rows)
    shows = metrics.SCALING if layout.has_throughput else metrics.RATES
    # Parts of steps that finish no samples are not shown, so none is missed.
    missed = "" if layout.has_throughput else "b"
    columns: list[ColumnOf[ScaledRow]] = [
        (step_column(layout, is_measured=is_measured), lambda row: step_cell(row, layout.unit)),
        (layout.marks_column, lambda row: marks(row).translate({ord(m): None for m in missed})),
        *metric_columns(shows, layout, own),
    ]
    kind = _kind(rows[0], names, layout)
    return table_of_points(rows, names, layout, rows, columns, kind=kind)


def step_column(layout: Layout, *, is_measured: bool) -> Column:
    """Return the column of the step time; where no point is ok there is nothing to explain."""
    unit = layout.unit.name
    meaning = f"{STEP_MEANING}. Rates follow the mean of the iterations. {layout.plus_minus}"
    explained = meaning.rstrip(". ") if is_measured else ""
    return Column(title=f"step {unit}", unit=unit, meaning=explained)


def step_cell(row: ScaledRow, unit: formatting.Unit) -> str:
    """Write the step time with its ±, or how a point without one ended."""
    is_ok = row.status == "ok"
    return formatting.step_in(unit, row) if is_ok else formatting.STATUS_WORDS[row.status]


def metric_columns(
    shows: metrics.Columns, layout: Layout, own: Sequence[Metric] = ()
) -> Iterator[ColumnOf[ScaledRow]]:
    """Yield the columns of metrics, then those of `own`, which the workloads declare."""
    unit = layout.unit
    drops = {metric: place for place, metric in enumerate((*shows.optional, *reversed(own[1:])))}
    for metric in (*shows.metrics, *own):
        column = metric_column(metric, unit, layout.words, drops.get(metric))
        if metric.name == "throughput":
            column = replace(column, title=f"{layout.items}/s")
        yield (
            column,
            lambda row, metric=metric: formatting.metric(metric, value_of(row, metric), unit),  # type: ignore[misc]
        )


_BROKEN_DOWN = ("compute_ms", "optimizer_ms", "comm_exposed_ms", "achieved_tflops_per_device")


def _parts(rows: Sequence[ScaledRow], names: Sequence[str], layout: Layout) -> Iterator[Table]:
    known = [
        row
        for row in rows
        if has_no_breakdown(row) or any(getattr(row, name) is not None for name in _BROKEN_DOWN)
    ]
    unit = layout.unit
    columns: list[ColumnOf[ScaledRow]] = [
        (layout.marks_column, lambda row: "b" if has_no_breakdown(row) else ""),
        (Column(title="step"), lambda row: formatting.time_in(unit, row.step_ms_p50)),
        *metric_columns(metrics.PARTS, layout),
    ]
    if known:
        kind = f"where the step goes, {unit.name}"
        yield table_of_points(known, names, layout, known, columns, kind=kind, note=_PARTS_NOTE)


def _memory(rows: Sequence[ScaledRow], names: Sequence[str], layout: Layout) -> Iterator[Table]:
    known = [row for row in rows if row.mem_parameters_bytes is not None]
    if known:
        columns = metric_columns(metrics.MEMORY, layout)
        kind = "memory at its peak, GiB"
        yield table_of_points(known, names, layout, known, columns, kind=kind, note=_MEMORY_NOTE)


def _traffic(rows: Sequence[ScaledRow], names: Sequence[str], layout: Layout) -> Iterator[Table]:
    """Yield a table of what a step sends: a line for each kind of collective of a point."""
    sent = [(row, name, calls) for row in rows for name, calls in (row.comm_calls or {}).items()]
    columns: list[ColumnOf[tuple[ScaledRow, str, int]]] = [
        (Column(title="collective", is_text=True), lambda one: one[1]),
        (Column(title="calls"), lambda one: f"{one[2]:,.0f}"),
        (
            Column(title="message"),
            lambda one: formatting.size((one[0].comm_bytes or {}).get(one[1])),
        ),
        (
            Column(title="busbw GB/s", drop=0),
            lambda one: formatting.number((one[0].comm_busbw_gb_s or {}).get(one[1])),
        ),
    ]
    if sent:
        points = [row for row, _, _ in sent]
        kind = "communication in a step"
        yield table_of_points(points, names, layout, sent, columns, kind=kind, note=_TRAFFIC_NOTE)


def _kind(first: ScaledRow, names: Sequence[str], layout: Layout) -> str:
    """Return what is compared in training; of other workloads, the settings that are no columns."""
    if not layout.has_throughput:
        ranks = formatting.ranks_words(first.world_size, layout.ranks)
        given = {"precision": first.precision, "world_size": ranks}
        if "dtype" in first.params:
            # A workload with a number format of its own computes nothing in the precision.
            del given["precision"]
        return ", ".join(str(text) for name, text in given.items() if name not in names)
    batch = {"weak": "batch per device", "strong": "global batch"}.get(first.scaling or "", "")
    scaling = f"{first.scaling} scaling" if batch and "world_size" in layout.baseline else ""
    return ", ".join(filter(None, (scaling, batch if "batch" in names else "")))
