"""Which uneven steps are possible."""

from __future__ import annotations

from raybench.job.point import BY_ACCUMULATION, FAST, Point


def why_not_uneven(point: Point) -> str | None:
    """Return why an uneven point is impossible, or None if it is possible."""
    if point.cuda_graph:
        return "cuda_graph: true does not go with shares and slow_ratio; leave it out"
    if point.shares == FAST and point.slow_ratio < 1 and point.slow_count >= point.world_size:
        return f"shares: fast leaves no device when slow_count {point.slow_count} are all"
    if point.shares == BY_ACCUMULATION and "grad_accumulation" not in point.params:
        return f"shares: {BY_ACCUMULATION} needs a workload with the parameter grad_accumulation"
    if "/" not in point.shares:
        # A named share such as fast; a text such as 96/32 lists the samples of each rank.
        return None
    shares = [int(items) for items in point.shares.split("/")]
    if len(shares) != point.world_size:
        return f"shares: {point.shares} are {len(shares)}, world_size is {point.world_size}"
    if sum(shares) != point.global_batch_size:
        return (
            f"shares: {point.shares} are {sum(shares)} samples together, a step has "
            f"{point.global_batch_size}"
        )
    if any(items % point.grad_accumulation for items in shares):
        return f"shares: {point.shares} cannot be divided by grad_accumulation"
    return None
