"""Where the level of a series of runs changes."""

import math

import numpy as np
from noise import autocorrelated

from raybench.stats.levels import find_level_starts

STEP = math.log(1.05)


def test_steps_are_where_levels_change():
    flat = 0.002 * np.random.default_rng(5).standard_normal(30)
    assert find_level_starts(flat, 0.001, 0.015) == []
    stepped = flat + np.repeat([0.0, 0.04, -0.03], 10)
    assert find_level_starts(stepped, 0.001, 0.015) == [10, 20]
    assert find_level_starts(stepped, 0.001, 0.2) == []
    assert find_level_starts(stepped, 0.05, 0.015) == []


def test_changes_below_the_threshold_are_no_steps():
    levels = np.repeat([0.0, 0.02, 0.01, 0.03], [10, 3, 10, 3])
    values = levels + np.tile([1, -1], 13) / 2000
    assert find_level_starts(values, 0.0005, 0.015) == [23], "a second step would be of 1.2 %"
    with_small = np.repeat([0.0, 0.01, 0.05], 10) + np.tile([1, -1], 15) / 2000
    assert find_level_starts(with_small, 0.0005, 0.015) == [20]


def test_a_level_has_three_runs():
    assert find_level_starts(np.array([0.0, 0.0, 0.0, 1.0, 1.0]), 0.001, 0.015) == []
    assert find_level_starts(np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]), 0.001, 0.015) == [3]
    assert find_level_starts(np.array([0.0] * 10 + [1.0]), 0.001, 0.015) == []


def test_memory_of_runs_is_no_step():
    rng = np.random.default_rng(1)
    for runs in (20, 60):
        series = 0.015 * autocorrelated(rng, runs=300, count=runs, phi=0.6)
        false = [bool(find_level_starts(values, 0.0, 0.015)) for values in series]
        assert np.mean(false) <= 0.1


def test_a_real_step_is_found():
    rng = np.random.default_rng(1)
    series = 0.015 * rng.standard_normal((200, 20))
    series[:, 10:] += STEP
    starts = [find_level_starts(values, 0.0, 0.015) for values in series]
    found = [any(abs(start - 10) <= 1 for start in of_series) for of_series in starts]
    assert np.mean(found) > 0.75


def test_a_slow_period_has_two_steps():
    rng = np.random.default_rng(1)
    series = 0.015 * rng.standard_normal((200, 30))
    series[:, 10:20] += STEP
    found = [len(find_level_starts(values, 0.0, 0.015)) == 2 for values in series]
    assert np.mean(found) > 0.75
