"""The workload `transformer`: a decoder-only language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack

from pydantic import Field

from raybench.conversion import BYTES_PER_GB
from raybench.job.answer import Answer
from raybench.job.point import Precision, Scalar
from raybench.records.metrics import Metric
from raybench.workloads.base import Context, apply_precision, option_defaults
from raybench.workloads.kernels import memory_gb_s
from raybench.workloads.shapes import (
    LANGUAGE_PRESETS,
    LLAMA_PRESETS,
    Checkpointing,
    LanguageShape,
    Layout,
    LayoutOptions,
    LlamaShape,
    llama_flops,
    model_flops,
    why_not_trained,
)
from raybench.workloads.training import (
    OUTPUT_ERROR,
    AttentionKernel,
    CastWeights,
    GradAccumulation,
    Mode,
    Model,
    Optimizer,
    Recipe,
    StepBytes,
    compile_blocks,
    compile_model,
    compute_dtype,
    estimate_step,
    matmul_element_size,
    slices,
)
from raybench.workloads.wall_clock import WALL_METRICS, time_by_wall_clock

if TYPE_CHECKING:
    from torch import Tensor, nn


Phase = Literal["prefill", "decode"]
Preset = Annotated[
    Literal[
        "tiny", "124m", "350m", "1.3b", "6.7b", "175b",
        "llama-tiny", "llama-1b", "llama-3b", "llama-8b",
    ],
    Field(description="Model, by its number of parameters: GPT-2's shapes or Llama 3's."),
]  # fmt: skip
# The setting activation_checkpointing may be a truth value or a name.
_CHECKPOINTING: dict[bool | Checkpointing, Checkpointing] = {
    **{False: "none", "none": "none", "selective": "selective", True: "full", "full": "full"}
}
# Few enough that their logits in fp32 need little memory.
_COMPARED_TOKENS = 256
# Steps that are timed one at a time by the host's clock.
_WALL_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """Settings of `Transformer` in mode train."""

    seq_len: int
    checkpointing: Checkpointing
    optimizer: Optimizer
    grad_accumulation: int
    compile: bool
    # All of LayoutOptions.
    options: Mapping[str, Any]


class Transformer(Model):
    """Trains or runs a language model on random tokens, GPT-2 or Llama; one item is one sequence.

    phase: prefill. A step reads whole prompts of seq_len tokens, fills the cache of keys and
    values, and computes the logits of the next token. phase: decode. The cache has seq_len tokens
    of each sequence, and every step computes the same next token.
    """

    takes_float8 = True
    items = "sequences"
    answers = (
        *Model.answers,
        Answer(
            metric="tokens_per_s_per_device",
            over=("dp_replicate", "dp_shard", "tp", "cp", "activation_checkpointing"),
        ),
        Answer(metric="step_ms_p50", over=("phase",), best="min"),
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="prefill_ms",
            unit="ms",
            description="time to first token, without queue and network",
            over_ranks="max",
            over_step="ms_each",
        ),
        Metric(
            name="decode_ms_per_token",
            unit="ms",
            heading="ms/token",
            description="time per output token of a static batch",
            over_ranks="min",
            over_step="ms_each",
        ),
        Metric(
            name="tokens_per_s",
            heading="tokens/s",
            unit="tokens/s",
            description="prompt tokens read, or tokens decoded, per second",
            over_ranks="sum",
            over_step="per_second",
        ),
        Metric(
            name="tokens_per_s_per_device",
            heading="tokens/s/device",
            unit="tokens/s",
            description="tokens per second of one device in training",
            over_ranks="mean",
            over_step="per_second",
        ),
        Metric(
            name="bandwidth_share_pct",
            heading="%memory",
            unit="%",
            description="time that the bytes of a step need at the measured memory bandwidth, in % "
            "of the step",
            over_ranks="min",
            over_step="per_second",
        ),
        Metric(
            name="triad_gb_s",
            heading="triad GB/s",
            unit="GB/s",
            description="memory bandwidth that the workload memory reaches",
            over_ranks="min",
        ),
        OUTPUT_ERROR,
    )
    # Vocabulary and shape of the tokens whose logits `check` compares with fp32; None: no check.
    _vocabulary_and_shape: tuple[int, tuple[int, int]] | None = None

    # Many parameters, because each setting of a job file is one.
    def __init__(
        self,
        context: Context,
        *,
        preset: Preset = "124m",
        layers: Annotated[
            int | None, Field(gt=0, description="Layers of the model; none: those of the preset.")
        ] = None,
        seq_len: Annotated[
            int,
            Field(gt=0, description="Tokens per sequence; decode: in the cache before the step."),
        ] = 1024,
        activation_checkpointing: Annotated[
            bool | Checkpointing,
            Field(
                description="Compute the activations of each block again in the backward pass: "
                "full (or true) all, selective all but attention and every second matrix product, "
                "none (or false) none."
            ),
        ] = False,
        optimizer: Optimizer = "adamw",
        grad_accumulation: GradAccumulation = 1,
        compile: Annotated[
            bool,
            Field(
                description="Compile in the warm-up: Llama's blocks one by one, and the loss; the "
                "GPT-2 shapes as a whole, with DDP around them, unless they are divided."
            ),
        ] = False,
        mode: Mode = "train",
        phase: Annotated[
            Phase | None,
            Field(description="Inference: with a cache of keys and values; none: all positions."),
        ] = None,
        cast_weights: CastWeights = False,
        attention: AttentionKernel = "auto",
        **options: Unpack[LayoutOptions],
    ) -> None:
        from raybench.workloads.attention import use_kernel

        shape = LANGUAGE_PRESETS[preset]
        shape = replace(shape, layers=layers or shape.layers)
        use_kernel(attention, context.device)
        if mode == "inference":
            self._serve(context, shape, phase, seq_len, compile, cast_weights)
            return
        training = _Training(
            seq_len=seq_len,
            checkpointing=_CHECKPOINTING[activation_checkpointing],
            optimizer=optimizer,
            grad_accumulation=grad_accumulation,
            compile=compile,
            options={**option_defaults(LayoutOptions), **options},
        )
        self._train(context, shape, training)

    def check(self) -> None:
        """Set `output_error`: largest difference of logits from fp32 / largest logit in fp32.

        The check compares only the first 256 tokens of a sequence. It sets nothing in inference, in
        float8, and if the model is divided, compiled by block or stored in bf16.
        """
        if self._vocabulary_and_shape is None:
            return
        import torch

        context = self._context
        vocabulary, shape = self._vocabulary_and_shape
        tokens = random_tokens(context, vocabulary, shape)[:, :_COMPARED_TOKENS]
        with torch.no_grad():
            with context.autocast():
                logits = self.model(tokens).float()
            # Outside of autocast, and without TF32.
            apply_precision(Precision.FP32)
            try:
                exact = self.model(tokens)
            finally:
                apply_precision(context.precision)
        self.output_error = float((logits - exact).abs().max() / exact.abs().max())

    @classmethod
    def why_not(cls, settings: Mapping[str, Scalar]) -> str | None:
        """Return why these settings cannot run, in one sentence; None if they can."""
        if settings["mode"] == "train":
            if settings.get("phase"):
                return f"phase: {settings['phase']} needs mode: inference"
            return super().why_not(settings) or why_not_trained(settings)
        if settings["precision"] == Precision.FLOAT8:
            return "precision float8 is for mode: train; take bf16"
        return super().why_not(settings)

    @classmethod
    def describe(cls, params: Mapping[str, str]) -> str:
        """Return for example "GPT-2 shaped transformer, 8 tokens a sequence"."""
        family = "Llama" if params.get("preset") in LLAMA_PRESETS else "GPT-2"
        return f"{family} shaped transformer, {int(params['seq_len']):,} tokens a sequence"

    @classmethod
    def preset_words(cls, params: Mapping[str, str]) -> str:
        """Return for example "175b (8 layers)" if the model has fewer layers than its preset."""
        preset, layers = params.get("preset", ""), params.get("layers")
        shape = LANGUAGE_PRESETS.get(preset)
        # The text "None" stands for a parameter that is None.
        if shape is None or layers in (None, "None", str(shape.layers)):
            return preset
        return f"{preset} ({layers} layers)"

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return the number of parameters; None without a known preset."""
        shape = LANGUAGE_PRESETS.get(params.get("preset", ""))
        if shape is None:
            return None
        positions = int(params["seq_len"])
        if params.get("phase") == "decode":
            positions += 1  # the new token
        shape = replace(shape, layers=int(params.get("layers", shape.layers)))
        return shape.parameter_count(positions)

    @classmethod
    def estimate_memory(cls, settings: Mapping[str, Any]) -> float | None:
        """Return a rank's rough peak in bytes; None for inference, CUDA graphs and uneven steps."""
        shape = LANGUAGE_PRESETS[settings["preset"]]
        shape = replace(shape, layers=settings.get("layers") or shape.layers)
        layout = Layout.make(settings["world_size"], settings)
        parameters = shape.parameter_count(settings["seq_len"])
        element_size = matmul_element_size(settings)
        # Autocast keeps residuals in fp32 and copies weights. There is no autocast if weights are
        # stored in bf16, or if dp_shard, cp or tp divides the model: FSDP then casts the weights.
        has_bf16_weights = settings["optimizer_dtype"] == "bf16"
        is_autocast = element_size == 2 and not has_bf16_weights and not layout.is_divided
        residual_size = 4 if is_autocast else element_size
        is_compiled = bool(settings["compile"])
        tokens = float(settings["batch_size"] * settings["seq_len"]) / layout.ranks_per_batch
        # Numbers per token that a block saves in the type of its matrix products.
        if isinstance(shape, LlamaShape):
            # Query, key, value, attention's output, inputs of matrix products, 4 parts of SwiGLU.
            # Compiled code recomputes two of the four parts.
            heads = 2 * (shape.heads + shape.kv_heads) * shape.head_width
            saved_numbers = heads + 2 * shape.width + (2 if is_compiled else 4) * shape.hidden
        else:
            # Query, key, value, output of attention (4), inputs of matrix products (2), both sides
            # of GELU (8).
            saved_numbers = 14 * shape.width
        # Bytes per token that the backward pass of a block reads.
        block_bytes = 2 * residual_size * shape.width + element_size * saved_numbers
        # Bytes per token that a block keeps from its forward pass, by checkpointing.
        kept_bytes: dict[Checkpointing, float] = {
            "none": block_bytes,
            "selective": block_bytes / 2,
            "full": residual_size * shape.width,
        }
        checkpointing = _CHECKPOINTING[settings["activation_checkpointing"]]
        autocast_weights = 2.0 * parameters if is_autocast else 0.0
        # The logits or their gradient. Uncompiled code also keeps softmax and its gradient in fp32.
        logit_bytes = 2 * element_size if is_compiled else 8 + element_size
        step = StepBytes(
            saved=shape.layers * tokens * kept_bytes[checkpointing] + autocast_weights,
            at_loss=tokens * shape.vocabulary * logit_bytes,
            recomputed=tokens * block_bytes,
            # Inputs and targets are int64.
            data=16.0 * tokens * settings["grad_accumulation"],
        )
        ranks = layout.fsdp_ranks * layout.tp
        return estimate_step(settings, step, parameters=parameters, ranks=ranks)

    @classmethod
    def ranks_per_item(cls, settings: Mapping[str, Scalar]) -> int:
        """Return the number of ranks that work on the same sequences, tp x cp."""
        return Layout.make(int(settings["world_size"]), settings).ranks_per_batch

    def _train(self, context: Context, shape: LanguageShape, training: _Training) -> None:
        """Prepare training. Collective."""
        import torch

        from raybench.workloads import language_models as models

        options, seq_len = training.options, training.seq_len
        # On the meta device raybench counts the operations of the whole model.
        is_meta = context.device.type == "meta"
        is_float8 = context.precision is Precision.FLOAT8
        layout = Layout() if is_meta else Layout.make(context.world_size, options)
        has_bf16_weights = options["optimizer_dtype"] == "bf16"
        is_by_block = training.compile and (layout.is_divided or isinstance(shape, LlamaShape))
        compiles_blocks = is_by_block and not is_meta

        def make_model() -> nn.Module:
            default_dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16 if has_bf16_weights else default_dtype)
            try:
                # Recomputation does not count as work of the model.
                checkpointing = "none" if is_meta else training.checkpointing
                model = models.LanguageModel(shape, seq_len=seq_len, checkpointing=checkpointing)
            finally:
                torch.set_default_dtype(default_dtype)
            if is_float8:
                models.convert_linear_layers(model.blocks, context.device)
            return model

        loss = torch.compile(models.next_token_loss) if compiles_blocks else models.next_token_loss
        # Ranks that share a batch draw the same tokens.
        batch_context = replace(context, rank=layout.batch_of(context.rank))
        sequences = context.batch_size * training.grad_accumulation
        text = random_tokens(batch_context, shape.vocabulary, (sequences, seq_len + 1))

        def loss_of_part(logits: Tensor, targets: Tensor) -> Tensor:
            # The losses of a tp group add up to their mean, and FSDP takes the mean over cp.
            part = models.sequence_part(targets, layout, context.rank)
            mean: Tensor = loss(logits, part) / layout.tp
            return mean

        recipe = Recipe(
            loss=loss if layout.ranks_per_batch == 1 else loss_of_part,
            optimizer=training.optimizer,
            grad_accumulation=training.grad_accumulation,
            compile=training.compile and not is_by_block,
            parallelize=lambda model: models.parallelize(
                model, context, layout, options, compiles=compiles_blocks
            ),
            has_fused_optimizer=options["fused_optimizer"],
            has_cast_weights=has_bf16_weights or layout.is_divided,
        )
        # Contiguous, as a loader would return them.
        inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        batches = slices(inputs, targets, context.batch_size)
        self.train(context, make_model, batches, recipe)
        if layout.is_divided:  # one rank cannot compute the whole model for a comparison
            self.gradient_error = None  # type: ignore[assignment, method-assign]
        self.items_per_step /= layout.ranks_per_batch
        tokens = sequences * seq_len / layout.ranks_per_batch
        # Tokens of a step: `over_step` of the metric divides them by the step time.
        self.tokens_per_s_per_device = tokens
        self.model_flops_per_step = model_flops(shape, tokens=tokens, seq_len=seq_len)
        if isinstance(shape, LlamaShape):
            self.flops_per_step = llama_flops(shape, tokens=tokens, seq_len=seq_len)
        # `check` cannot run other models in fp32.
        if not (is_by_block or layout.is_divided or has_bf16_weights or is_float8):
            self._vocabulary_and_shape = shape.vocabulary, (1, seq_len)

    def _serve(
        self,
        context: Context,
        shape: LanguageShape,
        phase: Phase | None,
        seq_len: int,
        compile: bool,
        cast_weights: bool,
    ) -> None:
        """Prepare inference: a pass over whole sequences, or a phase with a KV cache."""
        from raybench.workloads.language_models import Block, KeyValueCache, LanguageModel

        batch_size, device = context.batch_size, context.device
        is_decode = phase == "decode"
        self.triad_gb_s = memory_gb_s(context) if is_decode else None
        # In decoding the cache holds seq_len tokens before the new token.
        max_tokens = seq_len + 1 if is_decode else seq_len
        self.load(
            context,
            lambda: LanguageModel(shape, seq_len=max_tokens, region=context.region),
            cast_weights=cast_weights,
        )
        tokens = random_tokens(context, shape.vocabulary, (batch_size, max_tokens))
        if phase is None:
            forward = compile_model(self.model, context, wanted=compile)
            self.run_forward(lambda: forward(tokens))
            self.tokens_per_s = tokens.numel()
            return
        cache = KeyValueCache.make(
            shape,
            batch_size=batch_size,
            max_tokens=max_tokens,
            dtype=compute_dtype(context),
            device=device,
        )
        if is_decode:
            # Fill the cache sequence by sequence: a batch of prompts may need too much memory.
            if device.type != "meta":
                with self.inference():
                    for index, prompt in enumerate(tokens[:, :seq_len]):
                        memory = cache.memory[:, :, index : index + 1]
                        self.model(prompt[None], KeyValueCache(memory))
            # The position stays constant, so that every step computes the same token.
            cache.position = seq_len
            # A step reads the cache and all weights except most rows of the lookup table.
            parameters = self.model.named_parameters()
            weights = sum(p.nbytes for name, p in parameters if name != self.model.lookup_table)
            self.memory_bytes = weights + cache.memory.nbytes
            if self.triad_gb_s is not None:
                bytes_per_s = self.triad_gb_s * BYTES_PER_GB
                # 100 times the seconds of the transfer: `over_step` divides them by the step time.
                self.bandwidth_share_pct = 100 * self.memory_bytes / bytes_per_s
            tokens = tokens[:, seq_len:].contiguous()
        if compile and device.type != "meta":
            # In decoding matrix products and norms have one row. Without these options Inductor
            # uses cuBLAS for the products, and several kernels for a norm.
            options = {"coordinate_descent_tuning": True, "split_reductions": False}
            compile_blocks(self.model, Block, options=options if is_decode else None)
        self.run_forward(lambda: self.model(tokens, cache))
        self.tokens_per_s = tokens.numel()
        # `over_step` of both metrics divides the step time by this number.
        if is_decode:
            self.decode_ms_per_token = 1
        else:
            self.prefill_ms = 1


def random_tokens(context: Context, vocabulary: int, shape: tuple[int, int]) -> Tensor:
    """Return int64 token ids on the device, different on each rank, the same at each call."""
    import torch

    return torch.randint(vocabulary, shape, generator=context.generator(), device=context.device)


class HostTimedTransformer(Transformer):
    """`transformer` whose single steps are also timed by the host's clock, on CUDA devices."""

    metrics = (*Transformer.metrics, *WALL_METRICS)

    def check(self) -> None:
        """Check as `Transformer` does, and time single steps by the host's clock. Collective."""
        import torch

        super().check()
        context = self._context
        if context.device.type == "cuda" and not context.cuda_graph:
            times = time_by_wall_clock(self.step, _WALL_STEPS, torch.cuda.synchronize)
            # A workload sets ms; raybench divides them by the step time, which gives the share.
            self.wall_unsynced_share = times.unsynced_ms
            self.wall_synced_share = times.synced_ms
