"""From records, runs and devices to rows of the tables, and from a row back to its run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raybench.doubts import doubts
from raybench.numbers import numbers
from raybench.records import Device, DeviceSample, Record, Samples
from raybench.run import Run, RunStatus

if TYPE_CHECKING:
    from raybench.job import Measure
    from raybench.point import Scalar

Row = dict[str, Any]

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def text(value: Scalar) -> str:
    """A setting as the tables hold it: `true` for True, otherwise as Python writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_row(run: Run) -> Row:
    """The row of `runs`."""
    return {
        "run_id": run.run_id,
        "job_name": run.job_name,
        "job_text": run.job_text,
        "job_sha256": run.job_sha256,
        "argv": list(run.argv),
        "status": run.status.value,
        "started_at": run.started_at,
        "finished_at": run.finished_at,
        "points_total": run.points_total,
        "points_ok": run.points_ok,
        "points_failed": run.points_failed,
        "points_skipped": run.points_skipped,
        "baseline": _texts(run.baseline),
        "cluster": run.cluster,
        "host": run.host,
        "versions": dict(run.versions),
        "git_commit": run.git_commit,
        "environment": dict(run.environment),
        "tags": dict(run.tags),
    }


def run_from_row(row: Mapping[str, Any]) -> Run:
    """The run of a row of `runs`; the values of its baseline come back as text."""
    maps = ("baseline", "versions", "environment", "tags")
    return Run(
        **{
            **row,
            **{name: dict(row[name] or {}) for name in maps},
            "argv": tuple(row["argv"] or ()),
            "status": RunStatus(row["status"]),
        }
    )


def device_row(run_id: str, device: Device) -> Row:
    """A row of `devices`."""
    names = (
        name for name in Device.__dataclass_fields__ if name not in ("versions", "environment")
    )
    return {
        "run_id": run_id,
        **{name: getattr(device, name) for name in names},
        "throttle_reasons": list(device.throttle_reasons),
        "versions": dict(device.versions),
        "environment": dict(device.environment),
    }


def sample_rows(run_id: str, record: Record) -> Iterator[Row]:
    """The rows of `samples`: every iteration of every rank, warm-up included."""
    keys = {"run_id": run_id, "point_id": record.point.point_id, "attempt": record.attempt}
    for measurement in record.measurements:
        for repeat, repetition in enumerate(measurement.repetitions):
            place = {**keys, "rank": measurement.rank, "repeat": repeat}
            yield from _iterations({**place, "is_warmup": True}, repetition.warmup)
            yield from _iterations({**place, "is_warmup": False}, repetition.timed)


def _iterations(place: Row, samples: Samples) -> Iterator[Row]:
    data_ns = samples.part_ns.get("data")
    others = {name: spent for name, spent in samples.part_ns.items() if name != "data"}
    throttled = samples.throttled
    columns = zip(samples.start_ns, samples.step_ns, samples.host_ns, strict=True)
    for iteration, (start_ns, step_ns, host_ns) in enumerate(columns):
        yield {
            **place,
            "iteration": iteration,
            "start_ns": start_ns,
            "step_ns": step_ns,
            "host_ns": host_ns,
            "data_ns": data_ns[iteration] if data_ns else None,
            "other_parts_ns": {name: ns[iteration] for name, ns in others.items()} or None,
            "throttled": throttled[iteration] if throttled else None,
        }


def point_row(run_id: str, record: Record, measure: Measure) -> Row:
    """The row of `points`; what is not known yet, or does not apply, is left out (null).

    measure: what the job asked for, to tell where the measurement fell short of it.
    Raises ValueError when ranks differ in their sample counts: our bug, never the user's.
    """
    row = _identity(run_id, record)
    if not record.measurements:
        return row | {"warnings": list(record.warnings)}
    row |= numbers(record)
    return row | {"warnings": [*record.warnings, *doubts(row, record, measure)]}


def _identity(run_id: str, record: Record) -> Row:
    point, devices = record.point, record.devices
    kind = devices[0].kind if devices else None
    return {
        "run_id": run_id,
        "point_id": point.point_id,
        "attempt": record.attempt,
        "status": record.status.value,
        "error_type": record.error_type,
        "error_message": record.error_message,
        "started_at": record.started_at,
        "duration_s": record.duration_s,
        "workload": point.workload,
        "params": _texts(point.params),
        "backend": _BACKENDS[kind] if kind and point.world_size > 1 else None,
        "device_type": kind,
        "device_name": ", ".join(dict.fromkeys(device.name for device in devices)) or None,
        "world_size": point.world_size,
        "node_count": len({device.node_id for device in devices}) or None,
        "precision": point.precision.value,
        "cuda_graph": point.cuda_graph,
        "scaling": point.scaling,
        "batch_size": point.batch_size,
        "global_batch_size": point.global_batch_size,
        "grad_accumulation": point.grad_accumulation,
    }


def module_rows(run_id: str, record: Record) -> Iterator[Row]:
    """The rows of `modules`: the times by module of each profiled rank."""
    keys = {"run_id": run_id, "point_id": record.point.point_id, "attempt": record.attempt}
    for measurement in record.measurements:
        for module in measurement.profile.modules if measurement.profile else ():
            yield {
                **keys,
                "rank": measurement.rank,
                "module": module.name,
                "kind": module.kind,
                "calls": module.calls,
                "forward_ms": module.forward_ms,
                "backward_ms": module.backward_ms,
            }


def telemetry_row(run_id: str, sample: DeviceSample) -> Row:
    """A row of `telemetry`."""
    names = DeviceSample.__dataclass_fields__
    row = {"run_id": run_id, **{name: getattr(sample, name) for name in names}}
    return row | {"throttle_reasons": list(sample.throttle_reasons)}


def _texts(settings: Mapping[str, Scalar]) -> dict[str, str]:
    return {name: text(value) for name, value in settings.items()}
