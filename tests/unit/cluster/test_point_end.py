"""How the ranks of a point are brought to their end, whatever has launched them."""

import time
from dataclasses import replace

import pytest
from fakes import make_device, make_measurement, make_point

from raybench.cluster.point_end import RunningRanks, finish_point
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
