"""From records, runs and devices to rows of the tables, and from a row back to its run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from raybench.job.point import RUN_SETTINGS, setting_text
from raybench.records import Device, DeviceSample, Record, Samples, Status
from raybench.records.failure_text import brief, traceback_of, type_of
from raybench.results.run import Run, RunStatus

if TYPE_CHECKING:
    from raybench.job.model import Measure
    from raybench.job.point import Scalar
    from raybench.records.environment import Code
    from raybench.records.health import Finding, Link

Row = dict[str, Any]
Columns = dict[str, list[Any]]

# Of a run.
_MAPS = ("baseline", "versions", "environment", "tags", "workload_files")
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def run_row(run: Run) -> Row:
    """Make the row of `runs`."""
    row = {field.name: getattr(run, field.name) for field in fields(run)}
    maps = {name: dict(row[name]) for name in _MAPS}
    return {
        **row,
        **maps,
        "argv": list(run.argv),
        "only_devices": list(run.only_devices),
        "status": run.status.value,
        "baseline": _texts(run.baseline),
    }


def run_from_row(row: Mapping[str, Any]) -> Run:
    """Make the run of a row of `runs`; the values of its baseline come back as text."""
    return Run(
        **{
            **row,
            **{name: dict(row[name] or {}) for name in _MAPS},
            "argv": tuple(row["argv"] or ()),
            "only_devices": tuple(row["only_devices"] or ()),
            "status": RunStatus(row["status"]),
        }
    )


def device_row(run_id: str, device: Device) -> Row:
    """Make a row of `devices`."""
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


def make_unwritten(record: Record, error: Exception) -> Record:
    """In place of an attempt of which no row can be made, which is a bug of raybench's."""
    return replace(
        record,
        status=Status.ERROR,
        measurements=(),
        warnings=(),
        error_type=type_of(error),
        error_message=f"raybench cannot keep what was measured, which is its bug: {brief(error)}",
        error_detail=traceback_of(error),
    )


def sample_columns(run_id: str, record: Record) -> Columns:
    """Make the rows of `samples`, by column: every iteration of every rank, warm-up included."""
    keys = {
        "run_id": run_id,
        "point_id": record.point.point_id,
        "attempt": record.attempt,
        "round": record.round,
        "is_control": bool(record.control_of),
    }
    columns: Columns = {}
    for measurement in record.measurements:
        for repeat, repetition in enumerate(measurement.repetitions):
            place = {**keys, "rank": measurement.rank, "repeat": repeat}
            for is_warmup, samples in ((True, repetition.warmup), (False, repetition.timed)):
                part = _iterations({**place, "is_warmup": is_warmup}, samples)
                for name, values in part.items():
                    columns.setdefault(name, []).extend(values)
    return columns


def _iterations(place: Row, samples: Samples) -> Mapping[str, Sequence[Any]]:
    count = len(samples.step_ns)
    unknown = (None,) * count
    return {
        **{name: (value,) * count for name, value in place.items()},
        "iteration": range(count),
        "start_ns": samples.start_ns,
        "step_ns": samples.step_ns,
        "host_ns": samples.host_ns,
        "data_ns": samples.part_ns.get("data") or unknown,
        "other_parts_ns": _other_parts_ns(samples) or unknown,
        "throttled": samples.throttled or unknown,
    }


def _other_parts_ns(samples: Samples) -> list[dict[str, int]]:
    """List the other parts of each iteration; empty where there are none."""
    others = {storable(name): spent for name, spent in samples.part_ns.items() if name != "data"}
    return [dict(zip(others, spent, strict=True)) for spent in zip(*others.values(), strict=True)]


def point_row(run_id: str, record: Record, measure: Measure, code: Code | None = None) -> Row:
    """Make the row of `points`; what is not known yet, or does not apply, is left out (null).

    measure: what the job asked for, to tell where the measurement fell short of it.
    code: what the workers had loaded; None where nobody looked.
    Raises ValueError when ranks differ in their sample counts: our bug, never the user's.
    """
    # Imported here, because they import numpy: commands that only read tables start without it.
    from raybench.results.point_metrics import compute_metrics
    from raybench.results.quality import crowding, quality_warnings

    is_cpu = bool(record.devices) and record.devices[0].kind == "cpu"
    row = _identity(run_id, record) | {
        "crowded": any(crowding(record.devices)) if is_cpu else None,
        "workload_sha256": code.workload_sha256 if code else None,
        "raybench_sha256": code.raybench_sha256 if code else None,
    }
    warnings = list(record.warnings)
    if record.measurements:
        row |= compute_metrics(record) | {"quick": measure.is_quick}
        warnings += quality_warnings(row, record, measure)
    return row | {"warnings": warnings}


