from __future__ import annotations

import numpy as np
import pytest
from builders import make_measurement
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.measure import stats

SAMPLES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60)


def coverage(noise: np.ndarray, block: int | None) -> float:
    """How often the interval of each row holds the true median, which is 10."""
    intervals = [stats.median_interval(10 + row, block=block) for row in noise]
    return float(np.mean([i is not None and i.low <= 10 <= i.high for i in intervals]))


def autocorrelated(runs: int, count: int, phi: float) -> np.ndarray:
    rng = np.random.default_rng(7)
    noise = np.zeros((runs, count))
    noise[:, 0] = rng.standard_normal(runs) / np.sqrt(1 - phi**2)
    for step in range(1, count):
        noise[:, step] = phi * noise[:, step - 1] + rng.standard_normal(runs)
    return noise


def test_the_interval_covers_the_median_of_independent_noise() -> None:
    noise = np.random.default_rng(5).standard_normal((300, 60))
    assert 0.89 <= coverage(noise, None) <= 0.99


def test_with_autocorrelated_noise_blocks_cover_far_more_often_than_the_plain_bootstrap() -> None:
    noise = autocorrelated(300, 100, phi=0.6)
    blocks, plain = coverage(noise, None), coverage(noise, 1)
    assert blocks >= 0.78
    assert blocks >= plain + 0.05


def test_the_interval_is_the_same_each_time_and_does_not_touch_the_global_seed() -> None:
    samples = np.random.default_rng(1).gamma(9.0, size=40)
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    assert stats.median_interval(samples) == stats.median_interval(samples)
    assert np.random.get_state()[1].tolist() == before


def test_below_five_samples_there_is_no_interval() -> None:
    assert stats.median_interval([1.0] * 4) is None
    assert stats.median_interval([1.0] * 5) == stats.Interval(low=1.0, high=1.0)


def test_many_samples_are_resampled_in_bounded_memory() -> None:
    samples = np.random.default_rng(2).standard_normal(30_000)
    found = stats.median_interval(samples)
    assert found is not None
    assert found.low < 0.02
    assert found.high > -0.02


@pytest.mark.parametrize(("count", "length"), [(1, 1), (5, 2), (50, 4), (1000, 10)])
def test_the_block_length_is_the_cube_root(count: int, length: int) -> None:
    assert stats.block_length(count) == length


@given(SAMPLES)
@settings(max_examples=50, deadline=None)
def test_the_interval_lies_within_the_samples_and_scales_with_them(samples: list[float]) -> None:
    interval = stats.median_interval(samples)
    if interval is None:
        assert len(samples) < stats.MIN_SAMPLES
        return
    assert min(samples) <= interval.low <= interval.high <= max(samples)
    doubled = stats.median_interval([2 * value for value in samples])
    assert doubled is not None
    assert doubled.low == pytest.approx(2 * interval.low)


@given(SAMPLES)
@settings(max_examples=50, deadline=None)
def test_a_summary_is_ordered(samples: list[float]) -> None:
    summary = stats.summarize(samples)
    ordered = [summary.min, summary.p50, summary.p90, summary.p95, summary.p99, summary.max]
    assert ordered == pytest.approx(sorted(ordered))
    assert summary.std >= 0


def test_a_summary_of_known_samples() -> None:
    summary = stats.summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (summary.mean, summary.p50, summary.min, summary.max) == (22.0, 3.0, 1.0, 100.0)
    assert summary.std == pytest.approx(43.6177, abs=1e-3)
    assert stats.summarize([7.0]).std == 0.0
    with pytest.raises(ValueError, match="at least one"):
        stats.summarize([])


def test_the_step_time_is_the_median_of_the_maxima_not_the_maximum_of_the_medians() -> None:
    ranks = [[1, 9, 1, 9, 1], [9, 1, 9, 1, 8]]
    assert stats.per_iteration_max(ranks).tolist() == [9, 9, 9, 9, 8]
    measurements = [make_measurement(rank, [ns]) for rank, ns in enumerate(ranks)]
    assert stats.slowest_rank_step_ns(measurements) == 9
    assert stats.median_skew(ranks) == 8
    assert stats.slowest_rank(ranks) == 1
    assert stats.slowest_rank(ranks[:1]) is None


def test_the_timed_samples_of_all_repeats_count_and_no_warm_up() -> None:
    assert stats.timed_step_ns(make_measurement(0, [[1, 2], [3]])) == [1, 2, 3]


def test_ranks_with_different_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equally many samples, got \[1, 2\]"):
        stats.per_iteration_max([[1.0], [1.0, 2.0]])
