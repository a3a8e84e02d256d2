"""What the workloads that train have in common: parameters, with their rules, and a base class.

Loads no torch: `plan` reads their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, TypedDict, get_type_hints

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.job.point import Precision, Scalar
from raybench.workloads.base import Context, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"
Forward: TypeAlias = "Callable[[Tensor], Tensor]"
OptimizerName = Literal["sgd", "adam", "adamw"]

Optimizer = Annotated[
    OptimizerName, Field(description="Class of torch.optim; all but the learning rate default.")
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


class DdpOptions(TypedDict, total=False):
    """Options of DistributedDataParallel as parameters: `**ddp: Unpack[DdpOptions]`.

    One more here is a setting of each workload that takes them and an argument of torch's class,
    and nothing else knows their names. Without effect when world_size is 1. Their defaults are
    torch's.
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


def ddp_defaults() -> Mapping[str, Scalar]:
    """Return the default of each option of DistributedDataParallel."""
    hints = get_type_hints(DdpOptions, include_extras=True)
    return {name: hint.__metadata__[0].default for name, hint in hints.items()}


# Far below half an ulp of a weight (1e-9 at 0.01), so that weights stay where they start, and
# step 100,000 does the arithmetic of step 10 on the same kinds of numbers. With a usual rate a
# model memorises its few rows: gradients vanish, and after some 650 steps Adam's first moments,
# 0.9^n of what they were, are subnormal, which GPUs divide more slowly. Not 0: Adam in a CUDA
# graph divides by it.
LEARNING_RATE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained.

    ddp: as Context.ddp takes them. divide: what divides the model over the ranks, instead of DDP.
    is_cast: the weights are in the type of the precision where they are used: there is no autocast.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: OptimizerName
    grad_accumulation: int
    compile: bool
    ddp: DdpOptions = field(default_factory=DdpOptions)
    divide: Callable[[nn.Module], nn.Module] | None = None
    is_fused: bool = False
    is_cast: bool = False


def slices(inputs: Tensor, targets: Tensor, batch_size: int) -> Iterator[Batch]:
    """Full batches of consecutive rows, over and over. No copies."""
    starts = range(0, len(inputs) - batch_size + 1, batch_size)
    while True:
        for start in starts:
            rows = slice(start, start + batch_size)
            yield inputs[rows], targets[rows]


