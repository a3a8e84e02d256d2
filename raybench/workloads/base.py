"""What a workload is: a class that is built on a device and does one step at a time."""

from __future__ import annotations

import gc
import math
import numbers
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import new_class
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypedDict, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import Field

from raybench.errors import UsageError
from raybench.job import registry
from raybench.job.declarations import declared_entries
from raybench.job.point import Execution, Precision, Scalar
from raybench.job.problems import quote
from raybench.records.doubts import Doubt, DoubtKind, NotMeasured
from raybench.records.metrics import Metric

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

    from raybench.job.answer import Answer


class WrongResultError(Exception):
    """A step computed something wrong. The message says what, and on which rank."""


class PartTimes:
    """Host time of the parts of a step, such as the wait for the next batch.

    Work on the device is not timed.
    """

    def __init__(self) -> None:
        self._spent_ns: Counter[str] = Counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Return a context that adds the host time of its `with` block to part `name`."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._spent_ns[name] += time.perf_counter_ns() - start_ns

    def take(self) -> dict[str, int]:
        """Return the host time of each part since the last call, in ns."""
        spent_ns, self._spent_ns = self._spent_ns, Counter()
        return spent_ns


class Regions:
    """Times the named parts of a step on the device, in instrumented steps only."""

    def __init__(self, *, may_compile: bool = True) -> None:
        """Make regions without times.

        Args:
            may_compile: False if nothing will be compiled: the compiler takes 2 s to import.
        """
        from torch.compiler import assume_constant_result, is_compiling

        # Whether a step has entered a region outside `timed_by`. If none has, the breakdown runs no
        # steps with timed regions.
        self.are_used = False
        # Names of regions inside compiled code, which cannot time them.
        self.compiled = compiled = set[str]()
        self._is_compiling = is_compiling
        self._note_compiled: Callable[[str], object] = compiled.add
        if may_compile:
            # The compiler calls this while it compiles; the compiled code does not contain the
            # call.
            self._note_compiled = assume_constant_result(  # type: ignore[no-untyped-call]
                lambda name: compiled.add(name)
            )
        # Makes the context that times a region; None outside `timed_by`.
        self._make_timer: Callable[[str], AbstractContextManager[None]] | None = None

    def region(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times its block as this region, but only inside `timed_by`."""
        if self._is_compiling():
            self._note_compiled(name)
            return _UNTIMED
        if self._make_timer is None:
            self.are_used = True
            return _UNTIMED
        return self._make_timer(name)

    @contextmanager
    def timed_by(self, make_timer: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Return a context in which `make_timer(name)` times each region."""
        self._make_timer = make_timer
        try:
            yield
        finally:
            self._make_timer = None


_UNTIMED = nullcontext()


# A communication hook of DistributedDataParallel: takes a process group (None: all ranks) and a
# bucket of gradients.
CommHook: TypeAlias = "Callable[[Any, GradBucket], Future[Tensor]]"


class DdpOptions(TypedDict, total=False):
    """Options of DistributedDataParallel as parameters: `**ddp: Unpack[DdpOptions]`.

    Names and defaults are torch's. Each field is a setting of every workload with these options.
    They have no effect with one rank.
    """

    bucket_cap_mb: Annotated[
        int,
        Field(
            default=25,
            gt=0,
            description="DDP: bucket size, MiB; 25 is torch's default, which begins with 1 MiB.",
        ),
    ]
    gradient_as_bucket_view: Annotated[
        bool,
        Field(
            default=False,
            description="DDP: gradients are views of the buckets, which saves a copy.",
        ),
    ]
    static_graph: Annotated[
        bool,
        Field(default=False, description="DDP: promise that the graph is the same in every step."),
    ]


@cache
def option_defaults(options: type) -> Mapping[str, Scalar | None]:
    """Return the default of each option of DdpOptions or of a subclass, by name."""
    # Each hint is Annotated[type, Field(default=...)].
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0].default for name, hint in hints.items()}


