"""Which standbys a node has, and how a worker gets its next process; Ray's calls are replaced."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import ray
from builders import make_device
from ray.exceptions import GetTimeoutError, RayActorError

from raybench.cluster.ray_cluster import replacement
from raybench.cluster.ray_cluster.actors import Slot, WorkerHandle
from raybench.cluster.ray_cluster.replacement import Replacement, StandbyPolicy, Standbys
from raybench.cluster.timeouts import ClusterTimeouts

GPU = make_device(1, node_id="n", process_id=10, cpu_count=8)
SAME = replace(GPU, process_id=11)
OTHER = replace(GPU, process_id=12, uuid="GPU-0")


def test_gpu_nodes_with_four_cores_for_each_device_have_two_standbys_at_most_one_for_each_device():
    def on(node_id, kind, cores):
        return replace(GPU, node_id=node_id, kind=kind, cpu_count=cores)

    devices = [on("wide", "cuda", 12)] * 3 + [on("narrow", "cuda", 7)] * 2 + [on("lone", "cuda", 4)]
    devices += [on("cpus", "cpu", 99)]
    assert StandbyPolicy().wanted(devices) == {"wide": 2, "lone": 1}
    assert StandbyPolicy(on_cpus=True).wanted(devices) == {
        "wide": 2,
        "narrow": 2,
        "lone": 1,
        "cpus": 1,
    }


@pytest.fixture
def started(monkeypatch):
    """Replaces the start of standbys; their numbers by what `is_loaded` is, and those killed."""
    begun, loaded, killed = [], {}, []

    def start(node_id):
        name = f"{node_id}{len(begun)}"
        begun.append(name)
        return SimpleNamespace(name=name, is_loaded=SimpleNamespace(remote=lambda: name))

    def get(name, timeout):
        answer = loaded.get(name, GetTimeoutError())
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake = SimpleNamespace(
        kill=lambda actor, **_: killed.append(actor.name),
        wait=lambda names, **_: ([name for name in names if name in loaded], []),
        get=get,
        exceptions=ray.exceptions,
    )
    monkeypatch.setattr(replacement, "ray", fake)
    monkeypatch.setattr(replacement, "start_standby", start)
    return SimpleNamespace(begun=begun, loaded=loaded, killed=killed)


def test_a_node_has_its_standbys_until_they_are_taken_and_none_after_the_end(started):
    standbys = Standbys()
    standbys.keep([GPU, GPU])
    standbys.keep([GPU, GPU])
    assert started.begun == ["n0", "n1"]
    assert standbys.take("n").name == "n0"
    standbys.keep([GPU, GPU])
    assert started.begun == ["n0", "n1", "n2"]
    assert [standbys.take("n").name for _ in range(2)] == ["n1", "n2"]
    assert standbys.take("n") is None
    standbys.keep([GPU])
    standbys.dismiss([GPU])
    standbys.close()
    standbys.keep([GPU])
    assert (started.begun[3:], started.killed) == (["n3"], ["n3"])


def test_a_late_point_has_a_standby_for_each_of_its_devices_up_to_four_until_it_ends(started):
    standbys = Standbys()
    cpus = [replace(GPU, kind="cpu", node_id="c", index=index) for index in range(6)]
    standbys.keep(cpus)
    assert started.begun == []
    standbys.prepare(cpus[:1])
    assert started.begun == ["c0"]
    standbys.prepare(cpus)
    standbys.keep(cpus)
    assert started.begun == ["c0", "c1", "c2", "c3"]
    started.loaded.update(c2=True)
    assert standbys.take("c").name == "c2"
    standbys.dismiss(cpus)
    assert sorted(started.killed) == ["c0", "c1", "c3"]
    assert standbys.take("c") is None
    standbys.close()
    standbys.prepare(cpus)
    assert len(started.begun) == 4


def test_when_a_late_point_has_ended_its_nodes_have_as_many_standbys_as_before(started):
    standbys, gpus = Standbys(), [replace(GPU, cpu_count=32)] * 8
    standbys.keep(gpus)
    standbys.prepare(gpus)
    assert started.begun == ["n0", "n1", "n2", "n3"]
    started.loaded.update(n0=True, n1=True)
    assert {standbys.take("n").name for _ in range(2)} == {"n0", "n1"}
    standbys.keep(gpus)
    standbys.dismiss(gpus)
    assert [standbys.take("n").name for _ in range(2)] == ["n2", "n3"]
    assert (len(started.begun), started.killed) == (4, [])
    standbys.prepare(gpus)
    standbys.dismiss(gpus)
    assert started.killed == ["n7", "n6"]


def test_a_standby_that_is_loaded_is_taken_first_and_a_dead_one_never(started):
    standbys = Standbys()
    standbys.keep([GPU, GPU])
    started.loaded["n1"] = True
    assert [standbys.take("n").name for _ in range(2)] == ["n1", "n0"]
    standbys.keep([GPU, GPU])
    started.loaded["n2"] = RayActorError()
    assert standbys.take("n").name == "n3"
    assert standbys.take("n") is None


@dataclass(eq=False)
class Ref:
    answer: object


class Actor:
    """Answers `attach_device` with a device, an exception, or never (None)."""

    def __init__(self, name, answer, calls):
        self.name, self._answer, self._calls = name, answer, calls
        self.attach_device = SimpleNamespace(remote=self._attach)

    def _attach(self, kind, index):
        self._calls.append(f"{self.name} takes {kind}:{index}")
        return Ref(self._answer)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def replaced(monkeypatch, calls):
    """Replaces the process of one worker; gives the worker back.

    spares: what each standby of its node answers. fresh: what a new worker answers.
    """

    def run(*spares, fresh):
        def get(ref):
            if isinstance(ref.answer, Exception):
                raise ref.answer
            return ref.answer

        def wait(refs, **_):
            return [ref for ref in refs if ref.answer is not None], []

        fake = SimpleNamespace(
            kill=lambda actor, **_: calls.append(f"kill {actor.name}"),
            wait=wait,
            get=get,
            exceptions=replacement.ray.exceptions,
        )
        monkeypatch.setattr(replacement, "ray", fake)
        monkeypatch.setattr(replacement, "start_worker", lambda *_: Actor("new", fresh, calls))
        agents = SimpleNamespace(
            silent_nodes=frozenset,
            has_ended=lambda _: False,
            kill=lambda _: calls.append("sigkill"),
            wait_until_free=lambda *_: calls.append("wait until free"),
        )
        left = [Actor("standby", answer, calls) for answer in spares]
        standbys = SimpleNamespace(take=lambda _: left.pop(0) if left else None)
        slot = Slot(node_id="n", placement=None, bundle=0)
        worker = WorkerHandle(slot=slot, actor=Actor("old", None, calls), device=GPU, is_used=True)

        def lose_worker(worker, reason):
            worker.lost_because = reason

        limits = ClusterTimeouts(standby_start_s=0.05)
        Replacement("cuda", agents, standbys, lambda _: None, lose_worker, limits).run([worker])
        return worker

    return run


def test_a_standby_takes_the_device_after_the_old_process_has_given_it_back(replaced, calls):
    worker = replaced(SAME, fresh=None)
    assert (worker.device, worker.is_used, worker.lost_because) == (SAME, False, "")
    assert calls == ["kill old", "sigkill", "wait until free", "standby takes cuda:1"]


@pytest.mark.parametrize(
    "standby", [RayActorError(), OTHER, None], ids=["dead", "another GPU", "stuck"]
)
def test_a_standby_that_is_no_good_is_killed_and_the_next_or_a_new_worker_tried(
    replaced, calls, standby
):
    worker = replaced(standby, standby, fresh=SAME)
    assert (worker.device, worker.lost_because) == (SAME, "")
    assert calls[-5:] == ["standby takes cuda:1", "kill standby"] * 2 + ["new takes cuda:1"]
    calls.clear()
    assert replaced(standby, SAME, fresh=None).device == SAME
    assert calls[-1] == "standby takes cuda:1"


def test_a_new_worker_that_is_killed_while_it_starts_is_started_again_and_not_for_ever(
    replaced, calls
):
    worker = replaced(fresh=RayActorError())
    assert calls.count("new takes cuda:1") == 3
    assert worker.lost_because.startswith("a worker could not start")
    calls.clear()
    failing = RayActorError(error_msg="The actor died because of an error in its creation task")
    assert replaced(fresh=failing).lost_because
    assert calls.count("new takes cuda:1") == 1, "what failed by itself would fail again"


def test_a_worker_whose_index_is_another_gpu_now_is_lost(replaced, calls):
    worker = replaced(fresh=OTHER)
    assert worker.lost_because == "cuda:1 is GPU-0 now"
    assert worker.device == GPU
    assert calls[-1] == "kill new"
