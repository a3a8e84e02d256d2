"""What each rank did in a point. Pure."""

from __future__ import annotations

import pandas as pd

_NS_PER_MS = 1e6


def rank_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """Describe timed samples by rank: rank, iterations, median_ms, min_ms, max_ms.

    samples: rows of the table `samples` of one attempt at one point.
    """
    timed = samples[~samples["is_warmup"].astype(bool)]
    by_rank = timed.groupby("rank")["step_ns"]
    return pd.DataFrame(
        {
            "iterations": by_rank.count(),
            "median_ms": by_rank.median() / _NS_PER_MS,
            "min_ms": by_rank.min() / _NS_PER_MS,
            "max_ms": by_rank.max() / _NS_PER_MS,
        }
    ).reset_index()
