"""Kernels of attention with their log-sum-exp, and attention divided over ranks.

The ranks of a sequence form a grid, ring x ulysses: rank = ring index * ulysses + ulysses index.
Attention does not depend on the order of the tokens, so no rank must know whose tokens it sees.

* Ulysses: an all_to_all of query, key and value gives each rank some heads of all tokens of its
  group; another all_to_all returns the output.
* Ring: keys and values travel round the ring, and the partial outputs are merged by their
  log-sum-exp; or keys and values are gathered at once.
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
# The output of attention over some of the keys, and the log-sum-exp by which parts are merged.
Part: TypeAlias = tuple[Tensor, Tensor]


def choose_kernel(setting: KernelOrAuto, tokens: Tensor) -> Kernel:
    """Return the kernel of the setting; for auto the kernel that torch chooses.

    Args:
        setting: the setting `attention` of the job.
        tokens: example of query, key and value, (1, heads, tokens, head width); its values are
            ignored.

    Raises:
        UsageError: efficient or cudnn on a CPU.
        RuntimeError: torch finds no kernel for auto.
    """
    if setting == "auto":
        choice = SDPBackend(torch._fused_sdp_choice(tokens, tokens, tokens))
        return cast("Kernel", choice.name.lower().removesuffix("_attention"))
    _check_device(setting, tokens.device)
    return setting


def use_kernel(setting: KernelOrAuto, device: torch.device) -> None:
    """Make torch's attention use this kernel in this process from now on; auto changes nothing.

    Functions that were compiled earlier keep their kernel. Attention raises RuntimeError later if
    the kernel cannot compute it.

    Raises:
        UsageError: efficient or cudnn on a CPU.
    """
    if device.type == "meta":
        return
    switches, names = torch.backends.cuda, ("flash", "mem_efficient", "cudnn", "math")
    if setting != "auto":
        _check_device(setting, device)
        for name in names:
            getattr(switches, f"enable_{name}_sdp")(name.removeprefix("mem_") == setting)
    # Make the kernels part of the key of compiled code. Otherwise torch.compile loads code that was
    # compiled for another kernel from its cache on disk (pytorch#185449).
    enabled = [name for name in names if getattr(switches, f"{name}_sdp_enabled")()]
    torch.compiler.config.cache_key_tag = f"{enabled} of {torch._C._get_sdp_priority_order()}"


def _check_device(kernel: Kernel, device: torch.device) -> None:
    if device.type == "cpu" and kernel in ("efficient", "cudnn"):
        raise UsageError(f"attention {kernel} is for CUDA devices; on a CPU take flash or math")


def attention_part(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Part:
    """Return (output, log-sum-exp) of attention by this kernel, not causal.

    Args:
        kernel: a kernel with log-sum-exp, so not math.
        query: (1, heads, queries, head width). No tensor may be empty: a kernel may kill the
            process.
        key: (1, heads, keys, head width).
        value: like `key`.

    Returns:
        The output, with the shape of `query`, and the natural log-sum-exp of each query, (1, heads,
            queries), in fp32 (fp64 for fp64) and without gradient.

    Raises:
        UsageError: kernel math.
        RuntimeError: the kernel lacks this type, head width or device.
    """
    aten: Any = torch.ops.aten
    if kernel == "flash":
        name = "flash_attention_for_cpu" if query.device.type == "cpu" else "flash_attention"
        results = getattr(aten, f"_scaled_dot_product_{name}")(query, key, value)
        return results[0], results[1]
    if kernel == "efficient":
        results = aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
        # The kernel pads the queries to a multiple of 32.
        return results[0], results[1][..., : query.shape[2]]
    if kernel == "cudnn":
        if query.dtype not in (torch.float16, torch.bfloat16):  # cuDNN would read them as fp16
            raise RuntimeError(f"attention cudnn computes fp16 and bf16, given {query.dtype}")
        results = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
        return results[0], results[1].reshape(query.shape[:3])
    raise UsageError(f"attention {kernel} gives no log-sum-exp to merge parts by; take flash")


def merge(parts: Iterable[Part]) -> Tensor:
    """Return the output of attention over all keys, in the type of the parts.

    The sum is in fp32 or wider. Not for training: the log-sum-exp has no gradient.

    Args:
        parts: at least one result of `attention_part`, for the same queries and different keys.
    """
    later_parts = iter(parts)
    first, logsumexp = next(later_parts)
    dtype = first.dtype
    merged = first.to(torch.promote_types(dtype, torch.float32))
    for part, part_logsumexp in later_parts:
        # The new part's share of the sum of both: exp(b) / (exp(a) + exp(b)).
        share = torch.sigmoid(part_logsumexp - logsumexp).unsqueeze(-1)
        merged = torch.lerp(merged, part.to(merged.dtype), share.to(merged.dtype))
        logsumexp = torch.logaddexp(logsumexp, part_logsumexp)
    return merged.to(dtype)


RingKind = Literal["p2p", "allgather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel:
    """How a sequence is divided over ranks, and the groups in which they communicate.

    No gradients pass between ranks.
    """

    rank: int
    # Numbers of ranks in the two groups of this rank.
    ulysses: int
    ring: int
    # None for torch's default group, and for a group of one rank.
    ulysses_group: ProcessGroup | None
    ring_group: ProcessGroup | None
    # Whether keys and values travel round the ring (p2p) or are gathered.
    ring_kind: RingKind

    @property
    def degree(self) -> int:
        """The number of ranks over which the sequence is divided."""
        return self.ulysses * self.ring

    def shard(self, tokens: Tensor) -> Tensor:
        """Return a view of this rank's part of the tokens; `degree` must divide dimension 0."""
        return tokens.chunk(self.degree)[self.rank]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks in order along dimension 0. Collective."""
        return tokens if self.degree == 1 else _all_gather(tokens, self.degree, None)

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention, not causal, of this rank's queries over all ranks' tokens. Collective.

        Query, key, value and output are (tokens of this rank, heads, head width), with the same
        number of tokens on each rank; `ulysses` must divide the heads. Raises like
        `attention_part`, but kernel math raises only for a ring with p2p.
        """
        query, key, value = map(self._to_heads, (query, key, value))
        if self.ring > 1 and self.ring_kind == "p2p":
            parts = (
                attention_part(kernel, *map(_as_batch, (query, ring_key, ring_value)))
                for ring_key, ring_value in self._round(key, value)
            )
            out = _from_batch(merge(parts))
        else:
            if self.ring > 1:
                key = _all_gather(key, self.ring, self.ring_group)
                value = _all_gather(value, self.ring, self.ring_group)
            out = attend_whole(kernel, query, key, value)
        if self.ulysses == 1:
            return out
        # Exchange some heads of all tokens for all heads of this rank's tokens.
        sent = torch.unflatten(out, 0, (self.ulysses, -1))
        # Dimension 0 is the sender.
        received = _all_to_all(sent, self.ulysses_group).transpose(0, 1)
        return received.reshape(received.shape[0], -1, out.shape[-1])

    def _to_heads(self, tokens: Tensor) -> Tensor:
        """Exchange all heads of this rank's tokens for some heads of the ulysses group's tokens."""
        degree = self.ulysses
        if degree == 1:
            return tokens
        _, heads, size = tokens.shape
        # Dimension 0 is the receiver, which gets some of the heads.
        sent = torch.unflatten(tokens, 1, (degree, heads // degree)).transpose(0, 1)
        return _all_to_all(sent, self.ulysses_group).view(-1, heads // degree, size)

    def _round(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of each rank of the ring, this rank's first. Collective.

        The next keys and values are sent while the caller uses the current ones.
        """
        group = self.ring_group
        # Ranks of a ring are `ulysses` apart.
        following, preceding = ((self.rank + step * self.ulysses) % self.degree for step in (1, -1))
        current = key.contiguous(), value.contiguous()
        for _ in range(self.ring - 1):
            arriving = torch.empty_like(current[0]), torch.empty_like(current[1])
            sends = [dist.P2POp(dist.isend, tensor, following, group) for tensor in current]
            receives = [dist.P2POp(dist.irecv, tensor, preceding, group) for tensor in arriving]
            works = dist.batch_isend_irecv([*sends, *receives])
            yield current
            for work in works:
                work.wait()
            current = arriving
        yield current


def form_groups(
    rank: int, *, ulysses: int, ring: int, ring_kind: RingKind = "p2p"
) -> SequenceParallel:
    """Divide a sequence over ulysses * ring ranks. Collective.

    The ranks must be all ranks of torch's default group, or a single rank 0.
    """
    world_size = ulysses * ring
    rows = [list(range(first, first + ulysses)) for first in range(0, world_size, ulysses)]
    columns = [list(range(first, world_size, ulysses)) for first in range(ulysses)]
    local_groups: list[ProcessGroup | None] = []
    for groups in (rows, columns):
        # All ranks have the default group, and a single rank needs no group.
        is_needless = len(groups) == 1 or len(groups[0]) == 1
        local_groups.append(None if is_needless else dist.new_subgroups_by_enumeration(groups)[0])  # type: ignore[no-untyped-call]
    return SequenceParallel(
        rank=rank,
        ulysses=ulysses,
        ring=ring,
        ulysses_group=local_groups[0],
        ring_group=local_groups[1],
        ring_kind=ring_kind,
    )


def _all_to_all(sent: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send each rank its part of dimension 0; return the parts for this rank. Collective."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _all_gather(part: Tensor, ranks: int, group: ProcessGroup | None) -> Tensor:
    """Return the tensors of the ranks of a group, joined along dimension 0. Collective."""
    gathered = part.new_empty((ranks * len(part), *part.shape[1:]))
    # torch 2.13 renamed this function and warns about the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, part.contiguous(), group=group)
    return gathered


def attend_whole(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention, not causal, by this kernel; on meta by kernel math.

    All tensors are (tokens, heads, head width). Raises RuntimeError like `attention_part`.
    """
    query, key, value = map(_as_batch, (query, key, value))
    if kernel == "math" or query.device.type == "meta":
        with sdpa_kernel(SDPBackend.MATH):
            return _from_batch(functional.scaled_dot_product_attention(query, key, value))
    return _from_batch(attention_part(kernel, query, key, value)[0])


def _as_batch(tokens: Tensor) -> Tensor:
    """Return a view (1, heads, tokens, head width) of (tokens, heads, head width)."""
    return tokens.transpose(0, 1).unsqueeze(0)


def _from_batch(out: Tensor) -> Tensor:
    """Return a view (tokens, heads, head width) of (1, heads, tokens, head width)."""
    return out.squeeze(0).transpose(0, 1)
