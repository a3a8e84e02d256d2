"""How long a plan takes, by the decisions that a sweep makes."""

import pytest
from fakes import make_plan_of

from raybench.sweep.scheduler import imagine_devices, makespan_s


def one_second(point):
    return 1.0


@pytest.mark.parametrize(
    ("isolation", "nodes", "expected_s"),
    [("cluster", 1, 6), ("node", 1, 6), ("device", 1, 3), ("node", 2, 4), ("device", 2, 3)],
)
def test_what_shares_no_device_runs_at_once(isolation, nodes, expected_s):
    plan = make_plan_of(8, 4, 4, 4, 2, 2)
    assert makespan_s(plan, one_second, imagine_devices(8, nodes), isolation) == expected_s
