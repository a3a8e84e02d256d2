"""How right one start says its step time is, over made-up steps under the real decisions.

    python -m benchmarks.simulations.looks [--runs 2000] [--jobs 1] [--only TEXT]

Series of steps go through the decisions of `raybench.measure.stopping` with the default settings,
block by block as `raybench.measure.phases` does. The true step time is known.

The first table has the cells that must be covered in 0.93 of the looks, the second all others, with
a fifth of the looks each.
coverage: how often the 95 % interval holds the truth, among looks that have an interval; error: the
Monte Carlo standard error of the coverage. bias: of the median, mean over the looks. half: the
median of half the width of the interval. marked: how often the point is called unsteady. unknown:
how often the steps are too few to tell. samples: their median. seconds: the mean time of a look,
without its first step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import options
from raybench.job.model import Measure
from raybench.measure.stopping import RESTART, StoppingPolicy, TimingProgress
from raybench.stats.summary import median_interval

Series = NDArray[np.floating[Any]]
# Yields the steps of an endless series in parts of so many, relative to the usual step.
Draw = Callable[[np.random.Generator, int], Iterator[Series]]

COLD = 50
TRUTH_SAMPLES = 500_000
PART_S = 1.0


def autoregressive(
    rng: np.random.Generator, count: int, *, phi: float, sd: float
) -> Iterator[Series]:
    """Lognormal noise of which neighbours have the correlation `phi`; its median is 1."""
    from scipy.signal import lfilter

    # Single precision, relative to a median of 1, is enough and takes half the time.
    one, weights = np.ones(1, np.float32), np.array([1.0, -phi], np.float32)
    state = phi * rng.standard_normal(1, np.float32)
    while True:
        noise = rng.standard_normal(count, np.float32)
        if phi:
            noise, state = lfilter(
                one, weights, noise * np.float32(math.sqrt(1 - phi**2)), zi=state
            )
        yield np.exp(np.float32(sd) * noise)


def skewed(rng: np.random.Generator, count: int) -> Iterator[Series]:
    """Draw steps with an exponential tail: 5 % on average beyond the shortest step."""
    while True:
        yield 1 + 0.05 * rng.exponential(size=count)


def two_states(rng: np.random.Generator, count: int) -> Iterator[Series]:
    """Draw steps that are 3 % longer for 10 steps on average, after 20 that are not."""
    steady = autoregressive(rng, count, phi=0.0, sd=0.002)
    is_slow = rng.random() < 1 / 3
    for part in steady:
        means = np.where((np.arange(count) + is_slow) % 2, 10, 20)
        lengths = rng.geometric(1 / means)
        states = np.repeat((np.arange(count) + is_slow) % 2 == 1, lengths)
        # A geometric length has no memory, so the next part may begin a new one.
        is_slow = bool(states[count])
        yield part * np.where(states[:count], 1.03, 1)


def outliers(rng: np.random.Generator, count: int) -> Iterator[Series]:
    """Draw steps of which 1 % take three times as long."""
    for part in autoregressive(rng, count, phi=0.3, sd=0.005):
        yield part * np.where(rng.random(count) < 0.01, 3, 1)


def warming(rng: np.random.Generator, count: int, *, steps: float, draw: Draw) -> Iterator[Series]:
    """Draw steps that begin 3 % too short and approach their level as exp(-n / `steps`)."""
    done = 0
    for part in draw(rng, count):
        yield part * (1 - 0.03 * np.exp(-(done + np.arange(count)) / steps))
        done += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is simulated in one row of the table. truth: where `draw` has no fixed level."""

    name: str
    draw: Draw
    step_s: float
    truth: Draw | None = None


def plain(names: Sequence[str], steps_s: Sequence[float]) -> list[Cell]:
    return [Cell(name=name, draw=NOISES[name], step_s=s) for name in names for s in steps_s]


NOISES: dict[str, Draw] = {
    **{
        f"{kind} {100 * sd:g} %": partial(autoregressive, phi=phi, sd=sd)
        for sd in (0.01, 0.05)
        for kind, phi in (("independent", 0.0), ("AR 0.3", 0.3), ("AR 0.6", 0.6))
    },
    "AR 0.9 1 %": partial(autoregressive, phi=0.9, sd=0.01),
    "skewed 5 %": skewed,
    "two states 3 %": two_states,
    "1 % take 3 x": outliers,
}
# A start must tell these right.
USUAL = plain(list(NOISES)[:6], (50e-6, 5e-3, 50e-3))
QUIET = partial(autoregressive, phi=0.3, sd=0.003)
OTHERS = [
    *plain(list(NOISES)[:6], (0.3, 1.0, 3.0)),
    *plain(list(NOISES)[6:], (50e-6, 5e-3, 50e-3, 0.3, 1.0)),
    *(
        Cell(
            name=f"{name}, warms up within {warm_up_s:g} s",
            draw=partial(warming, steps=warm_up_s / step_s, draw=draw),
            step_s=step_s,
            truth=draw,
        )
        for name, draw in (("AR 0.3 0.3 %", QUIET), ("AR 0.3 1 %", NOISES["AR 0.3 1 %"]))
        for warm_up_s in (1.0, 3.0, 10.0)
        for step_s in (50e-6, 5e-3, 50e-3)
    ),
]


