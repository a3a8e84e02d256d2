"""When warm-up is over, and whether a series of step times stays where it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import autocorrelated, with_outliers

from raybench.stats.steady import (
    DRIFTING,
    FLAT,
    STEPPED,
    WANDERING,
    change,
    drifts,
    heading,
    is_steady,
    may_drift,
    may_wander,
    mser_cut,
    trend,
    worst_trend,
)


def test_the_cut_is_where_a_transient_ends():
    assert mser_cut([9.0, 8.0, 5.0, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9]) == 3


def test_equal_values_are_not_cut():
    assert mser_cut([2.0] * 10) == 0


def test_a_long_transient_is_not_steady_until_its_end_has_been_seen():
    step_ns = [int(1e7 * (1 + 0.6 * np.exp(-i / 8))) for i in range(200)]
    assert not any(is_steady(step_ns[:count]) for count in range(60))
    assert is_steady(step_ns)


def test_a_constant_series_is_steady_as_soon_as_there_are_five_batches():
    assert not is_steady([10] * 24)
    assert is_steady([10] * 25)


def test_a_climb_that_goes_on_is_never_steady():
    step_ns = [10_000_000 + 20_000 * i for i in range(200)]
    assert not any(is_steady(step_ns[:count]) for count in range(25, 201, 5))


def test_a_change_of_less_than_a_thousandth_in_the_second_half_is_steady():
    assert is_steady([10_000_000 + 50 * i for i in range(200)])


def test_one_slow_step_at_the_end_does_not_prolong_warm_up():
    rng = np.random.default_rng(4)
    step_ns = [int(1e7 * (1 + 0.01 * noise)) for noise in rng.standard_normal(60)]
    assert is_steady(step_ns)
    step_ns[-3] *= 5
    assert is_steady(step_ns)


SHAPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    FLAT: lambda share: np.ones_like(share),
    DRIFTING: lambda share: 1 + 0.1 * share,
    STEPPED: lambda share: np.where(share < 0.6, 1.0, 1.1),
}


@pytest.mark.parametrize("count", [40, 200])
@pytest.mark.parametrize("kind", SHAPES)
def test_flat_drifting_and_throttling_series_are_told_apart(kind: str, count: int):
    rng = np.random.default_rng(8)
    shape = SHAPES[kind](np.arange(count) / count)
    noise = autocorrelated(rng, runs=50, count=count, phi=0.5)
    found = Counter(trend(with_outliers(rng, shape * (1 + 0.01 * row)), 0.01) for row in noise)
    assert found[kind] >= 48, found


@pytest.mark.parametrize(("count", "scale"), [(30, 0.01), (30, 0.03), (60, 0.01), (300, 0.03)])
def test_autocorrelated_noise_alone_is_rarely_called_anything_but_flat(count: int, scale: float):
    rng = np.random.default_rng(9)
    noise = autocorrelated(rng, runs=300, count=count, phi=0.5)
    found = Counter(trend(with_outliers(rng, 1 + scale * row), 0.01) for row in noise)
    assert found[FLAT] >= 0.98 * 300, found


def test_a_change_below_one_per_cent_does_not_count():
    assert trend([1.0] * 50 + [1.008] * 50, 0.01) == FLAT
    assert trend([1.0] * 50 + [1.008] * 50, 0.005) == STEPPED
    assert trend([1.0] * 50 + [1.02] * 50, 0.01) == STEPPED
    assert trend([1.0] * 50 + [1.02] * 50, 0.05) == FLAT
    assert trend([1 + 0.0002 * i for i in range(100)], 0.01) == DRIFTING


@pytest.mark.parametrize("samples", [[], [1.0], [1.0] * 20 + [2.0] * 9, [0.0] * 100])
def test_where_nothing_can_be_shown_a_series_is_flat(samples: list[float]):
    assert trend(samples, 0.01) == FLAT


def test_of_several_repeats_the_most_doubtful_counts():
    flat, drift, step = [1.0] * 50, [1 + 0.01 * i for i in range(50)], [1.0] * 25 + [2.0] * 25
    assert worst_trend([flat, flat], 0.01) == FLAT
    assert worst_trend([flat, drift], 0.01) == DRIFTING
    assert worst_trend([step, drift, flat], 0.01) == STEPPED
    rng = np.random.default_rng(2)
    found = (pink(rng, 1000) for _ in range(50))
    wandering = next(row for row in found if worst_trend([row], 0.01) == WANDERING)
    assert worst_trend([flat, wandering], 0.01) == WANDERING
    assert worst_trend([wandering, drift], 0.01) == DRIFTING
    assert worst_trend([[1 + 0.005 * i / 500 for i in range(500)]], 0.01) == DRIFTING


def rows(runs: int, count: int, phi: float, sd: float) -> np.ndarray:
    rng = np.random.default_rng(11)
    return with_outliers(rng, 1 + sd * autocorrelated(rng, runs=runs, count=count, phi=phi))


@pytest.mark.parametrize(("phi", "most"), [(0.0, 0.1), (0.5, 0.15), (0.8, 0.25)])
def test_noise_alone_seldom_looks_like_a_drift(phi: float, most: float):
    found = [may_drift(row[300:].tolist(), row[:300].tolist()) for row in rows(200, 500, phi, 0.01)]
    assert np.mean(found) < most


def test_a_drift_that_the_samples_hide_shows_with_the_end_of_the_warm_up():
    decay = 1 - 0.02 * np.exp(-np.arange(500) / 300)
    course = (rows(100, 500, 0.3, 0.005) * decay).tolist()
    alone = np.mean([may_drift(row[300:]) for row in course])
    together = np.mean([may_drift(row[300:], row[:300]) for row in course])
    assert together > 0.95
    assert together > alone + 0.1


def test_a_drift_below_a_thousandth_is_none():
    assert not may_drift([1 + 0.0009 * i / 200 for i in range(200)])
    assert may_drift([1 + 0.002 * i / 200 for i in range(200)])


def test_only_a_drift_that_matters_is_held_against_a_point():
    small, large = ([1 + size * i / 200 for i in range(200)] for size in (0.005, 0.02))
    assert may_drift(small)
    assert not drifts(small, matters=0.01)
    assert drifts(large, matters=0.01)
    assert not drifts(large, matters=0.1)
    assert drifts([1.0] * 200, [1.05] * 200, matters=0.01)


def test_a_level_that_wanders_within_two_thousandths_stands_still():
    wandering = next(row for row in (pink(RNG, 1000) for _ in range(50)) if may_wander(row))
    assert not may_wander(1 + 0.02 * (wandering - 1))


@given(st.floats(-0.05, 0.05), st.floats(1e-3, 1e9), st.integers(40, 400))
@settings(max_examples=50, deadline=None)
def test_a_straight_line_changes_by_its_ends(size: float, level: float, count: int):
    line = level * (1 + size * (np.arange(count) / count - 0.5))
    assert change(line).size == pytest.approx(size, rel=0.15, abs=1e-9)


def test_a_level_is_heading_where_it_still_goes_and_nowhere_when_it_stands():
    sinking = [1 - 0.01 * i / 200 for i in range(200)]
    assert heading(sinking) == pytest.approx(-0.005, rel=0.1)
    assert heading([1.0] * 200) == 0.0
    assert heading([1.0] * 10) == 0.0


RNG = np.random.default_rng(4)


def pink(rng: np.random.Generator, count: int) -> np.ndarray:
    length = 16 * count
    waves = rng.standard_normal((2, length // 2)) / np.sqrt(np.arange(1, length // 2 + 1))
    noise = np.fft.irfft(np.concatenate([[0], waves[0] + 1j * waves[1]]), length)
    return 1 + 0.01 * (noise / noise.std())[:count]


def test_noise_that_remembers_for_ever_wanders_and_noise_that_forgets_does_not():
    rng = np.random.default_rng(3)
    assert np.mean([may_wander(pink(rng, 1000)) for _ in range(100)]) > 0.85
    walks = 1000 + np.cumsum(rng.standard_normal((100, 1000)), axis=1)
    assert np.mean([may_wander(walk) for walk in walks]) > 0.95
    for phi in (0.0, 0.5):
        assert np.mean([may_wander(row) for row in rows(100, 1000, phi, 0.01)]) < 0.1
    assert not may_wander([1.0] * 1000)
    assert not may_wander([1.0, 2.0] * 5)
