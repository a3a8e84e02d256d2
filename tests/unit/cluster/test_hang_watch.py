"""When a running point is looked at, and what becomes of a verdict."""

import time

import pytest
from hung_ranks import make_rank

from raybench.cluster.hang_watch import HangWatch, WatchedRanks
from raybench.hangs.evidence import Evidence
from raybench.hangs.stacks import Wait
from raybench.hangs.suspicion import RankProgress
from raybench.records.hang import HangCause

BOTH = (0, 1)


class Ranks(WatchedRanks):
    """Two ranks, of which the second hangs from the first block on."""

    def __init__(self, now_s, **late):
        self.blocks, self.is_in_block, self.looks = 3, True, 0
        self._began_s = now_s()
        self._late = late

    def progress(self):
        told = RankProgress(
            blocks=self.blocks,
            last_s=self._began_s,
            longest_block_s=0.5,
            is_in_block=self.is_in_block,
        )
        return dict.fromkeys(BOTH, told)

    def evidence(self, ranks):
        self.looks += 1
        function = f"layer{self.looks}" if self._late.get("works") else "step"
        wait = self._late.get("wait", Wait.NOTHING_KNOWN)
        late = make_rank(1, waits=False, wait=wait, function=function)
        return Evidence(ranks=(make_rank(0, waits=True), late))


@pytest.fixture
def clock(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def watched(ranks, clock, seconds, hang_s=1000.0):
    """The verdicts that are told in so many seconds, and when the point was over."""
    told = []
    watch = HangWatch(ranks, hang_s, lambda verdict: told.append((clock[0] - 1000, verdict)))
    for _ in range(seconds):
        if watch.is_over(BOTH):
            return told, clock[0] - 1000
        clock[0] += 1.0
    return told, watch


def test_a_hanging_rank_is_reported_once_and_soon(clock):
    told, _ = watched(Ranks(lambda: clock[0], wait=Wait.SLEEP), clock, 60)
    ((after_s, verdict),) = told
    assert after_s <= 13
    assert (verdict.cause, verdict.rank, verdict.waiting_ranks) == (HangCause.SLEEPS, 1, (0,))


def test_hang_s_ends_the_point_after_the_verdict(clock):
    told, over_s = watched(Ranks(lambda: clock[0]), clock, 60, hang_s=3.0)
    ((after_s, _),) = told
    assert 3.0 <= over_s - after_s <= 4.0


@pytest.mark.parametrize("state", [{"blocks": 0}, {"is_in_block": False}])
def test_set_up_and_pauses_are_not_looked_at(clock, state):
    ranks = Ranks(lambda: clock[0])
    for name, value in state.items():
        setattr(ranks, name, value)
    told, _ = watched(ranks, clock, 100)
    assert (told, ranks.looks) == ([], 0)


def test_a_rank_that_works_is_not_named(clock):
    ranks = Ranks(lambda: clock[0], works=True)
    told, watch = watched(ranks, clock, 60)
    assert told == []
    assert 6 <= ranks.looks <= 9
    assert watch.finding is None


def test_progress_takes_a_verdict_back(clock):
    ranks = Ranks(lambda: clock[0])
    told, watch = watched(ranks, clock, 20, hang_s=30.0)
    assert len(told) == 1
    ranks.blocks += 1
    ranks.is_in_block = False
    for _ in range(100):
        clock[0] += 1.0
        assert not watch.is_over(BOTH)


def test_a_late_agent_takes_no_verdict_back(clock):
    ranks = Ranks(lambda: clock[0])
    told, watch = watched(ranks, clock, 20, hang_s=15.0)
    assert len(told) == 1
    ranks.progress = dict
    while not watch.is_over(BOTH):
        clock[0] += 1.0
        assert clock[0] < 1040


def test_ranks_that_nobody_knows_are_not_looked_at(clock):
    assert watched(WatchedRanks.__new__(type("Unknown", (WatchedRanks,), {})), clock, 60)[0] == []
