"""The nodes of a cluster: an agent on each node, and the driver's client to all agents.

An agent samples the devices of its node, locks them against other sweeps, sees who else uses them,
kills workers and reads their output. It imports no torch and has no CUDA context. A node whose
agent does not answer is lost.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

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
from raybench.cluster.hang_watch import Request
from raybench.cluster.other_programs import ProgramWatch
from raybench.cluster.ray_cluster.ray_internals import logs_folder
from raybench.cluster.ray_cluster.start import HeadMonitor, ray_nodes, why_not_listening
from raybench.conversion import GIB, KIB, MIB
from raybench.hangs.evidence import (
    Evidence,
    RankEvidence,
    RankPlace,
    ask_ras,
    collect,
    read_ras,
)
from raybench.hangs.processes import BlockProgress, read_progress
from raybench.hangs.ras import NoRas
from raybench.hangs.suspicion import RankProgress
from raybench.records.device import Device
from raybench.records.devices import DeviceFacts, DeviceSample
from raybench.records.measurement import Measurement, RankAnswer, SpanNs
from raybench.records.record import OtherUsers

T = TypeVar("T")
_TAIL_LINES = 60
# Kept output of a point, for stdout and stderr each.
_MAX_OUTPUT_BYTES = 32 * KIB
# A log that takes more space on disk loses all but its end.
_MAX_LOG_BYTES = 8 * MIB
_LOG_END_BYTES = MIB
_LOOK_AT_LOGS_EVERY_S = 1.0
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE of linux/falloc.h
# Prefixes of lines that Ray adds to the output of a worker.
_RAY_LINE_PREFIXES = (":job_id:", ":actor_name:", ":task_name:")
_POLL_S = 0.1
# Less memory than any CUDA context needs, and more than the GPU driver keeps for itself.
_MAX_LEFT_BYTES = 256 * MIB
# The methods that look for hanging ranks take seconds. They run in a concurrency group with its own
# threads, so that the agent answers other calls meanwhile.
_HANGS, _HANG_THREADS = "hangs", 4
# How long to ignore the id of an ended process: NVML lists the process for some seconds more, and
# the kernel does not reuse the id that soon.
_IGNORE_ENDED_S = 60.0


class NodeAgent:
    """The actor of a node; the node's raylet is the parent of the agent and of the workers."""

    # Group -> its threads; the methods of no group share one thread.
    CONCURRENCY_GROUPS: ClassVar = {_HANGS: _HANG_THREADS}

    def __init__(self) -> None:
        from raybench.hardware.devices import memory_in_use_bytes

        self._locks = DeviceLocks()
        # The workers of this sweep will add to the load.
        self._load_before_sweep, *_ = os.getloadavg()
        # UUID -> memory in use before the first worker attached its device.
        self._used_before_bytes = memory_in_use_bytes()
        self._samplers: list[Any] = []
        # Process id of a script -> until when NVML may still list the process.
        self._ended_until_s: dict[int, float] = {}
        # UUIDs of the devices on which points run.
        self._busy: set[str] = set()
        self._programs = ProgramWatch()
        # The `FactReader`; None until it is needed.
        self._fact_reader: Any = None
        # Process id -> name of a log -> number of bytes that earlier calls have returned.
        self._log_offsets: dict[int, dict[str, int]] = {}
        self._looked_at_logs_s = 0.0

    def ping(self, limits_logs: bool = True) -> None:
        """Limit the logs of workers; the answer shows that the node is alive."""
        if limits_logs and time.monotonic() > self._looked_at_logs_s + _LOOK_AT_LOGS_EVERY_S:
            self._looked_at_logs_s = time.monotonic()
            # Other jobs of the cluster log in the same folder, so select by our job's id.
            for log in logs_folder().glob(f"worker-*-{ray.get_runtime_context().get_job_id()}-*"):
                limit_log(log)

    def lock(self, names: Sequence[str], holder: Holder, shared: bool) -> LockResult:
        """Lock devices of this host; see `DeviceLocks.lock`."""
        return self._locks.lock(names, holder, shared)

    def unlock(self) -> None:
        """Release all locks of this sweep on this host."""
        self._locks.close()

    def kill(self, process_ids: Sequence[int]) -> None:
        """Send SIGKILL to processes of workers."""
        for process_id in process_ids:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(process_id)
                # Another process may have reused the id; it is no child of this node's raylet.
                if process.ppid() == os.getppid():
                    process.kill()

    def sample(self, devices: Sequence[Device]) -> None:
        """Sample these devices once a second from now on, if NVML knows them.

        Pass a device only once.
        """
        from raybench.hardware.devices import Sampler

        self._samplers.append(Sampler(devices))
        self._samplers[-1].start()

    def read_use(self, devices: Sequence[Device], holder: Holder, begins: bool) -> NodeUse:
        """Note that a point begins or has ended, and return who uses this node now.

        Args:
            devices: devices of the point on this node.
            begins: True before the point, False after it.
        """
        uuids = {device.uuid for device in devices}
        self._busy = self._busy | uuids if begins else self._busy - uuids
        now_s = time.monotonic()
        # NVML may still list these processes.
        ended_ids = [pid for pid, until_s in self._ended_until_s.items() if now_s < until_s]
        return read_node_use(devices, self._locks, holder, ended_ids, self._busy, self._programs)

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return the samples since the last call."""
        return tuple(sample for sampler in self._samplers for sample in sampler.drain())

    def device_facts(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Return state and error counters of the devices, and the state of their host."""
        from raybench.hardware.hosts import read_host

        if self._fact_reader is None:
            from raybench.hardware.devices import FactReader

            self._fact_reader = FactReader()
        host = read_host(self._load_before_sweep)
        return tuple(replace(facts, host=host) for facts in self._fact_reader.read(devices))

    def outputs(self, process_ids: Sequence[int], only_new: bool = False) -> dict[int, str]:
        """Return process id -> output of the worker, in the format of `read_output`.

        Args:
            process_ids: workers of this node.
            only_new: return only output since the last call with `only_new` or of `end_point`.
        """
        logs = logs_folder()
        outputs = {}
        for process_id in process_ids:
            offsets = self._log_offsets.setdefault(process_id, {}) if only_new else {}
            outputs[process_id] = read_output(logs, process_id, offsets)
        return outputs

    def end_point(
        self,
        process_ids: Sequence[int],
        spans_ns: Mapping[str, Sequence[SpanNs]],
        ended_ids: Collection[int],
    ) -> tuple[dict[int, str], dict[str, tuple[int, ...]]]:
        """Return process id -> new output, and UUID -> SM clocks (MHz) in the timed spans.

        Args:
            process_ids: workers of the point on this node.
            spans_ns: UUID -> timed spans.
            ended_ids: processes of scripts that have ended; `read_use` ignores these ids for 60 s.
        """
        self._ended_until_s |= dict.fromkeys(ended_ids, time.monotonic() + _IGNORE_ENDED_S)
        clocks: dict[str, tuple[int, ...]] = {}
        for uuid, spans in spans_ns.items():
            # Only the sampler of this device has clocks; the other samplers return ().
            clocks_of_samplers = [sampler.sm_clocks_mhz(uuid, spans) for sampler in self._samplers]
            clocks[uuid] = max(clocks_of_samplers, key=len, default=())
        return self.outputs(process_ids, only_new=True), clocks

    @ray.method(concurrency_group=_HANGS)
    def progress(self, process_ids: Sequence[int]) -> dict[int, BlockProgress]:
        """Return process id -> progress, for workers whose progress can be read."""
        progress_by_id = {}
        for process_id in process_ids:
            progress = read_progress(process_id)
            if progress is not None:
                progress_by_id[process_id] = progress
        return progress_by_id

    @ray.method(concurrency_group=_HANGS)
    def hang_evidence(
        self, places: Sequence[RankPlace], world_size: int, asks_ras: bool
    ) -> tuple[tuple[RankEvidence, ...], str | NoRas]:
        """Return evidence on ranks of this node, and the answer of NCCL's RAS service.

        Args:
            places: ranks on this node.
            world_size: number of ranks of the point.
            asks_ras: whether to ask the RAS service, which answers for all nodes. If False, the
                answer is `NoRas.REFUSED`.
        """
        ranks = collect(places, timeouts.HANG_EVIDENCE_S, world_size)
        ras_answer = ask_ras(ranks, timeouts.HANG_RAS_S) if asks_ras else NoRas.REFUSED
        return ranks, ras_answer

    def memory_growth_bytes(self, uuids: Sequence[str]) -> dict[str, int]:
        """Return UUID -> growth of the memory in use since this agent started, if known."""
        from raybench.hardware.devices import memory_in_use_bytes

        now, before = memory_in_use_bytes(), self._used_before_bytes
        return {uuid: now[uuid] - before.get(uuid, 0) for uuid in uuids if uuid in now}


