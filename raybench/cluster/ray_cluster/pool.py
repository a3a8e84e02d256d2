"""The workers of a run, one per device: started, replaced, lost, and those that may still come.

`placements` holds their devices in Ray.
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import ray._private.state
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raybench.cluster import allocator, reaper, timeouts
from raybench.cluster.device_reservation import DeviceReservation
from raybench.cluster.ray_cluster.nodes import NodeAgents, node_address
from raybench.cluster.ray_cluster.placements import (
    RESOURCE,
    DeviceRequests,
    Slot,
    count_devices,
    free_devices,
    hold_devices,
)
from raybench.cluster.ray_cluster.start import Connection, ray_nodes, why_not_listening
from raybench.errors import ClusterError, DevicesInUseError, brief, message_of
from raybench.job.point import Strategy
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import DeviceList
from raybench.records.environment import package_versions, variables_that_matter
from raybench.records.measurement import RankAnswer
from raybench.records.task import GroupSpec, RankInfo, Task

_RACK = "rack"
# Not CUDA_: those say which devices and which files this host has.
_FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "MKL_", "NVIDIA_TF32_")
_EXIT_CODE = re.compile(r"exit code (-?\d+)\.(?: The process receives a (SIG[A-Z]+))?")
# Over sockets NCCL notices a dead peer by itself, and torch's watchdog of the survivors then waits
# for 60 s, writes what it has recorded, and ends the process. Without these three it only notes it.
_SURVIVE_A_PEER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# A process that is killed while it starts is started again, so often in all.
_MOST_STARTS = 3


@dataclass(eq=False, slots=True, kw_only=True)
class WorkerHandle:
    """A worker: its slot, the actor that is its process now, and its device once it has one.

    index: of the device on its node; None where Ray says which GPU it is. call: Ray's reference to
    the answer of `attach_device`, which was asked at `since_s`; starts: how many processes were
    started in a row. is_used: whether this process has been given a point. user_class: the class of
    the user's that it then ran. environment: variables of the job that its process, or the next
    one, starts with. refusal: why the process that `replace` last started with them failed, or "".
    lost_because: why it cannot be used any more, "" as long as it can.
    """

    slot: Slot
    index: int | None
    actor: Any = None
    device: Device = field(init=False)
    call: Any = None
    since_s: float = 0.0
    starts: int = 0
    is_used: bool = False
    user_class: str = ""
    lost_because: str = ""
    refusal: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def _racks() -> dict[str, str]:
    """Return node id -> NAME of `ray start --labels rack=NAME`; nodes without it are left out."""
    labels = {node["NodeID"]: node.get("Labels") or {} for node in ray_nodes()}
    return {node: its[_RACK] for node, its in labels.items() if _RACK in its}


class WorkerPool:
    """All workers, by worker id. Several points may ask at once, each for its own.

    log: gets lines for the user, as when workers come late or are lost. only: the devices that may
    be used. Ray gives no device by its name: others are held too, but get no worker. models: names
    of the devices that may be used, unless all that `start` finds have other ones; empty for any.
    """

    def __init__(
        self,
        connection: Connection,
        agents: NodeAgents,
        reservation: DeviceReservation,
        log: Callable[[str], None],
        only: DeviceList | None = None,
        models: Collection[str] = (),
    ) -> None:
        self.kind, self._wait_s = connection.kind, connection.wait_s
        self._capacity = connection.capacity
        self._agents = agents
        self._reservation = reservation
        self._log = log
        self._only = only
        self._models = models
        self._workers: list[WorkerHandle] = []
        self._starting: list[WorkerHandle] = []
        # Nodes of which a late worker could not be used, and workers on devices not in `only`.
        self._refused_nodes: set[str] = set()
        self._unlisted: list[WorkerHandle] = []
        # Workers started so far, by node id.
        self._started: Counter[str] = Counter()
        self._requests = DeviceRequests(self.kind)
        self._count = 0
        self._strategy: Strategy = "pack"
        self._start_limit_s = timeouts.WORKER_START_S
        # `_is_waiting` is whether `_wait_until_s` was in the future when `refresh` looked last.
        self._wait_until_s = self._looked_s = 0.0
        self._is_waiting = False
        self._lock = threading.RLock()

    def __getitem__(self, worker_id: int) -> WorkerHandle:
        return self._workers[worker_id]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Device of every worker by worker id, those of lost workers included."""
        return tuple(worker.device for worker in list(self._workers))

    @property
    def lost(self) -> frozenset[int]:
        """Ids of workers that cannot be used any more."""
        return frozenset(n for n, one in enumerate(list(self._workers)) if one.lost_because)

    @property
    def pending(self) -> int:
        """Number of workers starting or, while they are waited for, missing, also for lost ones.

        With a list of GPUs, some may come on other GPUs. At 0, `refresh` may find free devices.
        """
        with self._lock:
            return len(self._starting) + (self._missing if self._is_waiting else 0)

    @property
    def _missing(self) -> int:
        """Number of workers that were asked for and have no device yet."""
        if self._only and not self._names_left:
            return 0
        held = len(self._workers) + len(self._starting) + len(self._unlisted)
        return max(0, self._count - held + len(self.lost))

    @property
    def _names_left(self) -> list[str]:
        """Names of listed devices that have no worker yet."""
        named = {device.lasting_name for device in self.devices}
        return [name for name in self._only.names if name not in named] if self._only else []

    def start(self, count: int, strategy: Strategy) -> None:
        """Start workers on free devices, and wait for those that come soon.

        Call it once, and `close` even if it raises. `refresh` adds those that come later. count:
        how many at most; not used with a device list. strategy: which devices are taken if there
        are more. Raises ClusterError where no worker comes (with a list: on a listed device), one
        cannot start, has other versions or the device of another worker, a listed device is missing
        without --wait and none is still starting, or the cluster is gone; DevicesInUseError where
        none is free beside other sweeps, or one is locked by them and the terms are not shared.
        """
        self._count, self._strategy = count, strategy
        if self._only:  # one on each GPU there is finds those of the list
            listed = sum(self._only.cpu_workers().values())
            self._count = self._capacity if self.kind == "cuda" else listed
        self._wait_until_s = time.monotonic() + self._wait_s
        self._is_waiting = self._wait_s > 0
        # Otherwise the others would start before that was known.
        if self._only and self.kind == "cpu" and not self._wait_s:
            there = {node["NodeManagerHostname"] for node in ray_nodes() if node["Alive"]}
            missing = [name for name in self._only.names if name.rpartition(":")[0] not in there]
            if missing:
                raise _not_there(self._only, missing)
        came = self._start_first_workers()
        order = allocator.in_device_order([worker.device for worker in came])
        with self._lock:  # before the checks: `close` lets go of those that are refused too
            self._workers = [came[place] for place in order]
        self._leave_out_other_models()
        _check_devices(self.devices)
        # Other sweeps may have to be waited for, and `refresh` asks again after that.
        self._requests.ask_for(0)
        self._reservation.reserve(self.devices)
        self._agents.watch(self.devices)
        if self._only and self._names_left and not (self._wait_s or self._starting):
            raise _not_there(self._only, self._names_left)
        if self.pending:
            wanted = len(self._only.names) if self._only else count
            more = len(self._names_left) if self._only else self.pending
            self._log(f"{len(came)} of {wanted} workers are there, up to {more} may come")

    def refresh(self, timeout_s: float) -> None:
        """Add workers that came and note lost ones; wait at most `timeout_s` for a pending one.

        Takes longer where it starts workers on devices that are free now. Raises ClusterError where
        the head of the cluster or this host's Ray is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.lose(self._agents.silent_nodes())
            now_s = time.monotonic()
            self._is_waiting = now_s < self._wait_until_s
            awaited = self._missing if self._is_waiting else 0
            self._requests.ask_for(min(len(self._requests), awaited))
            if self._missing and now_s > self._looked_s + timeouts.LOOK_FOR_WORKERS_EVERY_S:
                self._looked_s = now_s
                self._start_missing()  # it may wait for a node, and points must not wait with it
            # What never comes up must not be waited for till the end of the run.
            ended = self._take_ended(self._starting, 0.0, self._start_limit_s)
            has_come = any([self._take_in(worker, found) for worker, found in ended])
            if has_come or not self.pending or time.monotonic() >= deadline_s:
                return
            time.sleep(timeouts.POLL_EVERY_S)

    def replace(self, worker_ids: Collection[int]) -> None:
        """Kill the processes of these workers and start new ones, and wait for all of them.

        None may run a point; their groups break. Lost ones stay lost. The device stays (Ray keeps
        it for our placement group) and is read anew. Where one does not start with variables of the
        job, one without them is started, and `refusal` is set. A worker whose new process does not
        start, or has another GPU, is lost. Raises as `refresh`.
        """
        self.lose(self._agents.silent_nodes())
        workers = [self._workers[worker_id] for worker_id in worker_ids]
        workers = [worker for worker in workers if not worker.lost_because]
        for worker in workers:
            ray.kill(worker.actor, no_restart=True)
        self._agents.kill([worker.device for worker in workers])  # those that hang, too
        for worker in workers:
            worker.index, worker.starts, worker.refusal = worker.device.index, 0, ""
            self._begin(worker)
        while workers:
            look_s, limit_s = timeouts.LOOK_FOR_WORKERS_EVERY_S, timeouts.WORKER_START_S
            for worker, found in self._take_ended(workers, look_s, limit_s):
                old, reason = worker.device, found
                given = " ".join(f"{name}={text}" for name, text in worker.environment.items())
                if isinstance(found, str) and given and not worker.lost_because:
                    # The variables may be why, and the device is needed for other points.
                    worker.refusal, worker.environment = f"with {given} of env, {found}", {}
                    worker.starts = 0
                    self._begin(worker)
                    workers.append(worker)
                    continue
                if isinstance(found, Device):
                    if found.kind == "cpu" or found.uuid == old.uuid:
                        worker.device = replace(found, rack=old.rack)
                        continue
                    # When a GPU has fallen off the bus, CUDA counts the others anew.
                    reason = f"cuda:{found.index} is {found.uuid} now"
                    ray.kill(worker.actor, no_restart=True)
                told = reason or "another device came that is not in the list"
                with self._lock:
                    if worker.lost_because:
                        continue
                    worker.lost_because = f"{old.kind}:{old.index} on {old.host} is lost: {told}"
                self._log(worker.lost_because)
            self.lose(self._agents.silent_nodes())
            workers = [worker for worker in workers if not worker.lost_because]

    def lose(self, node_ids: Collection[str]) -> None:
        """Give up all workers of these nodes: they become `lost`, their devices go back to Ray.

        Workers that are starting there are ended too. The time of --wait begins anew. Logs a line
        for each host of lost workers.
        """
        if not node_ids:  # as at nearly every look
            return
        with self._lock:
            gone = [worker for worker in self._workers if worker.slot.node_id in node_ids]
            gone = [worker for worker in gone if not worker.lost_because]
            late = [worker for worker in self._starting if worker.slot.node_id in node_ids]
            for worker in late:
                self._starting.remove(worker)
            for worker in gone:
                worker.lost_because = f"node {worker.device.host} does not answer"
            _let_go([*gone, *late])
            if gone or late:
                self._wait_until_s = time.monotonic() + self._wait_s
        waits = f"; waiting up to {self._wait_s:g} s for others" if self._wait_s else ""
        for reason, count in Counter(worker.lost_because for worker in gone).items():
            self._log(f"{reason}: {count} worker{'s are' if count > 1 else ' is'} lost{waits}")

    def close(self) -> None:
        """Kill all workers, give their devices back to Ray, and forget them; the head must live."""
        with self._lock:
            _let_go([*self._workers, *self._starting, *self._unlisted])
            self._workers, self._unlisted = [], []
            self._starting.clear()
            self._requests.ask_for(0)

    def _start_first_workers(self) -> list[WorkerHandle]:
        """Start workers on free devices, and return those that come soon.

        Devices of others are waited for 5 s, longer while none is free; workers until all are there
        or the first start ended 20 s ago. Raises ClusterError where no device can be had in a
        minute, or --wait if longer, a worker cannot start, or none comes in the time it may take.
        """
        begun_s = time.monotonic()
        limit_s = max(self._wait_s, timeouts.FIRST_DEVICE_S)
        mute_hosts = self._start_missing()
        while self._missing and time.monotonic() < begun_s + limit_s:
            if self._starting and time.monotonic() > begun_s + timeouts.FREE_SOON_S:
                break
            time.sleep(timeouts.POLL_EVERY_S)
            mute_hosts = self._start_missing()
        for host in mute_hosts:
            self._log(f"node {host} gives no worker: it may be frozen or cut off; see `ray status`")
        if not self._starting:
            own_id = ray.get_runtime_context().get_job_id()
            jobs = ray._private.state.jobs()  # type: ignore[no-untyped-call]
            sweeps = "; ".join(
                "`{Entrypoint:.200}` (process {DriverPid} on {DriverIPAddress})".format(**one)
                for one in jobs
                if not one["IsDead"] and one["JobID"] != own_id and "raybench" in one["Entrypoint"]
            )
            why = f"used by {sweeps}; --wait SECONDS waits" if sweeps else "others may use them"
            raise (DevicesInUseError if sweeps else ClusterError)(
                f"no {RESOURCE[self.kind]} could be had from the cluster in {limit_s:g} s: {why}; "
                "see `ray status`"
            )
        deadline_s = time.monotonic() + self._start_limit_s
        came: list[WorkerHandle] = []
        while self._starting and time.monotonic() < deadline_s:
            look_s = timeouts.LOOK_FOR_WORKERS_EVERY_S
            for worker, found in self._take_ended(self._starting, look_s, math.inf):
                if isinstance(found, str):
                    raise ClusterError(found)
                came += [worker] if self._is_listed(worker, found) else []
                deadline_s = min(deadline_s, time.monotonic() + timeouts.SLOW_WORKERS_S)
            self.lose(self._agents.silent_nodes())
        if self._only and self._unlisted and not came:
            raise _not_there(self._only, self._names_left)
        if not came:
            in_time = f"within {self._start_limit_s:.0f} s"
            why = in_time if self._starting else "before its node was lost"
            raise ClusterError(f"no worker started {why}")
        return came

    def _start_missing(self) -> list[str]:
        """Start the missing workers, as far as devices are free; does not wait for them.

        With --wait, asks for devices that the cluster lacks. Returns the hosts that gave no device
        though Ray says they have a free one. Raises ClusterError where the head of the cluster is
        gone, or this host's Ray.
        """
        kind = self.kind
        placed = self._requests.take_placed()
        free = Counter(free_devices(kind))
        free.update(slot.node_id for slot in placed)
        nodes = {node["NodeID"]: node for node in ray_nodes()}
        usable, mute = self._usable(free, nodes)
        useless = free.total() - usable.total()
        slots: list[Slot] = []
        for slot in placed:
            if usable[slot.node_id] and len(slots) < self._missing:
                usable[slot.node_id] -= 1
                slots.append(slot)
            else:
                remove_placement_group(slot.placement)
        # Devices that are asked for come by their requests.
        count = max(0, self._missing - len(slots) - len(self._requests))
        counts = allocator.counts_by_node(usable, count, self._strategy, _racks())
        held = hold_devices(kind, counts)
        if held or slots or self._starting:  # else Ray may give none for another reason
            mute |= counts.keys() - {slot.node_id for slot in held}
        slots += held
        # First: a new node takes minutes. Ray would place a request on a device that it has free,
        # also where no worker can use that.
        self._ask_for_devices(0 if useless else self._missing - len(slots))
        self._start_on(slots)
        return sorted(nodes[node]["NodeManagerHostname"] for node in mute)

    def _usable(
        self, free: Mapping[str, int], nodes: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Counter[str], set[str]]:
        """Return the part of `free` on which workers may start, and the nodes that do not answer.

        free: node id -> number of devices. nodes: Ray's dict of each node by its id.
        """
        barred = self._agents.silent_nodes() | self._refused_nodes
        usable = Counter({node: count for node, count in free.items() if node not in barred})
        # Ray waits for minutes for a node that is cut off, and gives none of the others meanwhile.
        raylets = {n: "{NodeManagerAddress}:{NodeManagerPort}".format(**nodes[n]) for n in usable}
        mute = {n for n in usable if why_not_listening(raylets[n], timeouts.NODE_CONNECT_S)}
        for node in mute:
            del usable[node]
        if self.kind == "cpu" and self._only:  # up to the last one of a node that is in the list
            wanted = self._only.cpu_workers()
            for node in usable:
                left = wanted.get(nodes[node]["NodeManagerHostname"], 0) - self._started[node]
                usable[node] = max(0, min(usable[node], left))
        return usable, mute

    def _ask_for_devices(self, count: int) -> None:
        """While --wait lasts, request up to `count` devices that the whole cluster does not have.

        Devices that others use are waited for.
        """
        wanted = 0
        if time.monotonic() < self._wait_until_s:
            shortage = self._count - count_devices(self.kind)
            # A request stays where another sweep has taken the node that came for it.
            wanted = min(count, max(len(self._requests), shortage))
        self._requests.ask_for(wanted)

    def _start_on(self, slots: Sequence[Slot]) -> None:
        """Begin to start a worker on the device of each slot."""
        most = max(Counter(slot.node_id for slot in slots).values(), default=0)
        limit_s = timeouts.WORKER_START_S + most * timeouts.WORKER_START_EACH_S
        self._start_limit_s = max(self._start_limit_s, limit_s)
        # They load beside the agents, and touch no device before these have looked at it.
        actors = [start_worker(self.kind, slot) for slot in slots]
        self._agents.start(slot.node_id for slot in slots)
        for slot, actor in zip(slots, actors, strict=True):
            index = self._started[slot.node_id] if self.kind == "cpu" else None
            self._started[slot.node_id] += 1
            worker = WorkerHandle(slot=slot, index=index)
            self._begin(worker, actor)
            with self._lock:
                self._starting.append(worker)

    def _begin(self, worker: WorkerHandle, actor: Any = None) -> None:
        """Have a process take the worker's device. actor: runs already; None starts one."""
        worker.actor = actor or start_worker(self.kind, worker.slot, worker.environment)
        only = self._only.names if self._only else None
        worker.call = worker.actor.attach_device.remote(self.kind, worker.index, only)
        worker.is_used, worker.since_s = False, time.monotonic()
        worker.starts += 1

    def _take_ended(
        self, starting: list[WorkerHandle], wait_s: float, limit_s: float
    ) -> list[tuple[WorkerHandle, Device | str | None]]:
        """Take the workers out of the list whose start has ended; wait at most `wait_s` for one.

        Return each with its device, None where that is not in the list of devices, or the reason
        why it failed, as that it took longer than limit_s. A node whose Ray has ended is given up.
        Raises ClusterError where the head of the cluster is gone, or this host's Ray.
        """
        calls = [worker.call for worker in starting]
        done = ray.wait(calls, num_returns=1, timeout=wait_s)[0] if calls else []
        if done:
            done = ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        ended: list[tuple[WorkerHandle, Device | str | None]] = []
        for worker in list(starting):
            found: Device | str | None = f"its process did not start within {limit_s:.0f} s"
            if worker.call in done:
                try:
                    found = ray.get(worker.call)
                except ray.exceptions.RayError as error:
                    found, node = _why_no_start(error), worker.slot.node_id
                    # What failed by itself would fail again.
                    if _was_killed(error) and worker.starts < _MOST_STARTS:
                        self._agents.check_head(node)  # it may have died with this host's Ray
                        if not self._agents.has_ended(node):
                            ray.kill(worker.actor, no_restart=True)
                            self._log(f"{found} (tried once more)")
                            self._begin(worker)
                            continue
            elif time.monotonic() < worker.since_s + limit_s:
                continue
            if isinstance(found, str) and self._agents.has_ended(worker.slot.node_id):
                self.lose({worker.slot.node_id})
            with self._lock:
                if worker not in starting:  # its node was lost
                    continue
                starting.remove(worker)
            if not isinstance(found, Device):
                ray.kill(worker.actor, no_restart=True)
            ended.append((worker, found))
        return ended

    def _is_listed(self, worker: WorkerHandle, device: Device | None) -> bool:
        """Give the worker its device; return False for None: not in the list, it stays held."""
        if device is None:
            self._unlisted.append(worker)
            return False
        worker.device = replace(device, rack=_racks().get(device.node_id, ""))
        return True

    def _take_in(self, worker: WorkerHandle, found: Device | str | None) -> bool:
        """Take in a worker that came late; return whether it can be used.

        No other worker is started on the node of one that cannot. found: as of `_take_ended`.
        """
        reason = found if isinstance(found, str) else ""
        if not isinstance(found, str):
            if not self._is_listed(worker, found):
                return False
            used = [one.device for one in self._workers if not one.lost_because]
            try:
                _check_devices([*used, worker.device])
                reason = self._why_other_model(worker.device)
                reason = reason or self._reservation.try_reserve(worker.device)
            except ClusterError as error:
                reason = str(error)
        if reason:
            self._refuse(worker, reason)
            return False
        self._agents.watch([worker.device])
        with self._lock:
            self._workers.append(worker)
        now = len(self._workers) - len(self.lost)
        wanted = len(self._only.names) if self._only else self._count
        self._log(f"a worker came on {worker.device.host}: {now} of {wanted} are there")
        return True

    def _leave_out_other_models(self) -> None:
        """Refuse the workers on other models than `models`; none where no worker would be left."""
        reasons = {worker: self._why_other_model(worker.device) for worker in self._workers}
        if all(reasons.values()):
            return
        for worker, reason in reasons.items():
            if reason:
                with self._lock:
                    self._workers.remove(worker)
                self._refuse(worker, reason)

    def _why_other_model(self, device: Device) -> str:
        """Return in words that the device is not of one of `models`; "" where it may be used."""
        if not self._models or device.name in self._models:
            return ""
        models = ", ".join(sorted(self._models))
        return f"{device.host} has {device.name}, this run was measured on {models}"

    def _refuse(self, worker: WorkerHandle, reason: str) -> None:
        """End a worker that is in no list, and start no other one on its node."""
        self._refused_nodes.add(worker.slot.node_id)
        ray.kill(worker.actor, no_restart=True)
        # Other workers of the node may be on devices of the same placement group.
        others = (*self._workers, *self._starting, *self._unlisted)
        if worker.slot.placement not in {other.slot.placement for other in others}:
            remove_placement_group(worker.slot.placement)
        self._log(f"a worker is left out: {reason}")


