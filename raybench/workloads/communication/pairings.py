"""Who is whose partner: disjoint pairs of ranks, and groups of them, as parameters name them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from raybench.errors import UsageError

Pair = tuple[int, int]


def turns(world_size: int) -> int:
    """How many turns it takes until every rank was every other's partner."""
    return world_size - 1 + world_size % 2


def pairs_of_turn(world_size: int, turn: int) -> tuple[Pair, ...]:
    """Return the pairs of one turn, the lower rank first, by the circle method.

    One rank stays and the others walk round it, so that after all turns each pair has come once.
    Of an odd number one rank sits out in each turn.
    """
    even = world_size + world_size % 2
    circle = [even - 1, *((turn + step) % (even - 1) for step in range(even - 1))]
    met = ((circle[place], circle[-place]) for place in range(1, even // 2))
    # The first of the circle meets whom it stands above.
    pairs = [(circle[0], circle[even // 2]), *met]
    return tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < world_size))


def parse_pairs(text: str, world_size: int) -> tuple[Pair, ...]:
    """Read "0-3,1-2" as pairs. Raises UsageError where it is none, or a rank is in two of them."""
    rule = "partners: must be disjoint pairs of ranks, as in 0-3,1-2"
    found = [_match(r"(\d+)-(\d+)", part, text, rule) for part in text.split(",")]
    ranks = [rank for pair in found for rank in pair]
    if len(set(ranks)) < len(ranks) or max(ranks) >= world_size:
        raise UsageError(f"{rule}, below world_size {world_size}, given {text!r}")
    return tuple((min(pair), max(pair)) for pair in found)


def pairs_text(pairs: Iterable[Pair]) -> str:
    """Write pairs as `parse_pairs` reads them."""
    return ",".join(f"{low}-{high}" for low, high in pairs)


def parse_groups(text: str, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Read "0-3,4-7" or "0+2,1+3" as groups of ranks. Raises UsageError as `parse_pairs`."""
    rule = "groups: must be disjoint groups of ranks, as in 0-3,4-7 or 0+2,1+3"
    groups = [_group(part, text, rule) for part in text.split(",")]
    ranks = [rank for group in groups for rank in group]
    too_small = min(map(len, groups)) < 2
    if too_small or len(set(ranks)) < len(ranks) or max(ranks) >= world_size:
        raise UsageError(
            f"{rule}, of 2 ranks at least, below world_size {world_size}, given {text!r}"
        )
    return tuple(groups)


def groups_text(groups: tuple[tuple[int, ...], ...]) -> str:
    """Write groups as `parse_groups` reads them."""
    return ",".join(
        f"{group[0]}-{group[-1]}"
        if list(group) == list(range(group[0], group[-1] + 1))
        else "+".join(map(str, group))
        for group in groups
    )


def _group(part: str, text: str, rule: str) -> tuple[int, ...]:
    if "+" in part:
        return tuple(sorted(_match(r"\d+", rank, text, rule)[0] for rank in part.split("+")))
    first, last = _match(r"(\d+)-(\d+)", part, text, rule)
    return tuple(range(first, last + 1))


def _match(pattern: str, part: str, text: str, rule: str) -> tuple[int, ...]:
    found = re.fullmatch(pattern, part.strip())
    if found is None:
        raise UsageError(f"{rule}, given {text!r}")
    return tuple(map(int, found.groups() or (found.group(),)))
