"""What a device's memory reaches, for a share of it: found out while a workload is set up."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from raybench.job.point import Precision
from raybench.workloads.base import Context
from raybench.workloads.compute.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

_WARMUPS, _STEPS = 10, 10
# Arrays far above the caches. A CPU's are smaller, and it is slower.
_ARRAY_BYTES = {"cuda": 2**30, "cpu": 2**25}


def memory_gb_s(context: Context) -> float | None:
    """GB/s of the triad of the workload `memory`, the median of 10 steps; None on the meta device.

    It takes 3 GiB on a GPU, which it gives back.
    """
    import torch

    size_bytes = _ARRAY_BYTES.get(context.device.type)
    if size_bytes is None:
        return None
    triad = Memory(replace(context, precision=Precision.FP32), size_bytes=size_bytes)
    time_steps = _device_times_s if context.device.type == "cuda" else _host_times_s
    step_s = statistics.median(time_steps(triad.step))
    moved = triad.memory_bytes
    del triad
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    return moved / step_s / 1e9


def _device_times_s(step: Callable[[], None]) -> list[float]:
    import torch

    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(_STEPS + 1)
    ]
    for _ in range(_WARMUPS):
        step()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _host_times_s(step: Callable[[], None]) -> list[float]:
    step()
    marks_s = [time.perf_counter()]
    for _ in range(_STEPS):
        step()
        marks_s.append(time.perf_counter())
    return [end - start for start, end in pairwise(marks_s)]
