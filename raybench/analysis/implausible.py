"""Figures that cannot be: what of a point contradicts its devices, and the likeliest reason. Pure.

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
    row: ScaledRow,
    references: References,
    *,
    attempts_s: Sequence[float | None] = (),
    can_nvls: bool = True,
) -> list[str]:
    """Return a sentence for each figure of a point that cannot be; none where it is not ok.

    attempts_s: the time that the attempt took in each round that `row` counts the iterations of.
    can_nvls: whether NCCL may have used NVLS.
    """
    if row.status is not Status.OK:
        return []
    known = references.entries(row.device_name or "")
    texts = (
        *(text for check in (_speed_ups, _operations, _memory) for text in check(row, known)),
        *_items(row, sum(filter(None, attempts_s)) if None not in attempts_s else None),
        *_links(row, known, can_nvls),
    )
    return [_MARK + text for text in texts]


def impossible_among(warnings: Iterable[str]) -> list[str]:
    """Return those warnings of a point that `impossible_figures` has added."""
    return [text for text in warnings if text.startswith(_MARK)]


def _speed_ups(row: ScaledRow, _: object) -> Iterator[str]:
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


def _operations(row: ScaledRow, known: list[Entry]) -> Iterator[str]:
    reached, precision = row.achieved_tflops_per_device, row.precision
    ceilings = [
        one.observed[1]
        for one in known
        if one.unit == "TFLOP/s"
        and (one.of.get("precision") == precision and one.of.get("workload") == "gemm")
        | one.of.get("test", "").startswith(f"gemm {precision} ")
    ]
    # A product may be of a shape that reaches more than those of the reference.
    is_product = row.workload == "gemm"
    if reached and ceilings and not is_product and reached > _OVER_PRODUCTS * max(ceilings):
        yield (
            f"{reached:,.0f} TFLOP/s, more than large {precision} products reach on "
            f"{row.device_name} ({max(ceilings):,.0f}); likeliest operations are counted that did "
            "not run, or it ran in another precision"
        )
    elif row.mfu_pct is not None and row.mfu_pct > 100:
        yield (
            f"MFU {row.mfu_pct:.0f}%; likeliest operations are counted that did not run, or the "
            "peak is that of another device or precision"
        )


def _memory(row: ScaledRow, known: list[Entry]) -> Iterator[str]:
    size = row.params.get("size_bytes", "") if row.workload == "memory" else ""
    footprint = int(size) if size.isdecimal() else row.peak_mem_allocated_bytes or 0
    if row.memory_gb_s is None or footprint < LARGER_THAN_CACHES:
        return
    measured = [one.observed[1] for one in known if one.of.get("test", "").startswith("memory ")]
    ceiling = max(measured, default=peak_of(row.device_name or "", {"test": "memory"}))
    if ceiling and row.memory_gb_s > _OVER_REFERENCE * ceiling:
        yield (
            f"memory {row.memory_gb_s:,.0f} GB/s, more than the triad of {row.device_name} "
            f"({ceiling:,.0f}); likeliest bytes are counted that stay in a cache"
        )


def _items(row: ScaledRow, attempts_s: float | None) -> Iterator[str]:
    step_ms = min(row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0)
    if not step_ms:
        return
    per_rank = row.batch_size * row.world_size if row.batch_size else None
    batch = max(row.global_batch_size or 0, per_rank or 0)
    if row.throughput and batch and row.workload in registry.BUILTIN:
        items = row.throughput * step_ms / _MS_PER_S
        most = batch * (row.grad_accumulation or 1)
        if items > _TOLERANCE * most:
            yield (
                f"{items:,.0f} samples a step, of a batch of {most:,.0f}; likeliest samples are "
                "counted that no iteration finished"
            )
    if row.iterations and attempts_s:
        count = row.iterations * (row.inner_iterations or 1)
        took_s = count * step_ms / _MS_PER_S
        if took_s > _ONE_START * attempts_s:
            yield (
                f"{count:,.0f} iterations of {step_ms:.3g} ms take {took_s:,.0f} s, and all of it "
                f"took {attempts_s:,.0f} s; likeliest iterations are counted that did not run"
            )


def _links(row: ScaledRow, known: list[Entry], can_nvls: bool) -> Iterator[str]:
    copies = [one.observed[1] for one in known if one.of.get("test", "").startswith("copy ")]
    if not row.busbw_gb_s or row.world_size < 2 or not copies:
        return
    operation = row.params.get("operation", "all_reduce")
    is_by_switch = can_nvls and operation in _BY_NVLS
    ceiling = max(copies)
    if row.busbw_gb_s > _OVER_REFERENCE * ceiling * (_NVLS_FACTOR if is_by_switch else 1):
        yield (
            f"bus bandwidth {row.busbw_gb_s:,.0f} GB/s, more than a copy over the links of "
            f"{row.device_name} ({ceiling:,.0f}); likeliest the message or the factor is counted "
            "wrong"
        )
