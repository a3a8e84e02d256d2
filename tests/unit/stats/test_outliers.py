"""Which devices and ranks are slow: fleets, trials on H200s and noise with a known answer."""

import numpy as np
import pytest

from raybench.stats.outliers import (
    compare_few,
    compare_peers,
    find_slow,
    find_straggler,
    host_error_ms,
    late_in_turn_ms,
    slowest_and_other,
    stands_out,
)

FLOOR = 0.01


def test_late_turns_need_two_ranks_of_equal_steps():
    first, second = [[1.0, 3.0], [1.0, 3.0]], [[3.0, 1.0, 3.0, 1.0]]
    assert late_in_turn_ms([first, second]) == 1.0
    assert late_in_turn_ms([first]) is None
    assert late_in_turn_ms([first, [[3.0, 1.0]]]) is None


def fleet(levels, passes=3, noise=0.005):
    """Rates of devices of these levels."""
    rng = np.random.default_rng(len(levels))
    return 700 * np.array(levels) * (1 + noise * rng.standard_normal((passes, len(levels))))


def slow(values, *, is_time=False):
    found = find_slow([compare_peers(values, is_time=is_time, floor=FLOOR)])[0]
    return [int(place) for place in np.flatnonzero(found)]


def test_slow_in_two_of_three_passes_is_accepted():
    values = fleet([1.0] * 8)
    values[:2, 4] *= 0.8
    assert slow(values) == []
    # Nor of two devices one that is not slow in one pass.
    values = np.array([[1.0, 2.0], [1.0, 1.05], [1.0, 2.0]])
    assert not compare_few(values, is_time=True, floor=FLOOR)[1].any()


@pytest.mark.parametrize(
    "levels",
    [list(1 + 0.03 * np.random.default_rng(1).standard_normal(200)), [1.0] * 7 + [1.3]],
    ids=["a spread that the model has", "one that is faster"],
)
def test_what_healthy_devices_do_makes_none_slow(levels):
    assert slow(fleet(levels)) == []


@pytest.mark.parametrize("slower", [2, 4, 6])
def test_divided_fleet_names_slower_group(slower):
    values = fleet([0.8] * slower + [1.0] * (8 - slower))
    assert slow(values) == list(range(slower))
    assert compare_peers(values, is_time=False, floor=FLOOR).is_divided


def test_missing_values_are_ignored():
    values = fleet([1.0] * 8)
    values[:, 2] = np.nan
    values[0, 3] = np.nan
    values[:, 6] *= 0.9
    values[:, 1] = 0  # infinitely slow
    peers = compare_peers(values, is_time=False, floor=FLOOR)
    assert np.isnan(peers.ratios[2])
    assert peers.ratios[1] == np.inf
    assert slow(values) == [1, 6]


def test_more_tests_demand_rarer_excess():
    """4.9 standard deviations: rare enough for 1,000 values, not for 100,000."""
    rng = np.random.default_rng(0)
    levels = 1 + 0.013 * rng.standard_normal((100, 1, 1000))
    levels[0, 0, 0] = 1 - 4.9 * 0.013
    thrice = [np.repeat(each, 3, axis=0) for each in levels]
    tests = [compare_peers(each, is_time=False, floor=FLOOR) for each in thrice]
    assert tests[0].is_beyond[0]
    assert find_slow(tests[:1])[0][0]
    assert not find_slow(tests)[0][0]


def test_no_values_give_no_slow_device():
    nothing = np.full((3, 4), np.nan)
    peers = compare_peers(nothing, is_time=True, floor=FLOOR)
    ratios, is_slow = compare_few(nothing, is_time=True, floor=FLOOR)
    assert np.isnan([*peers.ratios, *ratios]).all()
    assert not np.any([is_slow, *find_slow([peers])])
    assert find_slow([]) == []


def steps_of(level_ms, scatter, seed):
    """Two blocks of five steps with normal noise."""
    rng = np.random.default_rng(seed)
    factors = [1 + scatter * rng.standard_normal(5) for _ in range(2)]
    return [[float(ms) for ms in level_ms * factor] for factor in factors]


# One rank of two delayed on H200s: the step, the local steps of the delayed and the other rank, in
# ms, and whether it is slow.
AUDIT = {
    "device 5": (11.51, 11.03, 6.05, True),
    "host 5": (8.50, 8.55, 6.05, True),
    "device 2": (8.49, 8.03, 6.05, True),
    "host 2": (6.49, 6.03, 6.05, False),
    "long, device 5": (68.0, 66.61, 62.0, True),
    "long, host 5": (63.95, 62.03, 62.0, False),
    "long, device 2": (65.48, 63.60, 62.0, True),
    "long, host 2": (63.99, 62.0, 62.0, False),
    "clean bf16 512": (5.925, 4.88, 4.88, False),
    "clean bf16 1024": (6.22, 5.36, 5.35, False),
    "clean tf32 512": (6.41, 5.40, 5.38, False),
}


