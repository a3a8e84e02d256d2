"""A sweep on its cluster, from the first worker to the row that says how the run ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from raybench.cli.interrupts import interrupt_held_back, interrupted_by_sigterm
from raybench.errors import ClusterError, RaybenchError
from raybench.records import Device, Record, Status
from raybench.report import wording
from raybench.run import Run, RunStatus
from raybench.tables import counted

if TYPE_CHECKING:
    from raybench.cluster import Cluster
    from raybench.job import Job
    from raybench.plan import Plan
    from raybench.store import RunStore
    from raybench.sweep import SweepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a run is carried out, where its tables go, and the point_ids to profile."""

    address: str
    device: Literal["auto", "cuda", "cpu"]
    output: Path
    profiled: frozenset[str]


DeviceKey = tuple[str, str, int]


def device_key(kind: str, uuid: str, host: str, index: int) -> DeviceKey:
    """What a device has in each sweep of a run: not the uuid of a CPU, which names a process."""
    return (kind, uuid, 0) if kind == "cuda" else (kind, host, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run and what is to be done of it.

    plan: of the whole run. attempts: point_id -> the attempt to make; other points are left out.
    ended: point_id -> the status of its latest attempt, of the points that have a row already.
    devices: those that the run has rows of, by `device_key`. models: the names of these.
    resume_command: what the user types to go on with it.
    """

    run: Run
    plan: Plan
    attempts: Mapping[str, int]
    ended: Mapping[str, Status]
    devices: frozenset[DeviceKey] = frozenset()
    models: frozenset[str] = frozenset()
    is_resumed: bool
    resume_command: str

    @property
    def left(self) -> Plan:
        """The plan of the points that are to be run."""
        points = (point for point in self.plan.points if point.point_id in self.attempts)
        return replace(self.plan, points=tuple(points))


def carried_out(job: Job, start: Start, where: Where, console: Console) -> Run:
    """Run the points on a cluster; the run as it ended. Raises ClusterError and ResultsError."""
    from raybench.cluster.ray_cluster import RayCluster
    from raybench.cluster.ray_connection import connect
    from raybench.scheduler import workers_needed
    from raybench.store import RunStore, hold_run
    from raybench.sweep import SweepSettings

    plan, run = start.left, start.run
    biggest = max(point.world_size for point in plan.points)
    with ExitStack() as at_the_end:
        with console.status("connecting to Ray"), interrupt_held_back():
            cluster = RayCluster(connect(where.address, where.device, biggest))
            at_the_end.enter_context(interrupted_by_sigterm())
            at_the_end.callback(cluster.close)
        told = f"{cluster.description}; run {run.run_id} in {where.output}"
        console.print(told, markup=False, highlight=False, soft_wrap=True)
        workers = workers_needed(plan, cluster.capacity)
        if not workers and start.is_resumed:
            # Others were run: what still does not fit is a row again, and no error.
            workers = 1
        if not workers:
            smallest = min(point.world_size for point in plan.points)
            raise ClusterError(
                f"no point fits: the smallest needs {smallest} devices, the cluster has "
                f"{cluster.capacity}; set matrix.world_size with --set, or use a bigger cluster"
            )
        start = replace(start, run=replace(run, cluster=cluster.description))
        if start.is_resumed:
            store = RunStore(root=where.output, run_id=run.run_id, measure=job.measure)
            store.write_run(start.run)
        else:
            at_the_end.enter_context(hold_run(where.output, run.run_id))
            store = RunStore.create(where.output, start.run, job.measure)
        settings = SweepSettings(
            measure=job.measure,
            strategy=job.placement.strategy,
            stop_on_error=job.on_error == "stop",
            profiled=where.profiled,
        )
        return recorded(settings, start, cluster, workers, store, console)


def recorded(
    settings: SweepSettings,
    start: Start,
    cluster: Cluster,
    workers: int,
    store: RunStore,
    console: Console,
) -> Run:
    """The run from its first worker to its last point; however it ends, its row says so."""
    ended = dict(start.ended)
    status = RunStatus.FAILED
    try:
        with console.status(f"starting {_workers(workers)}"):
            cluster.start(workers, settings.strategy)
        _keep_devices(start, cluster.devices, store)
        _swept(settings, start, cluster, store, console, ended)
        status = counted(start.run, ended).status
    except KeyboardInterrupt:
        # The point in flight has its row already.
        status = RunStatus.INTERRUPTED
        _tell_kept("interrupted", start, ended, store, console)
    except RaybenchError:
        _tell_kept("stopped", start, ended, store, console)
        raise
    finally:
        run = replace(counted(start.run, ended), status=status, finished_at=datetime.now(UTC))
        store.write_run(run)
        _tell_traces(store, console)
    return run


def _keep_devices(start: Start, devices: Sequence[Device], store: RunStore) -> None:
    """Write the devices that the run has no row of. Raises ClusterError for other models."""
    if not start.is_resumed:
        store.write_devices(devices)
        return
    strange = {device.name for device in devices} - start.models
    if start.models and strange:
        raise ClusterError(
            f"run {store.run_id} was measured on {', '.join(sorted(start.models))}, this cluster "
            f"has {', '.join(sorted(strange))}; start a new run, to compare the two"
        )
    keys = {device_key(d.kind, d.uuid, d.host, d.index): d for d in devices}
    if new := [device for key, device in keys.items() if key not in start.devices]:
        store.write_devices(new, f"devices-{len(start.devices)}")


def _swept(
    settings: SweepSettings,
    start: Start,
    cluster: Cluster,
    store: RunStore,
    console: Console,
    ended: dict[str, Status],
) -> None:
    """The loop over the points, with its progress; `ended` tells of the rows that are written."""
    from raybench.cli.progress import make_progress
    from raybench.sweep import PointRetried, sweep

    def write(index: int, record: Record) -> None:
        store.write_record(index, record)
        ended[record.point.point_id] = record.status
        store.write_telemetry(index, record, cluster.telemetry())

    # Progress is that of this sweep: it counts the points that are left.
    places = [i for i, p in enumerate(start.plan.points) if p.point_id in start.attempts]
    with make_progress(start.left, console) as progress:
        for event in sweep(start.plan, settings, cluster, write, start.attempts):
            place = places.index(event.index)
            if isinstance(event, PointRetried):
                _tell_retried(place, len(places), event.record, console)
            else:
                progress.show(replace(event, index=place))


def _finished(ended: Mapping[str, Status]) -> int:
    """All but the point that an interrupt cut short."""
    return sum(status is not Status.CANCELLED for status in ended.values())


def _tell_retried(place: int, total: int, record: Record, console: Console) -> None:
    number = f"[{place + 1:>{len(str(total))}}/{total}]"
    reason = wording.plain(record.error_message or "")
    text = f"{number}  lost     {record.point.point_id} is tried once more: {reason}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _tell_kept(
    what: str, start: Start, ended: Mapping[str, Status], store: RunStore, console: Console
) -> None:
    text = f"{what} before any point finished"
    if finished := _finished(ended):
        points = "point is" if finished == 1 else "points are"
        text = (
            f"{what}: {finished} finished {points} kept; "
            f"see: raybench report {store.run_id} --results {store.root}"
        )
    for line in (f"go on with: {start.resume_command}", text):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tell_traces(store: RunStore, console: Console) -> None:
    if store.traces.is_dir():
        text = f"traces: {store.traces} (open them in ui.perfetto.dev or chrome://tracing)"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
