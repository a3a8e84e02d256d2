"""How large the models of the built-in workloads are. Loads no torch: reports read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder-only language model."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 50_304


# The shapes of Brown et al. 2020, table 2.1 (GPT-3 small, medium, XL, 6.7B; XL with 16 heads of
# 128, as its 24 heads do not divide 2048). Vocabulary: GPT-2's 50,257 up to a multiple of 64.
DECODER_PRESETS = {
    "tiny": DecoderShape(layers=2, heads=2, width=64, vocabulary=512),
    "124m": DecoderShape(layers=12, heads=12, width=768),
    "350m": DecoderShape(layers=24, heads=16, width=1024),
    "1.3b": DecoderShape(layers=24, heads=16, width=2048),
    "6.7b": DecoderShape(layers=32, heads=32, width=4096),
}
LINEAR_FEATURES = 1024


def parameter_count(workload: str, params: Mapping[str, str]) -> int | None:
    """Count the parameters of the model of a built-in workload, by its own as the tables hold them.

    None for other workloads, and for those without a model.
    """
    if workload == "linear":
        return LINEAR_FEATURES + 1
    if workload == "mlp" and {"hidden", "layers"} <= params.keys():
        hidden = int(params["hidden"])
        return int(params["layers"]) * (hidden * hidden + hidden)
    if workload == "transformer" and params.get("preset") in DECODER_PRESETS:
        # While decoding, the table of positions ends with the new token.
        positions = int(params["seq_len"]) + (params.get("phase") == "decode")
        return _decoder(DECODER_PRESETS[params["preset"]], positions)
    return None


def _decoder(shape: DecoderShape, positions: int) -> int:
    """Embeddings of tokens, which the output shares, and of positions; blocks; a last norm."""
    width = shape.width
    norm = 2 * width
    attention = (3 * width * width + 3 * width) + (width * width + width)
    mlp = (4 * width * width + 4 * width) + (4 * width * width + width)
    blocks = shape.layers * (2 * norm + attention + mlp)
    return (shape.vocabulary + positions) * width + blocks + norm