@pytest.mark.parametrize("delayed_rank", [0, 1])
@pytest.mark.parametrize(
    ("step_ms", "delayed_ms", "other_ms", "is_slow"), AUDIT.values(), ids=AUDIT
)
def test_the_trials_of_the_audit_are_marked_right(
    step_ms, delayed_ms, other_ms, is_slow, delayed_rank
):
    ranks = [steps_of(other_ms, 0.003, 1), steps_of(other_ms, 0.003, 2)]
    ranks[delayed_rank] = steps_of(delayed_ms, 0.003, 3)
    found = find_straggler(ranks)
    assert stands_out(found.excess_ms, found.error_ms, step_ms) is is_slow
    if is_slow:
        assert found.rank == delayed_rank
        assert found.excess_ms == pytest.approx(delayed_ms - other_ms, abs=0.005 * delayed_ms)


@pytest.mark.parametrize(("count", "trials"), [(2, 600), (4, 300), (64, 100)])
@pytest.mark.parametrize("scatter", [0.01, 0.03, 0.08])
def test_equal_ranks_rarely_have_a_straggler(scatter, count, trials):
    marked = 0
    for trial in range(trials):
        found = find_straggler([steps_of(10.0, scatter, count * trial + n) for n in range(count)])
        marked += stands_out(found.excess_ms, found.error_ms, 10.0)
    assert marked <= 0.01 * trials


def of_hosts(rng, late_ms):
    """Ten steps of 10 ms on each rank, whose host is 3 % slower or faster all the while."""
    paces = 10 * (1 + 0.03 * rng.standard_normal(len(late_ms))) + late_ms
    return [[[pace] * 5, [pace] * 5] for pace in paces.tolist()]


@pytest.mark.parametrize("count", [6, 16, 64])
def test_chance_explains_slowest_of_many_hosts(count):
    rng = np.random.default_rng(3)
    marked = 0
    for _ in range(300):
        ranks = of_hosts(rng, [0.0] * count)
        found = find_straggler(ranks)
        marked += stands_out(found.excess_ms, host_error_ms(ranks, []), 10.0)
    assert marked <= 9


@pytest.mark.parametrize("slow", [1, 2])
def test_late_host_stands_out(slow):
    ranks = of_hosts(np.random.default_rng(4), [4.0] * slow + [0.0] * (16 - slow))
    found = find_straggler(ranks)
    assert found.rank < slow
    assert stands_out(found.excess_ms, host_error_ms(ranks, []), 10.0)


def test_host_error_covers_wandering_only():
    ranks = of_hosts(np.random.default_rng(5), [0.0, 0.5])
    noise = 0.1 * np.random.default_rng(6).standard_normal(200)
    pace = np.repeat([10.0, 10.8, 10.1, 10.9, 10.2, 10.7, 10.0, 10.6], 25)
    assert host_error_ms(ranks, [(10 + noise).tolist()]) < 0.1
    assert host_error_ms(ranks, [(pace + noise).tolist()]) > 0.3


def test_thirty_timed_steps_show_that_hosts_wander():
    ranks = of_hosts(np.random.default_rng(5), [0.0, 0.5])
    noise = 0.1 * np.random.default_rng(6).standard_normal(30)
    pace = np.repeat([10.0, 10.8, 10.1, 10.9, 10.2, 10.7], 5)
    assert host_error_ms(ranks, [(pace + noise).tolist()]) > 0.3


def test_momentarily_late_rank_is_not_slow():
    late = [[12.0] * 12, [10.0] * 10]
    found = find_straggler([late, [[10.0] * 12, [10.0] * 10]])
    assert found.excess_ms == pytest.approx(2.0)
    assert not stands_out(found.excess_ms, found.error_ms, 10.0)
    assert find_straggler([[[10.0]], [[11.0]]]) is None, "one step tells nothing of its error"


def test_slowest_is_compared_with_lower_median():
    assert slowest_and_other([10.0, 13.0, 11.0, 10.5]) == (1, 3)
    assert slowest_and_other([10.0, 13.0, 11.0]) == (1, 0)
    assert slowest_and_other([5.0, 5.0]) == (0, 1)
    with pytest.raises(ValueError, match="no others"):
        slowest_and_other([5.0])
