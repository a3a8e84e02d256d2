"""What Ray's workers hold, as every cluster, and what a fault of one rank costs."""

import os
import signal
import subprocess
import threading
import time

import pytest
import ray
from ray import exceptions

from raybench.records.doubts import DoubtKind
from raybench.records.measurement import Failure, Measurement
from raybench.records.status import Status
from tests.cluster_contract import PointContract, failures, places, process_ids, run
from tests.integration.sweeps import wait_for

# A machine that does other things too starts a process more slowly.
SLACK_S = 25.0
TIMEOUT_S = 2.0
WAITED = "ranks 0 and 2 waited in a collective"


@pytest.fixture(scope="module")
def cluster(three_workers):
    run(three_workers, 0, 1, 2)  # the class of an earlier file costs its processes here
    return three_workers


class TestRay(PointContract):
    """Over two nodes; with the cluster of this module."""

    ALL = (0, 1, 2)

    @pytest.mark.parametrize(
        ("fault", "status", "error_type", "text", "survives"),
        [
            ("raise", Status.ERROR, "ValueError", "the workload says no", True),
            ("kill", Status.LOST, "WorkerDied", "the worker process ", False),
            # A killed and a stopped rank stand for these.
            pytest.param(
                *("segfault", Status.LOST, "WorkerDied", "died by SIGSEGV", False),
                marks=pytest.mark.long,
            ),
            ("stop", Status.TIMEOUT, "Timeout", WAITED, False),
            pytest.param(
                *("loop", Status.TIMEOUT, "Timeout", "at fault_workloads.py:", False),
                marks=pytest.mark.long,
            ),
        ],
    )
    def test_fault_of_one_rank_keeps_other_processes(
        self, cluster, fault, status, error_type, text, survives
    ):
        before, stood = process_ids(cluster), places(cluster)
        timeout_s = TIMEOUT_S if status is Status.TIMEOUT else 60.0
        answers = run(cluster, *self.ALL, fault=fault, timeout_s=timeout_s)
        failure = answers[1]
        assert isinstance(failure, Failure)
        assert (failure.status, failure.error_type) == (status, error_type)
        assert text in failure.message
        assert [getattr(answers[rank], "error_type", "") for rank in (0, 2)] == ["PeerFailed"] * 2
        after = process_ids(cluster)
        assert (after[0], after[2]) == (before[0], before[2]), answers
        assert (after[1] == before[1]) == survives
        assert (places(cluster), cluster.lost) == (stood, frozenset())
        assert failures(run(cluster, *self.ALL)) == []

    def test_late_failure_keeps_answers_of_other_ranks(self, cluster):
        before = process_ids(cluster)
        answers = run(cluster, *self.ALL, fault="late")
        messages = [getattr(answer, "message", "").partition(",")[0] for answer in answers]
        assert messages == ["", "not even closed", ""]
        assert failures(run(cluster, *self.ALL)) == []
        assert process_ids(cluster) == before

    def test_idle_worker_death_costs_one_point(self, cluster):
        before = process_ids(cluster)
        os.kill(before[2], signal.SIGKILL)
        answers = run(cluster, *self.ALL)
        assert isinstance(answers[2], Failure)
        assert (answers[2].status, answers[2].error_type) == (Status.LOST, "WorkerDied")
        assert failures(run(cluster, *self.ALL)) == []
        after = process_ids(cluster)
        assert (after[:2], after[2] == before[2]) == (before[:2], False)

    @pytest.mark.long
    def test_all_workers_are_there_after_a_restart(self, cluster):
        """In new processes, as are fresh workers."""
        assert failures(run(cluster, *self.ALL)) == []
        before, stood = set(process_ids(cluster)), places(cluster)
        cluster.restart()
        between = process_ids(cluster)
        assert places(cluster) == stood
        assert before.isdisjoint(between)
        assert failures(run(cluster, *self.ALL)) == []
        assert failures(run(cluster, 1, fresh_workers=True)) == []
        after = process_ids(cluster)
        assert (after[0], after[1] == between[1], after[2]) == (between[0], False, between[2])
        assert failures(run(cluster, *self.ALL)) == []

    def test_points_on_other_workers_run_at_once(self, cluster):
        answers = {}

        def measure(*worker_ids):
            answers[worker_ids] = run(cluster, *worker_ids)

        for disjoint in ([(0, 1), (2,)], [(0,), (1, 2)]):
            threads = [threading.Thread(target=measure, args=ids) for ids in disjoint]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert [failures(answers.pop(ids)) for ids in disjoint] == [[], []]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(exceptions.ObjectLostError, marks=pytest.mark.long),
        pytest.param(exceptions.OwnerDiedError, marks=pytest.mark.long),
        exceptions.ReferenceCountingAssertionError,
    ],
)
def test_an_answer_lost_before_its_fetch_is_lost(cluster, monkeypatch, loss):
    get = ray.get

    def lose(ref, **options):
        answer = get(ref, **options)
        if isinstance(answer, Measurement):
            raise loss(ref.hex(), b"", "")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", lose)
        (answer,) = run(cluster, 0)
    assert isinstance(answer, Failure)
    assert (answer.status, answer.error_type) == (Status.LOST, "AnswerLost")
    assert "\n" not in answer.message
    assert failures(run(cluster, 0)) == []


@pytest.mark.parametrize(
    ("mess", "phrase"),
    [
        pytest.param("thread", "1 running thread (", marks=pytest.mark.long),
        ("child", "1 child process (sleep)"),
    ],
)
def test_rank_leftovers_are_reported_and_cost_its_process(cluster, mess, phrase):
    assert failures(run(cluster, 0, 1)) == []
    before = process_ids(cluster)
    answers = run(cluster, 0, 1, fault=mess)
    assert answers[0].doubts == ()
    (doubt,) = answers[1].doubts
    assert doubt.kind is DoubtKind.LEFT_BEHIND
    assert doubt.subject.startswith(phrase)
    assert [one.doubts for one in run(cluster, 0, 1)] == [(), ()]
    after = process_ids(cluster)
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    # A child process ends with the worker that left it.
    wait_for(lambda: subprocess.run(["pgrep", "-f", "^sleep 3601$"]).returncode != 0, within_s=15)


@pytest.mark.parametrize(
    ("fault", "status", "error_type", "text"),
    [
        ("early", Status.ERROR, "ValueError", "not even built"),
        ("oom", Status.OOM, "RuntimeError", "can't allocate memory"),
        ("sys_exit", Status.ERROR, "SystemExit", "3"),
        ("unpicklable", Status.ERROR, "_Unpicklable", "holds what cannot travel"),
    ],
)
def test_reported_fault_returns_soon_and_keeps_processes(cluster, fault, status, error_type, text):
    before = process_ids(cluster)
    started_s = time.monotonic()
    answers = run(cluster, 0, 1, 2, fault=fault, breakdown=True)
    took_s = time.monotonic() - started_s
    print(f"{fault}: the next point starts {took_s:.2f} s after this one")
    assert isinstance(answers[1], Failure)
    assert (answers[1].status, answers[1].error_type) == (status, error_type)
    assert text in answers[1].message
    assert "\n" not in answers[1].message
    assert [getattr(answers[rank], "error_type", "") for rank in (0, 2)] == ["PeerFailed"] * 2
    assert failures(run(cluster, 0, 1, 2, breakdown=True)) == []
    assert process_ids(cluster) == before
    assert took_s < 2 + SLACK_S
