"""Time a function in this process, without a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from raybench.conversion import MIB
from raybench.errors import UsageError
from raybench.hardware.devices import describe_device
from raybench.job.model import Measure
from raybench.measure import phases
from raybench.measure.instruments import gather_objects
from raybench.records.device import Device
from raybench.records.measurement import Measurement
from raybench.workloads.base import Context
from raybench.workloads.functions import Function, StepFunctions

# As triton.testing.do_bench does; larger than the L2 cache of any GPU of 2026.
_FLUSHED_BYTES = 256 * MIB
# With a flush a sample is a single step, however short it is.
_FLUSHED_WARMUP, _LEAST_FLUSHED, _MOST_FLUSHED = 25, 30, 20_000


def time_here(
    functions: StepFunctions,
    items: float | None,
    settings: Measure,
    device: Literal["auto", "cuda", "cpu"],
    *,
    flush_l2: bool = False,
) -> tuple[tuple[Measurement, ...], tuple[Device, ...]]:
    """Time a step on this process's device; return measurement and device of each rank.

    Where torch.distributed is initialised, all its ranks must call this.

    Args:
        functions: the step, and its set-up if there is one.
        items: number of items that a step finishes on one rank.
        settings: how long to measure. The breakdown is left out on a CPU and with `flush_l2`.
        device: auto is the current GPU if set-up or step use CUDA, else the CPU.
        flush_l2: empty the L2 cache of the GPU before each sample, which then is a single step.

    Raises:
        UsageError: there is no such device.
        Exception: whatever set-up or step raise.
    """
    began_s = time.perf_counter()
    context = _context(device)
    workload = Function.of(functions)(context, items_per_step=items)
    if device == "auto" and context.device.type == "cuda":
        # Nothing but the step itself tells whether it uses the GPU.
        workload.step()
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            context = replace(context, device=torch.device("cpu"))
    if context.device.type == "cuda":
        context = replace(context, device=torch.device("cuda", torch.cuda.current_device()))
    on_gpu = context.device.type == "cuda"
    if flush_l2 and not on_gpu:
        raise UsageError("flush_l2: needs a GPU, and the step runs on the CPU; leave it out")

    flush = _make_flush(context.device) if flush_l2 else None
    settings = settings.model_copy(update={"breakdown": on_gpu and not flush_l2})
    if flush is not None:
        settings = _with_flushed_count(settings, workload.step, flush)
    start = phases.PointStart(began_s=began_s, flush=flush)
    measurement = phases.measure(lambda: workload, context, settings, start=start)
    described = describe_device(
        context.device, context.device.index or context.local_rank, node_id="", address=""
    )
    answers: list[tuple[Measurement, Device]] = gather_objects((measurement, described))
    return tuple(answer for answer, _ in answers), tuple(device for _, device in answers)


def _context(device: Literal["auto", "cuda", "cpu"]) -> Context:
    """Return a context for this rank; a GPU has no index yet."""
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UsageError("device cuda: torch finds no GPU; leave it out to measure on the CPU")
    is_group = dist.is_available() and dist.is_initialized()
    return Context(
        # Without an index: asking for the current GPU would initialise CUDA.
        device=torch.device("cuda" if has_gpu else "cpu"),
        rank=dist.get_rank() if is_group else 0,
        world_size=dist.get_world_size() if is_group else 1,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")) if is_group else 0,
        batch_size=1,
    )


def _make_flush(device: torch.device) -> Callable[[], None]:
    """Return a function that fills the L2 cache with other data."""
    size = max(_FLUSHED_BYTES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
    buffer = torch.empty(size, dtype=torch.int8, device=device)

    def flush() -> None:
        buffer.zero_()

    return flush


def _with_flushed_count(
    settings: Measure, step: Callable[[], object], flush: Callable[[], None]
) -> Measure:
    """Return settings with as many samples as fill the seconds, flushes included."""
    step()
    torch.cuda.synchronize()
    trial_steps = 5
    began_s = time.perf_counter()
    for _ in range(trial_steps):
        flush()
        step()
    torch.cuda.synchronize()
    flush_and_step_s = (time.perf_counter() - began_s) / trial_steps
    count = min(_MOST_FLUSHED, max(_LEAST_FLUSHED, int(settings.timed_s / flush_and_step_s)))
    return Measure.model_validate(
        {**settings.model_dump(), "iterations": count, "warmup": _FLUSHED_WARMUP}
    )
