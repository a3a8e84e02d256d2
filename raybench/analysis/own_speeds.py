"""What the devices of a point would do together if each did what it does alone. Pure.

Where devices differ, n of them are not worth n times the first one. What each does alone is read
from points of one device of its model, or else from the probe of an uneven step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raybench.analysis.settings import EXECUTION, batch_column, setting
from raybench.job.point import UNEVEN
from raybench.records import Status
from raybench.results.point_row import PointRow
from raybench.stats.shares import DeviceSpeed

# What a point of one device may differ in from the point that its speed is taken for.
_ABOUT_DEVICES = ("devices", *UNEVEN)
_ALIKE = tuple(name for name in EXECUTION if name not in _ABOUT_DEVICES)
_MS_PER_S = 1000


def models_of(row: PointRow) -> list[str]:
    """Return the model of the device of each rank; empty where it is not known."""
    if row.models_by_rank:
        return list(row.models_by_rank)
    return [row.device_name] * row.world_size if row.device_name else []


def probe_speeds(row: PointRow) -> list[float]:
    """Return the samples/s of each device alone with an equal share, by the probe.

    Empty where no probe was made.
    """
    if not row.global_batch_size or not row.fixed_ms_by_rank or not row.speed_by_rank:
        return []
    equal = round(row.global_batch_size / row.world_size)
    lines = [
        DeviceSpeed(fixed_s=fixed / _MS_PER_S, items_per_s=rate)
        for fixed, rate in zip(row.fixed_ms_by_rank, row.speed_by_rank, strict=True)
    ]
    return [equal / line.step_s(equal) for line in lines]


class OwnSpeeds:
    """The points of one device of some runs. rows: of `points`, with `batch`."""

    def __init__(self, rows: Iterable[PointRow]) -> None:
        self._alone: dict[tuple[object, ...], dict[str, float]] = {}
        for row in rows:
            is_plain = row.world_size == 1 and row.slow_ratio == 1 and row.status is Status.OK
            if is_plain and row.throughput and len(models_of(row)) == 1:
                of_models = self._alone.setdefault(_key(row), {})
                of_models.setdefault(models_of(row)[0], row.throughput)

    def together(self, row: PointRow) -> float | None:
        """Return the sum of what a point's devices do alone, in samples/s; None if not known."""
        if row.world_size == 1:
            return row.throughput
        alone = self._alone.get(_key(row), {})
        models = models_of(row)
        if models and not self.missing(row):
            return sum(alone[model] for model in models)
        return sum(probe_speeds(row)) or None

    def missing(self, row: PointRow) -> Sequence[str]:
        """Return the models that no point of one device measured; all where some are emulated."""
        known = self._alone.get(_key(row), {}) if row.slow_ratio == 1 else {}
        return [model for model in dict.fromkeys(models_of(row)) if model not in known]


def differ(row: PointRow, base: PointRow) -> bool:
    """Return whether the devices of two points are of several models, or one is emulated."""
    is_emulated = row.slow_ratio < 1
    return is_emulated or len({*models_of(row), *models_of(base)}) > 1


def _key(row: PointRow) -> tuple[object, ...]:
    names = ("run_id", "workload", "scaling", *_ALIKE, batch_column(row) or "status")
    settings = (str(setting(row, name)) for name in names)
    return (*settings, *sorted(row.params.items()))
