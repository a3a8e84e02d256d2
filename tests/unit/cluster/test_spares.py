"""Which standbys a node has and which is taken, with Ray's calls replaced by a record of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from builders import make_device
from ray.exceptions import GetTimeoutError, RayActorError

from raybench.cluster.ray_cluster import spares
from raybench.cluster.ray_cluster.spares import Standbys, count_wanted

GPU = replace(make_device(), kind="cuda", node_id="n", cpu_count=8)


def test_gpu_nodes_with_four_cores_for_each_device_have_two_standbys_at_most_one_for_each_device():
    def on(node_id: str, kind: str, cores: int):
        return replace(GPU, node_id=node_id, kind=kind, cpu_count=cores)

    devices = [on("wide", "cuda", 12)] * 3 + [on("narrow", "cuda", 7)] * 2 + [on("lone", "cuda", 4)]
    devices += [on("cpus", "cpu", 99)]
    assert count_wanted(devices, on_cpus=False) == {"wide": 2, "lone": 1}
    assert count_wanted(devices, on_cpus=True) == {"wide": 2, "narrow": 2, "lone": 1, "cpus": 1}


@pytest.fixture
def started(monkeypatch):
    """Replaces the start of standbys; their numbers by what `is_loaded` is, and those killed."""
    begun: list[str] = []
    loaded: dict[str, object] = {}
    killed: list[str] = []

    def start(node_id: str) -> SimpleNamespace:
        name = f"{node_id}{len(begun)}"
        begun.append(name)
        return SimpleNamespace(name=name, is_loaded=SimpleNamespace(remote=lambda: name))

    def get(name: str, timeout: float) -> object:
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
    monkeypatch.setattr(spares, "ray", fake)
    monkeypatch.setattr(spares, "start_standby", start)
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
    assert started.killed == ["c0", "c1", "c3"]
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
    assert started.killed == ["n2", "n3"]
    assert [standbys.take("n").name for _ in range(2)] == ["n4", "n5"]


def test_a_standby_that_is_loaded_is_taken_first_and_a_dead_one_never(started):
    standbys = Standbys()
    standbys.keep([GPU, GPU])
    started.loaded["n1"] = True
    assert [standbys.take("n").name for _ in range(2)] == ["n1", "n0"]
    standbys.keep([GPU, GPU])
    started.loaded["n2"] = RayActorError()
    assert standbys.take("n").name == "n3"
    assert standbys.take("n") is None
