"""The decoder-only models of the workload `transformer`, and how ranks divide them.

FSDP2 divides a model; a Llama is also divided by tensor parallelism, and its tokens by context
parallelism: each rank gathers the keys and values of all ranks, as Llama 3 was trained (Grattafiori
et al. 2024, 3.3.2). torch's `context_parallel` supports only CUDA kernels (torch 2.11, 2.13), so
tests on CPUs could not check it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raybench.errors import UsageError
from raybench.workloads.base import Context, DdpOptions
from raybench.workloads.shapes import Checkpointing, DecoderShape, LanguageShape, Layout, LlamaShape
from raybench.workloads.training import compile_blocks, compute_dtype

# The type of `Context.region`.
Region: TypeAlias = Callable[[str], AbstractContextManager[None]]
# Cosines and sines by position, each (positions, head width / 2); fp32 unless the model was cast.
Rotation: TypeAlias = tuple[Tensor, Tensor]
# Attention of a query (batch, heads, length, head width) to keys and values (batch, kv heads,
# length, head width).
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

# Gives each mesh new names: torch caches the groups of a mesh by its ranks and names, and the
# groups of earlier points have ended.
_MESHES = count()

_aten: Any = torch.ops.aten
# Operators whose outputs selective checkpointing keeps.
_ATTENTIONS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
_MATMULS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default})


@dataclass(slots=True)
class KeyValueCache:
    """A KV cache of static size, of all layers or of one layer."""

    # (layers, 2 for keys and values, batch, kv heads, max_tokens, head width); a cache of one layer
    # lacks the first dimension.
    memory: Tensor
    # Index of the next token, equal in all sequences; the owner of the cache advances it.
    position: int = 0

    @classmethod
    def make(
        cls,
        shape: LanguageShape,
        *,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> KeyValueCache:
        """Return an empty cache of all layers, for at most `max_tokens` tokens per sequence.

        Args:
            dtype: type of the model's keys.
        """
        layer_shape = (2, batch_size, shape.kv_heads, max_tokens, shape.head_width)
        return cls(torch.empty(shape.layers, *layer_shape, dtype=dtype, device=device))

    def of_layer(self, layer: int) -> KeyValueCache:
        """Return the cache of one layer, from 0, with a view of the memory."""
        return KeyValueCache(self.memory[layer], self.position)

    def extend(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of new tokens at `position`, which stays; return all so far.

        The cache must be of one layer. Several new tokens are allowed only at position 0.

        Args:
            new: (2, batch, kv heads, length, head width).

        Returns:
            Keys and values, views of the cache, each (batch, kv heads, position + length, head
                width).
        """
        length = new.shape[3]
        # Several tokens after earlier ones would need a mask.
        assert length == 1 or self.position == 0, "several tokens only begin a sequence"
        end = self.position + length
        assert end <= self.memory.shape[3], "the cache is full"  # torch would not raise
        # Copy keys and values together, because in decoding each kernel takes noticeable time.
        self.memory[:, :, :, self.position : end] = new
        keys, values = self.memory[:, :, :, :end]
        return keys, values


