"""Typed rows of points: read from a frame, with what is derived; their settings; what is shown.

Imports no pandas, which the progress of a sweep would have to wait for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from raybench.job import point
from raybench.job.point import Precision
from raybench.records.doubts import Doubt, LossesUnknown, NotCompared
from raybench.records.metrics import Column, Metric
from raybench.records.status import Status
from raybench.results.columns import columns_of
from raybench.results.point_row import PointRow

if TYPE_CHECKING:
    import pandas as pd

_Row = TypeVar("_Row")


def point_rows(frame: pd.DataFrame) -> list[PointRow]:
    """Return the rows of a frame of the table `points`, as `typed_rows` reads them.

    It may lack all columns but run_id, point_id, attempt, status and started_at. Raises
    ResultsError for a null status or started_at, and for an unknown status.
    """
    return typed_rows(frame, PointRow)


def typed_rows(frame: pd.DataFrame, kind: type[_Row]) -> list[_Row]:
    """Return the rows of a frame as dataclasses of this kind; other columns are left out.

    kind: its fields are columns of the same name; TypeError where a frame with rows lacks one
    without a default; [] where it lacks all. Null or NaN is read as `from_row` reads null. Raises
    ResultsError where a field cannot have the value.
    """
    values: dict[str, list[Any]] = {}
    for column in columns_of(kind):
        if column.name in frame:
            series = frame[column.name]
            cells = zip(series.tolist(), series.isna().tolist(), strict=True)
            values[column.name] = [column.value_of(None if null else cell) for cell, null in cells]
    rows = zip(*values.values(), strict=True)
    return [kind(**dict(zip(values, row, strict=True))) for row in rows]


@dataclass(frozen=True, kw_only=True)
class ScaledRow(PointRow):
    """A point, its rounds as one, with its speed-up against the baseline point of its series.

    Derived from `points` when reporting; None where not known, as intervals of one round.
    """

    batch: Annotated[int | None, Column("", "batch size that the job fixed")] = None
    rounds: Annotated[int, Column("", "how many are ok")] = 0
    # The 95 % interval over the rounds of this run: raybench.stats.summary.
    step_ms_low: Annotated[float | None, Column("ms", "95 % interval over rounds")] = None
    step_ms_high: Annotated[float | None, Column("ms", "95 % interval over rounds")] = None
    throughput_low: Annotated[float | None, Column("samples/s", "95 % interval over rounds")] = None
    throughput_high: Annotated[float | None, Column("samples/s", "95 % interval over rounds")] = (
        None
    )
    # A series is all points that are equal but for the settings of the baseline.
    series: Annotated[int, Column("", "counts from 0")] = 0
    is_baseline: Annotated[bool, Column("", "others are compared with it")] = False
    # Of several rounds the geometric mean of the ratios within each.
    speed_up: Annotated[
        float | None,
        Column(
            "",
            "throughput divided by that of the baseline point",
            heading="speed-up",
            meaning="{items}/s divided by those of the baseline ({baseline}){of_rounds}",
            format="ratio",
        ),
    ] = None
    speed_up_low: Annotated[float | None, Column("", "95 % interval over rounds")] = None
    speed_up_high: Annotated[float | None, Column("", "95 % interval over rounds")] = None
    # Where the point and its baseline point differ in their devices alone. Where the models of the
    # devices differ: raybench.analysis.scaling.
    efficiency: Annotated[
        float | None,
        Column(
            "",
            "speed-up divided by the ideal speed-up",
            heading="efficiency",
            meaning="the speed-up divided by the ideal speed-up, which is the ratio of {ranks}",
            format="share",
        ),
    ] = None
    efficiency_low: Annotated[float | None, Column("", "95 % interval over rounds")] = None
    efficiency_high: Annotated[float | None, Column("", "95 % interval over rounds")] = None
    clock_ratio: Annotated[
        float | None, Column("", "SM clocks divided by the baseline's, if a power cap acts")
    ] = None
    # What of the step is lost against efficiency 1, and to what: raybench.analysis.scaling.
    lost_comm: Annotated[float | None, Column("", "share of the step lost to communication")] = None
    lost_compute: Annotated[float | None, Column("", "share lost to slower computation")] = None
    lost_wait: Annotated[float | None, Column("", "share lost to waiting for one slow rank")] = None
    lost_data: Annotated[float | None, Column("", "share lost to waiting for data")] = None
    lost_host: Annotated[float | None, Column("", "share lost to the host gap")] = None
    lost_unexplained: Annotated[float | None, Column("", "the rest of the lost share")] = None
    why_no_losses: Annotated[
        LossesUnknown | None, Column("", "why it is not known what the step is lost to")
    ] = None
    serial_fraction: Annotated[
        float | None, Column("", "of Amdahl's law, by Karp and Flatt; strong scaling")
    ] = None
    memory_ratio: Annotated[float | None, Column("", "peak memory divided by the baseline's")] = (
        None
    )
    samples_per_joule: Annotated[float | None, Column("", "of all devices, timed steps")] = None
    why: Annotated[NotCompared | None, Column("", "why an ok point has no speed-up")] = None
    why_no_breakdown: Annotated[
        Doubt | None, Column("", "why the parts of the step are null here though `points` has them")
    ] = None
    wall_unsynced_share: Annotated[
        float | None,
        Column(
            "",
            "time.time() around a step without synchronizing, divided by the step time",
            heading="time.time()/step",
            meaning="what time.time() reports without synchronizing, in % of the step time",
            format="share",
        ),
    ] = None
    scatter: Annotated[
        float | None,
        Column(
            "",
            "standard deviation of the step times of a round divided by the mean",
            heading="scatter",
            meaning="standard deviation of the step times within one round, in % of their mean",
            format="share",
        ),
    ] = None


# What a report can show of a point, by column.
BY_NAME: Mapping[str, Metric] = {
    column.name: Metric(
        name=column.name,
        unit=column.unit,
        description=column.description,
        kind=column.kind,
        over_ranks=column.about.over_ranks,
        heading=column.about.heading,
        meaning=column.about.meaning,
        format=column.about.format,
    )
    for column in columns_of(ScaledRow)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What a table of a report shows, in order; `optional`: what is left out first, for room."""

    metrics: tuple[Metric, ...]
    optional: tuple[Metric, ...]


