"""Figures of points beside the references of their device's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.analysis.references import Entry, Measurement, References
from raybench.analysis.rows import OPTIONAL, batch_column, setting
from raybench.job.point import RUN_SETTINGS, setting_text
from raybench.records import Status
from raybench.records.devices import is_time
from raybench.report.plain_text import plain
from raybench.results.tables import PointRow, units

# What a point is judged by: the first of these that it has, and its burst.
_FIGURES = ("busbw_gb_s", "throughput", "memory_gb_s", "achieved_tflops_per_device", "step_ms_p50")
_BURST = "burst_tflops_per_device"
HOW_TO_MAKE = "No reference is known; `raybench export RUN --format reference` writes one."


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A measured value beside its reference."""

    measured: Measurement
    entry: Entry

    def share_of(self, value: float) -> float:
        """Return a speed or time as a share of the reference: above 1 is faster, also for times."""
        return self.entry.value / value if is_time(self.entry.unit) else value / self.entry.value

    @property
    def share(self) -> float:
        """Return the share that was measured."""
        return self.share_of(self.measured.value)

    @property
    def is_within(self) -> bool:
        """Return whether the value lies in the range."""
        return self.entry.low <= self.measured.value <= self.entry.high

    @property
    def text(self) -> str:
        """Return `97% of the reference for H200 (94 to 101%, 6 devices, November 2026)`."""
        low, high = sorted(map(self.share_of, (self.entry.low, self.entry.high)))
        mark = "" if self.is_within else f", outside: {'slow' if self.share < 1 else 'fast'}"
        return (
            f"{self.share:.0%} of the reference for {self.measured.model.removeprefix('NVIDIA ')} "
            f"({100 * low:.0f} to {high:.0%}, {self.entry.provenance}){mark}"
        )

    @property
    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object."""
        return {
            "point_id": self.measured.point_id,
            "model": self.measured.model,
            "value": self.measured.value,
            "share": self.share,
            "is_within": self.is_within,
            "reference": self.entry.model_dump(mode="json", exclude={"measured"}),
        }


def count_within(found: Sequence[Standing]) -> str:
    """Return `within reference on 11 of 12 quantities`."""
    count = sum(one.is_within for one in found)
    return f"within reference on {count} of {len(found)} quantities"


def standings(measured: Iterable[Measurement], references: References) -> list[Standing]:
    """Return the measurements that have a reference, each beside it."""
    return [
        Standing(measured=one, entry=entry)
        for one in measured
        if (entry := references.find(one.model, one))
    ]


def measurements(rows: Iterable[PointRow], uuids: Sequence[str] = ()) -> Iterator[Measurement]:
    """Yield what points measured: of each its main rate or its step time, and its burst.

    Points are left out that are not ok or not on GPUs of one model, that were short, and that had
    neighbours. uuids: of all devices of the run. A measurement names its devices where the point
    had one or all of them: which ones a point had is not kept.
    """
    for row in rows:
        model = row.device_name or ""
        is_sound = row.status is Status.OK and row.device_type == "cuda"
        if not is_sound or row.quick or row.neighbours or not model or ", " in model:
            continue
        of = defining_settings(row)
        if row.world_size > 1:
            of["node_count"] = str(row.node_count)
        joint = {len(uuids): "+", 1: "/"}.get(row.world_size)
        main = next((name for name in _FIGURES if getattr(row, name)), None)
        for name in filter(None, (main, _BURST)):
            if value := getattr(row, name):
                yield Measurement(
                    model=model,
                    of=of,
                    metric=name,
                    unit=units("points")[name],
                    fabric="; ".join(row.transports or ()) if row.world_size > 1 else "",
                    value=value,
                    devices=joint.join(uuids) if joint else "",
                    point_id=row.point_id,
                )


def defining_settings(row: PointRow) -> dict[str, str]:
    """Return the settings that make a point the same in every run, without options at defaults."""
    values: dict[str, Any] = {"workload": row.workload, **row.params}
    for name in OPTIONAL:
        if (value := setting(row, name)) != RUN_SETTINGS[name].default:
            values[name] = value
    for name in filter(None, ("precision", batch_column(row), "world_size")):
        values[name] = getattr(row, name)
    known = {name: setting_text(value) for name, value in values.items() if value is not None}
    return {plain(name): plain(text) for name, text in known.items()}