class LanguageModel(nn.Module):
    """A decoder-only language model, a GPT-2 or a Llama according to its shape.

    Both have pre-norm blocks and no dropout. GPT-2 has LayerNorm, learned positions, GELU, biases,
    and an output layer tied to the token embedding. Llama has RMSNorm, rotary positions, attention
    with grouped queries, SwiGLU, and no biases.
    """

    def __init__(
        self,
        shape: LanguageShape,
        *,
        seq_len: int,
        checkpointing: Checkpointing = "none",
        region: Region = lambda name: nullcontext(),
    ) -> None:
        """Make the model on torch's default device.

        Args:
            seq_len: largest number of tokens per sequence.
            checkpointing: which activations of each block are recomputed.
            region: `Context.region`.
        """
        super().__init__()
        self._region = region
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions: nn.Parameter | None = None
        if isinstance(shape, DecoderShape):
            self.positions = nn.Parameter(torch.empty(seq_len, shape.width))
            nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(
            Block(shape, checkpointing, region) for _ in range(shape.layers)
        )
        self.norm = _make_norm(shape)
        # A tied output layer gets its weight below, so do not allocate memory for the layer.
        device = "meta" if shape.is_tied else None
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False, device=device)
        # Name of the table from which a token reads only one row. The output layer reads the whole
        # table of tied embeddings.
        self.lookup_table = "positions" if shape.is_tied else "tokens.weight"
        if isinstance(shape, LlamaShape):
            # Angles by which pairs of numbers are rotated (Su et al. 2021).
            exponents = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
            positions = torch.arange(seq_len, dtype=torch.float32)
            angles = torch.outer(positions, shape.theta**-exponents)
            self.register_buffer("cosines", angles.cos(), persistent=False)
            self.register_buffer("sines", angles.sin(), persistent=False)
        # Layers whose outputs add up in residuals get smaller weights (GPT-2, Radford et al. 2019;
        # torchtitan and OLMo do so for Llama).
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                is_added = name.endswith(("attention.output", "mlp.down"))
                summands = 2 * shape.layers if is_added else 1
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(summands))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if shape.is_tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits of the next token, (batch, length, vocabulary).

        Args:
            tokens: (batch, length).
            cache: cache of all layers, which gets the tokens at `position`. length must be 1 unless
                `position` is 0. With a cache the result has only the last logits, (batch, 1,
                vocabulary).
        """
        begin, length = 0 if cache is None else cache.position, tokens.shape[1]
        new_positions = slice(begin, begin + length)
        rotation: Rotation | None = None
        with self._region("embedding"):
            x = self.tokens(tokens)
            if self.positions is None:
                cosines, sines = self.get_buffer("cosines"), self.get_buffer("sines")
                rotation = cosines[new_positions], sines[new_positions]
            else:
                # Slice only if necessary, because a slice of a parameter costs additional kernels.
                uses_all = length == len(self.positions)
                x = x + (self.positions if uses_all else self.positions[new_positions])
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, None if cache is None else cache.of_layer(layer))
        if cache is not None:
            x = x[:, -1:]
        with self._region("logits"):
            logits: Tensor = self.output(self.norm(x))
        return logits


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a norm before it and a residual."""

    def __init__(self, shape: LanguageShape, checkpointing: Checkpointing, region: Region) -> None:
        super().__init__()
        self.attention_norm = _make_norm(shape)
        self.mlp_norm = _make_norm(shape)
        self.attention: nn.Module
        self.mlp: nn.Module
        if isinstance(shape, LlamaShape):
            self.attention, self.mlp = Attention(shape), GatedMlp(shape)
        else:
            self.attention, self.mlp = JointAttention(shape), GptMlp(shape)
        self._checkpointing: Checkpointing = checkpointing
        self._region = region

    def forward(
        self, x: Tensor, rotation: Rotation | None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the tokens after the block, (batch, length, width); write into the cache.

        Args:
            x: (batch, length, width).
            rotation: rotation of the tokens; None for GPT-2.
            cache: cache of this layer; None if there are no earlier tokens.
        """
        if self._checkpointing == "none":
            return self._run(x, rotation, cache)
        # Checkpoint inside the block: compiled code then recomputes only what gradients need. A
        # block draws no random numbers, so random states need not be kept.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self._checkpointing == "selective":
            # A plain function, because torch.compile would not compile a block with an object.
            options["context_fn"] = _keep_costly_outputs
        out: Tensor = checkpoint(self._run, x, rotation, cache, **options)
        return out

    def _run(self, x: Tensor, rotation: Rotation | None, cache: KeyValueCache | None) -> Tensor:
        with self._region("attention"):
            x = x + self.attention(self.attention_norm(x), rotation, cache)
        with self._region("mlp"):
            out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def _keep_costly_outputs() -> Any:
    """Return contexts that save attention and every second matrix product, as torchtitan does."""
    # Number of products so far in the forward pass (False) and in the recomputation (True), whose
    # order is the same.
    product_counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
        is_product = operator in _MATMULS
        product_counts[context.is_recompute] += is_product
        is_odd = product_counts[context.is_recompute] % 2 == 1
        is_kept = operator in _ATTENTIONS or (is_product and is_odd)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class Attention(nn.Module):
    """Causal self-attention of Llama, in which heads / kv_heads query heads share a key head."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        query_width, key_width = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.query = nn.Linear(shape.width, query_width, bias=False)
        self.key = nn.Linear(shape.width, key_width, bias=False)
        self.value = nn.Linear(shape.width, key_width, bias=False)
        self.output = nn.Linear(query_width, shape.width, bias=False)
        # Context parallelism replaces this function.
        self.attend: Attend = _attend_causally
        self._head_width = shape.head_width

    def forward(self, x: Tensor, rotation: Rotation, cache: KeyValueCache | None = None) -> Tensor:
        """Return attention's output, (batch, length, width); write into the cache of this layer."""
        # Infer the number of heads: with tensor parallelism a rank has only some of them.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self._head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        if cache is not None:
            key, value = cache.extend(torch.stack((key, value)))
        if cache is not None and query.shape[2] == 1:
            # A single token attends to all keys; torch's causal mask would allow only the first.
            mixed = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        else:
            mixed = self.attend(query, key, value)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class JointAttention(nn.Module):
    """Causal self-attention of GPT-2: query, key and value by one matrix product."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.joint = SplitBiasLinear(shape.width, 3 * shape.width)
        self.output = SplitBiasLinear(shape.width, shape.width)

    def forward(self, x: Tensor, rotation: None, cache: KeyValueCache | None = None) -> Tensor:
        """Return attention's output, (batch, length, width); write into the cache of this layer."""
        batch, length, width = x.shape
        joint = self.joint(x).view(batch, length, 3, self._heads, width // self._heads)
        query_key_value = joint.permute(2, 0, 3, 1, 4)
        query, key, value = query_key_value
        if cache is not None:
            key, value = cache.extend(query_key_value[1:])
        # A single token attends to all keys; torch's causal mask would allow only the first.
        is_causal = cache is None or length > 1
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GatedMlp(nn.Module):
    """SwiGLU, the MLP of Llama: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, (batch, length, width)."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class GptMlp(nn.Module):
    """The MLP of GPT-2: two layers with GELU between them, the first to four times the width."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.up = SplitBiasLinear(shape.width, 4 * shape.width)
        self.down = SplitBiasLinear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, (batch, length, width)."""
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class SplitBiasLinear(nn.Linear):
    """A linear layer that adds its bias separately if code is compiled for a single row.

    Inductor turns the product of a matrix with one row into a reduction and fuses it, but not if
    the product adds a bias (torch._inductor.decomposition, `mm` and `addmm`).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., outputs) for x (..., inputs)."""
        if torch.compiler.is_compiling() and x.shape[:-1].numel() == 1 and self.bias is not None:
            return functional.linear(x, self.weight) + self.bias
        return super().forward(x)


def _make_norm(shape: LanguageShape) -> nn.Module:
    if isinstance(shape, LlamaShape):
        return nn.RMSNorm(shape.width, eps=1e-5)
    return nn.LayerNorm(shape.width)


def _attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return x with the pairs (i, i + head width / 2) of each head rotated, in the type of x."""
    cosines, sines = rotation
    first, second = x.to(torch.promote_types(x.dtype, cosines.dtype)).chunk(2, dim=-1)
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions of the batch, in fp32 or wider.

    Args:
        logits: (batch, length, vocabulary).
        targets: (batch, length), int64, ids of the next tokens; -100 is ignored.
    """
    flat_logits, device = logits.flatten(0, 1), logits.device.type
    # Autocast converts the logits itself. The meta device has no autocast.
    if device == "meta" or not torch.is_autocast_enabled(device):
        wide = torch.promote_types(flat_logits.dtype, torch.float32)
        flat_logits = flat_logits.to(wide)
    return functional.cross_entropy(flat_logits, targets.flatten())


def convert_linear_layers(model: nn.Module, device: torch.device, *, emulate: bool = False) -> None:
    """Replace linear layers inside the model by float8 layers, in place; not on meta.

    The new layers keep the parameters, but not the hooks. All widths and the number of tokens of a
    pass must be multiples of 16.

    Args:
        emulate: round numbers to float8 and multiply them in fp32, on any device.

    Raises:
        UsageError: torchao is missing, or the device cannot multiply float8.
    """
    if device.type == "meta":
        return
    if not emulate:
        on_gpu = device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
        # Ada, Hopper and later devices can multiply 8-bit floats.
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

    # torchao's default recipe is `tensorwise`: the largest number of a tensor determines its scale.
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate))


def parallelize(
    model: LanguageModel,
    context: Context,
    layout: Layout,
    options: Mapping[str, Any],
    *,
    compiles: bool,
) -> nn.Module:
    """Shard the model in place or wrap it in DDP; return the module for training. Collective.

    The module takes whole sequences and returns the logits of `sequence_part`. With cp > 1 each
    sequence must have exactly seq_len tokens. The caller must divide the mean loss by tp, use no
    autocast for a divided model, and make the optimizer after this call.

    Args:
        model: on the device, of type optimizer_dtype.
        layout: how the ranks divide the model; if `is_divided` is False, `Context.ddp` is used.
        options: all of LayoutOptions, which `why_not_trained` must accept.
        compiles: compile each block.
    """
    device = context.device
    if not layout.is_divided:
        if compiles:
            compile_blocks(model, Block)
        return context.ddp(model, **{name: options[name] for name in DdpOptions.__annotations__})
    # FSDP casts weights to this type when it gathers them; None: they already have their type.
    gathered_dtype = None
    if context.precision.dtype != "float32" and options["optimizer_dtype"] != "bf16":
        gathered_dtype = compute_dtype(context)
    mesh, (replicate_dim, shard_dim, tensor_dim) = _make_mesh(
        device, replicate=layout.dp_replicate, shard=layout.fsdp_ranks, tensor=layout.tp
    )
    if layout.tp > 1:
        _apply_tensor_parallelism(model, mesh[tensor_dim])
        if compiles:
            # Pass a copy to the blocks: in torch 2.13 the backward pass of compiled code fails if
            # its input is the result of a collective that nobody has waited for.
            model.tokens.register_forward_hook(lambda _module, _inputs, output: output.clone())
    if layout.cp > 1:
        _apply_context_parallelism(model, device, layout)
    # Compile before sharding, so that compiled code does not contain the gathering.
    if compiles:
        compile_blocks(model, Block)
    is_tensor_parallel_only = layout.dp_replicate * layout.fsdp_ranks == 1
    if is_tensor_parallel_only and gathered_dtype is None:
        return model  # FSDP has nothing to shard, reduce or cast
    # With two dimensions FSDP replicates over the first and shards over the second.
    data_mesh = mesh[replicate_dim, shard_dim] if layout.dp_replicate > 1 else mesh[shard_dim]
    _shard(model, data_mesh, gathered_dtype, reshard=bool(options["reshard_after_forward"]))
    return model


def _apply_context_parallelism(model: LanguageModel, device: torch.device, layout: Layout) -> None:
    """Make each rank of a cp group compute only its part of the tokens. Collective."""
    mesh, (_, cp_dim, _) = _make_mesh(
        device, batch=layout.dp_replicate * layout.dp_shard, context=layout.cp, tensor=layout.tp
    )
    index = layout.cp_index(mesh.get_rank())
    # The rotation of this rank's tokens.
    for name in ("cosines", "sines"):
        part = _take_part(model.get_buffer(name), 0, layout.cp, index)
        model.register_buffer(name, part, persistent=False)

    def take_local_tokens(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *other_inputs = inputs
        return (_take_part(tokens, 1, layout.cp, index), *other_inputs)

    model.register_forward_pre_hook(take_local_tokens)
    # FlashAttention needs Ampere or later, and the job may select another kernel.
    has_flash = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    attention = _ContextParallel(
        degree=layout.cp,
        index=index,
        group=mesh[cp_dim].get_group(),
        uses_flash=has_flash and bool(torch.backends.cuda.flash_sdp_enabled()),  # type: ignore[no-untyped-call]
    )
    blocks: Any = model.blocks
    for block in blocks:
        block.attention.attend = attention.attend


def _shard(
    model: LanguageModel, mesh: DeviceMesh, gathered_dtype: torch.dtype | None, *, reshard: bool
) -> None:
    """Shard the weights over the mesh by FSDP2. Collective."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes half a second

    policy = MixedPrecisionPolicy(
        param_dtype=gathered_dtype,
        reduce_dtype=None if gathered_dtype is None else torch.float32,
        # Inputs are tokens, which are integers, and positions, which must stay in fp32.
        cast_forward_inputs=False,
    )
    arguments: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **arguments)
    if model.output.weight is not model.tokens.weight:
        fully_shard(model.tokens, reshard_after_forward=reshard, **arguments)
        # The backward pass begins with these layers, so they stay gathered.
        fully_shard([model.norm, model.output], reshard_after_forward=False, **arguments)
    fully_shard(model, reshard_after_forward=False, **arguments)


