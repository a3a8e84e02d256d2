"""The workload `same_bits`: one and the same matrix product on each device, to the last bit."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from raybench.records.metric import Metric
from raybench.workloads.base import Context, Workload

if TYPE_CHECKING:
    from torch import Tensor

# So that a double holds the digest, and so a table.
_DIGEST_BYTES = 6


class SameBits(Workload):
    """Multiplies the same two matrices on each device, and digests the bits of the product.

    Devices of one model with the same libraries give the same bits; one that does not computes
    something wrong now and then. Nothing is raised: what differs is said by the metrics.
    """

    takes_batch_size = False
    metrics = (
        Metric(
            name="digest",
            description="first 48 bits of a hash of the product's bytes",
            over_ranks="max",
        ),
        Metric(
            name="changed_products",
            description="checks that found other bits than the first",
            over_ranks="sum",
        ),
        Metric(
            name="misplaced_products",
            description="checks whose product had other bits in other rows",
            over_ranks="sum",
        ),
    )

    def __init__(
        self,
        context: Context,
        *,
        size: Annotated[int, Field(gt=0, description="Rows and columns of each matrix.")] = 2048,
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        import torch

        dtype = getattr(torch, context.precision.dtype)
        # Made on the host: CUDA's random numbers depend on the model of the device.
        generator = torch.Generator().manual_seed(context.seed)
        self._first, self._second = (
            torch.randn(size, size, generator=generator).to(context.device, dtype) for _ in range(2)
        )
        self.product = torch.empty_like(self._first)
        self.flops_per_step = 2.0 * size**3
        self.digest: int | None = None
        self.changed_products = self.misplaced_products = 0

    def step(self) -> None:
        """Issue the product once."""
        import torch

        torch.matmul(self._first, self._second, out=self.product)

    def check(self) -> None:
        """Digest the last product; then make it wrong for the next check.

        Once more it is computed with its rows elsewhere: where the bits differ then, either the
        device is wrong or its library treats rows differently by their place.
        """
        import torch

        half = len(self._first) // 2
        moved = torch.matmul(self._first.roll(half, 0), self._second).roll(-half, 0)
        self.misplaced_products += not torch.equal(moved, self.product)
        digest = digest_of(self.product)
        self.digest = digest if self.digest is None else self.digest
        self.changed_products += digest != self.digest
        self.product.zero_()


def digest_of(tensor: Tensor) -> int:
    """Hash the bytes of a tensor into an integer that a double holds exactly."""
    import torch

    content = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest())
