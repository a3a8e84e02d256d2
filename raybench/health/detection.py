"""What a check can find, read from the file that `benchmarks.simulations.detection` writes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from raybench.records.detection import CheckMode, DetectionLimit
from raybench.records.device import DeviceKind

DETECTION_FILE = Path(__file__).with_name("detection.json")


def detection_limit(
    mode: CheckMode, kind: DeviceKind, devices: int, has_references: bool
) -> DetectionLimit | None:
    """Return what a check of so many devices of one model finds; None if it was not simulated.

    Args:
        devices: the row with the next smaller number of devices counts.
        has_references: whether the model has reference values.
    """
    rows = [
        row
        for row in simulated_limits()
        if (row.mode, row.kind, row.has_references) == (mode, kind, has_references)
        and row.devices <= devices
    ]
    return max(rows, key=lambda row: row.devices, default=None)


@cache
def simulated_limits() -> tuple[DetectionLimit, ...]:
    """Return all rows of the file."""
    content = json.loads(DETECTION_FILE.read_text(encoding="utf-8"))
    return tuple(DetectionLimit(**row) for row in content["rows"])
