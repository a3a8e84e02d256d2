"""The instruments of the timed loop: timers, counts of memory, CUDA graphs, values of all ranks.

Iterations are timed in blocks, by CUDA events on a GPU and by the host's monotonic clock on a CPU.
Inside a block nothing synchronises: on a GPU one event is recorded between consecutive iterations,
so the durations of a block add up to its whole time, and the only synchronisation is at its end.
Inside a block ranks communicate only where the steps do.

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
from typing import Any

import torch
import torch.distributed as dist

from raybench.conversion import NS_PER_MS
from raybench.errors import UsageError
from raybench.records.measurement import Samples
from raybench.workloads.base import Context, PartTimes, Workload

Step = Callable[[], None]

# DistributedDataParallel times its first ten iterations with events that it waits for; torch's
# notes ask for eleven before a capture. The cold iteration is one more.
EAGER_ITERATIONS = 12
# Replays of a single step, to learn how long one takes.
TRIAL_REPLAYS = 10


class Timer:
    """Times blocks of iterations on one rank.

    On a GPU by CUDA events between iterations on the current stream, read after the block; their
    resolution is about 0.5 us (cuEventElapsedTime in the CUDA driver API). On a CPU by the host's
    clock: right where a step is done when it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._origin_ns = perf_counter_ns()

    def time_block(
        self, step: Step, iterations: int, parts: PartTimes, *, lead_in: int = 0
    ) -> Samples:
        """Run `step` `iterations` times, wait for the device, and return how long each took.

        Durations are in ns, starts in ns since the timer was made, on a GPU as if it began the
        first iteration when the host did; `throttled` is empty. parts: where the step notes the
        host time of its parts, 0 in iterations without it; times noted before the first timed one
        are dropped. lead_in: untimed iterations before, so that the device has work queued when the
        clock starts: iterations that find the queue empty take longer than all later ones.
        """
        events: list[torch.cuda.Event] = []
        mark: Callable[[], None] = lambda: None  # noqa: E731
        if self._on_gpu:
            events = [
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(iterations + 1)
            ]
            unrecorded, stream = iter(events), torch.cuda.current_stream()
            mark = lambda: next(unrecorded).record(stream)  # noqa: E731
        for _ in range(lead_in):
            step()
        marks_ns = [0] * (iterations + 1)
        spent_ns: list[dict[str, int]] = [{}] * iterations
        clock, take = perf_counter_ns, parts.take
        take()
        # The hot loop: the host's clock is read before each iteration and after the last one.
        for iteration in range(iterations):
            marks_ns[iteration] = clock()
            mark()
            step()
            spent_ns[iteration] = take()
        marks_ns[iterations] = clock()
        mark()
        host_ns = step_ns = tuple(end - start for start, end in pairwise(marks_ns))
        starts_ns = marks_ns[:-1]
        if events:
            torch.cuda.synchronize()
            step_ns = tuple(
                round(event.elapsed_time(following) * NS_PER_MS)
                for event, following in pairwise(events)
            )
            since_ns = [round(events[0].elapsed_time(event) * NS_PER_MS) for event in events[:-1]]
            starts_ns = [marks_ns[0] + ns for ns in since_ns]
        names = sorted({name for iteration_ns in spent_ns for name in iteration_ns})
        return Samples(
            start_ns=tuple(ns - self._origin_ns for ns in starts_ns),
            step_ns=step_ns,
            host_ns=host_ns,
            part_ns={name: tuple(one.get(name, 0) for one in spent_ns) for name in names},
        )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and keep Python's collector off in the `with` block; then as before."""
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
    """Return the samples of loops of `inner` steps with durations per step, in whole ns.

    Starts and `throttled` stay as they are.
    """
    return replace(
        samples,
        step_ns=tuple(round(ns / inner) for ns in samples.step_ns),
        host_ns=tuple(round(ns / inner) for ns in samples.host_ns),
        part_ns={
            name: tuple(round(ns / inner) for ns in part_ns)
            for name, part_ns in samples.part_ns.items()
        },
    )


def join_blocks(blocks: Sequence[Samples]) -> Samples:
    """Return the samples of all blocks as one, in their order.

    A part that a block lacks counts as 0 ns there. `throttled` is empty unless all blocks have it.
    """
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


