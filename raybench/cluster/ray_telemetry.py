"""One Ray actor per node that samples the node's devices while the workers measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raybench.records import Device, DeviceSample

# An agent answers in a millisecond; a node that does not is not waited for.
_ANSWER_TIMEOUT_S = 0.5


class _Agent:
    """The actor. It imports no torch: it needs neither its memory nor a context on a device."""

    def __init__(self, devices: Sequence[Device]) -> None:
        from raybench.measure.telemetry import Sampler

        self._sampler = Sampler(devices)
        self._sampler.start()

    def drain(self) -> tuple[DeviceSample, ...]:
        return self._sampler.drain()


class TelemetryAgents:
    """An agent on each node of `devices`. What goes wrong with one costs its samples, no more."""

    def __init__(self, devices: Sequence[Device]) -> None:
        by_node: dict[str, list[Device]] = {}
        for device in devices:
            by_node.setdefault(device.node_id, []).append(device)
        self._agents = {node_id: _start(node_id, here) for node_id, here in by_node.items()}
        self._asked: dict[str, Any] = {}

    def drain(self) -> tuple[DeviceSample, ...]:
        """The samples since the last call, as far as the agents answer in time.

        What a slow agent was asked for comes with a later call. A dead one is forgotten.
        """
        for node_id, agent in self._agents.items():
            if node_id not in self._asked:
                self._asked[node_id] = agent.drain.remote()
        if not self._asked:
            return ()
        refs = list(self._asked.values())
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_TIMEOUT_S)
        arrived = {node_id: ref for node_id, ref in self._asked.items() if ref in done}
        return tuple(sample for node_id in arrived for sample in self._answer(node_id))

    def stop(self) -> None:
        """Let the agents go."""
        for agent in self._agents.values():
            ray.kill(agent, no_restart=True)
        self._agents, self._asked = {}, {}

    def _answer(self, node_id: str) -> tuple[DeviceSample, ...]:
        try:
            samples: tuple[DeviceSample, ...] = ray.get(self._asked.pop(node_id))
        except ray.exceptions.RayError:
            del self._agents[node_id]
            return ()
        return samples


def _start(node_id: str, devices: Sequence[Device]) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": there}
    return ray.remote(_Agent).options(**options).remote(tuple(devices))
