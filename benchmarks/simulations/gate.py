"""What a gate with `raybench compare --fail-on regression` finds, misses and calls wrongly.

    python -m benchmarks.simulations.gate [--comparisons 1000] [--only power]

Runs whose true rates are known are compared by the function behind the command; of every 500
comparisons one also goes through the command over written runs, and must end alike. The logarithm
of a point's step in a run is its level, plus a deviation of the point (sd), plus a deviation of the
whole run (shift). Each side has three runs of one round. ± in a table is one standard error.

noisy: without a change, some points scatter more than the others. false: share of comparisons that
exit with 1.

power: all points, or a single one, take longer by `change`. found: share of the changed points that
are called slower. green: share of the comparisons that exit with 0.

seen: a single point is slower by as much as the comparison says that it detects in 95 % of cases.
same runs: share found where that change is added to the runs that said so. new runs: share found
in other runs, where all have the median of these changes.

looks: without a change; where a comparison exits with 5, each side gets two runs more, up to nine.
first, last: share of the gates that exit with 1 at the first look, and at any look.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import options
from benchmarks.simulations.runs import LEVEL_MS, RUNS, THRESHOLD, check_command, point_rows
from raybench.analysis.compare import SLOWER, ComparedPoint, compare
from raybench.report.comparison import Comparison

BLIND = 0.1
EVERY = 500
MOST_RUNS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How far the runs of some points scatter."""

    points: int
    sd: float
    shift: float = 0.005
    # The first points scatter `times` as much.
    noisy: int = 0
    times: float = 1.0

    @property
    def name(self) -> dict[str, object]:
        """Return the first cells of a row."""
        noisy = f"{self.noisy} x{self.times:g}" if self.noisy else ""
        return {"points": self.points, "sd": self.sd, "shift": self.shift, "noisy": noisy}

    def draw(self, rng: np.random.Generator, runs: int) -> NDArray[np.float64]:
        """Return the steps in ms, runs x points."""
        sds = self.sd * np.where(np.arange(self.points) < self.noisy, self.times, 1.0)
        own = sds * rng.standard_normal((runs, self.points))
        return LEVEL_MS * np.exp(own + self.shift * rng.standard_normal((runs, 1)))


Sides = Sequence[NDArray[np.float64]]


def compared(sides: Sides) -> list[ComparedPoint]:
    """Compare two sides of runs. sides: the steps of each, runs x points."""
    base, new = (
        [list(point_rows(f"{name}{n}", [steps], 0.0)) for n, steps in enumerate(side)]
        for name, side in zip(("base", "new"), sides, strict=True)
    )
    return compare(base, new, threshold=THRESHOLD)


def exit_code(points: Sequence[ComparedPoint]) -> int:
    """Return what `raybench compare --fail-on regression` ends with."""
    found = Comparison(
        base=(),
        new=(),
        side_names=("", ""),
        are_tags=False,
        threshold=THRESHOLD,
        points=points,
        changes=(),
        point_changes={},
    )
    return 1 if found.is_regression else 5 if found.is_blind(BLIND) else 0


def judge(sides: Sides, number: int) -> tuple[list[ComparedPoint], int]:
    """Return the points and the exit code; one in EVERY also goes through the command."""
    points = compared(sides)
    code = exit_code(points)
    if number % EVERY == 0:
        written = {
            name: [(f"{name}{n}", [steps], 0.0) for n, steps in enumerate(side)]
            for name, side in zip(("base", "new"), sides, strict=True)
        }
        assert check_command(written) == (code, [point.verdict for point in points])
    return points, code


def share(found: Sequence[float]) -> str:
    """Write a mean and its standard error."""
    return f"{np.mean(found):.3f} ± {np.std(found) / math.sqrt(len(found)):.3f}"


