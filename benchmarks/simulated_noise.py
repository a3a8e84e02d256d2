"""How right the median is and how honest its interval, over simulated step times.

    python -m benchmarks.simulated_noise [--runs 600] [--first 0] [--only WORD]...
        [--target-ci 0.01] [--rounds 1] [--jobs 1] [-o FILE.json]

Series of steps of 10 ms with noise of a kind each (`NOISES`), the first step 50 times as long, go
through the decisions of `raybench.measure.stopping` with the default settings, block by block as
`raybench.measure.phases` does. Every series is made here, independent of what is measured.

bias: of the median against the long-run one, mean over the runs. coverage: how often the interval
holds that. stable: how often the point would be called so. samples, seconds: what it took.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raybench.job.model import Measure
from raybench.measure.stopping import AGAIN, Course, has_settled, next_timed, next_warmup
from raybench.stats import steady, summary

Series = NDArray[np.float64]
Make = Callable[[np.random.Generator, int], Series]

STEP_NS = 10_000_000
COLD = 50
SETTINGS = Measure()
COUNT = 4_000


def ar(rng: np.random.Generator, count: int, *, phi: float, sd: float) -> Series:
    """First-order autoregressive noise around 1."""
    from scipy.signal import lfilter

    shocks = rng.standard_normal(count + 200) * sd * np.sqrt(1 - phi**2)
    return 1 + np.asarray(lfilter([1.0], [1.0, -phi], shocks)[200:])


def quiet(rng: np.random.Generator, count: int) -> Series:
    """Draw the noise that all series have beside their own: as GPU-bound steps have it."""
    return ar(rng, count, phi=0.3, sd=0.005)


def lognormal(rng: np.random.Generator, count: int, *, sigma: float) -> Series:
    return np.exp(sigma * rng.standard_normal(count))


def floor(rng: np.random.Generator, count: int, *, share: float, phi: float = 0.0) -> Series:
    """Never below a floor, with a long tail above it; the median is 1."""
    gauss = (ar(rng, count, phi=phi, sd=1.0)) - 1
    return (1 + share * np.exp(gauss)) / (1 + share)


def student(rng: np.random.Generator, count: int, *, sd: float) -> Series:
    return 1 + sd / np.sqrt(3) * rng.standard_t(3, count)


def bimodal(rng: np.random.Generator, count: int, *, up: float, dwell: tuple[int, int]) -> Series:
    """Two levels, each kept for a geometric number of steps of these means."""
    is_up = rng.random() < dwell[1] / sum(dwell)
    stays: list[NDArray[np.bool_]] = []
    left = count
    while left > 0:
        length = min(left, int(rng.geometric(1 / dwell[is_up])))
        stays.append(np.full(length, is_up))
        left, is_up = left - length, not is_up
    return quiet(rng, count) * (1 + up * np.concatenate(stays))


def spikes(rng: np.random.Generator, count: int, *, up: float, every: int) -> Series:
    return quiet(rng, count) * (1 + up * (np.arange(count) % every == every - 1))


def decay(rng: np.random.Generator, count: int, *, start: float, tau: float) -> Series:
    """Draw a transient that dies out; start: how far the first step is above the level."""
    return quiet(rng, count) * (1 + start * np.exp(-np.arange(count) / tau))


def late_step(rng: np.random.Generator, count: int, *, change: float, at: int) -> Series:
    """Another level from one step on; the later level is the true one."""
    return quiet(rng, count) * np.where(np.arange(count) < at, 1 / (1 + change), 1.0)


def bump(rng: np.random.Generator, count: int, *, up: float, first: int, last: int) -> Series:
    places = np.arange(count)
    return quiet(rng, count) * (1 + up * ((places >= first) & (places <= last)))


def walk(rng: np.random.Generator, count: int, *, sd: float) -> Series:
    return quiet(rng, count) + np.cumsum(sd * rng.standard_normal(count))


def pink(rng: np.random.Generator, count: int, *, sd: float) -> Series:
    """1/f noise by its spectrum, over a time 16 times as long as the series."""
    length = 16 * count
    frequencies = np.arange(1, length // 2 + 1) / length
    phases = rng.standard_normal((2, len(frequencies)))
    spectrum = np.concatenate([[0], (phases[0] + 1j * phases[1]) / np.sqrt(frequencies)])
    noise = np.fft.irfft(spectrum, length)
    return 1 + sd * (noise / noise.std())[:count]


def outliers(rng: np.random.Generator, count: int, *, share: float) -> Series:
    return quiet(rng, count) * np.where(rng.random(count) < share, 10.0, 1.0)


def quantised(rng: np.random.Generator, count: int) -> Series:
    """Give a step of 10 us told in half microseconds."""
    return np.round(20 * ar(rng, count, phi=0.0, sd=0.005)) / 20


def constant(rng: np.random.Generator, count: int) -> Series:
    return np.ones(count)


def noises() -> dict[str, Make]:
    """Each row's series by its name, in the order of the table."""
    made: dict[str, Make] = {
        f"ar phi={phi} sd={sd:.1%}": partial(ar, phi=phi, sd=sd)
        for phi in (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)
        for sd in (0.003, 0.01, 0.03)
    }
    made |= {f"lognormal sigma={s}": partial(lognormal, sigma=s) for s in (0.05, 0.2, 0.5)}
    made |= {
        "floor+2% lognormal(1)": partial(floor, share=0.02),
        "floor+10% lognormal(1) phi .6": partial(floor, share=0.10, phi=0.6),
        "student t3 sd 2%": partial(student, sd=0.02),
    }
    dwells = ((5, 5), (20, 20), (50, 50), (10, 5), (30, 15), (50, 25), (30, 10), (50, 10))
    made |= {
        f"bimodal +3% dwell {a}/{b}": partial(bimodal, up=0.03, dwell=(a, b)) for a, b in dwells
    }
    made |= {
        f"bimodal +10% dwell {a}/{b}": partial(bimodal, up=0.10, dwell=(a, b))
        for a, b in ((50, 25), (20, 20))
    }
    made |= {
        "spike +20% every 16": partial(spikes, up=0.20, every=16),
        "spike +20% every 4": partial(spikes, up=0.20, every=4),
        "alternating +4% every 2nd": partial(spikes, up=0.04, every=2),
    }
    humps = ((0.60, 8), (0.30, 40), (0.10, 80), (0.05, 150), (0.02, 300))
    rises = ((-0.05, 15), (-0.05, 60), (-0.03, 150), (-0.02, 300), (-0.02, 600))
    made |= {f"hump {up:+.0%} tau {tau}": partial(decay, start=up, tau=tau) for up, tau in humps}
    made |= {
        f"rise {up:+.0%} tau {tau} (heats, clocks fall)": partial(decay, start=up, tau=tau)
        for up, tau in rises
    }
    made |= {
        "late step +5% at iter 60": partial(late_step, change=0.05, at=60),
        "late step -5% at iter 45": partial(late_step, change=-0.05, at=45),
        "tune bump: iters 20-35 +40%": partial(bump, up=0.40, first=20, last=35),
        "random walk .05%/step": partial(walk, sd=0.0005),
        "pink 1% (1/f)": partial(pink, sd=0.01),
        "pink 3% (1/f)": partial(pink, sd=0.03),
        "outliers x10 1%": partial(outliers, share=0.01),
        "outliers x10 3%": partial(outliers, share=0.03),
        "quantised 0.5us at 10us step": quantised,
        "constant": constant,
    }
    return made


