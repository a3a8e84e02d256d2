"""Hooks inside a step: when its parts begin and end, and what its peak of memory consists of.

A mark is a CUDA event on the current stream, or the time of the host on a CPU. Marks do not wait
for the device. Call `end_step` after each step, and read the times after the device is done with
the steps.

This module lacks `from __future__ import annotations`, because DDP compares the annotations of a
hook with its classes.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from raybench.conversion import NS_PER_MS
from raybench.records.doubts import NotMeasured
from raybench.records.measurement import PeakParts, RegionTime
from raybench.workloads.base import count_compiled_frames

# A CUDA event, or nanoseconds of `time.perf_counter_ns`.
Mark = torch.cuda.Event | int


def make_marker(device: torch.device) -> Callable[[], Mark]:
    """Return a function that marks the current moment, for `elapsed_ms`.

    On a GPU a mark is the moment when the queued work of the current stream is done.
    """

    def record_event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return record_event if device.type == "cuda" else time.perf_counter_ns


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Return the ms between two marks; the device must have passed both."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / NS_PER_MS
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    duration_ms: float = start.elapsed_time(end)
    return duration_ms


T = TypeVar("T")


class _StepMarks(Generic[T]):
    """Marks of several steps."""

    def __init__(self, device: torch.device) -> None:
        self._mark = make_marker(device)
        # The marks of each ended step, and last of the current step.
        self._steps: list[list[T]] = [[]]

    def end_step(self) -> None:
        """End the current step: later marks belong to the next step."""
        self._steps.append([])

    def _take_ended(self) -> list[list[T]]:
        """Return the marks of each ended step, and forget these steps."""
        ended, self._steps = self._steps[:-1], self._steps[-1:]
        return ended


# When a bucket of gradients was ready, and when it was reduced, both in ms since the first bucket
# of the step was ready.
BucketTimes = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """A bucket of gradients in a step."""

    # When the gradients were computed.
    ready: Mark
    # The collective that reduces the bucket.
    work: dist.Work
    # When the collective was complete.
    reduced: Mark | None = None


class BucketMarks(_StepMarks[_Bucket]):
    """Times the averaging of gradients in `hook`."""

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the ranks as DDP does without a hook, and mark its times.

        Args:
            state: the process group; any other value means all ranks.
        """
        gradients = bucket.buffer()
        group = state if isinstance(state, dist.ProcessGroup) else None
        # Divide before the sum, which could overflow.
        gradients.div_(dist.get_world_size(group))
        ready = self._mark()
        work = dist.all_reduce(gradients, group=group, async_op=True)
        assert work is not None
        bucket_marks = _Bucket(ready=ready, work=work)
        self._steps[-1].append(bucket_marks)

        def mark_reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            # On a GPU this runs on a stream that waits for the collective.
            bucket_marks.reduced = self._mark()
            return future.value()[0]

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(mark_reduced)
        return future

    def take(self) -> tuple[tuple[BucketTimes, ...], ...]:
        """Return the bucket times of each ended step, and forget these steps.

        This waits for the collectives. A step in which DDP reduced nothing has no buckets.
        """
        steps: list[tuple[BucketTimes, ...]] = []
        for buckets in self._take_ended():
            times: list[BucketTimes] = []
            for bucket in buckets:
                # Without a wait NCCL's process group would keep the gradients of the collective.
                bucket.work.wait()
                assert bucket.reduced is not None, "a step returned before its bucket was reduced"
                first_ready = buckets[0].ready
                ready_ms = elapsed_ms(first_ready, bucket.ready)
                times.append((ready_ms, elapsed_ms(first_ready, bucket.reduced)))
            steps.append(tuple(times))
        return tuple(steps)


def comm_ms(buckets: Sequence[BucketTimes]) -> float:
    """Return the ms in which at least one bucket was ready and not yet reduced.

    Args:
        buckets: buckets of a step in the order in which they were ready.
    """
    # The length of the union of intervals. `covered_ms` is the end of the union so far.
    covered_ms, total_ms = float("-inf"), 0.0
    for ready_ms, reduced_ms in buckets:
        total_ms += max(0.0, reduced_ms - max(ready_ms, covered_ms))
        covered_ms = max(covered_ms, reduced_ms)
    return total_ms


def tail_ms(buckets: Sequence[BucketTimes]) -> float:
    """Return the ms from when the last gradient was ready to the end of the last collective.

    Args:
        buckets: at least one bucket.
    """
    return max(reduced for _, reduced in buckets) - max(ready for ready, _ in buckets)


