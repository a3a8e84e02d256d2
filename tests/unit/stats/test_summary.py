"""Intervals, levels and the scatter of starts, where the truth is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import autocorrelated, with_outliers
from scipy.stats import t as student

from raybench.stats import summary as stats
from raybench.stats.summary import MIN_LEVEL_STEPS, level_change, scatter

SAMPLES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60)


def coverage(noise):
    """How often the interval of each row holds the true median, which is 10."""
    intervals = [stats.median_interval([10 + row]) for row in noise]
    return float(np.mean([i is not None and i.low <= 10 <= i.high for i in intervals]))


def noise(runs, count, phi):
    return autocorrelated(np.random.default_rng(7), runs=runs, count=count, phi=phi)


@pytest.mark.parametrize("count", [6, 7, 30, 100, 1000])
@pytest.mark.parametrize("phi", [0.0, 0.3, 0.6])
def test_interval_covers_median_of_correlated_samples(phi, count):
    assert coverage(noise(600, count, phi)) >= 0.925


def test_interval_treats_repeats_as_batches():
    noise = 0.001 * np.random.default_rng(1).standard_normal((4, 50))
    levels = np.array([[1.0], [1.01], [1.02], [1.03]])
    apart = stats.median_interval((levels + noise).tolist())
    alike = stats.median_interval((1.0 + noise).tolist())
    assert alike.high - alike.low < 0.001
    assert apart.low < 1.005 < 1.025 < apart.high
    # Below six samples there is no interval, and an empty repeat has none.
    assert stats.median_interval([[1.0] * 2, [1.0] * 3]) is stats.median_interval([]) is None
    for repeats in ([[1.0] * 2, [1.0] * 4], [[1.0] * 6, []], [[1.0] * 6]):
        assert stats.median_interval(repeats) == stats.Interval(low=1.0, high=1.0)


@given(SAMPLES)
@settings(max_examples=50, deadline=None)
def test_interval_scales_with_samples(samples):
    interval = stats.median_interval([samples])
    if interval is None:
        assert len(samples) < stats.MIN_SAMPLES
        return
    assert 0 <= interval.low <= np.median(samples) <= interval.high
    doubled = stats.median_interval([[2 * value for value in samples]])
    assert doubled.low == pytest.approx(2 * interval.low)


def test_a_summary_of_known_samples():
    summary = stats.summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (summary.p50, summary.min, summary.max) == (3.0, 1.0, 100.0)
    assert summary.std == pytest.approx(43.6177, abs=1e-3)
    assert stats.summarize([7.0]).std == 0.0
    with pytest.raises(ValueError, match="at least one"):
        stats.summarize([])


def test_rank_statistics_of_equal_counts():
    ranks = [[1, 9, 1, 9, 1], [9, 1, 9, 1, 8]]
    assert (*stats.per_iteration_max(ranks), stats.median_skew(ranks)) == (9, 9, 9, 9, 8, 8)
    # The smallest is taken step by step.
    ranks = [[1.0, 5.0, 3.0], [4.0, 2.0, 3.0]]
    assert (stats.median_of_smallest(ranks), stats.median_of_smallest([[1.0], []])) == (2.0, None)
    assert stats.median_above_smallest(ranks) == [0.0, 0.0]
    assert stats.median_above_smallest([[5.0, 6.0, 7.0], [1.0, 2.0, 3.0]]) == [4.0, 0.0]
    for wrong, told in (([[1.0], [1.0, 2.0]], r"\[1, 2\]"), ([[], []], r"\[0\]"), ([], r"\[\]")):
        with pytest.raises(ValueError, match=f"equally many, got {told}"):
            stats.per_iteration_max(wrong)


def marked(step_ns, least=0.01):
    """Whether the level changes by more than `least` and three standard errors."""
    change = level_change(step_ns)
    return None if change is None else change.exceeds(least, 3)


def rows(count, phi, sd, runs=300):
    rng = np.random.default_rng(11)
    return with_outliers(rng, 1 + sd * autocorrelated(rng, runs=runs, count=count, phi=phi))


@given(st.floats(-0.05, 0.05), st.floats(1e-3, 1e9), st.integers(40, 400))
@settings(max_examples=50, deadline=None)
def test_drift_size_is_its_total_change(size, level, count):
    line = level * (1 + size * (np.arange(count) / count - 0.5))
    change = level_change(line.tolist())
    assert change.size == pytest.approx(size, rel=0.15, abs=1e-9)


def test_small_or_short_changes_do_not_count():
    assert level_change([1.0] * (MIN_LEVEL_STEPS - 1)) is None
    assert marked([1.0] * MIN_LEVEL_STEPS) is False
    drift = [1 + 0.02 * i / 200 for i in range(200)]
    assert marked(drift, 0.01)
    assert not marked(drift, 0.03)
    assert marked(drift[::-1], 0.01)
    # What ended in the first third is no change.
    assert not marked([2.0] * 60 + [1.0] * 140)
    assert marked([1.0] * 140 + [1.05] * 60)
    # A slow approach is one, though each step scatters more.
    approach = 1 - 0.03 * np.exp(-np.arange(4000) / 2000)
    assert np.mean([marked((row * approach).tolist()) for row in rows(4000, 0.3, 0.01, 50)]) > 0.95


@pytest.mark.parametrize("count", [26, 50, 200, 2000])
@pytest.mark.parametrize(("phi", "sd"), [(0.0, 0.01), (0.3, 0.01), (0.6, 0.01), (0.6, 0.05)])
def test_clean_noise_is_seldom_marked(count, phi, sd):
    assert np.mean([marked(row.tolist()) for row in rows(count, phi, sd)]) <= 0.03


def coverage_of_starts(count, starts, *, own, common):
    """How often the 95 % interval of the mean of some starts holds their true level, 0."""
    rng = np.random.default_rng(5)
    held = []
    for _ in range(400):
        values = own * rng.standard_normal((count, starts)) + common * rng.standard_normal(starts)
        for of_point, found in zip(values, scatter(values), strict=True):
            held.append(abs(of_point.mean()) <= found.half_width(1 / starts))
    return float(np.mean(held))


@pytest.mark.parametrize("count", [1, 5, 36])
@pytest.mark.parametrize(("own", "common"), [(0.015, 0.0), (0.003, 0.02)])
def test_interval_over_three_starts_has_coverage(count, own, common):
    assert 0.92 < coverage_of_starts(count, 3, own=own, common=common) < 0.99


def test_one_point_alone_has_students_interval():
    values = np.array([[0.01, -0.02, 0.04]])
    [found] = scatter(values)
    assert (found.sd, found.degrees) == (pytest.approx(values.std(ddof=1)), 2)
    assert found.half_width(1 / 3) == pytest.approx(student.ppf(0.975, 2) * found.sd / 3**0.5)


def test_noisy_point_keeps_its_noise():
    rng = np.random.default_rng(3)
    sds = np.array([0.003] * 9 + [0.05])
    found = scatter(sds[:, np.newaxis] * rng.standard_normal((10, 4)))
    assert found[9].sd > 4 * found[0].sd
    alike = np.where(np.arange(40).reshape(10, 4) < 38, rng.standard_normal((10, 4)), np.nan)
    assert scatter(alike)[9].degrees == 2  # the others count no more than its own two starts


@pytest.mark.parametrize(
    ("count", "noisy", "times"), [(5, 1, 6.0), (12, 3, 10.0), (36, 1, 10.0), (36, 1, 4.0)]
)
def test_noisy_points_have_intervals_that_hold(count, noisy, times):
    rng = np.random.default_rng(6)
    sds = np.where(np.arange(count) < noisy, times, 1.0)[:, np.newaxis]
    held = []
    for _ in range(1500 // noisy):
        values = sds * rng.standard_normal((count, 3))
        for of_point, found in zip(values[:noisy], scatter(values), strict=False):
            held.append(abs(of_point.mean()) <= found.half_width(1 / 3))
    assert np.mean(held) > 0.88


def test_levels_of_sides_are_no_scatter():
    values = np.array([[0.0, 0.01, 1.0, 1.01]])
    [apart] = scatter(values, sides=[0, 0, 1, 1])
    assert (apart.degrees, apart.sd) == (2, pytest.approx(0.01 / 2**0.5))


def test_scatter_needs_two_starts_on_a_side():
    values = np.array([[0.0, np.nan, 1.0], [0.0, 0.1, np.nan]])
    assert [one is None for one in scatter(values, sides=[0, 0, 1])] == [True, False]
    assert scatter(np.array([[1.0], [2.0]])) == [None, None]
    # Starts that agree to the last digit make any change certain.
    [found] = scatter(np.zeros((1, 4)))
    assert found.p_value(0.01, 1.0) == 0
    assert found.p_value(-0.01, 1.0) == 1
