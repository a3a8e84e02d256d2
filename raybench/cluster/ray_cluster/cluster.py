"""The cluster on Ray as the sweep sees it, and how it runs a point."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import click
import ray

from raybench.cluster import allocator, timeouts
from raybench.cluster.device_reservation import DeviceReservation, ReservationTerms
from raybench.cluster.hang_watch import Request
from raybench.cluster.point_end import RunningRanks, finish_point, with_losses
from raybench.cluster.ray_cluster.actor import how_it_died
from raybench.cluster.ray_cluster.nodes import NodeAgents
from raybench.cluster.ray_cluster.pool import WorkerPool, WorkerProcess
from raybench.cluster.ray_cluster.process_groups import ProcessGroups
from raybench.cluster.ray_cluster.start import (
    Connection,
    HeadMonitor,
    end_process,
    leave,
    ray_guard,
)
from raybench.errors import DETAIL_CHARACTERS, ClusterError, message_of, shorten_start, traceback_of
from raybench.hangs.evidence import Evidence
from raybench.hangs.suspicion import RankProgress
from raybench.job.point import Strategy
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import DeviceFacts, DeviceList, DeviceSample
from raybench.records.hang import HangVerdict
from raybench.records.measurement import Failure, RankAnswer
from raybench.records.record import OtherUsers
from raybench.records.status import Cause, Status
from raybench.records.task import Task

_POLL_S = 0.2
_NODE_DEATH_WORDS = ("its node has died", "node was terminated", "NodeDiedError", "node is dead")


class RayCluster:
    """A `raybench.cluster.Cluster` of workers on Ray.

    Args:
        log: gets lines for the user.
        end: ends this process; called if Ray is gone and a call into Ray hangs.
        terms, only, models: see `ClusterRequest`.
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
        # Workers of a borrowed Ray may be the user's, and so are their logs.
        self._agents = NodeAgents(self._monitor, limits_logs=not connection.is_borrowed)
        self._reservation = DeviceReservation(self._agents, terms, log)
        self._pool = WorkerPool(connection, self._agents, self._reservation, log, only, models)
        self._groups = ProcessGroups(self._pool, self._monitor, self._replace)
        self.kind: DeviceKind = connection.kind
        self.is_private = connection.folder is not None
        self.capacity = min(connection.capacity, len(only.names)) if only else connection.capacity
        noun = "GPU" if self.kind == "cuda" else "CPU worker"
        devices = f"{self.capacity} {noun}{'s' * (self.capacity != 1)}"
        source = f" of {only.source}" if only else ""
        self.description = f"{connection.where}, up to {devices}{source}"
        self._is_closing = threading.Event()
        # `_point_ended` guards the number of running points.
        self._running_points = 0
        self._point_ended = threading.Condition()

    @property
    def devices(self) -> tuple[Device, ...]:
        """See `Cluster.devices`."""
        return self._pool.devices

    @property
    def lost(self) -> frozenset[int]:
        """Ids of unusable workers."""
        return self._pool.lost

    @property
    def pending(self) -> int:
        """Upper bound of the number of workers that may still join."""
        return self._pool.pending

    @property
    def other_sweeps(self) -> tuple[str, ...]:
        """Other sweeps that share the devices, each in words."""
        return self._reservation.other_sweeps

    def start(self, count: int, strategy: Strategy) -> None:
        """Start up to `count` workers, on devices by `strategy`; see `Cluster.start`."""
        with ray_guard(self._monitor.gone, self._end):
            if count > 1:
                self._groups.start()  # several ranks need a store to meet
            self._pool.start(count, strategy)

    def refresh(self, timeout_s: float) -> None:
        """See `Cluster.refresh`."""
        self._pool.refresh(timeout_s)

    def run(
        self,
        task: Task,
        worker_ids: Sequence[int],
        tell_hang: Callable[[HangVerdict], None] = lambda _: None,
    ) -> tuple[RankAnswer, ...]:
        """See `Cluster.run`."""
        with self._point_ended:
            self._running_points += 1
        try:
            return self._run(task, tuple(worker_ids), tell_hang)
        finally:
            with self._point_ended:
                self._running_points -= 1
                self._point_ended.notify_all()

    def _run(
        self, task: Task, worker_ids: tuple[int, ...], tell_hang: Callable[[HangVerdict], None]
    ) -> tuple[RankAnswer, ...]:
        """Prepare workers and process group, run the point, and replace unfit processes."""
        self._check_open()
        workers = [self._pool[worker_id] for worker_id in worker_ids]
        self._pool.lose(self._agents.silent_nodes())
        # Worker id -> why no process starts with the variables of the task.
        refusals: Mapping[int, str] = {}
        if any(_needs_new_process(worker.process, task) for worker in workers):
            self._groups.leave(worker_ids)
            refusals = self._replace(worker_ids, task.worker_environment)
        group = self._groups.join(worker_ids)
        losses = [worker.loss for worker in workers]
        if any(losses) or refusals:
            # A point needs all its workers, so no rank runs.
            failures = []
            for rank, worker_id in enumerate(worker_ids):
                refusal = refusals.get(worker_id, "")
                cause = Cause.NO_START if refusal else Cause.PEER_FAILED
                why = refusal or "another rank has no worker"
                failures.append(Failure.of(cause, rank=rank, message=why, worker_reusable=True))
            return with_losses(failures, losses)
        devices = [worker.device for worker in workers]
        calls = []
        for worker, rank_info in zip(workers, allocator.assign_ranks(devices), strict=True):
            process = worker.process
            process.is_used, process.user_class = True, task.user_class
            calls.append(process.actor.run.remote(task, rank_info, group))
        ranks = _RunningActors(
            calls,
            devices,
            self._agents,
            abort=lambda: self._groups.abort(group),
            check_open=self._check_open,
        )
        outcome = finish_point(ranks, task, tell_hang)
        if outcome.group_is_gone:
            self._groups.forget(worker_ids)
        answers = self._agents.add_outputs_and_clocks(outcome.answers, devices)
        if outcome.unfit:
            self._replace([worker_ids[rank] for rank in sorted(outcome.unfit)])
        return with_losses(answers, [worker.loss for worker in workers])

    def _replace(
        self, worker_ids: Collection[int], environment: Mapping[str, str] | None = None
    ) -> dict[int, str]:
        """Call `WorkerPool.replace`; return worker id -> why no process starts in `environment`."""
        self._check_open()
        # Look now: without its head, Ray ends this process when an actor is killed or started.
        self._monitor.check(afresh=True)
        return self._pool.replace(worker_ids, environment)

    def restart(self) -> None:
        """See `Cluster.restart`."""
        self._pool.lose(self._agents.silent_nodes())
        used = [
            worker_id
            for worker_id in range(len(self.devices))
            if self._pool[worker_id].process.is_used
        ]
        self._groups.forget(used)
        self._replace(used)

    def watch_other_users(self, worker_ids: Sequence[int]) -> Callable[[], OtherUsers]:
        """See `Cluster.watch_other_users`."""
        return self._agents.watch_other_users(
            [self._pool[worker_id].device for worker_id in worker_ids]
        )

    def telemetry(self) -> tuple[DeviceSample, ...]:
        """See `Cluster.telemetry`."""
        return self._agents.drain()

    def read_device_facts(self) -> tuple[DeviceFacts, ...]:
        """See `Cluster.read_device_facts`."""
        return self._agents.device_facts(self.devices)

    def close(self) -> None:
        """Kill the actors and leave Ray; takes seconds. Running points raise ClusterError."""
        self._is_closing.set()
        # Keep this result, because `gone()` below looks again. If the head is lost only then, no
        # measurement suffers, so the guard at the end must not end this process with an error.
        head_lost_before = self._monitor.last_gone
        is_released = threading.Event()

        def release() -> None:
            with suppress(ray.exceptions.RayError):
                self._agents.stop()
                self._groups.close()
                self._pool.close()
                is_released.set()

        # The head may be dead by now: `timeout` and schedulers send SIGTERM to the whole process
        # group. Release in a thread, because Ray waits a minute for a dead head, and then ends
        # this process.
        thread = threading.Thread(target=release, daemon=True)
        if not self._monitor.gone():
            thread.start()
            while thread.is_alive() and not self._monitor.gone():
                thread.join(_POLL_S)
        if not is_released.is_set():
            self._agents.kill(self.devices)  # agents work without the head

        # Wait for the points: `ray.shutdown` crashes this process while another thread waits in
        # Ray.
        with self._point_ended:
            self._point_ended.wait_for(lambda: not self._running_points, timeouts.CLOSE_S)
        # Without the guard, Ray would wait a minute for a head that is cut off.
        with ray_guard(lambda: head_lost_before, self._end):
            leave(self._connection.folder, is_borrowed=self._connection.is_borrowed)

    def _check_open(self) -> None:
        if self._is_closing.is_set():
            raise ClusterError("the cluster is let go")


