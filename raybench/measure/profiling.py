"""What `--profile` adds for chosen points: a trace of each rank, and times by module, by hooks.

A process in which torch.profiler has used CUPTI launches more slowly from then on
(pytorch#144455): it is not fit for measuring any more.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, schedule
from torch.utils._pytree import tree_map_only

from raybench.measure.breakdown import hook_setter
from raybench.measure.marks import Mark, marker, milliseconds
from raybench.measure.timing import align_ranks
from raybench.records import ModuleTime, Profile
from raybench.workloads.base import Context, Workload

_WARMUP_STEPS = 2


def profile(workload: Workload, context: Context, steps: int) -> Profile:
    """Run `steps` steps with timed modules, if there is a `model`, and as many under the profiler.

    With the communication that the workload has by itself.
    """
    set_hook = hook_setter(workload, context) if context.world_size > 1 else ""
    if not isinstance(set_hook, str):
        set_hook(None)
    for _ in range(_WARMUP_STEPS):
        workload.step()
    align_ranks(context.device)
    model = workload.model
    if isinstance(model, DistributedDataParallel):
        model = model.module  # whose modules have the same names on one rank and on many
    modules = module_times(model, workload.step, context.device, steps) if model is not None else ()
    align_ranks(context.device)
    return Profile(trace=_trace(workload, context, steps), modules=modules)


def _trace(workload: Workload, context: Context, steps: int) -> bytes:
    """Record the Chrome trace, compressed by gzip, of `steps` steps after one that is not in it."""
    activities = [ProfilerActivity.CPU]
    if context.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        with torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(1 + steps):
                workload.step()
                profiler.step()
        return path.read_bytes()


def module_times(
    model: nn.Module, step: Callable[[], None], device: torch.device, steps: int
) -> tuple[ModuleTime, ...]:
    """Medians over `steps` steps of the time in each module that ran, its children included.

    From hook to hook: on a GPU by CUDA events, with the gaps that the host leaves, which the hooks
    make longer. Backward runs from the gradient of the module's output to that of its input, or
    to its last parameter's where the input needs none. Recomputed activations count as forward. Of
    a model that is compiled block by block the blocks are the smallest; one that is compiled whole
    has no modules.
    """
    watch = _Watch(model, device)
    taken = []
    with watch.watching():
        for _ in range(steps):
            step()
            taken.append(watch.take())
    if device.type == "cuda":
        torch.cuda.synchronize()
    by_step = [_by_module(calls) for calls in taken]
    return tuple(
        _module_time(name, module, [calls[module] for calls in by_step])
        for name, module in model.named_modules()
        if all(module in calls for calls in by_step)
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One pass through a module. The backward marks stay None where no gradient passed."""

    module: nn.Module
    started: Mark
    ended: Mark | None = None
    backward_started: Mark | None = None
    backward_ended: Mark | None = None
    ends_at_input: bool = False


class _Watch:
    """Hooks on every module that note when it is entered and left, forward and backward."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._mark = marker(device)
        self._calls: list[_Call] = []
        self._latest: dict[nn.Module, _Call] = {}
        self._owners: dict[Tensor, list[nn.Module]] = defaultdict(list)
        for module in model.modules():
            for parameter in module.parameters():
                self._owners[parameter].append(module)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the `with` block calls are noted."""
        with ExitStack() as stack:
            for module in dict.fromkeys(_outside_compiled(self._model)):
                if _is_compiled(module):
                    stack.enter_context(self._watching_compiled(module))
                    continue
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            for parameter in self._owners:
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            yield

    @contextmanager
    def _watching_compiled(self, module: nn.Module) -> Iterator[None]:
        """Watch from outside: a hook of the module would be compiled with it."""
        compiled: Any = module._compiled_call_impl

        def call(*inputs: Any, **named: Any) -> Any:
            entered = self._enter(module, inputs)
            return self._leave(module, inputs, compiled(*entered, **named))

        module._compiled_call_impl = call
        try:
            yield
        finally:
            module._compiled_call_impl = compiled

    def take(self) -> list[_Call]:
        """Take the calls since the last time."""
        calls, self._calls, self._latest = self._calls, [], {}
        return [call for call in calls if call.ended is not None]

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # Of a model that is compiled whole, with its hooks: an event in compiled code is none.
        if torch.compiler.is_compiling():
            return inputs
        call = _Call(module=module, started=self._mark())
        self._calls.append(call)
        self._latest[module] = call

        def left(_: Tensor) -> None:
            call.backward_ended = self._mark()

        def watched(tensor: Tensor) -> Tensor:
            call.ends_at_input |= tensor.requires_grad
            return _with_hook(tensor, left)

        entered: tuple[Any, ...] = tree_map_only(Tensor, watched, inputs)
        return entered

    def _leave(self, module: nn.Module, _: object, outputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return outputs
        call = self._latest[module]
        call.ended = self._mark()

        def entered(_: Tensor) -> None:
            if call.backward_started is None:
                call.backward_started = self._mark()

        return tree_map_only(Tensor, lambda tensor: _with_hook(tensor, entered), outputs)

    def _accumulate(self, parameter: Tensor) -> None:
        mark = self._mark()
        for module in self._owners[parameter]:
            call = self._latest.get(module)
            if call is not None and not call.ends_at_input:
                call.backward_ended = mark


def _outside_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it, of what is compiled no more than its outermost."""
    yield module
    if not _is_compiled(module):
        for child in module.children():
            yield from _outside_compiled(child)


def _is_compiled(module: nn.Module) -> bool:
    """Whether `Module.compile` was called."""
    return module._compiled_call_impl is not None


def _with_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
    """Make a view whose gradient calls the hook.

    Of this use of the tensor alone, and free to be changed in place, which the views of
    `register_full_backward_hook` are not.
    """
    if not tensor.requires_grad:
        return tensor
    view = tensor.view_as(tensor)
    view.register_hook(hook)  # type: ignore[no-untyped-call]
    return view


def _by_module(calls: list[_Call]) -> dict[nn.Module, list[_Call]]:
    found: dict[nn.Module, list[_Call]] = defaultdict(list)
    for call in calls:
        found[call.module].append(call)
    return found


def _module_time(name: str, module: nn.Module, steps: list[list[_Call]]) -> ModuleTime:
    forward_ms = [sum(_span_ms(call.started, call.ended) for call in calls) for calls in steps]
    backward_ms = [
        sum(_span_ms(call.backward_started, call.backward_ended) for call in calls)
        for calls in steps
        if any(_has_backward(call) for call in calls)
    ]
    return ModuleTime(
        name=name,
        kind=type(module).__name__,
        calls=len(steps[-1]),
        forward_ms=statistics.median(forward_ms),
        backward_ms=statistics.median(backward_ms) if backward_ms else None,
    )


def _has_backward(call: _Call) -> bool:
    return call.backward_started is not None and call.backward_ended is not None


def _span_ms(start: Mark | None, end: Mark | None) -> float:
    return 0.0 if start is None or end is None else milliseconds(start, end)
