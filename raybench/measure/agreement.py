"""How the ranks agree between blocks, outside the timed region.

Without a process group the only rank agrees with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def slowest_rank_ns(step_ns: Sequence[int], device: torch.device) -> list[int]:
    """For each iteration of a block the longest duration over the ranks, known to all of them."""
    if not dist.is_initialized():
        return list(step_ns)
    durations = torch.tensor(step_ns, dtype=torch.int64, device=device)
    dist.all_reduce(durations, op=dist.ReduceOp.MAX)
    longest: list[int] = durations.tolist()
    return longest


def as_rank_0_says(decide: Callable[[], int], device: torch.device) -> int:
    """What `decide` gives on rank 0; on other ranks it is not called."""
    if not dist.is_initialized():
        return decide()
    decision = decide() if dist.get_rank() == 0 else 0
    told = torch.tensor([decision], dtype=torch.int64, device=device)
    dist.broadcast(told, src=0)
    return int(told.item())
