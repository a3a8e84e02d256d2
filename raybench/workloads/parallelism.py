"""How ranks divide a language model, and how its layers multiply in float8.

A model is divided by torch's tensor parallelism and its FSDP2, and its tokens by context
parallelism: each rank gathers the keys and values of all, as Llama 3 was trained (Grattafiori et
al. 2024, 3.3.2), by torch's functional collectives. Torch's own `context_parallel` takes the place
of attention for kernels of CUDA alone (torch 2.11, 2.13), so what it computes could not be held on
CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from raybench.errors import UsageError
from raybench.workloads.base import Context, DdpOptions
from raybench.workloads.language_models import Block, LanguageModel
from raybench.workloads.shapes import Layout
from raybench.workloads.training import compile_blocks, compute_dtype

# Torch keeps what it found out of a mesh in caches by its ranks and names, with its groups. Those
# of another point have been taken down: each mesh has names of its own.
_MESHES = count()


def convert_linear_layers(model: nn.Module, device: torch.device, *, emulate: bool = False) -> None:
    """Let all linear layers of the model multiply in float8, by torchao; in place.

    As torchtitan trains: inputs, weights and gradients are scaled by the largest number of each
    tensor (torchao's recipe `tensorwise`), and the products are in bf16. Nothing on the meta
    device. emulate: multiply in fp32 numbers that are rounded to float8, on any device. Raises
    UsageError where the device has no products in float8, and where torchao cannot be imported.
    """
    if device.type == "meta":
        return
    if not emulate:
        on_gpu = device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
        # Ada, Hopper and later ones: their tensor cores have products in 8 bits.
        if (major, minor) < (8, 9):
            name = f"{torch.cuda.get_device_name(device)} of {major}.{minor}" if on_gpu else "a CPU"
            raise UsageError(
                "precision float8 needs a CUDA device of compute capability 8.9 or later, given "
                f"{name}; take bf16"
            )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(f"precision float8: torchao cannot be imported: {error}") from error

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate))


def divide(
    model: LanguageModel,
    context: Context,
    layout: Layout,
    options: Mapping[str, Any],
    *,
    compiles: bool,
) -> nn.Module:
    """Divide the model over all ranks, in place, or wrap it by DDP; return the module to call.

    By tensor parallelism, context parallelism and FSDP2, as the degrees of `layout` say. All ranks
    must call it together. options: all of LayoutOptions. compiles: compile each block.
    """
    device = context.device
    if not layout.is_divided:
        if compiles:
            compile_blocks(model, Block)
        return context.ddp(model, **{name: options[name] for name in DdpOptions.__annotations__})
    # The type that gathered weights are cast to; gradients are then reduced in fp32.
    gathered_dtype = None
    if context.precision.dtype != "float32" and options["optimizer_dtype"] != "bf16":
        gathered_dtype = compute_dtype(context)
    mesh, (replicate, shard, tensor) = _make_mesh(
        device, replicate=layout.dp_replicate, shard=layout.ranks_per_copy, tensor=layout.tp
    )
    if layout.tp > 1:
        _divide_products(model, mesh[tensor])
        if compiles:
            # In torch 2.13 compiled code fails in its backward pass where its input is a collective
            # that nobody has waited for: a copy is none.
            model.tokens.register_forward_hook(lambda _module, _inputs, output: output.clone())
    if layout.cp > 1:
        _divide_sequences(model, layout, device)
    # Before they are sharded: gathering is not part of the compiled code.
    if compiles:
        compile_blocks(model, Block)
    if layout.dp_replicate * layout.ranks_per_copy == 1 and gathered_dtype is None:
        return model
    policy = MixedPrecisionPolicy(
        param_dtype=gathered_dtype,
        reduce_dtype=None if gathered_dtype is None else torch.float32,
        # A model's inputs are tokens; positions stay in fp32.
        cast_forward_inputs=False,
    )
    data = mesh[replicate, shard] if layout.dp_replicate > 1 else mesh[shard]
    reshard = bool(options["reshard_after_forward"])
    how: dict[str, Any] = {"mesh": data, "mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **how)
    if model.output.weight is not model.tokens.weight:
        fully_shard(model.tokens, reshard_after_forward=reshard, **how)
        # The backward pass begins with these, so they stay.
        fully_shard([model.norm, model.output], reshard_after_forward=False, **how)
    fully_shard(model, reshard_after_forward=False, **how)
    return model


def sequence_part(layout: Layout, rank: int) -> Callable[[Tensor], Tensor]:
    """Return a function of tokens (batch, seq_len) that gives those whose logits the rank has."""
    cp_place, tp_place = layout.cp_place(rank), rank % layout.tp

    def part(tokens: Tensor) -> Tensor:
        own = take_part(tokens, 1, layout.cp, cp_place)
        return own.chunk(layout.tp, dim=1)[tp_place]

    return part


def _divide_sequences(model: LanguageModel, layout: Layout, device: torch.device) -> None:
    """Let the model take whole inputs, and compute this rank's tokens of them: context parallelism.

    In place. All ranks must call it together.
    """
    mesh, (_, own, _) = _make_mesh(
        device, batch=layout.dp_replicate * layout.dp_shard, context=layout.cp, tensor=layout.tp
    )
    place = layout.cp_place(mesh.get_rank())
    for name in ("cosines", "sines"):
        part = take_part(model.get_buffer(name), 0, layout.cp, place)
        model.register_buffer(name, part, persistent=False)
    model.register_forward_pre_hook(
        lambda _, inputs: (take_part(inputs[0], 1, layout.cp, place), *inputs[1:])
    )
    # From Ampere on, unless the job asks for another kernel.
    has_flash = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    attention = ContextParallel(
        degree=layout.cp,
        place=place,
        group=mesh[own].get_group(),
        takes_flash=has_flash and bool(torch.backends.cuda.flash_sdp_enabled()),  # type: ignore[no-untyped-call]
    )
    blocks: Any = model.blocks
    for block in blocks:
        block.attention.attend = attention.attend


def _make_mesh(device: torch.device, **degrees: int) -> tuple[DeviceMesh, tuple[str, ...]]:
    """Return a mesh of all ranks with these dimensions, and their new names in the same order.

    All ranks must call it together.
    """
    # The default group knows no device, so groups are made anew; they are not split off, which
    # crashes after a second init_process_group (pytorch#192109).
    number = next(_MESHES)
    names = tuple(f"{name}_{number}" for name in degrees)
    sizes = tuple(degrees.values())
    return init_device_mesh(device.type, sizes, mesh_dim_names=names), names


def _divide_products(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Divide each matrix product over the ranks, and between products the sequence, in place.

    As torchtitan and torch's tutorial on tensor parallelism divide Llama. Each rank gets whole
    logits of its part of the sequence, as local tensors.
    """
    is_tied, sequence = model.output.weight is model.tokens.weight, Shard(1)
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=sequence, output_layouts=sequence),
        },
    )
    if is_tied:
        # Both are divided by the vocabulary.
        model.output.weight = model.tokens.weight
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                # Gathered along the sequence; rotation and cache are as they are.
                "attention": PrepareModuleInput(
                    input_layouts=(sequence, None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.output": RowwiseParallel(output_layouts=sequence),
                "mlp_norm": SequenceParallel(),
                "mlp": PrepareModuleInput(
                    input_layouts=(sequence,), desired_input_layouts=(Replicate(),)
                ),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=sequence),
            },
        )


