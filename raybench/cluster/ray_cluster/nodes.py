"""The nodes of a cluster: an agent on each, beside its workers, and the driver's client to them.

An agent samples the devices of its node, locks them against other sweeps, sees who else uses them,
kills workers and reads what they wrote. It imports no torch, and has no CUDA context. A node whose
agent does not answer is lost.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click
import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raybench.cluster import reaper, timeouts
from raybench.cluster.device_reservation import (
    FOLDER_VARIABLE,
    DeviceLocks,
    Holder,
    LockResult,
    NodeUse,
    lock_name,
    other_users,
    read_node_use,
)
from raybench.cluster.ray_cluster.ray_internals import logs_folder
from raybench.cluster.ray_cluster.start import HeadMonitor, ray_nodes, why_not_listening
from raybench.conversion import GIB, KIB, MIB
from raybench.records.device import Device
from raybench.records.devices import DeviceFacts, DeviceSample
from raybench.records.measurement import Measurement, RankAnswer, SpanNs
from raybench.records.record import OtherUsers

_TAIL_LINES = 60
_OUTPUT_BYTES = 32 * KIB  # of each stream in a point
# A log that takes more of the disk keeps its end alone.
_MOST_LOG_BYTES = 8 * MIB
_LOG_END_BYTES = MIB
_LOOK_AT_LOGS_EVERY_S = 1.0
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE of linux/falloc.h
# Lines that Ray writes between those of the worker.
_RAYS_LINES = (":job_id:", ":actor_name:", ":task_name:")
_POLL_S = 0.1
# Less than any CUDA context has, more than the driver keeps for itself.
_FREE_WITHIN_BYTES = 256 * MIB
# NVML lists an ended process for some seconds. The system does not reuse its id that soon.
_LISTED_S = 60.0


class NodeAgent:
    """The actor beside the workers of a node, children of one raylet; it holds device locks."""

    def __init__(self) -> None:
        from raybench.hardware.devices import memory_in_use_bytes

        self._locks = DeviceLocks()
        # Before the first worker of this run, unless an agent died: the memory of other processes.
        self._used_before_bytes = memory_in_use_bytes()
        self._samplers: list[Any] = []
        # Processes of scripts by id, and until when NVML may still list them.
        self._ended_until_s: dict[int, float] = {}
        # UUIDs of the devices on which points run.
        self._busy: set[str] = set()
        self._facts: Any = None
        # How far the logs of a worker were read, by process id.
        self._read_to: dict[int, dict[str, int]] = {}
        self._looked_at_logs_s = 0.0

    def ping(self) -> None:
        """Return nothing: the answer shows that this node is alive. Limits the logs of workers."""
        if time.monotonic() > self._looked_at_logs_s + _LOOK_AT_LOGS_EVERY_S:
            self._looked_at_logs_s = time.monotonic()
            # Logs of this sweep alone: other jobs of the cluster keep theirs.
            for log in logs_folder().glob(f"worker-*-{ray.get_runtime_context().get_job_id()}-*"):
                limit_log(log)

    def lock(self, names: Sequence[str], holder: Holder, shared: bool) -> LockResult:
        """Lock devices of this host, as `DeviceLocks.lock`."""
        return self._locks.lock(names, holder, shared)

    def unlock(self) -> None:
        """Release all locks of this sweep on this host."""
        self._locks.close()

    def kill(self, process_ids: Sequence[int]) -> None:
        """Send SIGKILL to those processes that are children of this node's raylet.

        Others are left alone: the id of an ended process may be reused.
        """
        for process_id in process_ids:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(process_id)
                if process.ppid() == os.getppid():
                    process.kill()

    def sample(self, devices: Sequence[Device]) -> None:
        """Sample these devices of this node once a second from now on; `drain` returns the samples.

        None of them may be sampled yet. Those that NVML does not know, as CPUs, are left out.
        """
        from raybench.hardware.devices import Sampler

        self._samplers.append(Sampler(devices))
        self._samplers[-1].start()

    def read_use(self, devices: Sequence[Device], holder: Holder, begins: bool) -> NodeUse:
        """Return who uses this node now.

        Args:
            devices: devices of a point.
            holder: this sweep.
            begins: whether the point begins now; else it has ended.
        """
        uuids = {device.uuid for device in devices}
        self._busy = self._busy | uuids if begins else self._busy - uuids
        now_s = time.monotonic()
        ended = [one for one, until_s in self._ended_until_s.items() if now_s < until_s]
        return read_node_use(devices, self._locks, holder, ended, self._busy)

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return the samples since the last call; those of one call of `sample` oldest first."""
        return tuple(sample for sampler in self._samplers for sample in sampler.drain())

    def device_facts(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Return facts as `FactReader.read`; `new_xids` since the first call with that device."""
        if self._facts is None:
            from raybench.hardware.devices import FactReader

            self._facts = FactReader()
        return tuple(self._facts.read(devices))

    def outputs(self, process_ids: Sequence[int], is_new: bool = False) -> dict[int, str]:
        """Return process id -> the end of what the worker wrote, as `new_output` does, "" for none.

        is_new: only what it wrote since the last such call or `end_point`; else from its start.
        """
        logs = logs_folder()
        ends = {one: self._read_to.setdefault(one, {}) if is_new else {} for one in process_ids}
        return {one: new_output(logs, one, read_to) for one, read_to in ends.items()}

    def end_point(
        self,
        process_ids: Sequence[int],
        spans_ns: Mapping[str, Sequence[SpanNs]],
        ended: Collection[int],
    ) -> tuple[dict[int, str], dict[str, tuple[int, ...]]]:
        """Return process id -> its new output, as `outputs` with `is_new`, and UUID -> SM clocks.

        spans_ns: UUID -> timed spans. The clocks are what `Sampler.sm_clocks_mhz` returns, in MHz.
        ended: ids of the processes of scripts; `read_use` does not count them for a minute.
        """
        self._ended_until_s |= dict.fromkeys(ended, time.monotonic() + _LISTED_S)
        clocks = {
            uuid: max((s.sm_clocks_mhz(uuid, spans) for s in self._samplers), key=len, default=())
            for uuid, spans in spans_ns.items()
        }
        return self.outputs(process_ids, is_new=True), clocks

    def memory_growth_bytes(self, uuids: Sequence[str]) -> dict[str, int]:
        """Return UUID -> bytes of the GPU in use now, minus those when this agent started.

        GPUs whose use NVML does not report now are left out; one not reported then counts from 0.
        """
        from raybench.hardware.devices import memory_in_use_bytes

        now, before = memory_in_use_bytes(), self._used_before_bytes
        return {uuid: now[uuid] - before.get(uuid, 0) for uuid in uuids if uuid in now}


def limit_log(log: Path) -> None:
    """Keep the last 1 MiB of a log that takes more than 8 MiB of the disk.

    The rest becomes a hole, so that offsets in the log stay. On a file system without holes the log
    grows on.
    """
    with suppress(FileNotFoundError):  # Ray has removed the log meanwhile
        facts = log.stat()
        if facts.st_blocks * 512 <= _MOST_LOG_BYTES:
            return
        with log.open("r+b") as file:
            start, length = ctypes.c_int64(0), ctypes.c_int64(facts.st_size - _LOG_END_BYTES)
            ctypes.CDLL(None).fallocate64(file.fileno(), _PUNCH_HOLE, start, length)


def new_output(folder: Path, process_id: int, read_to: dict[str, int]) -> str:
    """Return what a worker wrote after `read_to`, the last 32 KiB of stdout, then those of stderr.

    Each begins with its name, as `[stdout]`, and a note if more was written. Left out are colours,
    control characters, empty lines, Ray's own, and a line's text before a carriage return. "" if
    nothing is left, or it has no log. folder: the logs of Ray's session on this node. read_to: name
    of a log -> its bytes read before, {} for none; it is updated in place.
    """
    blocks = []
    for stream, kind in (("stdout", "out"), ("stderr", "err")):
        # A process id may be used twice in a long session.
        logs = sorted(folder.glob(f"worker-*-{process_id}.{kind}"), key=lambda p: p.stat().st_mtime)
        if not logs:
            continue
        end, name = logs[-1].stat().st_size, logs[-1].name
        start, read_to[name] = min(end, read_to.get(name, 0)), end
        left_out = max(0, end - _OUTPUT_BYTES - start)
        with logs[-1].open("rb") as file:
            file.seek(start + left_out)
            text = file.read(end - start - left_out).decode(errors="replace")
        lines = []
        for whole in text.split("\n"):
            # A progress bar writes the same line again and again.
            written = click.unstyle(whole.rstrip("\r").rpartition("\r")[2])
            line = "".join(c for c in written if c.isprintable() or c == "\t")
            if line.strip() and not line.startswith(_RAYS_LINES):
                lines.append(line)
        if left_out and lines:
            # The first line is only the end of one.
            lines = [f"({left_out} bytes before this are not kept)", *(lines[1:] or lines)]
        if lines:
            blocks.append("\n".join([f"[{stream}]", *lines]))
    return "\n".join(blocks)


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node and the calls to its agent that have no answer yet.

    raylet: its HOST:PORT. patience_s: the silence after which the node is given up.
    samples: the last call of `drain`, None where it was answered.
    """

    node_id: str
    raylet: str
    agent: Any
    ping: Any
    looked_s: float
    devices: list[Device] = field(default_factory=list)
    silence_s: float = 0.0
    patience_s: float
    samples: Any = None


class NodeAgents:
    """The client to the agents of all nodes that have workers.

    No method waits without a limit for an agent that is gone or slow, or raises for it: its answer
    is missing, or says so. Nodes that `silent_nodes` returned last are not asked.
    """

    def __init__(self, monitor: HeadMonitor) -> None:
        self._monitor = monitor
        self._nodes: dict[str, _Node] = {}
        self._holder: Holder | None = None
        self._silent: frozenset[str] = frozenset()
        self._looked_s = 0.0
        # Several points may run, and ask, at once.
        self._lock = threading.RLock()

    def start(self, node_ids: Iterable[str]) -> None:
        """Start an agent on each of these nodes that has none, and wait 30 s at most for them.

        Call it before workers have devices: agents note then how much memory others use. node_ids:
        of `ray_nodes`, else KeyError. Raises ClusterError where, while it waits, the head of the
        cluster or this host's Ray is gone; not for an agent that is late.
        """
        with self._lock:
            unknown = set(node_ids) - self._nodes.keys()
            raylets = {node["NodeID"]: node for node in ray_nodes()} if unknown else {}
            pings = []
            for node_id in unknown:
                agent = start_on_node(NodeAgent, node_id)
                node = self._nodes[node_id] = _Node(
                    node_id=node_id,
                    raylet="{NodeManagerAddress}:{NodeManagerPort}".format(**raylets[node_id]),
                    agent=agent,
                    ping=agent.ping.remote(),
                    looked_s=time.monotonic(),
                    patience_s=timeouts.NODE_STARTING_S,
                )
                pings.append(node.ping)
        deadline_s = time.monotonic() + timeouts.AGENT_START_S
        while pings and time.monotonic() < deadline_s:
            _, pings = ray.wait(pings, num_returns=len(pings), timeout=timeouts.LONGEST_LOOK_S)
            self._monitor.check()

    def watch(self, devices: Sequence[Device]) -> None:
        """Make the agents sample these devices, if they do not; starts agents that are missing.

        `drain` returns no samples of other devices. Waits and raises as `start`.
        """
        by_node = _by_node(devices)
        self.start(by_node)
        with self._lock:
            for node_id, here in by_node.items():
                node = self._nodes[node_id]
                # A node that thawed still samples the devices of its lost workers.
                watched = {device.uuid for device in node.devices}
                new = [device for device in here if device.uuid not in watched]
                node.devices += new
                node.agent.sample.remote(tuple(new))

    def silent_nodes(self) -> frozenset[str]:
        """Return the ids of nodes whose agent has not answered for 8 s, or whose Ray has ended.

        A starting agent, or one with nothing to `watch` yet, has 180 s. A node that answers again
        is not among them. It pings all agents and restarts dead ones, four times a second at most,
        else it returns what it found last. Call it about once a second: more than 1.5 s count as
        1.5 s. Raises ClusterError where the head of the cluster or this host's Ray is gone.
        """
        self._monitor.check()
        with self._lock:
            now_s = time.monotonic()
            look_every_s = max(
                timeouts.LOOK_AT_NODES_EVERY_S, timeouts.LOOK_AT_EACH_NODE_S * len(self._nodes)
            )
            if now_s > self._looked_s + min(timeouts.LONGEST_LOOK_S, look_every_s):
                self._looked_s = now_s
                self._silent = frozenset(
                    node_id for node_id, node in self._nodes.items() if self._is_silent(node, now_s)
                )
            return self._silent

    def _is_silent(self, node: _Node, now_s: float) -> bool:
        """Return whether the node has been silent for longer than its patience.

        Reads the last ping and sends the next; restarts an agent that died on a living node.
        """
        node.silence_s += min(now_s - node.looked_s, timeouts.LONGEST_LOOK_S)
        node.looked_s = now_s
        is_done = bool(ray.wait([node.ping], timeout=0)[0])
        if is_done and _collect({node.ping: node.node_id}, 0.0):
            # Before its first workers are there, its cores are busy with them.
            node.silence_s = 0.0
            node.patience_s = timeouts.NODE_SILENCE_S if node.devices else timeouts.NODE_STARTING_S
            node.ping = node.agent.ping.remote()
        elif node.silence_s <= node.patience_s:
            may_have_ended = is_done or node.silence_s > timeouts.NODE_REFUSAL_AFTER_S
            if may_have_ended and self.has_ended(node.node_id, asks_ray=is_done):
                node.patience_s = 0.0
            elif is_done:
                # Of a living node: the new agent samples and locks the same devices.
                node.agent, node.samples = start_on_node(NodeAgent, node.node_id), None
                node.patience_s = timeouts.NODE_STARTING_S
                node.agent.sample.remote(tuple(node.devices))
                if self._holder is not None:
                    # A sweep that came in between is named in the rows.
                    node.agent.lock.remote(list(map(lock_name, node.devices)), self._holder, True)
                node.ping = node.agent.ping.remote()
        return node.silence_s > node.patience_s

    def check_head(self, node_id: str) -> None:
        """Raise ClusterError where the head of the cluster or this host's Ray is gone.

        node_id: the node where a worker died. If its Ray has ended it looks again for 2 s, because
        the head's port may close a moment later.
        """
        self._monitor.check(afresh=True)
        deadline_s = time.monotonic() + timeouts.NODE_REFUSAL_AFTER_S
        while self.has_ended(node_id) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self._monitor.check(afresh=True)

    def has_ended(self, node_id: str, *, asks_ray: bool = True) -> bool:
        """Return whether Ray on this node has ended; False if unknown, or no agent was started.

        It has if its raylet refuses connections or, with `asks_ray`, if Ray says that it is dead.
        Waits 0.1 s at most for the raylet; Ray, asked, may take longer.
        """
        with self._lock:
            node = self._nodes.get(node_id)
        if node is None:
            return False
        # One that is frozen or cut off does not refuse. What Ray says comes late, but it comes for
        # a host that is switched off, too.
        refusal = why_not_listening(node.raylet, timeouts.NODE_CONNECT_S)
        return isinstance(refusal, ConnectionRefusedError) or (
            asks_ray and any(one["NodeID"] == node_id and not one["Alive"] for one in ray_nodes())
        )

    def lock(
        self, devices: Sequence[Device], holder: Holder, *, shared: bool
    ) -> list[tuple[Device, LockResult]]:
        """Lock them as `DeviceLocks.lock`; return the first device and the result of each node.

        Each node locks all of its devices or none, whatever other nodes do; with a `problem` it may
        hold some. A node without an agent, or without its answer in 10 s, has a `problem` too.
        """
        limit_s = timeouts.AGENT_LOCK_S
        results = self._ask(
            "lock", devices, lambda here: (list(map(lock_name, here)), holder, shared), limit_s
        )
        with self._lock:
            self._holder = holder
        silent = LockResult(problem="its agent does not answer")
        by_node = _by_node(devices)
        return [(here[0], results.get(node, silent)) for node, here in by_node.items()]

    def unlock(self, devices: Sequence[Device]) -> None:
        """Release all locks of this sweep on these devices' nodes, if they answer in 10 s."""
        self._ask("unlock", devices, lambda _: (), timeouts.AGENT_LOCK_S)

    def watch_other_users(self, devices: Sequence[Device]) -> Callable[[], OtherUsers]:
        """Have agents look who else uses their nodes; return a function to call after the use.

        That looks again, for 4 s at most, and names who was seen at either look or kept processors
        of CPU workers busy in between, and hosts that did not answer, unless silent or without an
        agent at the first look. It names nobody if `lock` was not called before.
        """
        holder = self._holder
        if holder is None:
            return OtherUsers
        begun = self._send("read_use", devices, lambda here: (here, holder, True))

        def name_others() -> OtherUsers:
            ended = self._send("read_use", devices, lambda here: (here, holder, False))
            limit_s = timeouts.AGENT_LOOK_S
            before, after = _collect(begun, limit_s), _collect(ended, limit_s)
            users, silent_hosts = [], []
            for node, here in _by_node(devices).items():
                if node in before and node in after:
                    users.append(other_users(before[node], after[node], here))
                elif node in begun.values():
                    silent_hosts.append(here[0].host)
            return OtherUsers(
                on_devices=tuple(chain(*(one.on_devices for one in users))),
                on_nodes=tuple(chain(*(one.on_nodes for one in users))),
                loads=tuple(chain(*(one.loads for one in users))),
                silent_hosts=tuple(silent_hosts),
            )

        return name_others

    def kill(self, devices: Sequence[Device]) -> None:
        """Send SIGKILL to the processes of the workers that own these devices.

        Waits at most a second for the agents. Does nothing on nodes that are silent or have none.
        """
        limit_s = timeouts.AGENT_KILL_S
        self._ask("kill", devices, lambda here: ([one.process_id for one in here],), limit_s)

    def log_tails(self, devices: Sequence[Device]) -> list[str]:
        """Return each worker's last 60 lines of `NodeAgent.outputs`; "" without answer in 0.5 s."""
        read = self._ask("outputs", devices, lambda here: ([one.process_id for one in here],))
        outputs = [read.get(one.node_id, {}).get(one.process_id, "") for one in devices]
        return ["\n".join(output.splitlines()[-_TAIL_LINES:]) for output in outputs]

    def wait_until_free(self, devices: Sequence[Device], timeout_s: float) -> tuple[str, ...]:
        """Wait until devices of ended workers use at most 256 MiB more than at the agents' start.

        Return a sentence for each that uses more after `timeout_s`. CPUs, and GPUs whose use
        NVML or the agent does not report, are not waited for.
        """
        gpus = [device for device in devices if device.kind == "cuda"]
        deadline_s = time.monotonic() + timeout_s
        while True:
            grown = self._ask(
                "memory_growth_bytes", gpus, lambda here: ([gpu.uuid for gpu in here],)
            )
            sizes = [(gpu, grown.get(gpu.node_id, {}).get(gpu.uuid, 0)) for gpu in gpus]
            used = [(gpu, size) for gpu, size in sizes if size > _FREE_WITHIN_BYTES]
            if not used or time.monotonic() > deadline_s:
                return tuple(
                    f"{size / GIB:.1f} GiB of cuda:{gpu.index} on {gpu.host} are not free "
                    f"{timeout_s:g} s after its worker ended"
                    for gpu, size in used
                )
            time.sleep(_POLL_S)

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return samples since the last call, a slow agent's later; only one thread may call it."""
        with self._lock:
            nodes = [node for node in self._nodes.values() if node.devices]
            nodes = [node for node in nodes if node.node_id not in self._silent]
            for node in nodes:
                node.samples = node.samples or node.agent.drain.remote()
            asked = {node.samples: node for node in nodes}
        if not asked:
            return ()
        # Without the lock: points that run look at their nodes meanwhile.
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeouts.AGENT_ANSWER_S)
        with self._lock:
            for ref in done:
                asked[ref].samples = None
        samples = _collect({ref: asked[ref].node_id for ref in done}, 0.0)
        return tuple(sample for of_node in samples.values() for sample in of_node)

    def device_facts(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Return facts of each device, in order; `unread` says so if no agent answers in 20 s."""
        answers = self._ask("device_facts", devices, lambda here: (here,), timeouts.AGENT_FACTS_S)
        by_uuid = {one.device.uuid: one for facts in answers.values() for one in facts}
        now_s = time.monotonic()
        unread = "the agent of its node does not answer"
        return tuple(
            by_uuid.get(device.uuid, DeviceFacts(device=device, read_s=now_s, unread=unread))
            for device in devices
        )

    def complete(
        self, answers: Sequence[RankAnswer], devices: Sequence[Device]
    ) -> list[RankAnswer]:
        """Return copies of the answers, each with what its worker wrote since its last answer.

        Or, just after its agent was restarted, since its start. Measurements also get the SM clocks
        (MHz) of their GPU in the timed spans. Output and clocks are empty if an agent does not
        answer in 0.5 s. answers, devices: in rank order.
        """
        spans = {
            device.uuid: answer.timed_at_ns
            for answer, device in zip(answers, devices, strict=True)
            if isinstance(answer, Measurement) and device.kind == "cuda"
        }
        ended: dict[str, list[int]] = {}
        for answer, device in zip(answers, devices, strict=True):
            ended.setdefault(device.node_id, []).extend(answer.ended_processes)
        read = self._ask(
            "end_point",
            devices,
            lambda here: (
                [one.process_id for one in here],
                {one.uuid: spans[one.uuid] for one in here if one.uuid in spans},
                ended[here[0].node_id],
            ),
        )
        completed: list[RankAnswer] = []
        for answer, device in zip(answers, devices, strict=True):
            outputs, clocks = read.get(device.node_id, ({}, {}))
            answer = replace(answer, output=outputs.get(device.process_id, ""))
            if isinstance(answer, Measurement):
                answer = replace(answer, sm_clocks_mhz=clocks.get(device.uuid, ()))
            completed.append(answer)
        return completed

    def stop(self) -> None:
        """Release locks and end agents; wait 0.5 s at most. `drain` before. The head must live."""
        if self._holder is not None:
            devices = [device for node in self._nodes.values() for device in node.devices]
            self._ask("unlock", devices, lambda _: ())
        with self._lock:
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            ray.kill(node.agent, no_restart=True)

    def _ask(
        self,
        method: str,
        devices: Iterable[Device],
        arguments: Callable[[list[Device]], tuple[Any, ...]],
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Call a method of the agents of these devices; return the answers by node id.

        Agents of silent nodes are not asked, and those of slow ones left out. arguments: returns
        those of the call, from the devices of a node. timeout_s: for all together; None: 0.5 s.
        """
        calls = self._send(method, devices, arguments)
        return _collect(calls, timeouts.AGENT_ANSWER_S if timeout_s is None else timeout_s)

    def _send(
        self,
        method: str,
        devices: Iterable[Device],
        arguments: Callable[[list[Device]], tuple[Any, ...]],
    ) -> dict[Any, str]:
        """Call a method as `_ask`, without waiting; return the node id of each call."""
        with self._lock:
            agents = {node: self._nodes[node].agent for node in self._nodes.keys() - self._silent}
        return {
            getattr(agents[node], method).remote(*arguments(here)): node
            for node, here in _by_node(devices).items()
            if node in agents
        }


def _collect(refs: Mapping[Any, str], timeout_s: float) -> dict[str, Any]:
    """Wait for calls; return the answers by node id, without those of slow and dead agents."""
    answers: dict[str, Any] = {}
    if refs:
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)[0]:
            with suppress(ray.exceptions.RayError):
                answers[refs[ref]] = ray.get(ref)
    return answers


def _by_node(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Return the devices by node id, in the order of the ids."""
    by_node: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda device: device.node_id):
        by_node.setdefault(device.node_id, []).append(device)
    return by_node


def start_on_node(actor: type, node_id: str) -> Any:
    """Start `actor()` on the node, without a device; return its handle at once, started or not."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    environment = {
        # Ray's nice 15 lets a busy node look like a dead one.
        "RAY_worker_niceness": "0",
        # The mark shows that its processor time is ours.
        reaper.MARK: reaper.new_mark(),
    }
    if folder := os.environ.get(FOLDER_VARIABLE):
        environment[FOLDER_VARIABLE] = folder
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": there,
        "runtime_env": {"env_vars": environment},
    }
    return ray.remote(actor).options(**options).remote()


def node_address() -> str:
    """Return this node's IP address in Ray, 127.0.0.1 in a private one; for processes of Ray."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
