"""How the workload `transformer` trains: its model, in which types, divided how over the ranks.

A model is divided by torch's tensor parallelism and its FSDP2, and its tokens by context
parallelism: each rank gathers the keys and values of all, as Llama 3 was trained (Grattafiori et
al. 2024, 3.3.2), by torch's functional collectives. Torch's own `context_parallel` takes the place
of attention for kernels of CUDA alone (torch 2.11, 2.13), so what it computes could not be held on
CPUs.
A model has `tokens`, `blocks`, `norm` and, unless it is the table of tokens, `output`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads.base import Context, DdpOptions, apply_precision, option_defaults
from raybench.workloads.language_models import (
    Block,
    Checkpointing,
    LanguageModel,
    next_token_loss,
)
from raybench.workloads.shapes import LanguageShape, Layout, LayoutOptions, LlamaShape
from raybench.workloads.training import (
    Batch,
    OptimizerName,
    Recipe,
    compile_blocks,
    compute_dtype,
    output_error,
    slices,
)

# Tokens whose logits are compared: their memory is a small part of what a step has left free.
_COMPARED = 256
# Torch keeps what it found out of a mesh in caches by its ranks and names, with its groups. Those
# of another point have been taken down: each mesh has names of its own.
_MESHES = count()
# Types that FlashAttention takes.
_HALVES = (torch.float16, torch.bfloat16)


def random_tokens(context: Context, vocabulary: int, shape: tuple[int, int]) -> Tensor:
    """Return random token ids of this shape on the device, other ones on each rank."""
    return torch.randint(vocabulary, shape, generator=context.generator(), device=context.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageTraining:
    """The training of a model of this shape, as a job asks for it.

    options: those that differ from the defaults of LayoutOptions, or all.
    """

    context: Context
    shape: LanguageShape
    seq_len: int
    checkpointing: Checkpointing
    optimizer: OptimizerName
    grad_accumulation: int
    compile: bool
    options: LayoutOptions

    @property
    def layout(self) -> Layout:
        """The degrees of division; on the meta device, where operations are counted, all are 1."""
        return Layout() if self._is_counted else Layout.make(self.context.world_size, self.options)

    @property
    def is_plain(self) -> bool:
        """Whether the model can also run eagerly in fp32, as a whole, on this rank."""
        is_float8 = self.context.precision is Precision.FLOAT8
        return not (self._is_by_block or self.layout.is_divided or self._is_stored or is_float8)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step that are this rank's part."""
        tokens = self.context.batch_size * self.grad_accumulation * self.seq_len
        return tokens / self.layout.ranks_per_batch

    def recipe(self) -> Recipe:
        """Return loss, optimizer and division of the model over the ranks, for `Model.train`."""
        return Recipe(
            loss=self._loss(),
            optimizer=self.optimizer,
            grad_accumulation=self.grad_accumulation,
            compile=self.compile and not self._is_by_block,
            divide=self._divide,
            is_fused=bool(self._option("fused_optimizer")),
            is_cast=self._is_stored or self.layout.is_divided,
        )

    def make_model(self) -> nn.Module:
        """Return the whole model on the default device, in the type that the optimizer updates."""
        # On the meta device operations are counted, and what is recomputed does not train.
        checkpointing: Checkpointing = "none" if self._is_counted else self.checkpointing
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self._is_stored else usual)
        try:
            model = LanguageModel(self.shape, seq_len=self.seq_len, checkpointing=checkpointing)
        finally:
            torch.set_default_dtype(usual)
        if self.context.precision is Precision.FLOAT8:
            convert_linear_layers(model.blocks, self.context.device)
        return model

    def batches(self) -> Iterator[Batch]:
        """Return an endless iterator over batches, the same ones on ranks that share a batch.

        Inputs are random tokens (batch, seq_len), targets the tokens that follow each.
        """
        mine = replace(self.context, rank=self.layout.batch_of(self.context.rank))
        rows = mine.batch_size * self.grad_accumulation
        text = random_tokens(mine, self.shape.vocabulary, (rows, self.seq_len + 1))
        # Both contiguous, as a loader's would be.
        return slices(text[:, :-1].contiguous(), text[:, 1:].contiguous(), mine.batch_size)

    def output_error(self, model: nn.Module) -> float:
        """Return the largest error of the logits in the precision, over the largest in fp32.

        Of the first 256 tokens of one sequence. The precision of the process is as before then.
        """
        tokens = random_tokens(self.context, self.shape.vocabulary, (1, self.seq_len))
        with torch.no_grad():
            with self.context.autocast():
                found = model(tokens[:, :_COMPARED]).float()
            apply_precision(Precision.FP32)
            try:
                return output_error(found, model(tokens[:, :_COMPARED]))
            finally:
                apply_precision(self.context.precision)

    def _divide(self, model: nn.Module) -> nn.Module:
        """Divide the model over the ranks, in place, or wrap it by DDP; return the module to call.

        Compiles the blocks where they are compiled one by one. All ranks must call it together.
        """
        context = self.context
        compiles = self._is_by_block and not self._is_counted
        if not self.layout.is_divided:
            if compiles:
                compile_blocks(model, Block)
            ddp = DdpOptions.__annotations__.keys() & self.options.keys()
            return context.ddp(model, **{name: self._option(name) for name in ddp})
        is_autocast = context.precision not in (Precision.FP32, Precision.TF32)
        return divide(
            model,
            layout=self.layout,
            device=context.device,
            compute_dtype=compute_dtype(context) if is_autocast and not self._is_stored else None,
            reshard_after_forward=bool(self._option("reshard_after_forward")),
            compiles=compiles,
        )

    def _loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function of this rank's logits and the batch's targets that gives its loss.

        The losses of the ranks of a tp group add up to their mean.
        """
        is_compiled = self._is_by_block and not self._is_counted
        loss = torch.compile(next_token_loss) if is_compiled else next_token_loss
        if self.layout.ranks_per_batch == 1:
            return loss
        # FSDP takes the mean over cp.
        own, degree = sequence_part(self.layout, self.context.rank), self.layout.tp
        return lambda logits, targets: loss(logits, own(targets)) / degree

    def _option(self, name: str) -> Any:
        """Return an option of LayoutOptions, its default where it is not given."""
        return self.options.get(name, option_defaults(LayoutOptions)[name])

    @property
    def _is_by_block(self) -> bool:
        """Whether blocks are compiled one by one, in place."""
        return self.compile and (self.layout.is_divided or isinstance(self.shape, LlamaShape))

    @property
    def _is_stored(self) -> bool:
        """Whether the weights are stored in the type that they are used in."""
        return bool(self._option("optimizer_dtype") == "bf16")

    @property
    def _is_counted(self) -> bool:
        return self.context.device.type == "meta"


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
    model: nn.Module,
    layout: Layout,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool,
    compiles: bool = False,
) -> nn.Module:
    """Divide the model over all ranks, in place, and return it.

    By tensor parallelism, context parallelism and FSDP2, as the degrees of `layout` say. All ranks
    must call it together. compute_dtype: the type that gathered weights are cast to; gradients are
    then reduced in fp32. None: both keep the type of the stored weights. compiles: compile
    each block.
    """
    mesh = _make_mesh(
        device, replicate=layout.dp_replicate, shard=layout.ranks_per_copy, tensor=layout.tp
    )
    replicate, shard, tensor = cast("tuple[str, ...]", mesh.mesh_dim_names)
    if layout.tp > 1:
        _divide_products(model, mesh[tensor])
        if compiles:
            # In torch 2.13 compiled code fails in its backward pass where its input is a collective
            # that nobody has waited for: a copy is none.
            embedding = cast("nn.Module", model.tokens)
            embedding.register_forward_hook(lambda _module, _inputs, output: output.clone())
    if layout.cp > 1:
        _divide_sequences(model, layout, device)
    # Before they are sharded: gathering is not part of the compiled code.
    if compiles:
        compile_blocks(model, Block)
    if layout.dp_replicate * layout.ranks_per_copy == 1 and compute_dtype is None:
        return model
    data = mesh[replicate, shard] if layout.dp_replicate > 1 else mesh[shard]
    _shard(model, data, compute_dtype, reshard_after_forward)
    return model


def sequence_part(layout: Layout, rank: int) -> Callable[[Tensor], Tensor]:
    """Return a function of tokens (batch, seq_len) that gives those whose logits the rank has."""
    cp_place, tp_place = layout.cp_place(rank), rank % layout.tp

    def part(tokens: Tensor) -> Tensor:
        own = take_part(tokens, 1, layout.cp, cp_place)
        return own.chunk(layout.tp, dim=1)[tp_place]

    return part


def _divide_sequences(model: nn.Module, layout: Layout, device: torch.device) -> None:
    """Let the model take whole inputs, and compute this rank's tokens of them: context parallelism.

    In place. All ranks must call it together.
    """
    mesh = _make_mesh(
        device,
        batch=layout.dp_replicate * layout.dp_shard,
        context=layout.cp,
        tensor=layout.tp,
    )
    own = mesh[cast("tuple[str, ...]", mesh.mesh_dim_names)[1]]
    # From Ampere on, unless the job asks for another kernel.
    has_flash = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    part = ContextParallel(
        degree=layout.cp,
        place=layout.cp_place(mesh.get_rank()),
        group=own.get_group(),
        takes_flash=has_flash and bool(torch.backends.cuda.flash_sdp_enabled()),  # type: ignore[no-untyped-call]
    )
    for name in ("cosines", "sines"):
        model.register_buffer(name, part.part(model.get_buffer(name), 0), persistent=False)
    model.register_forward_pre_hook(lambda _, inputs: (part.part(inputs[0], 1), *inputs[1:]))
    for block in cast("nn.ModuleList", model.blocks):
        cast("Any", block).attention.attend = part.attend


def _make_mesh(device: torch.device, **degrees: int) -> DeviceMesh:
    """Return a mesh of all ranks with these dimensions, under new names in the same order.

    All ranks must call it together.
    """
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
    """Shard the model by FSDP2, in place.

    Units are each block, the embedding, and the last norm with the output. Arguments as `divide`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=None if compute_dtype is None else torch.float32,
        # A model's inputs are tokens; positions stay in fp32.
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for block in cast("nn.ModuleList", model.blocks):
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    output, tokens = getattr(model, "output", None), cast("Any", model.tokens)
    if output is not None and output.weight is not tokens.weight:
        fully_shard(tokens, reshard_after_forward=reshard_after_forward, **options)
        # The backward pass begins with these, so they stay.
        fully_shard([cast("Any", model.norm), output], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def _divide_products(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide each matrix product over the ranks, and between products the sequence, in place.

    As torchtitan and torch's tutorial on tensor parallelism divide Llama. Each rank gets whole
    logits of its part of the sequence, as local tensors.
    """
    tokens, output = cast("Any", model.tokens), cast("Any", model.output)
    is_tied, sequence = output.weight is tokens.weight, Shard(1)
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
        output.weight = tokens.weight
    for block in cast("nn.ModuleList", model.blocks):
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

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of `whole` along dimension `dim`; see `take_part`."""
        return take_part(whole, dim, self.degree, self.place)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention of this rank's queries over the keys and values of all ranks.

        query, output: (batch, heads, own tokens, head); key, value: the same, of fewer heads. All
        ranks of the group must call it together.
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