@dataclass(slots=True, kw_only=True)
class _ReplicaState:
    """State of a model that is wrapped by DistributedDataParallel."""

    ddp_arguments: Mapping[str, Any]
    # With static_graph: whether the first `no_sync`, which records the graph, was entered.
    has_recorded_graph: bool = False
    # Whether `set_comm_hook` registered a hook.
    has_our_hook: bool = False


class Replicas:
    """The models that a workload has wrapped by DistributedDataParallel and still holds."""

    def __init__(self) -> None:
        self.states: WeakKeyDictionary[DistributedDataParallel, _ReplicaState] = WeakKeyDictionary()
        # A larger count later means that the workload has compiled code.
        self._frames_before = count_compiled_frames()

    def why_no_hook(self) -> NotMeasured | None:
        """Return why `set_comm_hook` must not be called; None if it may be called."""
        if not self.states:
            return NotMeasured.NO_DDP
        # A hook would make torch.compile compile the model again.
        if count_compiled_frames() > self._frames_before:
            return NotMeasured.COMPILED
        for ddp, state in self.states.items():
            # DDP accepts only one hook, and the workload has registered its own.
            if ddp._comm_hooks and not state.has_our_hook:
                return NotMeasured.OWN_HOOK
        return None

    def set_comm_hook(self, hook: CommHook | None) -> None:
        """Reduce the gradients of all wrapped models by this communication hook. Collective.

        Each DDP object is initialised again in place: gradients become None, and its other hooks
        are lost.

        Args:
            hook: None restores the reduction of DDP.
        """
        for ddp, state in list(self.states.items()):
            model, is_training = ddp.module, ddp.training
            # Free the old state first, cycles included: the buckets need as much memory as the
            # gradients, and the old hooks on parameters would reduce the gradients, too.
            ddp.__dict__.clear()
            for parameter in model.parameters():
                parameter.grad = None
            gc.collect()
            type(ddp).__init__(ddp, model, **state.ddp_arguments)
            ddp.training = is_training
            state.has_recorded_graph, state.has_our_hook = False, hook is not None
            if hook is not None:
                ddp.register_comm_hook(state.ddp_arguments["process_group"], hook)

    def forget(self) -> None:
        """Forget the wrapped models, before another workload uses this object."""
        self.states.clear()