def _show(names: str, *, optional: str) -> Columns:
    """Return the columns of a table. names, optional: names of columns, separated by spaces."""
    return Columns(
        metrics=tuple(BY_NAME[name] for name in names.split()),
        optional=tuple(BY_NAME[name] for name in optional.split()),
    )


# Of points that finish samples, of the others, and of where the step goes. The page has those of
# the first two in one table.
SCALING = _show(
    "scatter throughput speed_up efficiency peak_mem_allocated_bytes first_step_ms "
    "compiled_step_ms",
    optional="compiled_step_ms first_step_ms scatter peak_mem_allocated_bytes efficiency "
    "throughput",
)
RATES = _show(
    "scatter busbw_gb_s memory_gb_s achieved_tflops_per_device "
    "burst_tflops_per_device mfu_pct gemm_share_pct nccl_choices",
    optional="gemm_share_pct scatter burst_tflops_per_device mfu_pct nccl_choices",
)
PARTS = _show(
    "compute_ms optimizer_ms data_ms host_gap_ms comm_exposed_ms unexplained_ms straggler_ms "
    "mfu_pct mfu_6n_pct gemm_share_pct achieved_tflops_per_device",
    optional="achieved_tflops_per_device gemm_share_pct mfu_6n_pct mfu_pct straggler_ms "
    "unexplained_ms host_gap_ms",
)
# What the memory is made of when it is largest.
MEMORY = _show(
    "mem_parameters_bytes mem_gradients_bytes mem_optimizer_bytes mem_activations_bytes "
    "mem_other_bytes peak_mem_allocated_bytes mem_estimate_bytes",
    optional="",
)
# What a step comes to: the progress line shows the first that a point has.
MAIN_RATES = tuple(
    BY_NAME[name]
    for name in ("throughput", "busbw_gb_s", "memory_gb_s", "achieved_tflops_per_device")
)


