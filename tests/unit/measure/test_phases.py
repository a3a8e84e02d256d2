"""Warm-up, samples and repeats, on a workload whose steps take what the test says."""

import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from builders import make_context

from raybench.hardware.devices import DeviceReading
from raybench.job.model import Measure
from raybench.measure import instruments, phases, profiling
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Breakdown, Profile
from raybench.workloads.base import Workload
from raybench.workloads.networks import Mlp
from raybench.workloads.uneven import Idle


class Paced(Workload):
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
def clock(monkeypatch):
    now_ns = [0]
    for module in (time, instruments):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: now_ns[0])
    return now_ns


def measure(build, context=None, **settings):
    """Measure without a breakdown, as the only rank."""
    settings = Measure(**{"breakdown": False, **settings})
    return phases.measure(build, context or make_context(), settings)


def measure_paced(clock, *, cold_s=1.0, step_s=0.01, **settings):
    workload = Paced(clock, cold_s, step_s)
    done = measure(lambda: workload, **settings)
    assert workload.closed
    return done


@pytest.mark.parametrize(
    ("settings", "pace_s", "warmup", "timed", "settled"),
    [
        ({"warmup": 10, "iterations": 50}, (1.0, 0.01), 10, 50, True),
        # The budget cuts the warm-up to half of it, and no iteration that the job asks for.
        ({"warmup": 10, "iterations": 50, "max_seconds": 8.0}, (1.0, 1.0), 1 + 4, 50, True),
        # A long cold iteration does not eat it.
        ({"warmup": 5, "iterations": 20, "max_seconds": 1.0}, (60.0, 0.01), 5, 20, None),
        # A quiet workload is warmed up for one second and timed for three.
        ({}, (1.0, 0.01), 1 + 100, 300, True),
        ({"seconds": 6.0}, (1.0, 0.01), 1 + 200, 600, True),
        ({"seconds": 0.1}, (1.0, 0.01), 20, 30, True),
        # Of a budget too small a quarter is warm-up, unless the job fixes it; short steps are
        # looped.
        ({"max_seconds": 1.0}, (1.0, 0.01), 1 + 25, 75, True),
        ({"warmup": 30}, (1.0, 0.01), 30, 300, True),
        ({}, (1.0, 0.0001), 1 + 1900, 3000, True),
        # Slow steps are timed thirty times, or as often as the budget allows.
        ({}, (1.0, 0.1), 20, 30, True),
        ({}, (1.0, 1.0), 1 + 10, 10, None),
        # A step longer than the budget is sampled five times, which tell nothing of settling.
        ({"max_seconds": 8.0}, (1.0, 1.0), 1 + 4, 5, None),
        ({"max_seconds": 2.0}, (1.0, 30.0), 2, 5, None),
    ],
)
def test_so_many_steps_warm_up_and_are_timed(clock, settings, pace_s, warmup, timed, settled):
    cold_s, step_s = pace_s
    done = measure_paced(clock, cold_s=cold_s, step_s=step_s, **settings)
    (repetition,) = done.repetitions
    assert (len(repetition.warmup.step_ns), len(repetition.timed.step_ns)) == (warmup, timed)
    assert repetition.settled is settled
    assert repetition.warmup.step_ns[0] == cold_s * 1e9
    assert set(repetition.timed.step_ns) == {round(step_s * 1e9)}


def test_each_repeat_frees_the_workload_before_it():
    class Cyclic(Workload):
        items_per_step = 1

        def __init__(self) -> None:
            alive.append(sum(ref() is not None for ref in built))
            self._itself = self
            built.append(weakref.ref(self))

        def step(self) -> None: ...

    built: list[weakref.ref[Cyclic]] = []
    alive: list[int] = []
    measure(Cyclic, warmup=1, iterations=1, repeats=3)
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("fails", [True, False])
def test_close_errors_are_raised_or_noted(fails):
    class Broken(Workload):
        items_per_step = 1

        def step(self) -> None:
            if fails:
                raise torch.OutOfMemoryError("too big")

        def close(self) -> None:
            raise ValueError("nothing to close")

    expected = (torch.OutOfMemoryError, "too big") if fails else (ValueError, "nothing to close")
    with pytest.raises(expected[0], match=expected[1]) as caught:
        measure(Broken, warmup=1, iterations=1)
    if fails:
        assert caught.value.__notes__ == ["close() then raised ValueError: nothing to close"]


class Sinking(Paced):
    """Steps that become shorter by 5 % over the first four seconds, and stay so."""

    def step(self) -> None:
        self._step_s = 0.01 * (1.05 - 0.05 * min(1.0, self._clock[0] / 4e9))
        super().step()