def limit_log(log: Path) -> None:
    """Keep the last 1 MiB of a log that takes more than 8 MiB on disk.

    The rest becomes a hole in the file, so that offsets in the log stay valid.
    """
    with suppress(FileNotFoundError):  # Ray may have removed the log
        status = log.stat()
        # Linux counts `st_blocks` in units of 512 bytes.
        disk_bytes = status.st_blocks * 512
        if disk_bytes <= _MAX_LOG_BYTES:
            return
        with log.open("r+b") as file:
            start, length = ctypes.c_int64(0), ctypes.c_int64(status.st_size - _LOG_END_BYTES)
            ctypes.CDLL(None).fallocate64(file.fileno(), _PUNCH_HOLE, start, length)


def read_output(folder: Path, process_id: int, offsets: dict[str, int]) -> str:
    """Return a worker's output after `offsets`, at most the last 32 KiB of stdout and of stderr.

    A line `[stdout]` or `[stderr]` is above each stream; control characters are removed.

    Args:
        folder: logs of Ray's session on this node.
        offsets: name of a log -> number of bytes read before; updated in place.
    """
    streams = []
    for stream, suffix in (("stdout", "out"), ("stderr", "err")):
        # A process id may be used twice in a long session, so take the latest log.
        paths = folder.glob(f"worker-*-{process_id}.{suffix}")
        log = max(paths, key=lambda path: path.stat().st_mtime, default=None)
        if log is None:
            continue
        end = log.stat().st_size
        new_start = min(end, offsets.get(log.name, 0))
        offsets[log.name] = end
        start = max(new_start, end - _MAX_OUTPUT_BYTES)
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(end - start).decode(errors="replace")
        lines = _clean_lines(text)
        skipped_bytes = start - new_start
        if skipped_bytes and lines:
            # Drop the first line, because its start is missing; keep a line without a successor.
            whole_lines = lines[1:] or lines
            lines = [f"({skipped_bytes} bytes before this are not kept)", *whole_lines]
        if lines:
            streams.append("\n".join([f"[{stream}]", *lines]))
    return "\n".join(streams)


