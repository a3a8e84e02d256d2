"""The estimated device memory of a point, and the settings with which it would need less.

A workload estimates its memory from its settings alone, before anything runs (`estimate_memory` of
`raybench.workloads.base.Workload`). An estimate never keeps a point from running.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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


def estimate(point: Point) -> int | None:
    """Return the estimated bytes of a rank; None where the workload has no estimate or it raises.

    Nothing that is measured depends on an estimate, so an error in one is ignored.
    """
    try:
        return _estimate(registry.load(point.workload), point.settings)
    except UsageError:
        return None


def _estimate(workload_class: type, settings: Mapping[str, Scalar]) -> int | None:
    found = registry.estimate_memory(workload_class, settings)
    return round(found) if isinstance(found, int | float) else None


def explain_oom(point: Point, estimate_bytes: int, device_bytes: int) -> str:
    """Return a sentence with the estimate of a point that does not fit, and what would fit."""
    text = f"estimated {gib(estimate_bytes)} of {gib(device_bytes)} GiB"
    fits = [
        f"{name} {setting_text(value)} ({gib(needed)} GiB)"
        for name, value, needed in _what_fits(
            point, min(USABLE * device_bytes, _LESS * estimate_bytes)
        )
    ]
    if not fits:
        return f"{text}; by the estimate no single setting makes it fit"
    return f"{text}; what fits by the estimate: {' or '.join(fits)}"


def gib(count: float) -> str:
    """Return bytes in GiB, as text of three digits."""
    return f"{count / 2**30:.3g}"


def _what_fits(point: Point, room_bytes: float) -> Iterator[tuple[str, Scalar, int]]:
    """Yield the largest halved batch that fits, then the first other setting that fits.

    Each with its name, its value, and the estimated bytes of a rank.
    """
    workload_class, settings = registry.load(point.workload), point.settings
    known = registry.settings(workload_class)
    batch = int(settings.get("batch_size", 1))
    batches = [("batch_size", batch >> halved) for halved in range(1, batch.bit_length())]
    changes = [
        (name, value)
        for name, value in _CHANGES
        if name in known and settings.get(name) != value and known[name].complaint(value) is None
    ]
    for group in (batches, changes):
        for name, value in group:
            changed = {**settings, name: value}
            try:
                if registry.why_not(workload_class, changed) is not None:
                    continue
                needed = _estimate(workload_class, changed)
            except UsageError:
                continue
            if needed is not None and needed <= room_bytes:
                yield name, value, needed
                break
