"""When a point is slower, faster, the same or undecided, by pairs of fresh starts."""

import math

import numpy as np
import pytest

from benchmarks.simulations.ab import draw, slowed
from raybench.ab.decision import CONFIRMING_PAIRS, LOOKS, Decision, decide

PAIRS = LOOKS[-1] + CONFIRMING_PAIRS
# Deviations of pairs whose mean is 0 after 3 pairs and nearly 0 later.
WAVE = np.resize([0.001, -0.002, 0.001], PAIRS)


def job(*changes, deviation=WAVE):
    """Points with these changes of their rates, all with the same deviations."""
    return np.array([math.log1p(change) + deviation for change in changes])


def names(decisions):
    return [Decision(value).name for value in decisions.decision.ravel()]


def test_small_scatter_decides_after_three_pairs():
    decisions = decide(job(0.0, -0.05, 0.05, 0.0))
    assert names(decisions) == ["SAME", "SLOWER", "FASTER", "SAME"]
    assert decisions.pairs.tolist() == [3, 3 + CONFIRMING_PAIRS, 3, 3]
    assert decisions.change[1:3] == pytest.approx([-0.05, 0.05], abs=1e-4)
    assert decisions.low[1] < -0.05 < decisions.high[1] < 0


def test_slower_point_must_be_slower_again():
    log_ratios = job(-0.05, 0.0, 0.0)
    log_ratios[0, 3:] = 0.0
    decisions = decide(log_ratios)
    assert names(decisions)[0] == "UNCONFIRMED"
    assert decisions.pairs[0] == 3 + CONFIRMING_PAIRS


def test_slower_point_waits_for_all_fresh_pairs():
    decisions = decide(job(-0.05, 0.0, 0.0)[:, :5])
    assert names(decisions) == ["GO_ON", "SAME", "SAME"]


def test_change_below_the_threshold_is_not_slower():
    assert names(decide(job(-0.014, 0.0, 0.0)))[0] == "SAME"
    assert names(decide(job(-0.014, 0.0, 0.0), threshold=0.01))[0] == "SLOWER"


def test_threshold_changes_the_limits_of_same():
    log_ratios = job(-0.02, 0.0, 0.0)
    assert names(decide(log_ratios, threshold=0.05))[0] == "SAME"


def test_large_scatter_stays_undecided_after_last_look():
    rng = np.random.default_rng(1)
    decisions = decide(0.1 * rng.standard_normal((6, PAIRS)))
    assert names(decisions) == ["UNDECIDED"] * 6
    assert decisions.pairs.tolist() == [LOOKS[-1]] * 6
    assert decisions.detectable.min() > 0.1


def test_pairs_without_the_point_do_not_count():
    log_ratios = job(0.0, 0.0, 0.0)
    log_ratios[0, 1:3] = math.nan
    assert names(decide(log_ratios[:, :4])) == ["GO_ON", "SAME", "SAME"]
    decisions = decide(log_ratios)
    assert names(decisions) == ["SAME"] * 3
    assert decisions.pairs.tolist() == [3, 3, 3]


def test_pairs_after_the_decision_are_ignored():
    log_ratios = job(0.0, 0.0, 0.0)
    expected = decide(log_ratios)
    log_ratios[:, 3:] = 1.0
    decisions = decide(log_ratios)
    assert decisions.pairs.tolist() == expected.pairs.tolist() == [3, 3, 3]
    assert decisions.low.tolist() == expected.low.tolist()


def test_point_without_pairs_has_no_numbers():
    log_ratios = np.vstack([job(0.0, 0.0), np.full((1, PAIRS), math.nan)])
    decisions = decide(log_ratios)
    assert names(decisions) == ["SAME", "SAME", "GO_ON"]
    assert math.isnan(decisions.change[2])
    assert math.isnan(decisions.low[2])


def test_first_pair_gives_a_change_without_interval():
    decisions = decide(job(-0.05, 0.0)[:, :1])
    assert names(decisions) == ["GO_ON", "GO_ON"]
    assert decisions.change[0] == pytest.approx(-0.05, abs=0.002)
    assert math.isnan(decisions.low[0])


def test_lone_point_has_no_help_from_others():
    alone = decide(job(0.0, deviation=6.3 * WAVE)[:, :3])
    beside = decide(job(0.0, 0.0, 0.0, deviation=6.3 * WAVE)[:, :3])
    assert names(alone) == ["GO_ON"]
    assert names(beside) == ["SAME"] * 3


def test_quiet_neighbours_do_not_hide_a_noisy_point():
    noisy = np.vstack([job(*[0.0] * 7), job(-0.03, deviation=30 * WAVE)])
    assert names(decide(noisy[:, :3])) == ["SAME"] * 7 + ["GO_ON"]


def test_many_jobs_are_decided_as_each_alone():
    rng = np.random.default_rng(2)
    jobs = slowed(draw(rng, (20, 5), 0.01, 0.5), 0.04)
    together = decide(jobs)
    assert len(set(names(together))) >= 3
    for number, log_ratios in enumerate(jobs):
        alone = decide(log_ratios)
        assert together.decision[number].tolist() == alone.decision.tolist()
        assert together.pairs[number].tolist() == alone.pairs.tolist()
        assert np.array_equal(together.low[number], alone.low)


def test_simulated_jobs_keep_the_promised_shares():
    rng = np.random.default_rng(3)
    jobs = draw(rng, (400, 24), 0.01, 0.3)
    red = (decide(jobs).decision == Decision.SLOWER).any(axis=-1)
    found = decide(slowed(jobs, 0.03)).decision[:, 0] == Decision.SLOWER
    assert red.mean() <= 0.01
    assert found.mean() >= 0.85
