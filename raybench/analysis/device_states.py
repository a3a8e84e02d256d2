"""What the devices did while a point ran. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

import pandas as pd

_RANGES = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "gpu_utilization_pct")


def device_states(telemetry: pd.DataFrame, start: datetime, duration_s: float) -> pd.DataFrame:
    """Find the least and the most of what was sampled of each device from `start` on.

    telemetry: rows of the table of one run. Columns: node_id, index, samples, *_min and *_max of
    clocks, power, temperature and utilisation, and throttle_reasons (a list of all that occurred).
    Devices that did not work on the point are among them: the table does not tell which did.
    """
    # Nobody knows how long: then nothing was sampled meanwhile.
    until = start if pd.isna(duration_s) else start + timedelta(seconds=duration_s)
    during = telemetry[(telemetry["time"] >= start) & (telemetry["time"] <= until)]
    return pd.DataFrame(
        [
            {
                "node_id": node_id,
                "index": index,
                "samples": len(mine),
                **{f"{name}_min": mine[name].min() for name in _RANGES},
                **{f"{name}_max": mine[name].max() for name in _RANGES},
                "throttle_reasons": _reasons(mine["throttle_reasons"]),
            }
            for (node_id, index), mine in during.groupby(["node_id", "index"])
        ]
    )


def _reasons(column: pd.Series) -> list[str]:
    found = [reason for reasons in column if reasons is not None for reason in reasons]
    return list(dict.fromkeys(found))
