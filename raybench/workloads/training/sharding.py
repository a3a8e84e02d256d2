"""Divide a language model over ranks: by torch's tensor parallelism and its FSDP2, and its tokens.

In context parallelism each rank gathers the keys and values of all, as Llama 3 was trained
(Grattafiori et al. 2024, 3.3.2), by torch's functional collectives. Torch's own `context_parallel`
takes the place of attention for kernels of CUDA alone (torch 2.11, 2.13), so what it computes could
not be held on CPUs.
A model has `tokens`, `blocks`, `norm` and, unless it is the table of tokens, `output`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from raybench.workloads.training.layout import Layout
from raybench.workloads.training.model import compile_blocks

# Torch keeps what it found out of a mesh in caches by its ranks and names, with its groups. Those
# of another point have been taken down: each mesh has names of its own.
_MESHES = count()
_SEQUENCE = Shard(1)


def divide(
    model: nn.Module,
    layout: Layout,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool,
    compiled: Sequence[type[nn.Module]] = (),
) -> nn.Module:
    """Divide the model over all ranks, in place, and return it. All ranks must call it together.

    compute_dtype: the type that gathered weights are cast to; gradients are then reduced in fp32.
    None: both keep the type of the stored weights. compiled: classes of modules to compile.
    """
    degrees = (layout.dp_replicate, layout.ranks_per_copy, layout.tp)
    mesh = _make_mesh(device, replicate=degrees[0], shard=degrees[1], tensor=degrees[2])
    replicate, shard, tensor = cast("tuple[str, ...]", mesh.mesh_dim_names)
    if layout.tp > 1:
        _divide_products(model, mesh[tensor])
        if compiled:
            # In torch 2.13 compiled code fails in its backward pass where its input is a collective
            # that nobody has waited for: a copy is none.
            embedding = cast("nn.Module", model.tokens)
            embedding.register_forward_hook(lambda _module, _inputs, output: output.clone())
    if layout.cp > 1:
        _divide_sequences(model, layout, device)
    # Before they are sharded: gathering is not part of the compiled code.
    compile_blocks(model, *compiled)
    if layout.dp_replicate * layout.ranks_per_copy == 1 and compute_dtype is None:
        return model
    data = mesh[replicate, shard] if layout.dp_replicate > 1 else mesh[shard]
    _shard(model, data, compute_dtype, reshard_after_forward)
    return model


def sequence_part(layout: Layout, rank: int) -> Callable[[Tensor], Tensor]:
    """Return a function that cuts from tokens (batch, seq_len) those whose logits a rank has."""
    cp_place, tp_place = layout.cp_place(rank), rank % layout.tp

    def part(tokens: Tensor) -> Tensor:
        own = take_part(tokens, 1, layout.cp, cp_place)
        return own.chunk(layout.tp, dim=1)[tp_place]

    return part


def _divide_sequences(model: nn.Module, layout: Layout, device: torch.device) -> None:
    """Set up context parallelism: inputs, positions and attention of this rank's tokens alone."""
    mesh = _make_mesh(
        device,
        batch=layout.dp_replicate * layout.dp_shard,
        context=layout.cp,
        tensor=layout.tp,
    )
    own = mesh[cast("tuple[str, ...]", mesh.mesh_dim_names)[1]]
    part = ContextParallel(
        degree=layout.cp,
        place=layout.cp_place(mesh.get_rank()),
        group=own.get_group(),
        takes_flash=takes_flash(device),
    )
    for name in ("cosines", "sines"):
        model.register_buffer(name, part.part(model.get_buffer(name), 0), persistent=False)
    model.register_forward_pre_hook(lambda _, inputs: (part.part(inputs[0], 1), *inputs[1:]))
    for block in cast("nn.ModuleList", model.blocks):
        cast("Any", block).attention.attend = part.attend


def _make_mesh(device: torch.device, **degrees: int) -> DeviceMesh:
    # The default group knows no device, so groups are made anew; they are not split off, which
    # crashes after a second init_process_group (pytorch#192109).
    number = next(_MESHES)
    return init_device_mesh(
        device.type,
        tuple(degrees.values()),
        mesh_dim_names=tuple(f"{name}_{number}" for name in degrees),
    )


