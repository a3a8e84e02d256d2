"""A run with its points as one JSON object."""

from __future__ import annotations

from dataclasses import asdict

from raybench.report.documents import format_object, records
from raybench.report.summary import Summary
from raybench.results.tables import units


def export(summary: Summary) -> str:
    """Return the members run, devices, units (of the columns of points) and points.

    points: the latest attempts, with all columns and what the report derives.
    """
    return format_object(
        run=asdict(summary.run),
        devices=records(summary.devices),
        units=units("points"),
        points=list(map(vars, summary.rows)),
    )
