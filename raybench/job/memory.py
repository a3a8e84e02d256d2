"""Estimate the memory of a point, and propose changes that make it fit."""

from __future__ import annotations

import math

from raybench.conversion import GIB
from raybench.errors import UsageError
from raybench.job.declarations import call_if_declared, why_not
from raybench.job.point import Point, Scalar, setting_text
from raybench.job.registry import load_workload
from raybench.job.settings import settings_of_class

# A point can use this share of the memory; the driver, NCCL and fragmentation take the rest.
USABLE_SHARE = 0.93
# The estimate of a point that ran out of memory may be too low, so a proposal must need 10 % less.
_SHARE_AFTER_CHANGE = 0.9
# Settings that need less memory, the cheapest in time first.
_SAVING_SETTINGS: tuple[tuple[str, Scalar], ...] = (
    ("fused_optimizer", True),
    ("precision", "bf16"),
    ("gradient_as_bucket_view", True),
    ("dp_shard", -1),
    ("activation_checkpointing", "selective"),
    ("activation_checkpointing", "full"),
    ("optimizer_dtype", "bf16"),
)


def estimate(point: Point, **changes: Scalar) -> int | None:
    """Return the estimated device memory of a rank in bytes; None if the class gives no estimate.

    Args:
        changes: values that replace settings of the point.

    Raises:
        UsageError: the workload cannot be loaded.
    """
    workload_class, settings = load_workload(point.workload), {**point.settings, **changes}
    try:
        if why_not(workload_class, settings) is not None:
            return None
        estimate_bytes = call_if_declared(workload_class, "estimate_memory", settings)
    except UsageError:
        return None
    # A class of the user may return anything.
    if not isinstance(estimate_bytes, int | float) or not math.isfinite(estimate_bytes):
        return None
    return round(estimate_bytes)


def explain_oom(point: Point, estimate_bytes: int, device_bytes: int) -> str:
    """Return a sentence with the estimate of a point that does not fit, and up to two changes.

    The changes are the largest halved batch that fits, and the cheapest other setting that fits.

    Raises:
        UsageError: the workload cannot be loaded.
    """
    # The estimate may be too low, so a change must also need clearly less than the estimate.
    limit_bytes = min(USABLE_SHARE * device_bytes, _SHARE_AFTER_CHANGE * estimate_bytes)
    allowed, current = settings_of_class(load_workload(point.workload)), point.settings
    batch = int(current.get("batch_size", 1))
    # batch // 2, batch // 4, ... down to 1.
    halved = [("batch_size", batch >> halvings) for halvings in range(1, batch.bit_length())]
    changes = []
    for name, value in _SAVING_SETTINGS:
        is_allowed = name in allowed and allowed[name].complaint(value) is None
        if is_allowed and current.get(name) != value:
            changes.append((name, value))
    fits = []
    for group in (halved, changes):
        for name, value in group:
            needed_bytes = estimate(point, **{name: value})
            if needed_bytes is not None and needed_bytes <= limit_bytes:
                fits.append(f"{name} {setting_text(value)} ({short_gib(needed_bytes)} GiB)")
                break
    comparison = f"{short_gib(estimate_bytes)} GiB and the device has {short_gib(device_bytes)} GiB"
    text = f"by an estimate, the point needs {comparison}"
    if not fits:
        return f"{text}; no change of one setting makes the point fit"
    return f"{text}; what should fit: {' or '.join(fits)}"


def short_gib(count: float) -> str:
    """Return bytes in GiB with at most three significant digits, without the unit."""
    # Format twice: `.3g` alone would write 1.23e+03 instead of 1230.
    return f"{float(f'{count / GIB:.3g}'):g}"
