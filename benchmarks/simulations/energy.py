"""How right the energy per step is, by a made-up meter under the real `measure`.

    python -m benchmarks.simulations.energy [--runs 30]

The device uses 100 W, in steps and in the pauses between blocks, so that the energy of a step is
known. The counter is exact, or moves every 20 or 100 ms as NVML's does. Time is made up too.

bias: of the energy per step, mean over the runs. scatter: standard deviation.
"""

from __future__ import annotations

import gc
import itertools
import time
from unittest import mock

import numpy as np
import pandas as pd
import torch

from benchmarks.common import options
from raybench.hardware.devices import DeviceReading
from raybench.job.model import Measure
from raybench.measure import instruments, phases
from raybench.workloads.base import Context, Workload

STEPS_S = (0.5e-3, 5e-3, 20e-3, 50e-3, 0.1, 0.24, 0.3, 1.0)
# Seconds between two updates of the counter; 0: it is exact.
UPDATES_S = (0.0, 0.02, 0.1)
POWER_W = 100.0
COLD_S, NOISE, PAUSE_S = 0.5, 0.01, 0.01


class Meter:
    """A clock, and the counter of a device that reads it."""

    def __init__(self, update_s: float, rng: np.random.Generator) -> None:
        self.now_s = 1.0
        self._update_s = update_s
        self._phase_s = update_s * rng.random()

    def read(self) -> DeviceReading:
        """Return the energy as of the last update of the counter."""
        at_s = self.now_s
        if self._update_s:
            updates = (self.now_s + self._phase_s) // self._update_s
            at_s = updates * self._update_s
        return DeviceReading(time_s=self.now_s, energy_j=POWER_W * at_s)

    def now_ns(self) -> int:
        """Return the time in ns."""
        return round(1e9 * self.now_s)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.now_s += seconds


class Paced(Workload):
    """Takes time on a meter's clock: the first step 0.5 s, the others about `step_s`."""

    items_per_step = 1

    def __init__(self, meter: Meter, step_s: float, rng: np.random.Generator) -> None:
        self._meter, self._step_s, self._rng, self._is_cold = meter, step_s, rng, True

    def step(self) -> None:
        """Pass the time of a step."""
        noise = 1 + NOISE * self._rng.standard_normal()
        self._meter.pass_time(COLD_S if self._is_cold else self._step_s * noise)
        self._is_cold = False


def relative_error(step_s: float, update_s: float, seed: int) -> float:
    """Measure one point; return the error of its energy per step."""
    rng = np.random.default_rng((seed, round(1e6 * step_s), round(1e3 * update_s)))
    meter = Meter(update_s, rng)
    gather = phases.gather_durations

    def gather_after_a_pause(step_ns: tuple[int, ...], device: torch.device) -> list[list[int]]:
        meter.pass_time(PAUSE_S)
        return gather(step_ns, device)

    context = Context(
        device=torch.device("cpu"), rank=0, world_size=1, local_rank=0, batch_size=1, seed=0
    )
    with (
        mock.patch.object(instruments, "perf_counter_ns", meter.now_ns),
        mock.patch.object(time, "perf_counter_ns", meter.now_ns),
        mock.patch.object(phases, "Counters", return_value=meter),
        mock.patch.object(phases, "wait_until_unlimited"),
        mock.patch.object(phases, "gather_durations", gather_after_a_pause),
    ):
        done = phases.measure(lambda: Paced(meter, step_s, rng), context, Measure(breakdown=False))
    (repetition,) = done.repetitions
    assert done.energy_j is not None, "the phase is too short"
    steps = len(done.step_ns) * repetition.inner_iterations
    true_j = POWER_W * float(np.mean(done.step_ns)) / 1e9
    return done.energy_j / steps / true_j - 1


def main() -> None:
    """Print a table of errors by step time and counter."""
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=30)
    runs = parser.parse_args().runs
    gc.freeze()  # as a worker does: a collection before each point takes 0.1 s otherwise
    table = []
    for step_s, update_s in itertools.product(STEPS_S, UPDATES_S):
        errors = [relative_error(step_s, update_s, seed) for seed in range(runs)]
        table.append(
            {
                "step ms": 1e3 * step_s,
                "counter moves every ms": 1e3 * update_s,
                "bias %": round(100 * float(np.mean(errors)), 2),
                "scatter %": round(100 * float(np.std(errors)), 2),
            }
        )
    print(pd.DataFrame(table).to_string(index=False))


if __name__ == "__main__":
    main()
