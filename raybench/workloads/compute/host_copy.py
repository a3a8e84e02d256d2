"""The workload `host_copy`: copies between the host's memory and each device's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from raybench.job.answer import Answer
from raybench.workloads.base import Context, Workload, WrongResultError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Direction = Literal["h2d", "d2h", "both"]


class HostCopy(Workload):
    """Copies to the device, from it, or both ways at once: bandwidth of the link to the host.

    Counted are the bytes that cross the link; both ways are twice size_bytes. On a CPU worker,
    which has no such link, it copies within the host's memory.
    """

    takes_batch_size = False
    answers = (Answer(metric="memory_gb_s"),)

    def __init__(
        self,
        context: Context,
        *,
        direction: Annotated[
            Direction, Field(description="h2d: to the device. d2h: from it. both: at once.")
        ] = "h2d",
        size_bytes: Annotated[int, Field(gt=0, multiple_of=8, description="Bytes of one copy.")] = 2
        ** 29,
        pinned: Annotated[
            bool, Field(description="Host memory that the device reads by itself.")
        ] = True,
        local_rank: Annotated[
            int | None,
            Field(ge=0, description="The one of each node that copies; none: all at once."),
        ] = None,
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        import torch

        self._copies: list[tuple[Tensor, Tensor]] = []
        self._rank, self._direction = context.rank, direction
        self._run: Callable[[], object] = lambda: None
        ways = ("h2d", "d2h") if direction == "both" else (direction,)
        self.memory_bytes = 0
        if local_rank not in (None, context.local_rank):
            return
        self.memory_bytes = len(ways) * size_bytes
        on_gpu = context.device.type == "cuda"
        host = "cpu" if on_gpu else context.device
        for way in ways:
            at_host = torch.empty(
                size_bytes // 8, dtype=torch.int64, device=host, pin_memory=pinned and on_gpu
            )
            at_device = torch.empty_like(at_host, device=context.device, pin_memory=False)
            source, target = (at_host, at_device) if way == "h2d" else (at_device, at_host)
            source.copy_(torch.arange(len(source), device=source.device))
            self._copies.append((source, target))
        self._spoil()
        self._run = _copying(self._copies, context)

    def step(self) -> None:
        """Issue the copies once."""
        self._run()

    def check(self) -> None:
        """Compare what arrived with what was sent; then make it wrong for the next check.

        Raises WrongResultError.
        """
        import torch

        for source, target in self._copies:
            if not torch.equal(target.to(source.device), source):
                raise WrongResultError(
                    f"rank {self._rank}: a copy between host and device ({self._direction}) "
                    "arrived with other bytes than were sent"
                )
        self._spoil()

    def _spoil(self) -> None:
        for _, target in self._copies:
            target.fill_(-1)


def _copying(copies: list[tuple[Tensor, Tensor]], context: Context) -> Callable[[], None]:
    """Return what issues the copies; the current stream waits for all of them."""
    import torch

    first, *others = copies

    def one() -> None:
        first[1].copy_(first[0], non_blocking=True)

    if not others or context.device.type != "cuda":

        def in_turn() -> None:
            for source, target in copies:
                target.copy_(source, non_blocking=True)

        return in_turn if others else one

    side = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]

    def both() -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        one()
        with torch.cuda.stream(side):
            for source, target in others:
                target.copy_(source, non_blocking=True)
        current.wait_stream(side)

    return both
