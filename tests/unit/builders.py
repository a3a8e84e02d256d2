"""Realistic records without torch: what the sweep would hand to the store."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.answer import decide
from raybench.analysis.rows import ScaledRow
from raybench.analysis.run_data import RunData
from raybench.analysis.scaling import scaling
from raybench.health.readings import Reading
from raybench.health.suite import HealthTest
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records.device import Device
from raybench.records.devices import Finding, Subject, Verdict
from raybench.records.measurement import Breakdown, Measurement, Repetition, Samples
from raybench.records.node_report import NodeReport, NodeState
from raybench.records.record import Record
from raybench.records.status import RunStatus, Status
from raybench.report.documents import format_document
from raybench.report.run_report import RunReport
from raybench.results.columns import to_row
from raybench.results.point_row import PointRow
from raybench.results.record_rows import point_row
from raybench.results.tables import Run
from raybench.results.writer import RunStore
from raybench.workloads.base import Context, Workload, WrongResultError

START = datetime(2026, 8, 21, 10, 11, 12, tzinfo=UTC)


def make_measure(**changes: Any) -> Measure:
    return Measure(**{"warmup": 2, "iterations": 6, "repeats": 1, **changes})


def make_point(**changes: Any) -> Point:
    settings: dict[str, Any] = {
        "workload": "mlp",
        "params": {"grad_accumulation": 1, "hidden": 4096, "layers": 8},
        "world_size": 1,
        "precision": Precision.FP32,
        "batch_size": 64,
        "scaling": "weak",
        **changes,
    }
    if "global_batch_size" not in settings:
        settings["global_batch_size"] = settings["batch_size"] * settings["world_size"]
    return Point(**settings)


def make_device(rank: int = 0, **changes: Any) -> Device:
    settings: dict[str, Any] = {
        "kind": "cuda",
        "node_id": "node-a",
        "host": "alpha",
        "address": "10.0.0.1",
        "index": rank,
        "uuid": f"GPU-{rank}",
        "name": "NVIDIA H200",
        "memory_bytes": 150_000_000_000,
        "pci_bus_id": f"0000:{rank:02x}:00.0",
        "driver_version": "580.1",
        "power_cap_w": 700.0,
        "process_id": 100 + rank,
        "cpu_count": 16,
        "niceness": 0,
        "omp_num_threads": 4,
        "versions": {"torch": "2.11.0"},
        "environment": {"NCCL_DEBUG": "WARN"},
        **changes,
    }
    return Device(**settings)


def make_context(rank: int = 0, world_size: int = 1, **changes: Any) -> Context:
    import torch

    settings: dict[str, Any] = {
        "device": torch.device("cpu"),
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "batch_size": 1,
        "precision": Precision.FP32,
        "seed": 7,
        **changes,
    }
    return Context(**settings)


def outcome_of_check(workload: Workload) -> str:
    """What is wrong with its result, or "right"."""
    try:
        workload.check()
    except WrongResultError as error:
        return str(error)
    return "right"


def make_samples(step_ns: Sequence[int], **parts: Sequence[int]) -> Samples:
    starts = np.concatenate([[0], np.cumsum(step_ns)[:-1]]) if len(step_ns) else []
    return Samples(
        start_ns=tuple(int(ns) for ns in starts),
        step_ns=tuple(int(ns) for ns in step_ns),
        host_ns=tuple(int(ns) // 3 for ns in step_ns),
        part_ns={name: tuple(int(ns) for ns in spent) for name, spent in parts.items()},
    )


def make_measurement(
    rank: int, steps_ns: Sequence[Sequence[int]], warmup: int = 2, **changes: Any
) -> Measurement:
    """steps_ns: the timed samples of each repetition."""
    settings: dict[str, Any] = {
        "rank": rank,
        "repetitions": tuple(
            Repetition(
                warmup=make_samples([50_000_000] * warmup), timed=make_samples(timed), settled=True
            )
            for timed in steps_ns
        ),
        "items_per_step": 64,
        "setup_s": 0.5 + rank,
        "peak_mem_allocated_bytes": 2**30 + rank,
        "peak_mem_reserved_bytes": 2**31 + rank,
        **changes,
    }
    return Measurement(**settings)


def make_record(
    point: Point | None = None,
    *,
    step_ms: float = 8.0,
    count: int = 6,
    of_ranks: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:
    """An ok record with a little seeded noise around `step_ms`; of_ranks: of each measurement."""
    point = point or make_point()
    measured = {"items_per_step": point.batch_size, **(of_ranks or {})}
    rng = np.random.default_rng(point.world_size)
    steps = 1e6 * step_ms * (1 + 1e-3 * rng.standard_normal((point.world_size, count)))
    settings: dict[str, Any] = {
        "point": point,
        "attempt": 1,
        "status": Status.OK,
        "started_at": START,
        "duration_s": 3.5,
        "devices": tuple(make_device(rank) for rank in range(point.world_size)),
        "measurements": tuple(
            make_measurement(rank, [steps[rank]], **measured) for rank in range(point.world_size)
        ),
        **changes,
    }
    return Record(**settings)


def make_failed(point: Point | None = None, **changes: Any) -> Record:
    settings: dict[str, Any] = {
        "status": Status.OOM,
        "measurements": (),
        "error_type": "OutOfMemoryError",
        "error_message": "CUDA out of memory",
        **changes,
    }
    return make_record(point, **settings)


def make_run(run_id: str = "20260821-101112-abcd", **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "run_id": run_id,
        "job_name": "ddp_scaling",
        "job_text": "version: 1\n",
        "job_sha256": "0" * 64,
        "argv": ("raybench", "sweep", "job.yaml"),
        "status": RunStatus.OK,
        "started_at": START,
        "finished_at": START + timedelta(seconds=125),
        "points_total": 3,
        "points_ok": 2,
        "points_failed": 1,
        "baseline": {"world_size": 1},
        "cluster": "private Ray on this host, 4 GPUs",
        "host": "alpha",
        "versions": {"python": "3.12.3", "torch": "2.11.0", "raybench": "0.1.0"},
        "git_commit": "a" * 40,
        "environment": {"NCCL_DEBUG": "WARN"},
        "tags": {"rack": "7"},
        **changes,
    }
    return Run(**settings)


def open_run(root: Path, run_id: str) -> RunStore:
    """The store of a run that is there, to write more into it."""
    return RunStore(root=root, run_id=run_id, measure=make_measure())


def write_run(
    root: Path,
    run_id: str,
    records: Iterable[Record] = (),
    devices: Sequence[Device] = (),
    **changes: Any,
) -> RunStore:
    """Write a run of these records, each with parts of its own; changes: of its row in `runs`."""
    store = RunStore.create(root, make_run(run_id, **changes), make_measure())
    if devices:
        store.write_devices(devices)
    for index, record in enumerate(records):
        store.write_records([(index, record)])
    return store


def make_steady(world_size: int, step_ms: float, **settings: Any) -> Record:
    """A record of which each step on each rank takes exactly `step_ms`."""
    return _exact(make_point(world_size=world_size, **settings), step_ms)


def _exact(point: Point, step_ms: float, of_ranks: Sequence[Any] = (), **changes: Any) -> Record:
    """A record of steps of exactly `step_ms`; of_ranks: the breakdown of each rank."""
    settings = {"items_per_step": point.batch_size, **changes}
    measurements = tuple(
        make_measurement(rank, [[round(step_ms * 1e6)] * 6], breakdown=breakdown, **settings)
        for rank, breakdown in enumerate(of_ranks or [None] * point.world_size)
    )
    return make_record(point, measurements=measurements)


def make_apart(
    own_ms: Sequence[float],
    step_ms: float,
    *,
    idle_ms: float = 0.0,
    point: Point | None = None,
    **breakdown: Any,
) -> Record:
    """A record of ranks whose own steps take so long, and their devices `idle_ms` less."""
    of_ranks = [
        Breakdown(local_ms=((own,) * 4, (own,) * 4), device_ms=own - idle_ms, **breakdown)
        for own in own_ms
    ]
    return _exact(point or make_point(world_size=len(own_ms)), step_ms, of_ranks)


def unscaled_point(workload: str, world_size: int = 1, **params: object) -> Point:
    """A point of a workload that takes no batch size."""
    nothing = {"batch_size": None, "global_batch_size": None, "scaling": None}
    return make_point(workload=workload, params=params, world_size=world_size, **nothing)


def make_collective(operation: str, size_bytes: int, step_ms: float, world_size: int = 4) -> Record:
    point = unscaled_point("collective", world_size, operation=operation, size_bytes=size_bytes)
    sent = {"items_per_step": None, "message_bytes": size_bytes, "busbw_factor": 1.5}
    return _exact(point, step_ms, **sent)


def make_sweep() -> list[Record]:
    """Two precisions on 1, 2 and 4 GPUs; the biggest fp32 point is out of memory."""
    records = []
    for size, ms in ((1, 8.0), (2, 10.0), (4, 12.0)):
        for precision in (Precision.BF16, Precision.FP32):
            point = make_point(world_size=size, precision=precision)
            failed = precision is Precision.FP32 and size == 4
            records.append(make_failed(point) if failed else make_record(point, step_ms=ms))
    return records


def make_row(**values: Any) -> PointRow:
    """A row of `points` of which little is known."""
    known = {"run_id": "run-a", "point_id": "p", "attempt": 1, "status": Status.OK}
    return PointRow(**{**known, "started_at": START, **values})


def make_rows(records: Iterable[Record], **changes: Any) -> list[PointRow]:
    """The rows of `points` of a run of these records; changes: of fields, in all of them."""
    measure = make_measure()
    return [replace(point_row("run-a", record, measure), **changes) for record in records]


def column(rows: Iterable[Any], name: str) -> list[Any]:
    return [getattr(row, name) for row in rows]


def with_values(rows: Sequence[PointRow], **values: Sequence[Any]) -> list[PointRow]:
    """The rows with other values of some fields, one for each row."""
    return [
        replace(row, **{name: of_rows[place] for name, of_rows in values.items()})
        for place, row in enumerate(rows)
    ]


def scaling_rows(records: Iterable[Record], baseline: dict[str, Any]) -> list[ScaledRow]:
    """The points with their speed-up over the baseline, as reports read them."""
    return scaling(make_rows(records), baseline)


def make_summary(
    records: Sequence[Record], run: Run | None = None, device_count: int = 4
) -> RunData:
    """What reports say of a run of these records."""
    devices = pd.DataFrame([to_row(make_device(index)) for index in range(device_count)])
    return RunData(run=run or make_run("run-a"), devices=devices, points=make_rows(records))


def report_text(summary, kind="terminal", **layout):
    """Write the report of a run in a format. layout: width and color."""
    return format_document(RunReport(answer=decide(summary)), kind, **layout)


def tables_of(summary, anchor="points"):
    """Return the tables of a section; none where it does not apply."""
    found = {section.anchor: tables for section, tables in RunReport(answer=decide(summary)).tables}
    return found.get(anchor, [])


def findings_of(summary):
    """Return the lines of all findings by their titles."""
    return {one.title: list(one.lines) for one in RunReport(answer=decide(summary)).listings}


def make_test(**changes: Any) -> HealthTest:
    settings: dict[str, Any] = {
        "name": "gemm bf16 8192",
        "stage": "alone",
        "unit": "TFLOP/s",
        "floor": 0.01,
        **changes,
    }
    return HealthTest(**settings)


def make_subject(rank: int = 0, **changes: Any) -> Subject:
    settings: dict[str, Any] = {
        "kind": "device",
        "uuids": (f"GPU-{rank}",),
        "name": f"alpha GPU {rank}",
        "model": "NVIDIA H200",
        **changes,
    }
    return Subject(**settings)


def make_pair(first: int, second: int, **changes: Any) -> Subject:
    return make_subject(
        kind="pair",
        uuids=(f"GPU-{first}", f"GPU-{second}"),
        name=f"alpha GPU {first} to alpha GPU {second}",
        **changes,
    )


def make_readings(
    values: Sequence[float | None], test: HealthTest | None = None, passes: int = 3, **changes: Any
) -> list[Reading]:
    """Readings of device 0, 1, ... with 0.3 % of noise."""
    rng = np.random.default_rng(len(values))
    test = test or make_test()
    return [
        Reading(
            test=test,
            subject=make_subject(rank),
            pass_number=number,
            value=None if value is None else value * (1 + 0.003 * rng.standard_normal()),
            **changes,
        )
        for number in range(1, passes + 1)
        for rank, value in enumerate(values)
    ]


def make_node_report(**changes: Any) -> NodeReport:
    settings: dict[str, Any] = {
        "host": "alpha",
        "state": NodeState.HEALTHY,
        "began": "2026-11-30T10:00:00+00:00",
        "seconds": 60.0,
        "raybench_version": "0.1.0",
        "devices": ("alpha GPU 0",),
        "device_kind": "cuda",
        **changes,
    }
    return NodeReport(**settings)


def make_finding(subject: Subject | None = None, **changes: Any) -> Finding:
    settings: dict[str, Any] = {
        "test": "gemm bf16 8192",
        "stage": "alone",
        "subject": subject or make_subject(),
        "passes": 3,
        "value": 750.0,
        "unit": "TFLOP/s",
        "expected": "750 TFLOP/s, the median of 4 alike",
        "ratio": 1.0,
        "verdict": Verdict.HEALTHY,
        **changes,
    }
    return Finding(**settings)