def _needs_new_process(process: WorkerProcess, task: Task) -> bool:
    """Return whether the task cannot run in this process."""
    if process.environment != task.worker_environment:
        return True
    # User classes may change global state, so two classes never share a process.
    is_other_class = process.user_class != task.user_class
    return process.is_used and (task.settings.fresh_workers or is_other_class)


class _RunningActors(RunningRanks):
    """The ranks of a running point; each rank is an actor.

    Args:
        calls: the call of each actor, in rank order.
        check_open: raises ClusterError if the cluster is closed.
    """

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
        # Call without an answer -> rank.
        self._waiting = {call: rank for rank, call in enumerate(calls)}
        self._agents = agents
        self._abort, self._check_open = abort, check_open
        self._looked_at_nodes_s = time.monotonic()

    def answers(self, timeout_s: float) -> Mapping[int, RankAnswer]:
        """Return rank -> new answer; a rank on a silent node gets a Failure."""
        calls, look_every_s = list(self._waiting), timeouts.POINT_LOOKS_AT_NODES_EVERY_S
        ready, _ = ray.wait(calls, num_returns=1, timeout=min(timeout_s, look_every_s))
        if ready:  # take all answers at once, because each wait looks at thousands of calls
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        self._check_open()
        answers: dict[int, RankAnswer] = {}
        for call in ready:
            rank = self._waiting.pop(call)
            answers[rank] = _answer_of(call, rank, self.devices[rank])
        if time.monotonic() < self._looked_at_nodes_s + look_every_s:
            return answers
        self._looked_at_nodes_s = time.monotonic()
        silent = self._agents.silent_nodes()
        for call, rank in list(self._waiting.items()):
            if self.devices[rank].node_id in silent:
                del self._waiting[call]
                answers[rank] = _node_lost(rank, self.devices[rank])
        return answers

    def abort(self) -> None:
        self._abort()

    def kill(self, ranks: Collection[int]) -> None:
        self._waiting = {call: rank for call, rank in self._waiting.items() if rank not in ranks}
        self._agents.kill([self.devices[rank] for rank in ranks])

    def ask_progress(self) -> Request[Mapping[int, RankProgress]]:
        return self._agents.ask_progress(self.devices)

    def ask_evidence(self) -> Request[Evidence]:
        return self._agents.ask_evidence(self.devices)

    def log_tails(self, ranks: Collection[int]) -> Mapping[int, str]:
        tails = self._agents.log_tails([self.devices[rank] for rank in ranks])
        return dict(zip(ranks, tails, strict=True))

    def wait_until_free(self, ranks: Collection[int], timeout_s: float) -> Sequence[str]:
        return self._agents.wait_until_free([self.devices[rank] for rank in ranks], timeout_s)


