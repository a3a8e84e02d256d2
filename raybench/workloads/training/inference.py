"""What the workloads have in common that train a model or only run it: `mode`, and a base class.

Loads no torch: `plan` reads their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from raybench.job.point import Precision, Scalar
from raybench.records.metric import Metric
from raybench.workloads.base import Context
from raybench.workloads.training.compilation import compile_model
from raybench.workloads.training.trained import Batch, Recipe, Trained, ddp_defaults

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ModeName = Literal["train", "inference"]

Mode = Annotated[
    ModeName,
    Field(description="train: optimizer steps. inference: forward passes, without gradients."),
]
CastWeights = Annotated[
    bool,
    Field(description="Inference: weights are stored in fp16 or bf16, and there is no autocast."),
]

OUTPUT_ERROR = Metric(
    name="output_error",
    heading="output error",
    description="largest difference from fp32 over its largest output",
    over_ranks="max",
)

# Parameters that mean nothing where nothing is trained.
_OF_TRAINING = ("optimizer", "grad_accumulation", "activation_checkpointing", *ddp_defaults())
_HALVES = {
    Precision.FP16: "float16",
    Precision.BF16: "bfloat16",
    Precision.FLOAT8: "bfloat16",
}


class Model(Trained):
    """A workload whose step trains a model or, in mode inference, runs it forward.

    It begins by `build`, or by `load` and `answer_by`. In inference several ranks are replicas,
    each with data of its own, that do not communicate.
    """

    _answer: Callable[[], object] | None = None
    _is_cast = False

    @classmethod
    def why_not(cls, settings: Mapping[str, Scalar]) -> str | None:
        """Why a point with these settings cannot be run, in a sentence; None where it can."""
        if settings["mode"] == "train":
            return "cast_weights: true needs mode: inference" * bool(settings.get("cast_weights"))
        defaults = inspect.signature(cls.__init__).parameters
        for name in _OF_TRAINING:
            usual = ddp_defaults().get(name)
            if usual is None and name in defaults:
                usual = defaults[name].default
            if settings.get(name, usual) != usual:
                return f"mode: inference trains nothing, so {name} must be left out"
        if settings.get("cast_weights") and settings["precision"] not in _HALVES:
            return (
                f"cast_weights: true needs precision fp16 or bf16, given {settings['precision']}, "
                "whose weights are stored in fp32 as they are"
            )
        return None

    def build(
        self,
        mode: ModeName,
        context: Context,
        recipe: Recipe,
        make_model: Callable[[], nn.Module],
        batches: Iterator[Batch],
        *,
        cast_weights: bool = False,
    ) -> None:
        """Make all that a step needs, of training or of a forward pass over the same inputs."""
        if mode == "train":
            self.train(context, recipe, make_model, batches)
            return
        self.load(context, make_model, cast_weights=cast_weights)
        forward = compile_model(self.model, context, wanted=recipe.compile)
        self.answer_by(lambda: forward(next(batches)[0]))

    def load(
        self, context: Context, make_model: Callable[[], nn.Module], *, cast_weights: bool
    ) -> None:
        """Make the model, which learns nothing; from the seed, so the same on all ranks."""
        import torch

        torch.manual_seed(context.seed)
        with context.device:
            self.model = make_model().eval().requires_grad_(False)
        if cast_weights:
            self.model.to(compute_dtype(context))
        self._context = context
        self._is_cast = cast_weights
        self.items_per_step = context.batch_size

    def answer_by(self, forward: Callable[[], object]) -> None:
        """Let a step be this forward pass; what setting up took and left, a graph could not use."""
        import torch

        self._answer = forward
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self) -> None:
        """Train once, or run forward once."""
        if self._answer is None:
            super().step()
            return
        with self.answering():
            self._answer()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Enter what a forward pass runs in: no gradients, and autocast where weights are fp32."""
        import torch

        autocast = nullcontext() if self._is_cast else self._context.autocast()
        with torch.inference_mode(), autocast:
            yield


def compute_dtype(context: Context) -> torch.dtype:
    """Return the type that matrix products read: half for fp16 and bf16, else float32."""
    import torch

    name = "float32" if context.device.type == "meta" else _HALVES.get(context.precision, "float32")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def output_error(found: Tensor, exact: Tensor) -> float:
    """Return how far an output is from that of fp32, over the largest there."""
    return float((found - exact).abs().max() / exact.abs().max())
