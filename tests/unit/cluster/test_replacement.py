"""How a worker gets its next process; Ray's calls are replaced."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from builders import make_device
from ray.exceptions import RayActorError

from raybench.cluster.ray_cluster import pool
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.placements import Slot
from raybench.cluster.ray_cluster.pool import WorkerPool
from raybench.cluster.ray_cluster.start import Connection
from raybench.errors import ClusterError, DevicesInUseError

GPU = make_device(1, node_id="n", process_id=10, cpu_count=8, versions={})
SAME = replace(GPU, process_id=11)
OTHER = replace(GPU, process_id=12, uuid="GPU-0")


@dataclass(eq=False)
class Ref:
    answer: object


class Actor:
    """Answers `attach_device` with a device, an exception, or never (None)."""

    def __init__(self, name, answer, calls):
        self.name, self._answer, self._calls = name, answer, calls
        self.attach_device = SimpleNamespace(remote=self._attach)

    def _attach(self, kind, index, only):
        self._calls.append(f"{self.name} takes {kind}:{index}")
        return Ref(self._answer)


def get(ref):
    if isinstance(ref.answer, Exception):
        raise ref.answer
    return ref.answer


@pytest.fixture
def calls():
    return []


@pytest.fixture
def agents(calls):
    return SimpleNamespace(
        silent_nodes=frozenset,
        has_ray_ended=lambda _: False,
        check_head=lambda _: None,
        start=list,
        watch=list,
        kill=lambda _: calls.append("sigkill"),
    )


@pytest.fixture
def workers(monkeypatch, calls, agents):
    """A pool of one worker on a GPU."""
    fake = SimpleNamespace(
        kill=lambda actor, **_: calls.append(f"kill {actor.name}"),
        wait=lambda refs, **_: ([ref for ref in refs if ref.answer is not None], []),
        get=get,
        exceptions=pool.ray.exceptions,
    )
    slot = Slot(node_id="n", placement=None, bundle=0)
    monkeypatch.setattr(pool, "ray", fake)
    node = {"NodeManagerHostname": "alpha", "NodeManagerPort": 7, "Labels": {}}
    there = [{**node, "NodeID": name, "NodeManagerAddress": name} for name in ("cut", "n")]
    monkeypatch.setattr(pool, "ray_nodes", lambda: there)
    monkeypatch.setattr(pool, "free_devices", lambda _: {"cut": 1, "n": 1})
    silence = {"cut:7": TimeoutError()}
    monkeypatch.setattr(pool, "why_not_listening", lambda raylet, _: silence.get(raylet))
    monkeypatch.setattr(pool, "hold_devices", lambda _, asked: calls.append(asked) or [slot])
    monkeypatch.setattr(pool, "start_worker", lambda *_: Actor("old", GPU, calls))
    reservation = SimpleNamespace(reserve=list)
    connection = Connection(where="here", needed={}, kind="cuda", capacity=1)
    monkeypatch.setattr("raybench.cluster.timeouts.WORKER_START_S", 0.05)
    made = WorkerPool(connection, agents, reservation, calls.append)
    made.start(1, "pack")
    made[0].process.is_used = True
    return made


@pytest.fixture
def replaced(monkeypatch, calls, workers):
    """Replaces the process of the worker by one that answers `new`; gives the worker back."""

    def run(new):
        calls.clear()
        monkeypatch.setattr(pool, "start_worker", lambda *_: Actor("new", new, calls))
        workers.replace([0])
        return workers[0]

    return run


def test_a_cut_off_node_is_skipped_and_named(workers, calls):
    asked, _, told = calls
    assert asked == {"n": 1}
    assert told.startswith("node alpha gives no worker: it may be frozen or cut off")


def test_a_sweep_that_holds_all_devices_is_named(monkeypatch, workers):
    job = {"IsDead": False, "DriverPid": 7, "DriverIPAddress": "10.0.0.1"}
    jobs = [
        {**job, "JobID": n, "Entrypoint": f"{n} raybench sweep x.yaml"} for n in ("me", "other")
    ]
    monkeypatch.setattr(pool, "jobs", lambda: [*jobs, {**jobs[1], "IsDead": True}])
    pool.ray.get_runtime_context = lambda: SimpleNamespace(get_job_id=lambda: "me")
    monkeypatch.setattr("raybench.cluster.timeouts.FIRST_DEVICE_S", 0.0)
    monkeypatch.setattr(pool, "hold_devices", lambda *_: [])
    with pytest.raises(DevicesInUseError) as raised:
        workers.start(2, "pack")
    named = "used by `other raybench sweep x.yaml` (process 7 on 10.0.0.1); --wait SECONDS waits"
    assert f"in 0 s: {named}" in str(raised.value)


def test_workers_on_a_silent_node_are_given_up(monkeypatch, workers, agents, calls):
    monkeypatch.setattr(agents, "silent_nodes", lambda: {"n"})
    monkeypatch.setattr(pool, "remove_placement_group", lambda _: None)
    monkeypatch.setattr(pool, "start_worker", lambda *_: Actor("mute", None, calls))
    with pytest.raises(ClusterError, match="no worker started before its node was lost"):
        workers.start(2, "pack")
    assert "kill mute" in calls


def test_free_devices_are_looked_for_once_a_second(monkeypatch, workers, agents):
    now_s, looks_s = [100.0], []
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(agents, "silent_nodes", lambda: {"n"})
    monkeypatch.setattr(pool, "remove_placement_group", lambda _: None)
    monkeypatch.setattr(pool, "hold_devices", lambda *_: [])
    monkeypatch.setattr(pool, "free_devices", lambda _: looks_s.append(now_s[0]) or {})
    for time_s in (100.0, 100.9, 101.1, 101.9, 102.3):
        now_s[0] = time_s
        workers.refresh(0.0)
    assert workers.lost == {0}
    assert looks_s == [100.0, 101.1, 102.3]


def test_the_old_process_is_killed_before_its_replacement(replaced, calls):
    worker = replaced(SAME)
    assert (worker.device, worker.process.is_used, worker.loss) == (SAME, False, None)
    assert calls == ["kill old", "sigkill", "new takes cuda:1"]


def test_a_replacement_killed_at_start_is_retried(replaced, calls):
    reason = f"cuda:1 on {GPU.host} is lost: a worker could not start"
    assert replaced(RayActorError(error_msg="")).loss.message.startswith(reason)
    assert calls.count("new takes cuda:1") == 3


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (
            RayActorError(error_msg="The actor died because of an error in its creation task"),
            "a wo",
        ),
        (OTHER, "cuda:1 is GPU-0 now"),
        (None, "its process did not start within 0 s"),
    ],
    ids=["failed by itself", "another GPU", "does not come"],
)
def test_a_worker_without_usable_replacement_is_lost(replaced, workers, calls, new, reason):
    worker = replaced(new)
    assert worker.loss.message.startswith(f"cuda:1 on {GPU.host} is lost: {reason}")
    assert (worker.device, workers.lost) == (GPU, {0})
    assert calls[-3:] == ["new takes cuda:1", "kill new", worker.loss.message]
    assert calls.count("new takes cuda:1") == 1


def test_a_closed_cluster_refuses_points():
    cluster = RayCluster(Connection(where="here", needed={}, kind="cpu", capacity=1))
    cluster.close()
    with pytest.raises(ClusterError, match="let go"):
        cluster.run(None, [0])
