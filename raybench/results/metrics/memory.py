"""What the memory of the rank that needs most is made of, and what the allocator did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

from raybench.records import RankMetrics, Record
from raybench.records.metric import Column


@dataclass(frozen=True, kw_only=True)
class MemoryColumns:
    """The parts of the memory at its peak, of the rank that holds most."""

    mem_parameters_bytes: Annotated[
        int | None,
        Column("bytes", "parameters and buffers of the model", heading="params", format="gib"),
    ] = None
    mem_gradients_bytes: Annotated[
        int | None,
        Column("bytes", "gradients that are there at the peak", heading="grads", format="gib"),
    ] = None
    mem_optimizer_bytes: Annotated[
        int | None, Column("bytes", "the optimizer's state", heading="state", format="gib")
    ] = None
    mem_activations_bytes: Annotated[
        int | None,
        Column("bytes", "activations, and what else the step adds", heading="acts", format="gib"),
    ] = None
    mem_other_bytes: Annotated[
        int | None,
        Column(
            "bytes", "other memory before the step: data, buckets", heading="other", format="gib"
        ),
    ] = None
    mem_estimate_bytes: Annotated[
        int | None,
        Column(
            "bytes",
            "of the peak, from the settings, before it ran",
            heading="estimate",
            meaning="what was estimated of the peak before the point ran, from its settings alone",
            format="gib",
        ),
    ] = None


def memory_columns(record: Record) -> MemoryColumns:
    """Return the parts of the rank that holds most; None where a rank has no breakdown."""
    broken_down = [m.breakdown for m in record.measurements if m.breakdown is not None]
    peaks = [b.peak for b in broken_down if b.peak is not None]
    if not peaks or len(broken_down) < len(record.measurements):
        return MemoryColumns(mem_estimate_bytes=record.mem_estimate_bytes)
    parts = asdict(max(peaks, key=lambda one: one.total_bytes))
    named = {f"mem_{name}": value for name, value in parts.items()}
    return MemoryColumns(mem_estimate_bytes=record.mem_estimate_bytes, **named)


def allocation_warnings(row: RankMetrics) -> Iterator[str]:
    """Yield what the allocator did in timed steps that a steady step does without."""
    if row.alloc_retries:
        yield (
            f"the timed steps include {row.alloc_retries} retries of the allocator, which had to "
            "give back what it kept: memory is short, take a smaller batch"
        )
    elif row.device_allocs:
        yield (
            f"the timed steps include {row.device_allocs} calls of cudaMalloc: memory had not "
            "settled, warm up for longer"
        )
