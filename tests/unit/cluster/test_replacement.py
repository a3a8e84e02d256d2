"""How a worker gets its next process, with Ray's calls replaced by a record of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from builders import make_device
from ray.exceptions import RayActorError

from raybench.cluster.ray_cluster import replacement
from raybench.cluster.ray_cluster.placement import Slot, WorkerHandle
from raybench.cluster.ray_cluster.replacement import Replacement

GPU = replace(
    make_device(), kind="cuda", node_id="n", index=1, uuid="GPU-1", process_id=10, cpu_count=8
)
SAME = replace(GPU, process_id=11)
OTHER = replace(GPU, process_id=12, uuid="GPU-0")


@dataclass(eq=False)
class Ref:
    answer: object


class Actor:
    """Answers `sit` with a device, an exception, or never (None)."""

    def __init__(self, name: str, answer: object, calls: list[str]) -> None:
        self.name, self._answer, self._calls = name, answer, calls
        self.attach_device = SimpleNamespace(remote=self._sit)

    def _sit(self, kind: str, index: int) -> Ref:
        self._calls.append(f"{self.name} takes {kind}:{index}")
        return Ref(self._answer)


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def replaced(monkeypatch, calls):
    """Replaces the process of one worker; gives the worker back.

    spares: what each standby of its node answers. fresh: what a new worker answers.
    """

    def run(*spares: object, fresh: object) -> WorkerHandle:
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
        monkeypatch.setattr(replacement, "_STANDBY_TIMEOUT_S", 0.05)
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

        def lose_worker(worker: WorkerHandle, reason: str) -> None:
            worker.lost_because = reason

        Replacement("cuda", agents, standbys, lambda _: None, lose_worker).run([worker])
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


def test_without_a_standby_a_new_worker_is_started(replaced, calls):
    assert replaced(fresh=SAME).device == SAME
    assert calls[-1] == "new takes cuda:1"


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
