"""How the ranks of a point are brought to their end, and which of them is blamed."""

import time
from dataclasses import replace

import pytest
from fakes import make_device, make_measurement, make_point

from raybench.cluster.point_end import (
    Loss,
    PointObservation,
    RunningRanks,
    TimeLimit,
    after_failure,
    after_timeout,
    cause_of,
    finish_point,
    with_losses,
)
from raybench.job.model import Measure
from raybench.records.measurement import Failure
from raybench.records.status import Cause, Status
from raybench.records.task import Task

LIMIT = TimeLimit(timeout_s=3.0)
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


@pytest.fixture(autouse=True)
def abort_is_fast(monkeypatch):
    monkeypatch.setattr("raybench.cluster.timeouts.ABORT_S", 0.05)


def finish(*answers, task=TASK, **facts):
    ranks = ScriptedRanks(*answers, **facts)
    return finish_point(ranks, task), ranks.calls


def failed(rank, error_type="ValueError", message="not even closed", *, keeps=True, **facts):
    facts = {"status": Status.ERROR, "message": message, "worker_reusable": keeps, **facts}
    return Failure(rank=rank, error_type=error_type, **facts)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_any_failed_rank_aborts_the_group(failing_rank):
    answers = [make_measurement(0), make_measurement(1)]
    answers[failing_rank] = failed(failing_rank)
    outcome, calls = finish(*answers)
    assert (outcome.group_is_gone, outcome.unfit, calls) == (True, frozenset(), ["abort"])
    assert outcome.answers[failing_rank] is answers[failing_rank]


def test_a_rank_stuck_after_a_failure_is_killed():
    outcome, calls = finish(failed(0), None, tails=["", IN_A_LOOP])
    assert calls == ["abort", "kill [1]"]
    assert outcome.unfit == {1}
    told = "rank 0 failed, and this rank did not stop, at net.py:60 in spin"
    assert outcome.answers[1].message == told


# The collectives of a script are aborted by nobody else.
@pytest.mark.parametrize(
    ("kind", "task"),
    [("cpu", TASK), ("cuda", replace(TASK, point=make_point(workload="script")))],
    ids=["gloo", "script"],
)
def test_hanging_ranks_are_killed_before_waiting_ranks(kind, task):
    tail = 'Thread 0x1 (most recent call first):\n  File "/torch/distributed/x.py", line 3 in wait'
    outcome, calls = finish(None, None, task=task, kind=kind, tails=[tail])
    assert calls == ["abort", "kill [1]", "kill [0, 1]"]
    assert [answer.error_type for answer in outcome.answers] == ["PeerFailed", "Timeout"]


def test_the_log_explains_a_dead_process():
    died = failed(0, "WorkerDied", status=Status.LOST, keeps=False, detail="Ray's words")
    outcome, calls = finish(died, tails=["words\nFatal Python error: Segmentation fault"])
    assert outcome.answers[0].message == "the worker process died by SIGSEGV"
    assert outcome.answers[0].detail.startswith("words\n")
    assert calls == ["abort", "kill [0]"]
    # Whose log has the end of an earlier one too.
    seen = replace(died, message="the process of the script died by SIGABRT")
    outcome, _ = finish(seen, tails=["Fatal Python error: Segmentation fault"])
    assert outcome.answers[0].message == seen.message
    (unexplained,) = finish(died)[0].answers
    assert (unexplained.message, unexplained.detail) == (died.message, died.detail)


def test_memory_still_held_after_a_kill_is_reported():
    died = failed(0, "WorkerDied", status=Status.LOST, keeps=False, detail="log")
    outcome, _ = finish(died, freed=["1 GiB of cuda:0 is not free"])
    assert outcome.answers[0].detail == "log\n1 GiB of cuda:0 is not free"
    outcome, calls = finish(failed(0, "NodeLost", status=Status.LOST, keeps=False))
    assert (outcome.unfit, calls) == ({0}, ["abort"])


