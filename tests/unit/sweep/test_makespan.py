"""How long a plan takes, by the decisions that a sweep makes."""

import random
import time

import pytest
from fakes import make_cluster, make_measurement, make_point
from hypothesis import given
from hypothesis import strategies as st
from lower_bound import at_least_s

from raybench.job.model import Measure
from raybench.job.plan import Plan
from raybench.sweep.loop import SweepSettings, sweep
from raybench.sweep.makespan import imagine_devices, makespan_s
from raybench.sweep.rounds import Rounds
from raybench.sweep.scheduler import workers_needed

EIGHT = imagine_devices(8, 1)


def mixed(count, seed):
    """Points of several world sizes, and durations that their schedule does not know."""
    rng = random.Random(seed)
    sized = [rng.choice((1, 2, 4, 8)) for _ in range(count)]
    points = tuple(make_point(world_size=n, batch_size=i + 1) for i, n in enumerate(sized))
    durations_s = {point.point_id: rng.lognormvariate(0, 0.6) for point in points}
    return Plan(points=points), lambda point: durations_s[point.point_id]


def one_second(point):
    return 1.0


@pytest.mark.parametrize(
    ("isolation", "nodes", "expected_s"),
    [("cluster", 1, 6), ("node", 1, 6), ("device", 1, 3), ("node", 2, 4), ("device", 2, 3)],
)
def test_what_shares_no_device_runs_at_once(isolation, nodes, expected_s):
    sizes = (8, 4, 4, 4, 2, 2)
    points = tuple(make_point(world_size=n, batch_size=i + 1) for i, n in enumerate(sizes))
    plan, devices = Plan(points=points), imagine_devices(8, nodes)
    assert makespan_s(plan, one_second, devices, isolation) == expected_s


def test_what_does_not_fit_takes_no_time():
    plan = Plan(points=(make_point(world_size=16), make_point()))
    assert makespan_s(plan, one_second, EIGHT, "device") == 1.0
    assert at_least_s(plan, one_second, 8, 1, "device") == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_a_mixed_plan_on_eight_devices_is_within_15_percent_of_the_lower_bound(seed):
    plan, duration_s = mixed(80, seed)
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


def test_a_real_sweep_of_sleeping_points_takes_what_the_simulation_says():
    plan, duration_s = mixed(40, 3)

    def script(point, rank):
        if rank == 0:
            time.sleep(duration_s(point) / 20)
        return make_measurement(rank)

    cluster = make_cluster(list(EIGHT), script)
    cluster.start(workers_needed(plan, 8, "device"), "pack")
    settings = SweepSettings(
        measure=Measure(), strategy="pack", stop_on_error=False, isolation="device"
    )
    began_s = time.perf_counter()
    list(sweep(Rounds(plan=plan), settings, cluster, lambda *_: None))
    taken_s = 20 * (time.perf_counter() - began_s)
    simulated_s = makespan_s(plan, duration_s, EIGHT, "device")
    # One after the other they would take 1.77 times as long.
    assert simulated_s * 0.9 < taken_s < simulated_s * 1.6


@pytest.mark.parametrize("isolation", ["cluster", "node", "device"])
def test_a_decision_over_eight_thousand_devices_takes_less_than_a_millisecond(isolation):
    plan, _ = mixed(2000, 0)
    devices = imagine_devices(8000, 1000)
    began_s = time.process_time()
    makespan_s(plan, one_second, devices, isolation)
    assert (time.process_time() - began_s) / len(plan.points) < 0.001
