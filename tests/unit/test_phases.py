"""Warm-up, samples and repeats, on a workload whose steps take what the test says."""

from __future__ import annotations

import weakref

import pytest
import torch

from raybench.job import Measure
from raybench.measure import phases
from raybench.plan import Precision
from raybench.workloads.base import Context


class Paced:
    """The first step takes `cold_s`, the others `step_s`, on a clock of the test's own."""

    items_per_step = 4

    def __init__(self, clock: list[int], cold_s: float, step_s: float) -> None:
        self._clock, self._durations_s = clock, [cold_s]
        self._step_s = step_s
        self.closed = False

    def step(self) -> None:
        duration_s = self._durations_s.pop() if self._durations_s else self._step_s
        self._clock[0] += round(duration_s * 1e9)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now_ns = [0]
    monkeypatch.setattr("time.perf_counter_ns", lambda: now_ns[0])
    return now_ns


def lone_context() -> Context:
    return Context(
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        local_rank=0,
        batch_size=4,
        precision=Precision.FP32,
    )


def measured(clock, settings, *, cold_s=1.0, step_s=0.01):
    workloads = []

    def build() -> Paced:
        workloads.append(Paced(clock, cold_s, step_s))
        return workloads[-1]

    done = phases.measure(build, lone_context(), settings, lambda: None)
    assert all(workload.closed for workload in workloads)
    return done


def test_the_counts_are_those_asked_for_when_the_budget_allows(clock):
    done = measured(clock, Measure(warmup=10, iterations=50, max_seconds=20.0))
    (repetition,) = done.repetitions
    assert len(repetition.warmup.step_ns) == 10
    assert len(repetition.timed.step_ns) == 50
    assert done.items_per_step == 4


def test_the_cold_iteration_is_in_the_warm_up_and_not_in_the_samples(clock):
    done = measured(clock, Measure(warmup=1, iterations=5), cold_s=3.0)
    (repetition,) = done.repetitions
    assert repetition.warmup.step_ns == (3_000_000_000,)
    assert set(repetition.timed.step_ns) == {10_000_000}


def test_slow_steps_are_cut_to_the_budget_and_warm_up_leaves_half_of_it(clock):
    done = measured(clock, Measure(warmup=10, iterations=50, max_seconds=8.0), step_s=1.0)
    (repetition,) = done.repetitions
    assert len(repetition.warmup.step_ns) == 1 + 4
    assert len(repetition.timed.step_ns) == 4


def test_a_step_longer_than_the_budget_is_still_sampled_once(clock):
    done = measured(clock, Measure(warmup=5, iterations=50, max_seconds=2.0), step_s=30.0)
    (repetition,) = done.repetitions
    assert len(repetition.timed.step_ns) == 1


def test_a_long_cold_iteration_does_not_eat_the_budget(clock):
    done = measured(clock, Measure(warmup=5, iterations=20, max_seconds=1.0), cold_s=60.0)
    (repetition,) = done.repetitions
    assert len(repetition.timed.step_ns) == 20


def test_each_repeat_is_a_new_workload_with_its_own_warm_up(clock):
    done = measured(clock, Measure(warmup=2, iterations=3, repeats=3), cold_s=0.5)
    assert len(done.repetitions) == 3
    for repetition in done.repetitions:
        assert repetition.warmup.step_ns[0] == 500_000_000
        assert len(repetition.timed.step_ns) == 3


def test_a_repeat_is_built_when_the_one_before_is_gone_even_without_a_close():
    class Cyclic:
        items_per_step = 1

        def __init__(self) -> None:
            alive.append(sum(ref() is not None for ref in built))
            self._itself = self
            built.append(weakref.ref(self))

        def step(self) -> None: ...

    built: list[weakref.ref[Cyclic]] = []
    alive: list[int] = []
    phases.measure(Cyclic, lone_context(), Measure(iterations=1, repeats=3), lambda: None)
    assert alive == [0, 0, 0]


def test_an_error_of_close_is_a_note_on_the_error_before_it():
    class Broken:
        items_per_step = 1

        def step(self) -> None:
            raise torch.OutOfMemoryError("too big")

        def close(self) -> None:
            raise ValueError("nothing to close")

    with pytest.raises(torch.OutOfMemoryError, match="too big") as caught:
        phases.measure(Broken, lone_context(), Measure(), lambda: None)
    assert caught.value.__notes__ == ["close() then raised ValueError: nothing to close"]


def test_an_error_of_close_alone_is_raised():
    class Broken:
        items_per_step = 1

        def step(self) -> None: ...

        def close(self) -> None:
            raise ValueError("cannot close")

    with pytest.raises(ValueError, match="cannot close"):
        phases.measure(Broken, lone_context(), Measure(iterations=1), lambda: None)
