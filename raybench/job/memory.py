"""The estimated device memory of a point, and the settings with which it would need less.

A workload estimates its memory from its settings alone, before anything runs (`estimate_memory` of
`raybench.workloads.base.Workload`). An estimate never keeps a point from running.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from raybench.errors import UsageError
from raybench.job import registry
from raybench.job.point import Point, Scalar, setting_text

# Share of the device's memory that a point can use. The driver and NCCL take the rest, and some is
# lost to fragmentation.
USABLE = 0.93
# After a point ran out of memory that was estimated to fit, others must need a tenth less than its
# estimate, which was too low.
_LESS = 0.9
# Settings that need less memory, the cheapest in time first. A smaller batch is proposed beside.
_CHANGES: tuple[tuple[str, Scalar], ...] = (
    ("fused_optimizer", True),
    ("precision", "bf16"),
    ("gradient_as_bucket_view", True),
    ("dp_shard", -1),
    ("activation_checkpointing", "selective"),
    ("activation_checkpointing", "full"),
    ("optimizer_dtype", "bf16"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """The parts of one rank's memory at its peak in a training step, in bytes.

    gradients: those allocated at the peak. activations: all that the step allocates, temporary
    memory included. other: allocated before the step: data, buckets of DistributedDataParallel,
    workspaces of libraries.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    other: float

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return round(sum(float(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A setting with which a point fits by the estimate."""

    name: str
    value: Scalar
    estimate_bytes: int


def estimate(point: Point) -> MemoryParts | None:
    """Return the estimated memory of a rank; None where the workload has no estimate or it raises.

    Nothing that is measured depends on an estimate, so an error in one is ignored.
    """
    try:
        return _estimate(registry.load(point.workload), point.settings)
    except UsageError:
        return None


def _estimate(workload_class: type, settings: Mapping[str, Scalar]) -> MemoryParts | None:
    found = registry.estimate_memory(workload_class, settings)
    return found if isinstance(found, MemoryParts) else None


def explain_oom(point: Point, estimated: MemoryParts, device_bytes: int) -> str:
    """Return a sentence with the estimate of a point that ran out of memory, and what would fit."""
    needed = estimated.total_bytes
    text = f"estimated {gib(needed)} of {gib(device_bytes)} GiB"
    fits = [
        f"{fit.name} {setting_text(fit.value)} ({gib(fit.estimate_bytes)} GiB)"
        for fit in what_fits(point, usable_bytes(device_bytes, needed))
    ]
    if not fits:
        return f"{text}; by the estimate no single setting makes it fit"
    return f"{text}; what fits by the estimate: {' or '.join(fits)}"


def gib(count: float) -> str:
    """Return bytes in GiB, as text of three digits."""
    return f"{count / 2**30:.3g}"


def usable_bytes(device_bytes: int, estimate_bytes: int) -> float:
    """Return the largest estimate that fits, after a point with `estimate_bytes` did not fit."""
    return min(USABLE * device_bytes, _LESS * estimate_bytes)


def what_fits(point: Point, room_bytes: float) -> Iterator[Fit]:
    """Yield the largest halved batch that fits, then the first single setting that fits."""
    workload_class = registry.load(point.workload)
    settings = point.settings
    batch = int(settings.get("batch_size", 1))
    batches = ({"batch_size": batch >> halved} for halved in range(1, batch.bit_length()))
    kinds = registry.settings(workload_class)
    # Of settings that are there, take the value, and have another one.
    changes = (
        {name: value}
        for name, value in _CHANGES
        if name in kinds and settings.get(name) != value and kinds[name].complaint(value) is None
    )
    for group in (batches, changes):
        for change in group:
            changed = {**settings, **change}
            try:
                is_allowed = registry.why_not(workload_class, changed) is None
                found = _estimate(workload_class, changed) if is_allowed else None
            except UsageError:
                continue
            if found is not None and found.total_bytes <= room_bytes:
                ((name, value),) = change.items()
                yield Fit(name=name, value=value, estimate_bytes=found.total_bytes)
                break