def test_a_worker_that_is_not_reusable_is_killed():
    spoiled = replace(make_measurement(0), worker_reusable=False)
    outcome, calls = finish(spoiled, make_measurement(1))
    assert (outcome.answers[0], outcome.unfit) == (spoiled, {0})
    assert calls == ["abort", "kill [0]"]


IN_A_COLLECTIVE = """Timeout (0:00:03)!
Thread 0x1 (most recent call first):
  File "/home/me/.venv/lib/python3.11/threading.py", line 327 in wait

Thread 0x2 (most recent call first):
  File "/home/me/.venv/lib/python3.11/site-packages/torch/distributed/x.py", line 3 in all_reduce
  File "/home/me/net.py", line 45 in step
"""
IN_A_LOOP = """Thread 0x2 (most recent call first):
  File "/home/me/net.py", line 60 in spin
  File "/home/me/net.py", line 45 in step
"""

CONNECTING = """Thread 0x2 (most recent call first):
  File "/home/me/.venv/lib/python3.11/site-packages/torch/distributed/x.py", line 3 in new_group
  File "/home/me/.venv/lib/python3.11/site-packages/torch/distributed/x.py", line 1 in init_process_group
  File "/home/me/raybench/worker/process_group.py", line 132 in _form
"""  # noqa: E501
IN_A_SYNC = """Thread 0x2 (most recent call first):
  File "/home/me/.venv/lib/python3.11/site-packages/torch/cuda/__init__.py", line 9 in synchronize
  File "/home/me/net.py", line 70 in step
"""


def types(answers):
    return [getattr(answer, "error_type", "") for answer in answers]


def seen(*answers, world_size=3, finished=(), tails=None):
    return PointObservation(
        world_size=world_size,
        answers={answer.rank: answer for answer in answers},
        finished=frozenset(finished),
        log_tails=tails or {},
    )


LOSS = "pair.cc:553] Connection closed by peer [10.0.0.1]:41195"


def test_peers_name_the_failed_rank_and_stay_reusable():
    told = after_failure(
        seen(failed(0, "RuntimeError", LOSS), failed(1, "ValueError", "no"), make_measurement(2))
    )
    assert types(told) == ["PeerFailed", "ValueError", "PeerFailed"]
    assert told[0].message == "rank 1 failed"
    assert all(answer.worker_reusable for answer in told)


def test_death_by_the_abort_is_not_the_cause():
    died = failed(0, "WorkerDied", keeps=False)
    told = after_failure(seen(failed(1, "ValueError"), died, world_size=2, finished={1}))
    assert (told[0].error_type, told[0].worker_reusable) == ("PeerFailed", False)
    told = after_failure(seen(died, failed(1, "DistBackendError"), world_size=2, finished={1}))
    assert types(told) == ["WorkerDied", "PeerFailed"], "its death came late"


def test_a_rank_that_all_peers_lost_is_blamed():
    told = after_failure(seen(failed(0, "RuntimeError", LOSS), failed(2, "DistBackendError")))
    assert types(told) == ["PeerFailed", "NoAnswer", "PeerFailed"]
    assert told[0].message == "rank 1 failed"
    assert told[1].status is Status.LOST


def test_an_ended_script_is_blamed_without_other_failures():
    ended = failed(1, "ScriptEnded", "it ended")
    told = after_failure(seen(failed(0, "RuntimeError", LOSS), ended, world_size=2))
    assert [one.message for one in told] == ["the script of rank 1 had ended", "it ended"]
    told = after_failure(seen(failed(0, "ValueError", "no"), ended, world_size=2))
    assert types(told) == ["ValueError", "PeerFailed"]


@pytest.mark.parametrize(
    ("error_type", "message"),
    [
        ("PeerFailed", "another rank failed"),
        ("DistNetworkError", "the client socket has failed"),
        ("RuntimeError", LOSS),
        ("DistBackendError", "NCCL error ... ncclRemoteError: a call failed"),
    ],
)
def test_points_are_lost_when_all_ranks_lose_peers(error_type, message):
    answers = [failed(rank, error_type, message) for rank in range(2)]
    told = after_failure(seen(*answers, world_size=2))
    assert [answer.status for answer in told] == [Status.LOST] * 2
    assert [answer.message for answer in told] == [message] * 2


