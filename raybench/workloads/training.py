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

# Updates are far below half an ulp of a weight (1e-9 at 0.01), so the weights stay constant, and
# all steps cost the same. With a usual rate gradients would vanish, and after about 650 steps
# Adam's first moments would be subnormal numbers, which GPUs divide more slowly. Not 0, because
# Adam in a CUDA graph divides by the rate.
LEARNING_RATE = 1e-12

_TRAINING_PARAMETERS = {
    *("optimizer", "grad_accumulation", "activation_checkpointing"),
    *LayoutOptions.__annotations__,
}
# Largest relative difference of gradients that rounding explains. The limit is looser below fp32,
# because `loss_weight` is rounded to the type of the loss.
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
    # Wraps the model in DDP, or shards it in place; returns the module that training calls. None:
    # `Context.ddp`.
    parallelize: Callable[[Any], nn.Module] | None = None
    # Whether the optimizer updates all weights in one kernel.
    has_fused_optimizer: bool = False
    # Whether the weights already have the type of the precision, so that there is no autocast.
    has_cast_weights: bool = False


class Model(Workload):
    """A workload whose step trains a model or, in mode inference, runs it forward.

    `__init__` of a subclass calls `build`, or `train`, or `load` and then `run_forward`. In
    inference the ranks do not communicate.
    """

    weighs_loss = True
    answers: ClassVar[tuple[Answer, ...]] = (
        Answer(metric="throughput", over=("shares", "slow_ratio")),
    )
    items_per_step: float
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
        is_float32 = Precision(str(settings["precision"])).dtype == "float32"
        if settings.get("cast_weights") and is_float32:
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
        """Call `train`, or for inference `load` and `run_forward`.

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
        """Make a model, wrap it in DDP or shard it, and let `step` train it. Collective.

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
        parallelize = recipe.parallelize or context.ddp
        self.replica = parallelize(self.model)
        self._forward = compile_model(self.replica, context, wanted=recipe.compile)
        self._forward_without_ddp = compile_model(self.model, context, wanted=recipe.compile)
        self.optimizer = self._make_optimizer(context, recipe)
        self.scaler = context.grad_scaler()
        self.loss = recipe.loss
        self._context, self._batches = context, batches
        self._passes = recipe.grad_accumulation
        self._has_cast_weights = recipe.has_cast_weights
        self.items_per_step = context.batch_size * recipe.grad_accumulation

    def _make_optimizer(self, context: Context, recipe: Recipe) -> torch.optim.Optimizer:
        import torch

        names = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
        optimizer_class = getattr(torch.optim, names[recipe.optimizer])
        is_fused = recipe.has_fused_optimizer and context.device.type != "meta"
        # None leaves the choice between loop and foreach to torch; False would take the loop.
        options = {"fused": True if is_fused else None}
        if recipe.optimizer != "sgd":
            # A capturable Adam counts its steps on the device. A count on the host would be
            # constant in a CUDA graph.
            options["capturable"] = context.cuda_graph and context.device.type == "cuda"
        optimizer: torch.optim.Optimizer = optimizer_class(
            self.model.parameters(), lr=LEARNING_RATE, **options
        )
        return optimizer

    def load(
        self, context: Context, make_model: Callable[[], nn.Module], *, cast_weights: bool
    ) -> None:
        """Make a model for inference, equal on all ranks; `run_forward` must follow.

        Args:
            cast_weights: store the weights as `compute_dtype`, without autocast; floating-point
                inputs must have this type.
        """
        import torch

        torch.manual_seed(context.seed)
        with context.device:
            self.model = make_model().eval().requires_grad_(False)
        if cast_weights:
            self.model.to(compute_dtype(context))
        self._context = context
        self._has_cast_weights = cast_weights
        # Inference has no gradients to check.
        self.gradient_error = None  # type: ignore[assignment, method-assign]
        self.items_per_step = context.batch_size

    def run_forward(self, forward: Callable[[], object]) -> None:
        """Let `step` call `forward` in the context `inference`; call this after `load`."""
        import torch

        self._inference_pass = forward
        # Free what the set-up left in torch's cache: a CUDA graph could not use this memory.
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self) -> None:
        """Run one optimizer step, or one forward pass in mode inference."""
        if self._inference_pass is not None:
            with self.inference():
                self._inference_pass()
            return
        self._accumulate(self._batches)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # This is right in a captured step, too: each replay makes new gradients in the graph's
        # memory.
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Return a context of inference mode and, unless `load` cast the weights, autocast."""
        import torch

        autocast = nullcontext() if self._has_cast_weights else self._context.autocast()
        with torch.inference_mode(), autocast:
            yield

    def gradient_error(self) -> float:
        """Return the largest relative error of a parameter's gradient in a step. Collective.

        The error is |gradient - reference| / |reference| in norms. The reference is the gradient
        over the samples of all ranks without DistributedDataParallel. Instances replace
        this method by None after `load`, and if dp_shard, cp or tp divides the model.
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
        gradient_sums = [torch.zeros_like(gradient) for gradient in gradients]
        for inputs, targets in batches:
            local_gradients = self._local_gradients(inputs, targets)
            for gradient_sum, gradient in zip(gradient_sums, local_gradients, strict=True):
                gradient_sum.add_(gradient, alpha=len(inputs))
        local_samples = float(sum(len(inputs) for inputs, _ in batches))
        samples = torch.tensor(local_samples, dtype=torch.float64, device=self._context.device)
        if self._context.world_size > 1:
            for local_sum in (samples, *gradient_sums):
                dist.all_reduce(local_sum, group=self._context.process_group)
        errors = []
        for gradient, gradient_sum in zip(gradients, gradient_sums, strict=True):
            reference = gradient_sum / samples
            errors.append((gradient - reference).norm() / reference.norm().clamp(min=1e-300))
        return float(torch.stack(errors).max())  # not Python's `max`, which may lose a NaN

    def close(self) -> None:
        """Free model, optimizer state and data by deleting all attributes."""
        self.__dict__.clear()

    def _accumulate(self, batches: Iterator[Batch]) -> None:
        """Add up the gradients of a step in `.grad`; the last pass reduces them over the ranks."""
        context = self._context
        # Emulate a slower device: repeat part of the work, and drop the result. Use few passes,
        # because each pass has a fixed cost. Not on meta, where raybench counts the operations.
        # Draw from `self._batches`, because `batches` may have only the batches of one step.
        extra_rows = round(context.extra_work * context.batch_size * self._passes)
        while extra_rows > 0 and context.device.type != "meta":
            inputs, targets = next(self._batches)
            self._local_gradients(inputs[:extra_rows], targets[:extra_rows])
            extra_rows -= context.batch_size

        # The gradient is the mean over the passes, weighed by this rank's share of the samples.
        divisor = self._passes / context.loss_weight
        for index in range(self._passes):
            is_last = index == self._passes - 1
            inputs, targets = next(batches)
            with nullcontext() if is_last else context.no_sync(self.replica):
                # No variable holds the loss, so that the graph is freed before the next pass.
                self._scaled_loss(self._forward, inputs, targets, divisor).backward()  # type: ignore[no-untyped-call]

    def _scaled_loss(
        self, forward: Forward, inputs: Tensor, targets: Tensor, divisor: float = 1.0
    ) -> Tensor:
        """Return the mean loss of the samples, divided by `divisor` and scaled for fp16."""
        with nullcontext() if self._has_cast_weights else self._context.autocast():
            loss = self.loss(forward(inputs), targets)
        if divisor != 1:  # a division by 1 would launch a kernel
            loss = loss / divisor
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def _local_gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's gradients of the mean loss, scaled by `scaler`; `.grad` stays."""
        import torch

        loss = self._scaled_loss(self._forward_without_ddp, inputs, targets)
        return torch.autograd.grad(loss, tuple(self.model.parameters()))


