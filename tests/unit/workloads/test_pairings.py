"""Who is whose partner in which turn, and how pairs and groups are written."""

from __future__ import annotations

import itertools

import pytest

from raybench.errors import UsageError
from raybench.workloads.communication.pairings import (
    groups_text,
    pairs_of_turn,
    parse_groups,
    parse_pairs,
    turns,
)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 16, 33])
def test_after_all_turns_each_pair_has_come_once_and_none_shares_a_rank(size):
    met = [pairs_of_turn(size, turn) for turn in range(turns(size))]
    for pairs in met:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)) == size - size % 2
    everybody = itertools.combinations(range(size), 2)
    assert sorted(pair for pairs in met for pair in pairs) == list(everybody)
    assert pairs_of_turn(size, turns(size)) == met[0]


def test_pairs_are_read_with_the_lower_rank_first():
    assert parse_pairs("3-0,1-2", 4) == ((0, 3), (1, 2))


def test_groups_are_ranges_or_lists_and_are_written_as_they_are_read():
    groups = parse_groups("0-3,4+6", 8)
    assert groups == ((0, 1, 2, 3), (4, 6))
    assert groups_text(groups) == "0-3,4+6"


@pytest.mark.parametrize("text", ["0-0", "0-1,1-2", "0-4", "0", "a-b", "0-1;2-3", "1+1", "3+1-0"])
def test_what_is_not_disjoint_is_refused_in_one_line(text):
    for parse, what in ((parse_pairs, "pairs"), (parse_groups, "groups")):
        with pytest.raises(UsageError, match=f"disjoint {what} of ranks") as raised:
            parse(text, 4)
        assert text in str(raised.value)