def count_compiled_frames() -> int:
    """Return a count that grows with each frame that torch.compile compiles in this process.

    A frame counts once or twice per compilation. A worker resets the count after each point.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(Execution):
    """What a workload is built with: device, ranks, batch size and settings of the execution.

    The settings of the execution have the names of the job file: `precision`, `cuda_graph`,
    `breakdown` and so on. With `cuda_graph` a step must not wait for the device, and an optimizer
    must be capturable.
    """

    # A CUDA device is already the current device of the process. On the meta device the workload
    # is built only to count the operations of one step: world_size is 1, precision is fp32, there
    # is no data, and the workload must not communicate or compile.
    device: torch.device
    # Index of this process, from 0, among the `world_size` processes that train together.
    rank: int
    world_size: int
    # Index of this process, from 0, among the processes of its node.
    local_rank: int
    # Items of one forward pass on this device, or on the ranks that share items; 1 if the job gives
    # no batch size.
    batch_size: int
    # Equal on all ranks; add the rank if ranks must draw different data.
    seed: int = 0
    # Host times of the current step; `with context.parts.part("data")` adds to data_ms.
    parts: PartTimes = field(default_factory=PartTimes)
    regions: Regions = field(default_factory=Regions)
    replicas: Replicas = field(default_factory=Replicas)
    # Multiply this rank's mean loss by this factor, world_size times the rank's share of the
    # samples. The mean over ranks is then the mean over all samples.
    loss_weight: float = 1.0
    # Emulates a slower device: repeat this share of the forward and backward work in each step.
    extra_work: float = 0.0
    # Emulates a slower device: number of multiprocessors that this rank may use; None: all.
    sms: int | None = None
    # The ranks that train together; None: all ranks.
    process_group: ProcessGroup | None = None

    def ddp(self, model: nn.Module, **options: Any) -> nn.Module:
        """Wrap the model by DistributedDataParallel; with one rank or on meta return the model.

        Call this on all ranks, with the model on the device. comm_ms and wait_ms are measured only
        for models that are wrapped here, and for workloads with `set_comm_hook`.

        Args:
            options: arguments of DistributedDataParallel; device_ids and process_group default to
                the context's.
        """
        if self.world_size == 1 or self.device.type == "meta":
            return model
        from torch.nn.parallel import DistributedDataParallel

        arguments: dict[str, Any] = {
            "device_ids": [self.device] if self.device.type == "cuda" else None,
            "process_group": self.process_group,
        }
        defaults = option_defaults(DdpOptions)
        for name, value in options.items():
            # Omit defaults: an explicit `bucket_cap_mb` would also hold for the first bucket, which
            # has 1 MiB by default.
            if name not in defaults or value != defaults[name]:
                arguments[name] = value
        ddp = DistributedDataParallel(model, **arguments)
        self.replicas.states[ddp] = _ReplicaState(ddp_arguments=arguments)
        return ddp

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Return a context in which backward passes add up gradients without reducing them.

        Run the forward pass inside the context, too. With static_graph the first `no_sync` of a
        model still reduces.

        Args:
            model: a model in DDP or sharded by FSDP2, also compiled; other modules are ignored.
        """
        from torch.nn.parallel import DistributedDataParallel

        model = getattr(model, "_orig_mod", model)  # the model inside torch.compile's wrapper
        # Recognize FSDP2 by this method, because importing its class takes half a second.
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)
            return

        skips_reduction = isinstance(model, DistributedDataParallel)
        state = self.replicas.states.get(model)
        is_static = state is not None and state.ddp_arguments.get("static_graph")
        # With static_graph the first backward pass records the graph and must reduce. Under no_sync
        # it fails, or later passes reduce nothing (pytorch#143580, pytorch#187732).
        if state is not None and is_static and not state.has_recorded_graph:
            state.has_recorded_graph = True
            skips_reduction = False
        with model.no_sync() if skips_reduction else nullcontext():
            yield

    def region(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times what its `with` block issues to the device, as region `name`.

        Regions are timed only in a few steps after the timed steps, by the host's clock on a CPU.
        They do nothing in compiled code, with cuda_graph and without breakdown. The times of one
        name add up in a step, and an outer region includes its inner regions.
        """
        return self.regions.region(name)

    def generator(self) -> torch.Generator | None:
        """Return a new generator on the device with seed `seed` + `rank`; None on meta."""
        import torch

        if self.device.type == "meta":
            return None
        return torch.Generator(self.device).manual_seed(self.seed + self.rank)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for a forward pass and its loss.

        Autocast uses float16 for fp16, and bfloat16 for bf16 and float8. For fp32, tf32 and the
        meta device the context has no effect.
        """
        import torch

        if self.precision in (Precision.FP32, Precision.TF32) or self.device.type == "meta":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.precision.dtype))

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return a GradScaler, which is enabled in precision fp16, but not on the meta device.

        An enabled scaler waits for the device once a step, unless the optimizer is fused. Its scale
        falls when gradients overflow and never grows.
        """
        import torch

        is_enabled = self.precision is Precision.FP16 and self.device.type != "meta"
        # The scaler's int32 counter cannot reach this interval, so the scale never grows.
        return torch.amp.GradScaler(self.device.type, growth_interval=2**31, enabled=is_enabled)


class Workload(ABC):
    """The base class of everything that can be timed.

    A subclass defines `__init__(self, context, *, ...)` and `step`; the other attributes and
    methods are optional. A class that does not inherit from Workload may define the same names. The
    first line of its docstring says in `raybench workloads` what the class does.

    The keyword-only arguments of `__init__` are the parameters of the workload. They need types and
    defaults: the job file is checked against them, and each can be an axis. Import torch inside
    methods, so that `raybench plan` stays fast.

    `torch.distributed` is set up as under torchrun: with several ranks the default process group
    exists and RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on are set. TF32 is switched
    according to the precision. Autocast and gradient scaling are the task of the workload.

    Class methods must not need torch. Their `settings` are all settings of the point by the names
    of the job file, with defaults; settings that are None are omitted. Their `params` are the
    parameters as text.

    Example:
        >>> from raybench import Context, PositiveInt, Workload
        >>> class Sum(Workload):
        ...     "Adds up random vectors on each device."
        ...
        ...     def __init__(self, context: Context, *, length: PositiveInt = 1024) -> None:
        ...         import torch
        ...
        ...         shape = (context.batch_size, length)
        ...         self._vectors = torch.rand(shape, device=context.device)
        ...         self.items_per_step = context.batch_size
        ...
        ...     def step(self) -> None:
        ...         self._vectors.sum(dim=1)
    """

    # Name of a built-in workload in reports; empty: its name in the job file.
    title: ClassVar[str] = ""
    # False if the workload ignores batch sizes.
    takes_batch_size: ClassVar[bool] = True
    # False if a job may omit the batch size.
    needs_batch_size: ClassVar[bool] = True
    # False if the workload computes the same in every precision; a job can then give only fp32.
    takes_precision: ClassVar[bool] = True
    # True if the workload supports precision float8.
    takes_float8: ClassVar[bool] = False
    # True if the workload multiplies its mean loss by `context.loss_weight`, so that ranks can have
    # batches of different size.
    weighs_loss: ClassVar[bool] = False
    # True if all ranks finish the same items together, for example one sequence. items_per_step and
    # batch_size then count the items of all ranks, and more ranks are strong scaling.
    shares_work: ClassVar[bool] = False
    # Names of parameters in whose texts {name} is replaced by that setting of the point.
    templates: ClassVar[tuple[str, ...]] = ()
    # Packages that only the workers need, and how to install each; `plan` warns if one is missing.
    packages: ClassVar[Mapping[str, str]] = {}
    # Plural noun for what items_per_step counts.
    items: ClassVar[str] = "samples"
    # What reports show first: the first answer without settings or with a setting that varies in
    # the run. Without such an answer reports show the speed-up.
    answers: ClassVar[tuple[Answer, ...]] = ()
    # Additional columns. After the timed steps each rank's value is read from the attribute with
    # the metric's name; None: unknown.
    metrics: ClassVar[tuple[Metric, ...]] = ()

    # Samples (rows, sequences) that this rank finishes in a step; None: there is no throughput.
    items_per_step: float | None = None
    # Floating-point operations of a step on this rank; None: raybench counts them, unless
    # message_bytes is set.
    flops_per_step: float | None = None
    # Floating-point operations of a training step on this rank, as papers on MFU count: 6 per token
    # and parameter, plus attention.
    model_flops_per_step: float | None = None
    # Bytes of a collective's message, and busbw / algbw, both as nccl-tests defines them.
    message_bytes: int | None = None
    busbw_factor: float | None = None
    # Bytes that a step reads from and writes to memory.
    memory_bytes: int | None = None
    # The module that is trained or run; `--profile` times its layers.
    model: nn.Module | None = None
    # For workloads that reduce gradients without `Context.ddp`; called on all ranks after the timed
    # steps. After `set_comm_hook(hook)` the workload must reduce each bucket of gradients by
    # `hook(group, bucket)`, after `set_comm_hook(None)` by all_reduce.
    set_comm_hook: Callable[[CommHook | None], None] | None = None
    # Returns the largest relative error of a step's gradients, compared with one process that
    # trains on the samples of all ranks. Called between timed phases, on all ranks that train.
    gradient_error: Callable[[], float] | None = None

    @abstractmethod
    def step(self) -> None:
        """Issue all work of one iteration, with the same collectives on every rank.

        Do not wait for the device, unless the wait is to be timed.
        """

    def check(self) -> None:  # noqa: B027
        """Raise WrongResultError if a step has computed something wrong; do nothing by default.

        Called on all ranks after the warm-up and after the timed steps.
        """

    def close(self) -> None:  # noqa: B027
        """End processes and threads; called once, even after an error."""

    @classmethod
    def why_not(cls, settings: Mapping[str, Any]) -> str | None:
        """Return one sentence that says why a point cannot run and what to do; None if it can."""
        return None

    @classmethod
    def ranks_per_item(cls, settings: Mapping[str, Any]) -> int:
        """Return how many ranks of a point finish the same items together.

        batch_size counts the items of such a group of ranks, and items_per_step is this rank's part
        of them. `settings` may have only world_size and the parameters. Not called for classes with
        `shares_work`.
        """
        return 1

    @classmethod
    def estimate_memory(cls, settings: Mapping[str, Any]) -> float | None:
        """Return a rank's peak device memory in bytes; None if unknown. Called after `why_not`."""
        return None

    @classmethod
    def describe(cls, params: Mapping[str, str]) -> str:
        """Return a phrase for reports that says what a built-in workload ran; may be empty."""
        return cls.title

    @classmethod
    def preset_words(cls, params: Mapping[str, str]) -> str:
        """Return the preset's name for reports, with parameters that change its model."""
        return params.get("preset", "")

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return the number of parameters of the model; None without a model, or if unknown.

        Called only for built-in workloads. Predictions assume that a workload with parameters
        reduces gradients, except in mode inference.
        """
        return None


def as_workload(workload_class: type) -> type[Workload]:
    """Return the class if it inherits from Workload, otherwise a new subclass of both.

    Attributes of the class win over the defaults of Workload.
    """
    if issubclass(workload_class, Workload):
        return workload_class
    combined = new_class(workload_class.__name__, (workload_class, Workload))
    combined.__module__ = workload_class.__module__
    return combined


def builtin_class(name: str) -> type[Workload] | None:
    """Return the class of a built-in workload; None for a user's class."""
    return as_workload(registry.load_workload(name)) if name in registry.BUILTIN else None


