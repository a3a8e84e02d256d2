"""Memory of a GPU as torch's allocator counts it: peaks of the timed steps, and their parts.

What the peak is made of comes from two untimed steps that are watched. The allocator says how much
there is; parameters, gradients and optimizer states are those of the process's modules and
optimizers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raybench.records import PeakParts
from raybench.workloads.base import Context, Workload

FROM_GRAPH = "unknown: steps replayed from a CUDA graph are not taken apart"
_ON_CPU = "none: torch does not count the memory of a CPU"
_NO_MODEL = "unknown: neither an optimizer of torch.optim nor a module was found"


class AllocatorCalls:
    """Counts what torch's allocator had to do in the timed blocks; both counts are None on a CPU.

    retries: allocations that failed until cached memory was given back. device_allocs: calls of
    cudaMalloc. Both stop the device, and a step in a steady state needs neither.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin both counts at 0; at None on a CPU."""
        self._device = device
        self.retries = self.device_allocs = 0 if device.type == "cuda" else None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add the calls inside the `with` block to both counts."""
        before = self._read()
        yield
        after = self._read()
        if self.retries is not None and self.device_allocs is not None:
            self.retries += after["num_alloc_retries"] - before["num_alloc_retries"]
            self.device_allocs += after["num_device_alloc"] - before["num_device_alloc"]

    def _read(self) -> Mapping[str, int]:
        """Return torch's counts of the allocator by name, since the start; empty on a CPU."""
        if self._device.type != "cuda":
            return {}
        stats: Mapping[str, int] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats


class PeakMemory:
    """Peak memory of torch's allocator in bytes; both peaks are None on a CPU.

    allocated_bytes: of the steps between `restart` and `paused`. reserved_bytes: of all the time.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without peaks; torch's counter of the device is reset, unless that is a CPU."""
        self._device, self._is_counted = device, device.type == "cuda"
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._reset()

    def restart(self) -> None:
        """Begin the peak of allocated memory anew; to be called when a warm-up is over.

        DDP makes its buckets anew in the second step. NCCL keeps the first ones until its watchdog,
        which looks ten times a second, has seen the end of what used them: gradients count twice
        for some steps, more or fewer of them from start to start.
        """
        self._read_reserved()
        self._reset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take in the peak until now, and leave out what is allocated inside the `with` block.

        Memory that is still allocated at its end counts from then on.
        """
        self._read_reserved()
        if self._is_counted:
            allocated = torch.cuda.max_memory_allocated(self._device)
            self.allocated_bytes = max(allocated, self.allocated_bytes or 0)
        yield
        self._reset()

    def _read_reserved(self) -> None:
        """Take the peak of reserved memory until now into `reserved_bytes`; nothing on a CPU."""
        if self._is_counted:
            reserved = torch.cuda.max_memory_reserved(self._device)
            self.reserved_bytes = max(reserved, self.reserved_bytes or 0)

    def _reset(self) -> None:
        if self._is_counted:
            torch.cuda.reset_peak_memory_stats(self._device)


def peak_parts(workload: Workload, context: Context) -> PeakParts | str:
    """Return what the peak of memory is made of in the second of two steps that are run for it.

    A sentence in place of it where that is not known: on a CPU, and without a model.
    """
    if context.device.type != "cuda":
        return _ON_CPU
    return watch_peak(workload, context.device) or _NO_MODEL


def watch_peak(workload: Workload, device: torch.device) -> PeakParts | None:
    """Return what the peak of memory is made of in the second of two steps that are run for it.

    None where the device has neither a module nor a tensor that an optimizer steps. All modules of
    the process count: a workload may hold its own in collections, objects and closures.
    """
    optimizers: dict[torch.optim.Optimizer, None] = {}
    with _before_optimizer_steps(lambda optimizer: optimizers.setdefault(optimizer)):
        workload.step()
    modules = _live_modules()
    held = [*_parameters(optimizers, modules), *(b for m in modules for b in m.buffers())]
    weights = [tensor for tensor in held if tensor.device == device]
    if not weights:
        return None
    torch.cuda.reset_peak_memory_stats(device)
    begin, gradients = torch.cuda.memory_allocated(device), _GradientsAtPeak(weights, device)
    gradients_before = gradients.now_bytes
    with gradients.watching():
        workload.step()
    gradients.look()
    at_peak = gradients.peak_bytes
    parameters = _storage_bytes(weights, device)
    states = _storage_bytes(
        (
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ),
        device,
    )
    added = torch.cuda.max_memory_allocated(device) - begin
    return PeakParts(
        parameters_bytes=parameters,
        gradients_bytes=at_peak,
        optimizer_bytes=states,
        activations_bytes=max(0, added - (at_peak - gradients_before)),
        other_bytes=max(0, begin - parameters - states - gradients_before),
    )


class _GradientsAtPeak:
    """Finds how many bytes of gradients there were when the memory of a step was largest.

    It looks whenever a gradient is complete, and before an optimizer steps. A new peak since the
    last look was reached with the gradients of the last look.
    """

    def __init__(self, weights: Iterable[Tensor], device: torch.device):
        """Count the gradients that are there now, of the weights that are trained."""
        self._device = device
        self._trained = [tensor for tensor in weights if tensor.requires_grad]
        self._largest = 0
        self.now_bytes = self.peak_bytes = self._count()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Call `look` at these moments inside the `with` block."""
        with ExitStack() as hooks:
            for parameter in self._trained:
                handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _: self.look()
                )
                hooks.callback(handle.remove)
            hooks.enter_context(_before_optimizer_steps(lambda _: self.look()))
            yield

    def look(self) -> None:
        """Where there is a new peak, take the gradients of the last look as those of the peak."""
        largest = torch.cuda.max_memory_allocated(self._device)
        if largest > self._largest:
            self._largest, self.peak_bytes = largest, self.now_bytes
        self.now_bytes = self._count()

    def _count(self) -> int:
        gradients = (tensor.grad for tensor in self._trained if tensor.grad is not None)
        return _storage_bytes(gradients, self._device)


@contextmanager
def _before_optimizer_steps(call: Callable[[torch.optim.Optimizer], object]) -> Iterator[None]:
    """Inside the `with` block, run `call(optimizer)` before each optimizer of torch.optim steps."""

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        call(optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _live_modules() -> list[nn.Module]:
    """Return all modules of this process: the workload before this one is gone."""
    gc.collect()
    # By the type: to ask a proxy for its class may run code of its own.
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]


def _parameters(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module]
) -> list[Tensor]:
    """Return the parameters of optimizers and modules, each once."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    stepped = (parameter for group in groups for parameter in group["params"])
    held = (parameter for module in modules for parameter in module.parameters())
    return list(dict.fromkeys([*stepped, *held]))


def _storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of all storages on the device, each once; of a DTensor its local shard."""
    sizes = {}
    for tensor in tensors:
        own = getattr(tensor, "_local_tensor", tensor)
        if own.device == device:
            storage = own.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
