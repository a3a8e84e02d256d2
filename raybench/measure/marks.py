"""What hooks see inside of a step: moments of its parts, and what its peak of memory is made of.

A moment is a CUDA event on the current stream, on a CPU the host's clock. Nothing waits for the
device while a step runs. Each class collects moments step by step: its `end_step` is called after
each step, and its times are read when the device is done with the steps.

What the peak is made of comes from two untimed steps. The allocator says how much there is;
parameters, gradients and optimizer states are those of the process's modules and optimizers.

Without `from __future__ import annotations`: DDP compares a hook's annotations with its classes.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
    """Return a function that returns a mark of the present moment, for `elapsed_ms`.

    On a GPU, the current one, that is when the work queued on its current stream so far is done.
    """

    def record_event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return record_event if device.type == "cuda" else time.perf_counter_ns


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Return the ms between two marks of a device, which must be done with the work up to `end`."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / NS_PER_MS
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    between_ms: float = start.elapsed_time(end)
    return between_ms


T = TypeVar("T")


class _StepMarks(Generic[T]):
    """Notes things step by step; `_steps` has the ended steps and the current one."""

    def __init__(self, device: torch.device) -> None:
        self._mark = make_marker(device)
        self._steps: list[list[T]] = [[]]

    def end_step(self) -> None:
        """End the current step: what is noted from now on belongs to the next one."""
        self._steps.append([])

    def _take_ended(self) -> list[list[T]]:
        """Return what was noted in each ended step, and forget these steps."""
        steps, self._steps = self._steps[:-1], self._steps[-1:]
        return steps


# When a bucket of gradients was ready and when it was reduced, in ms since the first was ready.
BucketTimes = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """ready: its gradients are computed. reduced: its collective is complete."""

    ready: Mark
    work: dist.Work
    reduced: Mark | None = None


class BucketMarks(_StepMarks[_Bucket]):
    """Times the averaging of gradients, which `hook` does; call `end_step` after each step."""

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future of a bucket's mean over the ranks, as DDP computes it without a hook.

        DDP calls it for each bucket; it notes when the bucket was ready and reduced. state: the
        process group whose ranks train together; with any other value all ranks do.
        """
        gradients = bucket.buffer()
        group = state if isinstance(state, dist.ProcessGroup) else None
        # Before the sum, which could overflow.
        gradients.div_(dist.get_world_size(group))
        ready = self._mark()
        work = dist.all_reduce(gradients, group=group, async_op=True)
        assert work is not None
        marked = _Bucket(ready=ready, work=work)
        self._steps[-1].append(marked)

        def reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            """Return the reduced gradients, and mark the moment."""
            # On a GPU this runs on a stream that waits for the collective, before it is done.
            marked.reduced = self._mark()
            return future.value()[0]

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(reduced)
        return future

    def take(self) -> tuple[tuple[BucketTimes, ...], ...]:
        """Return for each ended step (ready ms, reduced ms) of its buckets; forget these steps.

        Times are since the first bucket was ready, in the order of the collectives. A step in which
        DDP reduced nothing has no bucket. Waits for the collectives; the device must be done with
        the steps.
        """
        steps: list[tuple[BucketTimes, ...]] = []
        for buckets in self._take_ended():
            times: list[BucketTimes] = []
            for bucket in buckets:
                # NCCL's process group keeps the gradients of a collective that nobody waited for.
                bucket.work.wait()
                # DDP itself waits for what follows the mark.
                assert bucket.reduced is not None, "a step returned before its bucket was reduced"
                first = buckets[0].ready
                times.append((elapsed_ms(first, bucket.ready), elapsed_ms(first, bucket.reduced)))
            steps.append(tuple(times))
        return tuple(steps)


def comm_ms(buckets: Sequence[BucketTimes]) -> float:
    """Return the ms in which at least one bucket was ready and not reduced yet; 0 for no buckets.

    buckets: in the order in which they were ready, as `BucketMarks.take` has those of a step.
    """
    free_ms, total_ms = float("-inf"), 0.0
    for ready_ms, reduced_ms in buckets:
        total_ms += max(0.0, reduced_ms - max(ready_ms, free_ms))
        free_ms = max(free_ms, reduced_ms)
    return total_ms


def tail_ms(buckets: Sequence[BucketTimes]) -> float:
    """Return the ms from the last gradient being ready to the end of the last collective.

    Meanwhile the rank has nothing to compute but the optimizer's step, which needs the result.
    Raises ValueError for no buckets.
    """
    return max(reduced for _, reduced in buckets) - max(ready for ready, _ in buckets)


