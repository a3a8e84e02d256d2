"""The workload `dit`, a diffusion transformer: here its sizes, from which models are built.

Loads no torch: `plan` and reports read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DitShape:
    """Sizes of a diffusion transformer of double and single blocks, as Flux.1 has them.

    axes: how many numbers of a head are rotated by the position on each of three axes.
    channels: width of an image token. text_width: of a text token. pooled_width: of the embedding
    of the whole text. frequencies: of the sinusoids that encode time and guidance.
    """

    double_blocks: int
    single_blocks: int
    heads: int
    axes: tuple[int, int, int]
    channels: int = 64
    text_width: int
    pooled_width: int
    frequencies: int = 256

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return sum(self.axes)

    @property
    def width(self) -> int:
        """Width of a token inside of the model."""
        return self.heads * self.head_width

    def parameter_count(self, scope: str | None) -> int:
        """Return the number of parameters, of the block that `scope` names, else of the model."""
        width = self.width
        blocks = self._by_scope(
            # Two streams: modulation, query, key and value, output, the MLP's layers, two norms.
            double_block=2 * (18 * width**2 + 15 * width + 2 * self.head_width),
            # Modulation; query, key, value and the MLP's first layer; output; two norms.
            single_block=15 * width**2 + 11 * width + 2 * self.head_width,
            outside=(self.channels + self.text_width + 2 * self.frequencies + self.pooled_width)
            * width
            # Time, guidance and pooled text have a second layer each.
            + (3 * width**2 + 8 * width)
            + (2 * width**2 + 2 * width + self.channels * (width + 1)),
        )
        return round(blocks.get(scope or "all", blocks["all"]))

    def flops(self, scope: str, *, text: int, image: int) -> float:
        """Return the operations of products and attention, of one block or of a forward pass.

        text, image: tokens of all ranks. A multiply-add is two operations.
        """
        width, tokens = self.width, text + image
        # For each token: query, key, value, output, and both layers of the MLP.
        block = 24.0 * width**2 * tokens + 4.0 * tokens**2 * width
        embeddings = image * self.channels + text * self.text_width
        embeddings += 2 * self.frequencies + self.pooled_width + 3 * width
        output = 2 * width + image * self.channels
        blocks = self._by_scope(
            # With the modulation of both streams, or of the one.
            double_block=block + 24 * width**2,
            single_block=block + 6 * width**2,
            outside=2 * width * (embeddings + output),
        )
        return blocks.get(scope, blocks["all"])

    def _by_scope(
        self, *, double_block: float, single_block: float, outside: float
    ) -> Mapping[str, float]:
        """Return the cost of each kind of block and of `all`; outside: of the other layers."""
        repeated = self.double_blocks * double_block + self.single_blocks * single_block
        return {
            "double_block": double_block,
            "single_block": single_block,
            "all": repeated + outside,
        }


# flux: Flux.1-dev, 11.9 billion parameters. tiny: for CPUs; its heads divide by 2, 3 and 4.
DIT_PRESETS = {
    "tiny": DitShape(
        double_blocks=2,
        single_blocks=4,
        heads=12,
        axes=(4, 6, 6),
        text_width=128,
        pooled_width=64,
    ),
    "flux": DitShape(
        double_blocks=19,
        single_blocks=38,
        heads=24,
        axes=(16, 56, 56),
        text_width=4096,
        pooled_width=768,
    ),
}
