"""The agents on real Ray: one process per node, and what becomes of it when it dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
import ray

from raybench.cluster.ray_telemetry import TelemetryAgents
from tests.unit.fakes import make_device

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

FAKE_NVML = Path(__file__).parent / "fake_nvml"


@pytest.fixture
def agents(three_nodes) -> Iterator[TelemetryAgents]:
    """Agents whose processes find an NVML with devices."""
    with _agents(three_nodes, {"PYTHONPATH": str(FAKE_NVML)}) as started:
        yield started


@pytest.fixture
def agents_without_nvml(three_nodes) -> Iterator[TelemetryAgents]:
    """Agents as this machine has them."""
    with _agents(three_nodes, {}) as started:
        yield started


@contextmanager
def _agents(address: str, variables: dict[str, str]) -> Iterator[TelemetryAgents]:
    ray.init(address=address, runtime_env={"env_vars": variables}, log_to_driver=False)
    try:
        started = TelemetryAgents(devices())
        yield started
        started.stop()
    finally:
        ray.shutdown()


def devices():
    """Two devices on each of two nodes."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])[:2]
    return [
        make_device("a", index, node_id=node, uuid=f"GPU-{node}-{index}")
        for node in nodes
        for index in range(2)
    ]


def collected(agents: TelemetryAgents, count: int, within_s: float = 30.0):
    samples = []
    deadline_s = time.monotonic() + within_s
    while len(samples) < count and time.monotonic() < deadline_s:
        samples.extend(agents.drain())
        time.sleep(0.1)
    return samples


def process_ids(agents: TelemetryAgents) -> dict[str, int]:
    return {
        node_id: ray.get(agent.__ray_call__.remote(lambda _: os.getpid()))
        for node_id, agent in agents._agents.items()
    }


def drain_s(agents: TelemetryAgents) -> float:
    started_s = time.monotonic()
    agents.drain()
    return time.monotonic() - started_s


def test_each_node_samples_its_devices_once_a_second_in_a_process_of_its_own(agents):
    samples = collected(agents, 12)
    assert {(s.node_id, s.uuid) for s in samples} == {(d.node_id, d.uuid) for d in devices()}
    assert {(s.sm_clock_mhz, s.gpu_utilization_pct, s.power_w) for s in samples} == {
        (1980, 99.0, None)
    }
    of_one = [s.time for s in samples if s.uuid == samples[0].uuid]
    gaps_s = [(later - earlier).total_seconds() for earlier, later in pairwise(of_one)]
    assert all(0.8 < gap_s < 2.5 for gap_s in gaps_s), gaps_s
    pids = process_ids(agents)
    assert len(set(pids.values())) == 2
    assert os.getpid() not in pids.values()


def test_an_agent_needs_no_torch(agents):
    (agent, *_) = agents._agents.values()
    loaded = ray.get(agent.__ray_call__.remote(lambda _: set(__import__("sys").modules)))
    assert "raybench.measure.telemetry" in loaded
    assert "torch" not in loaded


def test_without_nvml_the_agents_live_and_give_nothing(agents_without_nvml):
    assert len(process_ids(agents_without_nvml)) == 2
    time.sleep(1.5)
    assert agents_without_nvml.drain() == ()
    assert len(process_ids(agents_without_nvml)) == 2


def test_a_dead_agent_costs_its_samples_and_no_time(agents):
    collected(agents, 4)
    (dead, pid), (alive, _) = process_ids(agents).items()
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    samples = collected(agents, 4)
    assert {sample.node_id for sample in samples[2:]} == {alive}
    assert dead not in agents._agents
    assert drain_s(agents) < 0.3


def test_a_frozen_agent_is_not_waited_for_and_its_samples_come_later(agents):
    collected(agents, 4)
    (frozen, pid), _ = process_ids(agents).items()
    time.sleep(1.2)
    os.kill(pid, signal.SIGSTOP)
    stopped_at = datetime.now(UTC)
    try:
        spent_s = [drain_s(agents) for _ in range(3)]
        assert max(spent_s) < 1.0, spent_s
    finally:
        os.kill(pid, signal.SIGCONT)
    samples = collected(agents, 6)
    assert [s for s in samples if s.node_id == frozen and s.time < stopped_at]


def test_stopped_agents_are_gone_and_can_still_be_drained(agents):
    pids = process_ids(agents).values()
    agents.stop()
    assert agents.drain() == ()
    deadline_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
