"""The cluster on Ray as the sweep sees it, how it runs a point, and its process groups."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import click
import ray

from raybench.cluster import allocator, timeouts
from raybench.cluster.device_reservation import DeviceReservation, ReservationTerms
from raybench.cluster.point_end import RunningRanks, finish_point, with_losses
from raybench.cluster.ray_cluster.nodes import NodeAgents, node_address, start_on_node
from raybench.cluster.ray_cluster.pool import WorkerPool, how_it_died
from raybench.cluster.ray_cluster.start import Connection, HeadMonitor, end_process, start_guard
from raybench.errors import DETAIL_CHARACTERS, ClusterError, message_of, shorten_start, traceback_of
from raybench.job.point import Strategy
from raybench.records.device import Device
from raybench.records.devices import DeviceFacts, DeviceList, DeviceSample
from raybench.records.measurement import Failure, RankAnswer
from raybench.records.record import OtherUsers
from raybench.records.status import Cause, Status
from raybench.records.task import GroupSpec, Task

_LOOK_S = 0.2
_NODE_DEATHS = ("its node has died", "node was terminated", "NodeDiedError", "node is dead")


class RayCluster(WorkerPool):
    """A pool of workers on a Ray cluster that runs points; a `raybench.cluster.Cluster`.

    log: gets lines for the user, as when workers are waited for, come late or are lost. end: as of
    `start_guard`. terms: how devices are shared with other sweeps; without them no device is
    locked, and nobody is seen beside a point. only: the devices that may be used; None for all.
    models: as of a `WorkerPool`.
    description, capacity: as of a `Cluster`.
    """

    def __init__(
        self,
        connection: Connection,
        log: Callable[[str], None] = lambda _: None,
        *,
        end: Callable[[str], None] = end_process,
        terms: ReservationTerms | None = None,
        only: DeviceList | None = None,
        models: Collection[str] = (),
    ) -> None:
        self._connection, self._end = connection, end
        self._monitor = HeadMonitor(connection.needed)
        agents = NodeAgents(self._monitor)
        reservation = DeviceReservation(agents, terms, log)
        super().__init__(connection, agents, reservation, log, only, models)
        self._groups = _ProcessGroups(self, self._monitor)
        self.capacity = min(connection.capacity, len(only.names)) if only else connection.capacity
        noun = "GPU" if self.kind == "cuda" else "CPU worker"
        devices = f"{self.capacity} {noun}{'s' * (self.capacity != 1)}"
        named = f" of {only.source}" if only else ""
        self.description = f"{connection.where}, up to {devices}{named}"
        self._is_closing = threading.Event()
        self._points = 0
        self._point_ended = threading.Condition()

    @property
    def other_sweeps(self) -> tuple[str, ...]:
        """Other sweeps that shared the devices at the start, in words; () if none is known."""
        return self._reservation.other_sweeps

    def start(self, count: int, strategy: Strategy) -> None:
        """Start workers, as `WorkerPool.start`; calls `end` if Ray is gone and the start hangs."""
        with start_guard(self._monitor.gone, self._end):
            if count > 1:
                self._groups.start()
            super().start(count, strategy)

    def run(self, task: Task, worker_ids: Sequence[int]) -> tuple[RankAnswer, ...]:
        """Run the point and return one answer per rank, and raise, as `Cluster.run`.

        If a worker is lost before or cannot be started, no rank runs, and each has a Failure.
        """
        with self._point_ended:
            self._points += 1
        try:
            return self._run(task, tuple(worker_ids))
        finally:
            with self._point_ended:
                self._points -= 1
                self._point_ended.notify_all()

    def _run(self, task: Task, worker_ids: tuple[int, ...]) -> tuple[RankAnswer, ...]:
        """Make workers and group fit for the point, run it, and replace what it has spoiled."""
        self._check_open()
        workers = [self[worker_id] for worker_id in worker_ids]
        self.lose(self._agents.silent_nodes())
        # A process cannot run the point that was started with other variables, or has run one
        # where the job asks for fresh ones, or one of another class of the user's: what such a
        # class changes is not all put back.
        is_fresh, refusals = task.settings.fresh_workers, [""] * len(workers)
        if any(
            worker.environment != task.worker_environment
            or (worker.is_used and (is_fresh or worker.user_class != task.user_class))
            for worker in workers
        ):
            self._groups.leave(worker_ids)
            for worker in workers:
                worker.environment = task.worker_environment
            self.replace(worker_ids)
            refusals = [worker.refusal for worker in workers]
        group = self._groups.join(worker_ids)
        losses = [worker.lost_because for worker in workers]
        if any(losses) or any(refusals):
            told = []
            for rank, refusal in enumerate(refusals):
                cause = Cause.NO_START if refusal else Cause.PEER_FAILED
                why = refusal or "another rank has no worker"
                told.append(Failure.of(cause, rank=rank, message=why, worker_reusable=True))
            return with_losses(told, losses)
        devices = [worker.device for worker in workers]
        calls = []
        for worker, place in zip(workers, allocator.assign_ranks(devices), strict=True):
            worker.is_used, worker.user_class = True, task.user_class
            calls.append(worker.actor.run.remote(task, place, group))
        ranks = _RunningActors(
            calls,
            devices,
            self._agents,
            abort=lambda: self._groups.abort(group),
            check_open=self._check_open,
        )
        outcome = finish_point(ranks, task)
        if outcome.group_is_gone:
            self._groups.forget(worker_ids)
        answers = self._agents.complete(outcome.answers, devices)
        if outcome.unfit:
            self.replace([worker_ids[rank] for rank in sorted(outcome.unfit)])
        return with_losses(answers, [worker.lost_because for worker in workers])

    def replace(self, worker_ids: Collection[int]) -> None:
        """Start new processes for these workers, as `WorkerPool.replace`.

        No group may have them any more. Raises ClusterError if the cluster is gone or closed.
        """
        self._check_open()
        self._monitor.check(afresh=True)
        super().replace(worker_ids)

    def restart(self) -> None:
        """Replace all processes that have run a point; none may run now. Raises as `replace`."""
        self.lose(self._agents.silent_nodes())
        used = [one for one in range(len(self.devices)) if self[one].is_used]
        self._groups.forget(used)
        self.replace(used)

    def watch_other_users(self, worker_ids: Sequence[int]) -> Callable[[], OtherUsers]:
        """Look who else uses the nodes; call the result after the point; as in `Cluster`."""
        return self._agents.watch_other_users([self[worker_id].device for worker_id in worker_ids])

    def telemetry(self) -> tuple[DeviceSample, ...]:
        """Return GPU samples since the last call, a slow node's later; for one thread at a time."""
        return self._agents.drain()

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        """Return facts of each of `devices`, as `Cluster.read_device_facts`; waits 20 s at most."""
        return self._agents.device_facts(self.devices)

    def close(self) -> None:
        """Kill the actors and disconnect from Ray, which ends a private cluster; waits seconds.

        Call it once. Running points raise ClusterError. `end` is called if this hangs and Ray was
        found gone before. A head that is cut off only now may take a minute.
        """
        self._is_closing.set()
        lost_head = self._monitor.found  # before `gone` asks anew: what was measured has ended well
        is_let_go: list[bool] = []

        def give_back() -> None:
            with suppress(ray.exceptions.RayError):
                self._agents.stop()
                self._groups.close()
                WorkerPool.close(self)
                is_let_go.append(True)

        # A SIGTERM to the whole process group, as by `timeout` or a scheduler, ends the head too.
        # In a thread: Ray waits a minute for a head that has died, and then ends this process.
        thread = threading.Thread(target=give_back, daemon=True)
        if not self._monitor.gone():
            thread.start()
            while thread.is_alive() and not self._monitor.gone():
                thread.join(_LOOK_S)
        if not is_let_go:
            self._agents.kill(self.devices)  # the agents need no head
        # A thread that waits inside of Ray while that goes would crash this process.
        with self._point_ended:
            self._point_ended.wait_for(lambda: not self._points, timeouts.CLOSE_S)
        # For a head that is cut off, and refuses nothing, Ray would wait a minute.
        with start_guard(lambda: lost_head, self._end):
            ray.shutdown()
        if folder := self._connection.folder:
            # What a process of Ray still writes meanwhile is left to the watcher.
            shutil.rmtree(folder, ignore_errors=True)

    def _check_open(self) -> None:
        """Raise ClusterError when a point is to end because the cluster is closed."""
        if self._is_closing.is_set():
            raise ClusterError("the cluster is let go")


