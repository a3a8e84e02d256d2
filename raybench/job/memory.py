"""How much memory a point is estimated to need on its device, and what would need less.

A workload estimates it itself, from its settings alone, before anything runs (`estimate_memory` of
`raybench.workloads.base.Workload`). What by an estimate cannot fit runs all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from raybench.errors import UsageError
from raybench.job import registry
from raybench.job.point import Point, Scalar, setting_text

# Of the device's memory; the rest is the driver's, NCCL's and lost between blocks.
USABLE = 0.93
# Where a point ran out that was estimated to fit, the estimate was too low by as much, or more.
_LESS = 0.9
# What needs less, the cheapest in time first; beside them is a smaller batch.
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
    """What one rank's memory is made of when it is largest in a step of training, in bytes.

    gradients: that are there then. activations: what the step adds, temporaries too. other: what
    else is there before it: data, buckets of DistributedDataParallel, workspaces of libraries.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    other: float

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return round(sum(float(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A setting with which a point fits by the estimate."""

    name: str
    value: Scalar
    estimate_bytes: int


def estimate(point: Point) -> MemoryParts | None:
    """Estimate the memory of a rank of the point; None where its workload does not tell.

    Also where it fails to: nothing that is measured depends on an estimate.
    """
    try:
        return _estimate(registry.load(point.workload), point.settings)
    except UsageError:
        return None


def _estimate(workload_class: type, settings: Mapping[str, Scalar]) -> MemoryParts | None:
    found = registry.estimate_memory(workload_class, settings)
    return found if isinstance(found, MemoryParts) else None


def explain_oom(point: Point, estimated: MemoryParts, device_bytes: int) -> str:
    """Say what a point that ran out of memory was estimated to need, and what would fit."""
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
    """Write bytes in GiB, three digits."""
    return f"{count / 2**30:.3g}"


def usable_bytes(device_bytes: int, estimate_bytes: int) -> float:
    """Tell what a point may need that is to fit, after one of this estimate ran out of memory."""
    return min(USABLE * device_bytes, _LESS * estimate_bytes)


def what_fits(point: Point, room_bytes: float) -> Iterator[Fit]:
    """Yield the largest batch that fits, then the first single change that does."""
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
