"""Iterations on the host's clock, with a clock that the test winds."""

import gc

import pytest
import torch

from raybench.measure.instruments import (
    Timer,
    join_blocks,
    loop_step,
    no_garbage_collection,
    per_step,
)
from raybench.records import Samples
from raybench.workloads.base import PartTimes

CPU = torch.device("cpu")


class Clock:
    """perf_counter_ns, for steps that take what the test says."""

    now_ns = 1_000

    def spend(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def clock(monkeypatch):
    wound = Clock()
    for name in ("time.perf_counter_ns", "raybench.measure.instruments.perf_counter_ns"):
        monkeypatch.setattr(name, lambda: wound.now_ns)
    return wound


def test_each_iteration_has_its_own_duration_and_start(clock):
    durations = iter([5, 7, 11])
    timer = Timer(CPU)
    clock.spend(100)
    samples = timer.time_block(lambda: clock.spend(next(durations)), 3, PartTimes())
    assert samples.step_ns == (5, 7, 11)
    assert samples.start_ns == (100, 105, 112)
    assert samples.host_ns == samples.step_ns
    # A second block goes on from the same origin.
    clock.spend(1_000)
    assert timer.time_block(lambda: clock.spend(10), 1, PartTimes()).start_ns == (1_123,)


def test_untimed_steps_lead_into_a_block(clock):
    durations = iter([90, 80, 7, 11])
    parts = PartTimes()

    def step() -> None:
        with parts.part("data"):
            clock.spend(next(durations))

    samples = Timer(CPU).time_block(step, 2, parts, lead_in=2)
    assert samples.step_ns == (7, 11)
    assert samples.start_ns == (170, 177)
    assert samples.part_ns == {"data": (7, 11)}


def test_the_collector_is_off_inside_and_on_afterwards_even_after_an_error():
    def block() -> None:
        with no_garbage_collection():
            with no_garbage_collection():
                pass
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert gc.isenabled()


def test_a_loop_of_steps_is_one_sample_and_its_mean_is_kept(clock):
    parts = PartTimes()

    def step() -> None:
        with parts.part("data"):
            clock.spend(3)
        clock.spend(7)

    samples = per_step(Timer(CPU).time_block(loop_step(step, 4), 2, parts), 4)
    assert samples.step_ns == (10, 10)
    assert samples.host_ns == (10, 10)
    assert samples.part_ns == {"data": (3, 3)}
    assert samples.start_ns == (0, 40)
    assert loop_step(step, 1) is step


def test_blocks_join_to_one_row_of_iterations():
    first = Samples(start_ns=(0,), step_ns=(5,), host_ns=(4,), part_ns={"data": (1,)})
    second = Samples(start_ns=(9, 12), step_ns=(3, 3), host_ns=(2, 2))
    row = join_blocks([first, second])
    assert row.start_ns == (0, 9, 12)
    assert row.step_ns == (5, 3, 3)
    assert row.host_ns == (4, 2, 2)
    assert row.part_ns == {"data": (1, 0, 0)}
    assert row.throttled == ()
    assert join_blocks([]) == Samples()
    # Throttling is known of a phase when it is of all its blocks.
    marked = Samples(start_ns=(0,), step_ns=(5,), host_ns=(4,), throttled=(True,))
    assert join_blocks([marked, marked]).throttled == (True, True)
    assert join_blocks([marked, first]).throttled == ()
