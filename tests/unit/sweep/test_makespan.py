"""How long a plan takes, by the decisions that a sweep makes."""

import random

import pytest
from fakes import make_plan_of, make_point
from hypothesis import given
from hypothesis import strategies as st
from lower_bound import at_least_s

from raybench.job.plan import Plan
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
    assert at_least_s(plan, one_second, 8, 1, "device") == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_a_mixed_plan_on_eight_devices_is_within_15_percent_of_the_lower_bound(seed):
    rng = random.Random(seed)
    plan = make_plan_of(*(rng.choice((1, 2, 4, 8)) for _ in range(80)))
    durations_s = {point.point_id: rng.lognormvariate(0, 0.6) for point in plan.points}

    def duration_s(point):
        return durations_s[point.point_id]

    lower_s = at_least_s(plan, duration_s, 8, 1, "device")
    assert makespan_s(plan, duration_s, EIGHT, "device") < 1.15 * lower_s


@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=20),
    nodes=st.sampled_from([1, 2, 4]),
    isolation=st.sampled_from(["cluster", "node", "device"]),
    strategy=st.sampled_from(["pack", "spread", "rail"]),
    seed=st.integers(0, 99),
)
def test_no_order_beats_the_lower_bound(sizes, nodes, isolation, strategy, seed):
    rng = random.Random(seed)
    points = tuple(
        make_point(world_size=n, batch_size=i + 1, strategy=strategy) for i, n in enumerate(sizes)
    )
    durations_s = {point.point_id: rng.uniform(0.1, 3) for point in points}

    def duration_s(point):
        return durations_s[point.point_id]

    taken_s = makespan_s(Plan(points=points), duration_s, imagine_devices(8, nodes), isolation)
    least_s = at_least_s(Plan(points=points), duration_s, 8, nodes, isolation)
    assert taken_s >= least_s - 1e-9
