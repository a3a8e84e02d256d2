"""What workloads that train or run a model have in common: parameters and a base class.

`plan` reads the classes, so this module loads no torch at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from raybench.conversion import MIB
from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.job.point import EQUAL, Precision, Scalar
from raybench.job.settings import parameters_of_class
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.metrics import Metric
from raybench.workloads.base import Context, Workload
from raybench.workloads.shapes import LayoutOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Inputs and targets of one forward and backward pass.
Batch: TypeAlias = "tuple[Tensor, Tensor]"
Forward: TypeAlias = "Callable[[Tensor], Tensor]"

Optimizer = Annotated[
    Literal["sgd", "adam", "adamw"],
    Field(description="Class of torch.optim; all but the learning rate default."),
]
GradAccumulation = Annotated[
    int,
    Field(
        gt=0, description="Forward and backward passes per step; gradients are reduced in the last."
    ),
]
Compile = Annotated[
    bool, Field(description="Compile the model, with DDP around it; happens in the warm-up.")
]
Mode = Annotated[
    Literal["train", "inference"],
    Field(description="train: optimizer steps. inference: forward passes, without gradients."),
]
AttentionKernel = Annotated[
    Literal["auto", "flash", "efficient", "cudnn", "math"],
    Field(description="Kernel of torch's attention; auto: the one that torch takes."),
]
CastWeights = Annotated[
    bool,
    Field(description="Inference: weights are stored in fp16 or bf16, and there is no autocast."),
]

OUTPUT_ERROR = Metric(
    name="output_error",
    heading="output error",
    description="largest error against fp32 divided by the largest fp32 output",
    over_ranks="max",
)

# Far below half an ulp of a weight (1e-9 at 0.01), so the weights stay constant, and all steps
# compute with similar numbers. With a usual rate a model would memorise its few rows, so gradients
# would vanish. After about 650 steps Adam's first moments would be subnormal, and GPUs divide such
# numbers more slowly. Not 0, because Adam in a CUDA graph divides by the rate.
LEARNING_RATE = 1e-12

# Parameters that only training uses.
_ONLY_FOR_TRAINING = {
    *("optimizer", "grad_accumulation", "activation_checkpointing"),
    *LayoutOptions.__annotations__,
}
# Rounding does not explain a larger relative difference of gradients. In other precisions than fp32
# the limit is looser, because the weights of losses are rounded to the format of the losses.
_FP32_TOLERANCE, _LOOSE_TOLERANCE = 1e-4, 0.03
# cuBLAS and cuBLASLt use 32 MiB each on Hopper.
_WORKSPACES_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How `Model.train` trains a model."""

    # Mean loss, a scalar, of the model's outputs and the targets.
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer = "adam"
    # Batches per step.
    grad_accumulation: int = 1
    # Compile the model as a whole, with DDP around it.
    compile: bool = False
    # Divides the model over the ranks, in place, and returns the module that training calls. None:
    # `Context.ddp`.
    divide: Callable[[Any], nn.Module] | None = None
    # Whether the optimizer updates all weights in one kernel.
    is_fused: bool = False
    # Whether the weights already have the type of the precision, so that there is no autocast.
    is_cast: bool = False


