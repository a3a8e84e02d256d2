"""What a device sustains in large matrix products, to compare a step with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch

from raybench.job.point import Precision
from raybench.workloads import precision as modes

_SIZE = 8192
_FLOP_PER_PRODUCT = 2.0 * _SIZE**3
_WARMUPS = 3
# The power limit of an H200 has brought the rate to its level after 0.15 s (bf16: 783 TFLOP/s in
# the first 30 ms, 670 from then on), so that a step that lasts is compared with what lasts.
_SETTLE_MS, _MEASURE_MS = 200.0, 200.0
_FEWEST_PRODUCTS = 3
_MS_PER_S = 1e3
_FLOP_PER_TFLOP = 1e12
_DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def tflops_sustained(
    device: torch.device, precisions: Sequence[Precision]
) -> dict[Precision, float | None]:
    """TFLOP/s of products of two 8192 x 8192 matrices under the power limit, by precision.

    Each is the median over 0.2 s after 0.2 s of the same. None on a CPU and where the device's
    memory does not suffice. The switches of the last precision stay set. It takes 0.4 GB (fp16,
    bf16) or 0.8 GB of device memory, which it gives back; torch's counters of peak memory see it.
    """
    return {precision: _tflops(device, precision) for precision in precisions}


def _tflops(device: torch.device, precision: Precision) -> float | None:
    if device.type != "cuda":
        return None
    modes.apply(precision)
    try:
        times_ms = _product_times_ms(device, _DTYPES.get(precision, torch.float32))
    except torch.OutOfMemoryError:
        times_ms = []
    # Not sooner: while it is handled, an error holds the frames that hold the matrices.
    torch._C._cuda_clearCublasWorkspaces()
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
    product_ms = _time_ms(left, right, product, _WARMUPS)[-1]
    settling, measured = (
        max(_FEWEST_PRODUCTS, math.ceil(phase_ms / product_ms))
        for phase_ms in (_SETTLE_MS, _MEASURE_MS)
    )
    # In one go: a pause would let the clocks rise again.
    return _time_ms(left, right, product, settling + measured)[settling:]


def _time_ms(
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
