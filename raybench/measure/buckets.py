"""Communication of DistributedDataParallel, bucket by bucket: when each was ready and reduced.

Without `from __future__ import annotations`: DDP compares a hook's annotations with its classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from raybench.measure.marks import Mark, marker, milliseconds

# When a bucket was ready and when it was reduced.
Interval = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """ready: the gradients of the bucket are there. reduced: its collective is complete."""

    ready: Mark
    work: dist.Work
    reduced: Mark | None = None


class BucketMarks:
    """A communication hook that averages gradients as DDP does by itself, and takes the time."""

    def __init__(self, device: torch.device) -> None:
        self._mark = marker(device)
        self._steps: list[list[_Bucket]] = [[]]

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """To be registered with DDP; one call per bucket."""
        gradients = bucket.buffer()
        # Before the sum, which could overflow.
        gradients.div_(dist.get_world_size())
        ready = self._mark()
        work = dist.all_reduce(gradients, async_op=True)
        assert work is not None
        timed = _Bucket(ready=ready, work=work)
        self._steps[-1].append(timed)

        def reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            # On a GPU this runs on a stream that waits for the collective, before it is done.
            timed.reduced = self._mark()
            return future.value()[0]

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(reduced)
        return future

    def end_step(self) -> None:
        """Begin the next step."""
        self._steps.append([])

    def take(self) -> tuple[tuple[Interval, ...], ...]:
        """Take the buckets of each step that has ended, in the order of their collectives,
        in ms since the first of the step was ready. The steps must be complete.
        """
        steps, self._steps = self._steps[:-1], self._steps[-1:]
        return tuple(_intervals(buckets) for buckets in steps)


def _intervals(buckets: Sequence[_Bucket]) -> tuple[Interval, ...]:
    intervals = []
    for bucket in buckets:
        # NCCL's process group keeps the gradients of a collective that nobody has waited for.
        bucket.work.wait()
        # DDP itself waits for what follows the mark.
        assert bucket.reduced is not None, "a step returned before its gradients were reduced"
        ready_ms = milliseconds(buckets[0].ready, bucket.ready)
        intervals.append((ready_ms, milliseconds(buckets[0].ready, bucket.reduced)))
    return tuple(intervals)


def comm_ms(buckets: Sequence[Interval]) -> float:
    """Time in collectives. They run one after the other: while a bucket that is ready waits for
    the one before it, the time is that one's.

    Sum over buckets of reduced - max(ready, reduced of the bucket before).
    """
    free_ms, total_ms = float("-inf"), 0.0
    for ready_ms, reduced_ms in buckets:
        total_ms += max(0.0, reduced_ms - max(ready_ms, free_ms))
        free_ms = max(free_ms, reduced_ms)
    return total_ms


def tail_ms(buckets: Sequence[Interval]) -> float:
    """From the last gradient being ready to the end of the last collective: meanwhile the rank
    has nothing left to compute but the optimizer's step, which needs the result.
    """
    return max(reduced for _, reduced in buckets) - max(ready for ready, _ in buckets)
