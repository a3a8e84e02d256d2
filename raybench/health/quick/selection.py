"""Which tests of the suite a quick check runs, and how long each is measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raybench.health.suite import Fleet, HealthTest, probes
from raybench.job.model import Measure, Span
from raybench.job.point import Point
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import Stage

# Names of tests, in the order in which they run. The first tests wake up the clocks of a GPU.
# The small products of `same bits` need all multiprocessors at once, so they also find missing
# ones; the large products need power and cooling.
QUICK_TESTS: Mapping[DeviceKind, Sequence[str]] = {
    "cuda": (
        "same bits fp32 2048",
        "same bits bf16 2048",
        "memory 1000 MB",
        "gemm fp32 8192",
        "gemm tf32 8192",
        "gemm fp16 8192",
        "gemm bf16 8192",
        "h2d alone",
        "d2h alone",
        "all_reduce 1 GiB",
    ),
    "cpu": ("gemm fp32 512", "memory 16 MB", "same bits fp32 256", "all_reduce 1 MiB"),
}
_STAGES: tuple[Stage, ...] = ("alone", "host-links", "together")
# Seconds of steps before the warm-up: an idle GPU raises its clocks in that time.
_HEAT_S: Mapping[DeviceKind, float] = {"cuda": 0.15, "cpu": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickTest:
    """A test of the suite with its point, for devices that run it by themselves or together."""

    test: HealthTest
    point: Point

    @property
    def is_by_turns(self) -> bool:
        """Whether one device after another runs it, because devices share what it measures."""
        return self.test.stage == "host-links"

    @property
    def is_together(self) -> bool:
        """Whether it is one collective of all devices."""
        return self.test.stage == "together"


def select_tests(devices: Sequence[Device]) -> tuple[QuickTest, ...]:
    """Return the tests for these devices of one node and one kind, in the order of their run."""
    first, every = Fleet(devices=tuple(devices[:1])), Fleet(devices=tuple(devices))
    alone = {probe.test.name: probe for probe in probes(first, _STAGES)}
    together = {probe.test.name: probe for probe in probes(every, _STAGES)}
    tests = []
    for name in QUICK_TESTS[devices[0].kind]:
        probe = alone.get(name) or together.get(name)
        if probe is not None:
            tests.append(QuickTest(test=probe.test, point=probe.point))
    return tuple(tests)


def measure_of(test: HealthTest, kind: DeviceKind) -> Measure:
    """Return how a test is measured: a few tenths of a second."""
    is_alone = test.stage == "alone"
    return Measure(
        warmup=Span(min=5, max=5),
        iterations=20,
        max_seconds=0.2,
        timeout_s=60.0,
        breakdown=False,
        heat_s=_HEAT_S[kind] if is_alone else 0.0,
    )
