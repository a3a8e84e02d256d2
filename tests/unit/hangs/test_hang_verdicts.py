"""A table of hangs: what is collected of the ranks, and whom the verdict names."""

from dataclasses import replace

import pytest
from hang_evidence import GRADIENT, LEAST_WAIT_S, LOSS, STEP, TIMES, entered, evidence, rank

from raybench.hangs.ras import Communicator, RasRank, RasReport
from raybench.hangs.recorder import CallShape
from raybench.hangs.stacks import Wait
from raybench.hangs.verdict import judge
from raybench.records.hang import HangCause, RecorderState

# Ten steps, of which all ranks are done with nine.
COMMON = STEP * 9
LARGER = CallShape(operation="all_reduce", sizes=((8192,),), dtypes=("Float",))
HALF = CallShape(operation="all_reduce", sizes=((4096,),), dtypes=("Half",))
BROADCAST = CallShape(operation="broadcast", sizes=((4096,),), dtypes=("Float",))
# The others have entered number 19 and wait.
WAITING = entered([*COMMON, GRADIENT], 18)
LATE = entered(COMMON, 18)


def called(*shapes):
    return entered([*COMMON, *shapes], 18)


def judged(*ranks):
    return judge(evidence(*ranks), evidence(*ranks), LEAST_WAIT_S)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("cause", "calls", "facts"),
    [
        ("sleeps", LATE, {"wait": Wait.SLEEP}),
        ("not_entered", LATE, {"state": "R"}),
        ("stopped", (), {"state": "T", "recorder": RecorderState.NO_ANSWER, "line": None}),
        ("waits_for_lock", LATE, {"wait": Wait.LOCK}),
        ("waits_for_data", LATE, {"wait": Wait.DATA}),
        ("device_busy", LATE, {"wait": Wait.DEVICE}),
        ("skipped", called(LOSS, GRADIENT), {}),
        ("other_size", called(LARGER), {}),
        ("other_type", called(HALF), {}),
        ("other_collective", called(BROADCAST), {}),
        ("died", (), {"state": "Z", "recorder": RecorderState.NO_ANSWER, "line": None}),
        # C code keeps the interpreter lock.
        ("not_entered", (), {"recorder": RecorderState.NO_ANSWER, "state": "R"}),
    ],
)
def test_the_rank_and_the_cause(cause, calls, facts, world_size):
    ranks = [rank(number, WAITING, wait=Wait.PEERS) for number in range(world_size)]
    ranks[1] = rank(1, calls, **facts)
    verdict = judged(*ranks)
    assert (verdict.cause, verdict.rank, verdict.pid) == (HangCause(cause), 1, 4712)
    assert (verdict.collective, verdict.number) == ("all_reduce", 19)
    assert verdict.waiting_ranks == (0, *range(2, world_size))
    assert verdict.line == (None if cause in ("stopped", "died") else "train.py:88")


def test_a_kernel_before_the_collective_is_named():
    begun = entered([*COMMON, GRADIENT], 18, begun=True)
    verdict = judged(rank(0, begun), rank(1, WAITING))
    assert (verdict.cause, verdict.rank, verdict.number) == (HangCause.DEVICE_BUSY, 1, 19)


def test_a_collective_entered_by_all_blames_nobody():
    verdict = judged(rank(0, WAITING), rank(1, WAITING))
    assert (verdict.cause, verdict.rank) == (HangCause.NOT_FINISHED, None)
    assert verdict.waiting_ranks == (0, 1)


def test_without_times_no_kernel_is_blamed():
    # Rank 1 may have an endless kernel, or rank 0: no call is known to have begun.
    done = entered([*COMMON, GRADIENT], 19)
    verdict = judged(rank(0, done), rank(1, WAITING))
    assert (verdict.cause, verdict.rank) == (HangCause.NOT_FINISHED, None)


def test_the_pair_that_has_finished_least_is_named():
    # Ranks 1 and 2 wait in number 18, the other ranks already in number 19.
    slow = [rank(number, entered([*COMMON, GRADIENT], 17)) for number in (1, 2)]
    verdict = judged(rank(0, WAITING), *slow, rank(3, WAITING))
    assert (verdict.cause, verdict.slowest_pair) == (HangCause.NOT_FINISHED, (1, 2))
    alike = [rank(number, WAITING) for number in range(4)]
    assert judged(*alike).slowest_pair == ()