class MemoryUse:
    """What torch's allocator counted in the timed steps; all fields are None on a CPU.

    allocated_bytes: peak between `restart` and `paused`; None before the first `paused`.
    reserved_bytes: peak until the last `restart` or `paused`, without paused blocks; None before.
    retries: allocations that failed until cached memory was given back. device_allocs: calls of
    cudaMalloc. Both, of `counting`, stop the device; a step in a steady state needs neither.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without peaks; resets torch's peak counters of the device, unless it is a CPU."""
        self._device, self._is_counted = device, device.type == "cuda"
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self.retries = self.device_allocs = 0 if self._is_counted else None
        self._reset()

    def restart(self) -> None:
        """Forget the peak of allocated memory since the last `paused`, not that of reserved memory.

        Call it after a warm-up: DDP makes its buckets anew in the second step, and NCCL keeps the
        first ones for a varying number of steps, in which gradients count twice.
        """
        self._read_reserved()
        self._reset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the `with` block out of both peaks of memory; take in the peaks before it.

        Memory that is still allocated, or reserved, at its end counts from then on.
        """
        self._read_reserved()
        if self._is_counted:
            allocated = torch.cuda.max_memory_allocated(self._device)
            self.allocated_bytes = max(allocated, self.allocated_bytes or 0)
        yield
        self._reset()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add those of the `with` block to `retries` and `device_allocs`; nothing on a CPU."""
        if self.retries is None or self.device_allocs is None:
            yield
            return
        before = torch.cuda.memory_stats_as_nested_dict(self._device)
        yield
        after = torch.cuda.memory_stats_as_nested_dict(self._device)
        self.retries += after["num_alloc_retries"] - before["num_alloc_retries"]
        self.device_allocs += after["num_device_alloc"] - before["num_device_alloc"]

    def _read_reserved(self) -> None:
        """Take the peak of reserved memory until now into `reserved_bytes`; nothing on a CPU."""
        if self._is_counted:
            reserved = torch.cuda.max_memory_reserved(self._device)
            self.reserved_bytes = max(reserved, self.reserved_bytes or 0)

    def _reset(self) -> None:
        """Have torch begin its peaks of the device anew; nothing on a CPU."""
        if self._is_counted:
            torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def workload_stream(context: Context) -> Iterator[None]:
    """Make the workload's stream the current one inside the `with` block.

    It is a new stream if the steps will be captured in a CUDA graph; else, if `context.sms` limits
    the multiprocessors (CUDA only), this process's stream for that number; else the current stream
    stays. Work in the block runs after what was queued before it and, unless the block raises,
    before what is queued later. Raises UsageError for a CUDA graph on a device that is not CUDA,
    and where torch or the driver cannot limit the multiprocessors.
    """
    if context.cuda_graph and context.device.type != "cuda":
        raise UsageError(
            f"cuda_graph: needs a CUDA device, given {context.device.type}; "
            "leave cuda_graph out on such workers"
        )
    if context.cuda_graph:
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
    """Return the stream of this process whose kernels run on `sms` multiprocessors only.

    It is made once. Beside it its green context, which must outlive it. Raises UsageError where
    torch or the driver has no green contexts.
    """
    try:
        from torch.cuda.green_contexts import GreenContext

        part: Any = GreenContext.create(num_sms=sms, device_id=device_index)
        return part.Stream(), part
    except (ImportError, AttributeError, RuntimeError) as error:
        raise UsageError(
            "slow_by: sms needs CUDA green contexts, which torch has from 2.11 on "
            f"({_first_line(error)}); take slow_by: compute"
        ) from error


@contextmanager
def capture_graph(workload: Workload, inner: int, context: Context) -> Iterator[Step]:
    """Capture `inner` steps of the workload in a CUDA graph; yield a function that replays them.

    They are replayed once before. All ranks must call it, on a stream that is not the default one,
    after EAGER_ITERATIONS steps. The graph is gone at the end of the `with` block: a process group
    cannot be destroyed while a graph holds its collectives (pytorch#115388). Raises
    torch.OutOfMemoryError, and UsageError for any other error while the steps are captured.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # The watchdog of NCCL must have nothing left to ask about (pytorch#104487).
        align_ranks(context.device)
        step = loop_step(workload.step, inner)
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
                f"cuda_graph: a step of workload {type(workload).__name__} cannot be captured "
                f"({_first_line(first)}); its step must not wait for the device nor copy from host "
                "memory; or leave cuda_graph out"
            ) from error
        # The first replay uploads the graph to the device.
        graph.replay()
        torch.cuda.synchronize()
        yield graph.replay
    finally:
        graph.reset()


def _first_line(error: BaseException) -> str:
    """Return the first line of the message, or the name of the class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# Collectives: every rank must call them, in the same order. Without a process group the only rank
# gets its own value back.


def align_ranks(device: torch.device) -> None:
    """Block until all ranks have called this, and on a GPU until the work queued on it is done."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def broadcast_from_rank_0(decide: Callable[[], int], device: torch.device) -> int:
    """Return on all ranks what `decide` returns on rank 0; it is called on rank 0 only.

    All ranks must call this, each with its device. `decide` must not raise: others would wait.
    """
    if not dist.is_initialized():
        return decide()
    decision = decide() if dist.get_rank() == 0 else 0
    shared = torch.tensor([decision], dtype=torch.int64, device=device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def any_rank(condition: bool, device: torch.device) -> bool:
    """Return whether it is true on any rank; all ranks must call it, each with its device."""
    return bool(max_over_ranks([int(condition)], device)[0])


def max_over_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """Return at each position the largest value of any rank; `values` without a process group.

    All ranks must call it, each with its device, and give equally many.
    """
    if not dist.is_initialized():
        return list(values)
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    largest: list[int] = shared.tolist()
    return largest


def gather_durations(step_ns: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return each rank's `step_ns`, in rank order; without a process group this rank's alone.

    All ranks must call it, each with its device, and give equally many.
    """
    if not dist.is_initialized():
        return [list(step_ns)]
    own = torch.tensor(step_ns, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [ns.tolist() for ns in gathered]


def gather_objects(value: Any) -> list[Any]:
    """Return the value of each rank, in rank order; without a process group `[value]`.

    All ranks must call it, with picklable values. NCCL sends them through the current device.
    """
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
