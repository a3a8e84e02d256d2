"""How long iterations take: CUDA events on a GPU, the host's monotonic clock on a CPU.

Iterations are timed in blocks. Inside a block nothing synchronises: on a GPU one event is
recorded between consecutive iterations, so the durations of a block add up to its whole time,
and the only synchronisation is at its end.

Between blocks the ranks agree, outside the timed region. Without a process group the only rank
agrees with itself.

Steps captured in a CUDA graph and replayed show the device's time without that of Python. After
"CUDA Graphs" in torch's notes on CUDA semantics: a workload is built, warmed up, captured and
replayed on one side stream, because autograd and DistributedDataParallel remember the stream on
which they were set up, and the default stream cannot be captured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise

# Bound now: a workload that replaces the clock in `time` does not time itself with it.
from time import perf_counter_ns
from typing import Any, Protocol

import torch
import torch.distributed as dist

from raybench.errors import UsageError
from raybench.records import Samples
from raybench.workloads.base import Context, PartTimes, Workload

Step = Callable[[], None]

# They must outlive their streams.
_GREEN_CONTEXTS: list[Any] = []

_MS_TO_NS = 1_000_000


class Timer(Protocol):
    """Times a block of iterations on one rank."""

    def block(self, step: Step, iterations: int, parts: PartTimes, *, lead_in: int = 0) -> Samples:
        """Run `step` `iterations` times; durations in ns, starts in ns since the timer was made.

        lead_in: untimed runs right before the first, so that the device has work queued when the
        clock starts: what finds the queue empty takes longer than all that follow.
        """


class HostTimer:
    """`time.perf_counter_ns` between iterations: right where a step ends when it returns."""

    def __init__(self) -> None:
        self._origin_ns = perf_counter_ns()

    def block(self, step: Step, iterations: int, parts: PartTimes, *, lead_in: int = 0) -> Samples:
        """As Timer.block."""
        _run(step, lead_in)
        marks_ns, spent = _issue(step, iterations, parts, mark=lambda: None)
        step_ns = _differences(marks_ns)
        return Samples(
            start_ns=tuple(mark - self._origin_ns for mark in marks_ns[:-1]),
            step_ns=step_ns,
            host_ns=step_ns,
            part_ns=_by_part(spent),
        )


class CudaEventTimer:
    """One CUDA event between iterations on the current stream, read after one synchronize.

    The resolution of an event is about 0.5 us (cuEventElapsedTime in the CUDA driver API).
    """

    def __init__(self) -> None:
        self._origin_ns = perf_counter_ns()

    def block(self, step: Step, iterations: int, parts: PartTimes, *, lead_in: int = 0) -> Samples:
        """As Timer.block."""
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(iterations + 1)
        ]
        marks = iter(events)
        stream = torch.cuda.current_stream()
        _run(step, lead_in)
        marks_ns, spent = _issue(step, iterations, parts, mark=lambda: next(marks).record(stream))
        torch.cuda.synchronize()
        offset_ns = marks_ns[0] - self._origin_ns
        since_first_ns = [round(events[0].elapsed_time(event) * _MS_TO_NS) for event in events]
        return Samples(
            start_ns=tuple(offset_ns + since_ns for since_ns in since_first_ns[:-1]),
            step_ns=tuple(
                round(event.elapsed_time(following) * _MS_TO_NS)
                for event, following in pairwise(events)
            ),
            host_ns=_differences(marks_ns),
            part_ns=_by_part(spent),
        )


def make_timer(device: torch.device) -> Timer:
    """Make the timer that is right for a device."""
    return CudaEventTimer() if device.type == "cuda" else HostTimer()


def align_ranks(device: torch.device) -> None:
    """Wait until all ranks of the process group, and their devices, have come here."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest_rank_ns(step_ns: Sequence[int], device: torch.device) -> list[int]:
    """For each iteration of a block the longest duration over the ranks, known to all of them."""
    return _largest(step_ns, device)


