"""A sweep on its cluster, from connecting to the row that says how the run ended; Ctrl-C in it."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol, Self

from raybench.cluster import Cluster, ClusterRequest, connect, starts_private
from raybench.cluster.device_reservation import (
    ReservationTerms,
    reserve_this_hosts_cpus,
    this_process,
)
from raybench.errors import ClusterError, DevicesInUseError, ResultsError
from raybench.job.model import Job, Measure
from raybench.job.point import Point
from raybench.records.environment import warn_of_torch
from raybench.records.record import Record, TrialKey
from raybench.records.status import RunStatus, Status
from raybench.results.tables import Run
from raybench.results.writer import RunStore, hold_run
from raybench.sweep.loop import (
    LoopCallbacks,
    PointFinished,
    PointRetried,
    PointStarted,
    SweepSettings,
    sweep,
)
from raybench.sweep.run_state import Listener, RunRows, RunState, RunTarget
from raybench.sweep.scheduler import BatchSearches, Rounds, check_bounded, workers_needed

# The seconds and the exit code of `Interrupts`.
_TICK_S = 0.25
_NOTICE_S = 1.5  # Ray looks for signals once a second while it waits
_CLOSE_S = 15.0
_LAST_S = 1.0
_INTERRUPTED = 130


class PointSource(Protocol):
    """Makes the points of a run while it runs, from its devices and records; in the main thread."""

    def rounds(self, cluster: Cluster) -> Rounds:
        """Return the first rounds, on a cluster whose workers have started; called first, once."""

    def measure_of(self, point: Point) -> Measure | None:
        """Return a point's settings; None: the job's, no breakdown in later rounds or controls."""

    def note(self, record: Record) -> None:
        """Use the record of an attempt that ended or was skipped; a trial may have two, if lost."""

    def further_round(self, number: int) -> Sequence[Point]:
        """Return the points of the next round, `number`, for the same workers; empty ends a run."""


def run_sweep(
    job: Job,
    start: RunState,
    where: RunTarget,
    listener: Listener,
    source: PointSource | None = None,
) -> Run:
    """Run what is left of a run on a cluster, and return the run as it ended.

    For the main thread: it takes SIGINT and SIGTERM, and may end the process, as `Interrupts`.
    `start` must have points left, and a resumed run must be held. source: makes the points instead,
    on all devices; `start` then is new and has none. Raises ClusterError where no cluster can be
    had or used, it is gone, has only other models than a resumed run, or fits no point of a new
    one, DevicesInUseError where another sweep has the devices, ResultsError where a new run's id is
    taken or rows cannot be written, UsageError for a bad address or a batch search without maximum
    on CPU workers, KeyboardInterrupt before workers start or after the end, or what source raises.
    """

    def close() -> None:
        try:
            cluster.close()
        except KeyboardInterrupt:  # the user is told what is kept
            interrupts.say_farewell()
            raise

    with ExitStack() as at_the_end:
        interrupts = at_the_end.enter_context(Interrupts(listener))
        terms = ReservationTerms(
            holder=this_process(f"run {start.run.run_id}"), shared=where.shared, wait_s=where.wait_s
        )
        has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
        is_on_cpus = where.device == "cpu" or (where.device == "auto" and not has_gpus)
        if is_on_cpus and starts_private(where.address):
            at_the_end.enter_context(reserve_this_hosts_cpus(terms, listener.tell))
        # Ray's native code crashes the process at its exit when `ray.init` has been interrupted.
        with listener.waiting("connecting to Ray"), interrupts.held_back(math.inf):
            request = ClusterRequest(
                address=where.address,
                device=where.device,
                wanted=_devices_wanted(job, start, where, source),
                wait_s=where.wait_s,
                oversubscribe=job.placement.oversubscribe,
                terms=terms,
                only=where.only,
                models=start.models,
            )
            cluster = connect(request, end=interrupts.end, log=listener.tell)
            at_the_end.callback(close)
            interrupts.take_signals()
        check_bounded(start.plan, cluster.kind)
        listener.tell(f"{cluster.description}; run {start.run.run_id} in {where.output}")
        if warning := warn_of_torch(start.run.versions):
            listener.tell(warning)
        workers = cluster.capacity if source else _workers_wanted(job, start, cluster)
        only_devices = where.only.names if where.only else ()
        run = replace(start.run, cluster=cluster.description, only_devices=only_devices)
        start = replace(start, run=run)
        if not start.is_resumed:
            at_the_end.enter_context(hold_run(where.output, run.run_id))
            store = RunStore.create(where.output, run, job.measure, start.code)
        else:  # it is held already
            store = RunStore(
                root=where.output, run_id=run.run_id, measure=job.measure, code=start.code
            )
            store.write_run(run)
        # A fresh worker runs in one precision only.
        of_plan = () if job.measure.fresh_workers else start.plan.precisions
        settings = SweepSettings(
            measure=job.measure,
            # All points have one, or each device gets a worker.
            strategy=next((p.strategy for p in start.left.points), job.placement.strategy),
            isolation=job.placement.isolation,
            stop_on_error=job.on_error == "stop",
            profiled=where.profiled,
            code=start.code,
            precisions=None if source else of_plan,
        )
        rows = RunRows(start, store, listener)
        return record_run(settings, cluster, workers, rows, interrupts, source)


def _devices_wanted(job: Job, start: RunState, where: RunTarget, source: PointSource | None) -> int:
    """Return how many devices a private Ray is started with, or are waited for; 0: as there are."""
    if where.only is not None:
        return sum(where.only.cpu_workers().values()) or len(where.only.names)
    if source is not None:
        return 0
    sizes = [point.devices_needed for point in start.left.points]
    # Points side by side can use more devices; those are not waited for, and share no cores.
    is_alone = job.placement.isolation != "device" or job.placement.oversubscribe
    return max(sizes) if is_alone or where.wait_s else sum(sizes)


def _workers_wanted(job: Job, start: RunState, cluster: Cluster) -> int:
    """Return how many workers to start. Raises ClusterError where no point of a new run fits."""
    plan = start.left
    if workers := workers_needed(plan, cluster.capacity, job.placement.isolation):
        return workers
    if start.is_resumed:
        # Other points of it were run: one that still does not fit is a skipped row, and no error.
        return 1
    smallest = min(point.world_size for point in plan.points)
    raise ClusterError(
        f"no point fits: the smallest needs {smallest} devices, the cluster has "
        f"{cluster.capacity}; set matrix.world_size with --set, or use a bigger cluster"
    )


def record_run(
    settings: SweepSettings,
    cluster: Cluster,
    workers: int,
    rows: RunRows,
    interrupts: Interrupts,
    source: PointSource | None = None,
) -> Run:
    """Start the workers, run what is left, write how the run ended, and return it.

    cluster: not started yet; it is left open. rows: of a run whose row is written. interrupts: must
    be entered; a signal ends the run early, and the user is told how to resume. source, errors: as
    for `run_sweep`, once there is a cluster. After an error the run is `failed`, if that can be
    written; after DevicesInUseError see `RunRows.forget`. KeyboardInterrupt leaves it as it ended.
    """

    def write(batch: Sequence[tuple[int, Record]]) -> None:
        with interrupts.held_back():
            rows.keep_records(batch, cluster)

    interrupts.farewell = rows.tell_kept
    try:
        with rows.listener.waiting(f"starting {workers} worker{'s' * (workers != 1)}"):
            cluster.start(workers, settings.strategy)
        rows.keep_devices(cluster.devices)
        if source:
            settings = replace(settings, measure_of=source.measure_of)
            rows.adopt(source.rounds(cluster))
        start = rows.start
        kept = start.earlier.kept.items()
        searches = BatchSearches(start.plan, {k.point_id: one for k, one in kept if k.round == 1})
        callbacks = LoopCallbacks(
            stopping=lambda: interrupts.stopping, follow_ups=searches.follow_ups
        )
        if source:
            callbacks = replace(callbacks, further_round=source.further_round)
        events = sweep(start.rounds, settings, cluster, write, start.earlier, callbacks)
        with (
            rows.listener.progress(start.left, len(start.todo)) as progress,
            closing(events),
            interrupts.points_run(),
        ):
            for event in events:
                rows.note(event)
                if isinstance(event, PointStarted):
                    interrupts.in_flight += 1
                elif isinstance(event, PointFinished | PointRetried):
                    record = event.record
                    interrupts.in_flight -= record.status is not Status.SKIPPED
                    is_first = record.key == TrialKey(record.point.point_id)
                    if interrupts.stopping and isinstance(event, PointFinished) and is_first:
                        # The loop does not ask for them any more: they are left to a resumed run.
                        added = searches.follow_ups(record)
                        rows.left.update(TrialKey(point.point_id) for point in added)
                    if source:
                        source.note(record)
                progress.show(event)
        for line in searches.endings():
            rows.listener.tell(line)
        run = rows.close(RunStatus.INTERRUPTED if rows.left else None)
    except KeyboardInterrupt:
        # The points in flight have their rows already.
        run = rows.close(RunStatus.INTERRUPTED)
    except DevicesInUseError:
        rows.forget()
        raise
    except BaseException:
        rows.tell_kept("stopped")
        # Raise the first error, also where the disk takes no row any more.
        with suppress(ResultsError):
            rows.close(RunStatus.FAILED)
        raise
    if run.status is RunStatus.INTERRUPTED:
        rows.tell_kept("interrupted")
    if rows.store.traces.is_dir():
        where = f"{rows.store.traces} (open them in ui.perfetto.dev or chrome://tracing)"
        rows.listener.tell(f"traces: {where}")
    return run


class Interrupts:
    """Takes SIGINT and SIGTERM while it is entered, which must be in the main thread.

    One Ctrl-C while points run turns `stopping` true and interrupts nothing. A second one, the
    first at any other time, and SIGTERM raise KeyboardInterrupt in the main thread, once. A thread
    ends the process with exit code 130 when the main thread is stuck in native code and does not
    take that notice, when it does not come to its end in 15 s, and soon after one more Ctrl-C. Once
    it has raised, a Ctrl-C after the `with` block ends the process at once.

    in_flight: points on their workers, for the message. farewell: tells how to go on; called with
    what has happened, in any thread, before the process is ended so. None: no run has begun.
    """

    def __init__(self, listener: Listener) -> None:
        self.in_flight = 0
        self.farewell: Callable[[str], None] | None = None
        self._listener = listener
        self._points_run = False
        self._asked = 0  # signals so far
        self._due = 0  # of them, those that ask to stop now
        self._raised = False
        self._holds_s: list[float] = []  # how long each block that holds back may take
        self._deadline_s = math.inf
        # A handler of the main thread may be interrupted by another one.
        self._lock = threading.RLock()
        self._ended = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether Ctrl-C or SIGTERM came; no further point may then start."""
        return self._asked > 0

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._usual = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
        self._usual_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.take_signals()
        self._watcher = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        signal.set_wakeup_fd(self._usual_fd)
        for number, usual in self._usual:
            signal.signal(number, usual)
        if self._raised:
            # All is kept: one more ends what is still to be printed, without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()

    def take_signals(self) -> None:
        """Install the signal handlers again: `ray.init` in the `with` block has set its own."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def points_run(self) -> Iterator[None]:
        """Return a context in which one Ctrl-C lets the points in flight finish."""
        self._points_run = True
        try:
            yield
        finally:
            self._points_run = False

    @contextmanager
    def held_back(self, most_s: float = _NOTICE_S) -> Iterator[None]:
        """Return a context that delays KeyboardInterrupt to its end, or until one more signal.

        For the main thread. most_s: if the block takes longer after the delayed signal, and more
        than 1.5 s, the process may be ended. With inf nothing is raised in the block, and the
        process is ended soon after one more signal.
        """
        self._holds_s.append(most_s)
        try:
            yield
        finally:
            self._holds_s.pop()
            self._raise_if_due()

    def say_farewell(self) -> None:
        """Call `farewell`, or tell the user "interrupted" where it is None; ends nothing."""
        if self.farewell:
            self.farewell("ended at once")
        else:
            self._listener.tell("interrupted")

    def end(self, reason: str) -> None:
        """Call `farewell`, if set, tell the user `reason`, and end the process with exit code 3.

        No `finally` block runs. For a thread, while the main one waits for a cluster that is gone.
        """
        self._listener.show_cursor()
        if self.farewell:
            self.farewell("stopped")
        self._listener.tell(reason)
        os._exit(ClusterError.exit_code)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._take()
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        """Raise KeyboardInterrupt where one is asked for, no block holds it back, and none came."""
        is_held = math.inf in self._holds_s or (bool(self._holds_s) and self._due < 2)
        if self._due and not self._raised and not is_held:
            self._raised = True
            self._deadline_s = time.monotonic() + _CLOSE_S
            raise KeyboardInterrupt

    def _take(self) -> None:
        """Count the signals that came since the last call; the handler alone may be called late."""
        with self._lock:
            try:
                numbers = self._reader.recv(64)
            except BlockingIOError:
                return
            for number in (n for n in numbers if n in (signal.SIGINT, signal.SIGTERM)):
                is_first, self._asked = self._asked == 0, self._asked + 1
                if is_first and self._points_run and number == signal.SIGINT:
                    continue
                self._due += 1
                patience_s = _LAST_S if self._raised else _NOTICE_S
                if self._due == 1:
                    patience_s = max([patience_s, *self._holds_s])
                self._deadline_s = min(self._deadline_s, time.monotonic() + patience_s)

    def _watch(self) -> None:
        """Take signals in a thread, and end the process where the main thread is too late."""
        told = False
        while not self._ended.is_set():
            select.select([self._reader], [], [], _TICK_S)
            self._take()
            if self.stopping and not self._due and not told:
                told = True
                what = "the point" if self.in_flight < 2 else f"the {self.in_flight} points"
                text = f"finishing {what} in flight, then stopping; Ctrl-C again stops now"
                self._listener.tell(text)
            if time.monotonic() > self._deadline_s:
                # A spinner or a progress bar has hidden it.
                self._listener.show_cursor()
                self.say_farewell()
                os._exit(_INTERRUPTED)