class _RunningActors(RunningRanks):
    """The ranks of a point as calls of actors. calls: in rank order."""

    def __init__(
        self,
        calls: Sequence[Any],
        devices: Sequence[Device],
        agents: NodeAgents,
        *,
        abort: Callable[[], None],
        check_open: Callable[[], None],
    ) -> None:
        self.devices = devices
        self._waiting = {call: rank for rank, call in enumerate(calls)}
        self._agents = agents
        self._abort, self._check_open = abort, check_open
        self._looked_s = time.monotonic()

    def answers(self, timeout_s: float) -> Mapping[int, RankAnswer]:
        # One by one: `ray.get` of all of them would show one failure and hide the others.
        calls, look_every_s = list(self._waiting), timeouts.POINT_LOOKS_AT_NODES_EVERY_S
        ready, _ = ray.wait(calls, num_returns=1, timeout=min(timeout_s, look_every_s))
        if ready:  # thousands may have come meanwhile, and each wait looks at all
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        self._check_open()
        ranks = {self._waiting.pop(call): call for call in ready}
        came: dict[int, RankAnswer] = {
            rank: _answer_of(call, rank, self.devices[rank]) for rank, call in ranks.items()
        }
        if time.monotonic() < self._looked_s + look_every_s:
            return came
        self._looked_s = time.monotonic()
        silent = self._agents.silent_nodes()
        for call, rank in list(self._waiting.items()):
            if self.devices[rank].node_id in silent:
                del self._waiting[call]
                came[rank] = _node_lost(rank, self.devices[rank])
        return came

    def abort(self) -> None:
        self._abort()

    def kill(self, ranks: Collection[int]) -> None:
        self._waiting = {call: rank for call, rank in self._waiting.items() if rank not in ranks}
        self._agents.kill([self.devices[rank] for rank in ranks])

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        tails = self._agents.log_tails([self.devices[rank] for rank in ranks])
        return dict(zip(ranks, tails, strict=True))

    def wait_until_free(self, ranks: Collection[int], timeout_s: float) -> Sequence[str]:
        return self._agents.wait_until_free([self.devices[rank] for rank in ranks], timeout_s)


