"""When a running point is looked at, and what becomes of a verdict."""

import time
from dataclasses import replace

import pytest
from hung_ranks import make_rank

from raybench.cluster import timeouts
from raybench.cluster.hang_watch import HangWatch, WatchedRanks
from raybench.hangs.evidence import Evidence
from raybench.hangs.stacks import Wait
from raybench.hangs.suspicion import RankProgress
from raybench.records.hang import HangCause

BOTH = (0, 1)


class Ranks(WatchedRanks):
    """Two ranks, of which the second hangs from the first block on."""

    def __init__(self, clock, answer_s=0.0, **late):
        self.blocks, self.is_in_block, self.looks = 3, True, 0
        # How long an answer takes.
        self.answer_s = answer_s
        self._clock, self._began_s = clock, clock[0]
        self._late = late

    def ask_progress(self):
        progress = RankProgress(
            blocks=self.blocks,
            last_s=self._began_s,
            longest_block_s=0.5,
            is_in_block=self.is_in_block,
        )
        return self._after(dict.fromkeys(BOTH, progress))

    def ask_evidence(self):
        self.looks += 1
        function = f"layer{self.looks}" if self._late.get("works") else "step"
        wait = self._late.get("wait", Wait.NOTHING_KNOWN)
        late = make_rank(1, waits=False, wait=wait, function=function)
        return self._after(Evidence(ranks=(make_rank(0, waits=True), late)))

    def _after(self, answer):
        there_s = self._clock[0] + self.answer_s
        return lambda: answer if self._clock[0] >= there_s else None


@pytest.fixture
def clock(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def watched(ranks, clock, seconds, hang_s=1000.0):
    """The verdicts that are told in so many seconds, and when the point was over."""
    told = []
    watch = HangWatch(ranks, hang_s, lambda verdict: told.append((clock[0] - 1000, verdict)))
    until_s = clock[0] + seconds
    while clock[0] < until_s:
        if watch.is_over(BOTH):
            return told, clock[0] - 1000
        clock[0] += watch.poll_s
    return told, watch


def test_a_hanging_rank_is_reported_once_and_soon(clock):
    told, _ = watched(Ranks(clock, wait=Wait.SLEEP), clock, 60)
    ((after_s, verdict),) = told
    assert after_s <= 15
    assert (verdict.cause, verdict.rank, verdict.waiting_ranks) == (HangCause.SLEEPS, 1, (0,))


@pytest.mark.parametrize(
    ("wait", "cause", "after_s"),
    [(Wait.BLOCK_END, HangCause.SKIPPED, 15), (Wait.SLEEP, HangCause.SLEEPS, 28)],
)
def test_a_second_look_confirms_transient_causes(clock, wait, cause, after_s):
    told, watch = watched(Ranks(clock, wait=wait), clock, 100, hang_s=None)
    ((told_s, verdict),) = told
    assert after_s - 6 <= told_s <= after_s
    assert verdict.cause is watch.finding.verdict.cause is cause


def test_the_first_look_decides_whom_a_timeout_blames(clock):
    told, watch = watched(Ranks(clock, wait=Wait.SLEEP), clock, 16, hang_s=None)
    assert told == []
    assert watch.finding.verdict.rank == 1


def test_hang_s_ends_the_point_after_the_verdict(clock):
    told, over_s = watched(Ranks(clock), clock, 60, hang_s=3.0)
    ((after_s, _),) = told
    assert 3.0 <= over_s - after_s <= 4.0


def test_a_slow_agent_delays_no_call(clock):
    ranks = Ranks(clock, answer_s=1e6)
    told, watch = watched(ranks, clock, 100)
    assert told == []
    assert watch.poll_s == timeouts.HANG_POLL_S


@pytest.mark.parametrize("state", [{"blocks": 0}, {"is_in_block": False}])
def test_set_up_and_pauses_are_not_looked_at(clock, state):
    ranks = Ranks(clock)
    for name, value in state.items():
        setattr(ranks, name, value)
    told, _ = watched(ranks, clock, 100)
    assert (told, ranks.looks) == ([], 0)


def test_a_rank_that_works_is_not_named(clock):
    ranks = Ranks(clock, works=True)
    told, watch = watched(ranks, clock, 60)
    assert told == []
    assert 6 <= ranks.looks <= 9
    assert watch.finding is None


def test_progress_takes_a_verdict_back(clock):
    ranks = Ranks(clock)
    told, watch = watched(ranks, clock, 20, hang_s=30.0)
    assert len(told) == 1
    ranks.blocks += 1
    ranks.is_in_block = False
    for _ in range(100):
        clock[0] += 1.0
        assert not watch.is_over(BOTH)


def test_a_later_look_takes_a_verdict_back(clock):
    ranks = Ranks(clock)
    _, watch = watched(ranks, clock, 20)
    assert watch.finding is not None
    healthy = Evidence(ranks=tuple(make_rank(rank, waits=False) for rank in BOTH))
    ranks.ask_evidence = lambda: lambda: healthy
    for _ in range(30):
        clock[0] += 1.0
        watch.is_over(BOTH)
    assert watch.finding is None


def test_a_late_agent_takes_no_verdict_back(clock):
    ranks = Ranks(clock)
    told, watch = watched(ranks, clock, 20, hang_s=15.0)
    assert len(told) == 1
    ranks.ask_progress = lambda: dict
    while not watch.is_over(BOTH):
        clock[0] += 1.0
        assert clock[0] < 1040


def test_a_rank_that_has_answered_counts(clock):
    # Rank 1 has ended its point without the collective in which rank 0 waits.
    ranks, told = Ranks(clock), []
    watch = HangWatch(ranks, None, told.append)
    for _ in range(40):
        watch.is_over({0})
        clock[0] += 1.0
    (verdict,) = told
    assert (verdict.cause, verdict.rank, verdict.line) == (HangCause.SKIPPED, 1, None)


def test_evidence_of_all_ranks_is_needed(clock):
    ranks = Ranks(clock)
    ranks.ask_evidence = lambda: lambda: Evidence(ranks=())
    told, watch = watched(ranks, clock, 60)
    assert (told, watch.finding) == ([], None)


def test_a_failed_search_ends_no_point(clock):
    ranks = Ranks(clock)
    rank = make_rank(0, waits=True)
    broken = replace(rank, recording=None)
    ranks.ask_evidence = lambda: lambda: Evidence(ranks=(broken, broken))
    told, watch = watched(ranks, clock, 60, hang_s=1.0)
    assert told == []
    assert watch.finding.verdict is None
    assert "AttributeError" in watch.finding.description


def test_ranks_that_nobody_knows_are_not_looked_at(clock):
    assert watched(WatchedRanks.__new__(type("Unknown", (WatchedRanks,), {})), clock, 60)[0] == []