def parameter_count(name: str, params: Mapping[str, str]) -> int | None:
    """Return the number of parameters of a built-in workload's model; None if it is unknown.

    Args:
        name: name of the workload in the job file.
        params: all its parameters as text.
    """
    built_in = builtin_class(name)
    return built_in.parameter_count(params) if built_in else None


def apply_precision(precision: Precision) -> None:
    """Set torch's TF32 switches in this process: on for tf32, off for any other precision.

    | precision | fp32 matmul, convolution and RNN outside autocast | `Context.autocast` |
    |---|---|---|
    | fp32 | IEEE single precision | none |
    | tf32 | TF32 | none |
    | fp16 | IEEE single precision | float16 |
    | bf16 | IEEE single precision | bfloat16 |
    | float8 | IEEE single precision | bfloat16, and layers of `convert_linear_layers` |
    """
    import torch
    from torch import backends

    is_tf32 = precision is Precision.TF32
    # Set torch's old and new switches alike: torch.compile reads an old switch, and torch raises if
    # it differs from the new one (pytorch#166387, pytorch#179445). Set the old switches first,
    # because they overwrite new ones.
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    backends.cudnn.allow_tf32 = is_tf32
    mode = "tf32" if is_tf32 else "ieee"
    backends.fp32_precision = mode  # type: ignore[attr-defined]
    backends.cudnn.fp32_precision = mode
    for switch in _tf32_switches():
        switch.fp32_precision = mode