class Noisy(Paced):
    """Steps that differ by up to 30 % either way."""

    def __init__(self, clock: list[int]) -> None:
        super().__init__(clock, 0.01, 0.01)
        self._random = random.Random(1)

    def step(self) -> None:
        self._step_s = 0.01 * self._random.uniform(0.7, 1.3)
        super().step()


def test_noisy_steps_are_timed_no_longer(clock):
    (repetition,) = measure(lambda: Noisy(clock), warmup=10).repetitions
    assert sum(repetition.timed.step_ns) == pytest.approx(3e9, rel=0.05)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_warm_up_reports_how_many_steps_compiled(clock, steps):
    class Compiled(Paced):
        done = 0

        def step(self) -> None:
            self.done += 1
            if self.done <= steps:
                # What was compiled by this backend is the same in each process.
                torch._dynamo.reset()
                torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
            super().step()

    done = measure(lambda: Compiled(clock, 0.01, 0.01), warmup=4, iterations=2)
    assert done.repetitions[0].compiling_steps == steps


def test_drifting_samples_become_warm_up_and_timing_restarts(clock, monkeypatch):
    class OneCallABlock(phases.MemoryUse):
        @contextmanager
        def counting(self) -> Iterator[None]:
            self.device_allocs = self.retries = 1 + (self.retries or 0)
            yield

    monkeypatch.setattr(phases, "MemoryUse", OneCallABlock)
    done = measure(lambda: Sinking(clock, 0.01, 0.01), repeats=2)
    repetition = done.repetitions[0]
    assert done.device_allocs == done.alloc_retries == len(done.timed_at_ns)
    assert len(repetition.warmup.step_ns) > 250
    assert max(repetition.warmup.step_ns) > 10_400_000
    assert set(repetition.timed.step_ns) == {10_000_000}
    assert repetition.timed.start_ns[0] > repetition.warmup.start_ns[-1]


def test_timed_blocks_lead_in_and_loop_short_steps(clock):
    (repetition,) = measure_paced(clock, cold_s=0.01, warmup=10, iterations=50).repetitions
    warm_end_ns = repetition.warmup.start_ns[-1] + repetition.warmup.step_ns[-1]
    assert repetition.timed.start_ns[0] - warm_end_ns == 20_000_000
    assert clock[0] == (10 + 2 + 50) * 10_000_000
    # Steps below a millisecond are timed in loops.
    (repetition,) = measure_paced(clock, step_s=0.0003, warmup=10, iterations=20).repetitions
    assert repetition.inner_iterations == 4
    assert set(repetition.timed.step_ns) == {300_000}
    assert repetition.timed.start_ns[1] - repetition.timed.start_ns[0] == 1_200_000
    assert set(repetition.warmup.step_ns[1:]) == {300_000}


class Sized(Workload):
    """Tells its sizes, writes down what is called, and may compute something wrong."""

    items_per_step = 7
    message_bytes = 4096
    busbw_factor = 1.5
    memory_bytes = 100
    flops_per_step = 2e9

    def __init__(self, calls: list[str], is_wrong: bool = False) -> None:
        self._calls, self._is_wrong = calls, is_wrong

    def step(self) -> None:
        if self._calls[-1:] != ["step"]:
            self._calls.append("step")

    def check(self) -> None:
        self._calls.append("check")
        if self._is_wrong:
            raise ValueError("the ranks sum to 1, not 3")

    def close(self) -> None:
        self._calls.append("close")


def test_declared_properties_of_a_step_are_passed_on():
    class Shared(Sized):
        shares_work = True

    part = measure(lambda: Shared([]), make_context(1, 3), warmup=1, iterations=1)
    assert part.items_per_step == pytest.approx(7 / 3)
    done = measure(lambda: Sized([]), warmup=1, iterations=1)
    for name in ("items_per_step", "message_bytes", "busbw_factor", "memory_bytes"):
        assert getattr(done, name) == getattr(Sized, name)
    assert done.flops_per_step == 2e9
    assert done.peak_mem_allocated_bytes is None
    assert done.energy_j is None


def test_workloads_are_checked_after_warm_up_and_timing():
    calls: list[str] = []
    measure(lambda: Sized(calls), warmup=1, iterations=1, repeats=2)
    assert calls == ["step", "check", "step", "check", "close"] * 2
    with pytest.raises(ValueError, match="not 3"):
        measure(lambda: Sized([], is_wrong=True), warmup=1, iterations=1)


def test_breakdown_and_profile_come_last_and_once(monkeypatch):
    calls: list[str] = []
    breakdown, profile = Breakdown(device_ms=1.0), Profile(trace=b"x")

    def broken_down(workload, timer, context, extent):
        calls.append(f"breakdown of {extent.samples}")
        return breakdown

    def profiled(workload, context, steps):
        calls.append(f"profile of {steps}")
        return profile

    monkeypatch.setattr(phases, "break_down", broken_down)
    monkeypatch.setattr(profiling, "profile", profiled)
    settings = Measure(warmup=1, iterations=1, repeats=2)
    done = phases.measure(lambda: Sized(calls), make_context(), settings, profile=True)
    once = ["step", "check", "step", "check"]
    assert calls == [*once, "close", *once, "step", "breakdown of 10", "profile of 10", "close"]
    assert (done.breakdown, done.profile) == (breakdown, profile)


