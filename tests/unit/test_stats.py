from __future__ import annotations

import numpy as np
import pytest
from builders import make_measurement
from hypothesis import given, settings
from hypothesis import strategies as st
from series import autocorrelated, with_outliers

from raybench.measure import stats

SAMPLES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60)


def coverage(noise: np.ndarray) -> float:
    """How often the interval of each row holds the true median, which is 10."""
    intervals = [stats.median_interval([10 + row]) for row in noise]
    return float(np.mean([i is not None and i.low <= 10 <= i.high for i in intervals]))


def noise(runs: int, count: int, phi: float) -> np.ndarray:
    return autocorrelated(np.random.default_rng(7), runs=runs, count=count, phi=phi)


@pytest.mark.parametrize("count", [30, 100])
@pytest.mark.parametrize(("phi", "least"), [(0.0, 0.93), (0.5, 0.92), (0.8, 0.88)])
def test_the_interval_covers_the_median_though_neighbours_are_alike(
    phi: float, least: float, count: int
) -> None:
    assert least <= coverage(noise(200, count, phi)) <= 0.995


def test_alike_neighbours_make_the_interval_wider() -> None:
    widths = [
        np.mean(
            [i.high - i.low for row in noise(50, 100, phi) if (i := stats.median_interval([row]))]
        )
        for phi in (0.0, 0.5, 0.8)
    ]
    assert widths[0] * 1.3 < widths[1] < widths[2] / 1.3


def test_blocks_do_not_cross_repeats() -> None:
    # Each repeat is constant: blocks that crossed would see a step that no repeat has.
    alike = stats.median_interval([[1.0] * 20, [1.0] * 20])
    assert alike == stats.Interval(low=1.0, high=1.0)
    assert stats.autocorrelation([[1.0] * 20, [2.0] * 20]) is None
    assert stats.autocorrelation([[1.0] * 20 + [2.0] * 20]) == pytest.approx(0.95, abs=0.03)


def test_the_interval_is_the_same_each_time_and_does_not_touch_the_global_seed() -> None:
    samples = np.random.default_rng(1).gamma(9.0, size=40)
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    assert stats.median_interval([samples]) == stats.median_interval([samples])
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("counts", [(30,), (31,), (7, 24, 10), (70_000,)])
def test_places_are_drawn_in_place_of_samples_and_the_medians_are_bit_for_bit_the_same(
    counts: tuple[int, ...],
) -> None:
    series = [np.random.default_rng(1).gamma(9.0, size=n).round(2) for n in counts]
    count, block = sum(counts), 5
    drawn = -(-count // block)
    blocks = np.concatenate([np.lib.stride_tricks.sliding_window_view(s, block) for s in series])
    rng = np.random.default_rng(stats._SEED)
    # Only as many as are resampled at once.
    rows = min(stats.RESAMPLES, max(1, stats._CHUNK_VALUES // count))
    starts = rng.integers(0, len(blocks), size=(rows, drawn))
    expected = np.median(blocks[starts].reshape(rows, -1)[:, :count], axis=1)
    assert np.array_equal(stats._resampled_medians(series, block)[:rows], expected)


def test_below_five_samples_there_is_no_interval() -> None:
    assert stats.median_interval([[1.0] * 2, [1.0] * 2]) is None
    assert stats.median_interval([[1.0] * 2, [1.0] * 3]) == stats.Interval(low=1.0, high=1.0)


def test_many_samples_are_resampled_in_bounded_memory() -> None:
    samples = np.random.default_rng(2).standard_normal(30_000)
    found = stats.median_interval([samples])
    assert found is not None
    assert -0.05 < found.low < 0.02
    assert -0.02 < found.high < 0.05


@pytest.mark.parametrize(
    ("count", "phi", "length", "why"),
    [
        (1, 0.0, 1, "at least one"),
        (50, 0.0, 4, "the cube root"),
        (1000, 0.0, 10, "the cube root"),
        (1000, 0.5, 14, "the rule of Politis and White"),
        (100, 0.9, 5, "twenty blocks"),
        (30, 0.9, 3, "the cube root though it leaves ten blocks"),
    ],
)
def test_blocks_are_as_long_as_the_autocorrelation_asks(
    count: int, phi: float, length: int, why: str
) -> None:
    assert stats.block_length(count, phi) == length, why


def test_the_autocorrelation_is_that_of_the_series_whatever_the_outliers() -> None:
    rng = np.random.default_rng(3)
    for phi in (0.0, 0.5, 0.8):
        row = 1 + 0.01 * autocorrelated(rng, runs=1, count=4000, phi=phi)[0]
        found = stats.autocorrelation([with_outliers(rng, row)[:2000], row[2000:]])
        assert found == pytest.approx(phi, abs=0.06)
    assert stats.autocorrelation([[1.0, 2.0], [3.0, 1.0]]) is None
    assert stats.autocorrelation([[7.0] * 50]) is None


# Student's t, 97.5 %, from printed tables.
@pytest.mark.parametrize(
    ("degrees", "expected"), [(5, 2.571), (9, 2.262), (29, 2.045), (1e6, 1.96)]
)
def test_students_t_is_that_of_the_tables(degrees: float, expected: float) -> None:
    assert stats.student_t(degrees) == pytest.approx(expected, rel=2e-3)


def test_the_spread_between_repeats_is_that_of_their_medians() -> None:
    assert stats.repeat_std([[1.0, 1.0, 9.0], [3.0, 3.0, 3.0]]) == pytest.approx(np.sqrt(2))
    assert stats.repeat_std([[1.0, 2.0]]) is None


def test_of_ranks_the_smallest_is_taken_step_by_step() -> None:
    ranks = [[1.0, 5.0, 3.0], [4.0, 2.0, 3.0]]
    assert stats.median_of_smallest(ranks) == 2.0
    assert stats.median_above_smallest(ranks) == [0.0, 0.0]
    assert stats.median_above_smallest([[5.0, 6.0, 7.0], [1.0, 2.0, 3.0]]) == [4.0, 0.0]
    assert stats.median_of_smallest([[1.0], []]) is None


@given(SAMPLES)
@settings(max_examples=50, deadline=None)
def test_the_interval_lies_within_the_samples_and_scales_with_them(samples: list[float]) -> None:
    interval = stats.median_interval([samples])
    if interval is None:
        assert len(samples) < stats.MIN_SAMPLES
        return
    assert min(samples) <= interval.low <= interval.high <= max(samples)
    doubled = stats.median_interval([[2 * value for value in samples]])
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