def _not_there(only: DeviceList, missing: Sequence[str]) -> ClusterError:
    """Return the error for listed devices that the cluster lacks. missing: their names."""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return ClusterError(
        f"{only.source}: the cluster does not give {missing[0]}{more}: it is not there, or others "
        "have it; take it out of the list, or wait for it with --wait SECONDS"
    )


def _let_go(held: Sequence[WorkerHandle]) -> None:
    """Kill the processes, and give the devices back to Ray."""
    for one in held:
        ray.kill(one.actor, no_restart=True)
    for placement in {one.slot.placement for one in held}:
        remove_placement_group(placement)


def _check_devices(devices: Sequence[Device]) -> None:
    """Raise ClusterError where two workers have one device, or versions other than the driver's."""
    if shared := allocator.devices_shared(devices):
        raise ClusterError(f"several workers were given the same device: {', '.join(shared)}")
    ours = package_versions()
    for device in devices:
        for name in ours.keys() & device.versions.keys():
            if ours[name] != device.versions[name]:
                raise ClusterError(
                    f"{name} is {ours[name]} here and {device.versions[name]} on {device.host} "
                    f"({device.address}): install the same version on every node"
                )


class _Worker:
    """The actor around a `Worker`, without a device before `attach_device`, which asks Ray."""

    def __init__(self, search_path: str) -> None:
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        reaper.reap_orphans_of_worker()
        gc.disable()  # the collections in between are a sixth of the time of these imports
        from raybench.worker.process_group import choose_interface
        from raybench.worker.worker import preload

        choose_interface(node_address())
        preload()
        gc.enable()

    def attach_device(
        self, kind: DeviceKind, index: int | None = None, only: Collection[str] | None = None
    ) -> Device | None:
        """Take a device and return it; None if it is not in `only`.

        index: as for `Worker`; None takes the GPU that Ray assigned. only: names of the devices
        that may be used; None for any.
        """
        from raybench.hardware import nvml
        from raybench.worker.worker import Worker

        if index is None:
            # Ray names a GPU by its entry in the raylet's CUDA_VISIBLE_DEVICES where that is set,
            # and torch, which sees all GPUs, counts along that list.
            (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            index = visible.split(",").index(assigned) if visible else int(assigned)
        if only is not None and kind == "cuda" and nvml.uuid_of(index) not in (None, *only):
            return None
        self._worker = Worker(kind, index)
        node_id = ray.get_runtime_context().get_node_id()
        device = self._worker.identity(node_id=node_id, address=node_address())
        return device if only is None or device.lasting_name in only else None

    def run(self, task: Task, place: RankInfo, group: GroupSpec | None) -> RankAnswer:
        return self._worker.run(task, place, group)

    def leave(self) -> None:
        self._worker.leave()


def start_worker(kind: DeviceKind, slot: Slot, environment: Mapping[str, str] | None = None) -> Any:
    """Start a worker process on the device of this slot; return Ray's handle of its `_Worker`.

    Does not wait. Call its `attach_device` next. environment: variables of the job; they replace
    those that are forwarded from this process or set here, except the mark of `reaper`.
    """
    there = PlacementGroupSchedulingStrategy(
        slot.placement, placement_group_bundle_index=slot.bundle
    )
    variables = {
        **_SURVIVE_A_PEER,
        # As srun does: a variable set for the sweep is meant for the workers, on every node.
        **{name: v for name, v in variables_that_matter().items() if name.startswith(_FORWARDED)},
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "RAY_worker_niceness": "0",
        # Ray would turn the log over in threads of the worker, behind a pipe: they would run beside
        # what is measured, and the last words of a crash, which say its reason, would be lost.
        # The agent of the node limits the log instead.
        "RAY_ROTATION_MAX_BYTES": "0",
        # Unmasked: NCCL is slow or hangs across hosts when each rank sees one GPU (ray#61073).
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        **(environment or {}),
        reaper.MARK: reaper.new_mark(),
    }
    options = {
        "num_gpus": int(kind == "cuda"),
        "num_cpus": int(kind == "cpu"),
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": there,
        "runtime_env": {"env_vars": variables},
    }
    return ray.remote(_Worker).options(**options).remote(str(Path.cwd()))


def _why_no_start(error: Exception) -> str:
    """Return in one line for the user why a worker did not start. error: raised by Ray."""
    text = str(error).strip()
    node = re.search(r"\bip=([^,)]+)", text)
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = brief(error.cause)
    elif "creation task" in text:
        # The exception of a constructor stands last, below Ray's own traceback.
        cause = text.splitlines()[-1].strip()
    elif _was_killed(error):
        cause = f"its process {how_it_died(text)}"
    else:
        cause = message_of(error)
    hint = "; install the same packages on every node" if "ModuleNotFoundError" in cause else ""
    return f"a worker could not start{f' on {node[1]}' if node else ''}: {cause}{hint}"


def how_it_died(told: str) -> str:
    """Return how a process ended, as "died by SIGSEGV" or "ended with exit code 1".

    told: text of Ray's error. If it has neither: "ended without a word" and possible reasons where
    a connection broke, else "died: " and the first line of Ray's reason, which may be empty.
    """
    if found := _EXIT_CODE.search(told):
        code, signal = found.groups()
        return f"died by {signal}" if signal else f"ended with exit code {code}"
    if "connection error code 2" in told:
        return (
            "ended without a word: by os._exit, or by a signal as SIGKILL, which the kernel sends "
            "out of memory"
        )
    marks = ("Worker exit detail:", "The actor died because", "The actor is dead because")
    reason = next((told.split(mark, 1)[1] for mark in marks if mark in told), told).strip()
    return "died: " + reason.partition("\n")[0].partition(" Some common causes")[0]


def _was_killed(error: Exception) -> bool:
    """Return whether the process of a worker that was starting was killed from outside."""
    is_death = isinstance(error, ray.exceptions.RayActorError)
    return is_death and "creation task" not in str(error)
