"""The row of a point, typed: a field for each column of `points`, and how a record becomes one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from raybench.job.point import RUN_SETTINGS, setting_text
from raybench.records import (
    Column,
    Measurement,
    RankMetrics,
    RankShare,
    Record,
    Status,
    combine_ranks,
    relate_to_step,
)
from raybench.results.breakdown import (
    PartColumns,
    collective_warnings,
    part_columns,
    part_warnings,
)
from raybench.results.columns import columns_of
from raybench.results.metrics import (
    NO_ITEMS,
    ConditionColumns,
    MemoryColumns,
    RateColumns,
    StepColumns,
    allocation_warnings,
    condition_columns,
    crowding,
    memory_columns,
    rate_columns,
    rate_warnings,
    shortfall_warnings,
    step_columns,
    throttling_warnings,
    unsteady_warnings,
)

if TYPE_CHECKING:
    from raybench.job.model import Measure
    from raybench.records.environment import Code

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, kw_only=True)
class AttemptKey:
    """The columns that identify an attempt: run, point, and its number."""

    run_id: Annotated[str, Column("", "id of the run")]
    point_id: Annotated[str, Column("", "id of the point")]
    attempt: Annotated[int, Column("", "counts from 1, over all rounds")]


def setting_column(name: str) -> Column:
    """Return the column of a run setting, as `raybench.job.point` declares it."""
    about = RUN_SETTINGS[name].about
    return Column(about.unit, about.column)


@dataclass(frozen=True, kw_only=True)
class PointColumns(AttemptKey):
    """Which point it is, where it ran, and how the attempt ended."""

    round: Annotated[int | None, Column("", "counts from 1; null: one round")] = None
    control_of: Annotated[int | None, Column("", "world_size of the block that it ends")] = None
    status: Annotated[Status, Column("", "ok, oom, error, timeout, lost, skipped, cancelled")]
    error_type: Annotated[str | None, Column("", "class of the exception")] = None
    error_message: Annotated[str | None, Column("", "why it is not ok")] = None
    error_rank: Annotated[int | None, Column("", "rank that failed first")] = None
    error_host: Annotated[str | None, Column("", "host of that rank")] = None
    error_device: Annotated[str | None, Column("", "its device, as in cuda:3")] = None
    error_detail: Annotated[str | None, Column("", "end of its traceback or log")] = None
    started_at: Annotated[datetime, Column("UTC", "start")]
    duration_s: Annotated[float | None, Column("s", "of the whole attempt")] = None
    workload: Annotated[str, Column("", "name or class")] = ""
    params: Annotated[
        Mapping[str, str], Column("", "parameters of the workload and variables of env, as text")
    ] = field(default_factory=dict)
    env: Annotated[Mapping[str, str], Column("", "variables that the job set")] = field(
        default_factory=dict
    )
    workload_sha256: Annotated[str | None, Column("", "its source")] = None
    raybench_sha256: Annotated[str | None, Column("", "raybench's source")] = None
    backend: Annotated[str | None, Column("", "null for 1 rank")] = None
    device_type: Annotated[str | None, Column("", "cuda or cpu")] = None
    device_name: Annotated[str | None, Column("", "model")] = None
    world_size: Annotated[int, setting_column("world_size")] = 1
    node_count: Annotated[int | None, Column("", "nodes used")] = None
    precision: Annotated[str, setting_column("precision")] = "fp32"
    scaling: Annotated[Literal["weak", "strong"] | None, Column("", "weak or strong")] = None
    cuda_graph: Annotated[bool, setting_column("cuda_graph")] = False
    shares: Annotated[str, setting_column("shares")] = "equal"
    slow_ratio: Annotated[float, setting_column("slow_ratio")] = 1.0
    slow_count: Annotated[int, setting_column("slow_count")] = 1
    slow_by: Annotated[str, setting_column("slow_by")] = "compute"
    devices: Annotated[str, setting_column("devices")] = "any"
    strategy: Annotated[str, setting_column("strategy")] = "pack"
    batch_size: Annotated[int | None, setting_column("batch_size")] = None
    global_batch_size: Annotated[int | None, setting_column("global_batch_size")] = None
    grad_accumulation: Annotated[int | None, Column("", "passes per step")] = None
    models_by_rank: Annotated[
        tuple[str, ...] | None, Column("", "models of the devices, in rank order")
    ] = None


@dataclass(frozen=True, kw_only=True)
class UnevenColumns:
    """How a step is shared out, and what probes found of each device beforehand."""

    share_by_rank: Annotated[
        tuple[int, ...] | None, Column("samples", "of a step, where shares are uneven")
    ] = None
    fixed_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "of a step, by a probe of the device alone")
    ] = None
    speed_by_rank: Annotated[
        tuple[float, ...] | None, Column("samples/s", "of further samples, by the probe")
    ] = None
    slow_ratio_by_rank: Annotated[
        tuple[float | None, ...] | None, Column("", "measured, of emulated devices; null: none")
    ] = None
    exchange_ms: Annotated[
        float | None, Column("ms", "what an exchange adds to a balanced step")
    ] = None
    predicted_step_ms: Annotated[
        float | None, Column("ms", "longest own step and the exchange")
    ] = None
    crossover_batch: Annotated[
        float | None, Column("samples", "global; above it by_speed beats fast")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PointRow(
    UnevenColumns,
    MemoryColumns,
    PartColumns,
    ConditionColumns,
    RateColumns,
    StepColumns,
    RankMetrics,
    PointColumns,
):
    """A row of `points`: an attempt at a point, or the mean of its rounds.

    None: not known, or the metric does not apply.
    """

    workload_metrics: Annotated[
        Mapping[str, float] | None, Column("", "those that the workload declares")
    ] = None
    workload_headings: Annotated[
        Mapping[str, str] | None, Column("", "their headings, with the units")
    ] = None
    warnings: Annotated[tuple[str, ...], Column("", "reasons to doubt the figures")] = ()
    neighbours: Annotated[tuple[str, ...], Column("", "points, runs and processes beside it")] = ()
    crowded: Annotated[bool | None, Column("", "CPU workers share cores")] = None
    quick: Annotated[bool | None, Column("", "a short look: min_seconds is 0")] = None


def point_row(run_id: str, record: Record, measure: Measure, code: Code | None = None) -> PointRow:
    """Return the row of an attempt; what is not known yet, or does not apply, is None.

    measure: what the job asked for, to warn where the measurement fell short of it.
    code: what the workers had loaded; None where nobody looked.
    Raises ValueError where ranks differ in their sample counts: our bug, never the user's.
    """
    known = _identity(run_id, record) | {
        "workload_sha256": code.workload_sha256 if code else None,
        "raybench_sha256": code.raybench_sha256 if code else None,
    }
    if not record.measurements:
        return PointRow(**known)
    row = PointRow(**{**known, **point_metrics(record)}, quick=measure.is_quick)
    return replace(row, warnings=(*record.warnings, *_doubts(row, record, measure)))


def point_metrics(record: Record) -> dict[str, Any]:
    """Return column -> value of an ok record, as computed from its measurements.

    None: not known, or does not apply. Raises ValueError where ranks differ in their sample counts.
    """
    working = tuple(m for m in record.measurements if m.share is None or m.share.items)
    shares = [m.share for m in record.measurements if m.share is not None]
    uneven = uneven_columns(shares if len(shares) == len(record.measurements) else [])
    # Ranks without a share of an uneven step take no time.
    record = replace(record, measurements=working)
    steps = step_columns(record)
    typical_ms, mean_ms = steps.step_ms_p50 or 0.0, steps.step_ms_mean or 0.0
    parts = part_columns(working, typical_ms)
    own = {metric: None for one in working for metric in one.workload_metrics}
    values = {
        metric.name: relate_to_step(
            metric.over_step,
            combine_ranks(
                metric.over_ranks or "mean", [one.workload_metrics.get(metric) for one in working]
            ),
            typical_ms=typical_ms,
            mean_ms=mean_ms,
        )
        for metric in own
    }
    methods = {
        **(parts.methods or {}),
        **{metric.name: metric.meaning or metric.description for metric in own},
    }
    subjects = (
        steps,
        rate_columns(record, mean_ms),
        condition_columns(working),
        parts,
        memory_columns(record),
        uneven,
    )
    return {
        **{name: value for subject in subjects for name, value in vars(subject).items()},
        **_combine_ranks(working, shares),
        "methods": methods or None,
        "workload_metrics": {n: v for n, v in values.items() if v is not None} or None,
        "workload_headings": {metric.name: metric.title for metric in own} or None,
    }


def uneven_columns(shares: Sequence[RankShare]) -> UnevenColumns:
    """Return the columns on ranks with these shares, in rank order, idle ranks included.

    All None without any share.
    """
    if not shares:
        return UnevenColumns()
    return UnevenColumns(
        share_by_rank=tuple(share.items for share in shares),
        fixed_ms_by_rank=tuple(share.fixed_ms for share in shares),
        speed_by_rank=tuple(share.items_per_s for share in shares),
        slow_ratio_by_rank=tuple(share.slow_ratio for share in shares),
        exchange_ms=shares[0].exchange_ms,
        predicted_step_ms=shares[0].predicted_step_ms,
        crossover_batch=shares[0].crossover_batch,
    )


def _combine_ranks(
    measurements: Sequence[Measurement], shares: Sequence[RankShare]
) -> dict[str, Any]:
    """Return column -> value of a point for each of RankMetrics, as the column's `over_ranks` says.

    shares: of an uneven step, from which `gradient_error` is taken; empty for other points.
    """
    found = {
        column.name: combine_ranks(
            column.about.over_ranks or "max", [getattr(one, column.name) for one in measurements]
        )
        for column in columns_of(RankMetrics)
    }
    # The check of an uneven step is made with its probes.
    return found | ({"gradient_error": shares[0].gradient_error} if shares else {})


def _identity(run_id: str, record: Record) -> dict[str, Any]:
    """Return the columns that do not depend on a measurement, by name."""
    point, devices = record.point, record.devices
    settings = point.settings
    kind = devices[0].kind if devices else None
    rank = record.error_rank
    failed = devices[rank] if rank is not None and devices else None
    return {
        **keys_of(run_id, record),
        "round": record.round,
        "control_of": record.control_of or None,
        "status": record.status,
        "error_type": record.error_type,
        "error_message": record.error_message,
        "error_rank": rank,
        "error_host": failed.host if failed else None,
        "error_device": f"{failed.kind}:{failed.index}" if failed else None,
        "error_detail": record.error_detail,
        "started_at": record.started_at,
        "duration_s": record.duration_s,
        "workload": point.workload,
        "params": {name: setting_text(v) for name, v in {**point.params, **point.env}.items()},
        "env": dict(point.env),
        "backend": _BACKENDS[kind] if kind and point.world_size > 1 else None,
        "device_type": kind,
        "device_name": ", ".join(dict.fromkeys(device.name for device in devices)) or None,
        "models_by_rank": tuple(device.name for device in devices) or None,
        "node_count": len({device.node_id for device in devices}) or None,
        **{name: settings.get(name) for name in (*RUN_SETTINGS, "scaling")},
        "grad_accumulation": point.grad_accumulation,
        "warnings": record.warnings,
        "neighbours": record.neighbours,
        "mem_estimate_bytes": record.mem_estimate_bytes,
        "crowded": any(crowding(devices)) if kind == "cpu" else None,
    }


def keys_of(run_id: str, record: Record) -> dict[str, Any]:
    """Return name -> value of the fields of an AttemptKey."""
    return {"run_id": run_id, "point_id": record.point.point_id, "attempt": record.attempt}


def _doubts(row: PointRow, record: Record, measure: Measure) -> Iterator[str]:
    """Yield what the reader of an ok point's row must know, one sentence each."""
    if row.batch_size is not None and record.measurements[0].items_per_step is None:
        yield NO_ITEMS
    yield from collective_warnings(row)
    yield from shortfall_warnings(row, measure)
    yield from unsteady_warnings(row, record, measure)
    yield from part_warnings(row)
    yield from allocation_warnings(row)
    yield from throttling_warnings(row, record)
    yield from rate_warnings(row)
