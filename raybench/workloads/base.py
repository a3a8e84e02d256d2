"""What a workload is: a class that is built on a device and does one step at a time.

A workload declares its parameters as keyword-only arguments of `__init__`, with types and
defaults. The job file is checked against them, and `raybench workloads NAME` lists them.
Importing the module must not need torch if `raybench plan` is to stay fast: import torch
where the workload is built.

    from raybench import Context, PositiveInt, Workload

    class Sum(Workload):
        "Adds up a random vector on each device."

        def __init__(self, context: Context, *, length: PositiveInt = 1024) -> None:
            import torch

            self._vector = torch.rand(length, device=context.device)
            self.items_per_step = context.batch_size

        def step(self) -> None:
            self._vector.sum()

`torch.distributed` is set up as under torchrun: when world_size > 1 the default process group
is initialised, and RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on are in the environment.
TF32 is already switched as the precision asks; autocast and gradient scaling are the workload's.
"""

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
    """A step computed something wrong; the text says what, and on which rank."""


class PartTimes:
    """Host time of the current iteration by part of the step, in nanoseconds.

    For what the host waits for, such as the next batch. Work on the device is not timed here.
    """

    def __init__(self) -> None:
        self._spent_ns: Counter[str] = Counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Return a context that adds its block's host time, with inner parts, to part `name`."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._spent_ns[name] += time.perf_counter_ns() - start_ns

    def take(self) -> dict[str, int]:
        """Return part -> ns of parts that ended since the last call; forget them. For timers."""
        spent_ns, self._spent_ns = self._spent_ns, Counter()
        return spent_ns