def _shard(
    model: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool,
) -> None:
    """Shard by FSDP2: each block by itself, the embedding, and the last norm with the output."""
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=None if compute_dtype is None else torch.float32,
        # A model's inputs are tokens; positions stay in fp32.
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for block in cast("nn.ModuleList", model.blocks):
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    output = getattr(model, "output", None)
    if output is not None and output.weight is not cast("Any", model.tokens).weight:
        fully_shard(
            cast("Any", model.tokens), reshard_after_forward=reshard_after_forward, **options
        )
        # The backward pass begins with these, so they stay.
        fully_shard([cast("Any", model.norm), output], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def _divide_products(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide each matrix product over the ranks, and between products the sequence.

    As torchtitan and torch's tutorial on tensor parallelism divide Llama. The logits come by
    sequence, whole ones of each token, and are local tensors.
    """
    is_tied = cast("Any", model.output).weight is cast("Any", model.tokens).weight
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=_SEQUENCE),
        },
    )
    if is_tied:
        # Both are divided by the vocabulary.
        cast("Any", model.output).weight = cast("Any", model.tokens).weight
    for block in cast("nn.ModuleList", model.blocks):
        parallelize_module(block, mesh, _block_plan())


def _block_plan() -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        # Rotation and cache are as they are.
        "attention": _gather_sequence(others=2),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=_SEQUENCE),
        "mlp_norm": SequenceParallel(),
        "mlp": _gather_sequence(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=_SEQUENCE),
    }


def _gather_sequence(others: int = 0) -> ParallelStyle:
    """Gather the first input along the sequence; `others` are what follow it."""
    return PrepareModuleInput(
        input_layouts=(_SEQUENCE, *(None,) * others),
        desired_input_layouts=(Replicate(), *(None,) * others),
    )


# Types that FlashAttention takes.
_HALVES = (torch.float16, torch.bfloat16)


def take_part(whole: Tensor, dim: int, degree: int, place: int) -> Tensor:
    """Return a rank's tokens of `whole`, along dimension `dim`, of which degree ranks have a part.

    The tokens are cut into 2 x degree chunks; a rank gets the chunk at `place` and the one as far
    from the end. So all ranks have the same work: in causal attention late tokens see more.
    """
    if degree == 1:
        return whole
    chunks = whole.chunk(2 * degree, dim=dim)
    return torch.cat([chunks[place], chunks[-1 - place]], dim=dim)


def takes_flash(device: torch.device) -> bool:
    """Return whether the device has FlashAttention (from Ampere on), and torch has it enabled."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """Context parallelism on one rank: each rank of a group has a part of every sequence.

    degree: ranks of the group. place: index of this one. takes_flash: FlashAttention is used.
    """

    degree: int
    place: int
    group: ProcessGroup
    takes_flash: bool

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of `whole`, along dimension `dim`."""
        return take_part(whole, dim, self.degree, self.place)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention of this rank's queries over the keys and values of all ranks.

        query, output: (batch, heads, own tokens, head); key, value: the same, of fewer heads.
        """
        keys, values = self._gather(key), self._gather(value)
        shared = query.shape[1] // key.shape[1]
        early, late = query.chunk(2, dim=2)
        parts = []
        for chunk, number in ((early, self.place), (late, 2 * self.degree - 1 - self.place)):
            seen = (number + 1) * chunk.shape[2]
            parts.append(
                self._attend_to_the_last(
                    chunk,
                    keys[:, :, :seen].repeat_interleave(shared, dim=1),
                    values[:, :, :seen].repeat_interleave(shared, dim=1),
                )
            )
        return torch.cat(parts, dim=2)

    def _attend_to_the_last(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention: the last query sees all keys, the one before it one less.

        As torch's `causal_lower_right`, an object that torch.compile cannot make: it would leave
        the block as it is.
        """
        if self.takes_flash and query.dtype in _HALVES:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            out: Tensor = flash(query, key, value, dropout_p=0.0, is_causal=True)[0]
            return out
        queries, keys = query.shape[2], key.shape[2]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        mask = seen.tril(diagonal=keys - queries)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def _gather(self, own: Tensor) -> Tensor:
        """Return (batch, heads, tokens, head) of all ranks, in the order of the sequence."""
        gathered: Any = collectives.all_gather_tensor_autograd(
            own.contiguous(), gather_dim=2, group=self.group
        )
        chunks = gathered.chunk(2 * self.degree, dim=2)
        # Of each rank an early one and a late one.
        return torch.cat([*chunks[::2], *chunks[::-2]], dim=2)
