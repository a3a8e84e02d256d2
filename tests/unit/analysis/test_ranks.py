"""What each rank does in a step adds up to the step on each of them."""

from __future__ import annotations

import pytest
from builders import make_row

from raybench.analysis.ranks import MOST_RANKS, ranks_of_step, telling_ranks


def row(**changes):
    """A step of 25 ms: rank 0 computes 9.5 ms, rank 1 19; 5 ms are exchanged."""
    known = {
        "step_ms_p50": 25.0,
        "local_step_ms_by_rank": [10.0, 20.0],
        "device_ms_by_rank": [9.5, 19.0],
    }
    return make_row(**known | changes)


def test_a_fast_rank_computes_waits_and_exchanges_and_a_slow_one_does_not_wait():
    fast, slow = ranks_of_step(row())
    assert (fast.computes_ms, fast.idle_ms, fast.waits_ms, fast.exchange_ms) == (9.5, 0.5, 10, 5)
    assert (slow.computes_ms, slow.idle_ms, slow.waits_ms, slow.exchange_ms) == (19, 1, 0, 5)


@pytest.mark.parametrize("device", [[9.5, 19.0], [11.0, 19.0], None])
def test_the_parts_add_up_to_the_step_on_each_rank(device):
    for one in ranks_of_step(row(device_ms_by_rank=device)):
        assert one.own_ms + one.waits_ms + one.exchange_ms == pytest.approx(25)


def test_ranks_without_a_share_of_the_step_are_left_out_and_the_others_keep_their_numbers():
    found = ranks_of_step(row(share_by_rank=[64, 0, 64]))
    assert [one.rank for one in found] == [0, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"local_step_ms_by_rank": None},
        {"local_step_ms_by_rank": [10.0], "device_ms_by_rank": [9.0]},
        {"compute_ms": 90.0, "optimizer_ms": 9.0},
    ],
    ids=["not taken apart", "one rank", "parts that exceed the step"],
)
def test_nothing_is_said_of_ranks_that_nobody_can_tell_apart(changes):
    assert ranks_of_step(row(**changes)) == ()


def test_of_many_ranks_the_first_the_quickest_and_the_slowest_are_shown():
    own = [10.0, *[11.0] * 20, 9.0, 20.0]
    ranks = ranks_of_step(row(local_step_ms_by_rank=own, device_ms_by_rank=None))
    assert [one.rank for one in telling_ranks(ranks)] == [0, 21, 22]
    assert len(telling_ranks(ranks[:MOST_RANKS])) == MOST_RANKS
