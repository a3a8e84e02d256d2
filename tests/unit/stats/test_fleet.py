"""Who is slower than those alike: fleets of which the answer is known."""

import numpy as np
import pytest

from raybench.stats.outliers import compare_few, compare_peers, find_slow

FLOOR = 0.01


def fleet(levels, passes=3, noise=0.005):
    """Rates of devices of these levels."""
    rng = np.random.default_rng(len(levels))
    return 700 * np.array(levels) * (1 + noise * rng.standard_normal((passes, len(levels))))


def slow(values, *, is_time=False):
    found = find_slow([compare_peers(values, is_time=is_time, floor=FLOOR)])[0]
    return [int(place) for place in np.flatnonzero(found)]


def test_a_device_that_is_slow_in_two_of_three_passes_is_not_called_slow():
    values = fleet([1.0] * 8)
    values[:2, 4] *= 0.8
    assert slow(values) == []


def test_a_spread_that_the_model_has_is_not_called_slow():
    rng = np.random.default_rng(1)
    levels = list(1 + 0.03 * rng.standard_normal(200))
    assert slow(fleet(levels)) == []


@pytest.mark.parametrize("slower", [2, 4, 6])
def test_of_a_divided_fleet_the_slower_group_is_named_be_it_the_larger(slower):
    values = fleet([0.8] * slower + [1.0] * (8 - slower))
    assert slow(values) == list(range(slower))
    assert compare_peers(values, is_time=False, floor=FLOOR).is_divided


def test_one_device_that_is_faster_makes_no_others_slow():
    assert slow(fleet([1.0] * 7 + [1.3])) == []


def test_what_did_not_run_is_neither_slow_nor_a_measure_for_others():
    values = fleet([1.0] * 8)
    values[:, 2] = np.nan
    values[0, 3] = np.nan
    values[:, 6] *= 0.9
    peers = compare_peers(values, is_time=False, floor=FLOOR)
    assert np.isnan(peers.ratios[2])
    assert slow(values) == [6]


def test_a_rate_of_nothing_is_infinitely_slow():
    values = fleet([1.0] * 5)
    values[:, 1] = 0
    assert compare_peers(values, is_time=False, floor=FLOOR).ratios[1] == np.inf
    assert slow(values) == [1]


def test_among_more_tests_the_same_excess_has_to_be_rarer():
    """4.9 standard deviations: rare enough for 1,000 values, not for 100,000."""
    rng = np.random.default_rng(0)
    levels = 1 + 0.013 * rng.standard_normal((100, 1, 1000))
    levels[0, 0, 0] = 1 - 4.9 * 0.013
    tests = [
        compare_peers(np.repeat(each, 3, axis=0), is_time=False, floor=FLOOR) for each in levels
    ]
    assert tests[0].is_beyond[0]
    assert find_slow(tests[:1])[0][0]
    assert not find_slow(tests)[0][0]


def test_of_two_devices_the_slower_is_held_against_the_faster():
    ratios, is_slow = compare_few(fleet([1.0, 0.5], noise=0), is_time=False, floor=FLOOR)
    assert list(ratios) == pytest.approx([1.0, 2.0])
    assert list(is_slow) == [False, True]


def test_of_two_devices_a_figure_that_the_host_bounds_may_differ_more():
    """Launches on two H200s: 6.5 and 9.0 us, with a floor of 10 %."""
    values = np.array([[6.5, 9.0]] * 3)
    assert not compare_few(values, is_time=True, floor=0.1)[1].any()
    assert list(compare_few(values, is_time=True, floor=0.01)[1]) == [False, True]


def test_of_two_devices_one_that_is_not_slow_in_one_pass_is_not_called_so():
    values = np.array([[1.0, 2.0], [1.0, 1.05], [1.0, 2.0]])
    assert not compare_few(values, is_time=True, floor=FLOOR)[1].any()


def test_where_no_pass_of_any_device_ran_nothing_is_said():
    nothing = np.full((3, 4), np.nan)
    assert np.isnan(compare_peers(nothing, is_time=True, floor=FLOOR).ratios).all()
    ratios, is_slow = compare_few(nothing, is_time=True, floor=FLOOR)
    assert np.isnan(ratios).all()
    assert not is_slow.any()
    assert not find_slow([compare_peers(nothing, is_time=True, floor=FLOOR)])[0].any()
    assert find_slow([]) == []
