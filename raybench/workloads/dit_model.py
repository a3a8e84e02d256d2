"""The model of the workload `dit`, the transformer of Flux.1, and its steps on random inputs.

A step runs a block, a forward pass, or a loop of passes, over the tokens of one image without a
batch dimension: tokens are (tokens, width). Values for all tokens, such as the time, are (1,
width).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from raybench.job.point import Precision
from raybench.workloads.attention import (
    Kernel,
    KernelOrAuto,
    SequenceParallel,
    attend_whole,
    choose_kernel,
    form_groups,
)
from raybench.workloads.shapes import DitShape
from raybench.workloads.training import compile_blocks

Scope = Literal["double_block", "single_block", "forward", "loop"]
# Attention: maps query, key and value, (tokens, heads, head width), to an output of this shape.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

# As in Flux.1.
_EPSILON = 1e-6
_LONGEST_PERIOD = 10_000.0


class Rotation(NamedTuple):
    """Rotary positions: cosine and sine of each pair of numbers, (tokens, 1, head width / 2)."""

    cosine: Tensor
    sine: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """Return `heads`, (tokens, heads, head width), rotated in fp32 or wider."""
        first, second = torch.unflatten(heads.to(self.cosine.dtype), -1, (-1, 2)).unbind(-1)
        rotated = torch.stack(
            (first * self.cosine - second * self.sine, first * self.sine + second * self.cosine),
            dim=-1,
        )
        return rotated.flatten(-2).to(heads.dtype)


class _HeadSplitter(nn.Module):
    """Splits query, key and value into heads; normalises each head of query and key."""

    def __init__(self, shape: DitShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.query_norm = nn.RMSNorm(shape.head_width, eps=_EPSILON)
        self.key_norm = nn.RMSNorm(shape.head_width, eps=_EPSILON)

    def forward(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each (tokens, heads, head width), from (tokens, 3 width)."""
        query, key, value = torch.unflatten(joint, -1, (3, self._heads, -1)).unbind(1)
        return self.query_norm(query), self.key_norm(key), value


