"""What the memory of a step is made of when it is largest: two untimed steps that are watched.

torch's allocator knows how much, and what holds it is found by what every training step has:
parameters of modules, their gradients as they come, and the state of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raybench.records import PeakParts
from raybench.workloads.base import Context, Workload

_ON_CPU = "none: torch does not count the memory of a CPU"
FROM_GRAPH = "unknown: steps replayed from a CUDA graph are not taken apart"
# A workload holds few objects; one that holds a data set is not searched to its end.
_MOST_OBJECTS = 10_000
# Whose objects hold no modules.
_OTHERS = frozenset({"builtins", "numpy", "torch"})
_NO_MODEL = "unknown: neither an optimizer of torch.optim nor a module was found"


class Allocator(Protocol):
    """What counts the memory of a device, in bytes."""

    def allocated(self) -> int:
        """Count what is allocated now."""

    def peak(self) -> int:
        """Count the most that was allocated since `forget`."""

    def forget(self) -> None:
        """Begin the next peak."""


class _CudaAllocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def forget(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def peak_parts(workload: Workload, context: Context) -> PeakParts | str:
    """Say of what the peak of a step is made, or why that is not known."""
    if context.device.type != "cuda":
        return _ON_CPU
    if context.cuda_graph:
        return FROM_GRAPH
    return compose_peak(workload, context.device, _CudaAllocator(context.device)) or _NO_MODEL


def compose_peak(
    workload: Workload, device: torch.device, allocator: Allocator
) -> PeakParts | None:
    """Run two steps, and say of what the peak of the second is made; None without a model."""
    optimizers: dict[torch.optim.Optimizer, None] = {}
    with _on_optimizer_step(lambda one: optimizers.setdefault(one)):
        workload.step()
    modules = _find_modules(workload)
    held = [*_parameters(optimizers, modules), *(b for m in modules for b in m.buffers())]
    if not held:
        return None
    allocator.forget()
    begin, gradients = allocator.allocated(), _GradientsAtPeak(held, device, allocator)
    before = gradients.now_bytes
    with gradients.watching():
        workload.step()
    gradients.look()
    parameters, state = _bytes(held, device), _bytes(_states_of(optimizers), device)
    return PeakParts(
        parameters_bytes=parameters,
        gradients_bytes=gradients.peak_bytes,
        optimizer_bytes=state,
        activations_bytes=max(0, allocator.peak() - begin - (gradients.peak_bytes - before)),
        other_bytes=max(0, begin - parameters - state - before),
    )


class _GradientsAtPeak:
    """How much of the gradients was there when the memory of a step was largest.

    Looked at whenever a gradient has come, and before an optimizer steps: what was largest since
    the last look was so with the gradients of then.
    """

    def __init__(self, held: Iterable[Tensor], device: torch.device, allocator: Allocator) -> None:
        self._device, self._allocator = device, allocator
        self._trained = [one for one in held if one.requires_grad]
        self._largest = 0
        self.now_bytes = self.peak_bytes = self._count()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for one in self._trained:
                handle = one.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _: self.look()
                )
                hooks.callback(handle.remove)
            hooks.enter_context(_on_optimizer_step(lambda _: self.look()))
            yield

    def look(self) -> None:
        """Note the gradients where memory has grown beyond all before."""
        largest = self._allocator.peak()
        if largest > self._largest:
            self._largest, self.peak_bytes = largest, self.now_bytes
        self.now_bytes = self._count()

    def _count(self) -> int:
        return _bytes((one.grad for one in self._trained if one.grad is not None), self._device)


@contextmanager
def _on_optimizer_step(look: Callable[[torch.optim.Optimizer], object]) -> Iterator[None]:
    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        look(optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _find_modules(workload: Workload) -> list[nn.Module]:
    """Find the modules that a workload holds, also in collections, objects and functions."""
    found, seen, waiting = [], set[int](), list[object]([workload])
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            found.append(one)
        else:
            waiting.extend(_held_by(one))
    return found


def _held_by(one: object) -> Iterable[object]:
    if isinstance(one, list | tuple):
        return one
    if isinstance(one, dict):
        return one.values()
    if isinstance(one, partial):
        return (one.func, *one.args, *one.keywords.values())
    if isinstance(one, MethodType):
        return (one.__self__,)
    if isinstance(one, FunctionType):
        return getclosurevars(one).nonlocals.values()
    is_own = type(one).__module__.partition(".")[0] not in _OTHERS
    return _attributes(one) if is_own else ()


def _attributes(one: object) -> Iterator[object]:
    yield from vars(one).values() if hasattr(one, "__dict__") else ()
    yield from (getattr(one, name, None) for name in getattr(type(one), "__slots__", ()))


def _parameters(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module]
) -> list[Tensor]:
    of_optimizers = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    return list(dict.fromkeys([*of_optimizers, *(p for one in modules for p in one.parameters())]))


def _states_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for values in (of_one for one in optimizers for of_one in one.state.values()):
        yield from (value for value in values.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Add up the storages of tensors on the device, each once; of a DTensor this rank's part."""
    sizes = {}
    for tensor in tensors:
        own = getattr(tensor, "_local_tensor", tensor)
        if own.device == device:
            storage = own.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
