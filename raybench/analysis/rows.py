"""Typed rows of points with derived columns, their settings, and what tables show.

Imports no pandas, because the progress of a sweep would have to wait for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
    """Return the rows of the table `points` as dataclasses.

    Args:
        frame: needs the columns run_id, point_id, attempt, status and started_at.

    Raises:
        TypeError: a needed column is missing.
        ResultsError: a value is invalid, such as null in a needed column.
    """
    return typed_rows(frame, PointRow)


def typed_rows(frame: pd.DataFrame, row_class: type[_Row]) -> list[_Row]:
    """Return the rows of a frame as dataclasses of this class.

    Args:
        frame: rows of a table; further columns are ignored.
        row_class: a dataclass whose fields have the names of columns.

    Raises:
        TypeError: the frame lacks a column whose field has no default.
        ResultsError: a value is invalid, such as null in a field that cannot be None.
    """
    columns = [column for column in columns_of(row_class) if column.name in frame]
    # One call for all columns, because each call costs much more than its rows.
    nulls_by_column = frame[[column.name for column in columns]].isna().to_numpy().T.tolist()
    values_by_column: dict[str, list[Any]] = {}
    for column, nulls in zip(columns, nulls_by_column, strict=True):
        values = []
        for cell, is_null in zip(frame[column.name].tolist(), nulls, strict=True):
            values.append(column.value_of(None if is_null else cell))
        values_by_column[column.name] = values
    names = list(values_by_column)
    rows = zip(*values_by_column.values(), strict=True)
    return [row_class(**dict(zip(names, row, strict=True))) for row in rows]


@dataclass(frozen=True, kw_only=True)
class ScaledRow(PointRow):
    """A point (the mean of its rounds) with its speed-up over the baseline point of its series.

    A value is None if it is unknown; a single round has no intervals.
    """

    batch: Annotated[int | None, Column("", "batch size that the job fixed")] = None
    rounds: Annotated[int, Column("", "how many are ok")] = 0
    # Intervals use the scatter between the rounds of all points (`raybench.stats.summary`).
    step_ms_low: Annotated[float | None, Column("ms", "95 % interval over rounds")] = None
    step_ms_high: Annotated[float | None, Column("ms", "95 % interval over rounds")] = None
    throughput_low: Annotated[float | None, Column("samples/s", "95 % interval over rounds")] = None
    throughput_high: Annotated[float | None, Column("samples/s", "95 % interval over rounds")] = (
        None
    )
    # A series: all points that differ in the settings of the baseline alone.
    series: Annotated[int, Column("", "counts from 0")] = 0
    is_baseline: Annotated[bool, Column("", "others are compared with it")] = False
    # Geometric mean of the ratios within each round.
    speed_up: Annotated[
        float | None,
        Column(
            "",
            "throughput divided by that of the baseline point",
            heading="speed-up",
            meaning="{items}/s divided by those of the baseline ({baseline}){alike}{of_rounds}",
            format="ratio",
        ),
    ] = None
    speed_up_low: Annotated[float | None, Column("", "95 % interval over rounds")] = None
    speed_up_high: Annotated[float | None, Column("", "95 % interval over rounds")] = None
    # Known if the point and its baseline point differ in their devices alone.
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
    # Shares of the step that an efficiency of 1 would not lose: `shares_of_loss` explains each.
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


# The columns that a report can show of a point.
METRICS_BY_NAME: Mapping[str, Metric] = {
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
    """The columns of a table of a report, in order."""

    metrics: tuple[Metric, ...]
    # Metrics that are dropped if the table is too wide, in the order of dropping.
    optional: tuple[Metric, ...]


def _named_columns(names: str, *, optional: str) -> Columns:
    """Return the columns of these names, which are separated by blanks.

    Args:
        optional: names in the order in which a narrow table drops them.
    """
    return Columns(
        metrics=tuple(METRICS_BY_NAME[name] for name in names.split()),
        optional=tuple(METRICS_BY_NAME[name] for name in optional.split()),
    )


# Columns of points that finish samples.
SCALING = _named_columns(
    "scatter throughput speed_up efficiency peak_mem_allocated_bytes first_step_ms "
    "compiled_step_ms",
    optional="compiled_step_ms first_step_ms scatter peak_mem_allocated_bytes efficiency "
    "throughput",
)
# Columns of points without samples.
RATES = _named_columns(
    "scatter busbw_gb_s memory_gb_s achieved_tflops_per_device "
    "burst_tflops_per_device mfu_pct gemm_share_pct nccl_choices",
    optional="gemm_share_pct scatter burst_tflops_per_device mfu_pct nccl_choices",
)
# Parts of the step.
PARTS = _named_columns(
    "compute_ms optimizer_ms data_ms host_gap_ms comm_exposed_ms unexplained_ms straggler_ms "
    "mfu_pct mfu_6n_pct gemm_share_pct achieved_tflops_per_device",
    optional="achieved_tflops_per_device gemm_share_pct mfu_6n_pct mfu_pct straggler_ms "
    "unexplained_ms host_gap_ms",
)
# Parts of the memory at its peak.
MEMORY = _named_columns(
    "mem_parameters_bytes mem_gradients_bytes mem_optimizer_bytes mem_activations_bytes "
    "mem_other_bytes peak_mem_allocated_bytes mem_estimate_bytes",
    optional="",
)
# The progress line shows the first rate that a point has.
MAIN_RATES = tuple(
    METRICS_BY_NAME[name]
    for name in ("throughput", "busbw_gb_s", "memory_gb_s", "achieved_tflops_per_device")
)


def workload_metrics(rows: Iterable[PointRow]) -> tuple[Metric, ...]:
    """Return the metrics that the workloads of these points declare.

    The heading and the description come from the first point that has the metric.
    """
    metrics: dict[str, Metric] = {}
    for row in rows:
        headings, methods = row.workload_headings or {}, row.methods or {}
        for name in row.workload_metrics or {}:
            heading = headings.get(name, name)
            description = methods.get(name, heading)
            metrics.setdefault(name, Metric(name=name, heading=heading, description=description))
    return tuple(metrics.values())


def is_column(metric: Metric) -> bool:
    """Return whether a metric is one of METRICS_BY_NAME; workloads declare other metrics."""
    return METRICS_BY_NAME.get(metric.name) is metric


def value_of(row: PointRow, metric: Metric) -> Any:
    """Return the value of a metric; None if unknown."""
    if is_column(metric):
        return getattr(row, metric.name, None)
    return (row.workload_metrics or {}).get(metric.name)


def find_metric(rows: Iterable[ScaledRow], name: str) -> Metric | None:
    """Return the metric of this name; None if no ok point has a number.

    A metric that a workload declares precedes a column of the same name.
    """
    ok = [row for row in rows if row.status is Status.OK]
    declared = {metric.name: metric for metric in workload_metrics(ok)}
    metric = declared.get(name) or METRICS_BY_NAME.get(name)
    values = [value_of(row, metric) for row in ok] if metric else []
    return metric if any(isinstance(value, int | float) for value in values) else None


def rows_compared(rows: Iterable[ScaledRow]) -> list[ScaledRow]:
    """Return the points that have a speed-up, without the baseline points."""
    return [row for row in rows if row.speed_up is not None and not row.is_baseline]


def with_most_ranks(rows: Iterable[ScaledRow]) -> list[ScaledRow]:
    """Return the points with the most ranks among the points that have a speed-up."""
    compared = rows_compared(rows)
    most = max((row.world_size for row in compared), default=0)
    return [row for row in compared if row.world_size == most]


# EXECUTION says how a point runs. OPTIONAL has the same settings without the precision.
EXECUTION, OPTIONAL = point.EXECUTION, point.OPTIONAL
# Settings that distinguish points, besides parameters of workloads. `batch` is the batch size that
# the job sets, per device or of all devices.
SETTINGS = ("workload", "scaling", *EXECUTION, "batch", "world_size")
# Degrees of parallelism, and their usual names.
DEGREES = {
    **{"dp_replicate": "DDP", "dp_shard": "FSDP", "tp": "TP", "cp": "CP", "pp": "PP"},
    **{"ulysses": "Ulysses", "ring": "ring"},
}
_BATCH_COLUMNS = {"weak": "batch_size", "strong": "global_batch_size"}
# Parameter with the size of a message or an array.
SIZE = "size_bytes"
# Settings that can be off, and the values that mean off.
_SWITCHES = ("compile", "activation_checkpointing")
_OFF_VALUES = ("none", "false", "off", "0", "")


class HasSettings(Protocol):
    """A row with the settings of a point: parameters in `params`, other settings as fields."""

    @property
    def params(self) -> Mapping[str, str]:
        """Parameters of the workload and variables of env, as text by name."""

    @property
    def scaling(self) -> str | None:
        """Either "weak" or "strong" (all ranks share the work); None without a batch size."""


def setting_of(row: HasSettings, name: str) -> Any:
    """Return the text of a parameter, or else the field of this name; None without both."""
    return row.params[name] if name in row.params else getattr(row, name, None)


def batch_column(row: HasSettings) -> str | None:
    """Return the column with the batch that the job sets, by its scaling; None without a batch."""
    return _BATCH_COLUMNS.get(row.scaling or "")


def setting_order(value: Any) -> tuple[int, float, str]:
    """Return a sort key: numbers, then precisions from the widest, then texts.

    Texts of numbers count as numbers. Texts such as `1.3b` and `175b` are sorted by size.
    """
    number = number_of(value)
    # NaN cannot be sorted as a number.
    if number is not None and not math.isnan(number):
        return (0, number, "")
    precisions = [precision.value for precision in Precision]
    if value in precisions:
        return (1, precisions.index(value), "")
    match = _SIZE_WITH_UNIT.fullmatch(str(value))
    size = float(match[1]) * _UNIT_FACTORS[match[2]] if match else 0.0
    return (2, size, str(value))


# Presets of models have such names.
_SIZE_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([kmbt])")
_UNIT_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def number_of(value: Any) -> float | None:
    """Return a number, or the number that a text is; None for a bool, and for other values."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_numeric(rows: Sequence[HasSettings], name: str) -> bool:
    """Return whether a setting is a number in all rows."""
    return all(number_of(setting_of(row, name)) is not None for row in rows)


