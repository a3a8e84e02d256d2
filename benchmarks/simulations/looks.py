"""How right one look at a step time is, over simulated steps under the real decisions.

    python -m benchmarks.simulations.looks [--runs 300] [--jobs 2]

Series of steps go through the decisions of `raybench.measure.stopping` with the default settings,
block by block as `raybench.measure.phases` does. The true step time is known.

bias: of the median, mean over the runs. coverage: how often the 95 % interval holds the truth.
half: the median of half its width. marked: how often the point is called unsteady. unknown: how
often it has too few steps to tell. seconds: what a look takes, without the first step.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import options
from raybench.job.model import Measure
from raybench.measure.stopping import RESTART, Progress, StoppingPolicy
from raybench.stats.summary import median_interval

Series = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Series]

STEPS_S = (50e-6, 0.5e-3, 5e-3, 50e-3, 0.3, 1.0, 3.0, 5.0)
ROUNDS = 3
# A series is as long as no look is, in seconds and at least in steps.
LONGEST_S, MIN_STEPS = 40.0, 60
COLD = 50


def autoregressive(rng: np.random.Generator, count: int, *, phi: float, sd: float = 0.01) -> Series:
    """Lognormal noise of which neighbours have the correlation `phi`; its median is 1."""
    from scipy.signal import lfilter

    shocks = rng.standard_normal(count + 100) * sd * math.sqrt(1 - phi**2)
    return np.exp(np.asarray(lfilter([1.0], [1.0, -phi], shocks)[100:]))


def outliers(rng: np.random.Generator, count: int) -> Series:
    """Draw steps of which 1 % take three times as long."""
    return autoregressive(rng, count, phi=0.3, sd=0.005) * np.where(rng.random(count) < 0.01, 3, 1)


def spikes(rng: np.random.Generator, count: int) -> Series:
    """Draw steps of which each 50th takes a fifth longer."""
    is_long = np.arange(count) % 50 == 49
    return autoregressive(rng, count, phi=0.3, sd=0.005) * np.where(is_long, 1.2, 1)


NOISES: dict[str, Draw] = {
    "iid 1 %": partial(autoregressive, phi=0.0),
    "AR .3 1 %": partial(autoregressive, phi=0.3),
    "AR .6 1 %": partial(autoregressive, phi=0.6),
    "outliers 1 % x3": outliers,
    "spike each 50th +20 %": spikes,
}
WARM_UPS_S = (1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What measuring one series gave. bias, half: relative to the truth."""

    bias: float
    is_covered: bool
    half: float
    is_stable: bool | None
    seconds: float


def look_at(step_s: Series, truth: Callable[[int], float], settings: Measure) -> Look:
    """Take steps from the series as the phases of a measurement do.

    truth: the long-run median in seconds of samples that are means of so many steps.
    """
    step_ns, place, policy = step_s * 1e9, 0, StoppingPolicy(settings=settings)

    def take(count: int, inner: int = 1) -> list[float]:
        nonlocal place
        taken = step_ns[place : place + count * inner]
        place += len(taken)
        means: list[float] = taken.reshape(count, inner).mean(axis=1).tolist()
        return means

    warmup: list[float] = []
    while count := policy.next_warmup(warmup):
        warmup += take(count)
    inner = policy.inner_iterations(warmup, graph=False)
    drifted: list[float] = []
    timed: list[float] = []
    progress = Progress(warmup_ns=warmup, inner=inner)
    while count := policy.next_timed(progress):
        if count == RESTART:
            drifted, timed = drifted + timed, []
        else:
            timed += take(count, inner)
        progress = Progress(warmup_ns=warmup, drifted_ns=drifted, sample_ns=timed, inner=inner)
    interval, median, truth_s = (
        median_interval([timed]),
        float(np.median(timed)) / 1e9,
        truth(inner),
    )
    assert interval is not None
    return Look(
        bias=median / truth_s - 1,
        is_covered=interval.low / 1e9 <= truth_s <= interval.high / 1e9,
        half=(interval.high - interval.low) / 2 / 1e9 / truth_s,
        is_stable=policy.has_settled(progress),
        seconds=progress.warm_s + progress.timed_s,
    )


def series(draw: Draw, seed: Sequence[int], step_s: float, warm_up_s: float | None) -> Series:
    """Draw a series; of a warm-up the steps begin 3 % too short and approach their level."""
    rng = np.random.default_rng(seed)
    count = max(MIN_STEPS, math.ceil(LONGEST_S / step_s))
    steps = step_s * draw(rng, count)
    if warm_up_s is not None:
        steps *= 1 - 0.03 * np.exp(-np.arange(count) * step_s / warm_up_s)
    steps[0] *= COLD
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is simulated in one row of the table."""

    name: str
    draw: Draw
    step_s: float
    warm_up_s: float | None = None


def looks(cell: Cell, runs: int, settings: Measure) -> list[Look]:
    """Look at `runs` series of a cell."""
    long_run = cell.draw(np.random.default_rng(1), 1_000_000)

    @cache
    def truth(inner: int) -> float:
        whole = long_run[: len(long_run) // inner * inner]
        return cell.step_s * float(np.median(whole.reshape(-1, inner).mean(axis=1)))

    label = zlib.crc32(f"{cell.name} {cell.step_s}".encode())
    return [
        look_at(series(cell.draw, (label, run), cell.step_s, cell.warm_up_s), truth, settings)
        for run in range(runs)
    ]


def cells() -> Iterator[Cell]:
    for name, step_s in itertools.product(NOISES, STEPS_S):
        yield Cell(name=name, draw=NOISES[name], step_s=step_s)
    quiet = partial(autoregressive, phi=0.3, sd=0.003)
    for warm_up_s, step_s in itertools.product(WARM_UPS_S, (50e-6, 0.5e-3, 5e-3, 50e-3)):
        name = f"warm-up 3 % {warm_up_s:g} s"
        yield Cell(name=name, draw=quiet, step_s=step_s, warm_up_s=warm_up_s)


def row(cell: Cell, found: Sequence[Look]) -> dict[str, object]:
    """Make a row of the table."""
    bias = np.array([look.bias for look in found])
    # A round is the same look again; the rounds of a point become their geometric mean.
    whole = len(bias) // ROUNDS * ROUNDS
    of_rounds = np.expm1(np.log1p(bias[:whole]).reshape(-1, ROUNDS).mean(axis=1))
    return {
        "series": cell.name,
        "step ms": 1e3 * cell.step_s,
        "bias %": round(100 * bias.mean(), 2),
        "3 rounds": round(100 * of_rounds.mean(), 2),
        "coverage": np.mean([look.is_covered for look in found]).round(2),
        "half %": round(100 * np.median([look.half for look in found]), 2),
        "marked": np.mean([look.is_stable is False for look in found]).round(2),
        "unknown": np.mean([look.is_stable is None for look in found]).round(2),
        "seconds": np.mean([look.seconds for look in found]).round(),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="rows with this in their name")
    chosen = parser.parse_args()
    wanted = [cell for cell in cells() if chosen.only in cell.name]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        found = [pool.submit(looks, cell, chosen.runs, Measure()) for cell in wanted]
        table = [row(cell, each.result()) for cell, each in zip(wanted, found, strict=True)]
    print(pd.DataFrame(table).to_string(index=False))


if __name__ == "__main__":
    main()