class OptimizerMarks(_StepMarks[tuple[Mark, Mark]]):
    """Notes when outermost `Optimizer.step`s begin and end; call `end_step` after a whole step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._started: list[Mark] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note begin and end of each optimizer's step inside the `with` block; `take` has them."""
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
        """Note that the step of an optimizer begins; `end` must follow."""
        self._started.append(self._mark())

    def end(self, *_: object) -> None:
        """Note the end of an optimizer's step, unless it is inside another's or has no begin."""
        # ZeroRedundancyOptimizer has an optimizer inside.
        start = self._started.pop() if self._started else None
        if start is not None and not self._started:
            self._steps[-1].append((start, self._mark()))

    def take(self) -> list[float | None]:
        """Return for each ended step the ms of its optimizers in sum; forget these steps.

        None for a step in which no optimizer stepped. The device must be done with the steps.
        """
        return [
            sum(elapsed_ms(*span) for span in spans) if spans else None
            for spans in self._take_ended()
        ]


@dataclass(slots=True, kw_only=True)
class _RegionSpan:
    name: str
    start: Mark
    end: Mark | None = None


class RegionMarks(_StepMarks[_RegionSpan]):
    """Notes when each region begins and ends; call `end_step` after each step, in no region."""

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Note begin and end of the `with` block as a call of region `name`."""
        span = _RegionSpan(name=name, start=self._mark())
        self._steps[-1].append(span)
        try:
            yield
        finally:
            span.end = self._mark()

    def take(self, steps: int, step_ms: float) -> tuple[RegionTime, ...]:
        """Return the median ms of each region over the last `steps` ended steps; forget the ended.

        In the order in which regions were entered; a step that did not enter one counts with 0 ms.
        steps: above 0. step_ms: duration of a step, of which the regions' shares are fractions. The
        device must be done with the steps.
        """
        spans_ms: list[dict[str, list[float]]] = []
        for step in self._take_ended()[-steps:]:
            by_name: dict[str, list[float]] = defaultdict(list)
            for span in step:
                assert span.end is not None, "a step returned inside of a region"
                by_name[span.name].append(elapsed_ms(span.start, span.end))
            spans_ms.append(by_name)
        return tuple(
            RegionTime(
                name=name,
                calls=max(len(step.get(name, ())) for step in spans_ms),
                ms=(ms := statistics.median(sum(step.get(name, ())) for step in spans_ms)),
                share=ms / step_ms if step_ms else 0.0,
            )
            for name in dict.fromkeys(name for step in spans_ms for name in step)
        )


class ScriptMarks:
    """Buckets and optimizers of a script's steps; it lives in the script's own process.

    `raybench.workloads.scripts.child` makes it once the timed steps of the script are over.
    """

    def __init__(self, device: torch.device) -> None:
        """Note each begin of an optimizer step from now on; the caller calls `end_optimizer`."""
        self._buckets, self._optimizers = BucketMarks(device), OptimizerMarks(device)
        self._models: list[DistributedDataParallel] = []
        self._is_reduced = True
        register_optimizer_step_pre_hook(self._optimizers.begin)
        # Not by a hook: the script is held in one that was registered before.
        self.end_optimizer = self._optimizers.end

    def hook_gradients(self) -> NotMeasured | None:
        """Find all DDP models; return why their gradients cannot be hooked, None if they can.

        Those made before a `gc.freeze` are not found. DDP takes one hook in its life, so none is
        registered before all ranks can: `time_gradients` does that.
        """
        self._models = [m for m in gc.get_objects() if issubclass(type(m), DistributedDataParallel)]
        if not self._models:
            return NotMeasured.SCRIPT_WITHOUT_DDP
        if any(model._comm_hooks for model in self._models):
            return NotMeasured.SCRIPT_OWN_HOOK
        if any(model.process_group is not dist.group.WORLD for model in self._models):
            return NotMeasured.SCRIPT_OWN_GROUP
        return NotMeasured.COMPILED if count_compiled_frames() else None

    def time_gradients(self) -> None:
        """Register a hook that averages gradients as DDP does without one, and notes the times.

        Call it once, after `hook_gradients` has returned None on all ranks.
        """
        for model in self._models:
            model.register_comm_hook(None, self._hook)

    def keep_gradients(self) -> None:
        """Have the hook of `time_gradients` average none from now on; all ranks must call it."""
        self._is_reduced = False

    def end_step(self) -> None:
        """End the current step: later buckets and optimizers belong to the next one."""
        self._buckets.end_step()
        self._optimizers.end_step()

    def take(self, steps: int) -> dict[str, list[float]]:
        """Return times of the last `steps` ended steps in ms, and forget all ended steps.

        The device must be done with them. optimizer_ms: one per step, 0 without optimizer. comm_ms,
        tail_ms: only of steps that reduce gradients after `time_gradients`. For 0 steps {}, and
        nothing is forgotten.
        """
        if steps == 0:  # nothing has waited for the device
            return {}
        buckets = self._buckets.take()[-steps:]
        return {
            "optimizer_ms": [ms or 0.0 for ms in self._optimizers.take()[-steps:]],
            "comm_ms": [comm_ms(each) for each in buckets if each],
            "tail_ms": [tail_ms(each) for each in buckets if each],
        }

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the average of a bucket over ranks, or the bucket itself after keep_gradients."""
        return (self._buckets.hook if self._is_reduced else noop_hook)(None, bucket)


