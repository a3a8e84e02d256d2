"""What a health check runs: each test, and the points over all devices that it is read from.

A test is declared once, with the floor of its noise on healthy devices; `probes` makes the points
of a cluster. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from raybench.doctor.health.subjects import device_subjects
from raybench.job.point import Point, Precision, Scalar
from raybench.records import Device
from raybench.records.health import HealthTest, Stage, Subject

STAGES: tuple[Stage, ...] = get_args(Stage)

# The noise of a figure on healthy devices, as a share of it: GPUs by the committed runs, CPU
# workers by what shares their cores.
_FLOORS = {
    "cuda": {"gemm": 0.01, "memory": 0.005, "latency": 0.1},
    "cpu": {"gemm": 0.1, "memory": 0.1, "latency": 0.2},
}
_GEMM_SIZES = {"cuda": (256, 512, 1024, 2048, 8192), "cpu": (256, 512, 1024)}
_PRECISIONS = {"cuda": tuple(Precision), "cpu": (Precision.FP32,)}
# Of each of three arrays: 100, 500 and 1000 MB; on CPUs above their caches and soon done.
_ARRAY_BYTES = {"cuda": (10**8, 5 * 10**8, 10**9), "cpu": (64 * 10**6,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A point, and the test that its record is read for."""

    test: HealthTest
    point: Point


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The devices that are checked, in the order of their ranks."""

    devices: tuple[Device, ...]

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """Of the devices."""
        return self.devices[0].kind

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.devices)

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The devices as subjects, by rank."""
        return device_subjects(self.devices)

    def floor(self, name: str) -> float:
        """Return the floor of a kind of figure."""
        return _FLOORS[self.kind][name]

    def point(
        self, workload: str, precision: Precision = Precision.FP32, **params: Scalar
    ) -> Point:
        """Make a point over all devices."""
        return Point(
            workload=workload,
            params=dict(sorted(params.items())),
            world_size=self.size,
            precision=precision,
            batch_size=None,
            global_batch_size=None,
            scaling=None,
        )


def title(point: Point) -> str:
    """Name a point of a health check in a few words."""
    precision = () if point.precision is Precision.FP32 else (point.precision.value,)
    given = [str(value) for value in point.params.values() if value != ""]
    return " ".join(dict.fromkeys((point.workload, *precision, *given)))


def probes(fleet: Fleet, stages: Collection[Stage]) -> tuple[Probe, ...]:
    """List the probes of these stages on these devices, in the order in which they are run."""
    return tuple(
        probe for stage, make in _MAKERS.items() if stage in stages for probe in make(fleet)
    )


def _alone(fleet: Fleet) -> Iterator[Probe]:
    """Yield what each device does alone, all at the same time, without communication."""
    for precision in _PRECISIONS[fleet.kind]:
        for size in _GEMM_SIZES[fleet.kind]:
            yield Probe(
                test=HealthTest(
                    name=f"gemm {precision} {size}",
                    stage="alone",
                    kind="device",
                    unit="TFLOP/s",
                    is_time=False,
                    floor=fleet.floor("gemm" if size > 512 else "latency"),
                    meaning="arithmetic of one device"
                    if size > 512
                    else "small products, which wait for their launch",
                ),
                point=fleet.point("gemm", precision, m=size, n=size, k=size),
            )
    for size_bytes in _ARRAY_BYTES[fleet.kind]:
        yield Probe(
            test=HealthTest(
                name=f"memory {size_bytes // 10**6} MB",
                stage="alone",
                kind="device",
                unit="GB/s",
                is_time=False,
                floor=fleet.floor("memory"),
                meaning="bandwidth of the device's memory",
            ),
            point=fleet.point("memory", operation="triad", size_bytes=size_bytes, dtype="float32"),
        )


_MAKERS: Mapping[Stage, Callable[[Fleet], Iterator[Probe]]] = {"alone": _alone}
