"""Attention over a sequence whose tokens are divided over ranks: Ulysses, ring, or both.

With plain operations of torch.distributed. The ranks are a grid, ring x ulysses, in which those of
one ulysses group follow each other: rank = ring place * ulysses + ulysses place. Attention does not
depend on the order of the tokens, so that no rank has to know whose tokens it sees.

Ulysses: all_to_all of query, key and value gives each rank of a group all the group's tokens of
some heads, and one of the output gives them back. Ring: keys and values go round the ring, or are
gathered; parts are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """The ranks of a group, in its order. place: index of this rank. group: None for all ranks."""

    ranks: tuple[int, ...]
    place: int
    group: ProcessGroup | None = None

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel:
    """How the sequence is divided, and the groups that its ranks communicate in.

    rank: of this process. ulysses, ring: the groups that it is in. ring_kind: whether keys and
    values go round the ring (p2p) or are gathered.
    """

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
        """Return this rank's part of the tokens of all ranks, which are dimension 0."""
        return tokens.chunk(self.degree)[self.rank]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks, by one all_gather, which all must call together."""
        return tokens if self.degree == 1 else _all_gather(tokens, self.degree, None)

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of this rank's queries over the tokens of all ranks.

        All three and the output are (own tokens, heads, head). All ranks must call it together.
        """
        query, key, value = map(self._to_heads, (query, key, value))
        return self._to_tokens(self._attend_ring(kernel, query, key, value))

    def _to_heads(self, own: Tensor) -> Tensor:
        """Return (tokens of the ulysses group, this rank's heads, head); own: as of `attend`."""
        degree = len(self.ulysses)
        if degree == 1:
            return own
        _, heads, size = own.shape
        # By the rank that gets it: a share of the heads.
        sent = torch.unflatten(own, 1, (degree, heads // degree)).transpose(0, 1)
        return _all_to_all(sent, self.ulysses.group).view(-1, heads // degree, size)

    def _to_tokens(self, out: Tensor) -> Tensor:
        """Return (own tokens, heads, head): the inverse of `_to_heads`."""
        degree = len(self.ulysses)
        if degree == 1:
            return out
        sent = torch.unflatten(out, 0, (degree, -1))
        # By the rank that sent it: its heads of this rank's tokens.
        received = _all_to_all(sent, self.ulysses.group).transpose(0, 1)
        return received.reshape(received.shape[0], -1, out.shape[-1])

    def _attend_ring(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of these queries over the tokens of all ranks of the ring."""
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

        The next ones are on their way while those given are worked on. All ranks must go through it
        together.
        """
        ranks, group = self.ring.ranks, self.ring.group
        following, preceding = (ranks[(self.ring.place + step) % len(ranks)] for step in (1, -1))
        current = key.contiguous(), value.contiguous()
        for _ in range(len(ranks) - 1):
            coming = torch.empty_like(current[0]), torch.empty_like(current[1])
            works = dist.batch_isend_irecv(
                [
                    *(dist.P2POp(dist.isend, one, following, group) for one in current),
                    *(dist.P2POp(dist.irecv, one, preceding, group) for one in coming),
                ]
            )
            yield current
            for work in works:
                work.wait()
            current = coming
        yield current


def form_groups(
    rank: int, *, ulysses: int, ring: int, ring_kind: RingKind = "p2p"
) -> SequenceParallel:
    """Return the division of a sequence over ulysses * ring ranks, of which this one is `rank`.

    Makes groups of torch.distributed where there are several: all ranks must call it together.
    """
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
    """Return the one of `groups` that this rank is in; all ranks must call it, as all are made."""
    own = next(ranks for ranks in groups if rank in ranks)
    if len(groups) == 1 or len(own) == 1:
        # All ranks, whose group is there already, or nobody to communicate with.
        return _Peers(ranks=own, place=own.index(rank))
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    return _Peers(ranks=own, place=own.index(rank), group=made[own])


def _all_to_all(sent: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send each rank of the group its part of dimension 0; return the parts for this rank."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _all_gather(own: Tensor, ranks: int, group: ProcessGroup | None) -> Tensor:
    """Return the tensors of so many ranks of a group, joined along dimension 0."""
    gathered = own.new_empty((ranks * len(own), *own.shape[1:]))
    # Torch 2.13 gave it another name and warns of the older one.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own.contiguous(), group=group)
    return gathered


def attend_whole(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of queries over these keys; all are (tokens, heads, head)."""
    return _from_batch(attend(kernel, *map(_as_batch, (query, key, value))))


def _as_batch(tokens: Tensor) -> Tensor:
    """Return a view (1, heads, tokens, head), as attention takes it, of (tokens, heads, head)."""
    return tokens.transpose(0, 1).unsqueeze(0)


def _from_batch(out: Tensor) -> Tensor:
    return out.squeeze(0).transpose(0, 1)
