"""What the memory of a step of a language model is made of when it is largest, by its layout.

Closed formulas, without torch; see `memory_estimate`. Numbers of a block are counted per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raybench.job.memory import MemoryParts
from raybench.workloads.training.layout import Layout
from raybench.workloads.training.memory_estimate import (
    Held,
    Settings,
    Weights,
    compute_bytes,
    estimate_training,
    is_estimated,
)
from raybench.workloads.training.model_sizes import (
    LANGUAGE_PRESETS,
    LanguageShape,
    LlamaShape,
    language_parameters,
)

# Blocks whose weights are gathered at a time: the one that runs, and the next.
_GATHERED = 2
_FP32 = 4
_WORDS = {False: "none", True: "full"}


def estimate_language_model(settings: Settings) -> MemoryParts | None:
    """Estimate a transformer as the job asks for it; None where nothing is trained.

    Also where a model is compiled as a whole: what is kept then is the compiler's choice.
    """
    if not is_estimated(settings):
        return None
    model = _Model.make(settings)
    if settings.get("compile") and not model.is_compiled_by_block:
        return None
    return estimate_training(settings, model.weights(), model.step_holdings())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model in a layout. number, residual: bytes of what products read, and between blocks."""

    settings: Settings
    shape: LanguageShape
    layout: Layout
    parameters: int
    number: int
    residual: int

    @classmethod
    def make(cls, settings: Settings) -> _Model:
        shape = LANGUAGE_PRESETS[settings["preset"]]
        shape = replace(shape, layers=settings.get("layers") or shape.layers)
        layout = Layout.make(settings["world_size"], settings)
        number = compute_bytes(settings)
        # Under autocast additions are in fp32; weights that are stored or gathered in half are not.
        is_half = settings.get("optimizer_dtype") == "bf16" or layout.is_divided
        return cls(
            settings=settings,
            shape=shape,
            layout=layout,
            parameters=language_parameters(shape, settings["seq_len"]),
            number=number,
            residual=number if is_half else _FP32,
        )

    @property
    def is_compiled_by_block(self) -> bool:
        """Whether `compile` leaves the blocks apart."""
        return isinstance(self.shape, LlamaShape) or self.layout.is_divided

    def weights(self) -> Weights:
        """Say what this rank has of the weights."""
        stored = 2 if self.settings.get("optimizer_dtype") == "bf16" else _FP32
        parts = self.layout.ranks_per_copy * self.layout.tp
        return Weights(
            bytes=stored * self.parameters / parts,
            has_buckets=self.settings["world_size"] > 1 and not self.layout.is_divided,
        )

    def step_holdings(self) -> Held:
        """Say what a step holds beside them."""
        # Of a pass of this rank and those that divide its products.
        tokens = float(self.settings["batch_size"] * self.settings["seq_len"]) / self.layout.cp
        number = self.number
        width, tp = self.shape.width, self.layout.tp
        # The last norm, and the input of the logits.
        norm = tokens * width * (self.residual / tp + number)
        gathered = self._blocks_here()
        if self._is_gathered:
            # The last layer stays until the backward pass has been through it.
            gathered += number * self._table
        saved = (
            self.shape.layers * tokens * self._bytes_of_block() + norm + self._casts() + gathered
        )
        return Held(
            saved=saved,
            loss=tokens / tp * self.shape.vocabulary * self._bytes_of_logit(),
            last=max(tokens * self._whole() + self._weights_at_end(), self._sum_of_tied()),
            data=16.0 * tokens * self.settings.get("grad_accumulation", 1),
        )

    @property
    def _is_autocast(self) -> bool:
        return self.number == 2 and self.residual == _FP32

    @property
    def _checkpointing(self) -> str:
        given = self.settings["activation_checkpointing"]
        return str(_WORDS.get(given, given))

    def _bytes_of_block(self) -> float:
        """Count the bytes that a block keeps of a token for the backward pass."""
        if self._checkpointing == "none":
            return self._whole()
        entry = self.residual * self.shape.width / self.layout.tp
        return entry + (self._bytes_of_choice() if self._checkpointing == "selective" else 0.0)

    def _whole(self) -> float:
        """All that its backward pass reads: inputs of norms, of products, of what is between."""
        shape, number, tp = self.shape, self.number, self.layout.tp
        norms = 2 * self.residual * shape.width / tp
        if not isinstance(shape, LlamaShape):
            # Query, key and value, attention's output, both sides of GELU; inputs of products.
            return norms + 14 * number * shape.width
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        # In context parallelism each rank has keys and values of all, for each head of queries.
        attention = 2 * queries + 2 * (queries * self.layout.cp if self.layout.cp > 1 else keys)
        if self.settings.get("compile"):
            # What is cheap is computed again: norms, the product of gate and up. Not where a block
            # ends its forward pass before the backward pass begins: what both read is kept, unless
            # it is in float8.
            is_kept = self._checkpointing == "none" and self.settings["precision"] != "float8"
            kept = 3 * shape.width + shape.hidden if is_kept else 0
            return norms + number * (attention + 2 * shape.hidden + kept) / tp
        # Autocast casts the input of each product by itself: three of attention, two of the MLP.
        inputs = (5 if self._is_autocast else 2) * shape.width
        return norms + number * (inputs + (attention + 4 * shape.hidden) / tp)

    def _bytes_of_choice(self) -> float:
        """Count what selective checkpointing keeps: attention's output, every second product."""
        shape, number, tp = self.shape, self.number, self.layout.tp
        if not isinstance(shape, LlamaShape):
            return 8 * number * shape.width
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        # Compiled, what no gradient needs is not kept: the last product.
        last = 0 if self.settings.get("compile") else shape.width
        return number * (2 * queries + keys + shape.hidden + last) / tp

    def _casts(self) -> float:
        """Count autocast's copies of weights, in bytes; of those computed again, the last layer."""
        if not self._is_autocast:
            return 0.0
        table = self.shape.vocabulary * self.shape.width
        return 2.0 * (self.parameters if self._checkpointing == "none" else table)

    def _bytes_of_logit(self) -> int:
        """Count what the loss has of a logit at most."""
        if self.settings.get("compile"):
            # Itself and its gradient; where tokens divide what the vocabulary did, both of it too.
            return (2 if self.layout.tp == 1 else 4) * self.number
        # Softmax, its gradient, and that of the logit; under autocast the first and last in half,
        # and the input of the loss besides.
        return 8 + self.number if self._is_autocast else 3 * _FP32

    @property
    def _table(self) -> float:
        """Weights of a table of tokens or of the output that a rank works with."""
        return self.shape.vocabulary * self.shape.width / self.layout.tp

    @property
    def _is_tied(self) -> bool:
        return not isinstance(self.shape, LlamaShape) or self.shape.is_tied

    @property
    def _block(self) -> float:
        """Weights of a block that a rank works with."""
        tables = self._table * (1 if self._is_tied else 2)
        return (self.parameters / self.layout.tp - tables) / self.shape.layers

    def _blocks_here(self) -> float:
        """Count the weights of blocks that are here meanwhile, of all ranks, in the type of use."""
        if not self._is_gathered:
            return 0.0
        all_stay = not self.settings.get("reshard_after_forward", True)
        return self.number * self._block * (self.shape.layers if all_stay else _GATHERED)

    def _weights_at_end(self) -> float:
        """Count what is gathered where the backward pass ends, and gradients not yet shared out.

        These are there in the type of the pass, and once more as they are reduced.
        """
        if not self._is_gathered:
            return 0.0
        both = self.number + (self.number if self._is_stored_as_used else _FP32)
        tied = self.number * 2 * self._table if self._is_tied else 0.0
        return self._blocks_here() + both * _GATHERED * self._block + tied

    def _sum_of_tied(self) -> float:
        """Count what autograd adds a table's gradient as the output to that as the embedding in.

        Both are there at once. The first is a view where nothing was cast, and then the sum is a
        third one.
        """
        if not self._is_tied:
            return 0.0
        stored = 2 if self.settings.get("optimizer_dtype") == "bf16" else _FP32
        return (1 if self._is_autocast else 2) * stored * self._table

    @property
    def _is_stored_as_used(self) -> bool:
        return self.settings.get("optimizer_dtype") == "bf16" or self.number == _FP32

    @property
    def _is_gathered(self) -> bool:
        """Whether FSDP gathers weights: not for tensor parallelism alone, of weights as used."""
        sharded = self.layout.ranks_per_copy * self.layout.dp_replicate > 1
        return self.layout.is_divided and (sharded or not self._is_stored_as_used)