def _clean_lines(text: str) -> list[str]:
    """Return the lines without control characters, empty lines and Ray's own lines."""
    lines = []
    for line in text.split("\n"):
        # A progress bar rewrites its line, so keep what follows the last carriage return.
        visible = click.unstyle(line.rstrip("\r").rpartition("\r")[2])
        printable = "".join(c for c in visible if c.isprintable() or c == "\t")
        if printable.strip() and not printable.startswith(_RAY_LINE_PREFIXES):
            lines.append(printable)
    return lines


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node, and the calls to its agent that have no answer yet."""

    node_id: str
    # HOST:PORT of the node's raylet.
    raylet: str
    agent: Any
    # The open call of `ping`.
    ping_call: Any
    # When `silence_s` was updated.
    looked_s: float
    # The devices that the agent samples.
    devices: list[Device] = field(default_factory=list)
    # Time since the last answer, without pauses of this process.
    silence_s: float = 0.0
    # The node is lost when `silence_s` is longer.
    patience_s: float
    # The open call of `drain`; None: no call is open.
    drain_call: Any = None


class NodeAgents:
    """The client to the agents of all nodes that have workers.

    Every method waits for a limited time, and returns without the answers of agents that are gone
    or slow. Nodes in the last result of `silent_nodes` are not asked. `start`, `watch` and
    `silent_nodes` raise ClusterError if the cluster is gone.
    """

    def __init__(self, monitor: HeadMonitor, *, limits_logs: bool = True) -> None:
        self._monitor = monitor
        self._limits_logs = limits_logs
        self._nodes: dict[str, _Node] = {}
        # This sweep; None until `lock` is called.
        self._holder: Holder | None = None
        # The last result of `silent_nodes`, and its time.
        self._silent: frozenset[str] = frozenset()
        self._looked_s = 0.0
        # Node id -> ids of ended processes of scripts of which the agent may not know yet.
        self._unreported_ended: defaultdict[str, set[int]] = defaultdict(set)
        # Guards all fields, because points of several threads use the agents.
        self._lock = threading.RLock()

    def start(self, node_ids: Iterable[str]) -> None:
        """Start missing agents on these nodes, and wait up to 30 s for the agents.

        Call this before workers take devices: the agents note how much memory is in use.
        """
        with self._lock:
            new_ids = set(node_ids) - self._nodes.keys()
            nodes_of_ray = {node["NodeID"]: node for node in ray_nodes()} if new_ids else {}
            pings = []
            for node_id in new_ids:
                agent = start_on_node(NodeAgent, node_id)
                raylet = "{NodeManagerAddress}:{NodeManagerPort}".format(**nodes_of_ray[node_id])
                node = self._nodes[node_id] = _Node(
                    node_id=node_id,
                    raylet=raylet,
                    agent=agent,
                    ping_call=agent.ping.remote(self._limits_logs),
                    looked_s=time.monotonic(),
                    patience_s=timeouts.NODE_STARTING_S,
                )
                pings.append(node.ping_call)
        deadline_s = time.monotonic() + timeouts.AGENT_START_S
        while pings and time.monotonic() < deadline_s:
            # Keep the pings without an answer.
            _, pings = ray.wait(pings, num_returns=len(pings), timeout=timeouts.LONGEST_LOOK_S)
            self._monitor.check()

    def watch(self, devices: Sequence[Device]) -> None:
        """Start missing agents, and sample these devices from now on."""
        by_node = _group_by_node(devices)
        self.start(by_node)
        with self._lock:
            for node_id, node_devices in by_node.items():
                node = self._nodes[node_id]
                # The agent of a node that was lost and came back still samples its devices.
                sampled = {device.uuid for device in node.devices}
                added = [device for device in node_devices if device.uuid not in sampled]
                node.devices += added
                node.agent.sample.remote(tuple(added))

    def silent_nodes(self) -> frozenset[str]:
        """Return the ids of nodes whose agent has not answered for 8 s, or whose Ray has ended.

        Agents that start or have no device to `watch` get 180 s. Call this about once a second,
        because it pings all agents and restarts dead agents.
        """
        self._monitor.check()
        with self._lock:
            now_s = time.monotonic()
            # Look at many nodes less often, because each ping takes the driver time.
            look_every_s = max(
                timeouts.LOOK_AT_NODES_EVERY_S, timeouts.LOOK_AT_EACH_NODE_S * len(self._nodes)
            )
            look_every_s = min(look_every_s, timeouts.LONGEST_LOOK_S)
            if now_s > self._looked_s + look_every_s:
                self._looked_s = now_s
                # `_is_silent` also pings an agent, and restarts a dead agent.
                self._silent = frozenset(
                    node_id for node_id, node in self._nodes.items() if self._is_silent(node, now_s)
                )
            return self._silent

    def _is_silent(self, node: _Node, now_s: float) -> bool:
        """Return whether a node was silent too long; ping its agent, or restart a dead agent."""
        # If this process itself was paused, most of the pause does not count as silence.
        node.silence_s += min(now_s - node.looked_s, timeouts.LONGEST_LOOK_S)
        node.looked_s = now_s
        is_ping_done = bool(ray.wait([node.ping_call], timeout=0)[0])
        # A ping that is done without an answer means that the agent has died.
        has_answered = is_ping_done and bool(_collect({node.ping_call: node.node_id}, 0.0))
        if has_answered:
            node.silence_s = 0.0
            # An agent without devices gets more time, because starting workers keep the cores busy.
            node.patience_s = timeouts.NODE_SILENCE_S if node.devices else timeouts.NODE_STARTING_S
            node.ping_call = node.agent.ping.remote(self._limits_logs)
        elif node.silence_s <= node.patience_s:
            may_have_ended = is_ping_done or node.silence_s > timeouts.NODE_REFUSAL_AFTER_S
            if may_have_ended and self.has_ray_ended(node.node_id, asks_ray=is_ping_done):
                node.patience_s = 0.0  # the node is lost now
            elif is_ping_done:
                self._restart_agent(node)
        return node.silence_s > node.patience_s

    def _restart_agent(self, node: _Node) -> None:
        """Start a new agent, which samples and locks the same devices."""
        node.agent, node.drain_call = start_on_node(NodeAgent, node.node_id), None
        node.patience_s = timeouts.NODE_STARTING_S
        node.agent.sample.remote(tuple(node.devices))
        if self._holder is not None:
            # Another sweep may have locked the devices in between. With shared locks both sweeps
            # go on, and the rows name the other sweep.
            names = list(map(lock_name, node.devices))
            node.agent.lock.remote(names, self._holder, shared=True)
        node.ping_call = node.agent.ping.remote(self._limits_logs)

    def check_head(self, node_id: str) -> None:
        """Raise ClusterError if the head of the cluster or this host's Ray is gone.

        Args:
            node_id: the node on which a worker died.
        """
        self._monitor.check(afresh=True)
        # If Ray has ended on the node, look for 2 s: the head may close its port a moment later.
        deadline_s = time.monotonic() + timeouts.NODE_REFUSAL_AFTER_S
        while self.has_ray_ended(node_id) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self._monitor.check(afresh=True)

    def has_ray_ended(self, node_id: str, *, asks_ray: bool = True) -> bool:
        """Return whether Ray on this node has ended; False if unknown.

        Args:
            asks_ray: ask Ray too if the raylet does not refuse connections. This may take long.
        """
        with self._lock:
            node = self._nodes.get(node_id)
        if node is None:
            return False
        # A refused connection proves the end: frozen and cut-off nodes do not refuse connections.
        error = why_not_listening(node.raylet, timeouts.NODE_CONNECT_S)
        if isinstance(error, ConnectionRefusedError):
            return True
        if not asks_ray:
            return False
        # Ray notices the end late, but it also notices that a host was switched off.
        dead_ids = {ray_node["NodeID"] for ray_node in ray_nodes() if not ray_node["Alive"]}
        return node_id in dead_ids

    def lock(
        self, devices: Sequence[Device], holder: Holder, *, shared: bool
    ) -> list[tuple[Device, LockResult]]:
        """Lock the devices; return the first device and the result of each node.

        Each node locks all of its devices or none. A node that does not answer within 10 s has a
        `problem`.
        """

        def arguments(node_devices: list[Device]) -> tuple[Any, ...]:
            return list(map(lock_name, node_devices)), holder, shared

        results = self._ask("lock", devices, arguments, timeouts.AGENT_LOCK_S)
        with self._lock:
            self._holder = holder
        no_answer = LockResult(problem="its agent does not answer")
        return [
            (node_devices[0], results.get(node_id, no_answer))
            for node_id, node_devices in _group_by_node(devices).items()
        ]

    def unlock(self, devices: Sequence[Device]) -> None:
        """Release all locks of this sweep on the nodes of `devices`."""
        self._ask("unlock", devices, lambda _: (), timeouts.AGENT_LOCK_S)

    def watch_other_users(self, devices: Sequence[Device]) -> Callable[[], OtherUsers]:
        """Look for other users of a point's nodes; see `Cluster.watch_other_users`.

        The returned function returns no users if `lock` was not called before.
        """
        holder = self._holder
        if holder is None:
            return OtherUsers

        def send_reads(*, point_begins: bool) -> dict[Any, str]:
            return self._send(
                "read_use", devices, lambda node_devices: (node_devices, holder, point_begins)
            )

        # The calls are collected later, so that the point does not wait for them.
        calls_before = send_reads(point_begins=True)

        def find_others() -> OtherUsers:
            """Return other users of the nodes, by the use of each node before and after a point."""
            calls_after = send_reads(point_begins=False)
            use_before = _collect(calls_before, timeouts.AGENT_LOOK_S)
            use_after = _collect(calls_after, timeouts.AGENT_LOOK_S)
            users_of_nodes, silent_hosts = [], []
            asked_node_ids = set(calls_before.values())
            for node_id, node_devices in _group_by_node(devices).items():
                if node_id in use_before and node_id in use_after:
                    users = other_users(use_before[node_id], use_after[node_id], node_devices)
                    users_of_nodes.append(users)
                elif node_id in asked_node_ids:
                    silent_hosts.append(node_devices[0].host)
            return OtherUsers(
                on_devices=tuple(chain(*(users.on_devices for users in users_of_nodes))),
                on_nodes=tuple(chain(*(users.on_nodes for users in users_of_nodes))),
                loads=tuple(chain(*(users.loads for users in users_of_nodes))),
                silent_hosts=tuple(silent_hosts),
                programs=tuple(chain(*(users.programs for users in users_of_nodes))),
            )

        return find_others

    def kill(self, devices: Sequence[Device]) -> None:
        """Send SIGKILL to the workers of `devices`, except on silent nodes; wait up to 1 s."""
        self._ask(
            "kill",
            devices,
            lambda node_devices: (_process_ids(node_devices),),
            timeouts.AGENT_KILL_S,
        )

    def log_tails(self, devices: Sequence[Device]) -> list[str]:
        """Return the last 60 lines of each worker's output; "" without an answer in 0.5 s."""
        answers = self._ask("outputs", devices, lambda node_devices: (_process_ids(node_devices),))
        tails = []
        for device in devices:
            output = answers.get(device.node_id, {}).get(device.process_id, "")
            tails.append("\n".join(output.splitlines()[-_TAIL_LINES:]))
        return tails

    def ask_progress(self, devices: Sequence[Device]) -> Request[dict[int, RankProgress]]:
        """Ask for rank -> progress of its worker; silent agents are skipped after 0.5 s.

        Args:
            devices: in rank order.
        """
        asked_s = time.monotonic()

        def by_rank(answers: Mapping[str, Any]) -> dict[int, RankProgress]:
            ranks = {}
            for rank, device in enumerate(devices):
                progress = answers.get(device.node_id, {}).get(device.process_id)
                if progress is not None:
                    ranks[rank] = RankProgress(
                        blocks=progress.blocks,
                        # Agents send ages, because the clocks of their hosts differ.
                        last_s=asked_s - progress.age_s,
                        longest_block_s=progress.longest_block_s,
                        is_in_block=progress.is_in_block,
                    )
            return ranks

        calls = self._send("progress", devices, lambda node_devices: (_process_ids(node_devices),))
        return _request(calls, timeouts.AGENT_ANSWER_S, by_rank)

    def ask_evidence(self, devices: Sequence[Device]) -> Request[Evidence]:
        """Ask for evidence on the ranks; it is empty if an agent does not answer in 6 s.

        Args:
            devices: in rank order.
        """
        places_by_uuid = {
            device.uuid: RankPlace(
                rank=rank,
                host=device.host,
                device_kind=device.kind,
                device_index=device.index,
                worker_pid=device.process_id,
                device_uuid=device.uuid if device.kind == "cuda" else None,
            )
            for rank, device in enumerate(devices)
        }
        # NCCL's RAS service answers for all nodes, so only the agent of rank 0 asks the service.
        rank_0 = devices[0]

        def arguments(node_devices: list[Device]) -> tuple[Any, ...]:
            places = tuple(places_by_uuid[device.uuid] for device in node_devices)
            asks_ras = rank_0.kind == "cuda" and node_devices[0].node_id == rank_0.node_id
            return places, len(devices), asks_ras

        def merge(answers: Mapping[str, Any]) -> Evidence:
            ranks = list(chain.from_iterable(ranks for ranks, _ in answers.values()))
            if len(ranks) < len(devices):  # an agent did not answer
                return Evidence(ranks=())
            ranks.sort(key=lambda rank: rank.rank)
            pids = [rank.process.pid for rank in ranks]
            _, ras_answer = answers[rank_0.node_id]
            return Evidence(ranks=tuple(ranks), ras=read_ras(ras_answer, pids))

        calls = self._send("hang_evidence", devices, arguments)
        return _request(calls, timeouts.HANG_ANSWER_S, merge)

    def wait_until_free(self, devices: Sequence[Device], timeout_s: float) -> tuple[str, ...]:
        """Wait until GPUs of ended workers use at most 256 MiB more than at the agents' start.

        Returns:
            A sentence for each GPU that uses more after `timeout_s`.
        """
        gpus = [device for device in devices if device.kind == "cuda"]
        deadline_s = time.monotonic() + timeout_s
        while True:
            # Node id -> UUID -> growth in bytes.
            growth = self._ask(
                "memory_growth_bytes",
                gpus,
                lambda node_devices: ([gpu.uuid for gpu in node_devices],),
            )
            unfreed = []
            for gpu in gpus:
                grown_bytes = growth.get(gpu.node_id, {}).get(gpu.uuid, 0)
                if grown_bytes > _MAX_LEFT_BYTES:
                    unfreed.append((gpu, grown_bytes))
            if not unfreed or time.monotonic() > deadline_s:
                return tuple(
                    f"{grown_bytes / GIB:.1f} GiB of cuda:{gpu.index} on {gpu.host} are not free "
                    f"{timeout_s:g} s after its worker ended"
                    for gpu, grown_bytes in unfreed
                )
            time.sleep(_POLL_S)

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return the samples since the last call. Not thread-safe.

        The samples of slow agents come with a later call.
        """
        with self._lock:
            calls: dict[Any, _Node] = {}
            for node in self._nodes.values():
                if node.devices and node.node_id not in self._silent:
                    # A slow agent may still have the call of an earlier `drain`.
                    node.drain_call = node.drain_call or node.agent.drain.remote()
                    calls[node.drain_call] = node
        if not calls:
            return ()
        # Do not hold the lock while waiting, because running points query their nodes.
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeouts.AGENT_ANSWER_S)
        with self._lock:
            for call in done:
                calls[call].drain_call = None
        samples = _collect({call: calls[call].node_id for call in done}, 0.0)
        return tuple(chain.from_iterable(samples.values()))

    def device_facts(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Return facts of each device; `unread` is set if the agent does not answer in 20 s."""
        answers = self._ask(
            "device_facts", devices, lambda node_devices: (node_devices,), timeouts.AGENT_FACTS_S
        )
        facts_by_uuid = {facts.device.uuid: facts for facts in chain(*answers.values())}
        now_s = time.monotonic()
        unread = "the agent of its node does not answer"
        return tuple(
            facts_by_uuid.get(device.uuid, DeviceFacts(device=device, read_s=now_s, unread=unread))
            for device in devices
        )

    def add_outputs_and_clocks(
        self, answers: Sequence[RankAnswer], devices: Sequence[Device]
    ) -> list[RankAnswer]:
        """Return the answers with each worker's new output, and measurements with SM clocks (MHz).

        The call also tells the agents which processes of scripts have ended. Output and clocks are
        empty if an agent does not answer in 0.5 s.

        Args:
            answers, devices: in rank order.
        """
        # UUID -> timed spans.
        spans_ns = {
            device.uuid: answer.timed_at_ns
            for answer, device in zip(answers, devices, strict=True)
            if isinstance(answer, Measurement) and device.kind == "cuda"
        }
        with self._lock:
            for answer, device in zip(answers, devices, strict=True):
                self._unreported_ended[device.node_id].update(answer.ended_processes)
            # Node id -> ids of processes.
            ended_ids = {
                node_id: sorted(self._unreported_ended[node_id])
                for node_id in _group_by_node(devices)
            }

        def arguments(node_devices: list[Device]) -> tuple[Any, ...]:
            uuids = [device.uuid for device in node_devices if device.uuid in spans_ns]
            node_spans_ns = {uuid: spans_ns[uuid] for uuid in uuids}
            return _process_ids(node_devices), node_spans_ns, ended_ids[node_devices[0].node_id]

        replies = self._ask("end_point", devices, arguments)
        with self._lock:
            for node_id in replies:
                self._unreported_ended[node_id].difference_update(ended_ids[node_id])
        result: list[RankAnswer] = []
        for answer, device in zip(answers, devices, strict=True):
            outputs, clocks = replies.get(device.node_id, ({}, {}))
            answer = replace(answer, output=outputs.get(device.process_id, ""))
            if isinstance(answer, Measurement):
                answer = replace(answer, sm_clocks_mhz=clocks.get(device.uuid, ()))
            result.append(answer)
        return result

    def stop(self) -> None:
        """Release the locks and end the agents. Call `drain` first.

        Call this only while the head of Ray lives, because Ray would hang.
        """
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
        """Call a method of the agents of `devices`; return node id -> answer.

        Args:
            arguments: gets the devices of a node, and returns the arguments of the call.
            timeout_s: for all answers together; None means 0.5 s.
        """
        calls = self._send(method, devices, arguments)
        return _collect(calls, timeouts.AGENT_ANSWER_S if timeout_s is None else timeout_s)

    def _send(
        self,
        method: str,
        devices: Iterable[Device],
        arguments: Callable[[list[Device]], tuple[Any, ...]],
    ) -> dict[Any, str]:
        """Call a method of the agents of `devices`; return call -> node id. Do not wait."""
        with self._lock:
            asked_ids = self._nodes.keys() - self._silent
            agents = {node_id: self._nodes[node_id].agent for node_id in asked_ids}
        calls = {}
        for node_id, node_devices in _group_by_node(devices).items():
            if node_id in agents:
                call = getattr(agents[node_id], method).remote(*arguments(node_devices))
                calls[call] = node_id
        return calls


