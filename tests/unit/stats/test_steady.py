"""Whether a series of step times stays at one level."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import autocorrelated, with_outliers

from raybench.stats.summary import MIN_LEVEL_STEPS, level_change


def marked(step_ns, least=0.01):
    """Whether the level changes by more than `least` and three standard errors."""
    change = level_change(step_ns)
    return None if change is None else change.exceeds(least, 3)


def rows(count, phi, sd, runs=300):
    rng = np.random.default_rng(11)
    return with_outliers(rng, 1 + sd * autocorrelated(rng, runs=runs, count=count, phi=phi))


def test_below_25_steps_nobody_can_tell():
    assert level_change([1.0] * (MIN_LEVEL_STEPS - 1)) is None
    assert marked([1.0] * MIN_LEVEL_STEPS) is False


@given(st.floats(-0.05, 0.05), st.floats(1e-3, 1e9), st.integers(40, 400))
@settings(max_examples=50, deadline=None)
def test_a_straight_drift_changes_the_level_by_its_ends(size, level, count):
    line = level * (1 + size * (np.arange(count) / count - 0.5))
    change = level_change(line.tolist())
    assert change.size == pytest.approx(size, rel=0.15, abs=1e-9)


def test_only_a_change_above_the_least_counts():
    drift = [1 + 0.02 * i / 200 for i in range(200)]
    assert marked(drift, 0.01)
    assert not marked(drift, 0.03)
    assert marked(drift[::-1], 0.01)


def test_what_ended_in_the_first_third_is_no_change():
    assert not marked([2.0] * 60 + [1.0] * 140)
    assert marked([1.0] * 140 + [1.05] * 60)


@pytest.mark.parametrize("count", [26, 50, 200, 2000])
@pytest.mark.parametrize(("phi", "sd"), [(0.0, 0.01), (0.3, 0.01), (0.6, 0.01), (0.6, 0.05)])
def test_clean_noise_is_seldom_marked(count, phi, sd):
    assert np.mean([marked(row.tolist()) for row in rows(count, phi, sd)]) <= 0.03


def test_a_slow_approach_is_marked_though_each_step_scatters_more():
    approach = 1 - 0.03 * np.exp(-np.arange(4000) / 2000)
    assert np.mean([marked((row * approach).tolist()) for row in rows(4000, 0.3, 0.01, 50)]) > 0.95
