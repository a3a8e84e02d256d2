"""Steps captured in a CUDA graph and replayed: the device's time without that of Python.

After "CUDA Graphs" in torch's notes on CUDA semantics: a workload is built, warmed up, captured
and replayed on one side stream, because autograd and DistributedDataParallel remember the stream
on which they were set up, and the default stream cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from raybench.errors import UsageError
from raybench.measure.timing import Step, align_ranks, loop_step
from raybench.workloads.base import Context, Workload

# DistributedDataParallel times its first ten iterations with events that it waits for; torch's
# notes ask for eleven before a capture. The cold iteration is one more.
EAGER_ITERATIONS = 12
# Replays of a single step, to learn how long one takes.
TRIAL_REPLAYS = 10


def check_device(context: Context) -> None:
    """Raise UsageError where there is nothing to capture on."""
    if context.cuda_graph and context.device.type != "cuda":
        raise UsageError(
            f"cuda_graph: needs a CUDA device, given {context.device.type}; "
            "leave cuda_graph out on such workers"
        )


def own_stream(context: Context) -> AbstractContextManager[object]:
    """Enter the stream for all that is done with a workload whose steps are to be captured."""
    if not context.cuda_graph:
        return nullcontext()
    stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


@contextmanager
def capture(workload: Workload, inner: int, context: Context) -> Iterator[Step]:
    """Capture `inner` steps of the workload; the step that replays them.

    The graph is gone at the end: it holds the workload's memory, and a process group cannot be
    destroyed while a graph holds its collectives (pytorch#115388). Raises UsageError for a
    workload that cannot be captured.
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
    """Capture on the current stream; out of memory stays what it is."""
    try:
        # Not "global": NCCL's watchdog thread queries events meanwhile (pytorch#104555).
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            step()
    except Exception as error:
        # What the step raised; ending the broken capture then raises a second error.
        first = error.__context__ or error
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        reason = (str(first).strip() or type(first).__name__).splitlines()[0]
        raise UsageError(
            f"cuda_graph: a step of workload {name} cannot be captured ({reason}); its step must "
            "not wait for the device nor copy from host memory; or leave cuda_graph out"
        ) from error
