"""The line that a user reads of a hang."""

from dataclasses import replace

import pytest

from raybench.records.hang import HangCause, HangVerdict
from raybench.report.words.hangs import hang

VERDICT = HangVerdict(
    cause=HangCause.NOT_ENTERED,
    rank=3,
    host="node1",
    device_kind="cuda",
    device_index=3,
    pid=4711,
    collective="all_reduce",
    number=118,
    line="train.py:88",
    waiting_ranks=(0, 1, 2, 4, 5, 6, 7),
)
NAME = "rank 3 (node1, GPU 3, pid 4711)"


def test_a_rank_that_has_not_entered():
    assert hang(VERDICT) == (
        f"{NAME} has not entered all_reduce 118, in which 7 ranks wait; it is at train.py:88"
    )


def test_a_call_of_another_size():
    verdict = replace(
        VERDICT,
        cause=HangCause.OTHER_SIZE,
        called="all_reduce of 4096x2 float",
        expected="all_reduce of 4096 float",
    )
    assert hang(verdict) == (
        f"{NAME} called all_reduce of 4096x2 float at train.py:88 where others called "
        "all_reduce of 4096 float as all_reduce 118"
    )


@pytest.mark.parametrize("cause", HangCause)
def test_each_cause_has_words(cause):
    told = (
        hang(replace(VERDICT, cause=cause, called=None, line=None))
        if cause
        not in (
            HangCause.NOT_FINISHED,
            HangCause.UNKNOWN,
        )
        else hang(HangVerdict(cause=cause, collective="all_reduce", number=118))
    )
    assert "118" in told
    assert "{" not in told
    assert "None" not in told


def test_the_slowest_pair_is_named():
    verdict = HangVerdict(
        cause=HangCause.NOT_FINISHED, collective="all_reduce", number=118, slowest_pair=(3, 4)
    )
    assert hang(verdict) == (
        "all ranks have entered all_reduce 118, which does not finish: check the network between "
        "ranks 3 and 4"
    )


def test_a_worker_on_a_cpu_is_no_gpu():
    assert hang(replace(VERDICT, device_kind="cpu")).startswith("rank 3 (node1, worker 3, pid")
