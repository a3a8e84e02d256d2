import time

from raybench.results.metrics import relate_to_step
from raybench.workloads.wall_clock import WALL_METRICS, time_by_wall_clock


def test_issue_and_completion_are_timed_separately():
    times = time_by_wall_clock(lambda: time.sleep(0.002), 3, wait=lambda: time.sleep(0.02))
    assert 2 <= times.unsynced_ms < 20
    assert times.synced_ms >= 22


def test_wall_times_become_shares_of_the_step():
    for metric in WALL_METRICS:
        assert relate_to_step(metric.over_step, 5.0, typical_ms=20.0, mean_ms=30.0) == 0.25
        assert relate_to_step(metric.over_step, 5.0, typical_ms=0.0, mean_ms=0.0) is None
