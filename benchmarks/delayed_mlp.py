"""An mlp of which one rank is delayed in each step, on the device or on the host."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from pydantic import Field

from raybench.workloads.base import Context
from raybench.workloads.mlp import Mlp

_CALIBRATION_CYCLES = 20_000_000


class DelayedMlp(Mlp):
    """An mlp; `delayed_rank` loses `delay_ms` before each step. `trial` tells repetitions apart."""

    def __init__(
        self,
        context: Context,
        *,
        hidden: Annotated[int, Field(gt=0)] = 256,
        layers: Annotated[int, Field(gt=0)] = 4,
        where: Literal["nowhere", "device", "host"] = "nowhere",
        delayed_rank: Annotated[int, Field(ge=0)] = 0,
        delay_ms: Annotated[float, Field(ge=0)] = 0.0,
        trial: int = 0,
    ) -> None:
        super().__init__(context, hidden=hidden, layers=layers)
        is_delayed = context.rank == delayed_rank and where != "nowhere"
        on_gpu = context.device.type == "cuda"
        self._host_s = delay_ms / 1e3 if is_delayed and where == "host" else 0.0
        self._device_s = delay_ms / 1e3 if is_delayed and where == "device" and not on_gpu else 0.0
        self._cycles = 0
        if is_delayed and where == "device" and on_gpu:
            self._cycles = round(delay_ms * _cycles_per_ms())

    def step(self) -> None:
        if self._host_s:
            time.sleep(self._host_s)
        if self._cycles:
            import torch

            torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        # A CPU's own work.
        end_s = time.perf_counter() + self._device_s
        while time.perf_counter() < end_s:
            pass
        super().step()


def _cycles_per_ms() -> float:
    """How far the clock of torch's spin kernel counts in a millisecond."""
    import torch

    # The first two bring the clock up.
    for _ in range(3):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
        end.record()
        torch.cuda.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return _CALIBRATION_CYCLES / elapsed_ms
