"""One Ray actor per node, beside its workers: it samples, it kills, and its silence tells."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import ray

from raybench.cluster.bystanders import Look, lock_name, others_between
from raybench.cluster.device_locks import Claim, Holder
from raybench.cluster.ray_cluster.actors import start_agent
from raybench.cluster.ray_cluster.connection import nodes
from raybench.cluster.ray_cluster.liveness import HeadMonitor
from raybench.cluster.ray_cluster.node_agent import Output
from raybench.records import Answer, Device, DeviceSample, Measurement, SpanNs
from raybench.records.device_facts import DeviceFacts

# An agent answers in a millisecond; a node that does not is not waited for.
_ANSWER_TIMEOUT_S = 0.5
_KILL_TIMEOUT_S = 1.0
# It waits for whoever else takes a device of its host at the same time.
_CLAIM_TIMEOUT_S = 10.0
# On a host with thousands of processes, all busy.
_LOOK_TIMEOUT_S = 2.0
# Some hundred questions to NVML for each of its devices, the first time with the library to load.
_FACTS_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 30.0
# Without an answer for so long, a node is frozen or cut off. Ray takes up to a minute to say so.
_SILENCE_S = 8.0
# A new agent's process has to start first, on a node that may be starting its workers: 64 of them
# on two busy cores have kept it from its first answer for more than a minute.
_STARTING_S = 180.0
# A node whose raylet has ended refuses connections; one that is frozen or cut off does not.
_REFUSAL_AFTER_S = 2.0
_CONNECT_TIMEOUT_S = 0.1
# Between two looks at a node no more than this counts as silence: the driver may have been
# stopped itself, or had no reason to look.
_LONGEST_LOOK_S = 1.5
_POLL_S = 0.1
# Hundreds of points may be looked after at once. A thousand nodes are looked at once a second: a
# ping and its answer take the driver 0.3 ms.
_LOOK_EVERY_S, _LOOK_AT_A_NODE_S = 0.25, 0.001
# Less than any CUDA context has, more than the driver keeps for itself.
_FREE_WITHIN_BYTES = 256 * 1024**2


@dataclass(slots=True, kw_only=True)
class _Node:
    """An agent and what it was asked.

    raylet: address and port. patience_s: the silence after which the node is given up.
    """

    node_id: str
    raylet: tuple[str, int]
    agent: Any
    ping: Any
    looked_s: float
    devices: list[Device] = field(default_factory=list)
    silence_s: float = 0.0
    patience_s: float = _STARTING_S
    samples: Any = None


@dataclass(slots=True, kw_only=True)
class _Read:
    """How far the output of a worker was read. is_behind: that of an earlier point was not."""

    to: Mapping[str, int] = field(default_factory=dict)
    is_behind: bool = False


class NodeAgents:
    """An agent on each node that has workers. What goes wrong with one costs its help, no more."""

    def __init__(self, monitor: HeadMonitor) -> None:
        self._monitor = monitor
        self._nodes: dict[str, _Node] = {}
        self._holder: Holder | None = None
        self._silent: frozenset[str] = frozenset()
        self._outputs: dict[tuple[str, int], _Read] = {}
        self._looked_s = -_LOOK_EVERY_S
        # Several points may run, and ask, at once.
        self._lock = threading.Lock()

    def start(self, node_ids: Iterable[str]) -> None:
        """Agents on these nodes, and wait for them.

        Before workers have devices: what is in use there without them can be seen only then.
        Raises ClusterError when the head of the cluster is gone, or this host's Ray.
        """
        with self._lock:
            unknown = set(node_ids) - self._nodes.keys()
            raylets = {node["NodeID"]: node for node in nodes()} if unknown else {}
            new = [_start_node(raylets[node_id]) for node_id in unknown]
            self._nodes |= {node.node_id: node for node in new}
        pings, deadline_s = [node.ping for node in new], time.monotonic() + _START_TIMEOUT_S
        while pings and time.monotonic() < deadline_s:
            _, pings = ray.wait(pings, num_returns=len(pings), timeout=_LONGEST_LOOK_S)
            self._monitor.check()

    def watch(self, devices: Sequence[Device]) -> None:
        """Sample these devices, which no agent samples yet."""
        by_node: dict[str, list[Device]] = {}
        for device in devices:
            by_node.setdefault(device.node_id, []).append(device)
        self.start(by_node)
        with self._lock:
            for node_id, here in by_node.items():
                node = self._nodes[node_id]
                # A node that thawed still samples what its lost workers had.
                watched = {device.uuid for device in node.devices}
                new = [device for device in here if device.uuid not in watched]
                node.devices += new
                node.agent.sample.remote(tuple(new))

    def silent_nodes(self) -> frozenset[str]:
        """Node ids of those whose agent does not answer, or that Ray says are dead.

        Costs milliseconds, four times a second at most. Ask about once a second while something is
        waited for. Raises ClusterError when the head of the cluster is gone, or this host's Ray.
        """
        self._monitor.check()
        with self._lock:
            now_s = time.monotonic()
            if now_s > self._looked_s + self._look_every_s():
                self._looked_s = now_s
                known = self._nodes.items()
                self._silent = frozenset(
                    one for one, node in known if _is_silent(node, now_s, self._holder)
                )
            return self._silent

    def _look_every_s(self) -> float:
        return min(_LONGEST_LOOK_S, max(_LOOK_EVERY_S, _LOOK_AT_A_NODE_S * len(self._nodes)))

    def check_head(self, node_id: str) -> None:
        """Raise ClusterError when the head of the cluster is gone, or this host's Ray.

        node_id: of a node where a worker died. Ray gives a node up a moment before its port closes.
        """
        deadline_s = time.monotonic() + _REFUSAL_AFTER_S
        self._monitor.check(afresh=True)
        while self.has_ended(node_id) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self._monitor.check(afresh=True)

    def claim(
        self, devices: Sequence[Device], holder: Holder, *, shared: bool
    ) -> list[tuple[Device, Claim]]:
        """Hold these devices; by node, its first device and what became of the claim."""
        asked = [
            (here[0], agent.claim.remote(list(map(lock_name, here)), holder, shared))
            for agent, here in self._by_agent(devices)
        ]
        with self._lock:
            self._holder = holder
        answers = _answers([ref for _, ref in asked], _CLAIM_TIMEOUT_S)
        silent = Claim(problem="its agent does not answer")
        return [(first, said or silent) for (first, _), said in zip(asked, answers, strict=True)]

    def release(self, devices: Sequence[Device]) -> None:
        """Let go of what the nodes of these devices hold."""
        _answers([agent.release.remote() for agent, _ in self._by_agent(devices)], _CLAIM_TIMEOUT_S)

    def bystanders(self, devices: Sequence[Device]) -> Callable[[], tuple[str, ...]]:
        """Begin to look who else uses the devices; the returned call tells who did since."""
        holder = self._holder
        if holder is None:
            return tuple
        before = [
            (here, agent.look.remote(here, holder)) for agent, here in self._by_agent(devices)
        ]

        def seen() -> tuple[str, ...]:
            after = [agent.look.remote(here, holder) for agent, here in self._by_agent(devices)]
            looks = _answers([*(ref for _, ref in before), *after], _LOOK_TIMEOUT_S)
            pairs = zip(looks[: len(before)], looks[len(before) :], strict=True)
            return tuple(
                told
                for (here, _), (one, two) in zip(before, pairs, strict=True)
                for told in _others_on(here, one, two)
            )

        return seen

    def has_ended(self, node_id: str) -> bool:
        """Whether Ray on this node is known to have ended. Takes 0.1 s at most."""
        with self._lock:
            node = self._nodes.get(node_id)
        return node is not None and _has_ended(node, asks_ray=True)

    def kill(self, devices: Sequence[Device]) -> None:
        """SIGKILL the processes of the workers that own these devices.

        Waits at most a second for the agents. A node that is gone kills by being gone.
        """
        refs = [
            agent.kill.remote([device.process_id for device in here])
            for agent, here in self._by_agent(devices)
        ]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_KILL_TIMEOUT_S)

    def log_tails(self, devices: Mapping[int, Device]) -> dict[int, str]:
        """Return the last lines that the worker of each wrote; "" where they cannot be had now."""
        agents = self._agents()
        asked = {
            key: agents[device.node_id].log_tail.remote(device.process_id)
            for key, device in devices.items()
            if device.node_id in agents
        }
        tails = _answers(list(asked.values()))
        return dict.fromkeys(devices, "") | {
            key: str(tail or "") for key, tail in zip(asked, tails, strict=True)
        }

    def new_outputs(self, devices: Sequence[Device]) -> list[str]:
        """Return what the worker of each wrote since the last call; "" where that cannot be had."""
        with self._lock:
            silent = self._silent
            asked: dict[str, dict[int, Mapping[str, int]]] = {}
            for device in devices:
                if device.node_id not in silent:
                    ends = self._outputs.setdefault(_process(device), _Read())
                    asked.setdefault(device.node_id, {})[device.process_id] = ends.to
        agents = self._agents()
        refs = {
            node: agents[node].new_outputs.remote(read_to)
            for node, read_to in asked.items()
            if node in agents
        }
        answers = dict(zip(refs, _answers(list(refs.values())), strict=True))
        with self._lock:
            return [self._output_of(device, answers.get(device.node_id)) for device in devices]

    def _output_of(self, device: Device, answers: Mapping[int, Output] | None) -> str:
        read = self._outputs.setdefault(_process(device), _Read())
        if answers is None:
            read.is_behind = True
            return ""
        output = answers[device.process_id]
        note = "(with what it wrote in the points before)\n" if read.is_behind else ""
        read.to, read.is_behind = output.read_to, False
        return f"{note}{output.text}" if output.text else ""

    def wait_until_free(self, devices: Sequence[Device], timeout_s: float) -> tuple[str, ...]:
        """Wait until these GPUs, whose workers are gone, have their memory back.

        A sentence for each that has not in time. CPUs, and GPUs of which NVML does not tell, are
        not waited for.
        """
        deadline_s = time.monotonic() + timeout_s
        kept = self._memory_leaks(devices)
        while kept and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            kept = self._memory_leaks(devices)
        return tuple(
            f"{size / 1024**3:.1f} GiB of {device.kind}:{device.index} on {device.host} are not "
            f"free {timeout_s:g} s after its worker ended"
            for device, size in kept
        )

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return the samples since the last call, as far as the agents answer in time.

        What a slow agent was asked for comes with a later call.
        """
        with self._lock:
            nodes = [node for node in self._nodes.values() if node.devices]
            nodes = [node for node in nodes if node.node_id not in self._silent]
            for node in nodes:
                node.samples = node.samples or node.agent.drain.remote()
            asked = {node.samples: node for node in nodes}
        if not asked:
            return ()
        # Without the lock: points that run look at their nodes meanwhile.
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_TIMEOUT_S)
        with self._lock:
            for ref in done:
                asked[ref].samples = None
        return tuple(sample for said in _answers(done) for sample in said or ())

    def device_facts(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Read each device; it is `unread` where the agent of its node does not answer."""
        asked = self._by_agent(devices)
        refs = [agent.device_facts.remote(here) for agent, here in asked]
        told = [facts for answer in _answers(refs, _FACTS_TIMEOUT_S) for facts in answer or ()]
        by_uuid = {facts.device.uuid: facts for facts in told}
        now = datetime.now(UTC)
        unread = "the agent of its node does not answer"
        return tuple(
            by_uuid.get(device.uuid, DeviceFacts(device=device, read_at=now, unread=unread))
            for device in devices
        )

    def with_clocks(self, answers: Sequence[Answer], devices: Sequence[Device]) -> list[Answer]:
        """Add to each measurement the SM clocks of its device while it was timed."""
        spans: dict[str, dict[str, tuple[SpanNs, ...]]] = {}
        for answer, device in zip(answers, devices, strict=True):
            if device.kind == "cuda" and isinstance(answer, Measurement):
                spans.setdefault(device.node_id, {})[device.uuid] = answer.timed_at_ns
        agents = self._agents()
        refs = [agents[one].sm_clocks_mhz.remote(spans[one]) for one in spans if one in agents]
        read = {uuid: mhz for said in _answers(refs) for uuid, mhz in (said or {}).items()}
        return [
            replace(answer, sm_clocks_mhz=read.get(device.uuid, ()))
            if isinstance(answer, Measurement)
            else answer
            for answer, device in zip(answers, devices, strict=True)
        ]

    def stop(self) -> None:
        """Let the agents go."""
        self.dismiss(list(self._nodes))

    def dismiss(self, node_ids: Collection[str]) -> None:
        """Let the agents of these nodes go."""
        with self._lock:
            nodes = [self._nodes.pop(node_id) for node_id in node_ids if node_id in self._nodes]
        for node in nodes:
            ray.kill(node.agent, no_restart=True)

    def _agents(self) -> dict[str, Any]:
        with self._lock:
            return {node_id: node.agent for node_id, node in self._nodes.items()}

    def _by_agent(self, devices: Sequence[Device]) -> list[tuple[Any, list[Device]]]:
        agents = self._agents()
        by_node: dict[str, list[Device]] = {}
        for device in devices:
            by_node.setdefault(device.node_id, []).append(device)
        return [(agents[node_id], by_node[node_id]) for node_id in sorted(by_node.keys() & agents)]

    def _memory_leaks(self, devices: Sequence[Device]) -> list[tuple[Device, int]]:
        """Find the GPUs that have more in use than before the first worker, and how much more."""
        gpus = [device for device in devices if device.kind == "cuda"]
        asked = [
            (here, agent.memory_growth_bytes.remote([device.uuid for device in here]))
            for agent, here in self._by_agent(gpus)
        ]
        answers = _answers([ref for _, ref in asked])
        found = [
            (device, (grown or {}).get(device.uuid, 0))
            for (here, _), grown in zip(asked, answers, strict=True)
            for device in here
        ]
        return [(device, size) for device, size in found if size > _FREE_WITHIN_BYTES]


def _start_node(raylet: Mapping[str, Any]) -> _Node:
    node_id = raylet["NodeID"]
    agent = start_agent(node_id)
    return _Node(
        node_id=node_id,
        raylet=(raylet["NodeManagerAddress"], raylet["NodeManagerPort"]),
        agent=agent,
        ping=agent.answer.remote(),
        looked_s=time.monotonic(),
    )


def _process(device: Device) -> tuple[str, int]:
    return device.node_id, device.process_id


def _is_silent(node: _Node, now_s: float, holder: Holder | None) -> bool:
    """Look at the last ping and send the next; restart an agent that died on a living node."""
    node.silence_s += min(now_s - node.looked_s, _LONGEST_LOOK_S)
    node.looked_s = now_s
    done, _ = ray.wait([node.ping], timeout=0)
    if done and _is_answered(node.ping):
        # Before its first workers are there its cores are busy with them.
        node.silence_s = 0.0
        node.patience_s = _SILENCE_S if node.devices else _STARTING_S
        node.ping = node.agent.answer.remote()
    elif node.silence_s <= node.patience_s:
        if (done or node.silence_s > _REFUSAL_AFTER_S) and _has_ended(node, asks_ray=bool(done)):
            node.patience_s = 0.0
        elif done:
            node.agent, node.samples, node.patience_s = start_agent(node.node_id), None, _STARTING_S
            node.agent.sample.remote(tuple(node.devices))
            if holder is not None:
                # Who came in between is told in the rows.
                node.agent.claim.remote(list(map(lock_name, node.devices)), holder, True)
            node.ping = node.agent.answer.remote()
    return node.silence_s > node.patience_s


def _has_ended(node: _Node, *, asks_ray: bool) -> bool:
    """Ray's own word comes late, but it comes for a host that is off, too."""
    return _refuses(node.raylet) or (
        asks_ray and any(one["NodeID"] == node.node_id and not one["Alive"] for one in nodes())
    )


def _is_answered(ping: Any) -> bool:
    try:
        ray.get(ping)
    except ray.exceptions.RayError:
        return False
    return True


def _refuses(raylet: tuple[str, int]) -> bool:
    try:
        socket.create_connection(raylet, _CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # its host does not answer, or not so fast
    return False


def _others_on(devices: Sequence[Device], before: Look | None, after: Look | None) -> Iterator[str]:
    """Who used these devices of one node besides, as far as its agent says."""
    if before is None or after is None:
        yield f"who else uses {devices[0].host} is not known: its agent does not answer"
    else:
        yield from others_between(before, after, devices)


def _answers(refs: Sequence[Any], timeout_s: float = _ANSWER_TIMEOUT_S) -> list[Any]:
    """Wait for all agents as long as for one; None from those that are gone or slow."""
    if not refs:
        return []
    done = set(ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)[0])
    return [_ask(ref) if ref in done else None for ref in refs]


def _ask(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayError:
        return None