def test_a_rank_that_compiles_is_not_named():
    assert judged(rank(0, WAITING), rank(1, LATE, wait=Wait.COMPILER)) is None


def test_a_rank_that_answered_has_skipped():
    now = evidence(rank(0, WAITING), rank(1, LATE)).with_ended_ranks({1})
    verdict = judge(now, now, LEAST_WAIT_S)
    assert (verdict.cause, verdict.rank, verdict.line) == (HangCause.SKIPPED, 1, None)
    # Another rank that is late is the likelier cause.
    now = evidence(rank(0, WAITING), rank(1, LATE), rank(2, LATE, wait=Wait.LOCK))
    verdict = judge(now.with_ended_ranks({1}), None, LEAST_WAIT_S)
    assert (verdict.cause, verdict.rank, verdict.also) == (HangCause.WAITS_FOR_LOCK, 2, (1,))


def test_an_answered_rank_without_recorder_has_skipped():
    off = {"recorder": RecorderState.OFF}
    now = evidence(rank(0, wait=Wait.PEERS, **off), rank(1, **off)).with_ended_ranks({1})
    verdict = judge(now, None, LEAST_WAIT_S)
    assert (verdict.cause, verdict.rank) == (HangCause.SKIPPED, 1)


def test_the_wait_of_the_others_is_told():
    assert judged(rank(0, WAITING), rank(1, LATE)).waited_s == 9.0


def test_an_evaluation_on_all_ranks_blames_nobody():
    assert judged(rank(0, LATE), rank(1, LATE, state="R")) is None
    silent = [rank(n, recorder=RecorderState.OFF) for n in range(2)]
    assert judged(*silent) is None


def test_a_short_wait_blames_nobody():
    brief = entered([*COMMON, GRADIENT], 18, age_s=LEAST_WAIT_S - 1)
    assert judged(rank(0, brief), rank(1, LATE)) is None


def test_ranks_that_moved_between_looks_are_healthy():
    before = evidence(rank(0, WAITING), rank(1, LATE))
    now = evidence(rank(0, entered([*COMMON, *STEP], 19)), rank(1, called(GRADIENT)))
    assert judge(now, before, LEAST_WAIT_S) is None


def test_two_ranks_without_a_pattern_are_not_blamed():
    first = [rank(0, entered([GRADIENT], 0)), rank(1, entered([TIMES], 0))]
    verdict = judged(*first)
    assert (verdict.cause, verdict.rank) == (HangCause.OTHER_COLLECTIVE, None)


def test_blocks_of_one_collective_show_a_skipped_step():
    block = (*(GRADIENT,) * 8, TIMES)
    done = (*block, *block, *(GRADIENT,) * 7)
    behind = entered([*done, GRADIENT], len(done))
    ahead = entered([*done, TIMES], len(done))
    verdict = judged(rank(0, behind), rank(1, ahead))
    assert (verdict.cause, verdict.rank) == (HangCause.SKIPPED, 1)


def test_another_collective_is_no_skip():
    # After a loss raybench broadcasts a decision: the same collective, of another type.
    decision = CallShape(operation="broadcast", sizes=((1,),), dtypes=("Long",))
    start = (LOSS, decision, *STEP * 9, GRADIENT)
    wrong = replace(LOSS, operation="broadcast")
    behind = entered([*start, LOSS], len(start))
    for called, cause in ((wrong, "other_collective"), (decision, "skipped")):
        ahead = entered([*start, called], len(start))
        verdict = judged(rank(0, behind), rank(1, ahead))
        assert (verdict.cause, verdict.rank) == (HangCause(cause), 1)


def test_a_skip_among_equal_calls_is_found():
    done = (*(GRADIENT,) * 8, TIMES, *(GRADIENT,) * 30)
    behind = entered([*done, GRADIENT], len(done))
    ahead = entered([*done, replace(TIMES, sizes=((30,),))], len(done))
    verdict = judged(rank(0, behind), rank(1, behind), rank(2, ahead))
    assert (verdict.cause, verdict.rank) == (HangCause.SKIPPED, 2)


def test_uneven_all_gather_sizes_are_no_disagreement():
    other = CallShape(operation="all_gather", sizes=((9,),), dtypes=("Float",))
    uneven = entered([other, *COMMON], 19)
    usual = entered([TIMES, *COMMON, GRADIENT], 19)
    verdict = judged(rank(0, usual), rank(1, uneven, wait=Wait.SLEEP))
    assert (verdict.cause, verdict.rank) == (HangCause.SLEEPS, 1)


