"""What the devices of a point would do together if each did what it does alone. Pure.

Where devices differ, n of them are not worth n times the first one. What each does alone is read
from points of one device of its model, or else from the probe of an uneven step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raybench.analysis.settings import EXECUTION, batch_column, setting
from raybench.job.point import UNEVEN
from raybench.stats.shares import DeviceSpeed

Row = Mapping[str, Any]

# What a point of one device may differ in from the point that its speed is taken for.
_ABOUT_DEVICES = ("devices", *UNEVEN)
_ALIKE = tuple(name for name in EXECUTION if name not in _ABOUT_DEVICES)
_OF_PROBE = ("fixed_ms_by_rank", "speed_by_rank")
_MS_PER_S = 1000


def models_of(row: Row) -> list[str]:
    """List the model of the device of each rank; of rows that do not hold them, as far as known."""
    if found := _list(row.get("models_by_rank")):
        return found
    name = row["device_name"]
    return [str(name)] * int(row["world_size"]) if name else []


def probe_speeds(row: Row) -> list[float]:
    """Samples/s of each device alone with an equal share, by the probe; empty without one."""
    fixed_ms, items_per_s = (_list(row.get(name)) for name in _OF_PROBE)
    equal = round(row["global_batch_size"] / row["world_size"])
    lines = [
        DeviceSpeed(fixed_s=fixed / _MS_PER_S, items_per_s=rate)
        for fixed, rate in zip(fixed_ms, items_per_s, strict=True)
    ]
    return [equal / line.step_s(equal) for line in lines]


class OwnSpeeds:
    """The points of one device of some runs. rows: of `points`, with `batch`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._alone: dict[tuple[object, ...], dict[str, float]] = {}
        for row in rows:
            if row["world_size"] == 1 and _is_plain(row) and len(models_of(row)) == 1:
                of_models = self._alone.setdefault(_key(row), {})
                of_models.setdefault(models_of(row)[0], float(row["throughput"]))

    def together(self, row: Row) -> float | None:
        """Sum up the samples/s of the devices of a point; None where that of one is unknown."""
        if row["world_size"] == 1:
            return float(row["throughput"])
        alone = self._alone.get(_key(row), {})
        models = models_of(row)
        if models and not self.missing(row):
            return sum(alone[model] for model in models)
        return sum(probe_speeds(row)) or None

    def missing(self, row: Row) -> Sequence[str]:
        """List the models of which no point of one device tells; all where some are emulated."""
        known = self._alone.get(_key(row), {}) if setting(row, "slow_ratio") == 1 else {}
        return [model for model in dict.fromkeys(models_of(row)) if model not in known]


def differ(row: Row, base: Row) -> bool:
    """Whether the devices of two points, or those of one, are not all alike."""
    is_emulated = setting(row, "slow_ratio") < 1
    return is_emulated or len({*models_of(row), *models_of(base)}) > 1


def _list(cell: Any) -> list[Any]:
    return list(cell) if hasattr(cell, "__len__") else []


def _is_plain(row: Row) -> bool:
    is_known = row["status"] == "ok" and row["throughput"] == row["throughput"]
    return bool(is_known and row["throughput"] and setting(row, "slow_ratio") == 1)


def _key(row: Row) -> tuple[object, ...]:
    names = ("run_id", "workload", "scaling", *_ALIKE, batch_column(row) or "status")
    settings = (str(setting(row, name)) for name in names)
    return (*settings, *sorted(row["params"].items()))
