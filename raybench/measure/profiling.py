"""What a step consists of: operations, attention kernels, times of modules, and a trace.

`step_flops` counts the floating-point operations of matrix products, convolutions and attention,
forward and backward, as torch executes them on meta tensors; a multiply-add is two. Causal
attention counts as full, and recomputed operations count again.

After torch.profiler has used CUPTI, a process launches kernels more slowly (pytorch#144455), so it
must not measure after `profile`. `attention_kernels` uses only the profiler of the host.
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
# Rows and columns of the matrices of `tflops_sustained`.
_MATRIX_SIZE = 8192
_FLOP_PER_PRODUCT = 2.0 * _MATRIX_SIZE**3
_WARMUP_PRODUCTS = 3
# On an H200 the power limit lowers the rate within 0.15 s (bf16: 783 TFLOP/s in the first 30 ms,
# then 670). Steps run for seconds, so only the later rate is comparable.
_SETTLE_MS, _MEASURE_MS = 200.0, 200.0
_FEWEST_PRODUCTS = 3


def profile(workload: Workload, context: Context, steps: int) -> Profile:
    """Run steps; return this rank's Chrome trace (gzip) and its times of modules. Collective.

    Afterwards DDP reduces gradients again, and kernels launch more slowly.

    Args:
        workload: its `model` may have modules to time.
        steps: number of steps in the trace, above 0.
    """
    set_hook = hook_setter(workload, context)
    if context.world_size > 1 and set_hook is not None:
        set_hook(None)  # undo `break_down`
    for _ in range(_WARMUP_STEPS):
        workload.step()
    align_ranks(context.device)
    model = workload.model
    if isinstance(model, DistributedDataParallel):
        model = model.module  # its modules have the same names with one rank and with several
    modules: tuple[ModuleTime, ...] = ()
    if isinstance(model, nn.Module):  # a user's class may use this attribute for something else
        modules = module_times(model, workload.step, context.device, steps)
    align_ranks(context.device)
    activities = [ProfilerActivity.CPU]
    if context.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        with torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(1 + steps):
                workload.step()
                profiler.step()
        return Profile(trace=path.read_bytes(), modules=modules)


def module_times(
    model: nn.Module, step: Callable[[], None], device: torch.device, steps: int
) -> tuple[ModuleTime, ...]:
    """Return the median time per step in each module that ran in all steps. Collective.

    A module's time includes its children and, on a GPU, gaps of the host, which the hooks widen.
    Backward lasts from the gradient of the output to the gradient of the input or, if the input
    needs no gradient, of the last parameter. Children of a compiled module are omitted.

    Args:
        steps: number of steps, above 0.
    """
    hooks = _ModuleHooks(model, device)
    steps_calls = []
    with hooks.watching():
        for _ in range(steps):
            step()
            steps_calls.append(hooks.take())
    if device.type == "cuda":
        torch.cuda.synchronize()

    times = []
    for name, module in model.named_modules():
        module_calls = [calls[module] for calls in steps_calls if module in calls]
        if len(module_calls) < steps:
            continue  # the module did not run in every step
        forward_ms, backward_ms = [], []
        for calls in module_calls:
            forward_ms.append(sum(call.forward_ms or 0.0 for call in calls))
            # The median of backward omits steps without a backward pass through the module.
            backward_calls_ms = [call.backward_ms for call in calls if call.backward_ms is not None]
            if backward_calls_ms:
                backward_ms.append(sum(backward_calls_ms))
        times.append(
            ModuleTime(
                name=name,
                kind=type(module).__name__,
                calls=len(module_calls[-1]),
                forward_ms=statistics.median(forward_ms),
                backward_ms=statistics.median(backward_ms) if backward_ms else None,
            )
        )
    return tuple(times)


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One pass through a module; the backward marks are None if no gradient passed."""

    module: nn.Module
    forward_begin: Mark
    forward_end: Mark | None = None
    backward_begin: Mark | None = None
    backward_end: Mark | None = None
    # An input needs a gradient, so backward ends there.
    ends_at_input: bool = False

    @property
    def forward_ms(self) -> float | None:
        if self.forward_end is None:
            return None
        return elapsed_ms(self.forward_begin, self.forward_end)

    @property
    def backward_ms(self) -> float | None:
        if self.backward_begin is None or self.backward_end is None:
            return None
        return elapsed_ms(self.backward_begin, self.backward_end)


