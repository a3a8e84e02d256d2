"""Floating-point operations of a step, counted on meta tensors, and the rate a device sustains.

Counted are matrix products, convolutions and attention, forward and backward, as torch executes
them; a multiply-add is two operations. Not counted: element-wise work, normalisation, embeddings.
Causal attention counts as full. What activation checkpointing computes again counts again.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from raybench.errors import UsageError, brief, mentions, message_of
from raybench.job.point import Precision, Scalar
from raybench.job.registry import ranks_per_item
from raybench.workloads.base import Context, PartTimes, Regions, apply_precision

_METHOD = "matrix products, convolutions and attention of one step, counted on meta tensors"
_REMEDY = "set flops_per_step in the class to tell it"
# Rows and columns of the matrices whose products are timed.
_SIZE = 8192
_FLOP_PER_PRODUCT = 2.0 * _SIZE**3
_WARMUPS = 3
# On an H200 the power limit lowers the rate within 0.15 s (bf16: 783 TFLOP/s in the first 30 ms,
# 670 later). Steps run for seconds, so they are compared with the later rate.
_SETTLE_MS, _MEASURE_MS = 200.0, 200.0
_FEWEST_PRODUCTS = 3
_MS_PER_S = 1e3
_FLOP_PER_TFLOP = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The floating-point operations of one step of one rank; None where they cannot be counted.

    method: how they were counted, or why they could not be.
    """

    flops: float | None
    method: str


def step_flops(workload_class: type, params: Mapping[str, Scalar], context: Context) -> Counted:
    """Return the operations of one step of a workload with these parameters; raises nothing.

    The workload is built once more, on the meta device and for one rank, and does one step. Where
    ranks share their work, the operations are divided by their number. All ranks must call it: the
    code is the user's and may communicate all the same. Random numbers and modes of torch stay as
    they were.
    """
    on_meta = replace(
        context,
        device=torch.device("meta"),
        rank=0,
        local_rank=0,
        world_size=1,
        precision=Precision.FP32,
        cuda_graph=False,
        parts=PartTimes(),
        regions=Regions(),
    )
    try:
        with _restored_afterwards(context.device):
            flops = _count(workload_class, params, on_meta)
    except Exception as error:
        return Counted(flops=None, method=f"not counted: {_why_not(error)}; {_REMEDY}")
    if not flops:
        return Counted(flops=None, method="not counted: the step has none that the counter knows")
    ranks = ranks_per_item(workload_class, {**params, "world_size": context.world_size})
    return Counted(flops=flops / ranks, method=_METHOD)


def _why_not(error: Exception) -> str:
    """Return the reason in a sentence without a full stop, for the author of the workload."""
    if isinstance(error, UsageError):
        return message_of(error)
    if isinstance(error, (RuntimeError, NotImplementedError)) and mentions(error, "meta"):
        return (
            "the step needs values, and where it is counted (torch's meta device) tensors have none"
        )
    return (
        f"built for one rank on torch's meta device, where it is counted, it raises {brief(error)}"
    )


def _count(workload_class: type, params: Mapping[str, Scalar], context: Context) -> int:
    """Return the operations of one step on the context's device. Raises what the class raises."""
    counter = FlopCounterMode(display=False)
    # The counter does not see into compiled code, and compiling would cost more than counting.
    with torch.compiler.set_stance("force_eager"):
        workload: Any = workload_class(context, **params)
        try:
            with counter:
                workload.step()
        finally:
            workload.close()
    return counter.get_total_flops()


@contextmanager
def _restored_afterwards(device: torch.device) -> Iterator[None]:
    """Restore random number generators, default device and default dtype after the `with` block.

    Inside gradients are enabled, and warnings are ignored. device: the one whose generator counts.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    default_device, default_dtype = torch.get_default_device(), torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), warnings.catch_warnings():
            # A warning of torch here would not be about the step that is measured.
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(default_dtype)
        if torch.get_default_device() != default_device:
            # None, not "cpu": any device given installs a hook that every later call goes through.
            torch.set_default_device(None if default_device.type == "cpu" else default_device)


def tflops_sustained(
    device: torch.device, precisions: Sequence[Precision]
) -> dict[Precision, float | None]:
    """Return the TFLOP/s of products of two 8192 x 8192 matrices under the power limit.

    Each is the median over 0.2 s, after 0.2 s of warm-up. None on a CPU and where the device's
    memory does not suffice. Side effects: the switches of the last precision stay set, and 0.4 GB
    (fp16, bf16) or 0.8 GB of device memory are used and given back, which torch's counters of peak
    memory see.
    """
    return {precision: _tflops(device, precision) for precision in precisions}


def _tflops(device: torch.device, precision: Precision) -> float | None:
    """Return the TFLOP/s of `tflops_sustained` in one precision, which it leaves switched on."""
    if device.type != "cuda":
        return None
    apply_precision(precision)
    try:
        times_ms = _product_times_ms(_make_product(device, precision))
    except torch.OutOfMemoryError:
        times_ms = []
    # Not in the handler: there the error still holds the frames that hold the matrices.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    if not times_ms:
        return None
    return _FLOP_PER_PRODUCT / (statistics.median(times_ms) / _MS_PER_S) / _FLOP_PER_TFLOP


def _make_product(device: torch.device, precision: Precision) -> Callable[[], object]:
    """Return a function that multiplies two matrices of random numbers.

    Zeros would be 10 to 15 % faster: flipping no bits costs no power.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype: torch.dtype = getattr(torch, precision.dtype)
    left, right = (
        torch.randn(_SIZE, _SIZE, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    product = torch.empty(_SIZE, _SIZE, device=device, dtype=dtype)
    if precision is not Precision.FLOAT8:
        return lambda: torch.mm(left, right, out=product)
    one = torch.ones((), device=device)
    small = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    multiply = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=dtype, out=product)
    return lambda: multiply(*small, use_fast_accum=True)


def _product_times_ms(product: Callable[[], object]) -> list[float]:
    """Return the ms of the products of 0.2 s, three at least, after as many unmeasured."""
    product_ms = _time_ms(product, _WARMUPS)[-1]
    settling, measured = (
        max(_FEWEST_PRODUCTS, math.ceil(phase_ms / product_ms))
        for phase_ms in (_SETTLE_MS, _MEASURE_MS)
    )
    # In one go: a pause would let the clocks rise again.
    return _time_ms(product, settling + measured)[settling:]


def _time_ms(product: Callable[[], object], count: int) -> list[float]:
    """Return the ms of each of `count` products, by CUDA events; waits until they are done."""
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(count + 1)
    ]
    events[0].record()
    for event in events[1:]:
        product()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]