def _collect(calls: Mapping[Any, str], timeout_s: float) -> dict[str, Any]:
    """Return node id -> answer, for the calls that are answered in time without an error.

    Args:
        calls: call -> node id.
    """
    answers: dict[str, Any] = {}
    if calls:
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[0]:
            with suppress(ray.exceptions.RayError):
                answers[calls[call]] = ray.get(call)
    return answers


def _request(
    calls: Mapping[Any, str], timeout_s: float, read: Callable[[Mapping[str, Any]], T]
) -> Request[T]:
    """Return a request for the answers of calls; do not wait for the answers.

    Args:
        calls: call -> node id.
        read: gets node id -> answer, for the answers that came in time.
    """
    deadline_s = time.monotonic() + timeout_s

    def poll() -> T | None:
        ready = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else []
        if len(ready) < len(calls) and time.monotonic() < deadline_s:
            return None
        return read(_collect(calls, 0.0))

    return poll


def _group_by_node(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Return node id -> devices of the node, sorted by node id."""
    by_node: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda device: device.node_id):
        by_node.setdefault(device.node_id, []).append(device)
    return by_node


def _process_ids(devices: Sequence[Device]) -> list[int]:
    return [device.process_id for device in devices]


def start_on_node(actor: type, node_id: str) -> Any:
    """Start `actor()` on the node without a device; return its handle at once."""
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
    environment = {
        # With Ray's niceness of 15, an agent on a busy node would answer too late.
        "RAY_worker_niceness": "0",
        # Agents count the CPU time of processes with this mark as the sweep's own.
        reaper.MARK: reaper.new_mark(),
    }
    if folder := os.environ.get(FOLDER_VARIABLE):
        environment[FOLDER_VARIABLE] = folder
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": affinity,
        "runtime_env": {"env_vars": environment},
    }
    groups = getattr(actor, "CONCURRENCY_GROUPS", {})
    # Ray's types do not have this option.
    actor_class = ray.remote(concurrency_groups=groups)(actor)  # type: ignore[call-overload]
    return actor_class.options(**options).remote()


def node_address() -> str:
    """Return this node's IP address in Ray; only for processes of Ray."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
