"""The points of a run with their units and devices, for other programs."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from raybench.report.export.as_json import format_object, records
from raybench.report.summary import Summary
from raybench.results.schema import units


def export_json(summary: Summary, devices: pd.DataFrame) -> str:
    """run, devices, units of the columns of points, and points: the latest attempts, all columns
    and what the report derives."""
    return format_object(
        run=asdict(summary.run),
        devices=records(devices),
        units=units("points"),
        points=records(summary.scaling),
    )
