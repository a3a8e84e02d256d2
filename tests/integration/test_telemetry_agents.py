"""The agents on real Ray: one process per node, and what becomes of it when it dies or hangs."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raybench.cluster.device_reservation import (
    FOLDER_VARIABLE,
    DeviceLocks,
    DeviceReservation,
    ReservationTerms,
    this_process,
)
from raybench.cluster.ray_cluster.nodes import NodeAgents
from raybench.cluster.ray_cluster.start import HeadMonitor
from raybench.errors import DevicesInUseError
from raybench.records.measurement import Failure
from raybench.records.status import Cause
from tests.integration.sweeps import wait_for
from tests.unit.fakes import make_device, make_measurement

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

FAKE_NVML = Path(__file__).parent / "fake_nvml"
# An answer is waited for half a second; a frozen process gives none for ever.
NOT_WAITED_S = 3.0


# Once for all tests that come after those without an NVML: each start takes seconds.
@pytest.fixture(scope="module")
def agents(three_nodes):
    """Agents whose processes find an NVML with devices."""
    with _agents(three_nodes, {"PYTHONPATH": str(FAKE_NVML)}) as started:
        yield started


@pytest.fixture
def agents_without_nvml(three_nodes):
    """Agents as this machine has them."""
    with _agents(three_nodes, {}) as started:
        yield started


@pytest.fixture
def other_sweep(tmp_path, monkeypatch):
    """The locks of another sweep, in the folder where the agents keep theirs."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    locks = DeviceLocks()
    yield locks
    locks.close()


@contextmanager
def _agents(address, variables):
    ray.init(address=address, runtime_env={"env_vars": variables}, log_to_driver=False)
    try:
        started = NodeAgents(HeadMonitor({"the head": address}))
        started.watch(devices())
        yield started
        started.stop()
    finally:
        ray.shutdown()


def devices():
    """Two devices on each of two nodes."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])[:2]
    places = [(node, index) for node in nodes for index in range(2)]
    return [make_device("a", i, node_id=node, uuid=f"GPU-{node}-{i}") for node, i in places]


def collected(agents, count):
    samples = []

    def are_enough():
        samples.extend(agents.drain())
        return len(samples) >= count

    wait_for(are_enough, within_s=30)
    return samples


def process_ids():
    """Of the agents, by node: Ray titles an actor by its class, and its raylet knows the node."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith("ray::NodeAgent"):
                raylet = process.parent().cmdline()
                [node_id] = [word[10:] for word in raylet if word.startswith("--node_id=")]
                found[node_id] = process.pid
    return found


def drain_s(agents):
    started_s = time.monotonic()
    agents.drain()
    return time.monotonic() - started_s


def talker(node_id):
    """An actor that is as a worker is: it writes to its log, and it can be frozen."""

    class Talker:
        def pid(self):
            print("\x1b[31mstep 1\x1b[0m of 2\x07", flush=True)
            print("last words", file=sys.stderr, flush=True)
            return os.getpid()

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Talker).options(scheduling_strategy=there, num_cpus=0).remote()


# A process whose main thread never gives the interpreter lock back, so that a look waits for it.
_STUCK = """
import ctypes, os, sys
from raybench.hangs.responder import Responder
Responder().serve()
lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
print(os.getpid(), flush=True)
lock(mutex)
"""


def test_a_look_for_hangs_delays_no_other_answer(agents_without_nvml):
    node_id = devices()[0].node_id
    actor = talker(node_id)
    pid = ray.get(actor.pid.remote(), timeout=120)
    stuck = subprocess.Popen([sys.executable, "-c", _STUCK], stdout=subprocess.PIPE, text=True)
    try:
        assert int(stuck.stdout.readline()) == stuck.pid
        worker, hanging = (
            make_device("a", index, node_id=node_id, process_id=process_id, kind="cpu")
            for index, process_id in enumerate((pid, stuck.pid))
        )
        request = agents_without_nvml.ask_evidence([hanging])
        assert request() is None
        assert agents_without_nvml.log_tails([worker]) != [""]
        # The look was still going on.
        assert request() is None
        wait_for(request, within_s=30)
        (rank,) = request().ranks
        assert (rank.process.pid, str(rank.line)) == (stuck.pid, "<string>:8")
    finally:
        stuck.kill()
        stuck.wait()
        stuck.stdout.close()


def test_agent_reads_logs_and_kills_workers_only(agents_without_nvml):
    assert len(process_ids()) == 2
    assert agents_without_nvml.drain() == ()
    node_id = devices()[0].node_id
    actor = talker(node_id)
    pid = ray.get(actor.pid.remote(), timeout=120)
    stranger = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    worker, other = (
        make_device("a", 0, node_id=node_id, process_id=process_id)
        for process_id in (pid, stranger.pid)
    )
    try:
        tails = agents_without_nvml.log_tails([worker, other])
        assert tails == ["[stdout]\nstep 1 of 2\n[stderr]\nlast words", ""]
        os.kill(pid, signal.SIGSTOP)
        started_s = time.monotonic()
        agents_without_nvml.kill([worker, other])
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.pid.remote(), timeout=30)
        print(f"a frozen worker is killed in {time.monotonic() - started_s:.2f} s")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_refused_sweep_keeps_no_node(other_sweep, agents_without_nvml):
    *_, used = names = [device.uuid for device in devices()]
    other_sweep.lock([used], this_process("run other-1"), shared=False)
    terms = ReservationTerms(holder=this_process("run mine-1"))
    with pytest.raises(DevicesInUseError, match="run other-1"):
        DeviceReservation(agents_without_nvml, terms, print).reserve(devices())
    assert [*DeviceLocks().other_users(names).others] == [used]


