"""The columns of `points` on uneven steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from raybench.records.measurement import RankShare
from raybench.records.metrics import Column


@dataclass(frozen=True, kw_only=True)
class UnevenColumns:
    """How an uneven step is divided, and the probes of each device."""

    share_by_rank: Annotated[
        tuple[int, ...] | None, Column("samples", "of a step, where shares are uneven")
    ] = None
    fixed_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "of a step, by a probe of the device alone")
    ] = None
    speed_by_rank: Annotated[
        tuple[float, ...] | None, Column("samples/s", "of further samples, by the probe")
    ] = None
    slow_ratio_by_rank: Annotated[
        tuple[float | None, ...] | None, Column("", "measured, of emulated devices; null: none")
    ] = None
    exchange_ms: Annotated[
        float | None, Column("ms", "what an exchange adds to a balanced step")
    ] = None
    predicted_step_ms: Annotated[
        float | None, Column("ms", "longest own step and the exchange")
    ] = None
    crossover_batch: Annotated[
        float | None, Column("samples", "global; above it by_speed beats fast")
    ] = None


def uneven_columns(shares: Sequence[RankShare]) -> UnevenColumns:
    """Return the columns from the shares of all ranks, in rank order."""
    # The exchange, its prediction and the crossover are equal on all ranks.
    of_all_ranks = shares[0]
    return UnevenColumns(
        share_by_rank=tuple(share.items for share in shares),
        fixed_ms_by_rank=tuple(share.fixed_ms for share in shares),
        speed_by_rank=tuple(share.items_per_s for share in shares),
        slow_ratio_by_rank=tuple(share.slow_ratio for share in shares),
        exchange_ms=of_all_ranks.exchange_ms,
        predicted_step_ms=of_all_ranks.predicted_step_ms,
        crossover_batch=of_all_ranks.crossover_batch,
    )
