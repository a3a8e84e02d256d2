"""Attention over a sequence whose tokens are divided over ranks: Ulysses, ring, or both.

With plain operations of torch.distributed. The ranks are a grid, ring x ulysses, in which those of
one ulysses group follow each other: rank = ring place * ulysses + ulysses place. Attention does not
depend on the order of the tokens, so that no rank has to know whose tokens it sees.

Ulysses: all_to_all of query, key and value gives each rank of a group all the group's tokens of
some heads, and one of the output gives them back. Ring: keys and values go round the ring, or are
gathered; parts are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from raybench.workloads.attention import Kernel, attend, attention_part, merge

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RingKind = Literal["p2p", "allgather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peers:
    """The ranks of a group, in its order. group: None for all ranks."""

    ranks: tuple[int, ...]
    place: int
    group: ProcessGroup | None = None

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel:
    """How the sequence is divided, and the groups that its ranks communicate in."""

    rank: int
    ulysses: _Peers
    ring: _Peers
    ring_kind: RingKind

    @property
    def degree(self) -> int:
        """Number of ranks that the sequence is divided over."""
        return len(self.ulysses) * len(self.ring)

    @property
    def heads_divided_by(self) -> int:
        """Number of ranks that the heads are divided over inside of attention."""
        return len(self.ulysses)

    def shard(self, tokens: Tensor) -> Tensor:
        """Return this rank's tokens of all, which are dimension 0."""
        return tokens.chunk(self.degree)[self.rank]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks from those of each, by one all_gather."""
        return tokens if self.degree == 1 else _all_gather(tokens, self.degree, None)

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the tokens of all ranks; all, and the output, are (own tokens, heads, head)."""
        query, key, value = map(self._to_heads, (query, key, value))
        return self._to_tokens(self._attend_ring(kernel, query, key, value))

    def _to_heads(self, own: Tensor) -> Tensor:
        """(own tokens, heads, head) to (tokens of the group, heads of this rank, head)."""
        degree = len(self.ulysses)
        if degree == 1:
            return own
        _, heads, size = own.shape
        # By the rank that gets it: a share of the heads.
        sent = torch.unflatten(own, 1, (degree, heads // degree)).transpose(0, 1)
        return _all_to_all(sent, self.ulysses.group).view(-1, heads // degree, size)

    def _to_tokens(self, out: Tensor) -> Tensor:
        """(tokens of the group, heads of this rank, head) to (own tokens, heads, head)."""
        degree = len(self.ulysses)
        if degree == 1:
            return out
        sent = torch.unflatten(out, 0, (degree, -1))
        # By the rank that sent it: its heads of this rank's tokens.
        received = _all_to_all(sent, self.ulysses.group).transpose(0, 1)
        return received.reshape(received.shape[0], -1, out.shape[-1])

    def _attend_ring(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(self.ring) == 1:
            return attend_whole(kernel, query, key, value)
        if self.ring_kind == "allgather":
            ranks, group = len(self.ring), self.ring.group
            key, value = (_all_gather(one, ranks, group) for one in (key, value))
            return attend_whole(kernel, query, key, value)
        attention = attention_part(kernel)
        parts = (
            attention(*map(_as_batch, (query, one_key, one_value)))
            for one_key, one_value in self._round(key, value)
        )
        return _from_batch(merge(parts))

    def _round(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of each rank of the ring, this rank's first.

        The next ones are on their way while those given are worked on.
        """
        current = key.contiguous(), value.contiguous()
        for _ in range(len(self.ring) - 1):
            coming = self._exchange(current)
            yield current
            current = coming()
        yield current

    def _exchange(self, pair: tuple[Tensor, Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
        """Send both to the next rank; return a function that waits for those of the rank before."""
        buffers = torch.empty_like(pair[0]), torch.empty_like(pair[1])
        ranks, group = self.ring.ranks, self.ring.group
        to, source = (ranks[(self.ring.place + step) % len(ranks)] for step in (1, -1))
        works = dist.batch_isend_irecv(
            [
                *(dist.P2POp(dist.isend, one, to, group) for one in pair),
                *(dist.P2POp(dist.irecv, one, source, group) for one in buffers),
            ]
        )

        def receive() -> tuple[Tensor, Tensor]:
            for work in works:
                work.wait()
            return buffers

        return receive


def form_groups(
    rank: int, *, ulysses: int, ring: int, ring_kind: RingKind = "p2p"
) -> SequenceParallel:
    """Form the groups; all ranks must call it at the same place. ulysses * ring is their number."""
    world_size = ulysses * ring
    rows = [tuple(range(first, first + ulysses)) for first in range(0, world_size, ulysses)]
    columns = [tuple(range(first, world_size, ulysses)) for first in range(ulysses)]
    return SequenceParallel(
        rank=rank,
        ulysses=_join(rank, rows),
        ring=_join(rank, columns),
        ring_kind=ring_kind,
    )


def _join(rank: int, groups: list[tuple[int, ...]]) -> _Peers:
    """Return this rank's group of these; every rank must call it, as all groups are made."""
    own = next(ranks for ranks in groups if rank in ranks)
    if len(groups) == 1 or len(own) == 1:
        # All ranks, whose group is there already, or nobody to communicate with.
        return _Peers(ranks=own, place=own.index(rank))
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    return _Peers(ranks=own, place=own.index(rank), group=made[own])


def _all_to_all(sent: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send each rank of the group its part of dimension 0."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _all_gather(own: Tensor, ranks: int, group: ProcessGroup | None) -> Tensor:
    """Gather dimension 0 over the ranks of a group."""
    gathered = own.new_empty((ranks * len(own), *own.shape[1:]))
    # Torch 2.13 gave it another name and warns of the older one.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own.contiguous(), group=group)
    return gathered


def attend_whole(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to the tokens that are here. All are (tokens, heads, head)."""
    return _from_batch(attend(kernel, *map(_as_batch, (query, key, value))))


def _as_batch(tokens: Tensor) -> Tensor:
    """(tokens, heads, head) to (1, heads, tokens, head), as attention takes it. No copy."""
    return tokens.transpose(0, 1).unsqueeze(0)


def _from_batch(out: Tensor) -> Tensor:
    return out.squeeze(0).transpose(0, 1)
