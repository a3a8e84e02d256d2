"""Workloads that declare, name and raise what none should. By class name, for a table of tests."""

import time
from typing import Any

import numpy as np

from raybench.workloads.base import Context


class Quick:
    """A step of no work, of which nothing has to be counted."""

    items_per_step: Any = 1
    flops_per_step: Any = 1.0

    def __init__(self, context: Context) -> None:
        self._context = context

    def step(self) -> None:
        time.sleep(0.001)


# By class: what it says of its step.
SIZES: dict[str, dict[str, Any]] = {
    "ManyFlops": {"flops_per_step": 6 * 70_000_000_000 * 32_769},
    "NumpySizes": {"items_per_step": np.int64(4), "flops_per_step": np.float32(8.0)},
    "Googols": {"items_per_step": 10**400},
    "TooManyDigits": {"items_per_step": 10**5000},
    "HugeFlops": {"flops_per_step": 1e308},
    "EndlessItems": {"items_per_step": float("inf")},
    "NoNumber": {"flops_per_step": float("nan")},
    "NegativeItems": {"items_per_step": -1},
    "Textual": {"items_per_step": "4"},
}
globals().update({name: type(name, (Quick,), sizes) for name, sizes in SIZES.items()})


class HalfPart(Quick):
    """Half a surrogate pair in the name of a part."""

    def step(self) -> None:
        with self._context.parts.part("x\ud800"):
            super().step()


class NumberedPart(Quick):
    def step(self) -> None:
        with self._context.parts.part(5):  # type: ignore[arg-type]
            super().step()


class HalfParameter(Quick):
    def __init__(self, context: Context, *, text: str = "") -> None:
        super().__init__(context)


class StoppedClock(Quick):
    """Replaces the clock while it runs, as libraries that freeze the time do."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._clock = time.perf_counter_ns
        time.perf_counter_ns = lambda: 0

    def close(self) -> None:
        time.perf_counter_ns = self._clock


class HalfText(Quick):
    def step(self) -> None:
        raise ValueError("bad \ud800 text")
