"""Where a model's time goes, by module. Pure."""

from __future__ import annotations

import pandas as pd


def slowest_modules(modules: pd.DataFrame) -> pd.DataFrame:
    """Find the times of each module on the rank where they are longest, the longest module first.

    modules: rows of the table `modules` of one attempt at one point.
    Columns: module, kind, calls, forward_ms, backward_ms (null without a backward).
    """
    by_module = modules.groupby(["module", "kind"], sort=False)
    longest = by_module[["calls", "forward_ms", "backward_ms"]].max().reset_index()
    total = longest["forward_ms"] + longest["backward_ms"].fillna(0.0)
    order = total.sort_values(ascending=False, kind="stable").index
    return longest.loc[order].reset_index(drop=True)