class _Stream(nn.Module):
    """The half of a double block for the text, or for the image."""

    def __init__(self, shape: DitShape) -> None:
        super().__init__()
        width = shape.width
        self.modulation = nn.Linear(width, 6 * width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.heads = _HeadSplitter(shape)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def begin(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each (tokens, heads, head width), from x (tokens, width)."""
        heads: tuple[Tensor, Tensor, Tensor]
        heads = self.heads(self.attention_in(_modulate(x, shift, scale)))
        return heads

    def end(self, x: Tensor, mixed: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        """Return x plus gated attention, then plus a gated MLP, (tokens, width).

        Args:
            x: (tokens, width).
            mixed: output of attention, (tokens, heads, head width).
            modulation: gate of attention; shift, scale and gate of the MLP.
        """
        attention_gate, shift, scale, mlp_gate = modulation
        x = x + attention_gate * self.attention_out(mixed.flatten(1))
        hidden = functional.gelu(self.mlp_in(_modulate(x, shift, scale)), approximate="tanh")
        out: Tensor = x + mlp_gate * self.mlp_out(hidden)
        return out


class DoubleBlock(nn.Module):
    """Text and image with separate weights, and attention over both."""

    def __init__(self, shape: DitShape, attend: Attend) -> None:
        super().__init__()
        self._attend = attend
        self.text = _Stream(shape)
        self.image = _Stream(shape)

    def forward(
        self, text: Tensor, image: Tensor, time: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return text and image tokens after the block, both (tokens, width).

        Args:
            text: (text tokens, width).
            image: (image tokens, width).
            time: embedding of time, guidance and pooled text, (1, width).
            cosine: cosines of Rotation, for text and then image.
            sine: sines of Rotation.
        """
        active, rotation = functional.silu(time), Rotation(cosine, sine)
        # Shift, scale and gate of attention, then shift, scale and gate of the MLP.
        text_modulation = self.text.modulation(active).chunk(6, dim=-1)
        image_modulation = self.image.modulation(active).chunk(6, dim=-1)
        text_heads = self.text.begin(text, *text_modulation[:2])
        image_heads = self.image.begin(image, *image_modulation[:2])
        query, key, value = (torch.cat(pair) for pair in zip(text_heads, image_heads, strict=True))
        mixed = self._attend(rotation(query), rotation(key), value)
        text_mixed, image_mixed = mixed[: text.shape[0]], mixed[text.shape[0] :]
        return (
            self.text.end(text, text_mixed, text_modulation[2:]),
            self.image.end(image, image_mixed, image_modulation[2:]),
        )


class SingleBlock(nn.Module):
    """Text and image as one sequence, with attention and MLP in parallel."""

    def __init__(self, shape: DitShape, attend: Attend) -> None:
        super().__init__()
        width = shape.width
        mlp_width = 4 * width
        # Query, key and value side by side.
        self._attend, self._qkv_width = attend, 3 * width
        # Shift, scale and gate.
        self.modulation = nn.Linear(width, 3 * width)
        self.joint_in = nn.Linear(width, self._qkv_width + mlp_width)
        self.heads = _HeadSplitter(shape)
        # From the output of attention and the hidden layer of the MLP.
        self.joint_out = nn.Linear(width + mlp_width, width)

    def forward(self, x: Tensor, time: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the tokens after the block, (tokens, width).

        Args:
            x: text tokens, then image tokens, (tokens, width).
            time: embedding of time, guidance and pooled text, (1, width).
            cosine: cosines of Rotation, for text and then image.
            sine: sines of Rotation.
        """
        shift, scale, gate = self.modulation(functional.silu(time)).chunk(3, dim=-1)
        joint = self.joint_in(_modulate(x, shift, scale))
        qkv, hidden = joint[:, : self._qkv_width], joint[:, self._qkv_width :]
        query, key, value = self.heads(qkv)
        rotation = Rotation(cosine, sine)
        mixed = self._attend(rotation(query), rotation(key), value).flatten(1)
        activated = functional.gelu(hidden, approximate="tanh")
        out: Tensor = x + gate * self.joint_out(torch.cat((mixed, activated), dim=-1))
        return out


class DitModel(nn.Module):
    """Maps the tokens of a noisy image to their velocities, both (image tokens, channels)."""

    def __init__(self, shape: DitShape, attend: Attend) -> None:
        super().__init__()
        width = shape.width
        self._frequencies = shape.frequencies
        self.image_in = nn.Linear(shape.channels, width)
        self.text_in = nn.Linear(shape.text_width, width)
        self.time_in = _embedder(shape.frequencies, width)
        self.guidance_in = _embedder(shape.frequencies, width)
        self.pooled_in = _embedder(shape.pooled_width, width)
        self.double_blocks = nn.ModuleList(
            DoubleBlock(shape, attend) for _ in range(shape.double_blocks)
        )
        self.single_blocks = nn.ModuleList(
            SingleBlock(shape, attend) for _ in range(shape.single_blocks)
        )
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, shape.channels)

    def forward(
        self,
        image: Tensor,
        time: Tensor,
        text: Tensor,
        pooled: Tensor,
        guidance: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        """Return the velocity of each image token, (image tokens, channels).

        If ranks divide the tokens, image, text and rotation have only this rank's tokens.

        Args:
            image: noisy image, (image tokens, channels).
            time: (1, 1), from 1 (noise) to 0.
            text: (text tokens, text width).
            pooled: embedding of the whole text, (1, pooled width).
            guidance: scale of the guidance, (1, 1).
            rotation: rotation of the text tokens, then of the image tokens.
        """
        embedded: Tensor = (
            self.time_in(_sinusoids(time, self._frequencies))
            + self.guidance_in(_sinusoids(guidance, self._frequencies))
            + self.pooled_in(pooled)
        )
        x, text = self.image_in(image), self.text_in(text)
        for block in self.double_blocks:
            text, x = block(text, x, embedded, *rotation)
        x = torch.cat((text, x))
        for block in self.single_blocks:
            x = block(x, embedded, *rotation)
        scale, shift = self.modulation(functional.silu(embedded)).chunk(2, dim=-1)
        velocity: Tensor = self.out(_modulate(x[text.shape[0] :], shift, scale))
        return velocity


def _sinusoids(time: Tensor, count: int) -> Tensor:
    """Return (1, count) cosines, then sines, of 1000 x `time` (1, 1) with growing periods."""
    wide = torch.promote_types(time.dtype, torch.float32)
    indices = torch.arange(count // 2, dtype=wide, device=time.device)
    rates = torch.exp(-math.log(_LONGEST_PERIOD) * indices / (count // 2))
    # Flux scales time and guidance by 1000.
    angles = 1000.0 * time.to(wide) * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(time.dtype)


def rotation(
    shape: DitShape, *, text_tokens: int, rows: int, columns: int, like: Tensor
) -> Rotation:
    """Return the rotation of text tokens, all at the origin, then of image tokens, row by row.

    Args:
        like: the result is on this tensor's device, in fp64 if the tensor is fp64, else in fp32.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    # Position of each token along three axes. All tokens are at 0 of the first axis.
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
    positions = torch.cat((torch.zeros(text_tokens, 3, dtype=grid.dtype), grid)).double()
    angles_by_axis = []
    for axis, size in enumerate(shape.axes):
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles_by_axis.append(positions[:, axis : axis + 1] * _LONGEST_PERIOD**-exponents)
    angles = torch.cat(angles_by_axis, dim=-1).unsqueeze(1)
    return Rotation(angles.cos().to(like.device, wide), angles.sin().to(like.device, wide))


def _embedder(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x normalised, then scaled and shifted (AdaLN, Peebles and Xie 2022)."""
    return functional.layer_norm(x, x.shape[-1:], eps=_EPSILON) * (1 + scale) + shift


_NUMBERS = count()
_OPERATORS: WeakValueDictionary[int, AttentionOperator] = WeakValueDictionary()


class AttentionOperator:
    """Wraps attention over ranks as an operator, so that a compiled block stays one graph.

    torch.compile cannot trace sends and receives between ranks. An operator takes only tensors and
    numbers, so a number identifies the function.
    """

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self._number = next(_NUMBERS)
        _OPERATORS[self._number] = self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention's output; all tensors are (tokens, heads, head width)."""
        out: Tensor = torch.ops.raybench.attend_over_ranks(query, key, value, self._number)
        return out


@torch.library.custom_op("raybench::attend_over_ranks", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
    """Return the contiguous result of the function with this number."""
    return _OPERATORS[number].attend(query, key, value).contiguous()


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
    return query.new_empty(query.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuilder:
    """Builds a step with random inputs and weights, divided over the ranks of `parallel`."""

    shape: DitShape
    # The image has rows x columns tokens. `parallel.degree` must divide this number and
    # `text_tokens`.
    rows: int
    columns: int
    text_tokens: int
    device: torch.device
    dtype: torch.dtype
    # Equal on all ranks.
    seed: int
    attention: KernelOrAuto
    parallel: SequenceParallel
    compile: bool = False
    # Value of the parameters of norms.
    norm_weight: float = 1.0
    # The standard deviation of other parameters is weight_gain / sqrt(inputs of the layer), or 0.02
    # if weight_gain is 0.
    weight_gain: float = 0.0

    def make(self, scope: Scope, steps: int) -> Callable[[], Tensor]:
        """Return a function that does one step of a scope and returns its output. Collective.

        The output is this rank's tokens after a block, text first; the velocity of the whole image
        after a forward pass; or the whole image after `steps` Euler steps from noise.
        """
        shape, parallel, image_tokens = self.shape, self.parallel, self.rows * self.columns
        generator = None  # the meta device has no random numbers
        if self.device.type != "meta":
            generator = torch.Generator(self.device).manual_seed(self.seed)
        options: Any = {"device": self.device, "dtype": self.dtype}
        draw = partial(torch.randn, generator=generator, **options)
        whole_rotation = rotation(
            shape,
            text_tokens=self.text_tokens,
            rows=self.rows,
            columns=self.columns,
            like=torch.empty(0, **options),
        )
        # The cosines and sines of this rank's tokens, text first.
        local_tables = []
        for table in (whole_rotation.cosine, whole_rotation.sine):
            of_text, of_image = table[: self.text_tokens], table[self.text_tokens :]
            local_tables.append(torch.cat((parallel.shard(of_text), parallel.shard(of_image))))
        local_rotation = Rotation(*local_tables)

        if scope in ("double_block", "single_block"):
            block_class = DoubleBlock if scope == "double_block" else SingleBlock
            block = self._make_module(block_class, generator)
            text = parallel.shard(draw(self.text_tokens, shape.width))
            image = parallel.shard(draw(image_tokens, shape.width))
            time = draw(1, shape.width)
            if scope == "double_block":
                return lambda: torch.cat(block(text, image, time, *local_rotation))
            joint = torch.cat((text, image))
            return lambda: block(joint, time, *local_rotation)

        model = self._make_module(DitModel, generator)
        noise = draw(image_tokens, shape.channels)
        text = parallel.shard(draw(self.text_tokens, shape.text_width))
        pooled = draw(1, shape.pooled_width)
        guidance = torch.full((1, 1), 3.5, **options)  # the usual scale of Flux.1-dev

        def predict_velocity(image: Tensor, time: Tensor) -> Tensor:
            velocity = model(parallel.shard(image), time, text, pooled, guidance, local_rotation)
            return parallel.gather(velocity)

        if scope == "forward":
            time = torch.ones(1, 1, **options)
            return lambda: predict_velocity(noise, time)
        times = torch.linspace(1, 0, steps + 1, device=self.device, dtype=torch.float32)
        times = times[:-1].to(self.dtype).view(steps, 1, 1)

        def denoise() -> Tensor:
            image = noise
            for time in times:
                image = image - predict_velocity(image, time) / steps
            return image

        return denoise

    @property
    def _kernel(self) -> Kernel:
        """The attention kernel of the setting; for auto torch's choice for this rank's heads."""
        heads = self.shape.heads // self.parallel.ulysses
        shape = (1, heads, self.rows * self.columns, self.shape.head_width)
        tokens = torch.empty(shape, device=self.device, dtype=self.dtype)
        return choose_kernel(self.attention, tokens)

    def _make_module(
        self,
        module_class: Callable[[DitShape, Attend], nn.Module],
        generator: torch.Generator | None,
    ) -> nn.Module:
        """Return a module with random weights and attention over the tokens of all ranks."""
        attend: Attend = partial(attend_whole, self._kernel)
        if self.parallel.degree > 1:
            attend = partial(self.parallel.attend, self._kernel)
            attend = AttentionOperator(attend) if self.compile else attend
        # Allocate the weights on their device and in their type, so that no copies need memory.
        with torch.device("meta"):
            module = module_class(self.shape, attend).to(self.dtype)
        module = module.to_empty(device=self.device).requires_grad_(False)
        for name, parameter in module.named_parameters():
            if "norm" in name:
                nn.init.constant_(parameter, self.norm_weight)
                continue
            std = 0.02
            if self.weight_gain:
                std = self.weight_gain / math.sqrt(parameter.shape[-1])
            nn.init.normal_(parameter, std=std, generator=generator)
        if self.compile:
            compile_blocks(module, DoubleBlock, SingleBlock)
        return module


# Limits for `difference_to_whole`. Two ranks on a CPU differ by 3e-7 (fp32) and 5e-3 (bf16).
# Mistakes cause larger errors: a log-sum-exp to base 2 3e-2, partial outputs merged by their mean
# 0.16, the heads of another rank 0.8.
TOLERANCES = {
    Precision.FP32: 1e-4,
    Precision.TF32: 1e-2,
    Precision.FP16: 1e-2,
    Precision.BF16: 2e-2,
}


def difference_to_whole(builder: StepBuilder) -> float:
    """Return the relative error of a small model that the ranks divide. Collective.

    The model has one block of each kind, with width, type and kernel of `builder`. The error is
    |divided - whole| / |whole| in Frobenius norms; 0 for one rank.
    """
    ranks = builder.parallel.degree
    if ranks == 1:
        return 0.0
    small_builder = replace(
        builder,
        shape=replace(builder.shape, double_blocks=1, single_blocks=1),
        rows=2 * ranks,
        columns=8,
        text_tokens=8 * ranks,
        attention=builder._kernel,
        compile=False,
        # Large norms of queries and keys make a token attend to few other tokens. Otherwise the
        # output of attention is close to the mean of all tokens, which would hide errors. Large
        # weights make attention matter for the output.
        norm_weight=2.0,
        weight_gain=1.5,
    )
    undivided_builder = replace(small_builder, parallel=form_groups(0, ulysses=1, ring=1))
    with torch.inference_mode():
        divided = small_builder.make("forward", 1)().double()
        whole = undivided_builder.make("forward", 1)().double()
        return float((divided - whole).norm() / whole.norm())