def sequence_part(tokens: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the part of `tokens`, (batch, seq_len), for which a rank computes the logits.

    The result is (batch, seq_len / (cp x tp)), in the order of the logits.

    Args:
        rank: the rank among all ranks.
    """
    part = _take_part(tokens, 1, layout.cp, layout.cp_index(rank))
    # Ranks that are next to each other form a tp group.
    tp_index = rank % layout.tp
    return part.chunk(layout.tp, dim=1)[tp_index]


def _make_mesh(device: torch.device, **degrees: int) -> tuple[DeviceMesh, tuple[str, ...]]:
    """Return a mesh of all ranks with these dimensions, and their new names. Collective."""
    # The default group has no device id, so torch makes new groups for the mesh. With an id torch
    # would split groups, which crashes after a second init_process_group (pytorch#192109).
    # With old names, torch would reuse groups of earlier points, which have ended.
    number = next(_MESHES)
    names = tuple(f"{name}_{number}" for name in degrees)
    sizes = tuple(degrees.values())
    return init_device_mesh(device.type, sizes, mesh_dim_names=names), names


def _apply_tensor_parallelism(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Divide matrix products over the ranks, and the sequence between products, like torchtitan."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

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
        # Tie the layers again: both are divided along the vocabulary.
        model.output.weight = model.tokens.weight
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                # Gather along the sequence; leave rotation and cache unchanged.
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


def _take_part(whole: Tensor, dim: int, degree: int, index: int) -> Tensor:
    """Return the tokens of rank `index` if `degree` ranks divide `whole` along `dim`."""
    if degree == 1:
        return whole
    # A rank gets an early and a late chunk, so that causal attention costs the same on all ranks.
    chunks = whole.chunk(2 * degree, dim=dim)
    return torch.cat([chunks[index], chunks[-1 - index]], dim=dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ContextParallel:
    """Context parallelism on one rank: each rank of a group has a part of every sequence."""

    # Number of ranks of the group, and index of this rank.
    degree: int
    index: int
    group: ProcessGroup
    # Use FlashAttention for fp16 and bf16.
    uses_flash: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention of this rank's queries over the keys of all ranks. Collective.

        All tensors are (batch, heads, tokens of this rank, head width). Keys and values may have
        fewer heads than the queries.
        """
        keys, values = self._gather(key), self._gather(value)
        heads_per_key = query.shape[1] // key.shape[1]
        # This rank has chunk `index` of the sequence, and the chunk as far from the end.
        early, late = query.chunk(2, dim=2)
        last_chunk = 2 * self.degree - 1
        outputs: list[Tensor] = []
        for chunk, chunk_index in ((early, self.index), (late, last_chunk - self.index)):
            length = chunk.shape[2]
            end = (chunk_index + 1) * length
            # The last query of the chunk attends to all these keys.
            key = keys[:, :, :end].repeat_interleave(heads_per_key, dim=1)
            value = values[:, :, :end].repeat_interleave(heads_per_key, dim=1)
            if self.uses_flash and chunk.dtype in (torch.float16, torch.bfloat16):
                # If there are more keys than queries, this operator aligns the causal mask to the
                # last key, unlike `scaled_dot_product_attention`.
                flash = torch.ops.aten._scaled_dot_product_flash_attention
                outputs.append(flash(chunk, key, value, dropout_p=0.0, is_causal=True)[0])
                continue
            # The mask of torch's `causal_lower_right`. With that object itself, torch.compile would
            # not compile the block.
            ones = torch.ones(length, end, dtype=torch.bool, device=chunk.device)
            mask = ones.tril(diagonal=end - length)
            output = functional.scaled_dot_product_attention(chunk, key, value, attn_mask=mask)
            outputs.append(output)
        return torch.cat(outputs, dim=2)

    def _gather(self, part: Tensor) -> Tensor:
        """Return the tokens of all ranks in order, (batch, heads, tokens, head width)."""
        gathered: Any = collectives.all_gather_tensor_autograd(
            part.contiguous(), gather_dim=2, group=self.group
        )
        # Each rank sent an early and a late chunk. The late chunks are in reverse order of the
        # ranks.
        chunks = gathered.chunk(2 * self.degree, dim=2)
        early_chunks, late_chunks = chunks[::2], chunks[::-2]
        return torch.cat([*early_chunks, *late_chunks], dim=2)
