"""How the ranks agree between blocks, outside the timed region.

Without a process group the only rank agrees with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def slowest_rank_ns(step_ns: Sequence[int], device: torch.device) -> list[int]:
    """For each iteration of a block the longest duration over the ranks, known to all of them."""
    return _largest(step_ns, device)


def all_ranks_ns(step_ns: Sequence[int], device: torch.device) -> list[list[int]]:
    """Gather the durations of a block, ranks x iterations, so that all ranks know them."""
    if not dist.is_initialized():
        return [list(step_ns)]
    own = torch.tensor(step_ns, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [ns.tolist() for ns in gathered]


def as_rank_0_says(decide: Callable[[], int], device: torch.device) -> int:
    """Return what `decide` gives on rank 0; on other ranks it is not called."""
    if not dist.is_initialized():
        return decide()
    decision = decide() if dist.get_rank() == 0 else 0
    told = torch.tensor([decision], dtype=torch.int64, device=device)
    dist.broadcast(told, src=0)
    return int(told.item())


def on_any_rank(is_so: bool, device: torch.device) -> bool:
    """Whether it is so on at least one rank."""
    return bool(_largest([int(is_so)], device)[0])


def _largest(values: Sequence[int], device: torch.device) -> list[int]:
    """At each position the largest value over the ranks."""
    if not dist.is_initialized():
        return list(values)
    told = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    largest: list[int] = told.tolist()
    return largest
