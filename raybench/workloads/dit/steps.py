"""The steps of the workload `dit`: a block, a forward pass, or a loop of them, on random inputs.

And whether they compute, divided over ranks, what they compute undivided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from raybench.job.point import Precision
from raybench.workloads.attention import Kernel, KernelOrAuto, choose_kernel
from raybench.workloads.dit.model import (
    Attend,
    Conditions,
    Dit,
    DoubleBlock,
    Rotation,
    SingleBlock,
    fill,
    rotation,
)
from raybench.workloads.dit.sequence_parallel import SequenceParallel, attend_whole, form_groups
from raybench.workloads.dit.shape import DitShape
from raybench.workloads.training.model import compile_blocks

_NUMBERS = count()
_KNOWN: WeakValueDictionary[int, AttentionOperator] = WeakValueDictionary()


class AttentionOperator:
    """Calls a function of query, key and value, of one shape each as the output is, as an operator.

    torch.compile does not look into it, so that a compiled block stays one graph: sends and
    receives between ranks cannot be traced.
    An operator takes tensors and numbers only, so that the function is known by a number.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.attend = attend
        self._number = next(_NUMBERS)
        _KNOWN[self._number] = self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; all three as the function takes them, the output as it gives it."""
        out: Tensor = torch.ops.raybench.attend_over_ranks(query, key, value, self._number)
        return out


@torch.library.custom_op("raybench::attend_over_ranks", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
    return _KNOWN[number].attend(query, key, value).contiguous()


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
    return query.new_empty(query.shape)


Scope = Literal["double_block", "single_block", "forward", "loop"]

_GUIDANCE = 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one image, `rows` x `columns`, and of its text; ranks divide both."""

    rows: int
    columns: int
    text: int

    @property
    def image(self) -> int:
        """Tokens of the image."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Device, type and seed of the random inputs and weights, the same on each rank."""

    device: torch.device
    dtype: torch.dtype
    seed: int

    def generator(self) -> torch.Generator | None:
        """Make a generator; None on the meta device, which has no numbers."""
        if self.device.type == "meta":
            return None
        return torch.Generator(self.device).manual_seed(self.seed)

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def draw(self, generator: torch.Generator | None, *shape: int) -> Tensor:
        """Return a tensor of normal random numbers."""
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Builds the step of a scope over the ranks of `parallel`. fill: draws a module's weights."""

    shape: DitShape
    tokens: Tokens
    numbers: Numbers
    attention: KernelOrAuto
    parallel: SequenceParallel
    compile: bool = False
    fill: Callable[[nn.Module, torch.Generator | None], None] = fill

    def make(self, scope: Scope, steps: int) -> Callable[[], Tensor]:
        """Return the step of a scope, which returns its output; of a block, this rank's tokens."""
        if scope == "forward":
            return self.forward()
        return self.loop(steps) if scope == "loop" else self.block(scope)

    def block(self, scope: Literal["double_block", "single_block"]) -> Callable[[], Tensor]:
        """Return a step that runs one block on hidden tokens."""
        kind = DoubleBlock if scope == "double_block" else SingleBlock
        generator = self.numbers.generator()
        block = self._make_module(lambda: kind(self.shape, self._attend()), generator)
        width = self.shape.width
        text = self.parallel.shard(self.numbers.draw(generator, self.tokens.text, width))
        image = self.parallel.shard(self.numbers.draw(generator, self.tokens.image, width))
        time = self.numbers.draw(generator, 1, self.shape.width)
        turned = self._rotation()
        if scope == "double_block":
            return lambda: torch.cat(block(text, image, time, *turned))
        joint = torch.cat((text, image))
        return lambda: block(joint, time, *turned)

    def forward(self) -> Callable[[], Tensor]:
        """Return one forward pass of the model; all ranks get the whole image."""
        predict, image = self._predictor()
        time = torch.ones(1, 1, device=image.device, dtype=image.dtype)
        return lambda: predict(image, time)

    def loop(self, steps: int) -> Callable[[], Tensor]:
        """Return a loop of so many Euler steps of the model, from noise to an image."""
        predict, noise = self._predictor()
        times = torch.linspace(1, 0, steps + 1, device=noise.device, dtype=torch.float32)
        times = times[:-1].to(noise.dtype).view(steps, 1, 1)

        def denoise() -> Tensor:
            image = noise
            for time in times:
                image = image - predict(image, time) / steps
            return image

        return denoise

    def _predictor(self) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
        """Return a function of image and time that predicts velocities, and an image of noise."""
        generator = self.numbers.generator()
        model = self._make_module(lambda: Dit(self.shape, self._attend()), generator)
        noise = self.numbers.draw(generator, self.tokens.image, self.shape.channels)
        text = self.numbers.draw(generator, self.tokens.text, self.shape.text_width)
        conditions = Conditions(
            text=self.parallel.shard(text),
            pooled=self.numbers.draw(generator, 1, self.shape.pooled_width),
            guidance=torch.full((1, 1), _GUIDANCE, device=noise.device, dtype=noise.dtype),
        )
        turned = self._rotation()

        def predict(image: Tensor, time: Tensor) -> Tensor:
            own = model(self.parallel.shard(image), time, conditions, turned)
            return self.parallel.gather(own)

        return predict, noise

    def _make_module(
        self, make: Callable[[], nn.Module], generator: torch.Generator | None
    ) -> nn.Module:
        """Make a module whose weights are drawn where they stay, in the type that they keep."""
        with torch.device("meta"):
            module = make().to(self.numbers.dtype)
        module = module.to_empty(device=self.numbers.device).requires_grad_(False)
        self.fill(module, generator)
        if self.compile:
            compile_blocks(module, DoubleBlock, SingleBlock)
        return module

    @property
    def kernel(self) -> Kernel:
        """The kernel of attention, as it is chosen for this rank's share of the heads."""
        heads = self.shape.heads // self.parallel.heads_divided_by
        tokens = self.numbers.empty(1, heads, self.tokens.image, self.shape.head_width)
        return choose_kernel(self.attention, tokens)

    def _attend(self) -> Attend:
        """Return the attention of query, key and value over the tokens of all ranks."""
        kernel = self.kernel
        if self.parallel.degree == 1:
            return partial(attend_whole, kernel)
        joint = partial(self.parallel.attend, kernel)
        return AttentionOperator(joint) if self.compile else joint

    def _rotation(self) -> Rotation:
        whole = rotation(
            self.shape,
            text_tokens=self.tokens.text,
            rows=self.tokens.rows,
            columns=self.tokens.columns,
            like=self.numbers.empty(0),
        )
        length = self.tokens.text
        return Rotation(
            *(
                torch.cat(
                    (self.parallel.shard(places[:length]), self.parallel.shard(places[length:]))
                )
                for places in whole
            )
        )