class Trained(Workload):
    """A workload whose step is one optimizer step of data-parallel training; it begins by `train`.

    The work is stationary: every step costs what the first ones cost, however many there were.

    model: the bare model. replica: the same under DistributedDataParallel, or itself alone.
    """

    weighs_loss = True
    answers: ClassVar[tuple[Answer, ...]] = (
        Answer(metric="throughput", over=("shares", "slow_ratio")),
    )
    model: nn.Module
    replica: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def train(
        self,
        context: Context,
        recipe: Recipe,
        make_model: Callable[[], nn.Module],
        batches: Iterator[Batch],
    ) -> None:
        """Make the model, its optimizer and all else that a step needs."""
        import torch

        if context.cuda_graph and context.precision is Precision.FP16:
            raise UsageError(
                "cuda_graph: true cannot be had in precision fp16, whose gradient scaler waits for "
                "the device in every step; take bf16, or cuda_graph: false"
            )
        # The seed is the same on all ranks, and so are the parameters.
        torch.manual_seed(context.seed)
        with context.device:
            self.model = make_model()
        divide = recipe.divide or partial(context.ddp, **recipe.ddp)
        self.replica = divide(self.model)
        # On the meta device only the operations of a step are counted: compiled they are hidden.
        compiles = recipe.compile and context.device.type != "meta"
        self._forward: Forward = torch.compile(self.replica) if compiles else self.replica
        # Past DistributedDataParallel.
        self._forward_alone: Forward = torch.compile(self.model) if compiles else self.model
        self.optimizer = _optimizer(self.model, recipe, context)
        self.scaler = context.grad_scaler()
        self._context = context
        self._recipe = recipe
        self._batches = batches
        self.items_per_step = context.batch_size * recipe.grad_accumulation

    def step(self) -> None:
        """One optimizer step: `grad_accumulation` passes, then the update."""
        self._accumulate(self._batches)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Also in a captured step: each replay makes the gradients anew in the graph's own memory.
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_error(self) -> float:
        """Compare a step's gradients with those of one process over the same samples of all ranks.

        The largest difference of a parameter's gradient, over the norm of it that is right. All
        ranks that train together call it, before their first step.
        """
        batches = [next(self._batches) for _ in range(self._recipe.grad_accumulation)]
        self._accumulate(iter(batches))
        found = [_gradient(parameter).double() for parameter in self.model.parameters()]
        self.optimizer.zero_grad(set_to_none=True)
        wanted = self._gradients_of_all(batches)
        return max(
            float((got - right).norm() / right.norm().clamp(min=1e-300))
            for got, right in zip(found, wanted, strict=True)
        )

    def close(self) -> None:
        """Drop the model, the optimizer's state and the data."""
        self.__dict__.clear()

    def _accumulate(self, batches: Iterator[Batch]) -> None:
        """Make the gradients of a step; they are reduced in its last pass."""
        self._do_extra_work()
        for to_go in reversed(range(self._recipe.grad_accumulation)):
            inputs, targets = next(batches)
            with self._context.no_sync(self.replica) if to_go else nullcontext():
                self.scaler.scale(self._loss(inputs, targets)).backward()  # type: ignore[no-untyped-call]

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self._mean_loss(self._forward, inputs, targets)
        divisor = self._recipe.grad_accumulation / self._context.loss_weight
        # A division by one would still be a kernel.
        return loss / divisor if divisor != 1 else loss

    def _mean_loss(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        with nullcontext() if self._recipe.is_cast else self._context.autocast():
            return self._recipe.loss(forward(inputs), targets)

    def _do_extra_work(self) -> None:
        """Repeat passes of the step on so many rows as a slower device would be behind by.

        Nothing of it is kept, and nothing is reduced. In as few passes as the step has rows for:
        each of them costs something whatever its rows.
        """
        batch_size = self._context.batch_size
        rows = round(self._context.extra_work * batch_size * self._recipe.grad_accumulation)
        # On the meta device the operations of the step are counted.
        while rows > 0 and self._context.device.type != "meta":
            inputs, targets = next(self._batches)
            self._gradients_alone(inputs[:rows], targets[:rows])
            rows -= batch_size

    def _gradients_alone(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of this rank's mean loss, which leaves those of the step alone."""
        import torch

        loss = self.scaler.scale(self._mean_loss(self._forward_alone, inputs, targets))
        return torch.autograd.grad(loss, tuple(self.model.parameters()))

    def _gradients_of_all(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the gradients of the mean loss over the samples of all ranks."""
        import torch
        from torch import distributed as dist

        items = sum(len(inputs) for inputs, _ in batches)
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in self.model.parameters()]
        for inputs, targets in batches:
            alone = self._gradients_alone(inputs, targets)
            for total, gradient in zip(sums, alone, strict=True):
                total.add_(gradient, alpha=len(inputs))
        count = torch.tensor(float(items), dtype=torch.float64, device=self._context.device)
        if self._context.world_size > 1:
            for value in (count, *sums):
                dist.all_reduce(value, group=self._context.process_group)
        return [total / count for total in sums]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a step leaves a gradient on each parameter"
    return parameter.grad


def _optimizer(model: nn.Module, recipe: Recipe, context: Context) -> torch.optim.Optimizer:
    import torch

    # Not capturable, Adam counts its steps on the host: a graph would replay one and the same.
    captured = context.cuda_graph and context.device.type == "cuda"
    # On the meta device torch fuses nothing.
    is_fused = True if recipe.is_fused and context.device.type != "meta" else None
    parameters, rate = model.parameters(), LEARNING_RATE
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, fused=is_fused)
    adam = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    return adam(parameters, lr=rate, capturable=captured, fused=is_fused)