def random_of(*names: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


def noisy(count: int) -> Iterator[dict[str, object]]:
    """Yield the rows of the table `noisy`."""
    for machine in (
        Machine(points=5, sd=0.015, noisy=1, times=6, shift=0.0),
        Machine(points=5, sd=0.01, noisy=2, times=6, shift=0.0),
        Machine(points=5, sd=0.015, noisy=1, times=6),
        Machine(points=5, sd=0.01, noisy=2, times=6),
        Machine(points=5, sd=0.015),
    ):
        rng = random_of("noisy", machine)
        codes = [
            judge([machine.draw(rng, RUNS), machine.draw(rng, RUNS)], number)[1]
            for number in range(4 * count)
        ]
        yield machine.name | {"false": share([code == 1 for code in codes])}


def power(count: int) -> Iterator[dict[str, object]]:
    """Yield the rows of the table `power`."""
    cells = itertools.product((1, 5, 36), (0.0, 0.005), (0.05, 0.1))
    for (points, shift, change), changed in itertools.product(cells, ("all", "one")):
        if points == 1 and changed == "one":
            continue
        machine = Machine(points=points, sd=0.015, shift=shift)
        rng = random_of("power", machine, change, changed)
        slower = points if changed == "all" else 1
        factors = np.where(np.arange(points) < slower, 1 + change, 1.0)
        found, codes = [], []
        for number in range(count):
            sides = [machine.draw(rng, RUNS), machine.draw(rng, RUNS) * factors]
            rows, code = judge(sides, number)
            found.append(np.mean([row.verdict == SLOWER for row in rows[:slower]]))
            codes.append(code)
        yield machine.name | {
            "slower": changed,
            "change": change,
            "found": share(found),
            "green": share([code == 0 for code in codes]),
        }


def seen(count: int) -> Iterator[dict[str, object]]:
    """Yield the rows of the table `seen`."""
    for points, shift in itertools.product((1, 5, 36), (0.0, 0.005)):
        machine = Machine(points=points, sd=0.015, shift=shift)
        rng = random_of("seen", machine)
        draws = [[machine.draw(rng, RUNS), machine.draw(rng, RUNS)] for _ in range(count)]
        least = [compared(sides)[0].least_seen or 1.0 for sides in draws]
        middle = float(np.median(least))
        same = [_finds_first(sides, one) for sides, one in zip(draws, least, strict=True)]
        others = ([machine.draw(rng, RUNS), machine.draw(rng, RUNS)] for _ in range(count))
        yield machine.name | {
            "seen from": f"{middle:.1%}",
            "same runs": share(same),
            "new runs": share([_finds_first(sides, middle) for sides in others]),
        }


def _finds_first(sides: Sides, slowdown: float) -> bool:
    """Return whether the first point is called slower if its rate falls by this share."""
    base, new = sides
    changed = new.copy()
    changed[:, 0] /= 1 - slowdown
    return compared([base, changed])[0].verdict == SLOWER


def looks(count: int) -> Iterator[dict[str, object]]:
    """Yield the rows of the table `looks`."""
    for machine in (
        Machine(points=3, sd=0.03),
        Machine(points=3, sd=0.05),
        Machine(points=3, sd=0.08),
        Machine(points=5, sd=0.05),
        Machine(points=5, sd=0.015, noisy=1, times=6),
    ):
        rng = random_of("looks", machine)
        first, last = [], []
        for _ in range(2 * count):
            sides = [machine.draw(rng, MOST_RUNS), machine.draw(rng, MOST_RUNS)]
            code = exit_code(compared([side[:RUNS] for side in sides]))
            first.append(code == 1)
            runs = RUNS
            while code == 5 and runs < MOST_RUNS:
                runs += 2
                code = exit_code(compared([side[:runs] for side in sides]))
            last.append(code == 1)
        yield machine.name | {"first": share(first), "last": share(last)}


TABLES = {"noisy": noisy, "power": power, "seen": seen, "looks": looks}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--only", choices=[*TABLES], help="this table alone")
    chosen = parser.parse_args()
    for name, rows in TABLES.items():
        if chosen.only in (None, name):
            table = pd.DataFrame(rows(chosen.comparisons))
            print(f"{name}\n{table.to_string(index=False)}\n", flush=True)


if __name__ == "__main__":
    main()
