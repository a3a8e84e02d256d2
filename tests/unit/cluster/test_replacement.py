"""How a worker gets its next process; Ray's calls are replaced."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from builders import make_device
from ray.exceptions import RayActorError

from raybench.cluster.ray_cluster import replacement
from raybench.cluster.ray_cluster.actors import Slot, WorkerHandle
from raybench.cluster.ray_cluster.replacement import Replacement
from raybench.cluster.timeouts import ClusterTimeouts

GPU = make_device(1, node_id="n", process_id=10, cpu_count=8)
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

    def _attach(self, kind, index):
        self._calls.append(f"{self.name} takes {kind}:{index}")
        return Ref(self._answer)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def replaced(monkeypatch, calls):
    """Replaces the process of one worker by one that answers `new`; gives the worker back."""

    def run(new):
        def get(ref):
            if isinstance(ref.answer, Exception):
                raise ref.answer
            return ref.answer

        fake = SimpleNamespace(
            kill=lambda actor, **_: calls.append(f"kill {actor.name}"),
            wait=lambda refs, **_: ([ref for ref in refs if ref.answer is not None], []),
            get=get,
            exceptions=replacement.ray.exceptions,
        )
        monkeypatch.setattr(replacement, "ray", fake)
        monkeypatch.setattr(replacement, "start_worker", lambda *_: Actor("new", new, calls))
        agents = SimpleNamespace(
            silent_nodes=frozenset,
            has_ended=lambda _: False,
            kill=lambda _: calls.append("sigkill"),
        )
        slot = Slot(node_id="n", placement=None, bundle=0)
        worker = WorkerHandle(slot=slot, actor=Actor("old", None, calls), device=GPU, is_used=True)

        def lose_worker(worker, reason):
            worker.lost_because = reason

        limits = ClusterTimeouts(worker_start_s=0.05)
        Replacement("cuda", agents, lambda _: None, lose_worker, limits).run([worker])
        return worker

    return run


def test_a_new_process_takes_the_device_after_the_old_one_was_killed(replaced, calls):
    worker = replaced(SAME)
    assert (worker.device, worker.is_used, worker.lost_because) == (SAME, False, "")
    assert calls == ["kill old", "sigkill", "new takes cuda:1"]


def test_a_new_worker_that_is_killed_while_it_starts_is_started_again_and_not_for_ever(
    replaced, calls
):
    assert replaced(RayActorError()).lost_because.startswith("a worker could not start")
    assert calls.count("new takes cuda:1") == 3


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (
            RayActorError(error_msg="The actor died because of an error in its creation task"),
            "a wo",
        ),
        (OTHER, "cuda:1 is GPU-0 now"),
        (None, "no new process in 0 s"),
    ],
    ids=["failed by itself", "another GPU", "does not come"],
)
def test_a_worker_without_a_usable_new_process_is_lost(replaced, calls, new, reason):
    worker = replaced(new)
    assert (worker.lost_because[: len(reason)], worker.device) == (reason, GPU)
    assert calls[-2:] == ["new takes cuda:1", "kill new"]
    assert calls.count("new takes cuda:1") == 1