def workload_metrics(rows: Iterable[PointRow]) -> tuple[Metric, ...]:
    """Return the workloads' own metrics of points; of each name as its first point has it."""
    found: dict[str, Metric] = {}
    for row in rows:
        headings, methods = row.workload_headings or {}, row.methods or {}
        for name in row.workload_metrics or {}:
            heading = headings.get(name, name)
            text = methods.get(name, heading)
            found.setdefault(name, Metric(name=name, heading=heading, description=text))
    return tuple(found.values())


def is_column(metric: Metric) -> bool:
    """Return whether a metric is a column, not one that a workload declares itself."""
    return BY_NAME.get(metric.name) is metric


def value_of(row: PointRow, metric: Metric) -> Any:
    """Return a metric's value; None if unknown."""
    if is_column(metric):
        return getattr(row, metric.name, None)
    return (row.workload_metrics or {}).get(metric.name)


def find_metric(rows: Iterable[ScaledRow], name: str) -> Metric | None:
    """Return the metric of this name, a workload's own first; None if no ok point has a number."""
    measured = [row for row in rows if row.status is Status.OK]
    own = {metric.name: metric for metric in workload_metrics(measured)}
    found = own.get(name) or BY_NAME.get(name)
    values = [value_of(row, found) for row in measured] if found else []
    return found if any(isinstance(value, int | float) for value in values) else None


def rows_compared(rows: Iterable[ScaledRow]) -> list[ScaledRow]:
    """Return the points that have a speed-up, without the baseline points."""
    return [r for r in rows if r.speed_up is not None and not r.is_baseline]


def with_most_ranks(rows: Iterable[ScaledRow]) -> list[ScaledRow]:
    """Return those of `rows_compared` on the largest number of ranks among them; [] for none."""
    compared = rows_compared(rows)
    most = max((row.world_size for row in compared), default=0)
    return [row for row in compared if row.world_size == most]


# All that reports tell points apart by, in their order; the parameters of the workload come behind
# or before (`varying`). `batch` is the batch size that the job fixed.
EXECUTION, OPTIONAL = point.EXECUTION, point.OPTIONAL
SETTINGS = ("workload", "scaling", *EXECUTION, "batch", "world_size")
# Settings by which several devices share the work of a step, and their names in the field.
DEGREES = {
    **{"dp_replicate": "DDP", "dp_shard": "FSDP", "tp": "TP", "cp": "CP", "pp": "PP"},
    **{"ulysses": "Ulysses", "ring": "ring"},
}
_BATCH = {"weak": "batch_size", "strong": "global_batch_size"}
# The size of a message or an array.
SIZE = "size_bytes"
# Settings with values that say that something is not used.
_SWITCHES = ("compile", "activation_checkpointing")
_UNUSED = ("none", "false", "off", "0", "")


class HasSettings(Protocol):
    """A row with the settings of a point: those of every workload as fields, others in params."""

    @property
    def params(self) -> Mapping[str, str]:
        """Return the workload's parameters and the variables of env: name -> text."""

    @property
    def scaling(self) -> str | None:
        """Return "weak", "strong" (whenever all ranks share their work), or None: no batch size."""


def setting_of(row: HasSettings, name: str) -> Any:
    """Return the text of a parameter, else the field of that name; None if there is neither."""
    return row.params[name] if name in row.params else getattr(row, name, None)


def batch_column(row: HasSettings) -> str | None:
    """Return `batch_size` if weak, `global_batch_size` (may be null) if strong; else None."""
    return _BATCH.get(row.scaling or "")


def setting_order(value: Any) -> tuple[int, float, str]:
    """Return a sort key of a setting's value: numbers by size, precisions, then others by text.

    A text that is a number counts as one; "nan", bool and None do not. The widest precision first.
    Texts such as `1.3b` and `175b` are sorted by their size.
    """
    number = number_of(value)
    if number is not None and number == number:  # not NaN
        return (0, number, "")
    precisions = [precision.value for precision in Precision]
    if value in precisions:
        return (1, precisions.index(value), "")
    amount = _AMOUNT.fullmatch(str(value))
    size = float(amount[1]) * _FACTORS[amount[2]] if amount else 0.0
    return (2, size, str(value))


