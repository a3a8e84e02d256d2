"""What a step is made of: operations counted, attention kernels, module times and a trace.

Counted are the floating-point operations of matrix products, convolutions and attention, forward
and backward, as torch executes them on meta tensors; a multiply-add is two. Not counted:
element-wise work, normalisation, embeddings. Causal attention counts as full. What activation
checkpointing computes again counts again.

A process in which torch.profiler has used CUPTI launches more slowly from then on
(pytorch#144455): after `profile` it is not fit for measuring any more. `attention_kernels` uses the
profiler of the host alone, which leaves nothing behind.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, schedule
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from raybench.conversion import FLOP_PER_TFLOP, MS_PER_S
from raybench.errors import UsageError, brief, mentions, message_of
from raybench.job.declarations import ranks_per_item
from raybench.job.point import Precision, Scalar
from raybench.measure.breakdown import hook_setter
from raybench.measure.instruments import Step, align_ranks
from raybench.measure.marks import Mark, elapsed_ms, make_marker
from raybench.records.measurement import ModuleTime, Profile
from raybench.workloads.base import Context, PartTimes, Regions, Workload, apply_precision

_WARMUP_STEPS = 2
# Rows and columns of the matrices whose products are timed.
_SIZE = 8192
_FLOP_PER_PRODUCT = 2.0 * _SIZE**3
_WARMUP_PRODUCTS = 3
# On an H200 the power limit lowers the rate within 0.15 s (bf16: 783 TFLOP/s in the first 30 ms,
# 670 later). Steps run for seconds, so they are compared with the later rate.
_SETTLE_MS, _MEASURE_MS = 200.0, 200.0
_FEWEST_PRODUCTS = 3


def profile(workload: Workload, context: Context, steps: int) -> Profile:
    """Run steps; return this rank's Chrome trace (gzip) of them, and its times of modules.

    All ranks must call it, with `steps` above 0. It removes the hook of `break_down`, and runs two
    steps to warm up, `steps` with timed modules if `workload.model` is a module, and as many under
    the profiler after one that is not in the trace. Afterwards kernels launch more slowly.
    """
    if context.world_size > 1 and (set_hook := hook_setter(workload, context)) is not None:
        set_hook(None)
    for _ in range(_WARMUP_STEPS):
        workload.step()
    align_ranks(context.device)
    model = workload.model
    if isinstance(model, DistributedDataParallel):
        model = model.module  # whose modules have the same names on one rank and on many
    modules: tuple[ModuleTime, ...] = ()
    if isinstance(model, nn.Module):  # a class of the user's may keep another thing there
        modules = module_times(model, workload.step, context.device, steps)
    align_ranks(context.device)
    on_device = [ProfilerActivity.CUDA] if context.device.type == "cuda" else []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        with torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *on_device],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(1 + steps):
                workload.step()
                profiler.step()
        return Profile(trace=path.read_bytes(), modules=modules)


def module_times(
    model: nn.Module, step: Callable[[], None], device: torch.device, steps: int
) -> tuple[ModuleTime, ...]:
    """Run `steps` (above 0) steps; return the median time per step in each module that ran in all.

    All ranks must call it. In the order of `named_modules`; `calls` are of the last step. A
    module's time includes its children; on a GPU (CUDA events, from hook to hook) also the gaps
    that the host leaves, which the hooks make longer. Backward runs from the gradient of the output
    to that of the input, or of the last parameter if the input needs none. Recomputing counts as
    backward; in modules that it runs to their end as forward, and as a call. Of a model compiled
    block by block the blocks are the smallest modules; of one compiled as a whole at most itself.
    """
    watch = _ModuleWatch(model, device)
    steps_calls = []
    with watch.watching():
        for _ in range(steps):
            step()
            steps_calls.append(watch.take())
    if device.type == "cuda":
        torch.cuda.synchronize()
    found = []
    for name, module in model.named_modules():
        in_steps = [calls[module] for calls in steps_calls if module in calls]
        if len(in_steps) < steps:
            continue
        forward_ms = [sum(_between_ms(c.started, c.ended) for c in calls) for calls in in_steps]
        # Over those steps in which it ran.
        backward_ms = [
            sum(_between_ms(c.backward_started, c.backward_ended) for c in calls)
            for calls in in_steps
            if any(None not in (c.backward_started, c.backward_ended) for c in calls)
        ]
        found.append(
            ModuleTime(
                name=name,
                kind=type(module).__name__,
                calls=len(in_steps[-1]),
                forward_ms=statistics.median(forward_ms),
                backward_ms=statistics.median(backward_ms) if backward_ms else None,
            )
        )
    return tuple(found)


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One pass through a module; the backward marks are None where no gradient passed.

    ends_at_input: an input needs a gradient, so that backward ends there.
    """

    module: nn.Module
    started: Mark
    ended: Mark | None = None
    backward_started: Mark | None = None
    backward_ended: Mark | None = None
    ends_at_input: bool = False