def watch_peak(step: Callable[[], None], device: torch.device) -> PeakParts | None:
    """Run two steps, and return what the peak of memory is made of in the second.

    None if the device has no parameter or buffer of a module, nor a tensor that an optimizer
    stepped in the first. All modules made since `gc.freeze` count: a workload may hold its own in
    collections, objects and closures. device: of CUDA, with its index; its peaks are reset. Peers
    that steps communicate with must call it too.
    """
    optimizers: dict[torch.optim.Optimizer, None] = {}
    hook = register_optimizer_step_pre_hook(lambda one, *_: optimizers.setdefault(one))
    try:
        step()
    finally:
        hook.remove()
    gc.collect()
    # By the type: to ask a proxy for its class may run code of its own.
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = [parameter for group in groups for parameter in group["params"]]
    held = [parameter for module in modules for parameter in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    weights = [t for t in (*dict.fromkeys(stepped + held), *buffers) if t.device == device]
    if not weights:
        step()  # as often as on other ranks, which may wait for this one
        return None
    torch.cuda.reset_peak_memory_stats(device)
    begin, gradients = torch.cuda.memory_allocated(device), _GradientsAtPeak(weights, device)
    gradients_before = gradients.now_bytes
    with ExitStack() as hooks:
        # Whenever a gradient is complete, and before an optimizer steps.
        hook = register_optimizer_step_pre_hook(lambda *_: gradients.look())
        hooks.callback(hook.remove)
        for weight in gradients.trained:
            hook = weight.register_post_accumulate_grad_hook(lambda _: gradients.look())  # type: ignore[no-untyped-call]
            hooks.callback(hook.remove)
        step()
    gradients.look()
    parameters = _storage_bytes(weights, device)
    kept = [value for one in optimizers for state in one.state.values() for value in state.values()]
    states = _storage_bytes((value for value in kept if isinstance(value, Tensor)), device)
    added = torch.cuda.max_memory_allocated(device) - begin
    return PeakParts(
        parameters_bytes=parameters,
        gradients_bytes=gradients.peak_bytes,
        optimizer_bytes=states,
        activations_bytes=max(0, added - (gradients.peak_bytes - gradients_before)),
        other_bytes=max(0, begin - parameters - states - gradients_before),
    )


class _GradientsAtPeak:
    """Finds how many bytes of gradients there were when the memory of a step was largest.

    A new peak since the last look was reached with the gradients of the last look. trained: the
    weights whose gradients count.
    """

    def __init__(self, weights: Iterable[Tensor], device: torch.device):
        """Count the bytes of the gradients of trained weights that exist now."""
        self._device = device
        self.trained = [tensor for tensor in weights if tensor.requires_grad]
        self._largest = 0
        self.now_bytes = self.peak_bytes = self._count()

    def look(self) -> None:
        """Count `now_bytes` anew; on a new peak of memory, first set `peak_bytes` to them.

        To be called whenever a gradient is complete, before an optimizer steps, and after the step.
        """
        largest = torch.cuda.max_memory_allocated(self._device)
        if largest > self._largest:
            self._largest, self.peak_bytes = largest, self.now_bytes
        self.now_bytes = self._count()

    def _count(self) -> int:
        """Return the bytes of the gradients that are there now."""
        gradients = (tensor.grad for tensor in self.trained if tensor.grad is not None)
        return _storage_bytes(gradients, self._device)


def _storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of all storages on the device, each once; of a DTensor its local shard."""
    sizes = {}
    for tensor in tensors:
        own = getattr(tensor, "_local_tensor", tensor)
        if own.device == device:
            storage = own.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
