"""How often `raybench ab` decides wrongly, and what it costs.

    python -m benchmarks.simulations.ab [--jobs 10000] [--points 24]

Jobs whose truth is known are decided by the function behind the command. The logarithm of a rate in
a start has the standard deviation `scatter`; `unevenness` is the standard deviation of the
logarithm of the scatter over the points of a job.

false red: share of the jobs without any change in which a point is slower. unconfirmed: the same
before the three fresh pairs. false green: share of the points that are slower by 3 %, all alone in
their job, and called the same. found: share of these points that are called slower. pairs: mean
number of pairs, for a changed point up to the fresh pairs. detectable: its median; found there:
share found of points that are slower by what the decision calls detectable in the same pairs.
"""

from __future__ import annotations

import itertools
import math
import zlib

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import options
from raybench.ab.decision import CONFIRMING_PAIRS, LOOKS, Decision, Decisions, decide

SCATTERS = (0.004, 0.010, 0.015)
UNEVENNESS = (0.0, 0.3, 0.6)
CHANGE = 0.03
AT_ONCE = 1000


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=24)
    chosen = parser.parse_args()
    rows = []
    for scatter, unevenness in itertools.product(SCATTERS, UNEVENNESS):
        rows.append(cell(chosen.jobs, chosen.points, scatter, unevenness))
    print(pd.DataFrame(rows).to_string(index=False))


def cell(jobs: int, points: int, scatter: float, unevenness: float) -> dict[str, object]:
    """Return a row of the table."""
    rng = np.random.default_rng(zlib.crc32(repr((points, scatter, unevenness)).encode()))
    shares: list[dict[str, float]] = []
    sizes = [min(AT_ONCE, jobs - first) for first in range(0, jobs, AT_ONCE)]
    for size in sizes:
        log_ratios = draw(rng, (size, points), scatter, unevenness)
        unchanged = decide(log_ratios)
        changed = decide(slowed(log_ratios, CHANGE))
        at_limit = decide(slowed(log_ratios, unchanged.detectable[:, :1]))
        shares.append(
            {
                "false red": _any(unchanged, Decision.SLOWER),
                "unconfirmed": _any(unchanged, Decision.SLOWER, Decision.UNCONFIRMED),
                "same": _share(unchanged, Decision.SAME),
                "pairs": float(unchanged.pairs.mean()),
                "found": _of_first(changed, Decision.SLOWER),
                "false green": _of_first(changed, Decision.SAME),
                "pairs of found": _pairs_of_first(changed),
                "detectable": float(np.median(unchanged.detectable)),
                "found there": _of_first(at_limit, Decision.SLOWER),
            }
        )
    means = pd.DataFrame(shares).mul(sizes, axis=0).sum() / jobs
    row: dict[str, object] = {"scatter": f"{scatter:.1%}", "unevenness": unevenness}
    for name, value in means.items():
        row[str(name)] = f"{value:.1f}" if "pairs" in str(name) else f"{value:.2%}"
    return row


def draw(
    rng: np.random.Generator, shape: tuple[int, int], scatter: float, unevenness: float
) -> NDArray[np.float64]:
    """Return log ratios of jobs without a change, [jobs, points, pairs]."""
    sd = scatter * np.exp(unevenness * rng.standard_normal((*shape, 1)))
    return math.sqrt(2) * sd * rng.standard_normal((*shape, LOOKS[-1] + CONFIRMING_PAIRS))


def slowed(
    log_ratios: NDArray[np.float64], change: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the jobs with the first point slower by a share of its rate."""
    result = log_ratios.copy()
    result[:, 0] += np.log1p(-np.asarray(change))
    return result


def _any(decisions: Decisions, *kinds: Decision) -> float:
    return float(np.isin(decisions.decision, kinds).any(axis=-1).mean())


def _share(decisions: Decisions, kind: Decision) -> float:
    return float((decisions.decision == kind).mean())


def _of_first(decisions: Decisions, kind: Decision) -> float:
    return float((decisions.decision[:, 0] == kind).mean())


def _pairs_of_first(decisions: Decisions) -> float:
    """Return the mean pairs of the first point before the fresh pairs."""
    first = decisions.decision[:, 0]
    is_fresh = np.isin(first, [Decision.SLOWER, Decision.UNCONFIRMED])
    return float((decisions.pairs[:, 0] - CONFIRMING_PAIRS * is_fresh).mean())


if __name__ == "__main__":
    main()
