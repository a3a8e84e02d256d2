"""Moments on a rank: events on its current CUDA stream, or readings of the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# A CUDA event, or nanoseconds of `time.perf_counter_ns`.
Mark = torch.cuda.Event | int


def marker(device: torch.device) -> Callable[[], Mark]:
    """Return what marks the moment: on a GPU, when the work queued on the stream so far is done."""
    return _event if device.type == "cuda" else time.perf_counter_ns


def milliseconds(start: Mark, end: Mark) -> float:
    """From one mark to another of the same device; work up to `end` must be done."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e6
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
