"""How often a slow rank is named where there is none, and where one is 5 % late.

    python -m benchmarks.simulations.stragglers [--points 200] [--jobs 2]

Simulates what is measured of a point on a GPU: timed steps for 3 s and at least 30, and after them
the local steps of each rank, in the blocks that `raybench.measure.breakdown` takes. Then
`raybench.results.breakdown.part_columns` names a rank or none, as for the row of a real point.

Every step has white noise of 1 %. With stalls, 3 % of the steps take half as long again. A host
that wanders changes its pace with a memory of 1 s; a step that waits for its device does not.

clean: share of the points without a slow rank in which a rank is named. host, device: share of the
points in which rank 0, whose host or device is 5 % late, is named. wrong: share of these in which
another rank is named. se: standard error of the share before it. All in percent.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import options
from raybench.job.model import Measure
from raybench.measure.stopping import StoppingPolicy
from raybench.records.measurement import Breakdown, Measurement, Repetition, Samples
from raybench.results.breakdown import part_columns
from raybench.stats.outliers import MARK_ERRORS, MARK_SHARE, median_error

STEPS_MS, RANKS = (10.0, 300.0), (2, 16, 64)
DELAY, WHITE, STALL, MEMORY_S = 0.05, 0.01, 0.5, 1.0
TIMED_S, LEAST_SAMPLES = 3.0, 30
# Untimed steps before a block, and other steps between the phases.
LEAD_IN, BETWEEN = 2, 16
# Communication, as a share of the slowest rank's own step.
COMM = 0.05

Steps = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What the steps have beside white noise: standard deviation of the pace, share of stalls."""

    name: str
    wander: float = 0.0
    stalls: float = 0.0


NOISES = (
    Noise(name="white"),
    Noise(name="stalls", stalls=0.03),
    Noise(name="wander 1 %", wander=0.01),
    Noise(name="wander 3 %", wander=0.03),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The points of one row of the table."""

    step_ms: float
    noise: Noise
    ranks: int


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--points", type=int, default=200, help="of each kind in each row")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    cells = [
        Cell(step_ms=step_ms, noise=noise, ranks=ranks)
        for step_ms, noise, ranks in itertools.product(STEPS_MS, NOISES, RANKS)
    ]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        rows = list(pool.map(partial(row, chosen.points), cells))
    print(pd.DataFrame(rows).to_string(index=False))


def row(points: int, cell: Cell) -> dict[str, object]:
    """Simulate the points of a cell, and return its row of the table."""
    seed = zlib.crc32(f"{cell.step_ms} {cell.noise.name} {cell.ranks}".encode())
    rng = np.random.default_rng(seed)
    clean = [named_rank(rng, cell, 0.0, is_device=False) for _ in range(points)]
    late_host = [named_rank(rng, cell, DELAY, is_device=False) for _ in range(points)]
    late_device = [named_rank(rng, cell, DELAY, is_device=True) for _ in range(points)]
    found: dict[str, object] = {
        "step ms": cell.step_ms,
        "noise": cell.noise.name,
        "ranks": cell.ranks,
    }
    found |= share("clean", clean, lambda rank: rank is not None)
    found |= share("host", late_host, lambda rank: rank == 0)
    found |= share("device", late_device, lambda rank: rank == 0)
    return found | share("wrong", late_host + late_device, lambda rank: rank not in (0, None))


def share(
    name: str, named: list[int | None], counts: Callable[[int | None], bool]
) -> dict[str, str]:
    """Return the share of the points that count in percent, and its standard error."""
    mean = sum(map(counts, named)) / len(named)
    error = math.sqrt(mean * (1 - mean) / len(named))
    return {name: f"{100 * mean:.1f}", f"se {name}": f"{100 * error:.1f}"}


def named_rank(
    rng: np.random.Generator, cell: Cell, delay: float, *, is_device: bool
) -> int | None:
    """Return the rank that the row of a simulated point names. Rank 0 is late by `delay`."""
    policy, step_ns = StoppingPolicy(settings=Measure()), [1e6 * cell.step_ms]
    timed = max(LEAST_SAMPLES, math.ceil(1e3 * TIMED_S / cell.step_ms))
    block = max(3, math.ceil(policy.breakdown_steps(step_ns) / 2))
    blocks = math.ceil(max(1, policy.most_local_steps(step_ns) / 2 / block))
    half = blocks * (block + LEAD_IN)

    # A step that its device bounds does not feel the pace of the host.
    wander = 0.0 if is_device else cell.noise.wander
    count = timed + 2 * (BETWEEN + half)
    own_ms = cell.step_ms * paces(rng, (cell.ranks, count), cell, wander)
    own_ms[0] += delay * cell.step_ms
    device_ms = cell.step_ms * (1 + WHITE / 3 * rng.standard_normal(cell.ranks))
    device_ms[0] += delay * cell.step_ms * is_device

    # The ranks wait for each other in each timed step.
    step_ms = (1 + COMM) * own_ms[:, :timed].max(axis=0)
    before = in_blocks(own_ms[:, timed + BETWEEN :][:, :half], block)
    after = in_blocks(own_ms[:, -half:], block)
    known = blocks_until_known(before)
    local_ms = np.concatenate([before[:, :known], after[:, :known]], axis=1)

    ns = tuple((1e6 * step_ms).astype(int).tolist())
    repetition = Repetition(warmup=Samples(), timed=Samples(start_ns=ns, step_ns=ns, host_ns=ns))
    measurements = [
        Measurement(
            rank=rank,
            repetitions=(repetition,),
            items_per_step=1,
            setup_s=0.0,
            breakdown=Breakdown(
                local_ms=tuple(map(tuple, local_ms[rank].tolist())),
                device_ms=float(device_ms[rank]),
                comm_ms=(COMM * cell.step_ms,),
            ),
        )
        for rank in range(cell.ranks)
    ]
    return part_columns(measurements, float(np.median(step_ms))).slowest_rank


def paces(rng: np.random.Generator, shape: tuple[int, int], cell: Cell, wander: float) -> Steps:
    """Draw how long each step of each rank takes, as a share of a typical step."""
    from scipy.signal import lfilter

    memory = math.exp(-cell.step_ms / 1e3 / MEMORY_S)
    kicks = math.sqrt(1 - memory**2) * rng.standard_normal(shape)
    kicks[:, 0] /= math.sqrt(1 - memory**2)
    pace = 1 + wander * np.asarray(lfilter([1.0], [1.0, -memory], kicks, axis=1))
    stalls = 1 + STALL * (rng.random(shape) < cell.noise.stalls)
    return np.asarray((pace + WHITE * rng.standard_normal(shape)) * stalls)


def in_blocks(steps_ms: Steps, block: int) -> Steps:
    """Return [ranks, blocks, steps] without the untimed steps before each block."""
    return steps_ms.reshape(len(steps_ms), -1, block + LEAD_IN)[:, :, LEAD_IN:]


def blocks_until_known(local_ms: Steps) -> int:
    """Return how many blocks `raybench.measure.breakdown` times until every rank is known."""
    for blocks in range(1, local_ms.shape[1]):
        of_rank = local_ms[:, :blocks].reshape(len(local_ms), -1).tolist()
        if all(is_known(steps) for steps in of_rank):
            return blocks
    return int(local_ms.shape[1])


def is_known(steps_ms: list[float]) -> bool:
    """Return whether two ranks with such steps can be told apart."""
    difference_ms = MARK_ERRORS * math.sqrt(2) * median_error(steps_ms)
    return bool(difference_ms <= MARK_SHARE / 2 * np.median(steps_ms))


if __name__ == "__main__":
    main()