class _ModuleHooks:
    """Hooks on every module that mark its begin and end, forward and backward."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._mark = make_marker(device)
        # All calls since the last `take`, and the latest call of each module.
        self._calls: list[_Call] = []
        self._latest: dict[nn.Module, _Call] = {}
        # The modules that contain a parameter, also in their children.
        self._modules_of_parameter: dict[Tensor, list[nn.Module]] = defaultdict(list)
        for module in model.modules():
            for parameter in module.parameters():
                self._modules_of_parameter[parameter].append(module)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark forward and backward of all calls of modules inside the `with` block."""
        with ExitStack() as stack:
            modules = list(self._model.modules())
            # Compiled code contains the calls of its children, so hooks cannot time the children.
            inside_compiled: set[nn.Module] = set()
            for module in modules:
                if module._compiled_call_impl is not None:
                    children = (child for child in module.modules() if child is not module)
                    inside_compiled.update(children)
            for module in modules:
                if module in inside_compiled:
                    continue
                compiled: Any = module._compiled_call_impl
                if compiled is not None:
                    # Wrap the compiled call, because torch would compile a hook, too.
                    stack.callback(setattr, module, "_compiled_call_impl", compiled)
                    module._compiled_call_impl = partial(self._call_compiled, module, compiled)
                    continue
                pre_hook = module.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
                stack.callback(pre_hook.remove)
                stack.callback(module.register_forward_hook(self._end_forward).remove)
            # Backward ends at the parameters of modules whose inputs need no gradient.
            for parameter in self._modules_of_parameter:
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._end_backward)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            yield

    def _call_compiled(self, module: nn.Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled code of a module, and mark its begin and end."""
        args, kwargs = self._begin_forward(module, args, kwargs)
        return self._end_forward(module, args, compiled(*args, **kwargs))

    def take(self) -> dict[nn.Module, list[_Call]]:
        """Return the complete calls of each module since the last `take`."""
        calls, self._calls, self._latest = self._calls, [], {}
        complete: dict[nn.Module, list[_Call]] = defaultdict(list)
        for call in calls:
            if call.forward_end is not None:
                complete[call.module].append(call)
        return complete

    def _begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Mark the begin of a call; return args and kwargs with hooks that mark backward's end."""
        # torch compiles a whole model with its hooks. Compiled code cannot record events, so the
        # hooks must do nothing.
        if torch.compiler.is_compiling():
            return args, kwargs
        call = _Call(module=module, forward_begin=self._mark())
        self._calls.append(call)
        self._latest[module] = call

        def end_backward(_: Tensor) -> None:
            call.backward_end = self._mark()

        def hook_input(tensor: Tensor) -> Tensor:
            call.ends_at_input |= tensor.requires_grad
            return _with_hook(tensor, end_backward)

        # Do not hook tensors in containers of kwargs: `tree_map_only` would copy a KV cache.
        hooked_kwargs = dict(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                hooked_kwargs[name] = hook_input(value)
        return tree_map_only(Tensor, hook_input, args), hooked_kwargs

    def _end_forward(self, module: nn.Module, _: object, outputs: Any) -> Any:
        """Mark the end of a call; return the outputs with hooks that mark the begin of backward."""
        if torch.compiler.is_compiling():
            return outputs
        call = self._latest[module]
        call.forward_end = self._mark()

        def begin_backward(_: Tensor) -> None:
            if call.backward_begin is None:
                call.backward_begin = self._mark()

        return tree_map_only(Tensor, lambda tensor: _with_hook(tensor, begin_backward), outputs)

    def _end_backward(self, parameter: Tensor) -> None:
        """Mark the end of backward in the modules that contain a parameter with a new gradient."""
        mark = self._mark()
        for module in self._modules_of_parameter[parameter]:
            call = self._latest.get(module)
            # Backward ends at the input if the input needs a gradient, else at the last parameter.
            if call is not None and not call.ends_at_input:
                call.backward_end = mark


def _with_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
    """Return a view of the tensor whose gradient calls the hook."""
    if not tensor.requires_grad:
        return tensor
    # A view, so that other uses of the tensor have no hook. The module may change this view in
    # place, unlike the views of `register_full_backward_hook`.
    view = tensor.view_as(tensor)
    view.register_hook(hook)  # type: ignore[no-untyped-call]
    return view


_autograd: Any = torch._C._autograd  # much of it is missing from torch's types
# Kernel of attention, as the setting `attention` names it -> operators that call it.
_ATTENTION_OPERATORS = {
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
    """Run a step; return the kernels of torch's attention that it calls. Collective.

    The result includes kernels in compiled code, custom operators and the backward pass. It does
    not include FlexAttention, nor `math` that torch.compile decomposes.
    """
    # torch.profiler would use CUPTI, after which the process launches kernels more slowly.
    _autograd._enable_profiler_legacy(profiler_legacy.profile().config())  # type: ignore[no-untyped-call]
    try:
        step()
    finally:
        threads = _autograd._disable_profiler_legacy()
    called: set[str] = set()
    for thread_events in threads:
        called.update(event.name() for event in thread_events)
    return tuple(
        kernel
        for kernel, operators in _ATTENTION_OPERATORS.items()
        if called.intersection(operators)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """The floating-point operations of one step of one rank."""

    # None: unknown.
    flops: float | None
    # How the operations were counted, or why they are unknown.
    method: str


def step_flops(workload_class: type, params: Mapping[str, Scalar], context: Context) -> FlopCount:
    """Count the operations of one step on one rank; if that fails, return the reason. Collective.

    This builds the workload for one rank on the meta device and runs one step. If ranks share
    items, each rank gets an equal part of the operations.

    Args:
        workload_class: result of `as_workload`.
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
        # The counter does not see compiled code, and compilation would take longer than counting.
        with _restored_state(context.device), torch.compiler.set_stance("force_eager"):
            workload: Any = workload_class(on_meta, **params)
            try:
                with counter:
                    workload.step()
            finally:
                workload.close()
        ranks = ranks_per_item(workload_class, {**params, "world_size": context.world_size})
    except Exception as error:
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
        return FlopCount(flops=None, method=f"not counted: {why}; {remedy}")
    flops = counter.get_total_flops()
    if not flops:
        return FlopCount(flops=None, method="not counted: the step has none that the counter knows")
    method = "matrix products, convolutions and attention of one step, counted on meta tensors"
    return FlopCount(flops=flops / ranks, method=method)


@contextmanager
def _restored_state(device: torch.device) -> Iterator[None]:
    """Restore random number generators, default device and default dtype after the `with` block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    default_device, default_dtype = torch.get_default_device(), torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), warnings.catch_warnings():
            # Warnings would not be about the measured step.
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(default_dtype)
        if torch.get_default_device() != default_device:
            # None is "cpu" without the hook that slows down every call of torch.
            torch.set_default_device(None if default_device.type == "cpu" else default_device)


def tflops_sustained(
    device: torch.device, precisions: Sequence[Precision]
) -> dict[Precision, float | None]:
    """Measure the TFLOP/s of products of two 8192 x 8192 matrices under the power limit.

    This changes TF32 switches, adds up to 0.8 GB to torch's peak memory and empties torch's cache.

    Returns:
        The median over 0.2 s after 0.2 s of warm-up. None on a CPU, with too little memory, and for
            float8 below compute capability 8.9.
    """
    tflops: dict[Precision, float | None] = dict.fromkeys(precisions)
    if device.type != "cuda":
        return tflops
    for precision in precisions:
        apply_precision(precision)
        if precision is Precision.FLOAT8 and torch.cuda.get_device_capability(device) < (8, 9):
            continue
        with suppress(torch.OutOfMemoryError):
            product_s = statistics.median(_product_times_ms(device, precision)) / MS_PER_S
            tflops[precision] = _FLOP_PER_PRODUCT / product_s / FLOP_PER_TFLOP
        # Free memory after the `with` block, inside which an error still holds the matrices.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return tflops


def _product_times_ms(device: torch.device, precision: Precision) -> list[float]:
    """Time products for 0.2 s after 0.2 s of warm-up, at least three; return the ms of each."""
    generator = torch.Generator(device).manual_seed(0)
    dtype: torch.dtype = getattr(torch, precision.dtype)
    # Random numbers: products of zeros need less power and would be 10 to 15 % faster.
    shape = (_MATRIX_SIZE, _MATRIX_SIZE)
    left, right = (
        torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    out = torch.empty(shape, device=device, dtype=dtype)
    product: Callable[[], object]
    if precision is Precision.FLOAT8:
        scale = torch.ones((), device=device)
        factors = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        multiply = partial(
            torch._scaled_mm, *factors, scale_a=scale, scale_b=scale, use_fast_accum=True
        )
        product = partial(multiply, out_dtype=dtype, out=out)
        del left, right
    else:
        product = partial(torch.mm, left, right, out=out)
    product_ms = _time_ms(product, _WARMUP_PRODUCTS)[-1]
    settling_count, measured_count = (
        max(_FEWEST_PRODUCTS, math.ceil(phase_ms / product_ms))
        for phase_ms in (_SETTLE_MS, _MEASURE_MS)
    )
    # Do not pause between both phases, because the clocks would rise again.
    return _time_ms(product, settling_count + measured_count)[settling_count:]


def _time_ms(product: Callable[[], object], count: int) -> list[float]:
    """Return the ms of each of `count` products, by CUDA events."""
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