def test_nodes_sample_devices_each_second_without_torch(agents):
    samples = collected(agents, 12)
    assert {(s.node_id, s.uuid) for s in samples} == {(d.node_id, d.uuid) for d in devices()}
    told = {(s.sm_clock_mhz, s.gpu_utilization_pct, s.power_w) for s in samples}
    assert told == {(1980, 99.0, None)}
    of_one = [s.time for s in samples if s.uuid == samples[0].uuid]
    gaps_s = [(later - earlier).total_seconds() for earlier, later in pairwise(of_one)]
    assert all(0.8 < gap_s < 5 for gap_s in gaps_s), gaps_s
    pids = process_ids()
    assert len(set(pids.values())) == 2
    assert os.getpid() not in pids.values()
    for pid in pids.values():
        loaded = [Path(library.path).name for library in psutil.Process(pid).memory_maps()]
        assert any(name.startswith("_raylet") for name in loaded)
        assert not any("torch" in name for name in loaded)


def test_only_nodes_with_agent_report_device_facts(agents):
    stranger = make_device("z", 0)
    before = agents.device_facts([*devices(), stranger])
    after = agents.device_facts(devices())
    assert [one.device for one in before] == [*devices(), stranger]
    assert [one.unread for one in before] == [""] * 4 + ["the agent of its node does not answer"]
    assert {len(one.nvlinks or ()) for one in before[:4]} == {4}
    # The load is that from before the workers.
    loads = [{one.host.load for one in facts[:4]} for facts in (before, after)]
    assert loads[0] == loads[1]
    grown = [now.pcie_replays - was.pcie_replays for was, now in zip(before, after, strict=False)]
    assert all(more > 0 for more in grown), grown


def test_node_agent_reads_clocks_of_a_measurement(agents):
    collected(agents, 4)  # by then they have read clocks for a second
    end_ns = time.monotonic_ns()
    answers = [replace(make_measurement(rank), timed_at_ns=((0, end_ns),)) for rank in range(4)]
    failed = Failure.of(Cause.PEER_FAILED, rank=1, message="another rank failed")
    answers[1] = failed
    clocked = agents.add_outputs_and_clocks(answers, devices())
    assert clocked[1] == failed
    assert [{*one.sm_clocks_mhz} for one in clocked if one != failed] == [{1980}] * 3
    assert len(clocked[0].sm_clocks_mhz) > 5
    cpus = [replace(device, kind="cpu") for device in devices()]
    assert {
        one.sm_clocks_mhz for one in agents.add_outputs_and_clocks(answers, cpus) if one != failed
    } == {()}


def test_dead_agent_is_restarted_without_any_wait(agents):
    collected(agents, 4)
    (dead, pid), (alive, _) = process_ids().items()
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert drain_s(agents) < NOT_WAITED_S
    samples = collected(agents, 4)
    assert {sample.node_id for sample in samples[2:]} == {alive}

    def is_back():
        assert agents.silent_nodes() == frozenset()
        return dead in {sample.node_id for sample in agents.drain()}

    wait_for(is_back, within_s=20)


@pytest.mark.long
def test_node_with_frozen_agent_is_silent_until_thawed(agents):
    """It is not waited for, and its samples come later."""
    collected(agents, 4)
    (frozen, pid), _ = process_ids().items()
    assert agents.silent_nodes() == frozenset()
    time.sleep(1.2)
    os.kill(pid, signal.SIGSTOP)
    stopped_at = datetime.now(UTC)
    try:
        drains = [drain_s(agents) for _ in range(3)]
        spent_s = wait_for(lambda: agents.silent_nodes() == {frozen}, within_s=30)
        looks = [_look_s(agents) for _ in range(5)]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert spent_s > 4
    assert max(*drains, *looks) < NOT_WAITED_S, (drains, looks)
    wait_for(lambda: not agents.silent_nodes(), within_s=20)
    samples = collected(agents, 6)
    assert [s for s in samples if s.node_id == frozen and s.time < stopped_at]
    print(f"silent after {spent_s:.1f} s; a look takes {max(looks) * 1e3:.1f} ms")


def _look_s(agents):
    time.sleep(0.3)  # it looks four times a second at most
    started_s = time.monotonic()
    agents.silent_nodes()
    return time.monotonic() - started_s


def test_stopped_driver_reports_no_silent_nodes(agents, monkeypatch):
    agents.silent_nodes()
    now_s = time.monotonic() + 3600
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: now_s)
        assert agents.silent_nodes() == frozenset()


def test_stopped_agents_end_and_can_be_drained(agents):
    pids = process_ids().values()
    agents.stop()
    assert agents.drain() == ()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), within_s=10)
