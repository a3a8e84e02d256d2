"""What a step sends: its collectives by kind."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.measure.collectives import Collective
from raybench.records import Traffic

# Of n ranks one has 1 / n of the message already.
_IN_SHARES = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})


def bus_bytes(collective: Collective) -> float:
    """Compute the message times nccl-tests' factor of busbw, which makes kinds comparable."""
    share = (collective.ranks - 1) / collective.ranks
    if collective.kind == "all_reduce":
        return 2 * share * collective.message_bytes
    return (share if collective.kind in _IN_SHARES else 1.0) * collective.message_bytes


def add_up(collectives: Sequence[Collective]) -> tuple[Traffic, ...]:
    """Add up the collectives of a step by kind and size of group, in the order of the first."""
    keys = dict.fromkeys((one.kind, one.ranks) for one in collectives)
    return tuple(
        Traffic(
            kind=kind,
            ranks=ranks,
            calls=len(own := [c for c in collectives if (c.kind, c.ranks) == (kind, ranks)]),
            message_bytes=sum(one.message_bytes for one in own),
            bus_bytes=sum(map(bus_bytes, own)),
        )
        for kind, ranks in keys
    )
