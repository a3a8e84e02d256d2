"""Figures of points and health checks against the references of their device's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.analysis.references import (
    Entry,
    ReferenceFile,
    References,
    SourceRun,
    Starts,
    make_entry,
    rounded,
)
from raybench.analysis.settings import OPTIONAL, batch_column, setting
from raybench.job.point import RUN_SETTINGS, setting_text
from raybench.records import Status
from raybench.records.health import is_time
from raybench.report import formatting
from raybench.report.plain_text import plain
from raybench.results.point_row import PointRow
from raybench.results.run import Run
from raybench.results.tables import units

# What a point is judged by: the first of these that it has, and its burst.
_FIGURES = (
    "busbw_gb_s",
    "throughput",
    "memory_gb_s",
    "achieved_tflops_per_device",
    "step_ms_p50",
)
_BURST = "burst_tflops_per_device"
HOW_TO_MAKE = "No reference for it; `raybench export RUN --format reference` writes one."
_SOFTWARE = ("torch", "cuda", "driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A figure beside its reference. name: of the quantity. point_id: "" in a health check."""

    name: str
    model: str
    value: float
    entry: Entry
    point_id: str = ""

    @property
    def share(self) -> float:
        """Return the speed as a share of the reference: above 1 is faster, also for times."""
        return self._share_of(self.value)

    @property
    def ends(self) -> tuple[float, float]:
        """Return the shares at both ends of the range, the lower one first."""
        first, last = sorted(map(self._share_of, (self.entry.low, self.entry.high)))
        return first, last

    def _share_of(self, value: float) -> float:
        return self.entry.value / value if is_time(self.entry.unit) else value / self.entry.value

    @property
    def is_within(self) -> bool:
        """Return whether the figure lies in the range."""
        return self.entry.low <= self.value <= self.entry.high

    @property
    def text(self) -> str:
        """Return `97% of the reference for H200 (94 to 101%, 6 devices, November 2026)`."""
        low, high = self.ends
        mark = "" if self.is_within else f", outside: {'slow' if self.share < 1 else 'fast'}"
        return (
            f"{self.share:.0%} of the reference for {self.model.removeprefix('NVIDIA ')} "
            f"({100 * low:.0f} to {high:.0%}, {self.entry.provenance}){mark}"
        )

    @property
    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object."""
        low, high = self.ends
        return {
            "point_id": self.point_id,
            "name": self.name,
            "model": self.model,
            "metric": self.entry.metric,
            "unit": self.entry.unit,
            "value": self.value,
            "share": self.share,
            "share_low": low,
            "share_high": high,
            "is_within": self.is_within,
            "reference": self.entry.model_dump(mode="json", exclude={"measured"}),
        }


def quantity_of(row: PointRow) -> dict[str, str]:
    """Return the settings that make a point the same in every run."""
    options = {
        name: setting_text(value)
        for name in OPTIONAL
        if (value := setting(row, name)) != RUN_SETTINGS[name].default
    }
    names = ["precision", *filter(None, [batch_column(row)]), "world_size"]
    fixed = {
        name: setting_text(value) for name in names if (value := getattr(row, name)) is not None
    }
    if row.world_size > 1:
        fixed["node_count"] = str(row.node_count)
    given = {"workload": row.workload, **row.params, **options, **fixed}
    return {plain(name): plain(text) for name, text in given.items()}


def fabric_of(row: PointRow) -> str:
    """Return what connected the devices, as NCCL named it; empty for one device."""
    return "; ".join(row.transports or ()) if row.world_size > 1 else ""


def figures_of(row: PointRow) -> Iterator[tuple[str, float]]:
    """Yield the metrics that a point is judged by, with their values."""
    known = (name for name in _FIGURES if getattr(row, name))
    for name in (next(known, None), _BURST):
        if name is not None and (value := getattr(row, name)):
            yield name, value


def _model_of(row: PointRow) -> str:
    """Return the model of a point's devices; empty where it is no measure of one model."""
    is_sound = row.status is Status.OK and not row.quick and not row.neighbours
    return row.device_name if is_sound and row.device_name and ", " not in row.device_name else ""


def standings(rows: Iterable[PointRow], references: References) -> list[Standing]:
    """Return each figure of the ok points that has a reference."""
    found = []
    for row in rows:
        if not (model := _model_of(row)):
            continue
        of, fabric = quantity_of(row), fabric_of(row)
        for metric, value in figures_of(row):
            entry = references.find(model, of, metric, fabric)
            if entry is not None:
                found.append(
                    Standing(
                        name=f"{quantity_name(of)}: {metric}",
                        model=model,
                        value=value,
                        entry=entry,
                        point_id=row.point_id,
                    )
                )
    return found


def quantity_name(of: Mapping[str, str]) -> str:
    """Return the settings of a quantity in a line: `gemm m=8192 precision=bf16`."""
    named = dict(of)
    first = named.pop("workload", None) or named.pop("test", "")
    return f"{first} {formatting.settings(named)}".strip()


def point_references(
    run: Run, devices: Sequence[Mapping[str, Any]], trials: Iterable[PointRow]
) -> list[ReferenceFile]:
    """Return the entries that a run supports, for each model that all devices of a point share.

    devices: rows of the table. trials: the last attempt at each point in each round; those that
    were short or not alone are left out.
    """
    uuids = [one["uuid"] for one in devices]
    measured: dict[str, dict[tuple[Any, ...], list[float]]] = {}
    for row in trials:
        model = _model_of(row)
        # Which of the devices a point of some of them had is not kept; one may be any of them.
        has_known_devices = row.world_size in (1, len(uuids))
        if not model or row.device_type != "cuda" or not has_known_devices:
            continue
        of, fabric = tuple(quantity_of(row).items()), fabric_of(row)
        for metric, value in figures_of(row):
            key = (of, metric, units("points")[metric], fabric, row.world_size)
            measured.setdefault(model, {}).setdefault(key, []).append(value)
    return [
        reference_file(
            model,
            run,
            devices,
            (
                (dict(of), metric, unit, fabric, ("/" if size == 1 else "+").join(uuids))
                for of, metric, unit, fabric, size in found
            ),
            found.values(),
        )
        for model, found in measured.items()
    ]


def reference_file(
    model: str,
    run: Run,
    devices: Iterable[Mapping[str, Any]],
    quantities: Iterable[tuple[Mapping[str, str], str, str, str, str]],
    values: Iterable[Sequence[float]],
) -> ReferenceFile:
    """Return the references of one run.

    quantities: of, metric, unit, fabric (see `Entry`) and UUIDs with + or / between them.
    values: of the starts of each.
    """
    devices = [one for one in devices if one["uuid"]]
    versions: dict[str, str] = {**run.versions}
    for one in devices:
        versions |= {**dict(one["versions"] or {}), "driver": one["driver_version"] or ""}
    source = SourceRun(
        date=run.started_at.date(),
        software={name: versions[name] for name in _SOFTWARE if versions.get(name)},
    )
    runs = {run.run_id: source}
    places = {one["uuid"]: f"{one['host']} {one['index']}" for one in devices}
    entries = []
    for (of, metric, unit, fabric, uuids), found in zip(quantities, values, strict=True):
        starts = Starts(run=run.run_id, devices=uuids, values=[rounded(value) for value in found])
        entries.append(make_entry(of, metric, unit, fabric, [starts], runs, places))
    return ReferenceFile(model=model, runs=runs, devices=places, quantities=entries)