class Limited:
    """Counters of a device at 100 W whose clocks are limited for `limited_s` of its seconds."""

    def __init__(self, clock: list[int], limited_s: Callable[[float], dict[str, float]]) -> None:
        self._clock, self._limited_s = clock, limited_s

    def read(self, *, with_energy: bool = True) -> DeviceReading:
        time_s = self._clock[0] / 1e9
        energy_j = 100 * time_s if with_energy else None
        return DeviceReading(time_s=time_s, energy_j=energy_j, limited_s=self._limited_s(time_s))

    def temperature_c(self) -> float:
        return 88.0


def by_power(time_s: float) -> dict[str, float]:
    """From the third second on."""
    return {"power": max(0.0, time_s - 3), "thermal": 0.0}


def test_throttled_steps_are_marked_and_timed_energy_counted(clock, monkeypatch):
    monkeypatch.setattr(phases, "Counters", lambda device: Limited(clock, by_power))
    monkeypatch.setattr(phases, "wait_until_unlimited", lambda *_: None)
    # The cold step takes a second, so the first timed block of 5 s begins before the throttling.
    done = measure_paced(clock, step_s=1.0, warmup=1, iterations=8)
    (repetition,) = done.repetitions
    assert repetition.timed.throttled == (False,) + (True,) * 7
    assert repetition.warmup.throttled == ()
    assert (done.throttle_reasons, done.temperature_c) == (("power",), 88.0)
    assert done.energy_j == pytest.approx(800.0)
    assert done.sm_clocks_mhz == ()  # another process reads them
    monkeypatch.setattr(phases, "Counters", lambda device: Limited(clock, lambda time_s: {}))
    assert measure_paced(clock, step_s=1.0, iterations=8).repetitions[0].timed.throttled == ()


@pytest.mark.parametrize("step_s", [0.0005, 0.005, 0.02, 0.24])
def test_energy_excludes_lead_in_and_pauses(clock, monkeypatch, step_s):
    gather = phases.gather_durations

    def gather_after_a_pause(step_ns, device):
        clock[0] += 50_000_000
        return gather(step_ns, device)

    monkeypatch.setattr(phases, "gather_durations", gather_after_a_pause)
    monkeypatch.setattr(phases, "Counters", lambda device: Limited(clock, lambda time_s: {}))
    monkeypatch.setattr(phases, "wait_until_unlimited", lambda *_: None)
    done = measure_paced(clock, step_s=step_s)
    steps = len(done.step_ns) * done.repetitions[0].inner_iterations
    assert done.energy_j / steps == pytest.approx(100 * step_s, rel=0.001)


def test_a_rank_without_share_counts_idle_power(clock, monkeypatch):
    def of_both_ranks(step_ns, device):
        return [[50_000_000] * len(step_ns), list(step_ns)]

    def sleep(seconds):
        clock[0] += round(seconds * 1e9)

    monkeypatch.setattr(phases, "gather_durations", of_both_ranks)
    monkeypatch.setattr(phases, "Counters", lambda device: Limited(clock, lambda time_s: {}))
    monkeypatch.setattr(phases, "wait_until_unlimited", lambda *_: None)
    monkeypatch.setattr(phases.time, "sleep", sleep)
    done = measure(Idle)
    assert done.energy_j / len(done.step_ns) == pytest.approx(100 * 0.05)


def test_steps_heat_the_device_before_the_warm_up(clock, monkeypatch):
    monkeypatch.setattr(phases.time, "monotonic", lambda: clock[0] / 1e9)
    workload = Paced(clock, 1.0, 0.05)
    settings = {"warmup": 3, "iterations": 4}
    done = measure(lambda: workload, heat_s=30.0, repeats=2, **settings)
    for repetition in done.repetitions:
        assert len(repetition.warmup.step_ns) == 3
    assert done.heated_s == pytest.approx(30.0, abs=0.1)
    # Of each step one, and the lead-in of two blocks.
    assert clock[0] / 1e9 == pytest.approx(1.0 + 30.0 + 0.05 * (5 + 8 + 2 * 2 * 1), abs=0.3)
    assert measure_paced(clock, **settings).heated_s is None