def effective_precision() -> str:
    """Return how a GPU computes with fp32 tensors outside autocast: fp32, tf32 or mixed.

    This reads torch's switches and NVIDIA_TF32_OVERRIDE, and does not ask the GPU. "mixed" means
    that matrix multiplication, convolution and RNN differ.
    """
    # With 0, NVIDIA's libraries never use TF32, whatever torch's switches say.
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return Precision.FP32
    uses_tf32 = [switch.fp32_precision == "tf32" for switch in _tf32_switches()]
    if all(uses_tf32):
        return Precision.TF32
    return "mixed" if any(uses_tf32) else Precision.FP32


def precision_doubts(precision: Precision, device: torch.device) -> Iterator[Doubt]:
    """Yield a doubt if the device emulates the precision, or if the workload has changed it.

    Args:
        device: a CPU or the current GPU.
    """
    import torch

    on_gpu = device.type == "cuda"
    # TF32 came with Ampere, compute capability 8.0.
    has_tf32 = on_gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    has_bf16 = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    lacks_tf32 = precision is Precision.TF32 and not has_tf32
    if lacks_tf32 or (precision is Precision.BF16 and not has_bf16):
        name = torch.cuda.get_device_name(device) if on_gpu else "a CPU"
        yield Doubt(kind=DoubtKind.EMULATED_PRECISION, subject=name)
    # `apply_precision` switches TF32 on for precision tf32 alone.
    expected = Precision.TF32 if precision is Precision.TF32 else Precision.FP32
    if (effective := effective_precision()) != expected:
        yield Doubt(kind=DoubtKind.OTHER_PRECISION, subject=effective)


