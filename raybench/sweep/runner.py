"""Connect to a cluster, run a sweep on it, and write how the run ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

from raybench.cluster import Cluster, ClusterRequest, connect, find_kind, starts_private
from raybench.cluster.device_reservation import (
    ReservationTerms,
    reserve_this_hosts_cpus,
    this_process,
)
from raybench.errors import ClusterError, DevicesInUseError, ResultsError
from raybench.job.model import Job
from raybench.records.environment import warn_of_torch
from raybench.records.record import Record
from raybench.records.status import RunStatus, Status
from raybench.results.tables import Run
from raybench.results.writer import RunStore, hold_run
from raybench.sweep.batch_search import check_bounded
from raybench.sweep.interrupts import Interrupts
from raybench.sweep.listener import Listener
from raybench.sweep.loop import (
    Event,
    PointFinished,
    PointRetried,
    PointStarted,
    SweepSettings,
    sweep,
)
from raybench.sweep.point_source import BatchSearches, PointSource
from raybench.sweep.run_rows import RunRows
from raybench.sweep.run_state import RunState, RunTarget
from raybench.sweep.scheduler import workers_needed


def run_sweep(
    job: Job,
    start: RunState,
    where: RunTarget,
    listener: Listener,
    source: PointSource | None = None,
) -> Run:
    """Run what is left of a run on a cluster, and return the run as it ended.

    Handles signals and may end the process: see `Interrupts`. Only with `where.is_guest` may other
    threads than the main thread call it.

    Args:
        start: must have trials to do, unless there is a source. The caller must hold the lock of a
            resumed run (`hold_run`).
        source: adds the points of a new run, which then uses all devices.

    Raises:
        ClusterError: there is no usable cluster, or no point of a new run fits.
        DevicesInUseError: another sweep has the devices.
        ResultsError: rows cannot be written, or the id of a new run exists.
        UsageError: the address is malformed, or a batch search on CPU workers has no maximum.
        KeyboardInterrupt: the interrupt came before the workers started or after the end.
    """

    def close() -> None:
        """Close the cluster; tell the user if a signal interrupts the closing."""
        try:
            cluster.close()
        except KeyboardInterrupt:
            interrupts.say_farewell()
            raise

    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(listener, is_guest=where.is_guest))
        terms = ReservationTerms(
            holder=this_process(f"run {start.run.run_id}"), shared=where.shared, wait_s=where.wait_s
        )
        is_private = starts_private(where.address)
        if is_private and find_kind("local", where.device) == "cpu":
            stack.enter_context(reserve_this_hosts_cpus(terms, listener.tell))
        request = ClusterRequest(
            address=where.address,
            device=where.device,
            devices_wanted=_devices_wanted(job, start, where, source),
            wait_s=where.wait_s,
            oversubscribe=job.placement.oversubscribe,
            terms=terms,
            only=where.only,
            models=start.models,  # a resumed run needs the models of its earlier sweeps
        )
        # Hold interrupts back: an interrupted `ray.init` lets the process crash at its exit.
        what = "starting Ray on this machine" if is_private else "connecting to Ray"
        with listener.waiting(what), interrupts.held_back(math.inf):
            cluster = connect(request, end=interrupts.end, log=listener.tell)
            stack.callback(close)
            interrupts.take_signals()
        check_bounded(start.rounds.plan, cluster.kind)
        listener.tell(f"{cluster.description}; run {start.run.run_id} in {where.output}")
        if warning := warn_of_torch(start.run.versions):
            listener.tell(warning)
        workers = cluster.capacity if source else _workers_wanted(job, start, cluster)
        only_devices = where.only.names if where.only else ()
        run = replace(start.run, cluster=cluster.description, only_devices=only_devices)
        start = replace(start, run=run)
        if start.is_resumed:
            store = RunStore(
                root=where.output, run_id=run.run_id, measure=job.measure, code=start.code
            )
            store.write_run(run)
        else:
            stack.enter_context(hold_run(where.output, run.run_id))
            store = RunStore.create(where.output, run, job.measure, start.code)
        settings = _settings(job, start, where, source)
        rows = RunRows(start, store, listener)
        return record_run(settings, cluster, workers, rows, interrupts, source)


def _devices_wanted(job: Job, start: RunState, where: RunTarget, source: PointSource | None) -> int:
    """Return how many devices to wait for, or CPU workers to start in a private Ray; 0: all."""
    if where.only is not None:
        # A list without CPU workers names GPUs.
        cpu_worker_count = sum(where.only.cpu_workers().values())
        return cpu_worker_count or len(where.only.names)
    if source is not None:
        return 0  # all devices that are present
    sizes = [point.devices_needed for point in start.rounds.plan_left.points]
    may_run_together = job.placement.isolation == "device"
    # Waiting, or sharing cores, pays off only up to the devices of the largest point.
    if not may_run_together or job.placement.oversubscribe or where.wait_s:
        return max(sizes)
    return sum(sizes)


def _workers_wanted(job: Job, start: RunState, cluster: Cluster) -> int:
    """Return how many workers to start; raise ClusterError if no point of a new run fits."""
    plan = start.rounds.plan_left
    if workers := workers_needed(plan, cluster.capacity, job.placement.isolation):
        return workers
    if start.is_resumed:
        # One worker suffices to write a skipped row for each point that does not fit.
        return 1
    smallest = min(point.world_size for point in plan.points)
    raise ClusterError(
        f"no point fits: the smallest needs {smallest} devices, the cluster has "
        f"{cluster.capacity}; set matrix.world_size with --set, or use a bigger cluster"
    )


def _settings(
    job: Job, start: RunState, where: RunTarget, source: PointSource | None
) -> SweepSettings:
    """Return how the points of the run are placed and measured."""
    # Each worker times matrix products in the precision of its point and in these precisions. With
    # fresh workers, each process runs only one point and one precision.
    precisions = () if job.measure.fresh_workers else start.rounds.plan.precisions
    # If strategies differ, each device gets a worker, and the default does not matter.
    strategies = [point.strategy for point in start.rounds.plan_left.points]
    return SweepSettings(
        measure=job.measure,
        strategy=strategies[0] if strategies else job.placement.strategy,
        isolation=job.placement.isolation,
        stop_on_error=job.on_error == "stop",
        profiled=where.profiled,
        code=start.code,
        precisions=None if source else precisions,  # None: do not time matrix products
    )


def record_run(
    settings: SweepSettings,
    cluster: Cluster,
    workers: int,
    rows: RunRows,
    interrupts: Interrupts,
    source: PointSource | None = None,
) -> Run:
    """Start the workers, run the remaining trials, write how the run ended, and return the run.

    The caller closes the cluster. For errors see `run_sweep`.

    Args:
        cluster: must not be started yet.
        rows: writes the tables; the row in the table `runs` must be written already.
        interrupts: must be entered as a context manager.
    """

    def write(batch: Sequence[tuple[int, Record]]) -> None:
        with interrupts.held_back():
            rows.keep_records(batch, cluster)

    # If the process must end at once, this function tells the user which points are kept.
    interrupts.farewell = rows.tell_kept
    try:
        with rows.listener.waiting(f"starting {workers} worker{'s' * (workers != 1)}"):
            cluster.start(workers, settings.strategy)
        rows.keep_devices(cluster.devices)
        source = source or BatchSearches(rows.start.rounds)
        if (new_rounds := source.rounds(cluster)) is not None:
            rows.replace_rounds(new_rounds)
        rounds = rows.start.rounds
        events = sweep(rounds, settings, cluster, write, source, lambda: interrupts.stopping)
        with (
            rows.listener.progress(rounds.plan_left, len(rounds.todo)) as progress,
            closing(events),
            interrupts.points_run(),
        ):
            for event in events:
                rows.note(event)
                _note_event(event, interrupts, source)
                progress.show(event)
        for line in source.last_lines():
            rows.listener.tell(line)
        run = rows.close(RunStatus.INTERRUPTED if rows.unfinished else None)
    except KeyboardInterrupt:
        # `sweep` has already written the points in flight.
        run = rows.close(RunStatus.INTERRUPTED)
    except DevicesInUseError:
        rows.undo_start()
        raise
    except BaseException:
        rows.tell_kept("stopped")
        # Raise the first error even if this row cannot be written either.
        with suppress(ResultsError):
            rows.close(RunStatus.FAILED)
        raise
    if run.status is RunStatus.INTERRUPTED:
        rows.tell_kept("interrupted")
    if rows.store.traces.is_dir():
        hint = f"{rows.store.traces} (open them in ui.perfetto.dev or chrome://tracing)"
        rows.listener.tell(f"traces: {hint}")
    return run


def _note_event(event: Event, interrupts: Interrupts, source: PointSource) -> None:
    """Count the points in flight, and give the records of ended points to the source."""
    if isinstance(event, PointStarted):
        interrupts.in_flight += 1
    elif isinstance(event, PointFinished | PointRetried):
        record = event.record
        if record.status is not Status.SKIPPED:  # a skipped point has not started
            interrupts.in_flight -= 1
        source.note(record)