@dataclass(slots=True, kw_only=True)
class Timer:
    """A made-up timer of steps, of which the first is cold."""

    parts: Iterator[Series]
    step_s: float
    _steps: Series = field(default_factory=lambda: np.empty(0, np.float32))
    _is_cold: bool = True

    def time(self, count: int, inner: int = 1) -> list[float]:
        """Return `count` samples in ns, each the mean of `inner` steps."""
        while len(self._steps) < count * inner:
            self._steps = np.concatenate([self._steps, next(self.parts)])
        taken = self._steps[: count * inner] * (self.step_s * 1e9)
        self._steps = self._steps[count * inner :]
        if self._is_cold:
            taken[0] *= COLD
            self._is_cold = False
        means: list[float] = taken.reshape(count, inner).mean(axis=1).tolist()
        return means


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What measuring one series gave. bias, half: relative to the truth; half: None without ±."""

    bias: float
    is_covered: bool
    half: float | None
    is_stable: bool | None
    samples: int
    seconds: float


def look_at(timer: Timer, truth: Callable[[int], float], settings: Measure) -> Look:
    """Take steps from the timer as the phases of a measurement do.

    truth: the long-run median in seconds of samples that are means of so many steps.
    """
    policy = StoppingPolicy(settings=settings)
    warmup: list[float] = []
    while count := policy.next_warmup(warmup):
        warmup += timer.time(count)
    inner = policy.inner_iterations(warmup, graph=False)
    drifted: list[float] = []
    timed: list[float] = []
    progress = TimingProgress(warmup_ns=warmup, inner=inner)
    while count := policy.next_timed(progress):
        if count == RESTART:
            drifted, timed = drifted + timed, []
        else:
            timed += timer.time(count, inner)
        progress = TimingProgress(
            warmup_ns=warmup, drifted_ns=drifted, sample_ns=timed, inner=inner
        )
    interval, truth_ns = median_interval([timed]), 1e9 * truth(inner)
    return Look(
        bias=float(np.median(timed)) / truth_ns - 1,
        is_covered=interval is not None and interval.low <= truth_ns <= interval.high,
        half=None if interval is None else (interval.high - interval.low) / 2 / truth_ns,
        is_stable=policy.has_settled(progress),
        samples=len(timed),
        seconds=progress.warm_s + progress.timed_s,
    )


def looks(cell: Cell, runs: int, settings: Measure) -> list[Look]:
    """Look at `runs` series of a cell."""

    @cache
    def truth(inner: int) -> float:
        count = 100_000
        parts = (cell.truth or cell.draw)(np.random.default_rng(1), count * inner)
        means = [next(parts).reshape(-1, inner).mean(axis=1) for _ in range(TRUTH_SAMPLES // count)]
        return cell.step_s * float(np.median(means))

    label = zlib.crc32(f"{cell.name} {cell.step_s}".encode())
    part = max(64, round(PART_S / cell.step_s))
    return [
        look_at(
            Timer(parts=cell.draw(np.random.default_rng((label, run)), part), step_s=cell.step_s),
            truth,
            settings,
        )
        for run in range(runs)
    ]


def row(cell: Cell, found: Sequence[Look]) -> dict[str, object]:
    """Make a row of the table."""
    bias = np.array([look.bias for look in found])
    halves = [100 * look.half for look in found if look.half is not None]
    # Without the interval of any look nothing is covered.
    coverage = sum(look.is_covered for look in found) / max(1, len(halves))
    error = math.sqrt(coverage * (1 - coverage) / max(1, len(halves)))
    return {
        "series": cell.name,
        "step ms": f"{1e3 * cell.step_s:g}",
        "coverage": f"{coverage:.3f}" if halves else "none",
        "error": f"{error:.3f}" if halves else "none",
        "bias %": f"{100 * bias.mean():.2f}",
        "half %": f"{np.median(halves):.2f}" if halves else "none",
        "marked": f"{np.mean([look.is_stable is False for look in found]):.3f}",
        "unknown": f"{np.mean([look.is_stable is None for look in found]):.2f}",
        "samples": f"{np.median([look.samples for look in found]):g}",
        "seconds": f"{np.mean([look.seconds for look in found]):.1f}",
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="rows with this in their name")
    chosen = parser.parse_args()
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for cells, runs in ((USUAL, chosen.runs), (OTHERS, math.ceil(chosen.runs / 5))):
            wanted = [cell for cell in cells if chosen.only in cell.name]
            found = [pool.submit(looks, cell, runs, Measure()) for cell in wanted]
            table = [row(cell, each.result()) for cell, each in zip(wanted, found, strict=True)]
            if table:
                print(pd.DataFrame(table).to_string(index=False), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
