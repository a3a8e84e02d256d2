"""How the ranks of a point are brought to their end, and how a worker gets its next process."""

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from fakes import make_device, make_measurement, make_point
from ray.exceptions import RayActorError

from raybench.cluster.point_end import RunningRanks, finish_point
from raybench.cluster.ray_cluster import replacement
from raybench.cluster.ray_cluster.actors import Slot, WorkerHandle
from raybench.cluster.ray_cluster.replacement import Replacement
from raybench.cluster.timeouts import ClusterTimeouts
from raybench.job.model import Measure
from raybench.records import Failure, Status, Task

TASK = Task(point=make_point(), settings=Measure(max_seconds=0.1, timeout_s=0.3))


class ScriptedRanks(RunningRanks):
    """Ranks whose answers are there at once, in this order, or never (None). calls: what is done.

    tails: what the processes wrote. freed: what is said of the memory of killed ones.
    """

    def __init__(self, *answers, kind="cuda", tails=(), freed=()):
        self.devices = [make_device(index=rank, kind=kind) for rank in range(len(answers))]
        self.calls = []
        self._there = [answer for answer in answers if answer is not None]
        self._tails, self._freed = dict(enumerate(tails)), freed

    def answers(self, timeout_s):
        if not self._there:
            time.sleep(timeout_s)
            return {}
        answer = self._there.pop(0)
        return {answer.rank: answer}

    def abort(self):
        self.calls.append("abort")

    def kill(self, ranks):
        self.calls.append(f"kill {sorted(ranks)}")

    def log_tails(self, ranks):
        return {rank: self._tails.get(rank, "") for rank in ranks}

    def wait_until_free(self, ranks, timeout_s):
        return self._freed


def finish(*answers, task=TASK, **facts):
    ranks = ScriptedRanks(*answers, **facts)
    return finish_point(ranks, task, ClusterTimeouts(abort_s=0.05)), ranks.calls


def failure(rank, error_type="ValueError", *, status=Status.ERROR, reusable=True, detail=""):
    facts = {"error_type": error_type, "message": "not even closed", "detail": detail}
    return Failure(rank=rank, status=status, worker_reusable=reusable, **facts)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_group_of_which_one_rank_failed_is_given_up_whenever_the_others_answered(failing_rank):
    answers = [make_measurement(0), make_measurement(1)]
    answers[failing_rank] = failure(failing_rank)
    outcome, calls = finish(*answers)
    assert (outcome.group_is_gone, outcome.unfit, calls) == (True, frozenset(), ["abort"])
    assert outcome.answers[failing_rank] is answers[failing_rank]


def test_a_rank_that_does_not_stop_beside_one_that_failed_is_killed():
    outcome, calls = finish(failure(0), None)
    assert calls == ["abort", "kill [1]"]
    assert outcome.unfit == {1}
    assert outcome.answers[1].message == "rank 0 failed, and this rank did not stop"


# The collectives of a script are aborted by nobody else.
@pytest.mark.parametrize(
    ("kind", "task"),
    [("cpu", TASK), ("cuda", replace(TASK, point=make_point(workload="script")))],
    ids=["gloo", "script"],
)
def test_the_ranks_that_hang_are_killed_first_so_that_those_who_wait_come_back(kind, task):
    tail = 'Thread 0x1 (most recent call first):\n  File "/torch/distributed/x.py", line 3 in wait'
    outcome, calls = finish(None, None, task=task, kind=kind, tails=[tail])
    assert calls == ["abort", "kill [1]", "kill [0, 1]"]
    assert [answer.error_type for answer in outcome.answers] == ["PeerFailed", "Timeout"]


def test_a_dead_process_is_explained_by_the_end_of_its_log():
    died = failure(0, "WorkerDied", status=Status.LOST, reusable=False, detail="Ray's words")
    outcome, calls = finish(died, tails=["words\nFatal Python error: Segmentation fault"])
    assert outcome.answers[0].message == "the worker process died by SIGSEGV"
    assert outcome.answers[0].detail.startswith("words\n")
    assert calls == ["abort", "kill [0]"]
    seen = replace(died, message="the process of the script died by SIGSEGV")
    outcome, _ = finish(seen, tails=["Fatal Python error: Segmentation fault"])
    assert outcome.answers[0].message == seen.message
    (unexplained,) = finish(died)[0].answers
    assert (unexplained.message, unexplained.detail) == (died.message, died.detail)


def test_memory_that_a_killed_process_keeps_is_told_and_on_lost_nodes_nobody_is_killed():
    died = failure(0, "WorkerDied", status=Status.LOST, reusable=False, detail="log")
    outcome, _ = finish(died, freed=["1 GiB of cuda:0 is not free"])
    assert outcome.answers[0].detail == "log\n1 GiB of cuda:0 is not free"
    outcome, calls = finish(failure(0, "NodeLost", status=Status.LOST, reusable=False))
    assert (outcome.unfit, calls) == ({0}, ["abort"])


def test_a_measurement_in_a_process_that_is_no_good_any_more_costs_the_process():
    spoiled = replace(make_measurement(0), worker_reusable=False)
    outcome, calls = finish(spoiled, make_measurement(1))
    assert (outcome.answers[0], outcome.unfit) == (spoiled, {0})
    assert calls == ["abort", "kill [0]"]


GPU = make_device(index=1, node_id="n", process_id=10, cpu_count=8)
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
