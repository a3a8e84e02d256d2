"""How often `raybench history` shows a step where there is none, and where there is one.

    python -m benchmarks.simulations.history [--series 1000] [--jobs 2]

Each series is one point over many runs, whose step time scatters by 1.5 %. `find_level_starts`
judges every series, as in the command. The first two series of each row also go through
`raybench history --json`, which must show the same steps.

AR .6: runs of neighbouring days resemble each other, with a correlation of 0.6. slow fifth: every
fifth run, by chance, is slower by 2.5 standard deviations; slow spells: such runs come two by two
on average. t3: Student's t with three degrees of freedom.

steps: share of the series in which a step is shown (first table, where none is there), or share of
the true steps that are shown within one run of their place (second table). more: share of the
series that show more steps than there are. se: standard error of the share before it. In percent.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import options
from benchmarks.simulations.commands import run_command
from benchmarks.simulations.runs import write
from raybench.analysis.compare import THRESHOLD
from raybench.stats.levels import find_level_starts

SD, LEVEL_MS, CHANGE = 0.015, 10.0, math.log(1.05)
THROUGH_COMMAND = 2

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--series", type=int, default=1000, help="in each row")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for title, cells, measure in (
            ("no step", NULLS, false_steps),
            ("steps of 5 %", STEPPED, found_steps),
        ):
            rows = list(pool.map(partial(measure, chosen.series), cells))
            print(f"{title}\n{pd.DataFrame(rows).to_string(index=False)}\n", flush=True)


def normal(rng: np.random.Generator, runs: int, *, memory: float = 0.0) -> Floats:
    """Draw normal values of which neighbours have this correlation; their deviation is 1."""
    from scipy.signal import lfilter

    shocks = rng.standard_normal(runs + 100) * math.sqrt(1 - memory**2)
    return np.asarray(lfilter([1.0], [1.0, -memory], shocks)[100:])


def slow_fifth(rng: np.random.Generator, runs: int) -> Floats:
    """Draw values of which a fifth are larger by 2.5."""
    return normal(rng, runs) + 2.5 * (rng.random(runs) < 0.2)


def slow_spells(rng: np.random.Generator, runs: int) -> Floats:
    """Draw values of which a fifth, two in a row on average, are larger by 2.5."""
    values = normal(rng, runs)
    is_slow = rng.random() < 0.2
    for run in range(runs):
        values[run] += 2.5 * is_slow
        is_slow = rng.random() < (0.5 if is_slow else 0.125)
    return values


def heavy_tailed(rng: np.random.Generator, runs: int) -> Floats:
    """Draw values of Student's t with three degrees of freedom, with a deviation of 1."""
    return rng.standard_t(3, runs) / math.sqrt(3)


NOISES: dict[str, Draw] = {
    "independent": normal,
    "AR .3": partial(normal, memory=0.3),
    "AR .6": partial(normal, memory=0.6),
    "slow fifth": slow_fifth,
    "slow spells": slow_spells,
    "t3": heavy_tailed,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The series of one row. steps: (first run of the new level, its change as a logarithm)."""

    noise: str
    runs: int
    steps: tuple[tuple[int, float], ...] = ()


NULLS = [Cell(noise=noise, runs=runs) for noise, runs in itertools.product(NOISES, (10, 20, 60))]
STEPPED = [
    Cell(noise="independent", runs=10, steps=((5, CHANGE),)),
    Cell(noise="independent", runs=20, steps=((10, CHANGE),)),
    Cell(noise="independent", runs=60, steps=((30, CHANGE),)),
    Cell(noise="independent", runs=20, steps=((17, CHANGE),)),
    Cell(noise="independent", runs=60, steps=((57, CHANGE),)),
    Cell(noise="independent", runs=30, steps=((10, CHANGE), (20, -CHANGE))),
    Cell(noise="independent", runs=60, steps=((30, CHANGE), (40, -CHANGE))),
    Cell(noise="independent", runs=30, steps=((10, CHANGE), (20, CHANGE))),
    Cell(noise="AR .3", runs=20, steps=((10, CHANGE),)),
    Cell(noise="AR .6", runs=20, steps=((10, CHANGE),)),
    Cell(noise="AR .6", runs=60, steps=((30, CHANGE),)),
]


def false_steps(series: int, cell: Cell) -> dict[str, object]:
    """Return the row of a cell without a step."""
    named = {"noise": cell.noise, "runs": cell.runs}
    return named | percent("steps", [bool(steps) for steps in steps_of(series, cell)])


def found_steps(series: int, cell: Cell) -> dict[str, object]:
    """Return the row of a cell with steps."""
    found = steps_of(series, cell)
    places = [place for place, _ in cell.steps]
    is_shown = [
        any(abs(step - place) <= 1 for step in steps)
        for steps, place in itertools.product(found, places)
    ]
    at = ", ".join(f"{place} ({size:+.0%})" for place, size in cell.steps)
    named = {"noise": cell.noise, "runs": cell.runs, "at run": at}
    more = [len(steps) > len(places) for steps in found]
    return named | percent("steps", is_shown) | percent("more", more)


def percent(name: str, outcomes: list[bool]) -> dict[str, object]:
    """Return the share of true outcomes in percent, with its standard error."""
    share = sum(outcomes) / len(outcomes)
    error = math.sqrt(share * (1 - share) / len(outcomes))
    return {name: round(100 * share, 1), f"se {name}": round(100 * error, 1)}


def steps_of(series: int, cell: Cell) -> list[list[int]]:
    """Return the places of the steps that are shown in each series."""
    rng = np.random.default_rng(zlib.crc32(repr(cell).encode()))
    found = []
    for number in range(series):
        values = SD * NOISES[cell.noise](rng, cell.runs)
        for place, size in cell.steps:
            values[place:] += size
        steps = find_level_starts(values, 0.0, THRESHOLD)
        if number < THROUGH_COMMAND:
            assert steps == steps_by_command(values), (cell, number)
        found.append(steps)
    return found


def steps_by_command(values: Floats) -> list[int]:
    """Return the places of the steps that `raybench history` shows."""
    with tempfile.TemporaryDirectory() as folder:
        for number, value in enumerate(values):
            write(Path(folder), f"run{number:03}", [[LEVEL_MS * math.exp(value)]], 0.0)
        _, text = run_command("history", "--json", "--results", folder)
    points = json.loads(text)["points"]
    return [place for place, point in enumerate(points) if point["step"] is not None]


if __name__ == "__main__":
    main()