def test_heating_does_not_prolong_the_warm_up(clock, monkeypatch):
    # The clocks are limited while the device is heated, and not later.
    by_heat = lambda time_s: {"thermal_sw": min(time_s, 31.0)}  # noqa: E731
    monkeypatch.setattr(phases, "Counters", lambda device: Limited(clock, by_heat))
    monkeypatch.setattr(phases, "wait_until_unlimited", lambda *_: None)
    monkeypatch.setattr(phases.time, "monotonic", lambda: clock[0] / 1e9)
    settings = {"warmup": {"min": 2, "max": 100}, "seconds": 0.03, "max_seconds": 20.0}
    (repetition,) = measure_paced(clock, heat_s=30.0, **settings).repetitions
    assert len(repetition.warmup.step_ns) == 2


def test_timed_blocks_have_times_of_the_shared_clock(clock):
    begin_ns = time.monotonic_ns()
    done = measure_paced(clock, step_s=1.0, warmup=1, iterations=8)
    # The first block is one step, to learn how long it takes; the others are 5 s at most.
    assert len(done.timed_at_ns) == 3
    times = [at for span in done.timed_at_ns for at in span]
    assert times == sorted(times)
    assert begin_ns <= times[0]
    assert times[-1] <= time.monotonic_ns()


@pytest.mark.parametrize(("hot_s", "warm_s"), [(0.0, 1.0), (4.0, 4.0), (100.0, 10.0)])
def test_thermal_throttling_prolongs_warm_up_within_limits(clock, monkeypatch, hot_s, warm_s):
    by_heat = lambda time_s: {"thermal_sw": min(time_s, 1.0 + hot_s)}  # noqa: E731
    monkeypatch.setattr(phases, "Counters", lambda device: Limited(clock, by_heat))
    monkeypatch.setattr(phases, "wait_until_unlimited", lambda *_: None)
    (repetition,) = measure_paced(clock, max_seconds=20.0, seconds=3.0).repetitions
    assert sum(repetition.warmup.step_ns[1:]) / 1e9 == pytest.approx(warm_s, abs=0.5)
    assert any(repetition.timed.throttled) == (hot_s > 10)


def test_peak_memory_excludes_the_warm_up(clock, monkeypatch):
    done: list[str] = []

    class Watched(phases.MemoryUse):
        def restart(self) -> None:
            done.append("forget")
            super().restart()

    class Stepping(Paced):
        def step(self) -> None:
            done.append("step")
            super().step()

    monkeypatch.setattr(phases, "MemoryUse", Watched)
    measure(lambda: Stepping(clock, 0.1, 0.1), warmup=3, iterations=2)
    assert done[: done.index("forget")] == ["step"] * 3
    assert "step" in done[done.index("forget") :]


def test_set_up_includes_waiting_for_clocks_after_build(clock, monkeypatch):
    done: list[str] = []
    rested = DeviceReading(time_s=-9.0)
    monkeypatch.setattr(phases, "Counters", lambda device: Limited(clock, by_power))

    def wait(counters: Limited, since: DeviceReading, at_most_s: float) -> None:
        assert since == rested
        done.append("waited")
        time.sleep(0.02)

    monkeypatch.setattr(phases, "wait_until_unlimited", wait)

    def build() -> Paced:
        done.append("built")
        return Paced(clock, 0.1, 0.1)

    settings = Measure(warmup=1, iterations=1, breakdown=False)
    began_s = time.perf_counter() - 100
    start = phases.PointStart(began_s=began_s, unlimited_since=rested)
    found = phases.measure(build, make_context(), settings, start=start)
    assert done == ["built", "waited"]
    assert found.setup_s >= 100.02


class Comparing(Paced):
    """Its gradients are off by half; it notes after how many steps it was asked."""

    asked_after = 0

    def __init__(self, clock: list[int]) -> None:
        super().__init__(clock, 0.01, 0.01)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        super().step()

    def gradient_error(self) -> float:
        Comparing.asked_after = self.steps
        return float("nan")


ASKED = {"warmup": 2, "iterations": 5, "check_gradients": True}


def test_gradients_are_compared_after_timing_if_requested(clock):
    found = measure(lambda: Comparing(clock), **ASKED)
    assert str(found.gradient_error) == "nan"
    assert Comparing.asked_after >= 7
    assert [doubt.kind for doubt in found.doubts] == [DoubtKind.OTHER_GRADIENTS]
    silent = {**ASKED, "check_gradients": False}
    assert measure(lambda: Comparing(clock), **silent).gradient_error is None
    cannot = measure_paced(clock, **ASKED)
    assert cannot.gradient_error is None
    told = Doubt(kind=DoubtKind.NOT_COMPARED_GRADIENTS, subject="Paced")
    assert cannot.doubts == (told,)
    # A model alone has the gradients of one process.
    found = measure(lambda: Mlp(make_context(), hidden=8, layers=2), **ASKED)
    assert found.gradient_error < 1e-6
    assert found.doubts == ()
