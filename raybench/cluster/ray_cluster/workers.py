"""The workers of a run: those that came, were replaced, got lost, and may still come."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from raybench.cluster import allocator
from raybench.cluster.allocator import Strategy
from raybench.cluster.claims import Claims
from raybench.cluster.ray_cluster.actors import start_worker
from raybench.cluster.ray_cluster.connection import Connection, nodes
from raybench.cluster.ray_cluster.node_agents import NodeAgents
from raybench.cluster.ray_cluster.placement import (
    Slot,
    WorkerHandle,
    ask_autoscaler,
    free_devices,
    racks,
    reserve,
    resource,
)
from raybench.cluster.ray_cluster.ray_errors import was_killed, why_no_start
from raybench.cluster.ray_cluster.replacement import (
    MOST_STARTS,
    START_TIMEOUT_S,
    Replacement,
    Standbys,
)
from raybench.errors import ClusterError
from raybench.records import Device
from raybench.records.device_list import DeviceList
from raybench.records.environment import package_versions

# How long the others are waited for when the first worker is there.
_SLOW_START_S = 20.0
# Workers of one node share its cores while they load torch.
_START_EACH_S = 5.0
# Devices that the last sweep has let go of are free a moment later.
_FREE_SOON_S = 5.0
# Without any device for so long, a sweep that was told no limit gives up.
_FIRST_DEVICE_TIMEOUT_S = 60.0
_POLL_S = 0.25
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A worker that was started and has not said yet which device it has.

    index: of a CPU worker on its node; Ray says which GPU another has.
    """

    slot: Slot
    actor: Any
    identity: Any
    index: int | None
    since_s: float
    tries: int


