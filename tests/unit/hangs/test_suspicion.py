"""When a running point is looked at."""

import pytest

from raybench.hangs.suspicion import RankProgress, next_look


def progress(last_s=100.0, longest_s=1.0, blocks=3, **fields):
    return RankProgress(blocks=blocks, last_s=last_s, longest_block_s=longest_s, **fields)


@pytest.mark.parametrize(("longest_s", "due_s"), [(0.1, 110.0), (3.0, 110.0), (20.0, 160.0)])
def test_a_look_follows_three_longest_blocks(longest_s, due_s):
    look = next_look([progress(), progress(longest_s=longest_s)], looks=0)
    assert look.due_s == due_s
    assert look.min_wait_s == (due_s - 100) / 2


def test_the_rank_without_progress_decides():
    assert next_look([progress(300.0), progress(200.0)], looks=0).due_s == 210.0


def test_there_is_no_look_before_the_first_step():
    assert next_look([progress(), progress(blocks=0)], looks=0) is None


def test_there_is_no_look_between_two_blocks():
    outside = progress(is_in_block=False)
    assert next_look([outside, outside], looks=0) is None
    assert next_look([outside, progress()], looks=0).due_s == 110.0


def test_looks_without_a_verdict_become_rarer():
    due_s = [next_look([progress()], looks=looks).due_s for looks in range(3)]
    assert due_s == [110.0, 120.0, 140.0]
