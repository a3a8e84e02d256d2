"""Workers as Ray actors, one per device, placed once and kept for the whole run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray

from raybench.cluster import DeviceKind, allocator
from raybench.cluster.allocator import Strategy
from raybench.cluster.claims import Claims
from raybench.cluster.device_locks import Terms
from raybench.cluster.failures import with_losses
from raybench.cluster.point_end import RunningRanks, finish_point
from raybench.cluster.ray_cluster.connection import Connection
from raybench.cluster.ray_cluster.liveness import HeadMonitor, StartGuard, end_process
from raybench.cluster.ray_cluster.node_agents import NodeAgents
from raybench.cluster.ray_cluster.placement import WorkerHandle
from raybench.cluster.ray_cluster.private_ray import remove_private_folder
from raybench.cluster.ray_cluster.process_groups import ProcessGroups
from raybench.cluster.ray_cluster.ray_errors import answer_of, node_lost
from raybench.cluster.ray_cluster.replacement import Standbys
from raybench.cluster.ray_cluster.workers import WorkerGroup
from raybench.errors import ClusterError
from raybench.records import Answer, Cause, Device, DeviceSample, Failure, Group, Task
from raybench.records.device_facts import DeviceFacts
from raybench.records.device_list import DeviceList

# The loops that wait for workers look once a second.
_PATIENCE_S = 5.0
_LOOK_S = 0.2
# A rank on a node that does not answer is lost.
_LOOK_AT_NODES_S = 1.0
# How long Ray stays for points that still ask it, when it is let go.
_LEAVE_S = 3.0


class _RunningActors(RunningRanks):
    """The ranks of a point as calls of actors. refs: what each will answer, in rank order."""

    def __init__(
        self,
        refs: Sequence[Any],
        devices: Sequence[Device],
        agents: NodeAgents,
        *,
        abort: Callable[[], None],
        prepare: Callable[[], None],
        check_open: Callable[[], None],
    ) -> None:
        self.devices = devices
        self._check_open = check_open
        self._waiting = {ref: rank for rank, ref in enumerate(refs)}
        self._agents = agents
        self._abort, self._prepare = abort, prepare
        self._looked_s = time.monotonic()

    def answers(self, timeout_s: float) -> Mapping[int, Answer]:
        # One by one: `ray.get` of all of them would show one failure and hide the others.
        refs = list(self._waiting)
        ready, _ = ray.wait(refs, num_returns=1, timeout=min(timeout_s, _LOOK_AT_NODES_S))
        if ready:  # thousands may have come meanwhile, and each wait looks at all
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        self._check_open()
        ranks = {self._waiting.pop(ref): ref for ref in ready}
        came: dict[int, Answer] = {
            rank: answer_of(ref, rank, self.devices[rank]) for rank, ref in ranks.items()
        }
        return came | self._on_silent_nodes()

    def abort(self) -> None:
        self._abort()

    def prepare(self) -> None:
        self._prepare()

    def kill(self, ranks: Collection[int]) -> None:
        self._waiting = {ref: rank for ref, rank in self._waiting.items() if rank not in ranks}
        self._agents.kill([self.devices[rank] for rank in ranks])

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        return self._agents.log_tails({rank: self.devices[rank] for rank in ranks})

    def wait_until_free(self, ranks: Collection[int], timeout_s: float) -> Sequence[str]:
        return self._agents.wait_until_free([self.devices[rank] for rank in ranks], timeout_s)

    def _on_silent_nodes(self) -> dict[int, Answer]:
        """Answer in place of ranks that are lost with their nodes."""
        if time.monotonic() - self._looked_s < _LOOK_AT_NODES_S:
            return {}
        self._looked_s = time.monotonic()
        silent = self._agents.silent_nodes()
        lost = {ref: r for ref, r in self._waiting.items() if self.devices[r].node_id in silent}
        for ref in lost:
            del self._waiting[ref]
        return {rank: node_lost(rank, self.devices[rank]) for rank in lost.values()}


class RayCluster:
    """A Ray cluster and the workers that raybench has on it.

    tell: gets a line for the user when workers are waited for, come late or are lost.
    standby_on_cpus: as Standbys' on_cpus. end: as StartGuard's. terms: on which devices are taken
    from other sweeps; without them no device is locked, and nobody is seen beside a point.
    only: the devices that may be used; all where there is none.
    """

    def __init__(
        self,
        connection: Connection,
        tell: Callable[[str], None] = lambda _: None,
        *,
        standby_on_cpus: bool = False,
        end: Callable[[str], None] = end_process,
        terms: Terms | None = None,
        only: DeviceList | None = None,
    ) -> None:
        self._connection = connection
        self._monitor = HeadMonitor(connection.needed)
        self._end = end
        self._agents = NodeAgents(self._monitor)
        self._standbys = Standbys(on_cpus=standby_on_cpus)
        self._claims = Claims(self._agents, terms, tell)
        self._only = only
        self._workers = WorkerGroup(
            connection, self._agents, self._standbys, self._claims, tell, only
        )
        self._groups = ProcessGroups(self._workers, self._monitor)
        self._is_closing = threading.Event()
        self._points = 0
        self._point_ended = threading.Condition()

    @property
    def description(self) -> str:
        """One line for the user: which cluster, and how many devices it could give."""
        noun = "GPU" if self.kind == "cuda" else "CPU worker"
        named = f" of {self._only.source}" if self._only else ""
        devices = f"{self.capacity} {noun}{'s' * (self.capacity != 1)}"
        return f"{self._connection.where}, up to {devices}{named}"

    @property
    def kind(self) -> DeviceKind:
        """Kind of the devices."""
        return self._connection.kind

    @property
    def capacity(self) -> int:
        """Number of devices that a point could have; of listed ones where there is a list."""
        there = self._connection.capacity
        return min(there, len(self._only.names)) if self._only else there

    @property
    def devices(self) -> tuple[Device, ...]:
        """Device of every worker by worker id, those of lost workers included."""
        return self._workers.devices

    @property
    def lost(self) -> frozenset[int]:
        """Ids of workers that cannot be used any more."""
        return self._workers.lost

    @property
    def pending(self) -> int:
        """Number of workers that were asked for and may still come."""
        return self._workers.pending

    def start(self, count: int, strategy: Strategy) -> None:
        """Place workers on the devices that can be had and learn which these are."""
        with StartGuard(self._monitor.gone, self._end, patience_s=_PATIENCE_S):
            if count > 1:
                self._groups.start()
            self._workers.start(count, strategy)

    @property
    def others(self) -> tuple[str, ...]:
        """Other sweeps that had the devices at the start, in words."""
        return self._claims.others

    def bystanders(self, worker_ids: Sequence[int]) -> Callable[[], tuple[str, ...]]:
        """Begin to look who else uses the devices; the returned call tells who did since."""
        return self._agents.bystanders(
            [self._workers[worker_id].device for worker_id in worker_ids]
        )

    def refresh(self, timeout_s: float) -> None:
        """Take in workers that came and note lost ones; wait at most `timeout_s` for one."""
        self._workers.refresh(timeout_s)

    def give_back(self, count: int, strategy: Strategy) -> None:
        """Let go of nodes that such a point leaves idle, where nodes were waited for."""
        if given := self._workers.give_back(count, strategy):
            self._groups.forget(given)

    def run(self, task: Task, worker_ids: Sequence[int]) -> tuple[Answer, ...]:
        """Return one answer per rank. Raises ClusterError where the cluster is gone or closed."""
        with self._point_counted():
            return self._run(task, tuple(worker_ids))

    def _run(self, task: Task, chosen: tuple[int, ...]) -> tuple[Answer, ...]:
        workers = [self._workers[worker_id] for worker_id in chosen]
        self._workers.lose(self._agents.silent_nodes())
        if _need_new_processes(task, workers):
            self._groups.leave(chosen)
            for worker in workers:
                worker.environment = task.worker_environment
            self._replace(chosen)
        group = self._groups.join(chosen)
        if any(worker.lost_because for worker in workers):
            return with_losses(*_answer_unstarted(workers))
        running = self._begin(task, workers, group)
        outcome = finish_point(running, task)
        if outcome.group_is_gone:
            self._groups.forget(chosen)
        clocked = self._agents.with_clocks(outcome.answers, running.devices)
        outputs = self._agents.new_outputs(running.devices)
        if outcome.unfit:
            self._replace([chosen[rank] for rank in sorted(outcome.unfit)])
        if outcome.was_late:
            self._monitor.check(afresh=True)
            self._standbys.dismiss(running.devices)
        answers = zip(clocked, outputs, strict=True)
        return with_losses(
            [replace(answer, output=output) for answer, output in answers],
            [worker.lost_because for worker in workers],
        )

    def restart(self) -> None:
        """Replace the processes of all workers that have run a point."""
        self._workers.lose(self._agents.silent_nodes())
        used = [
            worker_id for worker_id in range(len(self.devices)) if self._workers[worker_id].is_used
        ]
        self._groups.forget(used)
        self._replace(used)

    def telemetry(self) -> tuple[DeviceSample, ...]:
        """Return what the agents sampled of the devices since the last call."""
        return self._agents.drain()

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        """Read state and error counters of each device, in the order of `devices`."""
        return self._agents.device_facts(self.devices)

    def close(self) -> None:
        """Kill the actors and let go of Ray; a private cluster ends with it."""
        self._is_closing.set()
        if self._monitor.gone() or not self._let_go():
            # Ray would wait for a minute; the agents need no head.
            self._agents.kill(self._workers.devices)
            self._standbys.close_without_head()
        # A thread that waits inside of Ray while that goes would crash this process.
        with self._point_ended:
            self._point_ended.wait_for(lambda: not self._points, _LEAVE_S)
        ray.shutdown()
        if folder := self._connection.folder:
            remove_private_folder(folder)

    def _check_open(self) -> None:
        """Raise ClusterError when a point is to end because the cluster does."""
        if self._is_closing.is_set():
            raise ClusterError("the cluster is let go")

    @contextmanager
    def _point_counted(self) -> Iterator[None]:
        with self._point_ended:
            self._points += 1
        try:
            yield
        finally:
            with self._point_ended:
                self._points -= 1
                self._point_ended.notify_all()

    def _let_go(self) -> bool:
        """Give everything back to Ray; False where its head goes meanwhile.

        A SIGTERM to the whole process group, as by `timeout` and by schedulers, ends both. In a
        thread, because Ray waits a minute for a head that has died, and then ends this process.
        """
        given: list[bool] = []
        thread = threading.Thread(target=lambda: given.append(self._give_back()), daemon=True)
        thread.start()
        while thread.is_alive() and not self._monitor.gone():
            thread.join(_LOOK_S)
        return given == [True]

    def _give_back(self) -> bool:
        try:
            self._agents.stop()
            self._groups.close()
            self._workers.close()
        except ray.exceptions.RayError:
            return False
        return True

    def _begin(
        self, task: Task, workers: Sequence[WorkerHandle], group: Group | None
    ) -> _RunningActors:
        """Send the point to its workers, which are in rank order."""
        devices = [worker.device for worker in workers]
        refs = []
        for worker, place in zip(workers, allocator.assign_ranks(devices), strict=True):
            worker.is_used, worker.user_class = True, task.user_class
            refs.append(worker.actor.run.remote(task, place, group))
        return _RunningActors(
            refs,
            devices,
            self._agents,
            abort=lambda: self._groups.tell_abort(group),
            prepare=lambda: self._prepare(devices),
            check_open=self._check_open,
        )

    def _prepare(self, devices: Sequence[Device]) -> None:
        self._monitor.check(afresh=True)
        self._standbys.prepare(devices)

    def _replace(self, worker_ids: Sequence[int]) -> None:
        self._check_open()
        self._monitor.check(afresh=True)
        self._workers.replace(worker_ids)


def _need_new_processes(task: Task, workers: Sequence[WorkerHandle]) -> bool:
    """Return whether these processes will not do for the point.

    They were started with other variables, or have run a point before and the job asks for fresh
    ones or this is another class of the user's: what such a class changes is not all put back.
    """
    is_fresh = task.settings.fresh_workers
    return any(
        worker.environment != task.worker_environment
        or (worker.is_used and (is_fresh or worker.user_class != task.user_class))
        for worker in workers
    )


def _answer_unstarted(workers: Sequence[WorkerHandle]) -> tuple[list[Answer], list[str]]:
    """Answer for a point of which a worker was lost before it began, and say why each was."""
    message = "another rank has no worker"
    answers: list[Answer] = [
        Failure.of(Cause.PEER_FAILED, rank=rank, message=message, worker_reusable=True)
        for rank in range(len(workers))
    ]
    return answers, [worker.lost_because for worker in workers]
