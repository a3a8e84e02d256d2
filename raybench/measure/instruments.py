"""The instruments of the timed loop: timers, memory, CUDA graphs, collectives on small values.

On a GPU one CUDA event is recorded between consecutive iterations and the only synchronisation is
at the end, so the durations of a block add up to its whole time. Inside a block ranks communicate
only in their steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise

# Bind the clock now: a workload may replace it in `time`.
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist

from raybench.conversion import NS_PER_MS
from raybench.errors import UsageError
from raybench.records.measurement import Samples
from raybench.workloads.base import Context, PartTimes, Workload

Step = Callable[[], None]
# Makes a context that surrounds a block of steps.
InBlock = Callable[[], AbstractContextManager[object]]

# torch's notes ask for eleven iterations before a capture, because DistributedDataParallel waits
# for events in its first ten. The cold iteration is the twelfth.
EAGER_ITERATIONS = 12
# Replays of a single step, from which to learn its duration.
TRIAL_REPLAYS = 10


class Timer:
    """Times blocks of iterations on one rank.

    CUDA events have a resolution of about 0.5 us (cuEventElapsedTime in the CUDA driver API).
    """

    def __init__(
        self,
        device: torch.device,
        in_block: InBlock = nullcontext,
        flush: Callable[[], None] | None = None,
    ) -> None:
        """Make a timer.

        Args:
            in_block: makes a context that surrounds each block of iterations.
            flush: runs before each iteration, outside of its time; for GPUs.
        """
        self._on_gpu = device.type == "cuda"
        self._origin_ns = perf_counter_ns()
        self.in_block = in_block
        self.flush = flush

    def time_block(
        self, step: Step, iterations: int, parts: PartTimes, *, lead_in: int = 0
    ) -> Samples:
        """Run `step` `iterations` times, wait for the device, and return how long each took.

        In the result, `start_ns` counts from the construction of the timer, and `throttled` is
        empty.

        Args:
            step: one iteration.
            parts: host times of the parts of a step; earlier times are dropped.
            lead_in: number of untimed iterations before, which fill the queue of the device. Not
                used with `flush`.
        """
        with self.in_block():
            if self.flush is not None:
                return self._time_flushed(self.flush, step, iterations, parts)
            return self._time_iterations(step, iterations, parts, lead_in)

    def _time_flushed(
        self, flush: Callable[[], None], step: Step, iterations: int, parts: PartTimes
    ) -> Samples:
        """Call `flush` before each iteration; time the iteration between two events of its own."""
        stream, clock = torch.cuda.current_stream(), perf_counter_ns
        begins, ends = _make_events(iterations), _make_events(iterations)
        origin_ns = clock()
        host_ns = []
        # The device works at the first flushes while the host queues the next steps.
        for begin, end in zip(begins, ends, strict=True):
            flush()
            begin.record(stream)
            began_ns = clock()
            step()
            host_ns.append(clock() - began_ns)
            end.record(stream)
        torch.cuda.synchronize()
        parts.take()  # drop the times of parts
        # Starts since the first iteration, and durations, by the device's clock.
        offsets_ns = [round(begins[0].elapsed_time(begin) * NS_PER_MS) for begin in begins]
        step_ns = [
            round(begin.elapsed_time(end) * NS_PER_MS)
            for begin, end in zip(begins, ends, strict=True)
        ]
        return Samples(
            start_ns=tuple(origin_ns - self._origin_ns + offset_ns for offset_ns in offsets_ns),
            step_ns=tuple(step_ns),
            host_ns=tuple(host_ns),
        )

    def _time_iterations(
        self, step: Step, iterations: int, parts: PartTimes, lead_in: int
    ) -> Samples:
        """Time iterations without a gap: the end of an iteration is the begin of the next one."""
        events: list[torch.cuda.Event] = []
        # Records the next event; does nothing on a CPU.
        mark: Callable[[], None] = lambda: None  # noqa: E731
        if self._on_gpu:
            # Make the events now, because making one takes time.
            events = _make_events(iterations + 1)
            unrecorded, stream = iter(events), torch.cuda.current_stream()
            mark = lambda: next(unrecorded).record(stream)  # noqa: E731
        for _ in range(lead_in):
            step()
        # The host's times between iterations, and the ns of each part of a step by name.
        marks_ns = [0] * (iterations + 1)
        spent_ns: list[dict[str, int]] = [{}] * iterations
        clock, take = perf_counter_ns, parts.take
        take()  # drop earlier times
        # The hot loop: the host's clock is read before each iteration and after the last one.
        for iteration in range(iterations):
            marks_ns[iteration] = clock()
            mark()
            step()
            spent_ns[iteration] = take()
        marks_ns[iterations] = clock()
        mark()
        host_ns = tuple(end - start for start, end in pairwise(marks_ns))
        step_ns, starts_ns = host_ns, marks_ns[:-1]
        if events:
            torch.cuda.synchronize()
            step_ns = tuple(
                round(start.elapsed_time(end) * NS_PER_MS) for start, end in pairwise(events)
            )
            offsets_ns = [round(events[0].elapsed_time(event) * NS_PER_MS) for event in events[:-1]]
            starts_ns = [marks_ns[0] + offset_ns for offset_ns in offsets_ns]
        part_ns: dict[str, tuple[int, ...]] = {}
        for name in sorted(set().union(*spent_ns)):
            part_ns[name] = tuple(iteration_ns.get(name, 0) for iteration_ns in spent_ns)
        return Samples(
            start_ns=tuple(ns - self._origin_ns for ns in starts_ns),
            step_ns=step_ns,
            host_ns=host_ns,
            part_ns=part_ns,
        )


def _make_events(count: int) -> list[torch.cuda.Event]:
    return [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(count)
    ]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and disable the garbage collector inside the `with` block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def loop_step(step: Step, inner: int) -> Step:
    """Return a function that runs `step` `inner` times, for steps too short to be timed alone."""
    if inner == 1:
        return step

    def loop() -> None:
        for _ in range(inner):
            step()

    return loop


def per_step(samples: Samples, inner: int) -> Samples:
    """Return samples of loops of `inner` steps with durations per step, rounded to ns."""

    def divide(durations_ns: Sequence[int]) -> tuple[int, ...]:
        return tuple(round(ns / inner) for ns in durations_ns)

    return replace(
        samples,
        step_ns=divide(samples.step_ns),
        host_ns=divide(samples.host_ns),
        part_ns={name: divide(part_ns) for name, part_ns in samples.part_ns.items()},
    )


def join_blocks(blocks: Sequence[Samples]) -> Samples:
    """Return the samples of all blocks in order.

    A part that a block lacks counts as 0 ns. `throttled` is empty unless all blocks have it.
    """
    names = {name for block in blocks for name in block.part_ns}
    part_ns: dict[str, tuple[int, ...]] = {}
    for name in sorted(names):
        block_ns = (block.part_ns.get(name, (0,) * len(block.step_ns)) for block in blocks)
        part_ns[name] = tuple(chain(*block_ns))
    # A block without `throttled` would shift the values of later blocks.
    have_throttled = all(block.throttled for block in blocks)
    throttled = chain(*(block.throttled for block in blocks)) if have_throttled else ()
    return Samples(
        start_ns=tuple(ns for block in blocks for ns in block.start_ns),
        step_ns=tuple(ns for block in blocks for ns in block.step_ns),
        host_ns=tuple(ns for block in blocks for ns in block.host_ns),
        part_ns=part_ns,
        throttled=tuple(throttled),
    )


class MemoryUse:
    """What torch's allocator counted in the timed steps; all fields are None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """Reset torch's peak counters of the device."""
        self._device, self._is_counted = device, device.type == "cuda"
        # Peak of allocated memory between `restart` and `paused`.
        self.allocated_bytes: int | None = None
        # Peak of reserved memory until the last `restart` or `paused`, without paused blocks.
        self.reserved_bytes: int | None = None
        # Allocations that succeeded only after cached memory was freed, and calls of cudaMalloc,
        # both inside `counting`. They stop the device; a step in a steady state has none.
        self.retries = self.device_allocs = 0 if self._is_counted else None
        self._reset_peaks()

    def restart(self) -> None:
        """Forget the peak of allocated memory since the last `paused`; call this after a warm-up.

        In the warm-up gradients may count twice: DDP makes new buckets in the second step, and NCCL
        keeps the first buckets for some steps.
        """
        self._update_reserved_peak()  # the peak of reserved memory includes the warm-up
        self._reset_peaks()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the `with` block from both peaks.

        Memory that is still allocated or reserved at the end of the block counts from then on.
        """
        self._update_reserved_peak()
        if self._is_counted:
            allocated = torch.cuda.max_memory_allocated(self._device)
            self.allocated_bytes = max(allocated, self.allocated_bytes or 0)
        yield
        self._reset_peaks()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count `retries` and `device_allocs` inside the `with` block."""
        if self.retries is None or self.device_allocs is None:
            yield
            return
        before = torch.cuda.memory_stats_as_nested_dict(self._device)
        yield
        after = torch.cuda.memory_stats_as_nested_dict(self._device)
        self.retries += after["num_alloc_retries"] - before["num_alloc_retries"]
        self.device_allocs += after["num_device_alloc"] - before["num_device_alloc"]

    def _update_reserved_peak(self) -> None:
        if self._is_counted:
            reserved = torch.cuda.max_memory_reserved(self._device)
            self.reserved_bytes = max(reserved, self.reserved_bytes or 0)

    def _reset_peaks(self) -> None:
        if self._is_counted:
            torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def workload_stream(context: Context) -> Iterator[None]:
    """Make the workload's stream the current stream inside the `with` block.

    A CUDA graph needs a new stream, and `context.sms` a stream with fewer multiprocessors.
    Otherwise the current stream stays.

    Raises:
        UsageError: cuda_graph on a CPU, or multiprocessors cannot be limited.
    """
    if context.cuda_graph and context.device.type != "cuda":
        raise UsageError(
            f"cuda_graph: needs a CUDA device, given {context.device.type}; "
            "leave cuda_graph out on such workers"
        )
    if context.cuda_graph:
        # torch cannot capture the default stream. Build the workload on the new stream, too,
        # because autograd and DDP remember the stream on which they were set up.
        stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
    elif context.sms is not None:
        stream, _ = _limited_stream(context.device.index, context.sms)
    else:
        yield
        return
    outer = torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


@cache
def _limited_stream(device_index: int, sms: int) -> tuple[torch.cuda.Stream, Any]:
    """Return the stream whose kernels run on `sms` multiprocessors, and its green context.

    The green context must outlive the stream.
    """
    try:
        from torch.cuda.green_contexts import GreenContext

        green_context: Any = GreenContext.create(num_sms=sms, device_id=device_index)
        return green_context.Stream(), green_context
    except (ImportError, AttributeError, RuntimeError) as error:
        raise UsageError(
            "slow_by: sms needs CUDA green contexts, which torch has from 2.11 on "
            f"({_first_line(error)}); take slow_by: compute"
        ) from error


@contextmanager
def capture_graph(workload: Workload, inner: int, context: Context) -> Iterator[Step]:
    """Capture `inner` steps of the workload in a CUDA graph; yield a function that replays them.

    Call this on a side stream, after EAGER_ITERATIONS steps. Collective.

    Raises:
        UsageError: the steps cannot be captured.
        torch.OutOfMemoryError: memory has run out.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # NCCL's watchdog must have no unfinished work to query (pytorch#104487).
        align_ranks(context.device)
        step = loop_step(workload.step, inner)
        try:
            # Mode "global" fails, because NCCL's watchdog thread queries events (pytorch#104555).
            with torch.cuda.graph(
                graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                step()
        except Exception as error:
            # The end of the broken capture raised this error after the error of the step.
            step_error = error.__context__ or error
            if isinstance(step_error, torch.OutOfMemoryError):
                raise step_error from None
            raise UsageError(
                f"cuda_graph: a step of workload {type(workload).__name__} cannot be captured "
                f"({_first_line(step_error)}); its step must not wait for the device nor copy from "
                "host memory; or leave cuda_graph out"
            ) from error
        # The first replay uploads the graph to the device.
        graph.replay()
        torch.cuda.synchronize()
        yield graph.replay
    finally:
        # A process group cannot be destroyed while a graph holds its collectives (pytorch#115388).
        graph.reset()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# The following functions are collective: every rank must call them, in the same order. Without a
# process group they return the value of the only rank.


def align_ranks(device: torch.device) -> None:
    """Wait until all ranks have called this and, on a GPU, until the device is idle. Collective."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def broadcast_from_rank_0(decide: Callable[[], int], device: torch.device) -> int:
    """Run `decide` on rank 0 and return its result on all ranks. Collective.

    `decide` must not raise: the other ranks would wait for ever.
    """
    if not dist.is_initialized():
        return decide()
    decision = decide() if dist.get_rank() == 0 else 0
    shared = torch.tensor([decision], dtype=torch.int64, device=device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def any_rank(condition: bool, device: torch.device) -> bool:
    """Return whether the condition is true on any rank. Collective."""
    return bool(max_over_ranks([int(condition)], device)[0])


def max_over_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """Return the maximum over ranks of each value. Collective.

    Args:
        values: the same number of values on each rank.
    """
    if not dist.is_initialized():
        return list(values)
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    largest: list[int] = shared.tolist()
    return largest


def gather_durations(step_ns: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the durations of each rank, in rank order. Collective.

    Args:
        step_ns: the same number of durations on each rank.
    """
    if not dist.is_initialized():
        return [list(step_ns)]
    local = torch.tensor(step_ns, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return [ns.tolist() for ns in gathered]


def gather_objects(value: Any) -> list[Any]:
    """Return the picklable value of each rank, in rank order. Collective.

    NCCL sends the values through the current device.
    """
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