def test_ranks_waiting_in_another_group_are_not_blamed():
    pair = {"pair": frozenset({1, 2})}
    whole = {"0": frozenset({0, 1, 2})}
    groups = {**pair, **whole}
    waits_in_pair = [*LATE, *entered([LOSS], 0, group="pair")]
    verdict = judged(
        rank(0, WAITING, groups=whole),
        rank(1, waits_in_pair, groups=groups),
        rank(2, LATE, groups=groups, wait=Wait.LOCK, line=7),
    )
    assert (verdict.cause, verdict.rank) == (HangCause.WAITS_FOR_LOCK, 2)
    assert verdict.line == "train.py:7"


def test_ranks_that_wait_crosswise_are_not_blamed():
    first, second = entered([LOSS], 0, group="a"), entered([LOSS], 0, group="b")
    both = {"a": frozenset({0, 1}), "b": frozenset({0, 1})}
    verdict = judged(rank(0, first, groups=both), rank(1, second, groups=both))
    assert (verdict.cause, verdict.rank) == (HangCause.UNKNOWN, None)


def test_several_late_ranks_are_listed():
    verdict = judged(rank(0, WAITING), rank(1, LATE), rank(2, LATE), rank(3, WAITING))
    assert (verdict.rank, verdict.also, verdict.waiting_ranks) == (1, (2,), (0, 3))


def test_without_recorder_ras_counts_name_the_rank():
    off = {"recorder": RecorderState.OFF, "line": None}
    ranks = [rank(0, **off), rank(1, **off)]
    launched = [
        RasRank(rank=n, host="10.0.0.1", pid=4711 + n, launched={"AllReduce": 19 - n})
        for n in range(2)
    ]
    report = RasReport(
        nccl_version="2.28.9",
        communicators=(Communicator(name="0x1", size=2, ranks=tuple(launched)),),
    )
    verdict = judge(evidence(*ranks, ras=report), None, LEAST_WAIT_S)
    assert (verdict.cause, verdict.rank) == (HangCause.NOT_ENTERED, 1)
    assert (verdict.collective, verdict.number) == ("all_reduce", 19)


def test_equal_process_ids_of_two_nodes_name_nobody():
    off = {"recorder": RecorderState.OFF, "line": None}
    ranks = [rank(0, **off), rank(1, **off)]
    launched = [
        RasRank(rank=n, host="10.0.0.1", pid=4711, launched={"AllReduce": 19 - n}) for n in range(2)
    ]
    report = RasReport(
        nccl_version="2.28.9",
        communicators=(Communicator(name="0x1", size=2, ranks=tuple(launched)),),
    )
    same = [replace(late, process=replace(late.process, pid=4711)) for late in ranks]
    assert judge(evidence(*same, ras=report), None, LEAST_WAIT_S) is None


def test_stacks_alone_name_the_rank():
    off = {"recorder": RecorderState.OFF}
    waiting = rank(0, wait=Wait.PEERS, **off)
    verdict = judged(waiting, rank(1, wait=Wait.SLEEP, **off))
    assert (verdict.cause, verdict.rank, verdict.collective) == (HangCause.SLEEPS, 1, None)
    assert judged(waiting, replace(waiting, place=replace(waiting.place, rank=1))) is None


def test_a_block_that_one_rank_has_not_ended():
    ended = rank(0, LATE, wait=Wait.BLOCK_END)
    verdict = judged(ended, rank(1, LATE, wait=Wait.SLEEP))
    assert (verdict.cause, verdict.rank, verdict.waiting_ranks) == (HangCause.SLEEPS, 1, (0,))
    assert judged(ended, replace(ended, place=replace(ended.place, rank=1))) is None


def test_a_block_with_fewer_collectives_shows_a_skip():
    ended = rank(1, LATE, wait=Wait.BLOCK_END)
    verdict = judged(rank(0, WAITING), ended)
    assert (verdict.cause, verdict.rank) == (HangCause.SKIPPED, 1)
    both = [ended, replace(ended, place=replace(ended.place, rank=2))]
    assert judged(rank(0, WAITING), *both).rank is None


def test_a_rank_whose_stack_changes_works():
    waiting, late = rank(0, WAITING), rank(1, LATE)
    line = replace(late.stack[0], function="evaluate")
    before = evidence(waiting, replace(late, stack=(line,)))
    assert judge(evidence(waiting, late), before, LEAST_WAIT_S) is None
