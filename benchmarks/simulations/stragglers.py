"""How often is a slow rank named where there is none, and where one is 5 % late?

    python -m benchmarks.simulations stragglers [TRIALS]

Simulates what is measured of a point with the default settings of a job: the timed steps, and after
them the local steps in the blocks in which `raybench.measure.breakdown` takes them. They go through
`raybench.results.point_metrics.step_parts`, which fills the row of a point. All steps have white
noise of 1 %. The pace of a host wanders with a memory of 1 s; a step that a device bounds does not
feel it.
"""

from __future__ import annotations

import math
import sys
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from raybench.job.model import Measure
from raybench.measure.stopping import breakdown_steps, most_local_steps
from raybench.records import Breakdown, Measurement, Repetition, Samples
from raybench.results.point_metrics import step_parts
from raybench.stats.stragglers import MARK_ERRORS, MARK_SHARE, median_error

RANKS, STEPS_MS = (2, 16, 64), (10.0, 50.0, 300.0)
# Standard deviation of a host's pace, and the share of steps that take half as long again.
NOISES = {"white": (0, 0), "stalls": (0, 0.03), "wander 1 %": (0.01, 0), "wander 3 %": (0.03, 0)}
WHITE, MEMORY_S, DELAY = 0.01, 1.0, 0.05
# Steps before a block that are not timed, and other steps between the phases.
LEAD_IN, BETWEEN = 2, 16

Steps = NDArray[np.float64]


def main() -> None:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(
        "Points in which a rank is named, in %; where rank 0 is 5 % late, in which it is that one"
    )
    print(f"{'step':>6} {'noise':10} {'ranks':>5} {'clean':>7} {'late host':>10} {'device':>7}")
    for step_ms, noise, ranks in product(STEPS_MS, NOISES, RANKS):
        rng, shares = np.random.default_rng(1), []
        for delay, is_device in ((0.0, False), (DELAY, False), (DELAY, True)):
            wander, stalls = NOISES[noise]
            kind = (0.0 if is_device else wander, stalls)
            named = [named_rank(rng, ranks, step_ms, kind, delay, is_device) for _ in range(trials)]
            right = named.count(0) if delay else trials - named.count(None)
            shares.append(100 * right / trials)
        print(
            f"{step_ms:3.0f} ms {noise:10} {ranks:5} {{:7.1f}} {{:10.1f}} {{:7.1f}}".format(*shares)
        )


def named_rank(
    rng: np.random.Generator,
    ranks: int,
    step_ms: float,
    noise: tuple[float, float],
    delay: float,
    is_device: bool,
) -> int | None:
    """Return the rank that the row of a simulated point names; rank 0 is late by the share."""
    settings = Measure()
    timed = math.ceil(1e3 * settings.min_seconds / step_ms)
    block = max(3, -(-breakdown_steps([1e6 * step_ms], settings) // 2))
    most = max(3, -(-most_local_steps([1e6 * step_ms], settings) // 2))
    pass_steps = -(-most // block) * (block + LEAD_IN)
    own_ms = step_ms * paces(rng, (ranks, timed + 2 * (BETWEEN + pass_steps)), step_ms, *noise)
    own_ms[0] += delay * step_ms
    first, second = (
        own_ms[:, start : start + pass_steps].reshape(ranks, -1, block + LEAD_IN)[:, :, LEAD_IN:]
        for start in (timed + BETWEEN, timed + 2 * BETWEEN + pass_steps)
    )
    blocks = blocks_needed(first)
    device_ms = step_ms * (1 + WHITE / 3 * rng.standard_normal(ranks))
    device_ms[0] += delay * step_ms * is_device
    # The ranks wait for each other in each timed step.
    lockstep_ms = own_ms[:, :timed].max(axis=0)
    ns = tuple((1e6 * lockstep_ms).astype(int).tolist())
    timed_steps = Repetition(warmup=Samples(), timed=Samples(start_ns=ns, step_ns=ns, host_ns=ns))
    rows = zip(first[:, :blocks].tolist(), second[:, :blocks].tolist(), device_ms, strict=True)
    of_rank = {"repetitions": (timed_steps,), "items_per_step": 1, "setup_s": 0.0}
    measurements = [
        Measurement(
            rank=rank,
            breakdown=Breakdown(local_ms=(*before, *after), device_ms=device, comm_ms=(1.0,)),
            **of_rank,
        )
        for rank, (before, after, device) in enumerate(rows)
    ]
    row = step_parts(measurements, 1.05 * float(np.median(lockstep_ms)))
    return None if row["slowest_rank"] is None else int(row["slowest_rank"])


def paces(
    rng: np.random.Generator, shape: tuple[int, int], step_ms: float, wander: float, stalls: float
) -> Steps:
    memory = math.exp(-step_ms / 1e3 / MEMORY_S)
    kicks = math.sqrt(1 - memory**2) * rng.standard_normal(shape)
    kicks[:, 0] /= math.sqrt(1 - memory**2)
    wandering = 1 + wander * lfilter([1.0], [1.0, -memory], kicks, axis=1)
    is_held_up = rng.random(shape) < stalls
    return (wandering + WHITE * rng.standard_normal(shape)) * (1 + 0.5 * is_held_up)


def blocks_needed(local_ms: Steps) -> int:
    """Count the blocks that `measure.breakdown` takes until every rank is known well enough."""
    for blocks in range(1, local_ms.shape[1]):
        series = local_ms[:, :blocks].reshape(len(local_ms), -1).tolist()
        errors = (MARK_ERRORS * math.sqrt(2) * median_error(steps) for steps in series)
        if all(e <= MARK_SHARE / 2 * np.median(s) for e, s in zip(errors, series, strict=True)):
            return blocks
    return int(local_ms.shape[1])