def test_ranks_waiting_in_a_collective_are_not_blamed():
    tails = {0: IN_A_COLLECTIVE, 1: IN_A_LOOP}
    told = after_timeout(seen(make_measurement(2), finished={2}, tails=tails), LIMIT)
    assert told[0].message == "waited for rank 1, and this rank did not stop, at net.py:45 in step"
    no_answer, *facts = told[1].message.split("; ")
    assert no_answer == "no answer within measure.timeout_s = 3 s, at net.py:60 in spin"
    assert facts == ["rank 0 waited in a collective", "rank 2 had finished"]
    assert types(told) == ["PeerFailed", "Timeout", ""]


@pytest.mark.parametrize(
    ("tails", "expected"),
    [
        ([IN_A_SYNC, IN_A_LOOP], ["PeerFailed", "Timeout"]),
        # A process that was stopped writes nothing.
        ([IN_A_SYNC, ""], ["PeerFailed", "Timeout"]),
        # Its own kernel is endless.
        ([IN_A_COLLECTIVE, IN_A_SYNC], ["PeerFailed", "Timeout"]),
        ([IN_A_SYNC, IN_A_SYNC], ["Timeout", "Timeout"]),
        # A firewall parts some of the hosts.
        ([IN_A_COLLECTIVE, CONNECTING], ["PeerFailed", "Timeout"]),
        ([CONNECTING, IN_A_LOOP], ["PeerFailed", "Timeout"]),
    ],
)
def test_waiting_ranks_are_blamed_only_without_another_culprit(tails, expected):
    told = after_timeout(seen(world_size=2, tails=dict(enumerate(tails))), LIMIT)
    assert types(told) == expected
    if IN_A_LOOP in tails:
        assert told[0].message.startswith("waited for rank 1, and this rank did not stop, ")
        assert " at net.py:60 in spin" in told[1].message
    if CONNECTING in tails:
        blamed = tails.index(CONNECTING)
        assert "while it connects to the others: is the network" in told[blamed].message


def test_all_ranks_time_out_when_none_is_stuck():
    told = after_timeout(seen(make_measurement(0), failed(1, "PeerFailed"), world_size=2), LIMIT)
    assert {answer.message for answer in told} == {
        "no answer within measure.timeout_s = 3 s; ranks 0 and 1 gave none"
    }
    assert all(answer.worker_reusable and answer.status is Status.TIMEOUT for answer in told)


@pytest.mark.parametrize(
    ("statuses", "likely"),
    [
        ([Status.ERROR, Status.LOST], 1),
        ([Status.ERROR, Status.OOM, Status.LOST], 1),
        ([Status.TIMEOUT, Status.ERROR], 1),
        ([Status.TIMEOUT, Status.TIMEOUT], 0),
    ],
)
def test_the_likeliest_of_several_causes_is_reported(statuses, likely):
    answers = [replace(failed(rank, "X"), status=one) for rank, one in enumerate(statuses)]
    assert cause_of([*answers, make_measurement(9)]) is answers[likely]


def test_own_errors_come_before_failures_of_peers():
    peer, own = failed(0, "PeerFailed"), failed(1, "ValueError")
    assert cause_of([replace(peer, status=Status.OOM), own]) is own
    assert cause_of([peer, make_measurement(1)]) is peer
    assert cause_of([make_measurement(0)]) is None


def test_a_lost_node_explains_only_dead_processes():
    died = Failure(rank=0, status=Status.LOST, error_type="WorkerDied", message="died")
    ran_out = Failure(rank=1, status=Status.OOM, error_type="OutOfMemoryError", message="asked")
    told = with_losses(
        [died, ran_out, make_measurement(2)], [Loss(Cause.NODE_LOST, "node a is gone")] * 3
    )
    assert types(told) == ["NodeLost", "OutOfMemoryError", ""]
    assert told[0].message == "node a is gone"
    assert types(with_losses([died], [Loss(Cause.WORKER_LOST, "it is killed")])) == ["WorkerLost"]
