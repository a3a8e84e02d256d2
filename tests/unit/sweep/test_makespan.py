"""How long a plan takes, by the decisions that a sweep makes."""

import random

import pytest
from fakes import make_plan_of

from raybench.sweep.scheduler import imagine_devices, makespan_s

EIGHT = imagine_devices(8, 1)


def one_second(point):
    return 1.0


@pytest.mark.parametrize(
    ("isolation", "nodes", "expected_s"),
    [("cluster", 1, 6), ("node", 1, 6), ("device", 1, 3), ("node", 2, 4), ("device", 2, 3)],
)
def test_what_shares_no_device_runs_at_once(isolation, nodes, expected_s):
    plan = make_plan_of(8, 4, 4, 4, 2, 2)
    assert makespan_s(plan, one_second, imagine_devices(8, nodes), isolation) == expected_s


def test_what_does_not_fit_takes_no_time():
    plan = make_plan_of(16, 1)
    assert makespan_s(plan, one_second, EIGHT, "device") == 1.0


def at_least_s(work):
    """Return what no order on eight devices can beat, in s. work: devices and seconds of points.

    The largest of: the whole work over all devices; the longest point; the sum of the points of
    which no two have room beside each other. Graham 1969, doi:10.1137/0117039.
    """
    return max(
        sum(needed * seconds for needed, seconds in work) / 8,
        max(seconds for _, seconds in work),
        sum(seconds for needed, seconds in work if 2 * needed > 8),
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_mixed_plan_on_eight_devices_is_within_15_percent_of_the_lower_bound(seed):
    rng = random.Random(seed)
    plan = make_plan_of(*(rng.choice((1, 2, 4, 8)) for _ in range(80)))
    durations_s = {point.point_id: rng.lognormvariate(0, 0.6) for point in plan.points}

    def duration_s(point):
        return durations_s[point.point_id]

    lower_s = at_least_s([(one.world_size, duration_s(one)) for one in plan.points])
    assert makespan_s(plan, duration_s, EIGHT, "device") < 1.15 * lower_s