def all_ranks_ns(step_ns: Sequence[int], device: torch.device) -> list[list[int]]:
    """Gather the durations of a block, ranks x iterations, so that all ranks know them."""
    if not dist.is_initialized():
        return [list(step_ns)]
    own = torch.tensor(step_ns, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [ns.tolist() for ns in gathered]


def as_rank_0_says(decide: Callable[[], int], device: torch.device) -> int:
    """Return what `decide` gives on rank 0; on other ranks it is not called."""
    if not dist.is_initialized():
        return decide()
    decision = decide() if dist.get_rank() == 0 else 0
    shared = torch.tensor([decision], dtype=torch.int64, device=device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def fewest_of_ranks(count: int, device: torch.device) -> int:
    """Return the smallest count over the ranks, known to all of them."""
    return -_largest([-count], device)[0]


def on_any_rank(is_so: bool, device: torch.device) -> bool:
    """Whether it is so on at least one rank."""
    return bool(_largest([int(is_so)], device)[0])


def _largest(values: Sequence[int], device: torch.device) -> list[int]:
    """At each position the largest value over the ranks."""
    if not dist.is_initialized():
        return list(values)
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    largest: list[int] = shared.tolist()
    return largest


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, then keep Python's collector out of the block; afterwards it is as before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def loop_step(step: Step, inner: int) -> Step:
    """`inner` steps as one, for steps too short to be timed alone."""
    if inner == 1:
        return step

    def loop() -> None:
        for _ in range(inner):
            step()

    return loop


def per_step(samples: Samples, inner: int) -> Samples:
    """Divide samples of `inner` steps into means of one step; starts stay where they are."""

    def divided(ns: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(round(value / inner) for value in ns)

    return replace(
        samples,
        step_ns=divided(samples.step_ns),
        host_ns=divided(samples.host_ns),
        part_ns={name: divided(ns) for name, ns in samples.part_ns.items()},
    )


def join_blocks(blocks: Sequence[Samples]) -> Samples:
    """Join the blocks of a phase into one row of iterations."""
    names = {name for block in blocks for name in block.part_ns}
    is_known = all(block.throttled for block in blocks)
    return Samples(
        start_ns=tuple(ns for block in blocks for ns in block.start_ns),
        step_ns=tuple(ns for block in blocks for ns in block.step_ns),
        host_ns=tuple(ns for block in blocks for ns in block.host_ns),
        part_ns={
            name: tuple(
                ns for block in blocks for ns in block.part_ns.get(name, (0,) * len(block.step_ns))
            )
            for name in sorted(names)
        },
        throttled=tuple(mark for block in blocks for mark in block.throttled) if is_known else (),
    )


def _run(step: Step, times: int) -> None:
    for _ in range(times):
        step()


def _issue(
    step: Step, iterations: int, parts: PartTimes, mark: Callable[[], None]
) -> tuple[list[int], list[dict[str, int]]]:
    """Run the hot loop: host marks around each iteration, and what each spent in its parts."""
    marks_ns = [0] * (iterations + 1)
    spent: list[dict[str, int]] = [{}] * iterations
    clock, take = perf_counter_ns, parts.take
    take()
    for iteration in range(iterations):
        marks_ns[iteration] = clock()
        mark()
        step()
        spent[iteration] = take()
    marks_ns[iterations] = clock()
    mark()
    return marks_ns, spent


def _differences(marks_ns: list[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in pairwise(marks_ns))


def _by_part(spent: list[dict[str, int]]) -> dict[str, tuple[int, ...]]:
    names = sorted({name for iteration in spent for name in iteration})
    return {name: tuple(iteration.get(name, 0) for iteration in spent) for name in names}


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


@contextmanager
def own_stream(context: Context) -> Iterator[None]:
    """Enter the stream for all that is done with a workload.

    One of its own where its steps are to be captured, or where it may use a part of the device's
    multiprocessors only; else the current one.
    """
    if context.cuda_graph:
        stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
    elif context.sms is not None:
        stream = _stream_on(context.device.index, context.sms)
    else:
        yield
        return
    outer = torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


@cache
def _stream_on(device_index: int, sms: int) -> torch.cuda.Stream:
    """Make a stream whose kernels run on so many multiprocessors; once in a process.

    Raises UsageError where torch or the driver cannot.
    """
    try:
        from torch.cuda.green_contexts import GreenContext

        part: Any = GreenContext.create(num_sms=sms, device_id=device_index)
        _GREEN_CONTEXTS.append(part)
        stream: torch.cuda.Stream = part.Stream()
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"slow_by: sms needs CUDA green contexts, which torch has from 2.11 on ({reason}); "
            "take slow_by: compute"
        ) from error
    return stream


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
