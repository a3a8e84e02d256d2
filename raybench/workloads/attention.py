"""Kernels of attention with their log-sum-exp, and attention divided over ranks.

The ranks of a sequence form a grid, ring x ulysses: rank = ring index * ulysses + ulysses index.

* Ulysses: an all_to_all of query, key and value gives each rank some heads of all tokens of its
  group; another all_to_all returns the output.
* Ring: keys and values travel round the ring, and the partial outputs are merged by their
  log-sum-exp; or keys and values are gathered at once. The order of keys has no effect, because
  attention is not causal.
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
# The output of attention over some of the keys, and the log-sum-exp by which `merge` weighs it.
PartialOutput: TypeAlias = tuple[Tensor, Tensor]


def choose_kernel(setting: KernelOrAuto, tokens: Tensor) -> Kernel:
    """Return the kernel of the setting `attention`; for auto the kernel that torch chooses.

    Args:
        tokens: example of query, key and value, (1, heads, tokens, head width); its values do not
            matter.

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
    """Make torch's attention use this kernel in this process from now on; auto leaves the choice.

    Functions that were compiled earlier keep their kernel. Attention raises RuntimeError if the
    kernel does not support its inputs.

    Raises:
        UsageError: efficient or cudnn on a CPU.
    """
    if device.type == "meta":
        return
    switches, names = torch.backends.cuda, ("flash", "mem_efficient", "cudnn", "math")
    if setting != "auto":
        _check_device(setting, device)
        for name in names:
            enable = getattr(switches, f"enable_{name}_sdp")
            enable(name.removeprefix("mem_") == setting)
    # Add the kernels to the key of torch.compile's cache on disk. Otherwise torch.compile loads
    # code that was compiled for another kernel (pytorch#185449).
    enabled = [name for name in names if getattr(switches, f"{name}_sdp_enabled")()]
    torch.compiler.config.cache_key_tag = f"{enabled} of {torch._C._get_sdp_priority_order()}"


def _check_device(kernel: Kernel, device: torch.device) -> None:
    if device.type == "cpu" and kernel in ("efficient", "cudnn"):
        raise UsageError(f"attention {kernel} is for CUDA devices; on a CPU take flash or math")


