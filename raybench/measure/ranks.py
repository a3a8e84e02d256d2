"""Values that all ranks of the process group agree on, exchanged between timed blocks.

Every function here is a collective: all ranks must call it, in the same order. Without a process
group the only rank gets its own value back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def align_ranks(device: torch.device) -> None:
    """Wait until all ranks have come here, and on a GPU until the work queued before is done."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def broadcast_from_rank_0(decide: Callable[[], int], device: torch.device) -> int:
    """Return the result of `decide` on rank 0; other ranks do not call it."""
    if not dist.is_initialized():
        return decide()
    decision = decide() if dist.get_rank() == 0 else 0
    shared = torch.tensor([decision], dtype=torch.int64, device=device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def any_rank(condition: bool, device: torch.device) -> bool:
    """Return True on all ranks where the condition is true on at least one of them."""
    return bool(max_over_ranks([int(condition)], device)[0])


def min_over_ranks(value: int, device: torch.device) -> int:
    """Return the smallest value over the ranks."""
    return -max_over_ranks([-value], device)[0]


def max_over_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """Return at each position the largest value over the ranks; all give equally many values."""
    if not dist.is_initialized():
        return list(values)
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    largest: list[int] = shared.tolist()
    return largest


def gather_durations(step_ns: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the durations of a block on each rank, in rank order; equally many on each."""
    if not dist.is_initialized():
        return [list(step_ns)]
    own = torch.tensor(step_ns, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [ns.tolist() for ns in gathered]


def gather_objects(value: Any) -> list[Any]:
    """Return the value of each rank, in rank order; the value is pickled."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