def _answer_of(ref: Any, rank: int, device: Device) -> RankAnswer:
    """Return the answer of a rank's ended call; a Failure where it raised or its process died."""
    try:
        answer: RankAnswer = ray.get(ref)
    except ray.exceptions.RayError as error:
        told = click.unstyle(str(error))  # Ray colours its text for a terminal
        is_dead = isinstance(error, ray.exceptions.RayActorError | ray.exceptions.NodeDiedError)
        is_out_of_memory = isinstance(error, ray.exceptions.OutOfMemoryError) or (
            is_dead and ("running low on memory" in told or "memory monitor" in told)
        )
        if is_dead and not is_out_of_memory and any(words in told for words in _NODE_DEATHS):
            return _node_lost(rank, device)
        if is_dead or is_out_of_memory:
            reason = f"the worker process {how_it_died(told)}"
            if is_out_of_memory:
                host = device.host
                reason = f"Ray's memory monitor killed the worker: {host} has run out of memory"
            return Failure.of(
                Cause.HOST_OUT_OF_MEMORY if is_out_of_memory else Cause.WORKER_DIED,
                rank=rank,
                message=reason,
                detail=shorten_start(told, DETAIL_CHARACTERS),
            )
        if isinstance(error, ray.exceptions.ObjectLostError):
            return Failure.of(
                Cause.ANSWER_LOST,
                rank=rank,
                message=f"{device.host} has lost the answer of the worker before it was fetched",
                detail=shorten_start(told, DETAIL_CHARACTERS),
            )
        # The exception that the worker raised, if any: Ray's text begins with the actor's name.
        cause = getattr(error, "cause", None) or error
        return Failure(
            rank=rank,
            status=Status.ERROR,
            error_type=type(cause).__name__,
            message=click.unstyle(message_of(cause)),
            detail=click.unstyle(traceback_of(error)),
        )
    return answer


def _node_lost(rank: int, device: Device) -> Failure:
    """Return the failure of a rank whose node is gone, frozen or cut off. device: the rank's."""
    return Failure.of(Cause.NODE_LOST, rank=rank, message=f"node {device.host} does not answer")