def _identity(run_id: str, record: Record) -> Row:
    point, devices = record.point, record.devices
    settings = point.settings
    kind = devices[0].kind if devices else None
    return {
        "run_id": run_id,
        "point_id": point.point_id,
        "attempt": record.attempt,
        "round": record.round,
        "is_control": bool(record.control_of),
        "control_of": record.control_of or None,
        "status": record.status.value,
        **_failure(record),
        "started_at": record.started_at,
        "duration_s": record.duration_s,
        "workload": point.workload,
        "params": _texts({**point.params, **point.env}),
        "env": dict(point.env),
        "backend": _BACKENDS[kind] if kind and point.world_size > 1 else None,
        "device_type": kind,
        "device_name": ", ".join(dict.fromkeys(device.name for device in devices)) or None,
        "models_by_rank": [device.name for device in devices] or None,
        "node_count": len({device.node_id for device in devices}) or None,
        **{name: settings.get(name) for name in (*RUN_SETTINGS, "scaling")},
        "grad_accumulation": point.grad_accumulation,
        "neighbours": list(record.neighbours),
        "mem_estimate_bytes": record.mem_estimate_bytes,
    }


def _failure(record: Record) -> Row:
    """Tell what went wrong, and on which device; a point that was never placed has none."""
    rank = record.error_rank
    device = record.devices[rank] if rank is not None and record.devices else None
    return {
        "error_type": record.error_type,
        "error_message": record.error_message,
        "error_rank": rank,
        "error_host": device.host if device else None,
        "error_device": f"{device.kind}:{device.index}" if device else None,
        "error_detail": record.error_detail,
    }


def storable(value: Any) -> Any:
    """Make each text of a value such that UTF-8 can hold it.

    Half a surrogate pair in an exception or in a name is no reason to lose the row.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {storable(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [storable(entry) for entry in value]
    return value


def module_rows(run_id: str, record: Record) -> Iterator[Row]:
    """Make the rows of `modules`: the times by module of each profiled rank."""
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


def region_rows(run_id: str, record: Record) -> Iterator[Row]:
    """Return the rows of `regions`: parts of the step that it names itself, of each rank."""
    keys = {"run_id": run_id, "point_id": record.point.point_id, "attempt": record.attempt}
    for measurement in record.measurements:
        for region in measurement.breakdown.regions if measurement.breakdown else ():
            yield {
                **keys,
                "rank": measurement.rank,
                "region": region.name,
                "calls": region.calls,
                "region_ms": region.ms,
                "share_pct": 100 * region.share,
            }


def telemetry_columns(run_id: str, samples: Sequence[DeviceSample]) -> Columns:
    """Make the rows of `telemetry`, by column: of thousands of devices they are many."""
    columns: Columns = {
        name: [getattr(sample, name) for sample in samples]
        for name in DeviceSample.__dataclass_fields__
    }
    for name in ("node_id", "uuid", "throttle_reasons"):  # few different ones, many times
        kept = {value: storable(value) for value in set(columns[name])}
        columns[name] = [kept[value] for value in columns[name]]
    return {"run_id": [run_id] * len(samples), **columns}


def finding_row(run_id: str, finding: Finding) -> Row:
    """Make a row of `health`."""
    subject = finding.subject
    plain = {
        field.name: getattr(finding, field.name)
        for field in fields(finding)
        if field.name != "subject"
    }
    return {
        **plain,
        "run_id": run_id,
        "kind": subject.kind,
        "subject": subject.name,
        "model": subject.model,
        "uuids": list(subject.uuids),
        "verdict": finding.verdict.value,
        "action": finding.action.value if finding.action else None,
    }


def link_row(run_id: str, link: Link) -> Row:
    """Make a row of `links`."""
    return {"run_id": run_id, **{field.name: getattr(link, field.name) for field in fields(link)}}


def _texts(settings: Mapping[str, Scalar]) -> dict[str, str]:
    return {name: setting_text(value) for name, value in settings.items()}