# Runs that a process does at a time.
_AT_ONCE = 25


def true_median(make: Make) -> float:
    """Compute the long-run median, by 2 million samples where it is not 1 by construction."""
    if not isinstance(make, partial) or make.func not in (bimodal, spikes, outliers):
        return 1.0
    if make.keywords.get("every") == 2 or len(set(make.keywords.get("dwell", (1, 2)))) == 1:
        # As often on one level as on the other: halfway between them.
        return 1 + float(make.keywords["up"]) / 2
    return float(np.median(make(np.random.default_rng(1), 2_000_000)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What measuring one series gave. bias, half_width: relative to the truth."""

    bias: float
    is_covered: bool
    half_width: float
    warmup: int
    timed: int
    is_stable: bool


def measured(step_ns: Sequence[float], truth_ns: float, settings: Measure) -> Outcome:
    """Take steps from the series as the phases of a measurement do."""
    rest = iter(step_ns)

    def take(count: int) -> list[float]:
        return [next(rest) for _ in range(count)]

    warmup: list[float] = []
    while count := next_warmup(warmup, settings):
        warmup += take(count)
    course = Course(warmup_ns=warmup)
    drifted: list[float] = []
    timed: list[float] = []
    while count := next_timed(course, settings):
        if count == AGAIN:
            drifted, timed = drifted + timed, []
        else:
            timed += take(count)
        course = Course(warmup_ns=warmup, drifted_ns=drifted, sample_ns=timed)
    interval = summary.median_interval([timed])
    assert interval is not None
    interval = interval.towards(steady.heading(timed, course.before_ns))
    is_flat = steady.worst_trend([timed], settings.drift_that_matters) == steady.FLAT
    return Outcome(
        bias=float(np.median(timed)) / truth_ns - 1,
        is_covered=interval.low <= truth_ns <= interval.high,
        half_width=(interval.high - interval.low) / 2 / truth_ns,
        warmup=len(warmup) + len(drifted),
        timed=len(timed),
        is_stable=is_flat and has_settled(course, settings) is not False,
    )


def outcomes(name: str, runs: int, first: int = 0, settings: Measure = SETTINGS) -> list[Outcome]:
    """Tell what so many series of this noise give; each has its own seed, counted from `first`."""
    make = noises()[name]
    truth_ns = STEP_NS * true_median(make)
    found = []
    for run in range(first, first + runs):
        rng = np.random.default_rng([zlib.crc32(name.encode()), run])
        step_ns = np.round(STEP_NS * make(rng, COUNT))
        step_ns[0] *= COLD
        found.append(measured(step_ns.tolist(), truth_ns, settings))
    return found


def row(name: str, found: Sequence[Outcome]) -> dict[str, float | str]:
    """Make a row of the table from the runs of one noise."""
    table = {key: np.array([asdict(o)[key] for o in found], float) for key in asdict(found[0])}
    return {
        "noise": name,
        "bias_pct": round(100 * float(table["bias"].mean()), 3),
        "error_95_pct": round(100 * float(np.quantile(np.abs(table["bias"]), 0.95)), 2),
        "coverage": round(float(table["is_covered"].mean()), 3),
        "half_width_pct": round(100 * float(np.median(table["half_width"])), 2),
        "warmup": round(float(table["warmup"].mean())),
        "timed": round(float(table["timed"].mean())),
        "stable": round(float(table["is_stable"].mean()), 3),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=600)
    options.add_argument("--first", type=int, default=0, help="index of the first run, its seed")
    options.add_argument("--only", action="append", help="rows with this in their name")
    options.add_argument("--target-ci", type=float, default=SETTINGS.target_ci)
    options.add_argument("--rounds", type=int, default=1, help="one of so many is simulated")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    settings = Measure(target_ci=chosen.target_ci, rounds=chosen.rounds).of_a_round
    names = [n for n in noises() if not chosen.only or any(word in n for word in chosen.only)]
    rows = []
    with ProcessPoolExecutor(chosen.jobs) as pool:
        parts = {
            name: [
                pool.submit(
                    outcomes,
                    name,
                    min(_AT_ONCE, chosen.runs - first),
                    chosen.first + first,
                    settings,
                )
                for first in range(0, chosen.runs, _AT_ONCE)
            ]
            for name in names
        }
        for name, waiting in parts.items():
            rows.append(row(name, [o for part in waiting for o in part.result()]))
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if chosen.output:
        content = {
            "runs": chosen.runs,
            "first": chosen.first,
            "target_ci": chosen.target_ci,
            "rounds": chosen.rounds,
            "rows": rows,
        }
        chosen.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
