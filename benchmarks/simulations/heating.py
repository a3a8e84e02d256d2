"""How far heating biases step times, and what `measure.heat_s` does about it.

    python -m benchmarks.simulations.heating [--runs 20]

A made-up device takes 3 % longer for a step when it is hot. It heats up under steps and cools down
between points with the same time constant. Six points of equal steps run in three rounds under the
real `measure`. The device is idle for 0.6 s between two points and for 6 s between two rounds. The
first point is heated as a sweep does it. Time is made up. The true step is that of the hot device.

first: bias of the first point of the run. all: mean bias of all points. spread: largest difference
between the means over the rounds of two points, which are equal.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from unittest import mock

import numpy as np
import pandas as pd
import torch

from benchmarks.common import options
from raybench.job.model import Measure
from raybench.measure import instruments, phases
from raybench.workloads.base import Context, Workload

TIME_CONSTANTS_S = (10.0, 30.0)
STEPS_S = (5e-3, 50e-3, 0.3)
HEAT_S = (0.0, 30.0, 100.0)
POINTS, ROUNDS = 6, 3
# Set-up of a small point, and the start of fresh workers.
IDLE_S, BETWEEN_ROUNDS_S = 0.6, 6.0
SLOWER, NOISE = 0.03, 0.003
CONTEXT = Context(
    device=torch.device("cpu"), rank=0, world_size=1, local_rank=0, batch_size=1, seed=0
)


class Device(Workload):
    """Takes time on its own clock, longer when it is hot. heat: 0 is cold, 1 is hot."""

    items_per_step = 1

    def __init__(self, step_s: float, time_constant_s: float, rng: np.random.Generator) -> None:
        self.now_s, self._heat = 1.0, 0.0
        self._step_s, self._time_constant_s, self._rng = step_s, time_constant_s, rng

    def step(self) -> None:
        """Pass the time of a step under load."""
        noise = 1 + NOISE * self._rng.standard_normal()
        step_s = self._step_s * (1 + SLOWER * self._heat) * noise
        self._pass_time(step_s, 1.0)

    def rest(self, seconds: float) -> None:
        """Pass time without load."""
        self._pass_time(seconds, 0.0)

    def now(self) -> float:
        """Return the time in s."""
        return self.now_s

    def now_ns(self) -> int:
        """Return the time in ns."""
        return round(1e9 * self.now_s)

    def _pass_time(self, seconds: float, load: float) -> None:
        self.now_s += seconds
        self._heat = load + (self._heat - load) * math.exp(-seconds / self._time_constant_s)


def biases(device: Device, true_s: float, heat_s: float) -> np.ndarray:
    """Measure all points of a run; return the bias of each, rounds by points."""
    found = []
    with (
        mock.patch.object(instruments, "perf_counter_ns", device.now_ns),
        mock.patch.object(time, "perf_counter_ns", device.now_ns),
        mock.patch.object(time, "monotonic", device.now),
    ):
        for trial in range(POINTS * ROUNDS):
            measure = Measure(breakdown=False, heat_s=0.0 if trial else heat_s)
            done = phases.measure(lambda: device, CONTEXT, measure)
            found.append(float(np.median(done.step_ns)) / 1e9 / true_s - 1)
            is_last = trial % POINTS == POINTS - 1
            device.rest(BETWEEN_ROUNDS_S if is_last else IDLE_S)
    return np.array(found).reshape(ROUNDS, POINTS)


def row(time_constant_s: float, step_s: float, heat_s: float, runs: int) -> dict[str, float]:
    """Simulate runs of one kind; return a row of the table."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng((seed, round(time_constant_s), round(1e6 * step_s)))
        device = Device(step_s, time_constant_s, rng)
        found.append(biases(device, step_s * (1 + SLOWER), heat_s))
    bias = np.array(found)
    of_points = bias.mean(axis=1)  # over the rounds
    return {
        "heats in s": time_constant_s,
        "step ms": 1e3 * step_s,
        "heat_s": heat_s,
        "first %": round(100 * bias[:, 0, 0].mean(), 2),
        "all %": round(100 * bias.mean(), 2),
        "spread %": round(100 * np.ptp(of_points, axis=1).mean(), 2),
    }


def main() -> None:
    """Print a table of biases by time constant, step time and heating."""
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    gc.freeze()  # as a worker does: a collection before each point takes 0.1 s otherwise
    cells = itertools.product(TIME_CONSTANTS_S, STEPS_S, HEAT_S)
    print(pd.DataFrame([row(*cell, runs) for cell in cells]).to_string(index=False))


if __name__ == "__main__":
    main()
