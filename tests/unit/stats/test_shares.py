"""Shares of a batch for devices of different speed."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybench.stats.shares import (
    DeviceSpeed,
    balance,
    crossover_batch,
    equal_shares,
    fast_devices,
    fast_shares,
    fit_line,
    shares_by_speed,
)

speeds_drawn = st.lists(
    st.builds(
        DeviceSpeed,
        fixed_s=st.floats(0, 0.01),
        items_per_s=st.floats(10, 10_000),
        most_items=st.none() | st.integers(0, 5_000),
        # Measured: with noise, so that more items may have taken less.
        steps=st.dictionaries(st.integers(1, 2_000), st.floats(1e-4, 1), max_size=4).map(
            lambda steps: tuple(sorted(steps.items()))
        ),
    ),
    min_size=1,
    max_size=12,
)


def longest_step_s(speeds, shares):
    """Return the seconds until the last device has done its share, exchange apart."""
    return max(speed.step_s(items) for speed, items in zip(speeds, shares, strict=True))


def _fast(speeds):
    return fast_devices([speed.items_per_s for speed in speeds])


def _fits(speeds, shares):
    limits = (speed.most_items for speed in speeds)
    return all(most is None or items <= most for items, most in zip(shares, limits, strict=True))


@given(speeds_drawn, st.integers(1, 200), st.sampled_from([1, 2, 8]))
def test_shares_by_speed_beat_equal_and_fast(speeds, units, unit):
    batch = units * unit
    try:
        shares = shares_by_speed(speeds, batch, unit)
    except ValueError:
        assert sum(s.most_items // unit for s in speeds if s.most_items is not None) * unit < batch
        assert all(speed.most_items is not None for speed in speeds)
        return
    assert sum(shares) == batch
    assert all(items % unit == 0 and items >= 0 for items in shares)
    assert _fits(speeds, shares)
    for others in (equal_shares(len(speeds), batch, unit), fast_shares(_fast(speeds), batch, unit)):
        assert sum(others) == batch
        if _fits(speeds, others):
            best_s = longest_step_s(speeds, shares)
            assert best_s <= longest_step_s(speeds, others) * (1 + 1e-12)


@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0.5, 4)), min_size=1, max_size=3),
    st.integers(1, 8),
)
def test_no_other_shares_in_units_are_done_earlier(lines, batch):
    speeds = [DeviceSpeed(fixed_s=fixed, items_per_s=rate) for fixed, rate in lines]
    all_shares = product(range(batch + 1), repeat=len(speeds))
    least = min(longest_step_s(speeds, one) for one in all_shares if sum(one) == batch)
    assert longest_step_s(speeds, shares_by_speed(speeds, batch)) == pytest.approx(least)


def test_full_memory_passes_items_on():
    speeds = [DeviceSpeed(fixed_s=0.0, items_per_s=rate, most_items=50) for rate in (30, 10, 10)]
    assert shares_by_speed(speeds, 100) == (50, 25, 25)
    with pytest.raises(ValueError, match="hold 150 items together, not 151"):
        shares_by_speed(speeds, 151)
    assert equal_shares(3, 16, 2) == (6, 6, 4)
    with pytest.raises(ValueError, match="not made up of units of 4"):
        equal_shares(2, 10, 4)


def test_measured_steps_replace_the_line():
    # One more than 100 takes a tile more; a second device has a line that meets the first stair.
    steps = ((100, 0.010), (101, 0.015), (200, 0.015), (201, 0.020))
    stairs = DeviceSpeed(fixed_s=0.005, items_per_s=20_000, steps=steps)
    assert stairs.step_s(100) == pytest.approx(0.010)
    assert stairs.step_s(50) == pytest.approx(0.0075)
    assert stairs.step_s(150) == pytest.approx(0.015)
    assert stairs.step_s(301) == pytest.approx(0.025)
    line = DeviceSpeed(fixed_s=0.0, items_per_s=10_000)
    assert shares_by_speed([stairs, line], 200) == (100, 100)
    assert stairs.with_step(101, 0.0101).step_s(101) == pytest.approx(0.0101)
    # A longer step that was measured to be shorter takes as long as the one before.
    noisy = DeviceSpeed(fixed_s=0.02, items_per_s=1000, steps=((10, 0.02), (20, 0.019)))
    assert noisy.step_s(20) == pytest.approx(0.02)
    assert noisy.step_s(30) == pytest.approx(0.03)


def _of_stairs(ratio):
    """Seconds of a step whose products go by tiles of 128 rows and stairs of 1024."""

    def step_s(items):
        tiles, stairs = (math.ceil(items / of) * of for of in (128, 1024))
        return (0.002 + 1e-5 * (0.6 * items + 0.2 * tiles + 0.2 * stairs)) / ratio

    return step_s


def _probe(step_s, equal):
    steps = [(size, step_s(size)) for size in (equal // 2, equal, equal * 3 // 2, 2 * equal)]
    fixed_s, item_s = fit_line(steps)
    return DeviceSpeed(fixed_s=fixed_s, items_per_s=1 / item_s, steps=tuple(steps))


@pytest.mark.parametrize("ratio", [0.9, 0.8, 0.7, 0.5, 0.33])
@pytest.mark.parametrize("equal", [1024, 8192])
def test_balance_is_near_optimal_on_stairs(ratio, equal):
    steps, unit = [_of_stairs(1.0), _of_stairs(ratio)], equal // 64
    shares, own_s = balance(
        [_probe(step_s, equal) for step_s in steps],
        2 * equal,
        unit,
        lambda shares: [step_s(items) for step_s, items in zip(steps, shares, strict=True)],
    )
    assert sum(shares) == 2 * equal
    sizes = range(unit, 2 * equal, unit)
    best_s = min(max(steps[0](one), steps[1](2 * equal - one)) for one in sizes)
    assert max(own_s) == pytest.approx(best_s, rel=0.012)


def test_equal_shares_win_when_measured_better():
    speeds = [
        DeviceSpeed(fixed_s=0.0, items_per_s=rate, steps=((100, 100 / rate),)) for rate in (100, 80)
    ]
    # Anything but 100 takes twice as long.
    shares, own_s = balance(speeds, 200, 1, lambda shares: [2.5 if one else 0.0 for one in shares])
    assert (shares, own_s) == ((100, 100), (1.0, 1.25))


def test_fast_devices_are_above_largest_gap():
    assert fast_devices([100, 52, 98, 50]) == (True, False, True, False)
    assert fast_devices([100, 99, 98]) == (True, True, True)
    assert fast_devices([7]) == (True,)


def test_fast_devices_win_below_crossover():
    speeds = [DeviceSpeed(fixed_s=0.001, items_per_s=rate) for rate in (1000, 1000, 500)]
    are_fast = _fast(speeds)
    batch = crossover_batch(speeds, are_fast, exchange_s=0.02, fast_exchange_s=0.01)
    for factor, by_speed_wins in ((0.9, False), (1.1, True)):
        items = round(factor * batch)
        by_speed_s = longest_step_s(speeds, shares_by_speed(speeds, items)) + 0.02
        fast_s = longest_step_s(speeds, fast_shares(are_fast, items)) + 0.01
        assert (by_speed_s < fast_s) is by_speed_wins
    assert crossover_batch(speeds[:2], (True, True), exchange_s=1, fast_exchange_s=0) is None


def test_line_has_nonnegative_intercept():
    assert fit_line([(x, 3.0 + 0.5 * x) for x in (8, 16, 24, 32)]) == pytest.approx((3.0, 0.5))
    noisy = fit_line([(8, 7.1), (16, 10.9), (24, 15.1), (32, 18.9)])
    assert noisy == pytest.approx((3.0, 0.5), rel=0.1)
    intercept, slope = fit_line([(1, 1.0), (2, 3.0), (4, 7.0)])
    assert (intercept, slope > 1) == (0, True)
    assert [fit_line([(4, 8.0)]), fit_line([(1, 5.0), (2, 5.0)])[0]] == [(0.0, 2.0), 0.0]
    with pytest.raises(ValueError, match="a line needs a point"):
        fit_line([])
