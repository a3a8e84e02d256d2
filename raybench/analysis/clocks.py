"""Whether the clocks of two points let their step times be compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

Row = Mapping[str, Any]

# A GPU at work runs at its power limit: that is its speed, as long as both points had it.
_NORMAL = frozenset({"power_cap", "sync_boost"})
# More than this between the clocks of two points is a difference of the machine's own doing.
_LARGEST_DIFFERENCE = 0.01


def why_not_comparable(row: Row, base: Row) -> str | None:
    """Why the ratio of a point and its baseline point is none; the same rule for both. Pure.

    Heat and faults are no state to be compared; other limits are, where the two median SM clocks
    differ by 1 % at most. What is not known (null) is no reason.
    """
    for one, name in ((base, "the baseline point"), (row, "this point")):
        reasons = [reason for reason in _reasons(one) if reason not in _NORMAL]
        if reasons:
            return f"clocks were limited at {name} ({', '.join(reasons)})"
    mhz, base_mhz = (_mhz(one) for one in (row, base))
    if not mhz or not base_mhz or abs(math.log(mhz / base_mhz)) <= _LARGEST_DIFFERENCE:
        return None
    return f"SM clocks differ: {mhz:.0f} MHz, and {base_mhz:.0f} MHz at the baseline point"


def _reasons(row: Row) -> list[str]:
    if pd.isna(row["throttled"]) or not row["throttled"]:
        return []
    reasons = row["throttle_reasons"]
    return ["reason unknown"] if reasons is None or not len(reasons) else list(reasons)


def _mhz(row: Row) -> float | None:
    mhz = row["sm_clock_mhz_p50"]
    return None if pd.isna(mhz) else float(mhz)
