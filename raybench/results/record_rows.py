"""Make rows of the tables from a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from raybench.job.point import RUN_SETTINGS, setting_text
from raybench.records.measurement import RankMetrics, Samples
from raybench.records.metrics import combine_ranks
from raybench.records.record import Record
from raybench.results.breakdown import part_columns
from raybench.results.columns import columns_of, to_row
from raybench.results.doubts import doubts_of
from raybench.results.metrics import (
    condition_columns,
    crowding,
    memory_columns,
    rate_columns,
    relate_to_step,
    step_columns,
)
from raybench.results.point_row import PointRow
from raybench.results.tables import storable
from raybench.results.uneven import uneven_columns

if TYPE_CHECKING:
    from raybench.job.model import Measure
    from raybench.records.code import Code

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def point_row(run_id: str, record: Record, measure: Measure, code: Code | None = None) -> PointRow:
    """Return the row in `points` of an attempt; its metrics are None without measurements.

    Args:
        measure: what the job asked for; a shorter measurement gets a doubt.
        code: the code that the workers had loaded; None if unknown.

    Raises:
        ValueError: ranks have different numbers of steps, which is a bug of raybench.
    """
    point, devices, rank = record.point, record.devices, record.error_rank
    settings: dict[str, Any] = {
        name: point.settings.get(name) for name in (*RUN_SETTINGS, "scaling")
    }
    device_type = devices[0].kind if devices else None
    failed_device = devices[rank] if rank is not None and devices else None
    row = PointRow(
        **_attempt_key(run_id, record),
        round=record.round,
        control_of=record.control_of or None,
        status=record.status,
        error_type=record.error_type,
        error_message=record.error_message,
        error_rank=rank,
        error_host=failed_device.host if failed_device else None,
        error_device=f"{failed_device.kind}:{failed_device.index}" if failed_device else None,
        error_detail=record.error_detail,
        hang=record.hang,
        started_at=record.started_at,
        duration_s=record.duration_s,
        workload=point.workload,
        params={name: setting_text(value) for name, value in {**point.params, **point.env}.items()},
        env=dict(point.env),
        workload_sha256=code.workload_sha256 if code else None,
        raybench_sha256=code.raybench_sha256 if code else None,
        backend=_BACKENDS[device_type] if device_type and point.world_size > 1 else None,
        device_type=device_type,
        device_name=", ".join(dict.fromkeys(device.name for device in devices)) or None,
        models_by_rank=tuple(device.name for device in devices) or None,
        node_count=len({device.node_id for device in devices}) or None,
        **settings,
        grad_accumulation=point.grad_accumulation,
        neighbours=record.neighbours,
        node_neighbours=record.node_neighbours,
        mem_estimate_bytes=record.mem_estimate_bytes,
        crowded=any(crowding(devices)) if device_type == "cpu" else None,
    )
    if not record.measurements:
        return row
    row = replace(row, **point_metrics(record), quick=measure.is_quick)
    return replace(row, doubts=doubts_of(row, record, measure))


def point_metrics(record: Record) -> dict[str, Any]:
    """Return the columns of `points` that follow from the measurements of an ok record.

    Columns on shares are missing unless the point is uneven.

    Raises:
        ValueError: ranks have different numbers of steps, which is a bug of raybench.
    """
    shares = [m.share for m in record.measurements if m.share is not None]
    # Ranks without a share of an uneven step take no time, so they are left out.
    working = tuple(m for m in record.measurements if m.share is None or m.share.items)
    working_record = replace(record, measurements=working)
    steps = step_columns(working_record)
    typical_ms, mean_ms = steps.step_ms_p50 or 0.0, steps.step_ms_mean or 0.0
    parts = part_columns(working, typical_ms)
    # Metrics that the workload declares.
    declared = dict.fromkeys(chain(*(m.workload_metrics for m in working)))
    values: dict[str, float] = {}
    for metric in declared:
        by_rank = [m.workload_metrics.get(metric) for m in working]
        per_step = combine_ranks(metric.over_ranks or "mean", by_rank)
        value = relate_to_step(metric.over_step, per_step, typical_ms=typical_ms, mean_ms=mean_ms)
        if value is not None:
            values[metric.name] = value
    methods = dict(parts.methods or {})
    for metric in declared:
        methods[metric.name] = metric.meaning or metric.description
    # Columns of raybench: dataclasses with a field for each column.
    column_groups = (
        steps,
        rate_columns(working_record, mean_ms),
        condition_columns(working),
        parts,
        memory_columns(working_record),
    )
    columns: dict[str, Any] = {}
    for group in column_groups:
        columns |= vars(group)
    for column in columns_of(RankMetrics):
        by_rank = [getattr(m, column.name) for m in working]
        columns[column.name] = combine_ranks(column.about.over_ranks or "max", by_rank)
    # Devices without a share wait, and use energy too.
    columns["energy_j"] = combine_ranks("sum", [m.energy_j for m in record.measurements])
    # An uneven point checks its gradients while it probes the devices.
    if shares:
        columns["gradient_error"] = shares[0].gradient_error
    if shares and len(shares) == len(record.measurements):
        columns |= vars(uneven_columns(shares))
    return {
        **columns,
        "methods": methods or None,
        "workload_metrics": values or None,
        "workload_headings": {metric.name: metric.title for metric in declared} or None,
    }


def _attempt_key(run_id: str, record: Record) -> dict[str, Any]:
    """Return the columns of `AttemptKey`."""
    return {"run_id": run_id, "point_id": record.point.point_id, "attempt": record.attempt}


def sample_columns(run_id: str, record: Record) -> dict[str, list[Any]]:
    """Return the columns of `samples`: all iterations of all ranks; {} without measurements.

    The rows are sorted by rank and repeat, with the warm-up first.
    """
    key = {**_attempt_key(run_id, record), "round": record.round}
    columns: dict[str, list[Any]] = {}
    for measurement in record.measurements:
        for repeat, repetition in enumerate(measurement.repetitions):
            constants = {**key, "rank": measurement.rank, "repeat": repeat}
            for is_warmup, samples in ((True, repetition.warmup), (False, repetition.timed)):
                columns_of_phase = _columns_of_samples(
                    {**constants, "is_warmup": is_warmup}, samples
                )
                for name, values in columns_of_phase.items():
                    columns.setdefault(name, []).extend(values)
    return columns


def _columns_of_samples(constants: Mapping[str, Any], samples: Samples) -> dict[str, Iterable[Any]]:
    """Return the columns of these samples, with the same `constants` in each row."""
    rows = len(samples.step_ns)
    unknown = (None,) * rows
    # `data` has a column. Other named parts are a map in each row.
    other_parts = {storable(name): ns for name, ns in samples.part_ns.items() if name != "data"}
    other_parts_by_row = []
    for row_ns in zip(*other_parts.values(), strict=True):
        other_parts_by_row.append(dict(zip(other_parts, row_ns, strict=True)))
    return {
        **{name: (value,) * rows for name, value in constants.items()},
        "iteration": range(rows),
        "start_ns": samples.start_ns,
        "step_ns": samples.step_ns,
        "host_ns": samples.host_ns,
        "data_ns": samples.part_ns.get("data") or unknown,
        "other_parts_ns": other_parts_by_row or unknown,
        "throttled": samples.throttled or unknown,
    }


def module_rows(run_id: str, record: Record) -> list[dict[str, Any]]:
    """Return the rows of `modules`: one per profiled rank and module."""
    return [
        {**_attempt_key(run_id, record), "rank": measurement.rank, **to_row(module)}
        for measurement in record.measurements
        for module in (measurement.profile.modules if measurement.profile else ())
    ]


def region_rows(run_id: str, record: Record) -> list[dict[str, Any]]:
    """Return the rows of `regions`: one per rank and region."""
    return [
        {
            **_attempt_key(run_id, record),
            "rank": measurement.rank,
            "region": region.name,
            "calls": region.calls,
            "region_ms": region.ms,
            "share_pct": 100 * region.share,
        }
        for measurement in record.measurements
        for region in (measurement.breakdown.regions if measurement.breakdown else ())
    ]