def _tf32_switches() -> tuple[Any, ...]:
    from torch import backends

    cudnn: Any = backends.cudnn  # `conv` and `rnn` are missing from torch's types
    return (backends.cuda.matmul, cudnn.conv, cudnn.rnn)


# Attributes of `Workload` that describe one step on one rank.
_STEP_ATTRIBUTES = (
    "items_per_step",
    "message_bytes",
    "busbw_factor",
    "memory_bytes",
    "flops_per_step",
    "model_flops_per_step",
)
# Attributes that stay integers.
_INTEGER_ATTRIBUTES = ("items_per_step", "message_bytes", "memory_bytes")
# Upper bound; it stays finite after dividing by the shortest step.
_LARGEST_VALUE = 1e30
# Larger integers are not exact as doubles.
_LARGEST_EXACT_INTEGER = 2**53


def declared_of_step(workload: Workload) -> dict[str, int | float | None]:
    """Return what the workload declares about one step on this rank; None: not declared.

    Raises:
        UsageError: a value is not a real number from 0 to 1e30, for example NaN, True or a tensor.
    """
    declared: dict[str, int | float | None] = {}
    for name in _STEP_ATTRIBUTES:
        value = getattr(workload, name)
        if value is None:
            declared[name] = None
            continue
        number = _as_finite_number(value)
        if number is None or not 0 <= number <= _LARGEST_VALUE:
            raise _number_error(workload, name, 0, value)
        stays_integer = name in _INTEGER_ATTRIBUTES and number <= _LARGEST_EXACT_INTEGER
        declared[name] = number if stays_integer else float(number)
    return declared


def own_metrics(workload: Workload) -> dict[Metric, float]:
    """Return the values of the metrics that the workload declares; unknown values are omitted.

    Raises:
        UsageError: a value is not a real number from -1e30 to 1e30.
    """
    values = {}
    # A user's class may declare anything, so take only entries with these attributes of Metric.
    for metric in declared_entries(type(workload), "metrics", "name", "over_step"):
        value = getattr(workload, metric.name, None)
        if value is None:
            continue
        number = _as_finite_number(value)
        if number is None or abs(number) > _LARGEST_VALUE:
            raise _number_error(workload, metric.name, -_LARGEST_VALUE, value)
        values[metric] = float(number)
    return values


def _number_error(workload: Workload, name: str, least: float, value: object) -> UsageError:
    return UsageError(
        f"workload {type(workload).__name__}: {name} must be a number from {least:g} to "
        f"{_LARGEST_VALUE:g}, given {quote(value)}"
    )


def _as_finite_number(value: object) -> int | float | None:
    """Return a finite real number as int or float; None for bool and any other object."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        if isinstance(value, numbers.Integral):
            return int(value)
        number = float(value)
    except (ArithmeticError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
