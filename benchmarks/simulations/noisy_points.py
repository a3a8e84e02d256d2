"""How often the interval of a noisy point among quiet points holds the truth.

    python -m benchmarks.simulations.noisy_points [--runs 4000]

Each run has three rounds. The logarithm of a point's value in a round is normal around 0 with the
standard deviation of the point, in the unit of the quiet points. The intervals are those of
`raybench.stats.summary.scatter`, which `raybench report` prints. The deviations "as the flagship"
are drawn anew in each run, with as few prior degrees of freedom (2.8) as the starts of the
committed ddp_scaling run have; its noisy points are the tenth with the largest deviations.

all, noisy: share of the 95 % intervals that hold the truth, over all points and over the noisy
ones. from: the lower end of the one-sided 95 % interval of `noisy`. half: the median of half an
interval. The columns with "before" are of the rule without the exception for noisy points.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import options
from raybench.stats import summary

ROUNDS = 3
FLAGSHIP_POINTS, FLAGSHIP_DEGREES = 36, 2.8
Z_95 = 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`noisy` of `count` points scatter `times` as much; None: all as the flagship's points."""

    name: str
    count: int
    noisy: int
    times: float | None

    def deviations(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return the standard deviation of each point; the noisy points come first."""
        if self.times is None:
            variances = FLAGSHIP_DEGREES / rng.chisquare(FLAGSHIP_DEGREES, self.count)
            return np.sort(np.sqrt(variances))[::-1]
        return np.where(np.arange(self.count) < self.noisy, self.times, 1.0)


def cells() -> Iterator[Cell]:
    """Yield the cells of the table."""
    for count, noisy, times in ((5, 1, 6.0), (12, 3, 10.0), (36, 1, 10.0), (36, 1, 4.0)):
        yield Cell(name=f"{noisy} of {count} x{times:g}", count=count, noisy=noisy, times=times)
    tenth = math.ceil(FLAGSHIP_POINTS / 10)
    yield Cell(name="as the flagship", count=FLAGSHIP_POINTS, noisy=tenth, times=None)
    for count in (5, 36):
        yield Cell(name=f"{count} equal", count=count, noisy=count, times=1.0)


def coverage(cell: Cell, runs: int) -> dict[str, object]:
    """Return a row of the table."""
    held: dict[str, list[NDArray[np.bool_]]] = {"": [], " before": []}
    halves: dict[str, list[float]] = {"": [], " before": []}
    rng = np.random.default_rng(zlib.crc32(cell.name.encode()))
    for _ in range(runs):
        sds = cell.deviations(rng)[:, np.newaxis]
        values = sds * rng.standard_normal((cell.count, ROUNDS))
        for rule, most in (("", summary._NOISY), (" before", math.inf)):
            with mock.patch.object(summary, "_NOISY", most):
                found = summary.scatter(values)
            half = np.array([one.half_width(1 / ROUNDS) if one else math.nan for one in found])
            held[rule].append(np.abs(values.mean(axis=1)) <= half)
            halves[rule].append(float(np.median(half)))
    row: dict[str, object] = {"points": cell.name}
    for rule, of_runs in held.items():
        # Points of one run share their level: the runs are the independent units.
        noisy = np.array([of_run[: cell.noisy].mean() for of_run in of_runs])
        row[f"all{rule}"] = np.mean(of_runs).round(3)
        row[f"noisy{rule}"] = noisy.mean().round(3)
        row[f"from{rule}"] = (noisy.mean() - Z_95 * noisy.std() / math.sqrt(runs)).round(3)
        row[f"half{rule}"] = np.median(halves[rule]).round(2)
    return row


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    chosen = parser.parse_args()
    print(pd.DataFrame([coverage(cell, chosen.runs) for cell in cells()]).to_string(index=False))


if __name__ == "__main__":
    main()