class Model(Workload):
    """A workload whose step trains a model or, in mode inference, runs it forward.

    `__init__` of a subclass calls `build`, or `train`, or `load` and then `run_forward`. All
    training steps cost the same. In inference the ranks are replicas that do not communicate.
    """

    weighs_loss = True
    answers: ClassVar[tuple[Answer, ...]] = (
        Answer(metric="throughput", over=("shares", "slow_ratio")),
    )
    items_per_step: float
    # The model itself.
    model: nn.Module
    # The module that training calls, for example the model under DistributedDataParallel.
    replica: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loss: Callable[[Tensor, Tensor], Tensor]
    _inference_pass: Callable[[], object] | None = None
    _has_cast_weights = False

    @classmethod
    def why_not(cls, settings: Mapping[str, Scalar]) -> str | None:
        """Return why these settings cannot run, in one sentence; None if they can."""
        if settings.get("mode", "train") == "train":
            if settings.get("cast_weights"):
                return "cast_weights: true needs mode: inference"
            return None
        for name, default in _training_defaults(cls).items():
            if settings.get(name, default) != default:
                return f"mode: inference trains nothing, so {name} must be left out"
        is_single = Precision(str(settings["precision"])).dtype == "float32"
        if settings.get("cast_weights") and is_single:
            return (
                f"cast_weights: true needs precision fp16 or bf16, given {settings['precision']}, "
                "whose weights are stored in fp32 as they are"
            )
        return None

    def build(
        self,
        mode: Mode,
        context: Context,
        make_model: Callable[[], nn.Module],
        batches: Iterator[Batch],
        recipe: Recipe,
        *,
        cast_weights: bool = False,
    ) -> None:
        """Prepare the steps: call `train`, or `load` and `run_forward` for inference.

        Args:
            batches: endless batches of this rank; inference ignores the targets.
            recipe: how to train; inference uses only `compile`.
            cast_weights: as for `load`; not used for training.
        """
        if mode == "train":
            self.train(context, make_model, batches, recipe)
            return
        self.load(context, make_model, cast_weights=cast_weights)
        forward = compile_model(self.model, context, wanted=recipe.compile)
        self.run_forward(lambda: forward(next(batches)[0]))

    def train(
        self,
        context: Context,
        make_model: Callable[[], nn.Module],
        batches: Iterator[Batch],
        recipe: Recipe,
    ) -> None:
        """Make the model, divide it over the ranks, and make `step` train it. Collective.

        Args:
            make_model: returns a new model; called with the device as torch's default device, and
                with the same seed on all ranks.
            batches: endless batches of this rank, of `context.batch_size` items.

        Raises:
            UsageError: cuda_graph in precision fp16.
        """
        import torch

        if context.cuda_graph and context.precision is Precision.FP16:
            raise UsageError(
                "cuda_graph: true cannot be had in precision fp16, whose gradient scaler waits for "
                "the device in every step; take bf16, or cuda_graph: false"
            )
        torch.manual_seed(context.seed)
        with context.device:
            self.model = make_model()
        self.replica = (recipe.divide or context.ddp)(self.model)
        self._forward = compile_model(self.replica, context, wanted=recipe.compile)
        # The same model without DistributedDataParallel.
        self._forward_alone = compile_model(self.model, context, wanted=recipe.compile)
        self.optimizer = self._make_optimizer(context, recipe)
        self.scaler = context.grad_scaler()
        self.loss = recipe.loss
        self._context, self._batches = context, batches
        self._passes, self._is_cast = recipe.grad_accumulation, recipe.is_cast
        self.items_per_step = context.batch_size * recipe.grad_accumulation

    def _make_optimizer(self, context: Context, recipe: Recipe) -> torch.optim.Optimizer:
        import torch

        names = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
        kind = getattr(torch.optim, names[recipe.optimizer])
        options = {"fused": True if recipe.is_fused and context.device.type != "meta" else None}
        if recipe.optimizer != "sgd":
            # Otherwise Adam counts its steps on the host, and a graph would replay the same step.
            options["capturable"] = context.cuda_graph and context.device.type == "cuda"
        optimizer: torch.optim.Optimizer = kind(
            self.model.parameters(), lr=LEARNING_RATE, **options
        )
        return optimizer

    def load(
        self, context: Context, make_model: Callable[[], nn.Module], *, cast_weights: bool
    ) -> None:
        """Make the model for inference, equal on all ranks; `run_forward` must follow.

        Args:
            cast_weights: store the weights as `compute_dtype` and use no autocast; inputs that are
                not integers must have this type.
        """
        import torch

        torch.manual_seed(context.seed)
        with context.device:
            self.model = make_model().eval().requires_grad_(False)
        if cast_weights:
            self.model.to(compute_dtype(context))
        self._context = context
        self._has_cast_weights = cast_weights
        self.gradient_error = None  # type: ignore[assignment, method-assign]
        self.items_per_step = context.batch_size

    def run_forward(self, forward: Callable[[], object]) -> None:
        """Make `step` call `forward` in `inference`; call this after `load`."""
        import torch

        self._inference_pass = forward
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self) -> None:
        """Run one optimizer step, which clears `.grad`, or one forward pass."""
        if self._inference_pass is not None:
            with self.inference():
                self._inference_pass()
            return
        self._accumulate(self._batches)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Also in a captured step: each replay makes new gradients in the memory of the graph.
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Return a context of inference mode, with autocast unless `load` cast the weights."""
        import torch

        autocast = nullcontext() if self._has_cast_weights else self._context.autocast()
        with torch.inference_mode(), autocast:
            yield

    def gradient_error(self) -> float:
        """Return the largest relative error of a step's gradients over all parameters. Collective.

        The reference is the gradient of one process over the samples of all ranks, with the
        BatchNorm statistics of each batch. The error is the norm of the difference divided by the
        norm of the reference; it is not finite if a gradient is not finite. This uses the batches
        of a step and clears `.grad`. The attribute is None after `load` and for a model that
        dp_shard, cp or tp divides.
        """
        import torch
        from torch import distributed as dist

        batches = [next(self._batches) for _ in range(self._passes)]
        self._accumulate(iter(batches))
        gradients = []
        for parameter in self.model.parameters():
            assert parameter.grad is not None, "a step leaves a gradient on each parameter"
            gradients.append(parameter.grad.double())
        self.optimizer.zero_grad(set_to_none=True)

        # The reference, in float64: the sum over the samples of all ranks, divided by their number.
        sums = [torch.zeros_like(gradient) for gradient in gradients]
        for inputs, targets in batches:
            alone = self._gradients_alone(inputs, targets)
            for total, gradient in zip(sums, alone, strict=True):
                total.add_(gradient, alpha=len(inputs))
        local_count = float(sum(len(inputs) for inputs, _ in batches))
        count = torch.tensor(local_count, dtype=torch.float64, device=self._context.device)
        if self._context.world_size > 1:
            for value in (count, *sums):
                dist.all_reduce(value, group=self._context.process_group)
        errors = []
        for gradient, total in zip(gradients, sums, strict=True):
            reference = total / count
            errors.append((gradient - reference).norm() / reference.norm().clamp(min=1e-300))
        return float(torch.stack(errors).max())  # not Python's `max`, which may lose a NaN

    def close(self) -> None:
        """Drop all attributes: model, optimizer state and data."""
        self.__dict__.clear()

    def _accumulate(self, batches: Iterator[Batch]) -> None:
        """Add up the gradients of a step in `.grad`; the last pass reduces them over the ranks."""
        context = self._context
        # Emulate a slower device: repeat part of the work, and drop the result. Use few passes,
        # because each pass has a fixed cost. On meta operations are counted, so repeat nothing.
        extra_rows = round(context.extra_work * context.batch_size * self._passes)
        while extra_rows > 0 and context.device.type != "meta":
            inputs, targets = next(self._batches)
            self._gradients_alone(inputs[:extra_rows], targets[:extra_rows])
            extra_rows -= context.batch_size

        divisor = self._passes / context.loss_weight
        for later_passes in reversed(range(self._passes)):
            inputs, targets = next(batches)
            with context.no_sync(self.replica) if later_passes else nullcontext():
                # Without a variable, so that the graph is freed before the next pass.
                self._scaled_loss(self._forward, inputs, targets, divisor).backward()  # type: ignore[no-untyped-call]

    def _scaled_loss(
        self, forward: Forward, inputs: Tensor, targets: Tensor, divisor: float = 1.0
    ) -> Tensor:
        """Return the mean loss of the samples, divided and then scaled for fp16."""
        with nullcontext() if self._is_cast else self._context.autocast():
            loss = self.loss(forward(inputs), targets)
        # A division by one would launch a kernel.
        scaled: Tensor = self.scaler.scale(loss / divisor if divisor != 1 else loss)
        return scaled

    def _gradients_alone(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the samples' mean loss on this rank; leave `.grad` unchanged."""
        import torch

        loss = self._scaled_loss(self._forward_alone, inputs, targets)
        return torch.autograd.grad(loss, tuple(self.model.parameters()))