def take_part(whole: Tensor, dim: int, degree: int, place: int) -> Tensor:
    """Return the tokens of the rank at `place` of `degree` ranks that share `whole` along `dim`.

    The tokens are cut into 2 x degree chunks; a rank gets the chunk at `place` and the one as far
    from the end. So all ranks have the same work: in causal attention late tokens see more.
    """
    if degree == 1:
        return whole
    chunks = whole.chunk(2 * degree, dim=dim)
    return torch.cat([chunks[place], chunks[-1 - place]], dim=dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """Context parallelism on one rank: each rank of a group has a part of every sequence.

    degree: number of ranks of the group. place: index of this rank in it. takes_flash: use
    FlashAttention for fp16 and bf16.
    """

    degree: int
    place: int
    group: ProcessGroup
    takes_flash: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention of this rank's queries over the keys and values of all ranks.

        query, output: (batch, heads, own tokens, head); key, value: the same, of fewer heads. All
        ranks of the group must call it together.
        """
        keys, values = self._gather(key), self._gather(value)
        shared = query.shape[1] // key.shape[1]
        early, late = query.chunk(2, dim=2)
        parts: list[Tensor] = []
        for chunk, number in ((early, self.place), (late, 2 * self.degree - 1 - self.place)):
            length = chunk.shape[2]
            end = (number + 1) * length
            key = keys[:, :, :end].repeat_interleave(shared, dim=1)
            value = values[:, :, :end].repeat_interleave(shared, dim=1)
            # The last query sees all keys, the one before it one less: as torch's
            # `causal_lower_right`, an object that torch.compile cannot make: it would leave the
            # block as it is.
            if self.takes_flash and chunk.dtype in (torch.float16, torch.bfloat16):
                flash = torch.ops.aten._scaled_dot_product_flash_attention
                parts.append(flash(chunk, key, value, dropout_p=0.0, is_causal=True)[0])
                continue
            seen = torch.ones(length, end, dtype=torch.bool, device=chunk.device)
            mask = seen.tril(diagonal=end - length)
            parts.append(functional.scaled_dot_product_attention(chunk, key, value, attn_mask=mask))
        return torch.cat(parts, dim=2)

    def _gather(self, own: Tensor) -> Tensor:
        """Return (batch, heads, tokens, head) of all ranks, in the order of the sequence."""
        gathered: Any = collectives.all_gather_tensor_autograd(
            own.contiguous(), gather_dim=2, group=self.group
        )
        chunks = gathered.chunk(2 * self.degree, dim=2)
        # Of each rank an early one and a late one.
        return torch.cat([*chunks[::2], *chunks[::-2]], dim=2)
