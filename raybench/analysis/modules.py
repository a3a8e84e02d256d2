"""Where a step's time goes, by module of the model and by region of the step. Pure."""

from __future__ import annotations

from typing import Any

import pandas as pd

from raybench.analysis.rounds import records


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


def slowest_regions(regions: pd.DataFrame) -> pd.DataFrame:
    """Return each region on the rank where it takes longest, in the order of the step.

    regions: rows of the table `regions` of one attempt at one point.
    Columns: region, calls, region_ms, share_pct.
    """
    known = regions.dropna(subset=["region", "region_ms"])
    longest = known.groupby("region", sort=False)["region_ms"].idxmax()
    columns = ["region", "calls", "region_ms", "share_pct"]
    return known.loc[longest, columns].reset_index(drop=True)


def regions_by_point(regions: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Return the `slowest_regions` of the last attempt at each point, a dict each.

    regions: rows of the table `regions` of one run.
    """
    last = regions[regions["attempt"] == regions.groupby("point_id")["attempt"].transform("max")]
    return {
        str(point_id): records(slowest_regions(of_point))
        for point_id, of_point in last.groupby("point_id")
    }