def _answer_of(call: Any, rank: int, device: Device) -> RankAnswer:
    """Return the answer of a call that has ended; an error of Ray becomes a Failure."""
    try:
        answer: RankAnswer = ray.get(call)
    except ray.exceptions.RayError as error:
        text = click.unstyle(str(error))  # remove Ray's colours
        is_dead = isinstance(error, ray.exceptions.RayActorError | ray.exceptions.NodeDiedError)
        # Ray may report the kill as the death of the actor.
        is_out_of_memory = isinstance(error, ray.exceptions.OutOfMemoryError) or (
            is_dead and ("running low on memory" in text or "memory monitor" in text)
        )
        if is_dead and not is_out_of_memory and any(words in text for words in _NODE_DEATH_WORDS):
            return _node_lost(rank, device)
        if is_dead or is_out_of_memory:
            reason = f"the worker process {how_it_died(text)}"
            if is_out_of_memory:
                host = device.host
                reason = f"Ray's memory monitor killed the worker: {host} has run out of memory"
            return Failure.of(
                Cause.HOST_OUT_OF_MEMORY if is_out_of_memory else Cause.WORKER_DIED,
                rank=rank,
                message=reason,
                detail=shorten_start(text, DETAIL_CHARACTERS),
            )
        if isinstance(error, ray.exceptions.ObjectLostError):
            return Failure.of(
                Cause.ANSWER_LOST,
                rank=rank,
                message=f"{device.host} has lost the answer of the worker before it was fetched",
                detail=shorten_start(text, DETAIL_CHARACTERS),
            )
        # Take the worker's own exception, because Ray's text begins with the actor's name.
        cause = getattr(error, "cause", None) or error  # only a RayTaskError has `cause`
        return Failure(
            rank=rank,
            status=Status.ERROR,
            error_type=type(cause).__name__,
            message=click.unstyle(message_of(cause)),
            detail=click.unstyle(traceback_of(error)),
        )
    return answer


def _node_lost(rank: int, device: Device) -> Failure:
    return Failure.of(Cause.NODE_LOST, rank=rank, message=f"node {device.host} does not answer")