class OptimizerMarks(_StepMarks[tuple[Mark, Mark]]):
    """Marks when the outermost `Optimizer.step` begins and ends."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # Begins of optimizer steps that have not ended, the outermost first.
        self._open_begins: list[Mark] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark the steps of all optimizers inside the `with` block."""
        handles = [
            register_optimizer_step_pre_hook(self.begin),
            register_optimizer_step_post_hook(self.end),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, *_: object) -> None:
        """Mark the begin of an optimizer's step; `end` must follow."""
        self._open_begins.append(self._mark())

    def end(self, *_: object) -> None:
        """Mark the end of an optimizer's step, unless it is inside another step or has no begin."""
        if not self._open_begins:
            return
        begin = self._open_begins.pop()
        # Steps may be nested: ZeroRedundancyOptimizer contains another optimizer.
        if not self._open_begins:
            self._steps[-1].append((begin, self._mark()))

    def take(self) -> list[float | None]:
        """Return the ms of the optimizers in each ended step; None for a step without optimizer."""
        steps_ms: list[float | None] = []
        for spans in self._take_ended():
            steps_ms.append(sum(elapsed_ms(*span) for span in spans) if spans else None)
        return steps_ms


@dataclass(slots=True, kw_only=True)
class _RegionSpan:
    name: str
    start: Mark
    end: Mark | None = None


class RegionMarks(_StepMarks[_RegionSpan]):
    """Marks when each region begins and ends; call `end_step` outside all regions."""

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Mark begin and end of the `with` block as a call of region `name`."""
        span = _RegionSpan(name=name, start=self._mark())
        self._steps[-1].append(span)
        try:
            yield
        finally:
            span.end = self._mark()

    def take(self, steps: int, step_ms: float) -> tuple[RegionTime, ...]:
        """Return the median ms of each region over the last steps; forget all ended steps.

        A step that did not enter a region counts with 0 ms.

        Args:
            steps: number of steps, above 0.
            step_ms: duration of a step, the denominator of the regions' shares.
        """
        # The ms of each call, by step and region.
        steps_calls_ms: list[dict[str, list[float]]] = []
        for spans in self._take_ended()[-steps:]:
            calls_ms: dict[str, list[float]] = defaultdict(list)
            for span in spans:
                assert span.end is not None, "a step returned inside a region"
                calls_ms[span.name].append(elapsed_ms(span.start, span.end))
            steps_calls_ms.append(calls_ms)

        regions: list[RegionTime] = []
        # In the order of their first calls.
        names = dict.fromkeys(chain.from_iterable(steps_calls_ms))
        for name in names:
            region_calls_ms = [calls_ms.get(name, []) for calls_ms in steps_calls_ms]
            ms = statistics.median(map(sum, region_calls_ms))
            share = ms / step_ms if step_ms else 0.0
            most_calls = max(map(len, region_calls_ms))
            regions.append(RegionTime(name=name, calls=most_calls, ms=ms, share=share))
        return tuple(regions)


class ScriptMarks:
    """Marks of buckets and optimizers in the process of a script."""

    def __init__(self, device: torch.device) -> None:
        """Mark the begin of optimizer steps from now on; the caller must mark their end."""
        self._buckets, self._optimizers = BucketMarks(device), OptimizerMarks(device)
        # Filled by `find_ddp_models`.
        self._ddp_models: list[DistributedDataParallel] = []
        # Whether the ranks average gradients; `keep_gradients` ends this.
        self._reduces_gradients = True
        register_optimizer_step_pre_hook(self._optimizers.begin)
        # The caller must call this when an optimizer step ends. A hook would run too late, because
        # a hook of `child.py` was registered before and holds the script.
        self.end_optimizer = self._optimizers.end

    def find_ddp_models(self) -> NotMeasured | None:
        """Find all DDP models; return why `time_gradients` cannot hook them, None if it can.

        DDP accepts only one hook in its life, so call `time_gradients` only if all ranks can. This
        does not find models that were made before a `gc.freeze`.
        """
        # Unlike `isinstance`, this does not read `__class__`, which an object may compute.
        self._ddp_models = [
            m for m in gc.get_objects() if issubclass(type(m), DistributedDataParallel)
        ]
        if not self._ddp_models:
            return NotMeasured.SCRIPT_WITHOUT_DDP
        if any(model._comm_hooks for model in self._ddp_models):
            return NotMeasured.SCRIPT_OWN_HOOK
        if any(model.process_group is not dist.group.WORLD for model in self._ddp_models):
            return NotMeasured.SCRIPT_OWN_GROUP
        return NotMeasured.COMPILED if count_compiled_frames() else None

    def time_gradients(self) -> None:
        """Register a hook that averages gradients as DDP does and marks the times; call it once."""
        for model in self._ddp_models:
            model.register_comm_hook(None, self._hook)

    def keep_gradients(self) -> None:
        """Stop averaging gradients over ranks. Collective."""
        self._reduces_gradients = False

    def end_step(self) -> None:
        """End the current step."""
        self._buckets.end_step()
        self._optimizers.end_step()

    def take(self, steps: int) -> dict[str, list[float]]:
        """Return the times of the last `steps` ended steps in ms; forget all ended steps.

        If `steps` is 0, return nothing and forget nothing.

        * optimizer_ms: one value for each step, 0 without optimizer.
        * comm_ms, tail_ms: one value for each step that reduced gradients after `time_gradients`.
        """
        # Without steps there was no wait for the device, so events have no times yet.
        if steps == 0:
            return {}
        steps_buckets = [buckets for buckets in self._buckets.take()[-steps:] if buckets]
        return {
            "optimizer_ms": [ms or 0.0 for ms in self._optimizers.take()[-steps:]],
            "comm_ms": [comm_ms(buckets) for buckets in steps_buckets],
            "tail_ms": [tail_ms(buckets) for buckets in steps_buckets],
        }

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the average of a bucket over ranks; after `keep_gradients` the bucket itself."""
        hook = self._buckets.hook if self._reduces_gradients else noop_hook
        return hook(None, bucket)