def gradient_doubt(error: float | None, precision: Precision) -> Doubt | None:
    """Return a doubt if rounding does not explain the error of the gradients.

    Args:
        error: result of `Model.gradient_error`; NaN gives a doubt. None: unknown.
    """
    limit = _FP32_TOLERANCE if precision is Precision.FP32 else _LOOSE_TOLERANCE
    if error is None or error <= limit:
        return None
    return Doubt(kind=DoubtKind.OTHER_GRADIENTS, value=error, limit=limit)


@cache
def _training_defaults(workload_class: type[Model]) -> Mapping[str, Scalar | None]:
    """Return the defaults of the class's parameters that only training uses, by name."""
    return {
        parameter.name: parameter.default
        for parameter in parameters_of_class(workload_class)
        if parameter.name in _TRAINING_PARAMETERS
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Memory of a training step on a rank beside weights, gradients and optimizer, in bytes."""

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
    """Return an estimate of the peak memory of a rank's training step on a GPU, in bytes.

    Most measured peaks differ by less than 20 %.

    Args:
        settings: all settings of the point.
        step: memory beside weights, gradients and optimizer.
        parameters: number of parameters of the whole model.
        ranks: number of ranks over which the parameters are sharded.

    Returns:
        None for inference, CUDA graphs, and unequal shares or speeds.
    """
    is_even = settings["shares"] == EQUAL and settings["slow_ratio"] == 1
    if settings["mode"] != "train" or settings["cuda_graph"] or not is_even:
        return None
    weight_size = 2.0 if settings.get("optimizer_dtype") == "bf16" else 4.0
    weights = weight_size * parameters / ranks
    is_adam = settings.get("optimizer", "adam") != "sgd"
    adam_moments = 2 * weights if is_adam else 0.0
    # A sharded model has no DDP.
    uses_ddp = settings["world_size"] > 1 and ranks == 1
    buckets = weights if uses_ddp else 0.0
    # Gradients that are views of DDP's buckets have no memory of their own.
    gradients = 0.0 if buckets and settings.get("gradient_as_bucket_view") else weights
    # An Adam that is not fused makes temporaries as large as the weights.
    temporaries = weights if is_adam and not settings.get("fused_optimizer") else 0.0
    earlier_gradients = gradients if settings["grad_accumulation"] > 1 else 0.0
    at_begin_of_backward = step.saved + step.at_loss + earlier_gradients
    at_end_of_backward = gradients + step.recomputed
    in_optimizer = gradients + temporaries
    peak = max(at_begin_of_backward, at_end_of_backward, in_optimizer)
    return weights + adam_moments + buckets + peak + step.data + _WORKSPACES_BYTES


def matmul_element_size(settings: Mapping[str, Any]) -> int:
    """Return the bytes of an element in matrix products: 2 for fp16, bf16 and float8, else 4."""
    return 4 if Precision(settings["precision"]).dtype == "float32" else 2


def slices(inputs: Tensor, targets: Tensor, batch_size: int) -> Iterator[Batch]:
    """Yield batches of `batch_size` consecutive rows without end, as views.

    There must be at least `batch_size` rows. Left-over rows are unused.
    """
    starts = range(0, len(inputs) - batch_size + 1, batch_size)
    while True:
        for start in starts:
            rows = slice(start, start + batch_size)
            yield inputs[rows], targets[rows]


def compute_dtype(context: Context) -> torch.dtype:
    """Return the type of inputs of matrix products.

    This is float16 for fp16, bfloat16 for bf16 and float8, float32 for fp32 and tf32. On the meta
    device, which has no autocast, it is float32.
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
    model: nn.Module, *block_classes: type[nn.Module], options: dict[str, bool] | None = None
) -> None:
    """Make all modules of these classes compile themselves at their first call.

    Do not call this on meta. A class is compiled once per input shape. Values that differ between
    blocks must be arguments of `forward`: an attribute is a constant of the compiled code, so the
    next block would be compiled again.
    """
    for module in model.modules():
        if isinstance(module, block_classes):
            module.compile(dynamic=False, options=options)