def varying(
    rows: Sequence[HasSettings],
    left_out: Collection[str] = (),
    *,
    always: Collection[str] = (),
    params_first: bool = False,
) -> list[str]:
    """Return the names of the settings in which rows differ: first SETTINGS, then parameters.

    For rows of the table `points`, which have no field `batch`, its place is taken by `batch_size`
    if all points scale weakly, or else by `global_batch_size`.

    Args:
        rows: points.
        left_out: settings that are never returned, even if in `always`.
        always: settings to return even if rows do not differ.
        params_first: put parameters before all settings except the workload.
    """
    params = dict.fromkeys(chain(*(row.params for row in rows)))
    settings = list(SETTINGS)
    if rows and not hasattr(rows[0], "batch"):
        is_weak = all(row.scaling == "weak" for row in rows)
        settings[settings.index("batch")] = "batch_size" if is_weak else "global_batch_size"
    names = [*settings, *params]
    if params_first:
        names = [settings[0], *params, *settings[1:]]
    differing = []
    for name in dict.fromkeys(names):
        texts = {str(setting_of(row, name)) for row in rows}
        if name not in left_out and (name in always or len(texts) > 1):
            differing.append(name)
    return differing


def distinguishing_settings(rows: Sequence[HasSettings]) -> list[str]:
    """Return the settings that distinguish the points, in the order of `varying`.

    Settings that follow from `preset` are left out. OPTIONAL settings are left out too, if the
    other settings distinguish all points.

    Args:
        rows: one row per point.
    """
    names = varying(rows)
    if "preset" in names:
        presets = {setting_of(row, "preset") for row in rows}
        # A setting follows from the preset if it has a single value for each preset.
        independent = []
        for name in names:
            pairs = {(setting_of(row, "preset"), setting_of(row, name)) for row in rows}
            if name == "preset" or len(pairs) > len(presets):
                independent.append(name)
        names = independent
    not_optional = [name for name in names if name not in OPTIONAL]
    combinations = set()
    for row in rows:
        combinations.add(tuple(str(setting_of(row, name)) for name in not_optional))
    return not_optional if len(combinations) == len(rows) else names


