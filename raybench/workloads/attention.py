"""Kernels of attention, with the log-sum-exp of each query over its keys, to merge parts by.

They are torch's own. Shapes: query (1, heads, queries, head), key and value (1, heads, keys,
head); output as query; log-sum-exp (1, heads, queries), natural, in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.compiler.config
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from raybench.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Kernel = Literal["flash", "efficient", "cudnn", "math"]
KernelOrAuto = Literal["auto", "flash", "efficient", "cudnn", "math"]
Part: TypeAlias = tuple[Tensor, Tensor]
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Part]

# As torch._fused_sdp_choice numbers them.
_CHOICES: dict[int, Kernel] = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


def choose_kernel(asked: KernelOrAuto, tokens: Tensor) -> Kernel:
    """Return the kernel that is asked for; for auto the one that torch takes for such tokens.

    tokens: (1, heads, tokens, head), used as query, key and value; only shape, type and device
    count. Raises UsageError for efficient and cudnn on a CPU.
    """
    if asked == "auto":
        return _CHOICES[torch._fused_sdp_choice(tokens, tokens, tokens)]
    _check_device(asked, tokens.device)
    return asked


def use_kernel(asked: KernelOrAuto, device: torch.device) -> None:
    """Make torch's attention use this kernel from now on, in this process; auto changes nothing.

    Compiled code and recomputed activations use it too; code compiled for another kernel is not
    taken from torch's cache. Does nothing on the meta device. Raises UsageError for efficient and
    cudnn on a CPU.
    """
    if device.type == "meta":
        return
    # Else torch.compile takes code from its cache on disk that was compiled for another kernel
    # (pytorch#185449).
    torch.compiler.config.cache_key_tag = f"{asked} of {torch._C._get_sdp_priority_order()}"
    if asked == "auto":
        return
    _check_device(asked, device)
    switches = {
        "flash": torch.backends.cuda.enable_flash_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }
    for name, switch in switches.items():
        switch(name == asked)


def _check_device(asked: Kernel, device: torch.device) -> None:
    """Raise UsageError for efficient and cudnn on a CPU."""
    if device.type == "cpu" and asked in ("efficient", "cudnn"):
        raise UsageError(f"attention {asked} is for CUDA devices; on a CPU take flash or math")


def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output of attention by this kernel, not causal; on the meta device by math.

    Shapes as this module has them.
    """
    if kernel == "math" or query.device.type == "meta":
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(query, key, value)
    return attention_part(kernel)(query, key, value)[0]


def attention_part(kernel: Kernel) -> Attention:
    """Return a function of query, key and value that returns the output and the log-sum-exp.

    Not causal; shapes as this module has them. Raises UsageError for math, which computes no
    log-sum-exp.
    """
    aten = torch.ops.aten

    def flash(query: Tensor, key: Tensor, value: Tensor) -> Part:
        if query.device.type == "cpu":
            found = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        else:
            found = aten._scaled_dot_product_flash_attention(query, key, value)
        return found[0], found[1]

    def efficient(query: Tensor, key: Tensor, value: Tensor) -> Part:
        found = aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
        # The kernel fills the queries up to a multiple of 32.
        return found[0], found[1][..., : query.shape[2]]

    def cudnn(query: Tensor, key: Tensor, value: Tensor) -> Part:
        found = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
        return found[0], found[1].reshape(query.shape[:3])

    parts: dict[str, Attention] = {"flash": flash, "efficient": efficient, "cudnn": cudnn}
    if kernel not in parts:
        raise UsageError(f"attention {kernel} gives no log-sum-exp to merge parts by; take flash")
    return parts[kernel]


def merge(parts: Iterable[Part]) -> Tensor:
    """Return the output of attention over all keys, in the type of the parts.

    parts: output and log-sum-exp over a part of the keys each, one at least; each is used as soon
    as it comes. The result is the mean of the outputs with weights exp(logsumexp of the part -
    logsumexp of all), computed in fp32 at least.
    """
    remaining = iter(parts)
    out, logsumexp = next(remaining)
    dtype = out.dtype
    merged = out.to(torch.promote_types(dtype, torch.float32))
    for part, part_logsumexp in remaining:
        # The new part's share of the sum of both: exp(b) / (exp(a) + exp(b)).
        share = torch.sigmoid(part_logsumexp - logsumexp).unsqueeze(-1)
        merged = torch.lerp(merged, part.to(merged.dtype), share.to(merged.dtype))
        logsumexp = torch.logaddexp(logsumexp, part_logsumexp)
    return merged.to(dtype)


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
