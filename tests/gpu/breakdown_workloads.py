"""An mlp that is slowed on one rank, on the device itself."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.mlp import Mlp

_CALIBRATION_CYCLES = 20_000_000


class SlowedMlp(Mlp):
    """An mlp; on `slow_rank` the device spins for `delay_ms` before each step."""

    def __init__(
        self,
        context: Context,
        *,
        slow_rank: Annotated[int, Field(ge=0)] = 1,
        delay_ms: Annotated[float, Field(ge=0)] = 0.0,
        hidden: Annotated[int, Field(gt=0)] = 2048,
        layers: Annotated[int, Field(gt=0)] = 8,
    ) -> None:
        super().__init__(context, hidden=hidden, layers=layers)
        is_slow = context.rank == slow_rank and delay_ms > 0
        self._cycles = round(delay_ms * _cycles_per_ms()) if is_slow else 0

    def step(self) -> None:
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        super().step()


def _cycles_per_ms() -> float:
    # The first two bring the clock up.
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        end.record()
        torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / start.elapsed_time(end)
