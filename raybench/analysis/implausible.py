"""Figures of a point that cannot be, because its devices cannot do it, and the likeliest reason.

Lawful exceptions are known: arrays that fit a cache beat the triad, NVLS counts more than the links
carry, and with strong scaling a smaller share of the work may fit a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from raybench.analysis.references import LARGER_THAN_CACHES, Entry, References, peak_of
from raybench.analysis.rows import ScaledRow
from raybench.job import registry
from raybench.records import Status

# What no interval covers; without an interval, what starts may differ by; with strong scaling,
# what other kernels may gain on smaller shares.
_TOLERANCE, _ONE_START, _STRONG = 1.02, 1.1, 1.25
# Above the largest value of a reference, whose devices are few.
_OVER_REFERENCE, _OVER_PRODUCTS = 1.05, 1.1
_STRONG_SHARE_IN_CACHE = 2**30
# With NVLS the switch adds up and copies: each byte crosses a link once in place of twice.
_NVLS_FACTOR = 2.0
_BY_NVLS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_MS_PER_S = 1e3
_MARK = "cannot be: "


def impossible_figures(
    row: ScaledRow, references: References, attempts_s: Sequence[float | None] = ()
) -> list[str]:
    """Return a sentence for each figure of a point that cannot be; none where it is not ok.

    attempts_s: the seconds of the attempt in each round whose iterations `row` counts; with a None
    among them, iterations are not held against time.
    """
    if row.status is not Status.OK:
        return []
    known = references.entries(row.device_name or "")
    total_s = sum(filter(None, attempts_s)) if None not in attempts_s else 0.0
    texts = (*_speed_ups(row), *_rates(row, known), *_items(row, total_s))
    return [_MARK + text for text in texts]


def impossible_among(warnings: Iterable[str]) -> list[str]:
    """Return those warnings of a point that `impossible_figures` has added."""
    return [text for text in warnings if text.startswith(_MARK)]


def _speed_ups(row: ScaledRow) -> Iterator[str]:
    """Yield a sentence where the efficiency is above what more devices can reach."""
    if row.efficiency is None or row.is_baseline or row.speed_up is None:
        return
    least = row.efficiency_low or row.efficiency / _ONE_START
    # A device with a smaller share may clock higher.
    allowed = (_STRONG if row.scaling == "strong" else _TOLERANCE) * max(row.clock_ratio or 1.0, 1)
    is_in_cache = (row.peak_mem_allocated_bytes or 0) < _STRONG_SHARE_IN_CACHE
    if least > allowed and not (row.scaling == "strong" and is_in_cache):
        yield (
            f"speed-up {row.speed_up:.2f} on {row.world_size} devices, efficiency "
            f"{row.efficiency:.0%}; likeliest the baseline was slowed, or steps are counted that "
            "did not run"
        )


def _rates(row: ScaledRow, known: Sequence[Entry]) -> Iterator[str]:
    """Yield a sentence for each rate (MFU, TFLOP/s, memory, bus) that its device cannot reach.

    known: the reference entries of the model; without them only MFU and peaks of datasheets are
    held.
    """

    def most(test: str) -> float:
        """Return the highest end of the ranges of health tests whose name begins so, or 0."""
        found = (one.observed[1] for one in known if one.of.get("test", "").startswith(test))
        return max(found, default=0.0)

    model = row.device_name or ""
    of_precision = (
        one.observed[1]
        for one in known
        if one.unit == "TFLOP/s"
        and row.precision in (one.of.get("precision"), *one.of.get("test", "").split())
    )
    # A product may be of a shape that reaches more than those of the reference.
    products = 0.0 if row.workload == "gemm" else max(of_precision, default=0.0)
    if row.mfu_pct is not None and row.mfu_pct > 100 and not products:
        yield (
            f"MFU {row.mfu_pct:.0f}%; likeliest operations are counted that did not run, or the "
            "peak is that of another device or precision"
        )
    size = row.params.get("size_bytes", "") if row.workload == "memory" else ""
    footprint = int(size) if size.isdecimal() else row.peak_mem_allocated_bytes or 0
    triad = most("memory ") or peak_of(model, {"test": "memory"}) or 0.0
    is_by_switch = row.params.get("operation", "all_reduce") in _BY_NVLS
    ceilings = (
        (
            f"TFLOP/s, more than large {row.precision} products reach",
            row.achieved_tflops_per_device,
            products,
            _OVER_PRODUCTS,
            "operations are counted that did not run, or it ran in another precision",
        ),
        (
            "GB/s of memory, more than the triad reaches",
            row.memory_gb_s if footprint >= LARGER_THAN_CACHES else None,
            triad,
            _OVER_REFERENCE,
            "bytes are counted that stay in a cache",
        ),
        (
            "GB/s of bus bandwidth, more than a copy over the links reaches",
            row.busbw_gb_s if row.world_size > 1 else None,
            most("copy "),
            _OVER_REFERENCE * (_NVLS_FACTOR if is_by_switch else 1),
            "the message or the factor is counted wrong",
        ),
    )
    for words, rate, ceiling, tolerance, reason in ceilings:
        if rate and ceiling and rate > tolerance * ceiling:
            yield f"{rate:,.0f} {words} on {model} ({ceiling:,.0f}); likeliest {reason}"


def _items(row: ScaledRow, attempts_s: float) -> Iterator[str]:
    """Yield a sentence where more samples or iterations are counted than batch and time allow.

    attempts_s: seconds of all attempts together; 0 where that is not known.
    """
    step_ms = min(row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0)
    per_rank = row.batch_size * row.world_size if row.batch_size else 0
    batch = max(row.global_batch_size or 0, per_rank) * (row.grad_accumulation or 1)
    items = (row.throughput or 0.0) * step_ms / _MS_PER_S
    if batch and row.workload in registry.BUILTIN and items > _TOLERANCE * batch:
        yield (
            f"{items:,.0f} samples a step, of a batch of {batch:,.0f}; likeliest samples are "
            "counted that no iteration finished"
        )
    count = (row.iterations or 0) * (row.inner_iterations or 1)
    took_s = count * step_ms / _MS_PER_S
    if attempts_s and took_s > _ONE_START * attempts_s:
        yield (
            f"{count:,.0f} iterations of {step_ms:.3g} ms take {took_s:,.0f} s, and all of it took "
            f"{attempts_s:,.0f} s; likeliest iterations are counted that did not run"
        )