class WorkerGroup:
    """All workers, in order of their numbers. Several points may ask at once, each for its own.

    tell: gets a line for the user when workers are waited for, come late or are lost.
    only: the devices that may be used. Ray gives no device by its name: all are held, and those
    that are not in the list get no worker.
    """

    def __init__(
        self,
        connection: Connection,
        agents: NodeAgents,
        standbys: Standbys,
        claims: Claims,
        tell: Callable[[str], None],
        only: DeviceList | None = None,
    ) -> None:
        self._connection = connection
        self._only = only
        self._agents = agents
        self._standbys = standbys
        self._claims = claims
        self._tell = tell
        self._workers: list[WorkerHandle] = []
        self._starting: list[_Start] = []
        self._refused: set[str] = set()
        self._unlisted: list[_Start] = []
        self._begun: Counter[str] = Counter()
        self._count = 0
        self._start_limit_s = START_TIMEOUT_S
        self._strategy: Strategy = "pack"
        self._wait_until_s = self._looked_s = 0.0
        self._has_told_end = False
        self._lock = threading.RLock()

    def __getitem__(self, number: int) -> WorkerHandle:
        return self._workers[number]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Device of every worker by worker id, those of lost workers included."""
        return tuple(worker.device for worker in list(self._workers))

    @property
    def lost(self) -> frozenset[int]:
        """Ids of workers that cannot be used any more."""
        workers = enumerate(list(self._workers))
        return frozenset(number for number, worker in workers if worker.lost_because)

    @property
    def pending(self) -> int:
        """Number of workers that were asked for and may still come."""
        with self._lock:
            is_waiting = time.monotonic() < self._wait_until_s
            return len(self._starting) + (self._missing if is_waiting else 0)

    @property
    def _missing(self) -> int:
        """Workers that were asked for and have no device yet."""
        if self._only and not self._names_left:
            return 0
        held = len(self._workers) + len(self._starting) + len(self._unlisted)
        return max(0, self._count - held + len(self.lost))

    @property
    def _names_left(self) -> list[str]:
        """Devices of the list that have had no worker yet."""
        named = {device.lasting_name for device in self.devices}
        return [name for name in self._only.names if name not in named] if self._only else []

    def start(self, count: int, strategy: Strategy) -> None:
        """Start workers on free devices; slow ones, or not there yet, are left to `refresh`."""
        self._count = self._most_listed(self._only) if self._only else count
        self._strategy = strategy
        self._wait_until_s = time.monotonic() + self._connection.wait_s
        self._check_hosts()
        if self._connection.wait_s:
            ask_autoscaler(self._connection.kind, self._count)
        self._hold_devices()
        came = self._first_answers()
        order = allocator.in_device_order([worker.device for worker in came])
        _check_devices([worker.device for worker in came])
        self._claims.hold([worker.device for worker in came])
        self._agents.watch([came[position].device for position in order])
        with self._lock:
            self._workers = [came[position] for position in order]
        self._check_list()
        self._keep_standbys()
        if self.pending:
            wanted = len(self._only.names) if self._only else count
            more = len(self._names_left) if self._only else self.pending
            self._tell(f"{len(came)} of {wanted} workers are there, up to {more} may come")

    def refresh(self, timeout_s: float) -> None:
        """Take in workers that came and note lost ones; wait at most `timeout_s` for one."""
        self._tell_end_of_wait()
        deadline_s = time.monotonic() + timeout_s
        self.lose(self._agents.silent_nodes())
        while not self._took_in() and self.pending and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self.lose(self._agents.silent_nodes())

    def give_back(self, count: int, strategy: Strategy) -> tuple[int, ...]:
        """Let go of the nodes that so many devices leave idle; the numbers of their workers."""
        if not self._connection.wait_s or self._only or count >= self._count:
            return ()
        self._count, self._strategy = count, strategy
        ask_autoscaler(self._connection.kind, count)
        alive = [n for n, worker in enumerate(self._workers) if not worker.lost_because]
        devices = [self._workers[number].device for number in alive]
        nodes = allocator.idle_nodes(devices, count, strategy)
        given = tuple(n for n in alive if self._workers[n].device.node_id in nodes)
        with self._lock:
            for number in given:
                self._workers[number].lost_because = "it was given back"
            _let_go([self._workers[number] for number in given])
        self._standbys.lose(nodes)
        self._agents.dismiss(nodes)
        if nodes:
            hosts = dict.fromkeys(self._workers[number].device.host for number in given)
            self._tell(f"no point needs {', '.join(hosts)} any more: given back")
        return given

    def replace(self, numbers: Collection[int]) -> None:
        """Start new processes on the same devices; a worker that cannot have one is lost."""
        kind, lose = self._connection.kind, self.lose
        Replacement(kind, self._agents, self._standbys, lose, self._lose_worker).run(
            [self._workers[number] for number in numbers]
        )
        self._keep_standbys()

    def lose(self, node_ids: Collection[str]) -> None:
        """Give up what is on these nodes."""
        if not node_ids:  # as at nearly every look
            return
        self._standbys.lose(node_ids)
        with self._lock:
            gone = [worker for worker in self._workers if worker.slot.node_id in node_ids]
            gone = [worker for worker in gone if not worker.lost_because]
            late = [start for start in self._starting if start.slot.node_id in node_ids]
            self._starting = [s for s in self._starting if s.slot.node_id not in node_ids]
            for worker in gone:
                worker.lost_because = f"node {worker.device.host} does not answer"
            _let_go([*gone, *late])
        for reason, count in Counter(worker.lost_because for worker in gone).items():
            self._tell(f"{reason}: {count} worker{'s are' if count > 1 else ' is'} lost")

    def close(self) -> None:
        """Let go of all workers and of their devices."""
        self._standbys.close()
        with self._lock:
            _let_go([*self._workers, *self._starting, *self._unlisted])
            self._workers, self._starting, self._unlisted = [], [], []
        if self._connection.wait_s:
            ask_autoscaler(self._connection.kind, 0)

    def _tell_end_of_wait(self) -> None:
        """Say once who has not come in the time that the user gave."""
        is_over = self._connection.wait_s and time.monotonic() > self._wait_until_s
        if is_over and self._missing and not self._has_told_end:
            self._has_told_end = True
            there = len(self._workers) - len(self.lost)
            self._tell(
                f"{there} of {self._count} workers are there after --wait "
                f"{self._connection.wait_s:g}: no more are waited for"
            )

    def _hold_devices(self) -> None:
        """Start workers on the devices that can be had now, on one at least."""
        begun_s = time.monotonic()
        limit_s = max(self._connection.wait_s, _FIRST_DEVICE_TIMEOUT_S)
        self._start_missing()
        while self._missing and time.monotonic() < begun_s + limit_s:
            if self._starting and time.monotonic() > begun_s + _FREE_SOON_S:
                return
            time.sleep(_POLL_S)
            self._start_missing()
        if not self._starting:
            raise ClusterError(
                f"no {resource(self._connection.kind)} could be had from the cluster in "
                f"{limit_s:g} s: others may use them; see `ray status`"
            )

    def _start_missing(self) -> None:
        kind = self._connection.kind
        barred = self._agents.silent_nodes() | self._refused
        free = {node: n for node, n in free_devices(kind).items() if node not in barred}
        if kind == "cpu" and self._only:
            free = self._listed_of(free, self._only)
        slots = reserve(kind, allocator.shares(free, self._missing, self._strategy, racks()))
        most = max(Counter(slot.node_id for slot in slots).values(), default=0)
        self._start_limit_s = max(self._start_limit_s, START_TIMEOUT_S + most * _START_EACH_S)
        # They load beside the agents, and touch no device before these have looked at it.
        actors = [start_worker(kind, slot.placement, slot.bundle) for slot in slots]
        self._agents.start(slot.node_id for slot in slots)
        pairs = zip(slots, actors, strict=True)
        with self._lock:
            self._starting += [
                self._attach_device(slot, actor, self._new_index(slot)) for slot, actor in pairs
            ]

    def _new_index(self, slot: Slot) -> int | None:
        """Return the number of a new CPU worker on its node."""
        self._begun[slot.node_id] += 1
        return self._begun[slot.node_id] - 1 if self._connection.kind == "cpu" else None

    def _attach_device(self, slot: Slot, actor: Any, index: int | None, tries: int = 1) -> _Start:
        only = self._only and self._only.names
        identity = actor.attach_device.remote(self._connection.kind, index, only)
        since_s = time.monotonic()
        return _Start(
            slot=slot, actor=actor, identity=identity, index=index, since_s=since_s, tries=tries
        )

    def _listed_of(self, free: Mapping[str, int], only: DeviceList) -> dict[str, int]:
        """How many CPU workers each node still needs, for the last one of it in the list."""
        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes()}
        wanted = only.cpu_workers()
        left = {n: wanted.get(hosts.get(n, ""), 0) - self._begun[n] for n in free}
        return {node: min(count, left[node]) for node, count in free.items() if left[node] > 0}

    def _most_listed(self, only: DeviceList) -> int:
        """How many workers can find all devices of the list: one on each GPU there is."""
        if self._connection.kind == "cuda":
            return self._connection.capacity
        return sum(only.cpu_workers().values())

    def _check_hosts(self) -> None:
        """Raise ClusterError for CPU workers of hosts that are not there, and may not come."""
        if self._only is None or self._connection.kind == "cuda" or self._connection.wait_s:
            return
        there = {node["NodeManagerHostname"] for node in nodes() if node["Alive"]}
        missing = [name for name in self._only.names if name.rpartition(":")[0] not in there]
        if missing:
            raise ClusterError(_why_not(self._only, missing))

    def _check_list(self) -> None:
        """Raise ClusterError where a device of the list is not there, and may not come."""
        is_waiting = self._connection.wait_s or self._starting
        if self._only and self._names_left and not is_waiting:
            raise ClusterError(_why_not(self._only, self._names_left))

    def _leave_out(self, start: _Start) -> None:
        """End a worker whose device is not in the list; the device stays held, or it came again."""
        ray.kill(start.actor, no_restart=True)
        with self._lock:
            self._unlisted.append(start)

    def _keep_standbys(self) -> None:
        with self._lock:
            used = [worker.device for worker in self._workers if not worker.lost_because]
        self._standbys.keep(used)

    def _first_answers(self) -> list[WorkerHandle]:
        """Wait for the workers that come in time. Raises ClusterError when one cannot start."""
        deadline_s = time.monotonic() + self._start_limit_s
        came: list[WorkerHandle] = []
        while self._starting and time.monotonic() < deadline_s:
            refs = [start.identity for start in self._starting]
            done = set(ray.wait(refs, num_returns=len(refs), timeout=_LOOK_S)[0])
            for start in self._take_done(done):
                try:
                    if worker := _handle_of(start):
                        came.append(worker)
                    else:
                        self._leave_out(start)
                except ray.exceptions.RayError as error:
                    if not self._try_again(start, error):
                        raise ClusterError(why_no_start(error)) from None
                else:
                    deadline_s = min(deadline_s, time.monotonic() + _SLOW_START_S)
            self.lose(self._agents.silent_nodes())
        if self._only and self._unlisted and not came:
            raise ClusterError(_why_not(self._only, self._names_left))
        if not came:
            why = (
                f"within {self._start_limit_s:.0f} s"
                if self._starting
                else "before its node was lost"
            )
            raise ClusterError(f"no worker started {why}")
        return came

    def _took_in(self) -> bool:
        """Whether a worker came: one that was starting, on a device that has become free."""
        now_s = time.monotonic()
        if self._missing and now_s > self._looked_s + _LOOK_S:
            self._looked_s = now_s
            self._start_missing()  # it may wait for a node, and points must not wait with it
        with self._lock:
            refs = [start.identity for start in self._starting]
            done = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else [])
            came = self._take_done(done)
            self._drop_late(now_s)
            return any([self._take_in(start) for start in came])

    def _take_done(self, identities: Collection[Any]) -> list[_Start]:
        """Take those out of the starting workers that have said which device they have."""
        came = [start for start in self._starting if start.identity in identities]
        self._starting = [start for start in self._starting if start.identity not in identities]
        return came

    def _drop_late(self, now_s: float) -> None:
        """Refuse what never comes up: it must not be waited for till the end of the run."""
        late = [start for start in self._starting if now_s > start.since_s + self._start_limit_s]
        self._starting = [start for start in self._starting if start not in late]
        for start in late:
            limit_s = self._start_limit_s
            self._refuse(start, f"its process did not start within {limit_s:.0f} s")

    def _try_again(self, start: _Start, error: Exception) -> bool:
        """Start it anew where its process was killed. What failed by itself would fail again."""
        if start.tries >= MOST_STARTS or not was_killed(error):
            return False
        self._agents.check_head(start.slot.node_id)  # it may have died with this host's Ray
        ray.kill(start.actor, no_restart=True)
        kind, slot = self._connection.kind, start.slot
        actor = start_worker(kind, slot.placement, slot.bundle)
        again = self._attach_device(slot, actor, start.index, start.tries + 1)
        with self._lock:
            self._starting.append(again)
        self._tell(f"{why_no_start(error)} (tried once more)")
        return True

    def _refuse(self, start: _Start, reason: str) -> None:
        self._refused.add(start.slot.node_id)
        ray.kill(start.actor, no_restart=True)
        self._tell(f"a worker that came late is left out: {reason}")

    def _take_in(self, start: _Start) -> bool:
        """Take in a worker that came late; one that cannot be used costs its node, not the run."""
        try:
            worker = _handle_of(start)
            if worker is None:
                self._leave_out(start)
                return False
            _check_devices(
                [*(s.device for s in self._workers if not s.lost_because), worker.device]
            )
            if reason := self._claims.refusal([worker.device]):
                raise ClusterError(reason)
        except ray.exceptions.RayError as error:
            if not self._try_again(start, error):
                self._refuse(start, why_no_start(error))
            return False
        except ClusterError as error:
            self._refuse(start, str(error))
            return False
        self._agents.watch([worker.device])
        self._workers.append(worker)
        self._keep_standbys()
        now = len(self._workers) - len(self.lost)
        wanted = len(self._only.names) if self._only else self._count
        self._tell(f"a worker came on {worker.device.host}: {now} of {wanted} are there")
        return True

    def _lose_worker(self, worker: WorkerHandle, reason: str) -> None:
        device = worker.device
        with self._lock:
            if worker.lost_because:
                return
            worker.lost_because = f"{device.kind}:{device.index} on {device.host} is lost: {reason}"
        self._tell(worker.lost_because)


def _why_not(only: DeviceList, missing: Sequence[str]) -> str:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"{only.source}: the cluster does not give {missing[0]}{more}: it is not there, or others "
        "have it; take it out of the list, or wait for it with --wait SECONDS"
    )


def _let_go(held: Sequence[WorkerHandle | _Start]) -> None:
    for one in held:
        ray.kill(one.actor, no_restart=True)
    for placement in {one.slot.placement for one in held}:
        remove_placement_group(placement)


def _handle_of(start: _Start) -> WorkerHandle | None:
    """Return the worker that has come up; None where its device is not to be used."""
    device = ray.get(start.identity)
    if device is None:
        return None
    device = replace(device, rack=racks().get(device.node_id, ""))
    return WorkerHandle(slot=start.slot, actor=start.actor, device=device)


def _check_devices(devices: Sequence[Device]) -> None:
    """Raise ClusterError where two workers have one device, or versions other than the driver's."""
    if shared := allocator.devices_shared(devices):
        raise ClusterError(f"several workers were given the same device: {', '.join(shared)}")
    ours = package_versions()
    for device in devices:
        for name in ours.keys() & device.versions.keys():
            if ours[name] != device.versions[name]:
                raise ClusterError(
                    f"{name} is {ours[name]} here and {device.versions[name]} on "
                    f"{device.host} ({device.address}): "
                    "install the same version on every node"
                )
