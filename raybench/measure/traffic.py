"""What a step sends: its collectives by kind."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.measure.collectives import Collective
from raybench.records import Traffic
from raybench.workloads.collective_operations import busbw_factor


def add_up(collectives: Sequence[Collective]) -> tuple[Traffic, ...]:
    """Add up the collectives of a step by kind and size of group, in the order of the first."""
    keys = dict.fromkeys((one.kind, one.ranks) for one in collectives)
    return tuple(
        Traffic(
            kind=kind,
            ranks=ranks,
            calls=len(own := [c for c in collectives if (c.kind, c.ranks) == (kind, ranks)]),
            message_bytes=(size := sum(one.message_bytes for one in own)),
            bus_bytes=busbw_factor(kind, ranks) * size,
        )
        for kind, ranks in keys
    )