def attend_with_logsumexp(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor
) -> PartialOutput:
    """Return output and log-sum-exp of attention by this kernel, not causal.

    Args:
        query: (1, heads, queries, head width). No tensor may be empty: a kernel may kill the
            process.
        key: (1, heads, keys, head width), like `value`.

    Returns:
        The output, with the shape of `query`, and the natural log-sum-exp of each query, (1, heads,
            queries), in fp32 or wider, without gradient.

    Raises:
        UsageError: kernel math, which gives no log-sum-exp.
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


def merge(partial_outputs: Iterable[PartialOutput]) -> Tensor:
    """Return the output of attention over all keys, in the type of the partial outputs.

    The sum is in fp32 or wider. Not for training: the log-sum-exp has no gradient.

    Args:
        partial_outputs: at least one, for the same queries and different keys.
    """
    remaining = iter(partial_outputs)
    first_output, logsumexp = next(remaining)
    dtype = first_output.dtype
    merged = first_output.to(torch.promote_types(dtype, torch.float32))
    for output, output_logsumexp in remaining:
        # The weight of the new output: exp(new) / (exp(old) + exp(new)).
        weight = torch.sigmoid(output_logsumexp - logsumexp).unsqueeze(-1)
        merged = torch.lerp(merged, output.to(merged.dtype), weight.to(merged.dtype))
        logsumexp = torch.logaddexp(logsumexp, output_logsumexp)
    return merged.to(dtype)


RingKind = Literal["p2p", "allgather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel:
    """How a sequence is divided over ranks, and the groups in which they communicate.

    Gradients do not pass between ranks.
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
        """Return a view of this rank's part of all tokens; `degree` must divide dimension 0."""
        return tokens.chunk(self.degree)[self.rank]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks in order along dimension 0. Collective."""
        return tokens if self.degree == 1 else _all_gather(tokens, self.degree, None)

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention, not causal, of this rank's queries over all ranks' tokens. Collective.

        Query, key, value and output are (tokens of this rank, heads, head width), with the same
        number of tokens on each rank; `ulysses` must divide the heads.

        Raises:
            UsageError: kernel math in a ring with p2p.
            RuntimeError: the kernel lacks this type, head width or device.
        """
        query, key, value = map(self._scatter_heads, (query, key, value))
        if self.ring > 1 and self.ring_kind == "p2p":
            partial_outputs = (
                attend_with_logsumexp(kernel, *map(_as_batch, (query, ring_key, ring_value)))
                for ring_key, ring_value in self._ring_keys(key, value)
            )
            out = _from_batch(merge(partial_outputs))
        else:
            if self.ring > 1:
                key = _all_gather(key, self.ring, self.ring_group)
                value = _all_gather(value, self.ring, self.ring_group)
            out = attend_whole(kernel, query, key, value)
        return self._gather_heads(out)

    def _scatter_heads(self, tokens: Tensor) -> Tensor:
        """Exchange all heads of this rank's tokens for some heads of the ulysses group's tokens."""
        degree = self.ulysses
        if degree == 1:
            return tokens
        _, heads, head_width = tokens.shape
        # Dimension 0 is the receiver, which gets some of the heads.
        sent = torch.unflatten(tokens, 1, (degree, heads // degree)).transpose(0, 1)
        return _all_to_all(sent, self.ulysses_group).view(-1, heads // degree, head_width)

    def _gather_heads(self, tokens: Tensor) -> Tensor:
        """Exchange some heads of the ulysses group's tokens for all heads of this rank's tokens."""
        if self.ulysses == 1:
            return tokens
        # Dimension 0 is the receiver, and after the exchange the sender.
        sent = torch.unflatten(tokens, 0, (self.ulysses, -1))
        received = _all_to_all(sent, self.ulysses_group).transpose(0, 1)
        return received.reshape(received.shape[0], -1, tokens.shape[-1])

    def _ring_keys(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of each rank of the ring, this rank's first. Collective."""
        group = self.ring_group
        # Neighbours in a ring are `ulysses` ranks apart.
        next_rank = (self.rank + self.ulysses) % self.degree
        previous_rank = (self.rank - self.ulysses) % self.degree
        current = key.contiguous(), value.contiguous()
        for _ in range(self.ring - 1):
            arriving = torch.empty_like(current[0]), torch.empty_like(current[1])
            sends = [dist.P2POp(dist.isend, tensor, next_rank, group) for tensor in current]
            receives = [dist.P2POp(dist.irecv, tensor, previous_rank, group) for tensor in arriving]
            works = dist.batch_isend_irecv([*sends, *receives])
            # The caller computes with `current` while `arriving` is received.
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
    # Consecutive ranks form a ulysses group. The ranks of a ring are `ulysses` ranks apart.
    ulysses_groups = [
        list(range(first, first + ulysses)) for first in range(0, world_size, ulysses)
    ]
    ring_groups = [list(range(first, world_size, ulysses)) for first in range(ulysses)]
    return SequenceParallel(
        rank=rank,
        ulysses=ulysses,
        ring=ring,
        ulysses_group=_form_local_group(ulysses_groups),
        ring_group=_form_local_group(ring_groups),
        ring_kind=ring_kind,
    )


def _form_local_group(groups: list[list[int]]) -> ProcessGroup | None:
    """Form these groups and return this rank's; None for one rank or all ranks. Collective."""
    if len(groups) == 1 or len(groups[0]) == 1:
        return None
    group: ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    return group


def _all_to_all(sent: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send each rank its part of dimension 0; return the parts for this rank. Collective."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _all_gather(part: Tensor, ranks: int, group: ProcessGroup | None) -> Tensor:
    """Return the tensors of all ranks of a group, joined along dimension 0. Collective."""
    gathered = part.new_empty((ranks * len(part), *part.shape[1:]))
    # torch 2.13 renamed this function and warns about the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, part.contiguous(), group=group)
    return gathered


def attend_whole(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention, not causal, by this kernel; on meta by kernel math.

    All tensors are (tokens, heads, head width).

    Raises:
        RuntimeError: the kernel lacks this type, head width or device.
    """
    query, key, value = map(_as_batch, (query, key, value))
    if kernel == "math" or query.device.type == "meta":
        with sdpa_kernel(SDPBackend.MATH):
            return _from_batch(functional.scaled_dot_product_attention(query, key, value))
    output, _ = attend_with_logsumexp(kernel, query, key, value)
    return _from_batch(output)


def _as_batch(tokens: Tensor) -> Tensor:
    """Return a view (1, heads, tokens, head width) of (tokens, heads, head width)."""
    return tokens.transpose(0, 1).unsqueeze(0)


def _from_batch(out: Tensor) -> Tensor:
    """Return a view (tokens, heads, head width) of (1, heads, tokens, head width)."""
    return out.squeeze(0).transpose(0, 1)