def watch_peak(step: Callable[[], None], device: torch.device) -> PeakParts | None:
    """Run two steps; return what the peak of memory consists of in the second step. Collective.

    All modules made since `gc.freeze` count, because a workload may hold its modules anywhere.

    Args:
        device: CUDA device with index; its peak counters are reset.

    Returns:
        None if the device has no weights.
    """
    # Find the optimizers in a first step.
    optimizers: dict[torch.optim.Optimizer, None] = {}
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: optimizers.setdefault(optimizer))
    try:
        step()
    finally:
        hook.remove()

    # Find all weights and buffers.
    gc.collect()
    # Not isinstance, because a proxy may run its own code when it is asked for its class.
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    parameters += [parameter for module in modules for parameter in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    # Each parameter once.
    tensors = [*dict.fromkeys(parameters), *buffers]
    weights = [tensor for tensor in tensors if tensor.device == device]
    if not weights:
        step()  # all ranks must run the same number of steps
        return None

    # Watch the gradients in a second step.
    torch.cuda.reset_peak_memory_stats(device)
    begin_bytes, gradients = torch.cuda.memory_allocated(device), _GradientsAtPeak(weights, device)
    gradients_before = gradients.now_bytes
    with ExitStack() as hooks:
        # Update when a gradient is complete, and before each step of an optimizer.
        hook = register_optimizer_step_pre_hook(lambda *_: gradients.update())
        hooks.callback(hook.remove)
        for weight in gradients.trained:
            hook = weight.register_post_accumulate_grad_hook(lambda _: gradients.update())  # type: ignore[no-untyped-call]
            hooks.callback(hook.remove)
        step()
    gradients.update()

    weights_bytes = _storage_bytes(weights, device)
    state_tensors = []
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state_tensors += [value for value in state.values() if isinstance(value, Tensor)]
    states_bytes = _storage_bytes(state_tensors, device)
    added_bytes = torch.cuda.max_memory_allocated(device) - begin_bytes
    return PeakParts(
        parameters_bytes=weights_bytes,
        gradients_bytes=gradients.peak_bytes,
        optimizer_bytes=states_bytes,
        activations_bytes=max(0, added_bytes - (gradients.peak_bytes - gradients_before)),
        other_bytes=max(0, begin_bytes - weights_bytes - states_bytes - gradients_before),
    )


class _GradientsAtPeak:
    """Finds the bytes of gradients at the moment when the memory of a step is largest.

    torch tells only the height of the peak. If the peak has risen since the last update, the step
    reached it with the gradients of the last update.
    """

    def __init__(self, weights: Iterable[Tensor], device: torch.device):
        self._device = device
        self.trained = [tensor for tensor in weights if tensor.requires_grad]
        # The peak of allocated memory at the last update.
        self._memory_peak_bytes = 0
        # Bytes of gradients at the last update, and at the peak.
        self.now_bytes = self.peak_bytes = self._gradient_bytes()

    def update(self) -> None:
        """Update `now_bytes`; on a new peak, first set `peak_bytes` to the old `now_bytes`."""
        memory_peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if memory_peak_bytes > self._memory_peak_bytes:
            self._memory_peak_bytes = memory_peak_bytes
            self.peak_bytes = self.now_bytes
        self.now_bytes = self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        gradients = (tensor.grad for tensor in self.trained if tensor.grad is not None)
        return _storage_bytes(gradients, self._device)


def _storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of the tensors' storages on the device; each storage counts once."""
    sizes = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # the shard of a DTensor
        if local.device == device:
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
