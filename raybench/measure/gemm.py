"""What a device reaches in large matrix products, to compare a step with."""

from __future__ import annotations

import statistics
from itertools import pairwise

import torch

from raybench.point import Precision

_SIZE = 8192
_FLOP_PER_PRODUCT = 2.0 * _SIZE**3
_WARMUPS = 3
_MOST_PRODUCTS, _FEWEST_PRODUCTS = 10, 3
_BUDGET_MS = 100.0
_MS_PER_S = 1e3
_FLOP_PER_TFLOP = 1e12
_DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def gemm_tflops(device: torch.device, precision: Precision) -> float | None:
    """TFLOP/s of a product of two 8192 x 8192 matrices: the median of up to ten.

    None on a CPU and where the device's memory does not suffice. The switches of `precision` must
    be set already. It takes about 0.1 to 0.2 s and 0.4 GB (fp16, bf16) or 0.8 GB of device memory,
    which it gives back; torch's counters of peak memory see it.
    """
    if device.type != "cuda":
        return None
    try:
        times_ms = _product_times_ms(device, _DTYPES.get(precision, torch.float32))
    except torch.OutOfMemoryError:
        times_ms = []
    # Not sooner: while it is handled, an error holds the frames that hold the matrices.
    torch.cuda.empty_cache()
    if not times_ms:
        return None
    return _FLOP_PER_PRODUCT / (statistics.median(times_ms) / _MS_PER_S) / _FLOP_PER_TFLOP


def _product_times_ms(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Zeros would be 10 to 15 % faster: flipping no bits costs no power. So, random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(_SIZE, _SIZE, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    product = torch.empty(_SIZE, _SIZE, device=device, dtype=dtype)
    warmup_ms = _timed_ms(left, right, product, _WARMUPS)
    affordable = int(_BUDGET_MS / warmup_ms[-1])
    return _timed_ms(left, right, product, max(_FEWEST_PRODUCTS, min(_MOST_PRODUCTS, affordable)))


def _timed_ms(
    left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, count: int
) -> list[float]:
    events = [_event() for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        torch.mm(left, right, out=product)
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
