"""The workers of a run, one per device: how they are started, replaced and lost."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from raybench.cluster import allocator, timeouts
from raybench.cluster.device_reservation import DeviceReservation
from raybench.cluster.point_end import Loss
from raybench.cluster.ray_cluster.actor import start_worker, was_killed, why_no_start
from raybench.cluster.ray_cluster.nodes import NodeAgents
from raybench.cluster.ray_cluster.placements import (
    RESOURCE,
    DeviceRequests,
    Slot,
    count_devices,
    free_devices,
    hold_devices,
)
from raybench.cluster.ray_cluster.ray_internals import jobs
from raybench.cluster.ray_cluster.start import Connection, ray_nodes, why_not_listening
from raybench.errors import ClusterError, DevicesInUseError, InstallationError
from raybench.job.point import Strategy
from raybench.records.device import Device
from raybench.records.devices import DeviceList
from raybench.records.environment import package_versions
from raybench.records.status import Cause

_RACK_LABEL = "rack"
# Give up a worker after this many processes in a row were killed while they started.
_MAX_STARTS = 3


@dataclass(eq=False, slots=True, kw_only=True)
class WorkerProcess:
    """A process of a worker, which is an actor of Ray."""

    actor: Any
    # The job's variables at the start of the process.
    environment: Mapping[str, str]
    # Whether the process has run a point.
    is_used: bool = False
    # The user's class of the last point.
    user_class: str = ""


@dataclass(eq=False, slots=True, kw_only=True)
class WorkerHandle:
    """A worker: a device, and the process that runs points on it."""

    slot: Slot
    device: Device
    process: WorkerProcess
    # None while the worker is usable.
    loss: Loss | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Start:
    """A process that is starting."""

    slot: Slot
    # Index of the device on its node; None: the GPU that Ray has chosen.
    index: int | None
    process: WorkerProcess
    # Ray's reference to the result of `attach_device`.
    answer: Any
    since_s: float
    # Number of processes that were started in a row for this worker, this process included.
    attempts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartResult:
    """How a start ended."""

    start: _Start
    # None if the start failed, or if the device is not in the device list.
    device: Device | None = None
    # "" if the process has started.
    failure: str = ""


class WorkerPool:
    """All workers of a run, by worker id. Thread-safe for disjoint workers.

    Methods that talk to Ray raise ClusterError if the cluster is gone.

    Args:
        log: gets lines for the user.
        device_list: devices that may be used; None for all.
        models: names of device models to prefer; empty for all. Other models are used only if
            `start` finds no preferred model.
    """

    def __init__(
        self,
        connection: Connection,
        agents: NodeAgents,
        reservation: DeviceReservation,
        log: Callable[[str], None],
        device_list: DeviceList | None = None,
        models: Collection[str] = (),
    ) -> None:
        self.kind = connection.kind
        # Time of --wait.
        self._wait_s = connection.wait_s
        self._capacity = connection.capacity
        self._agents = agents
        self._reservation = reservation
        self._log = log
        self._device_list = device_list
        self._models = models
        self._workers: list[WorkerHandle] = []
        self._starting: list[_Start] = []
        # Nodes on which a late worker could not be used.
        self._refused_nodes: set[str] = set()
        # Starts that got a device which is not in the device list. Ray cannot give a device by
        # name, so the pool keeps these devices, in order to get others.
        self._on_unlisted_devices: list[_Start] = []
        # Number of workers started so far, by node id.
        self._started_counts: Counter[str] = Counter()
        self._requests = DeviceRequests(self.kind)
        # Number of workers that the pool should have.
        self._target_count = 0
        self._strategy: Strategy = "pack"
        # How long a process may take to start. It grows with the number of workers of a node.
        self._start_limit_s = timeouts.WORKER_START_S
        # End of --wait, which begins again when a node is lost.
        self._wait_until_s = 0.0
        # When `refresh` last looked for free devices.
        self._looked_for_workers_s = 0.0
        # Whether --wait had not ended at the last `refresh`.
        self._is_waiting = False
        self._lock = threading.RLock()

    def __getitem__(self, worker_id: int) -> WorkerHandle:
        return self._workers[worker_id]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Device of every worker by worker id, lost workers included."""
        return tuple(worker.device for worker in list(self._workers))

    @property
    def lost(self) -> frozenset[int]:
        """Ids of unusable workers."""
        workers = list(self._workers)
        return frozenset(n for n, worker in enumerate(workers) if worker.loss)

    @property
    def pending(self) -> int:
        """Upper bound of the number of workers that may still join."""
        with self._lock:
            return len(self._starting) + (self._missing_count if self._is_waiting else 0)

    @property
    def _missing_count(self) -> int:
        """The number of devices that the pool still needs for its workers."""
        if self._device_list and not self._unclaimed_names:
            return 0
        # `_workers` includes lost workers.
        usable_count = len(self._workers) - len(self.lost)
        held_count = usable_count + len(self._starting) + len(self._on_unlisted_devices)
        return max(0, self._target_count - held_count)

    @property
    def _unclaimed_names(self) -> list[str]:
        """The listed devices that have no worker; empty without a device list."""
        if self._device_list is None:
            return []
        claimed = {device.lasting_name for device in self.devices}
        return [name for name in self._device_list.names if name not in claimed]

    def start(self, count: int, strategy: Strategy) -> None:
        """Start up to `count` workers on free devices; `refresh` adds late workers. Call it once.

        Args:
            count: ignored with a device list, whose devices get one worker each.
            strategy: which devices are taken if more than `count` are free.

        Raises:
            DevicesInUseError: other sweeps use the devices.
            ClusterError: no worker comes, a worker cannot be used, or a listed device is missing
                without --wait.
        """
        self._target_count, self._strategy = count, strategy
        if self._device_list:
            # Only a worker can tell which GPU it has, so start a worker on every GPU to find the
            # listed GPUs.
            listed_cpu_workers = sum(self._device_list.cpu_workers().values())
            self._target_count = self._capacity if self.kind == "cuda" else listed_cpu_workers
        self._wait_until_s = time.monotonic() + self._wait_s
        self._is_waiting = self._wait_s > 0
        if self._device_list and self.kind == "cpu" and not self._wait_s:
            # Check the hosts before any worker starts, because starting takes long.
            _check_listed_hosts(self._device_list)
        first_workers = self._start_first_workers()
        order = allocator.in_device_order([worker.device for worker in first_workers])
        with self._lock:
            # Set before the checks, so that `close` also ends workers that fail a check.
            self._workers = [first_workers[position] for position in order]
        self._leave_out_other_models()
        _check_devices(self.devices)
        # Locking may wait for other sweeps, so drop the requests; `refresh` makes new requests.
        self._requests.ask_for(0)
        self._reservation.reserve(self.devices)
        self._agents.watch(self.devices)
        if self._device_list and self._unclaimed_names and not (self._wait_s or self._starting):
            raise _missing_devices_error(self._device_list, self._unclaimed_names)
        if self.pending:
            wanted = len(self._device_list.names) if self._device_list else count
            awaited = len(self._unclaimed_names) if self._device_list else self.pending
            self._log(
                f"{len(first_workers)} of {wanted} workers are there, up to {awaited} may come"
            )

    def refresh(self, timeout_s: float) -> None:
        """Add workers that have come and note lost workers.

        Args:
            timeout_s: how long to wait for a pending worker. Starting a worker takes longer.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.lose(self._agents.silent_nodes())
            now_s = time.monotonic()
            self._is_waiting = now_s < self._wait_until_s
            # Drop the requests for devices that the pool no longer needs.
            awaited = self._missing_count if self._is_waiting else 0
            self._requests.ask_for(min(len(self._requests), awaited))
            if (
                self._missing_count
                and now_s > self._looked_for_workers_s + timeouts.LOOK_FOR_WORKERS_EVERY_S
            ):
                self._looked_for_workers_s = now_s
                # Do not hold the lock: this may wait for a node, and points must go on.
                self._start_missing_workers()
            results = self._take_results(self._starting, wait_s=0.0, limit_s=self._start_limit_s)
            # A list, so that every worker is added.
            has_come = any([self._add_late_worker(result) for result in results])
            if has_come or not self.pending or time.monotonic() >= deadline_s:
                return
            time.sleep(timeouts.POLL_EVERY_S)

    def replace(
        self, worker_ids: Collection[int], environment: Mapping[str, str] | None = None
    ) -> dict[int, str]:
        """Kill the processes of some workers, and start new processes on the same devices.

        No point may run on the workers. A worker is lost if its new process cannot use the device.

        Args:
            worker_ids: workers to replace; lost workers stay lost.
            environment: variables of the job for the new processes; None keeps each worker's own.

        Returns:
            Worker id -> why no process starts with these variables. Such a worker has a process
                without the variables.
        """
        self.lose(self._agents.silent_nodes())
        workers_by_slot: dict[Slot, WorkerHandle] = {}
        ids_by_slot: dict[Slot, int] = {}
        for worker_id in worker_ids:
            worker = self._workers[worker_id]
            if not worker.loss:
                workers_by_slot[worker.slot], ids_by_slot[worker.slot] = worker, worker_id
        for worker in workers_by_slot.values():
            ray.kill(worker.process.actor, no_restart=True)
        # Ray does not end a process that hangs in native code, so the agents kill it.
        self._agents.kill([worker.device for worker in workers_by_slot.values()])

        starts = []
        for worker in workers_by_slot.values():
            variables = worker.process.environment if environment is None else environment
            starts.append(self._begin_start(worker.slot, worker.device.index, variables))
        refusals: dict[int, str] = {}
        while starts:
            for start in starts:
                workers_by_slot[start.slot].process = start.process
            results = self._take_results(
                starts,
                wait_s=timeouts.LOOK_FOR_WORKERS_EVERY_S,
                limit_s=timeouts.WORKER_START_S,
            )
            for result in results:
                slot = result.start.slot
                worker, variables = workers_by_slot[slot], result.start.process.environment
                if result.failure and variables and not worker.loss:
                    # The variables may be the reason. Start a process without variables, because
                    # other points need the device.
                    text = " ".join(f"{name}={value}" for name, value in variables.items())
                    refusals[ids_by_slot[slot]] = f"with {text} of env, {result.failure}"
                    index = worker.device.index
                    starts.append(self._begin_start(slot, index, environment={}))
                else:
                    self._finish_replacement(worker, result)
            self.lose(self._agents.silent_nodes())
            starts = [start for start in starts if not workers_by_slot[start.slot].loss]
        return refusals

    def _finish_replacement(self, worker: WorkerHandle, result: _StartResult) -> None:
        """Give the worker its new process and device, or mark the worker as lost."""
        old_device, failure, device = worker.device, result.failure, result.device
        worker.process = result.start.process
        if device is not None:
            if device.kind == "cpu" or device.uuid == old_device.uuid:
                worker.device = replace(device, rack=old_device.rack)
                return
            # The index now means another GPU, because CUDA skips a GPU that has fallen off the bus.
            failure = f"cuda:{device.index} is {device.uuid} now"
            ray.kill(worker.process.actor, no_restart=True)
        failure = failure or "another device came that is not in the list"
        name = f"{old_device.kind}:{old_device.index} on {old_device.host}"
        with self._lock:
            if worker.loss:
                return
            worker.loss = Loss(Cause.WORKER_LOST, f"{name} is lost: {failure}")
        self._log(worker.loss.message)

    def lose(self, node_ids: Collection[str]) -> None:
        """Mark all workers of some nodes as lost, and give their devices back to Ray.

        Starts on the nodes are given up, and the time of --wait begins again.
        """
        if not node_ids:
            return
        with self._lock:
            lost = [
                worker
                for worker in self._workers
                if worker.slot.node_id in node_ids and not worker.loss
            ]
            starts = [start for start in self._starting if start.slot.node_id in node_ids]
            for start in starts:
                self._starting.remove(start)
            for worker in lost:
                message = f"node {worker.device.host} does not answer"
                worker.loss = Loss(Cause.NODE_LOST, message)
            _kill_and_release([*lost, *starts])
            if lost or starts:
                self._wait_until_s = time.monotonic() + self._wait_s
        waiting = f"; waiting up to {self._wait_s:g} s for others" if self._wait_s else ""
        messages = [worker.loss.message for worker in lost if worker.loss]
        for message, count in Counter(messages).items():
            self._log(f"{message}: {count} worker{'s are' if count > 1 else ' is'} lost{waiting}")

    def close(self) -> None:
        """Kill all workers, and give their devices back to Ray.

        Call this only while the head of Ray lives, because Ray would hang.
        """
        with self._lock:
            _kill_and_release([*self._workers, *self._starting, *self._on_unlisted_devices])
            self._workers, self._on_unlisted_devices = [], []
            self._starting.clear()
            self._requests.ask_for(0)

    def _start_first_workers(self) -> list[WorkerHandle]:
        """Start workers on free devices; return the workers that came first."""
        self._wait_for_free_devices()
        workers = self._wait_for_workers()
        if self._device_list and self._on_unlisted_devices and not workers:
            raise _missing_devices_error(self._device_list, self._unclaimed_names)
        if not workers:
            in_time = f"within {self._start_limit_s:.0f} s"
            why = in_time if self._starting else "before its node was lost"
            raise ClusterError(f"no worker started {why}")
        return workers

    def _wait_for_free_devices(self) -> None:
        """Begin to start workers on free devices; wait for the first device up to 60 s or --wait.

        Raises:
            ClusterError, DevicesInUseError: no device has become free.
        """
        begun_s = time.monotonic()
        limit_s = max(self._wait_s, timeouts.FIRST_DEVICE_S)
        # Hosts that give no device, although Ray counts a free device there.
        unresponsive_hosts = self._start_missing_workers()
        while self._missing_count and time.monotonic() < begun_s + limit_s:
            if self._starting and time.monotonic() > begun_s + timeouts.FREE_SOON_S:
                # Begin with fewer workers; `refresh` starts the other workers.
                break
            time.sleep(timeouts.POLL_EVERY_S)
            unresponsive_hosts = self._start_missing_workers()
        for host in unresponsive_hosts:
            self._log(f"node {host} gives no worker: it may be frozen or cut off; see `ray status`")
        if not self._starting:
            raise self._no_device_error(limit_s)

    def _wait_for_workers(self) -> list[WorkerHandle]:
        """Wait until all processes have started, at most 20 s after the first process."""
        deadline_s = time.monotonic() + self._start_limit_s
        workers: list[WorkerHandle] = []
        while self._starting and time.monotonic() < deadline_s:
            # No limit of a start: after `deadline_s`, `refresh` takes the processes that are late.
            results = self._take_results(
                self._starting, wait_s=timeouts.LOOK_FOR_WORKERS_EVERY_S, limit_s=math.inf
            )
            for result in results:
                if result.failure:
                    raise InstallationError(result.failure)
                if worker := self._new_worker(result):
                    workers.append(worker)
                deadline_s = min(deadline_s, time.monotonic() + timeouts.SLOW_WORKERS_S)
            self.lose(self._agents.silent_nodes())
        return workers

    def _no_device_error(self, waited_s: float) -> ClusterError:
        """Return the error for a cluster without a free device; it names other sweeps."""
        own_job_id = ray.get_runtime_context().get_job_id()
        sweeps = []
        for job in jobs():
            is_other = not job["IsDead"] and job["JobID"] != own_job_id
            if is_other and "raybench" in job["Entrypoint"]:
                text = "`{Entrypoint:.200}` (process {DriverPid} on {DriverIPAddress})"
                sweeps.append(text.format(**job))
        why = "others may use them"
        if sweeps:
            why = f"used by {'; '.join(sweeps)}; --wait SECONDS waits"
        return (DevicesInUseError if sweeps else ClusterError)(
            f"no {RESOURCE[self.kind]} could be had from the cluster in {waited_s:g} s: {why}; "
            "see `ray status`"
        )

    def _start_missing_workers(self) -> list[str]:
        """Begin to start missing workers on free devices.

        Returns:
            Hosts that give no device although Ray counts a free device there.
        """
        kind = self.kind
        placed = self._requests.take_placed()
        free = Counter(free_devices(kind))
        free.update(slot.node_id for slot in placed)

        # Use the devices that requests have brought.
        nodes = {node["NodeID"]: node for node in ray_nodes()}
        usable, unresponsive_nodes = self._usable_devices(free, nodes)
        unusable_count = free.total() - usable.total()
        slots: list[Slot] = []
        for slot in placed:
            if usable[slot.node_id] and len(slots) < self._missing_count:
                usable[slot.node_id] -= 1
                slots.append(slot)
            else:
                remove_placement_group(slot.placement)

        # Hold free devices for the other workers, except those for which requests are open.
        count = max(0, self._missing_count - len(slots) - len(self._requests))
        counts = allocator.counts_by_node(usable, count, self._strategy, _racks())
        held = hold_devices(kind, counts)
        # If no node at all gives a device, the nodes need not be the reason.
        if held or slots or self._starting:
            unresponsive_nodes |= counts.keys() - {slot.node_id for slot in held}
        slots += held

        # Request devices before starting workers, because a new node takes minutes. Request none
        # while unusable devices are free, because Ray would place the requests there.
        self._request_devices(0 if unusable_count else self._missing_count - len(slots))
        self._start_on(slots)
        return sorted(nodes[node]["NodeManagerHostname"] for node in unresponsive_nodes)

    def _usable_devices(
        self, free: Mapping[str, int], nodes: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Counter[str], set[str]]:
        """Return node id -> number of free devices that may get workers, and unresponsive nodes.

        The raylet of an unresponsive node does not answer.

        Args:
            free: node id -> number of free devices.
            nodes: node id -> Ray's facts of the node.
        """
        barred = self._agents.silent_nodes() | self._refused_nodes
        usable = Counter({node: count for node, count in free.items() if node not in barred})
        # Leave out nodes that do not listen: Ray waits minutes for a node that is cut off, and
        # gives no device of other nodes until then.
        unresponsive_nodes = set()
        for node in usable:
            raylet = "{NodeManagerAddress}:{NodeManagerPort}".format(**nodes[node])
            if why_not_listening(raylet, timeouts.NODE_CONNECT_S):
                unresponsive_nodes.add(node)
        for node in unresponsive_nodes:
            del usable[node]
        if self.kind == "cpu" and self._device_list:
            listed_workers = self._device_list.cpu_workers()
            for node in usable:
                listed_count = listed_workers.get(nodes[node]["NodeManagerHostname"], 0)
                missing_count = max(0, listed_count - self._started_counts[node])
                usable[node] = min(usable[node], missing_count)
        return usable, unresponsive_nodes

    def _request_devices(self, most: int) -> None:
        """Request up to `most` devices that the cluster lacks; after the end of --wait, none."""
        request_count = 0
        if time.monotonic() < self._wait_until_s:
            # `count_devices` counts all devices of the cluster, free or not.
            shortage = self._target_count - count_devices(self.kind)
            # Keep open requests: another sweep may have taken the nodes that came for them.
            request_count = min(most, max(len(self._requests), shortage))
        self._requests.ask_for(request_count)

    def _start_on(self, slots: Sequence[Slot]) -> None:
        """Begin to start a worker on each slot."""
        most_per_node = max(Counter(slot.node_id for slot in slots).values(), default=0)
        limit_s = timeouts.WORKER_START_S + most_per_node * timeouts.WORKER_START_EACH_S
        self._start_limit_s = max(self._start_limit_s, limit_s)
        # Start the processes first, because they load modules while the agents start. They attach
        # devices last, because the agents must first read how much memory is in use.
        actors = [start_worker(self.kind, slot) for slot in slots]
        self._agents.start(slot.node_id for slot in slots)
        for slot, actor in zip(slots, actors, strict=True):
            index = self._started_counts[slot.node_id] if self.kind == "cpu" else None
            self._started_counts[slot.node_id] += 1
            start = self._begin_start(slot, index, environment={}, actor=actor)
            with self._lock:
                self._starting.append(start)

    def _begin_start(
        self, slot: Slot, index: int | None, environment: Mapping[str, str], actor: Any = None
    ) -> _Start:
        """Make a process attach its device; do not wait.

        Args:
            index: index of the device on its node; None: the GPU that Ray has chosen.
            actor: the process; None starts a new process with the variables `environment`.
        """
        actor = actor or start_worker(self.kind, slot, environment)
        names = self._device_list.names if self._device_list else None
        return _Start(
            slot=slot,
            index=index,
            process=WorkerProcess(actor=actor, environment=environment),
            answer=actor.attach_device.remote(self.kind, index, names),
            since_s=time.monotonic(),
        )

    def _take_results(
        self, starts: list[_Start], wait_s: float, limit_s: float
    ) -> list[_StartResult]:
        """Remove starts that have ended from `starts`, and return their results.

        Processes that were killed are started again. Nodes whose Ray has ended are marked as lost.

        Args:
            wait_s: how long to wait for the first result.
            limit_s: time limit of a start.
        """
        answers = [start.answer for start in starts]
        done = ray.wait(answers, num_returns=1, timeout=wait_s)[0] if answers else []
        if done:  # take all answers that are there
            done = ray.wait(answers, num_returns=len(answers), timeout=0)[0]

        results: list[_StartResult] = []
        for start in list(starts):
            if start.answer in done:
                try:
                    result = _StartResult(start=start, device=ray.get(start.answer))
                except ray.exceptions.RayError as error:
                    result = _StartResult(start=start, failure=why_no_start(error))
                    # A process that failed by itself would fail again.
                    if was_killed(error) and self._try_again(starts, result):
                        continue
            elif time.monotonic() < start.since_s + limit_s:
                continue
            else:
                failure = f"its process did not start within {limit_s:.0f} s"
                result = _StartResult(start=start, failure=failure)
            if result.failure and self._agents.has_ray_ended(start.slot.node_id):
                self.lose({start.slot.node_id})
            with self._lock:
                if start not in starts:  # its node was lost
                    continue
                starts.remove(start)
            if result.device is None:
                ray.kill(start.process.actor, no_restart=True)
            results.append(result)
        return results

    def _try_again(self, starts: list[_Start], result: _StartResult) -> bool:
        """Start a killed process again, as a new entry of `starts`; False if this cannot help."""
        start = result.start
        if start.attempts >= _MAX_STARTS:
            return False
        # This raises if the process has died with this host's Ray.
        self._agents.check_head(start.slot.node_id)
        if self._agents.has_ray_ended(start.slot.node_id):
            return False
        ray.kill(start.process.actor, no_restart=True)
        self._log(f"{result.failure} (tried once more)")
        retry = self._begin_start(start.slot, start.index, start.process.environment)
        with self._lock:
            if start in starts:  # otherwise its node was lost
                starts[starts.index(start)] = replace(retry, attempts=start.attempts + 1)
        return True

    def _new_worker(self, result: _StartResult) -> WorkerHandle | None:
        """Return the new worker; None if its device is not in the device list."""
        start, device = result.start, result.device
        if device is None:
            # Keep the device, so that Ray gives other devices to the next workers.
            self._on_unlisted_devices.append(start)
            return None
        device = replace(device, rack=_racks().get(device.node_id, ""))
        return WorkerHandle(slot=start.slot, device=device, process=start.process)

    def _add_late_worker(self, result: _StartResult) -> bool:
        """Add a late worker to the pool, or refuse it; return whether it was added."""
        if result.failure:
            self._refuse(result.start, result.failure)
            return False
        worker = self._new_worker(result)
        if worker is None:
            return False
        if reason := self._why_unusable(worker.device):
            self._refuse(worker, reason)
            return False
        self._agents.watch([worker.device])
        with self._lock:
            self._workers.append(worker)
        usable_count = len(self._workers) - len(self.lost)
        wanted = len(self._device_list.names) if self._device_list else self._target_count
        self._log(f"a worker came on {worker.device.host}: {usable_count} of {wanted} are there")
        return True

    def _why_unusable(self, device: Device) -> str:
        """Lock the device of a late worker; return why it cannot be used, or ""."""
        usable = [worker.device for worker in self._workers if not worker.loss]
        try:
            _check_devices([*usable, device])
            return self._why_other_model(device) or self._reservation.try_reserve(device)
        except ClusterError as error:
            return str(error)

    def _leave_out_other_models(self) -> None:
        """Refuse workers of other models, unless no worker has a preferred model."""
        reasons = {worker: self._why_other_model(worker.device) for worker in self._workers}
        has_preferred_model = not all(reasons.values())
        if not has_preferred_model:
            return
        for worker, reason in reasons.items():
            if reason:
                with self._lock:
                    self._workers.remove(worker)
                self._refuse(worker, reason)

    def _why_other_model(self, device: Device) -> str:
        """Return why the model of the device is not preferred; "" if it is."""
        if not self._models or device.name in self._models:
            return ""
        models = ", ".join(sorted(self._models))
        return f"{device.host} has {device.name}, this run was measured on {models}"

    def _refuse(self, refused: WorkerHandle | _Start, reason: str) -> None:
        """End a worker that is not in the pool, and start no other worker on its node."""
        self._refused_nodes.add(refused.slot.node_id)
        ray.kill(refused.process.actor, no_restart=True)
        # Release the placement group unless it also holds devices of other workers.
        others: list[WorkerHandle | _Start] = [
            *self._workers,
            *self._starting,
            *self._on_unlisted_devices,
        ]
        if refused.slot.placement not in {other.slot.placement for other in others}:
            remove_placement_group(refused.slot.placement)
        self._log(f"a worker is left out: {reason}")


def _racks() -> dict[str, str]:
    """Return node id -> NAME of `ray start --labels rack=NAME`, for nodes that have the label."""
    racks = {}
    for node in ray_nodes():
        labels = node.get("Labels") or {}
        if _RACK_LABEL in labels:
            racks[node["NodeID"]] = labels[_RACK_LABEL]
    return racks


def _missing_devices_error(device_list: DeviceList, missing: Sequence[str]) -> ClusterError:
    """Return the error for listed devices that the cluster does not give."""
    first_name, *other_names = missing
    others = f" and {len(other_names)} more" if other_names else ""
    return ClusterError(
        f"{device_list.source}: the cluster does not give {first_name}{others}: it is not there, "
        "or others have it; take it out of the list, or wait for it with --wait SECONDS"
    )


def _kill_and_release(workers: Sequence[WorkerHandle | _Start]) -> None:
    """Kill the processes, and give their devices back to Ray."""
    for worker in workers:
        ray.kill(worker.process.actor, no_restart=True)
    for placement in {worker.slot.placement for worker in workers}:
        remove_placement_group(placement)


def _check_listed_hosts(device_list: DeviceList) -> None:
    """Raise ClusterError if a host of a list of CPU workers is not in the cluster."""
    hosts = {node["NodeManagerHostname"] for node in ray_nodes() if node["Alive"]}
    missing = []
    for name in device_list.names:  # HOST:INDEX
        host, _, _ = name.rpartition(":")
        if host not in hosts:
            missing.append(name)
    if missing:
        raise _missing_devices_error(device_list, missing)


def _check_devices(devices: Sequence[Device]) -> None:
    """Raise ClusterError if workers share a device, or have other packages than the driver."""
    if shared_uuids := allocator.devices_shared(devices):
        names = ", ".join(shared_uuids)
        raise ClusterError(f"several workers were given the same device: {names}")
    driver_versions = package_versions()
    for device in devices:
        for name in driver_versions.keys() & device.versions.keys():
            driver_version, worker_version = driver_versions[name], device.versions[name]
            if driver_version != worker_version:
                raise InstallationError(
                    f"{name} is {driver_version} here and {worker_version} on {device.host} "
                    f"({device.address}): install the same version on every node"
                )
