"""Kernels of attention, with the log-sum-exp to merge parts by, and attention divided over ranks.

A sequence is divided over a grid of ranks, ring x ulysses, in which those of one ulysses group
follow each other: rank = ring place * ulysses + ulysses place. Attention does not depend on the
order of the tokens, so that no rank has to know whose tokens it sees. Ulysses: all_to_all of query,
key and value gives each rank of a group all the group's tokens of some heads, and one of the output
gives them back. Ring: keys and values go round the ring, and parts are merged by their log-sum-exp;
or all are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

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


def choose_kernel(asked: KernelOrAuto, tokens: Tensor) -> Kernel:
    """Return the kernel that is asked for; for auto the one that torch chooses for these tokens.

    tokens: (1, heads, tokens, head), for query, key and value. Shape, strides, type, device,
    requires_grad and torch's switches matter, not values. On meta auto is math. Raises UsageError
    for efficient and cudnn on a CPU, RuntimeError if torch finds none for auto; checks no more.
    """
    if asked == "auto":
        choice = SDPBackend(torch._fused_sdp_choice(tokens, tokens, tokens))
        return cast("Kernel", choice.name.lower().removesuffix("_attention"))
    _check_device(asked, tokens.device)
    return asked


def use_kernel(asked: KernelOrAuto, device: torch.device) -> None:
    """Make torch's attention use this kernel from now on, in this process; auto: as it is now.

    Recomputed activations and functions compiled later use it too (torch's cache is kept apart by
    what is enabled); functions compiled before keep theirs. Nothing on meta. Raises UsageError for
    efficient and cudnn on a CPU; attention raises RuntimeError for what the kernel cannot compute.
    """
    if device.type == "meta":
        return
    switches, names = torch.backends.cuda, ("flash", "mem_efficient", "cudnn", "math")
    if asked != "auto":
        _check_device(asked, device)
        for name in names:
            getattr(switches, f"enable_{name}_sdp")(name.removeprefix("mem_") == asked)
    # Else torch.compile takes code from its cache on disk that was compiled for another kernel
    # (pytorch#185449).
    enabled = [name for name in names if getattr(switches, f"{name}_sdp_enabled")()]
    torch.compiler.config.cache_key_tag = f"{enabled} of {torch._C._get_sdp_priority_order()}"


def _check_device(asked: Kernel, device: torch.device) -> None:
    """Raise UsageError for efficient and cudnn on a CPU."""
    if device.type == "cpu" and asked in ("efficient", "cudnn"):
        raise UsageError(f"attention {asked} is for CUDA devices; on a CPU take flash or math")


def attention_part(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Part:
    """Return (output, log-sum-exp) of attention by this kernel of torch's, not causal.

    query: (1, heads, queries, head); key, value: (1, heads, keys, head), as many heads; none empty
    (a kernel may kill the process). Output as query; log-sum-exp of each query over its keys (1,
    heads, queries), natural, in fp32 (fp64 for fp64), without gradient. Raises UsageError for math,
    which computes none, and RuntimeError for a type, head width or device that the kernel lacks.
    """
    aten: Any = torch.ops.aten
    if kernel == "flash":
        name = "flash_attention_for_cpu" if query.device.type == "cpu" else "flash_attention"
        found = getattr(aten, f"_scaled_dot_product_{name}")(query, key, value)
        return found[0], found[1]
    if kernel == "efficient":
        found = aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
        # The kernel fills the queries up to a multiple of 32.
        return found[0], found[1][..., : query.shape[2]]
    if kernel == "cudnn":
        if query.dtype not in (torch.float16, torch.bfloat16):  # it would read others as fp16
            raise RuntimeError(f"attention cudnn computes fp16 and bf16, given {query.dtype}")
        found = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
        return found[0], found[1].reshape(query.shape[:3])
    raise UsageError(f"attention {kernel} gives no log-sum-exp to merge parts by; take flash")


def merge(parts: Iterable[Part]) -> Tensor:
    """Return the output of attention over all keys, in the type of the parts.

    parts: at least one, as of `attention_part`, for the same queries, each over other keys; used
    as they come. Computed in fp32 at least. Not for training: the log-sum-exp has no gradient.
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
class SequenceParallel:
    """How the sequence is divided, and the groups that its ranks communicate in.

    rank: of this process. ulysses, ring: the numbers of ranks of its two groups. A group is None
    where it is torch's default one, of all ranks, and where it has one rank. ring_kind: whether
    keys and values go round the ring (p2p) or are gathered. No gradients pass between ranks.
    """

    rank: int
    ulysses: int
    ring: int
    ulysses_group: ProcessGroup | None
    ring_group: ProcessGroup | None
    ring_kind: RingKind

    @property
    def degree(self) -> int:
        """Number of ranks that the sequence is divided over."""
        return self.ulysses * self.ring

    def shard(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the tokens, a view; `degree` must divide dimension 0."""
        return tokens.chunk(self.degree)[self.rank]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return all ranks' tokens, of one shape, in order along dimension 0; all must call it."""
        return tokens if self.degree == 1 else _all_gather(tokens, self.degree, None)

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention, not causal, of this rank's queries over all ranks' tokens.

        All three and the output are (own tokens, heads, head width): as many tokens on each rank,
        and heads that `ulysses` divides. All ranks must call it. Raises as `attention_part`, for
        math only where `ring` > 1 and `ring_kind` is p2p.
        """
        query, key, value = map(self._to_heads, (query, key, value))
        if self.ring > 1 and self.ring_kind == "p2p":
            parts = (
                attention_part(kernel, *map(_as_batch, (query, one_key, one_value)))
                for one_key, one_value in self._round(key, value)
            )
            out = _from_batch(merge(parts))
        else:
            if self.ring > 1:
                key, value = (_all_gather(one, self.ring, self.ring_group) for one in (key, value))
            out = attend_whole(kernel, query, key, value)
        if self.ulysses == 1:
            return out
        # Back to own tokens, and all heads.
        sent = torch.unflatten(out, 0, (self.ulysses, -1))
        # By the rank that sent it: its heads of this rank's tokens.
        received = _all_to_all(sent, self.ulysses_group).transpose(0, 1)
        return received.reshape(received.shape[0], -1, out.shape[-1])

    def _to_heads(self, own: Tensor) -> Tensor:
        """Return (tokens of the ulysses group, this rank's heads, head); own: as of `attend`."""
        degree = self.ulysses
        if degree == 1:
            return own
        _, heads, size = own.shape
        # By the rank that gets it: a share of the heads.
        sent = torch.unflatten(own, 1, (degree, heads // degree)).transpose(0, 1)
        return _all_to_all(sent, self.ulysses_group).view(-1, heads // degree, size)

    def _round(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of each rank of the ring, this rank's first.

        The next ones are on their way while those given are worked on. All ranks must go through it
        together.
        """
        group = self.ring_group
        # Ranks of a ring are `ulysses` apart.
        following, preceding = ((self.rank + step * self.ulysses) % self.degree for step in (1, -1))
        current = key.contiguous(), value.contiguous()
        for _ in range(self.ring - 1):
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
    """Return the division of a sequence over ulysses * ring ranks; this one is `rank`.

    They must be all ranks of torch's default group, or 1 (then `rank` is 0). All must call it: it
    makes groups where both numbers are above 1.
    """
    world_size = ulysses * ring
    rows = [list(range(first, first + ulysses)) for first in range(0, world_size, ulysses)]
    columns = [list(range(first, world_size, ulysses)) for first in range(ulysses)]
    own: list[ProcessGroup | None] = []
    for groups in (rows, columns):
        # All ranks, whose group is there already, or nobody to communicate with.
        is_needless = len(groups) == 1 or len(groups[0]) == 1
        own.append(None if is_needless else dist.new_subgroups_by_enumeration(groups)[0])  # type: ignore[no-untyped-call]
    return SequenceParallel(
        rank=rank,
        ulysses=ulysses,
        ring=ring,
        ulysses_group=own[0],
        ring_group=own[1],
        ring_kind=ring_kind,
    )


def _all_to_all(sent: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send each rank of the group its part of dimension 0; return the parts for this rank.

    All ranks of the group must call it together; None: all ranks.
    """
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _all_gather(own: Tensor, ranks: int, group: ProcessGroup | None) -> Tensor:
    """Return the tensors of so many ranks of a group, joined along dimension 0.

    All of them must call it together; group None: all ranks.
    """
    gathered = own.new_empty((ranks * len(own), *own.shape[1:]))
    # Torch 2.13 gave it another name and warns of the older one.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own.contiguous(), group=group)
    return gathered


def attend_whole(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention, not causal, of queries over these keys, by this kernel (meta: by math).

    All are (tokens, heads, head width): limits and RuntimeError as of `attention_part`.
    """
    query, key, value = map(_as_batch, (query, key, value))
    if kernel == "math" or query.device.type == "meta":
        with sdpa_kernel(SDPBackend.MATH):
            return _from_batch(functional.scaled_dot_product_attention(query, key, value))
    return _from_batch(attention_part(kernel, query, key, value)[0])


def _as_batch(tokens: Tensor) -> Tensor:
    """Return a view (1, heads, tokens, head), as attention takes it, of (tokens, heads, head)."""
    return tokens.transpose(0, 1).unsqueeze(0)


def _from_batch(out: Tensor) -> Tensor:
    """Return a view (tokens, heads, head) of (1, heads, tokens, head)."""
    return out.squeeze(0).transpose(0, 1)
