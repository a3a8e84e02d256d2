"""The workload `launch`: a kernel so small that its launch is all there is to time."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.workloads.base import Context, Workload, WrongResultError


class Launch(Workload):
    """Adds 1 to one number on each device: what the launch of a kernel costs.

    wait: false: launches queue up, and a step is the time between two of them. wait: true: each
    step waits for its result, and is the time from a launch until the host knows it is done. With
    world_size > 1 each device does so at the same time, without communication.
    """

    takes_batch_size = False
    answers = (Answer(metric="step_ms_p50", best="min"),)

    def __init__(
        self,
        context: Context,
        *,
        wait: Annotated[bool, Field(description="Wait for the result in every step.")] = False,
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        import torch

        if wait and context.cuda_graph:
            raise UsageError(
                "workload launch: wait: true cannot be had with cuda_graph: true, whose steps may "
                "not wait for the device; leave one of them out"
            )
        self.number = torch.zeros(1, dtype=torch.int64, device=context.device)
        self._wait = torch.cuda.synchronize if wait and context.device.type == "cuda" else None
        self._rank = context.rank
        self._counts = not context.cuda_graph
        self._steps = 0

    def step(self) -> None:
        """Launch once."""
        self.number.add_(1)
        self._steps += 1
        if self._wait is not None:
            self._wait()

    def check(self) -> None:
        """Compare the number with the count of the steps. Raises WrongResultError."""
        found = int(self.number)
        # Of steps that are replayed from a graph the host knows nothing.
        if self._counts and found != self._steps:
            raise WrongResultError(
                f"rank {self._rank}: {self._steps} additions of 1 came to {found}"
            )
