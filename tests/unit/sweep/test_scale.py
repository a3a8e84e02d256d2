"""What the driver does for a point grows with its ranks, and with the workers, no faster."""

import time

import pytest
from fakes import make_plan_of

from raybench.sweep.scheduler import Assign, Attempt, Schedule, imagine_devices

FEW, MANY = 512, 4_096


def seconds(act, workers):
    """Of this thread's processor time, of two tries the least."""
    took = []
    for _ in range(2):
        began_s = time.thread_time()
        act(workers)
        took.append(time.thread_time() - began_s)
    return min(took)


def grows_at_most_in_proportion(act):
    """Eight times as many take eight times as long, and 64 times where each looks at each."""
    return seconds(act, MANY) < 3 * MANY / FEW * seconds(act, FEW)


def devices(workers):
    return imagine_devices(workers, workers // 8)


def decide(isolation, workers):
    """Start and end points of all sizes, one after the other; how many."""
    points = make_plan_of(1, 8, 64, 256, workers).points
    attempts = [Attempt(index=i, point=point, number=1) for i, point in enumerate(points)]
    schedule = Schedule(attempts, isolation)
    schedule.see(devices(workers), workers, frozenset(), 0)
    begun = 0
    while not schedule.is_done:
        decision = schedule.next()
        assert isinstance(decision, Assign)
        schedule.free(decision.attempt)
        begun += 1
    return begun


@pytest.mark.parametrize("isolation", ["cluster", "node", "device"])
def test_decisions_over_thousands_of_workers_grow_with_the_workers(isolation):
    assert decide(isolation, FEW) == 5
    assert grows_at_most_in_proportion(lambda workers: decide(isolation, workers))