# Tokens of the copy for each rank: of the image, and of the text.
_ROWS, _COLUMNS, _TEXT = 2, 8, 8
# Of queries and keys: a token attends to few others. With all alike attention is next to the mean
# of all tokens, and a wrong one could not be told from a right one.
_NORM = 2.0
_GAIN = 1.5
# Of what the copy computes. Two ranks on a CPU differ from the whole by 3e-7 (fp32) and 5e-3
# (bf16); a log-sum-exp to base 2 is off by 3e-2, parts merged by their mean by 0.16, the heads of
# another rank by 0.8.
TOLERANCES = {
    Precision.FP32: 1e-4,
    Precision.TF32: 1e-2,
    Precision.FP16: 1e-2,
    Precision.BF16: 2e-2,
}


def difference_to_whole(steps: Steps) -> float:
    """Compare the output of a copy of one block of each kind with that of the undivided copy.

    In the type, with the kernel and over the ranks of `steps`; as a share of the whole (Frobenius
    norms). 0 where nothing is divided. All ranks must call it at the same place.
    """
    ranks = steps.parallel.degree
    if ranks == 1:
        return 0.0
    copy = replace(
        steps,
        shape=replace(steps.shape, double_blocks=1, single_blocks=1),
        tokens=Tokens(rows=_ROWS * ranks, columns=_COLUMNS, text=_TEXT * ranks),
        attention=steps.kernel,
        compile=False,
        fill=_fill_steeply,
    )
    undivided = replace(copy, parallel=form_groups(0, ulysses=1, ring=1))
    with torch.inference_mode():
        found, whole = (one.forward()().double() for one in (copy, undivided))
        return float((found - whole).norm() / whole.norm())


def is_finite(output: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    return bool(output.isfinite().all())


def _fill_steeply(module: nn.Module, generator: torch.Generator | None) -> None:
    """Draw weights with which attention matters for the output, and single tokens for attention."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            nn.init.constant_(parameter, _NORM)
        else:
            std = _GAIN / math.sqrt(parameter.shape[-1])
            nn.init.normal_(parameter, std=std, generator=generator)