class _ModuleWatch:
    """Hooks on every module that note when it begins and ends, forward and backward."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Note which modules own which parameters of the model; `watching` sets the hooks."""
        self._model = model
        self._mark = make_marker(device)
        self._calls: list[_Call] = []
        self._latest: dict[nn.Module, _Call] = {}
        self._owners: dict[Tensor, list[nn.Module]] = defaultdict(list)
        for module in model.modules():
            for parameter in module.parameters():
                self._owners[parameter].append(module)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note all calls of modules inside the `with` block; hooks are removed at its end."""
        with ExitStack() as stack:
            modules = list(self._model.modules())
            compiled = [one for one in modules if one._compiled_call_impl is not None]
            inside = {child for one in compiled for child in one.modules() if child is not one}
            for module in modules:
                if module in inside:
                    continue
                call: Any = module._compiled_call_impl
                if call is not None:
                    # From outside: a hook of the module would be compiled with it.
                    stack.callback(setattr, module, "_compiled_call_impl", call)
                    module._compiled_call_impl = partial(self._call, module, call)
                    continue
                begin = module.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
                stack.callback(begin.remove)
                stack.callback(module.register_forward_hook(self._end_forward).remove)
            for parameter in self._owners:
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            yield

    def _call(self, module: nn.Module, compiled: Any, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of compiled code of a module, and note begin and end of the call."""
        hooked, named = self._begin_forward(module, inputs, named)
        return self._end_forward(module, inputs, compiled(*hooked, **named))

    def take(self) -> dict[nn.Module, list[_Call]]:
        """Return module -> its complete calls since this method was last called."""
        calls, self._calls, self._latest = self._calls, [], {}
        found: dict[nn.Module, list[_Call]] = defaultdict(list)
        for call in calls:
            if call.ended is not None:
                found[call.module].append(call)
        return found

    def _begin_forward(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note the begin of a call; return the inputs, whose gradients will end its backward."""
        # Of a model that is compiled whole, with its hooks: an event in compiled code is none.
        if torch.compiler.is_compiling():
            return inputs, named
        call = _Call(module=module, started=self._mark())
        self._calls.append(call)
        self._latest[module] = call

        def end_backward(_: Tensor) -> None:
            call.backward_ended = self._mark()

        def watch(tensor: Tensor) -> Tensor:
            call.ends_at_input |= tensor.requires_grad
            return _with_hook(tensor, end_backward)

        # Nothing inside a named one: it may be a cache, of which a copy would be made.
        named = {key: watch(one) if isinstance(one, Tensor) else one for key, one in named.items()}
        return tree_map_only(Tensor, watch, inputs), named

    def _end_forward(self, module: nn.Module, _: object, outputs: Any) -> Any:
        """Note the end of a call; return the outputs, whose gradients will begin its backward."""
        if torch.compiler.is_compiling():
            return outputs
        call = self._latest[module]
        call.ended = self._mark()

        def begin_backward(_: Tensor) -> None:
            if call.backward_started is None:
                call.backward_started = self._mark()

        return tree_map_only(Tensor, lambda tensor: _with_hook(tensor, begin_backward), outputs)

    def _accumulate(self, parameter: Tensor) -> None:
        """Note the end of backward so far in modules none of whose inputs needs a gradient."""
        mark = self._mark()
        for module in self._owners[parameter]:
            call = self._latest.get(module)
            if call is not None and not call.ends_at_input:
                call.backward_ended = mark


def _with_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
    """Return a view of the tensor whose gradient calls the hook.

    The hook belongs to this use of the tensor alone. Unlike the views that
    `register_full_backward_hook` makes, this one may be changed in place.
    """
    if not tensor.requires_grad:
        return tensor
    view = tensor.view_as(tensor)
    view.register_hook(hook)  # type: ignore[no-untyped-call]
    return view


def _between_ms(start: Mark | None, end: Mark | None) -> float:
    """Return the ms between two marks; 0 where one of them is missing."""
    return 0.0 if start is None or end is None else elapsed_ms(start, end)


_autograd: Any = torch._C._autograd  # much of it is missing from torch's types
_OPERATORS = {
    "flash": (
        "aten::_flash_attention_forward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "efficient": (
        "aten::_efficient_attention_forward",
        "aten::_scaled_dot_product_efficient_attention",
    ),
    "cudnn": ("aten::_cudnn_attention_forward", "aten::_scaled_dot_product_cudnn_attention"),
    "math": ("aten::_scaled_dot_product_attention_math",),
}


def attention_kernels(step: Step) -> tuple[str, ...]:
    """Run a step, and return those of torch's attention kernels that it calls; () if none.

    All ranks must call it. In this order: flash, efficient, cudnn, math. Torch chooses by
    device, shapes, mask and its own settings, so the same job may run another kernel elsewhere.
    Calls are seen in compiled code, in custom operators and in the backward pass. FlexAttention is
    not seen, nor is `math` where torch.compile decomposes it.
    """
    _autograd._enable_profiler_legacy(profiler_legacy.profile().config())  # type: ignore[no-untyped-call]
    try:
        step()
    finally:
        threads = _autograd._disable_profiler_legacy()
    called = {event.name() for events in threads for event in events}
    return tuple(kernel for kernel, names in _OPERATORS.items() if not called.isdisjoint(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The floating-point operations of one step of one rank; None where they cannot be counted.

    method: how they were counted, or why they could not be.
    """

    flops: float | None
    method: str


def step_flops(workload_class: type, params: Mapping[str, Scalar], context: Context) -> Counted:
    """Return the operations of one step of a workload on one rank; raises no Exception.

    workload_class: as of `as_workload`. It is built once more, on the meta device and for one rank,
    and does one step. If ranks share their work, the operations are divided by their number. All
    ranks must call it: the user's code may communicate even so. Random number generators and
    torch's default device and dtype stay as they were.
    """
    on_meta = replace(
        context,
        device=torch.device("meta"),
        rank=0,
        local_rank=0,
        world_size=1,
        precision=Precision.FP32,
        cuda_graph=False,
        parts=PartTimes(),
        regions=Regions(),
    )
    counter = FlopCounterMode(display=False)
    try:
        # The counter does not see into compiled code, and compiling would cost more than counting.
        with _restored_afterwards(context.device), torch.compiler.set_stance("force_eager"):
            workload: Any = workload_class(on_meta, **params)
            try:
                with counter:
                    workload.step()
            finally:
                workload.close()
        ranks = ranks_per_item(workload_class, {**params, "world_size": context.world_size})
    except Exception as error:
        # For the author of the workload.
        if isinstance(error, UsageError):
            why = message_of(error)
        elif isinstance(error, RuntimeError) and mentions(error, "meta"):
            why = "the step needs values, but it is counted on torch's meta device, which has none"
        else:
            why = (
                "built for one rank on torch's meta device, where it is counted, it raises "
                f"{brief(error)}"
            )
        remedy = "set flops_per_step in the class to tell it"
        return Counted(flops=None, method=f"not counted: {why}; {remedy}")
    if not (flops := counter.get_total_flops()):
        return Counted(flops=None, method="not counted: the step has none that the counter knows")
    method = "matrix products, convolutions and attention of one step, counted on meta tensors"
    return Counted(flops=flops / ranks, method=method)


@contextmanager
def _restored_afterwards(device: torch.device) -> Iterator[None]:
    """Restore random number generators, default device and default dtype after the `with` block.

    Inside gradients are enabled, and warnings are ignored. device: the one whose generator counts.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    default_device, default_dtype = torch.get_default_device(), torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), warnings.catch_warnings():
            # A warning of torch here would not be about the step that is measured.
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(default_dtype)
        if torch.get_default_device() != default_device:
            # None, not "cpu": any device given installs a hook that every later call goes through.
            torch.set_default_device(None if default_device.type == "cpu" else default_device)


def tflops_sustained(
    device: torch.device, precisions: Sequence[Precision]
) -> dict[Precision, float | None]:
    """Return the TFLOP/s of products of two 8192 x 8192 matrices under the power limit.

    device: the current CUDA device, or a CPU. Each is the median over 0.2 s after 0.2 s of warm-up.
    None on a CPU, for float8 below compute capability 8.9, with too little memory. Side effects:
    TF32 switches of the last one, up to 0.8 GB in torch's peak memory, an empty cache of torch.
    """
    found: dict[Precision, float | None] = dict.fromkeys(precisions)
    for precision in found if device.type == "cuda" else ():
        apply_precision(precision)
        if precision is Precision.FLOAT8 and torch.cuda.get_device_capability(device) < (8, 9):
            continue
        with suppress(torch.OutOfMemoryError):
            product_s = statistics.median(_product_times_ms(device, precision)) / MS_PER_S
            found[precision] = _FLOP_PER_PRODUCT / product_s / FLOP_PER_TFLOP
        # Not inside: there the error still holds the frames that hold the matrices.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return found


def _product_times_ms(device: torch.device, precision: Precision) -> list[float]:
    """Return the ms of the products of 0.2 s, three at least, after as many unmeasured.

    Of two matrices of random numbers: zeros would be 10 to 15 % faster, for flipping no bits costs
    no power.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype: torch.dtype = getattr(torch, precision.dtype)
    left, right = (
        torch.randn(_SIZE, _SIZE, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    out = torch.empty(_SIZE, _SIZE, device=device, dtype=dtype)
    product: Callable[[], object]
    if precision is Precision.FLOAT8:
        one = torch.ones((), device=device)
        small = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        multiply = partial(torch._scaled_mm, *small, scale_a=one, scale_b=one, use_fast_accum=True)
        product = partial(multiply, out_dtype=dtype, out=out)
        del left, right
    else:
        product = partial(torch.mm, left, right, out=out)
    product_ms = _time_ms(product, _WARMUP_PRODUCTS)[-1]
    settling, measured = (
        max(_FEWEST_PRODUCTS, math.ceil(phase_ms / product_ms))
        for phase_ms in (_SETTLE_MS, _MEASURE_MS)
    )
    # In one go: a pause would let the clocks rise again.
    return _time_ms(product, settling + measured)[settling:]


def _time_ms(product: Callable[[], object], count: int) -> list[float]:
    """Return the ms of each of `count` products, by CUDA events; waits until they are done."""
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(count + 1)
    ]
    events[0].record()
    for event in events[1:]:
        product()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]