def known_settings(row: HasSettings, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of these settings by name, without None and NaN."""
    known = {}
    for name in names:
        value = setting_of(row, name)
        is_nan = isinstance(value, float) and math.isnan(value)
        if value is not None and not is_nan:
            known[name] = value
    return known


def used_settings(row: HasSettings, names: Collection[str]) -> dict[str, Any]:
    """Return the values of the settings that a point uses, degrees of parallelism first.

    This leaves out settings that are false, degrees of 1, `compile` and checkpointing that are off,
    and world_size if it is the product of the degrees.
    """
    known = known_settings(row, names)
    degrees = {name: number_of(known.get(name)) or 1 for name in DEGREES if name in names}
    product, world_size = math.prod(degrees.values()), setting_of(row, "world_size")
    is_world_implied = bool(degrees) and product == world_size and product > 1
    first_names = [name for name in known if name in (*DEGREES, "world_size")]
    other_names = [name for name in known if name not in first_names]
    used = {}
    for name in (*first_names, *other_names):
        if name == "world_size":
            is_used = not is_world_implied
        elif name in degrees:
            is_used = degrees[name] != 1
        else:
            off_values = _OFF_VALUES if name in _SWITCHES else ("false",)
            is_used = str(known[name]).lower() not in off_values
        if is_used:
            used[name] = known[name]
    return used


def size_of(row: HasSettings) -> int:
    """Return the size of a message or an array in bytes; 0 if missing."""
    text = str(row.params.get(SIZE, ""))
    return int(text) if text.isdecimal() else 0