# A size with its factor, as the presets of models have it.
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kmbt])")
_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def number_of(value: Any) -> float | None:
    """Return float(value) of a number or text, also "nan", "1_0"; None if it fails, and of bool."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_numeric(rows: Sequence[HasSettings], name: str) -> bool:
    """Return whether `number_of` the setting is not None in all rows; True for no rows."""
    return all(number_of(setting_of(row, name)) is not None for row in rows)


def varying(
    rows: Sequence[HasSettings],
    but: Collection[str] = (),
    *,
    always: Collection[str] = (),
    params_first: bool = False,
) -> list[str]:
    """Return the names of the settings in which rows differ: those of SETTINGS, then parameters.

    Values are compared as text. always: settings and parameters to return even if rows do not
    differ. but: those to leave out, even if in `always`. params_first: whether parameters come
    before all settings but the workload. Rows without a field `batch` (table `points`) have instead
    batch_size if all scale weakly, else global_batch_size: name that in `but` and `always`.
    """
    params = dict.fromkeys(name for row in rows for name in row.params)
    is_weak = all(row.scaling == "weak" for row in rows)
    stored = "batch_size" if is_weak else "global_batch_size"
    fixed = [
        stored if name == "batch" and rows and not hasattr(rows[0], "batch") else name
        for name in SETTINGS
    ]
    names = dict.fromkeys([fixed[0], *params, *fixed[1:]] if params_first else [*fixed, *params])
    return [
        name
        for name in names
        if name not in but and (name in always or len({str(setting_of(r, name)) for r in rows}) > 1)
    ]


def distinguishing_settings(rows: Sequence[HasSettings]) -> list[str]:
    """Return the settings that tell points apart, in the order of `varying`. rows: one per point.

    [] for one point. All OPTIONAL settings are left out if the others suffice: a graph replays
    small messages alone, but their size tells them apart. So are settings that `preset` determines.
    """
    names = varying(rows)
    presets = {setting_of(row, "preset") for row in rows} if "preset" in names else set()
    names = [
        name
        for name in names
        if name == "preset"
        or not presets
        or len({(setting_of(r, "preset"), setting_of(r, name)) for r in rows}) > len(presets)
    ]
    rest = [name for name in names if name not in OPTIONAL]
    is_enough = len({tuple(str(setting_of(row, n)) for n in rest) for row in rows}) == len(rows)
    return rest if is_enough else names


def known_settings(row: HasSettings, names: Iterable[str]) -> dict[str, Any]:
    """Return name -> value of these settings, without unknown ones."""
    given = ((name, setting_of(row, name)) for name in names)
    return {name: value for name, value in given if value is not None and value == value}


def used_settings(row: HasSettings, names: Collection[str]) -> dict[str, Any]:
    """Return those of `known_settings` that say that a point uses something, the layout first.

    Left out are false, degrees of 1 or no number, `compile` and checkpointing that are off, and
    world_size where the layout tells it.
    """
    given = known_settings(row, names)
    degrees = {name: number_of(given.get(name)) or 1 for name in DEGREES if name in names}
    is_told = degrees and math.prod(degrees.values()) == setting_of(row, "world_size") > 1
    used = {}
    for name in sorted(given, key=lambda name: name not in (*DEGREES, "world_size")):
        text = str(given[name]).lower()
        if name == "world_size":
            is_used = not is_told
        elif name in degrees:
            is_used = degrees[name] != 1
        else:
            is_used = text not in (_UNUSED if name in _SWITCHES else ("false",))
        if is_used:
            used[name] = given[name]
    return used


def size_of(row: HasSettings) -> int:
    """Return the size of a message or an array in bytes; 0 if missing or no whole number."""
    text = str(row.params.get(SIZE, ""))
    return int(text) if text.isdecimal() else 0