class Regions:
    """Times the named parts of a step on the device, in instrumented steps only.

    are_used: whether the step has entered a region outside of compiled code and of `timed_by`.
    compiled: names of regions inside code that torch.compile has compiled; these are not timed.
    """

    def __init__(self) -> None:
        from torch.compiler import assume_constant_result, is_compiling

        self.are_used = False
        self.compiled = compiled = set[str]()
        self._is_compiling = is_compiling
        # The compiler calls it while it compiles, and compiled code does not.
        self._leave_out = assume_constant_result(  # type: ignore[no-untyped-call]
            lambda name: compiled.add(name)
        )
        self._time: Callable[[str], AbstractContextManager[None]] | None = None

    def region(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times one block as this region, if called inside of `timed_by`.

        Called outside it does nothing, but sets `are_used`. In code for torch.compile it does
        nothing; compiling adds the name to `compiled`.
        """
        if self._is_compiling():
            self._leave_out(name)
        elif self._time is None:
            self.are_used = True
        else:
            return self._time(name)
        return _UNTIMED

    @contextmanager
    def timed_by(self, time: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Return a context in which the context `time(name)` times each region; after it, none."""
        self._time = time
        try:
            yield
        finally:
            self._time = None


_UNTIMED = nullcontext()


# A communication hook of DistributedDataParallel: (process group or None for all, bucket).
CommHook: TypeAlias = "Callable[[Any, GradBucket], Future[Tensor]]"


class DdpOptions(TypedDict, total=False):
    """Options of DistributedDataParallel as parameters: `**ddp: Unpack[DdpOptions]`.

    A field that is added here becomes a setting of each workload that takes them, and an argument
    of torch's class. They have no effect when world_size is 1; a model that dp_shard, cp or tp
    divides is refused with them. Their defaults are torch's.
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
    """Return option -> its default, inherited ones too. options: DdpOptions or a subclass."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0].default for name, hint in hints.items()}


@dataclass(slots=True, kw_only=True)
class _Wrapped:
    """State of a wrapped model.

    options: as DistributedDataParallel was given them. has_begun: with static_graph, whether
    `no_sync` was entered. has_our_hook: `set_comm_hook` registered a hook.
    """

    options: Mapping[str, Any]
    has_begun: bool = False
    has_our_hook: bool = False


class Replicas:
    """The models that one workload has wrapped by DistributedDataParallel and still holds.

    wrapped: what is known of each, by model.
    """

    def __init__(self) -> None:
        self.wrapped: WeakKeyDictionary[DistributedDataParallel, _Wrapped] = WeakKeyDictionary()
        self._compiled_before = count_compiled_frames()

    def why_no_hook(self) -> NotMeasured | None:
        """Return why `set_comm_hook` must not be called; None if it may be.

        It must not if no model is wrapped, a model has a hook that was not set here, or code was
        compiled in this process since this object was made, for whichever model.
        """
        if not self.wrapped:
            return NotMeasured.NO_DDP
        if count_compiled_frames() > self._compiled_before:
            return NotMeasured.COMPILED
        if any(len(ddp._comm_hooks) > one.has_our_hook for ddp, one in self.wrapped.items()):
            return NotMeasured.OWN_HOOK
        return None

    def set_comm_hook(self, hook: CommHook | None) -> None:
        """Reduce gradients of all wrapped models by this communication hook; None: as DDP does.

        All ranks must call it, and only if `why_no_hook` returns None. Each DDP object is
        initialised anew in place: gradients are set to None, and hooks set on it are lost.
        """
        for ddp, wrapped in list(self.wrapped.items()):
            model, is_training = ddp.module, ddp.training
            # All that it had must be gone first, cycles included: its buckets take as much memory
            # as the gradients, which may lie in them, and its hooks on the parameters would reduce
            # them too.
            ddp.__dict__.clear()
            for parameter in model.parameters():
                parameter.grad = None
            gc.collect()
            type(ddp).__init__(ddp, model, **wrapped.options)
            ddp.training = is_training
            wrapped.has_begun, wrapped.has_our_hook = False, hook is not None
            if hook is not None:
                ddp.register_comm_hook(wrapped.options["process_group"], hook)

    def forget(self) -> None:
        """Forget the wrapped models, before another workload uses this object."""
        self.wrapped.clear()


def count_compiled_frames() -> int:
    """Return a number that grows with each code frame that torch.compile processes in this process.

    A frame counts once or twice each time it is compiled; a worker sets it to 0 after each point.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(Execution):
    """What a workload is built with: device, ranks, batch size and settings of the execution.

    batch_size: items per forward pass of a device, or of ranks that share items; 1 if not given.
    device: already the current device of the process when it is a CUDA device. On the meta device
    the workload is only built to count the operations of one step: there is no data, and neither
    communication nor compiling is wanted (world_size is 1, precision fp32).
    cuda_graph: steps will be captured in a CUDA graph, so a step may not wait for the device, and
    an optimizer must be capturable.
    seed: the same on all ranks; add the rank where ranks must draw different data.
    parts: host times of the current step; `with context.parts.part("data")` adds to data_ms.
    replicas: the models that `ddp` wrapped.
    loss_weight: factor for the mean loss of this rank's samples, world_size times its share of all
    samples. With it the mean of the ranks' losses is the mean over all samples.
    extra_work: share of the step's forward and backward work that this rank repeats in each step,
    to emulate a slower device.
    sms: multiprocessors that this rank may use, to emulate a slower device; None: all.
    process_group: the ranks that train together, as rank and world_size count them; None: all.
    """

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    batch_size: int
    seed: int = 0
    parts: PartTimes = field(default_factory=PartTimes)
    regions: Regions = field(default_factory=Regions)
    replicas: Replicas = field(default_factory=Replicas)
    loss_weight: float = 1.0
    extra_work: float = 0.0
    sms: int | None = None
    process_group: ProcessGroup | None = None

    def ddp(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return the model wrapped by DistributedDataParallel; itself on one rank and on meta.

        The model must be on the device; all ranks must call it. options: those of the class, where
        bucket_cap_mb=25 counts as not given; device_ids and process_group default to the context's.
        comm_ms and wait_ms are told only of models wrapped here, or with `Workload.set_comm_hook`.
        """
        if self.world_size == 1 or self.device.type == "meta":
            return model
        from torch.nn.parallel import DistributedDataParallel

        # A default is not given: where torch is given `bucket_cap_mb`, it is that of the first
        # bucket too, which has 1 MiB else.
        usual = option_defaults(DdpOptions).items()
        settings = {
            "device_ids": [self.device] if self.device.type == "cuda" else None,
            "process_group": self.process_group,
            **{name: value for name, value in options.items() if (name, value) not in usual},
        }
        ddp = DistributedDataParallel(model, **settings)
        self.replicas.wrapped[ddp] = _Wrapped(options=settings)
        return ddp

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Return a context in which backward passes add up gradients without reducing them.

        Run the forward pass in it too. model: in DDP or sharded by FSDP2, also compiled; for other
        modules it does nothing. With static_graph in `ddp` a model's first such context reduces.
        """
        from torch.nn.parallel import DistributedDataParallel

        model = getattr(model, "_orig_mod", model)  # what torch.compile was given
        # By its method: to import FSDP's class takes half a second, and most points have none.
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)
            return
        is_kept = isinstance(model, DistributedDataParallel)
        wrapped = self.replicas.wrapped.get(model)
        # With static_graph the very first backward pass records the graph and must reduce: under
        # no_sync it fails or, worse, later passes reduce nothing (pytorch#143580, pytorch#187732).
        if wrapped is not None and wrapped.options.get("static_graph") and not wrapped.has_begun:
            wrapped.has_begun, is_kept = True, False
        with model.no_sync() if is_kept else nullcontext():
            yield

    def region(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times what its block issues to the device, as the region `name`.

        Call it anew for each block. It times in a few instrumented steps after the timed ones, on a
        CPU by the host's clock. In other steps, in compiled code, with cuda_graph or with breakdown
        false it does nothing. Times of one name add up in a step; outer regions contain inner ones.
        """
        return self.regions.region(name)

    def generator(self) -> torch.Generator | None:
        """Return a generator on the device, seeded anew by `seed` + `rank`; None on meta."""
        import torch

        if self.device.type == "meta":
            return None
        return torch.Generator(self.device).manual_seed(self.seed + self.rank)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context for a forward pass and its loss: torch.autocast, or one without effect.

        It is autocast to float16 for fp16, to bfloat16 for bf16 and float8. It has no effect in
        fp32 and tf32, and on the meta device, for which torch has no autocast.
        """
        import torch

        if self.precision in (Precision.FP32, Precision.TF32) or self.device.type == "meta":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.precision.dtype))

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return a torch.amp.GradScaler that is enabled in precision fp16 and disabled in others.

        On the meta device it is never enabled. Enabled, it waits for the device once a step, unless
        the optimizer is fused. Its scale falls while gradients overflow and never grows.
        """
        import torch

        is_fp16 = self.precision is Precision.FP16 and self.device.type != "meta"
        # After more steps than its counter, an int32, can hold.
        return torch.amp.GradScaler(self.device.type, growth_interval=2**31, enabled=is_fp16)


class Workload(ABC):
    """One thing to time. The first line of the class docstring says what it is.

    A subclass has `__init__(self, context, *, ...)` and `step`. All else that is declared here is
    optional. A class that does not inherit from this one may have the same, by `as_workload`.

    Class methods that take `settings` are asked by `raybench plan`, so they must do without torch.
    The settings are all of the point, by the names of the job file, with defaults. `params` are the
    parameters of the workload as tables hold them, as texts. What is None is left out of both.
    """

    # What reports call a built-in workload; empty: its name in the job file, as for all others.
    title: ClassVar[str] = ""
    # False where batch sizes mean nothing to it.
    takes_batch_size: ClassVar[bool] = True
    # False where a job may leave out the batch size.
    needs_batch_size: ClassVar[bool] = True
    # False where it computes the same in every precision: a job can then give only fp32.
    takes_precision: ClassVar[bool] = True
    # True where precision float8 means something to it.
    takes_float8: ClassVar[bool] = False
    # True where it multiplies its mean loss by `context.loss_weight`, so that ranks can have
    # batches of different size.
    weighs_loss: ClassVar[bool] = False
    # True where all ranks finish the same items together, as when one sequence is divided over
    # them. items_per_step is then what they finish together, batch_size is that of all, and more
    # ranks are strong scaling without an axis of batch sizes.
    shares_work: ClassVar[bool] = False
    # Names of parameters in whose texts {name} stands for a setting of the point.
    templates: ClassVar[tuple[str, ...]] = ()
    # Packages that are imported only where it is built, and how to install each. `plan` warns where
    # one is not installed.
    packages: ClassVar[Mapping[str, str]] = {}
    # What items_per_step counts, in the plural.
    items: ClassVar[str] = "samples"
    # What a run answers whose job does not say it: the first of these that names a setting that
    # varies in the run, or no setting at all. Without any, the speed-up.
    answers: ClassVar[tuple[Answer, ...]] = ()
    # Numbers of its own for tables and reports. Each is read after the timed steps, on each rank,
    # from the attribute of its name; None there: not known.
    metrics: ClassVar[tuple[Metric, ...]] = ()

    # Samples (rows, sequences) that this rank finishes in a step; None: there is no throughput.
    items_per_step: float | None = None
    # Floating-point operations of a step on this rank; None: counted, unless message_bytes is set.
    flops_per_step: float | None = None
    # Operations of a training step on this rank as papers on MFU count them: per token 6 for each
    # parameter, and attention.
    model_flops_per_step: float | None = None
    # Bytes of a collective's message, and busbw / algbw, as nccl-tests defines both.
    message_bytes: int | None = None
    busbw_factor: float | None = None
    # Bytes that a step reads from and writes to memory.
    memory_bytes: int | None = None
    # The module that is trained or run, for times by layer.
    model: nn.Module | None = None
    # For gradients that are reduced without `Context.ddp`. Called on all ranks after the timed
    # steps, several times, with world_size above 1 only: from then on gradients go through
    # `hook(state, bucket)`, a communication hook of DistributedDataParallel, instead of all_reduce;
    # after a call with None through all_reduce again. state: the process group; None: all ranks.
    set_comm_hook: Callable[[CommHook | None], None] | None = None
    # Compares the gradients of a step with those of one process over the samples of all ranks, and
    # returns the largest relative error. Called outside of the timed steps, by all that train.
    gradient_error: Callable[[], float] | None = None

    @abstractmethod
    def step(self) -> None:
        """Do one iteration: issue all its work; do not wait for the device unless the work does."""

    def check(self) -> None:  # noqa: B027
        """Raise WrongResultError when a step computed something wrong; do nothing by default.

        Called on all ranks after the warm-up and after the timed steps, not twice after one step.
        """

    def close(self) -> None:  # noqa: B027
        """End processes and threads; called once and last, unless `__init__` raises an error."""

    @classmethod
    def why_not(cls, settings: Mapping[str, Any]) -> str | None:
        """Return why a point with these settings cannot be run, and what to do, in a sentence.

        None if no reason is known: `__init__` may still raise UsageError.
        """
        return None

    @classmethod
    def ranks_per_item(cls, settings: Mapping[str, Any]) -> int:
        """Return how many ranks of a point finish the same items together.

        If above 1, batch_size is that of each group of so many ranks, and items_per_step is a
        rank's part of it. Not asked of classes with `shares_work`, whose ranks always share items.
        settings: for certain only world_size and the parameters; `why_not` may refuse them later.
        """
        return 1

    @classmethod
    def estimate_memory(cls, settings: Mapping[str, Any]) -> float | None:
        """Return a rank's peak device memory in bytes, or None; for settings `why_not` accepts."""
        return None

    @classmethod
    def describe(cls, params: Mapping[str, str]) -> str:
        """Return in words what a built-in workload ran, for reports; "" if its name is enough."""
        return cls.title

    @classmethod
    def preset_words(cls, params: Mapping[str, str]) -> str:
        """Return the preset as reports name it, with what another parameter changes of it."""
        return params.get("preset", "")

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return how many parameters its model has; None if it has no model, or does not tell.

        Asked of built-in ones alone; predictions assume that one with a number reduces gradients,
        except in mode inference.
        """
        return None


def as_workload(workload_class: type) -> type[Workload]:
    """Return the class itself if it inherits from Workload, else a new subclass of both.

    A new one at each call. Attributes of the class come before the defaults of Workload.
    """
    if issubclass(workload_class, Workload):
        return workload_class
    return new_class(
        workload_class.__name__,
        (workload_class, Workload),
        exec_body=lambda namespace: namespace.update(__module__=workload_class.__module__),
    )


def builtin_class(kind: str) -> type[Workload] | None:
    """Return the class of a built-in workload, None for another kind. Raises as `registry.load`."""
    return as_workload(registry.load_workload(kind)) if kind in registry.BUILTIN else None


def parameter_count(kind: str, params: Mapping[str, str]) -> int | None:
    """Return how many parameters the model of a built-in workload has. Raises as `registry.load`.

    None for a user's own, or if it has no model or does not tell. params: all of them, as texts.
    """
    built_in = builtin_class(kind)
    return built_in.parameter_count(params) if built_in else None


def apply_precision(precision: Precision) -> None:
    """Set torch's TF32 switches for GPUs in this process: on for tf32, off for other precisions.

    | mode | fp32 matmul, convolution and RNN outside autocast | `Context.autocast` |
    |---|---|---|
    | fp32 | IEEE single precision | none |
    | tf32 | TF32 | none |
    | fp16 | IEEE single precision | float16 |
    | bf16 | IEEE single precision | bfloat16 |
    | float8 | IEEE single precision | bfloat16 |

    Each mode differs from fp32 in one thing, float8 also in layers of `convert_linear_layers`.
    """
    import torch
    from torch import backends

    tf32 = precision is Precision.TF32
    # Torch keeps an older and a newer set of switches for the same thing and raises when it
    # reads an old one that differs from the new one, as torch.compile does in places
    # (pytorch#166387, pytorch#179445). So both are set, the old first: they write new ones too.
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    backends.cudnn.allow_tf32 = tf32
    mode = "tf32" if tf32 else "ieee"
    backends.fp32_precision = mode  # type: ignore[attr-defined]
    backends.cudnn.fp32_precision = mode
    for switch in _switches():
        switch.fp32_precision = mode


def effective_precision() -> str:
    """Return a GPU's arithmetic of fp32 tensors outside autocast: "fp32", "tf32", or "mixed".

    mixed: matrix multiplication, convolution and RNN differ. Read from torch's switches and from
    NVIDIA_TF32_OVERRIDE=0, which overrides them; not from the GPU, which may have no TF32.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return Precision.FP32
    modes = {switch.fp32_precision == "tf32" for switch in _switches()}
    if len(modes) > 1:
        return "mixed"
    return Precision.TF32 if modes.pop() else Precision.FP32


def precision_doubts(precision: Precision, device: torch.device) -> Iterator[Doubt]:
    """Yield doubts about the arithmetic of this process: emulated, or changed by the workload.

    Args:
        precision: precision of the point.
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
    expected = Precision.TF32 if precision is Precision.TF32 else Precision.FP32
    if (effective := effective_precision()) != expected:
        yield Doubt(kind=DoubtKind.OTHER_PRECISION, subject=effective)


def _switches() -> tuple[Any, ...]:
    """Return the modules of torch whose `fp32_precision` says how fp32 is multiplied."""
    from torch import backends

    cudnn: Any = backends.cudnn  # `conv` and `rnn` are missing from torch's types
    return (backends.cuda.matmul, cudnn.conv, cudnn.rnn)


# What a workload may declare of one step on one rank: attributes of `Workload`.
_DECLARED = (
    "items_per_step",
    "message_bytes",
    "busbw_factor",
    "memory_bytes",
    "flops_per_step",
    "model_flops_per_step",
)
_WHOLE = ("items_per_step", "message_bytes", "memory_bytes")
# Beyond what any step does; over the shortest step it is still a double.
_MOST = 1e30
# Integers up to here are doubles too.
_MOST_EXACT = 2**53


def declared_of_step(workload: Workload) -> dict[str, int | float | None]:
    """Return what the workload declares of one step on this rank, by the name of its attribute.

    Always items_per_step (of all ranks with `shares_work`), message_bytes, busbw_factor,
    memory_bytes, flops_per_step and model_flops_per_step; None: not declared. Raises UsageError for
    any value but a real number, also of NumPy, from 0 to 1e30: for NaN, True, Decimal, a tensor.
    """
    declared: dict[str, int | float | None] = {}
    for name in _DECLARED:
        value = getattr(workload, name)
        number = _plain(value)
        if value is not None and (number is None or not 0 <= number <= _MOST):
            raise _not_a_number(workload, name, 0, value)
        is_whole = name in _WHOLE and (number or 0) <= _MOST_EXACT
        declared[name] = number if number is None or is_whole else float(number)
    return declared


def own_metrics(workload: Workload) -> dict[Metric, float]:
    """Return metric -> its value, of the metrics of the workload's class; not those unset or None.

    Entries of `metrics` without `name` or `over_step` are ignored. Raises UsageError for any other
    value than a real number from -1e30 to 1e30: NaN, True, a Decimal, a tensor.
    """
    values = {}
    for metric in declared_entries(type(workload), "metrics", "name", "over_step"):
        if (value := getattr(workload, metric.name, None)) is None:
            continue
        number = _plain(value)
        if number is None or abs(number) > _MOST:
            raise _not_a_number(workload, metric.name, -_MOST, value)
        values[metric] = float(number)
    return values


def _not_a_number(workload: Workload, name: str, least: float, value: object) -> UsageError:
    return UsageError(
        f"workload {type(workload).__name__}: {name} must be a number from {least:g} to {_MOST:g}, "
        f"given {quote(value)}"
    )


def _plain(value: object) -> int | float | None:
    """Return a `numbers.Real` as int or float; None for NaN, infinity, bool and other objects."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return number if isinstance(number, int) or math.isfinite(number) else None
    except (ArithmeticError, TypeError, ValueError):
        return None