class _Store:
    """The actor that holds the rendezvous store of all process groups, on the driver's node."""

    def __init__(self) -> None:
        from raybench.worker.process_group import break_group, serve_store

        self._store, self._break_group = serve_store(node_address()), break_group

    def endpoint(self) -> tuple[str, int]:
        return self._store.host, self._store.port

    def break_group(self, group: GroupSpec) -> None:
        self._break_group(self._store, group)


class _ProcessGroups:
    """Which workers are in which process group, and the store in which a new group meets.

    A group is kept while consecutive points use the same workers.
    """

    def __init__(self, pool: WorkerPool, monitor: HeadMonitor) -> None:
        self._pool = pool
        self._monitor = monitor
        self._groups: dict[tuple[int, ...], GroupSpec] = {}
        self._store: Any = None
        self._epochs = itertools.count()
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start the store ahead of `join`, which else does and waits for it. Call it once."""
        self._store = start_on_node(_Store, ray.get_runtime_context().get_node_id())

    def join(self, worker_ids: tuple[int, ...]) -> GroupSpec | None:
        """Return the process group of exactly these workers, in rank order; None for one worker.

        The workers leave all other groups, and may be lost by that: see `leave`. A new group only
        gets a name here: its ranks form it when their point begins. Raises ClusterError where the
        store does not answer in a minute, or dies twice, and as `leave`.
        """
        with self._lock:
            endpoint = self._endpoint() if len(worker_ids) > 1 else None
            kept = self._groups.get(worker_ids)
            if kept and (kept.store_address, kept.store_port) == endpoint:
                return kept
            self.leave(worker_ids)
            if endpoint is None:
                return None
            address, port = endpoint
            name = f"group-{next(self._epochs)}"
            self._groups[worker_ids] = GroupSpec(name=name, store_address=address, store_port=port)
            return self._groups[worker_ids]

    def leave(self, worker_ids: Sequence[int]) -> None:
        """Make all members leave each group that has one of these workers, and wait until they did.

        The members must be idle. If one fails to leave in 10 s, all are replaced; if one is lost,
        the group is aborted, without a wait. Raises as `RayCluster.replace`.
        """
        with self._lock:
            for members in self._with(worker_ids):
                group = self._groups.pop(members)
                if not self._pool.lost.isdisjoint(members):
                    # Without all members it cannot be left; the others end it when they join the
                    # next.
                    self.abort(group)
                    continue
                calls = [self._pool[worker_id].actor.leave.remote() for worker_id in members]
                try:
                    ray.get(calls, timeout=timeouts.LEAVE_GROUP_S)
                except ray.exceptions.RayError:  # also where one is late
                    self._pool.replace(members)

    def forget(self, worker_ids: Sequence[int]) -> None:
        """Drop each group that has one of these workers; it must have ended. Tells nobody."""
        with self._lock:
            for members in self._with(worker_ids):
                del self._groups[members]

    def abort(self, group: GroupSpec | None) -> None:
        """Tell the members, if the store lives, to abort the group. Does not wait or `forget`."""
        store = self._store  # another thread may find that it died
        if group is not None and store is not None:
            store.break_group.remote(group)

    def close(self) -> None:
        """End the store, and drop all groups without telling their members."""
        if self._store is not None:
            ray.kill(self._store, no_restart=True)
        self._store, self._groups = None, {}

    def _with(self, worker_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the members of each group that has one of these workers."""
        return [members for members in self._groups if not set(members).isdisjoint(worker_ids)]

    def _endpoint(self) -> tuple[str, int]:
        """Return address and port of the store; of a new one where that has died.

        Waits for a store that is starting. Raises ClusterError as `join`.
        """
        for _ in range(2):
            if self._store is None:
                self.start()
            call = self._store.endpoint.remote()
            deadline_s = time.monotonic() + timeouts.STORE_START_S
            while not ray.wait([call], timeout=timeouts.POLL_EVERY_S)[0]:
                self._monitor.check()
                if time.monotonic() > deadline_s:
                    raise ClusterError(
                        f"the rendezvous store does not answer: no process for it in "
                        f"{timeouts.STORE_START_S:g} s; see `ray status`"
                    )
            try:
                endpoint: tuple[str, int] = ray.get(call)
            except ray.exceptions.RayActorError:
                self._store = None
            else:
                return endpoint
        raise ClusterError("the rendezvous store died as soon as it was started")
