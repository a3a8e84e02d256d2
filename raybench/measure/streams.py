"""The CUDA stream that a workload runs on, and CUDA graphs of its steps.

Steps captured in a CUDA graph and replayed show the device's time without that of Python. After
"CUDA Graphs" in torch's notes on CUDA semantics: a workload is built, warmed up, captured and
replayed on one side stream, because autograd and DistributedDataParallel remember the stream on
which they were set up, and the default stream cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from raybench.errors import UsageError
from raybench.measure.timers import Step, align_ranks, loop_step
from raybench.workloads.base import Context, Workload

# DistributedDataParallel times its first ten iterations with events that it waits for; torch's
# notes ask for eleven before a capture. The cold iteration is one more.
EAGER_ITERATIONS = 12
# Replays of a single step, to learn how long one takes.
TRIAL_REPLAYS = 10

# Green contexts must outlive their streams.
_GREEN_CONTEXTS: list[Any] = []


def require_cuda_for_graph(context: Context) -> None:
    """Raise UsageError where the context asks for a CUDA graph on a device that is not CUDA."""
    if context.cuda_graph and context.device.type != "cuda":
        raise UsageError(
            f"cuda_graph: needs a CUDA device, given {context.device.type}; "
            "leave cuda_graph out on such workers"
        )


@contextmanager
def workload_stream(context: Context) -> Iterator[None]:
    """Make the workload's stream the current one inside the `with` block.

    It is a stream of its own where the steps will be captured in a CUDA graph, and where the
    context limits the multiprocessors (`context.sms`); else the current stream stays. Raises
    UsageError where torch or the driver cannot limit the multiprocessors.
    """
    if context.cuda_graph:
        stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
    elif context.sms is not None:
        stream = _limited_stream(context.device.index, context.sms)
    else:
        yield
        return
    outer = torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


@cache
def _limited_stream(device_index: int, sms: int) -> torch.cuda.Stream:
    """Return the stream of this process whose kernels run on `sms` multiprocessors only.

    Raises UsageError where torch or the driver has no green contexts.
    """
    try:
        from torch.cuda.green_contexts import GreenContext

        part: Any = GreenContext.create(num_sms=sms, device_id=device_index)
        _GREEN_CONTEXTS.append(part)
        stream: torch.cuda.Stream = part.Stream()
    except (ImportError, AttributeError, RuntimeError) as error:
        raise UsageError(
            "slow_by: sms needs CUDA green contexts, which torch has from 2.11 on "
            f"({_first_line(error)}); take slow_by: compute"
        ) from error
    return stream


@contextmanager
def capture_graph(workload: Workload, inner: int, context: Context) -> Iterator[Step]:
    """Capture `inner` steps of the workload in a CUDA graph; yield the step that replays them.

    All ranks must call it. The graph is gone at the end of the `with` block: it holds the
    workload's memory, and a process group cannot be destroyed while a graph holds its collectives
    (pytorch#115388). Raises UsageError for a step that cannot be captured, and
    torch.OutOfMemoryError.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # The watchdog of NCCL must have nothing left to ask about (pytorch#104487).
        align_ranks(context.device)
        _capture(graph, loop_step(workload.step, inner), type(workload).__name__)
        # The first replay uploads the graph to the device.
        graph.replay()
        torch.cuda.synchronize()
        yield graph.replay
    finally:
        graph.reset()


def _capture(graph: torch.cuda.CUDAGraph, step: Step, name: str) -> None:
    """Capture the step on the current stream into `graph`. Raises as `capture_graph`."""
    try:
        # Not "global": NCCL's watchdog thread queries events meanwhile (pytorch#104555).
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            step()
    except Exception as error:
        # The step raised the first error; ending the broken capture then raises a second one.
        first = error.__context__ or error
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        raise UsageError(
            f"cuda_graph: a step of workload {name} cannot be captured ({_first_line(first)}); its "
            "step must not wait for the device nor copy from host memory; or leave cuda_graph out"
        ) from error


def _first_line(error: BaseException) -> str:
    """Return the first line of the message, or the name of the class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