def gradient_doubt(error: float | None, precision: Precision) -> Doubt | None:
    """Return a doubt if gradients differ from a single process by more than rounding.

    Args:
        error: relative difference; NaN is a doubt, None is unknown.
    """
    limit = _FP32_TOLERANCE if precision is Precision.FP32 else _LOOSE_TOLERANCE
    if error is None or error <= limit:
        return None
    return Doubt(kind=DoubtKind.OTHER_GRADIENTS, value=error, limit=limit)


@cache
def _training_defaults(workload_class: type[Model]) -> Mapping[str, Scalar | None]:
    """Return the default of each parameter of a class that only training uses."""
    return {
        parameter.name: parameter.default
        for parameter in parameters_of_class(workload_class)
        if parameter.name in _ONLY_FOR_TRAINING
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a training step needs beside weights, gradients and optimizer, in bytes on a rank."""

    # Activations that a forward pass saves for its backward pass.
    saved: float
    # Temporary tensors while the loss is computed.
    at_loss: float = 0.0
    # Activations of a block that is recomputed.
    recomputed: float = 0.0
    # All inputs and targets.
    data: float


def estimate_step(
    settings: Mapping[str, Any], step: StepBytes, *, parameters: int, ranks: int = 1
) -> float | None:
    """Return a rough estimate of the peak memory of a rank's training step on a GPU, in bytes.

    The peak is at the begin or at the end of the backward pass, or in the optimizer. Most measured
    peaks differ by less than a fifth.

    Args:
        settings: all settings of the point.
        step: what the step needs beside weights, gradients and optimizer.
        parameters: number of parameters of the whole model.
        ranks: number of ranks over which the parameters are sharded.

    Returns:
        None for inference, CUDA graphs, and unequal shares or speeds.
    """
    is_even = settings["shares"] == EQUAL and settings["slow_ratio"] == 1
    if settings["mode"] != "train" or settings["cuda_graph"] or not is_even:
        return None
    weights = (2.0 if settings.get("optimizer_dtype") == "bf16" else 4.0) * parameters / ranks
    is_adam = settings.get("optimizer", "adam") != "sgd"
    # Gradients that are views of DDP's buckets have no memory of their own.
    buckets = weights if settings["world_size"] > 1 and ranks == 1 else 0.0
    gradients = 0.0 if buckets and settings.get("gradient_as_bucket_view") else weights
    # Adam's update of all weights at once makes temporaries as large as the weights.
    temporaries = weights if is_adam and not settings.get("fused_optimizer") else 0.0
    earlier_passes = gradients if settings["grad_accumulation"] > 1 else 0.0
    backward_begin = step.saved + step.at_loss + earlier_passes
    backward_end_or_optimizer = gradients + max(step.recomputed, temporaries)
    peak = max(backward_begin, backward_end_or_optimizer)
    # Adam keeps two moments of each weight.
    return weights * (3 if is_adam else 1) + buckets + peak + step.data + _WORKSPACES_BYTES


def product_bytes(settings: Mapping[str, Any]) -> int:
    """Return the bytes of a number in matrix products: 2 for fp16, bf16 and float8, else 4."""
    return 4 if Precision(settings["precision"]).dtype == "float32" else 2


def slices(inputs: Tensor, targets: Tensor, batch_size: int) -> Iterator[Batch]:
    """Yield inputs and targets of consecutive rows without end, as views of `batch_size` rows.

    There must be at least `batch_size` rows. Left-over rows are unused.
    """
    starts = range(0, len(inputs) - batch_size + 1, batch_size)
    while True:
        for start in starts:
            rows = slice(start, start + batch_size)
            yield inputs[rows], targets[rows]


def compute_dtype(context: Context) -> torch.dtype:
    """Return the type of inputs of matrix products.

    float16 for fp16, bfloat16 for bf16 and float8, float32 for fp32 and tf32. On the meta device,
    which has no autocast, always float32.
    """
    import torch

    name = "float32" if context.device.type == "meta" else context.precision.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def compile_model(model: nn.Module, context: Context, *, wanted: bool) -> Forward:
    """Return a wrapper that compiles at its first call; the model itself on meta."""
    import torch

    return torch.compile(model) if wanted and context.device.type != "meta" else model


def compile_blocks(
    model: nn.Module, *kinds: type[nn.Module], options: dict[str, bool] | None = None
) -> None:
    """Make all modules of the given classes compile themselves at their first call, in place.

    A class of blocks is compiled once per input shape. Values that differ between blocks must be
    arguments of `forward`: an attribute is a constant of the compiled code, so the next block would
    be compiled again. This must not be called on meta.
    """
    for module in model.modules():
        if isinstance(module, kinds):
            module.compile(dynamic=False, options=options)
