"""One run as plain data: its rows, and what is computed from them. No decisions, no words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from raybench.analysis.doubts import DoubtGroup, doubts_of_run
from raybench.analysis.references import (
    SHIPPED,
    MeasuredValue,
    References,
    Standing,
    impossible_figures,
    standings,
    without_repeated_mfu,
)
from raybench.analysis.rounds import Trials, latest_trials, regions_by_point, without_controls
from raybench.analysis.rows import (
    OPTIONAL,
    ScaledRow,
    batch_column,
    distinguishing_settings,
    point_rows,
    setting_of,
    typed_rows,
)
from raybench.analysis.scaling import scaling
from raybench.analysis.uneven import UnevenFleet, fleets
from raybench.errors import JobError
from raybench.job.point import EQUAL, RUN_SETTINGS, setting_text
from raybench.job.source import overrides_in, parse_source
from raybench.records.doubts import worst_of_each
from raybench.records.status import Cause, Status
from raybench.records.text import plain
from raybench.results import reader
from raybench.results.point_row import PointRow
from raybench.results.tables import RegionRow, Run, column_units


class Ranks(StrEnum):
    """What the ranks of a run are; the value is their name in the plural."""

    GPUS = "GPUs"
    WORKERS = "workers"


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class RunData:
    """A run with its rows of the tables. What is computed is kept: do not change the lists."""

    run: Run
    # Its rows of the table `devices`, as `raybench.load` gives them.
    devices: pd.DataFrame
    # All attempts, with controls, in table order.
    points: Sequence[PointRow]
    # The folder of the results.
    folder: Path = Path("results")
    # Its rows of the table `regions`, as `raybench.load` gives them.
    region_rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    # What its figures are held against.
    references: References = SHIPPED

    @cached_property
    def rows(self) -> list[ScaledRow]:
        """Return one row per point, ok or not, with its speed-up over its baseline (`scaling`).

        In the order of `points`. Figures that are impossible are among the doubts of a point.
        """
        rows = []
        for row in scaling(self.points, self.run.baseline):
            attempts_s = [one.duration_s for one in self.trials.rounds(row).values()]
            impossible = impossible_figures(row, self.references, attempts_s)
            doubts = without_repeated_mfu((*(row.doubts or ()), *impossible))
            rows.append(replace(row, doubts=worst_of_each(doubts)) if impossible else row)
        return rows

    @cached_property
    def ok_rows(self) -> list[ScaledRow]:
        """Return those of `rows` that are ok."""
        return [row for row in self.rows if row.status is Status.OK]

    @cached_property
    def trials(self) -> Trials:
        """Return the attempts of `points` by their rounds."""
        return Trials(self.points)

    @cached_property
    def attempts(self) -> list[PointRow]:
        """Return the last attempt at each point in each round, without controls."""
        return without_controls(latest_trials(self.points))

    @cached_property
    def doubts(self) -> tuple[DoubtGroup, ...]:
        """Return the doubts about the run and its points, merged, the most harmful first."""
        return doubts_of_run(self.rows, self.trials)

    @cached_property
    def standings(self) -> list[Standing]:
        """Return those `measured_values` of `rows` that have a reference, each with it."""
        return standings(measured_values(self.rows), self.references, self.run.run_id)

    @cached_property
    def ranks(self) -> Ranks:
        """Return `workers` if the first device (without one, all points) is a CPU, else `GPUs`."""
        known = list(self.devices["kind"][:1]) if not self.devices.empty else []
        kinds = {kind for kind in known or [row.device_type for row in self.rows] if kind}
        return Ranks.WORKERS if kinds == {"cpu"} else Ranks.GPUS

    @cached_property
    def node_counts(self) -> tuple[int, int]:
        """Return how many nodes the run has had at a time, and at most in a point (0: unknown)."""
        most = max((row.node_count or 0 for row in self.rows), default=0)
        # A Ray that was started anew gives the same host another id. Hosts may have the same name;
        # one has a device of each index once. After `--resume` elsewhere no point may have had all.
        alike = self.devices.groupby(["host", "address", "index"]).size()
        nodes = int(alike.groupby(level=["host", "address"]).max().sum())
        if not 0 < most <= nodes:
            nodes = int(self.devices["node_id"].nunique())
        return nodes, most

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Return name -> version of the run's software and driver, such as `2.27.3 and 2.28.9`.

        Versions of the workers replace versions of the driver process.
        """
        of_workers: dict[str, set[str]] = {}
        for device in self.devices.to_dict("records"):
            found = dict(device["versions"] or {})
            if isinstance(driver := device["driver_version"], str):
                found["driver"] = driver
            for name, version in found.items():
                of_workers.setdefault(name, set()).add(version)
        joined = {name: " and ".join(sorted(versions)) for name, versions in of_workers.items()}
        return {**self.run.versions, **joined}

    @cached_property
    def settings(self) -> list[str]:
        """Return the names of settings that tell the points apart: `distinguishing_settings`."""
        return distinguishing_settings(self.rows)

    @cached_property
    def shared(self) -> Mapping[str, Any]:
        """Return name -> value of parameters and non-default OPTIONAL settings all points share."""
        rows = self.rows
        if not rows:
            return {}
        first = rows[0]
        same = {k: v for k, v in first.params.items() if all(r.params.get(k) == v for r in rows)}
        alike = [name for name in OPTIONAL if len({getattr(row, name) for row in rows}) == 1]
        return same | {
            name: value
            for name in alike
            if (value := getattr(first, name)) is not None and value != RUN_SETTINGS[name].default
        }

    @cached_property
    def has_throughput(self) -> bool:
        """Return whether any point has a throughput; if none is ok, whether any has a batch."""
        if self.ok_rows:
            return any(row.throughput is not None for row in self.rows)
        return any(batch_column(row) for row in self.rows)

    @cached_property
    def fleets(self) -> Sequence[UnevenFleet]:
        """Return the groups of ok points alike but for `shares`, two or more each; may be empty."""
        return fleets(self.rows) if any(row.shares != EQUAL for row in self.rows) else ()

    @cached_property
    def regions(self) -> Mapping[str, Sequence[RegionRow]]:
        """Return point_id -> the regions of its last attempt with any: see `regions_by_point`."""
        return regions_by_point(typed_rows(self.region_rows, RegionRow))

    @cached_property
    def lost_nodes(self) -> tuple[str, ...]:
        """Return the hosts whose loss ended any attempt, each once; of an attempt only one."""
        hosts = (row.error_host for row in self.points if row.error_type == Cause.NODE_LOST)
        return tuple(dict.fromkeys(host for host in hosts if host is not None))

    @cached_property
    def overrides(self) -> list[str]:
        """Return the values of `--set` of the run's command."""
        return overrides_in(self.run.argv)

    @cached_property
    def job(self) -> Mapping[str, Any]:
        """Return the run's job file with its overrides, unchecked; {} where it cannot be read."""
        with suppress(JobError):
            source = parse_source("job", self.run.job_text, self.overrides)
            return dict(source.data)
        return {}

    @property
    def is_precision_unknown(self) -> bool:
        """Return whether a script ran whose job sets no precision: ignore the one in its rows."""
        is_script = bool(self.points) and self.points[0].workload == "script"
        return is_script and "precision" not in _axes(self.job)

    @property
    def is_batch_search(self) -> bool:
        """Return whether the job searched for the largest batch: out of memory is a result then."""
        matrix = self.job.get("matrix")
        return isinstance(matrix, dict) and isinstance(matrix.get("batch_size"), str | dict)


def load_run_data(results: Path, run: str, references: References = SHIPPED) -> RunData:
    """Return the data of a run; a health check's lacks findings. run: see `reader.find_run`.

    Raises ResultsError if `run` means none or several, or the run cannot be read.
    """
    root, run_id = reader.find_run(results, run)
    return RunData(
        run=reader.read_run(root, run_id),
        folder=root,
        devices=reader.load_table(root, "devices", run_id),
        points=point_rows(reader.load_table(root, "points", run_id)),
        region_rows=reader.load_table(root, "regions", run_id),
        references=references,
    )


def _axes(job: Mapping[str, Any]) -> set[str]:
    """Return the names of the axes of a job: those of matrix, zip and include."""
    places = [job.get("matrix")]
    for name in ("zip", "include"):
        entries = job.get(name)
        places += entries if isinstance(entries, list) else []
    return {name for place in places if isinstance(place, Mapping) for name in place}


# What a point is judged by: the first of these that it has, and its burst.
_FIGURES = ("busbw_gb_s", "throughput", "memory_gb_s", "achieved_tflops_per_device", "step_ms_p50")
_BURST = "burst_tflops_per_device"


def measured_values(rows: Iterable[PointRow], uuids: Sequence[str] = ()) -> Iterator[MeasuredValue]:
    """Yield for each row its main rate or step time and, if it has one, its burst rate.

    Rows that are not ok, not on GPUs of one model, quick, or had neighbours are left out; controls
    and attempts that were repeated are not. uuids: of all devices of the run. A measurement names
    them if the row had one ("a/b": one of these) or all ("a+b"): which it had is not kept.
    """
    for row in rows:
        model = row.device_name or ""
        is_sound = row.status is Status.OK and row.device_type == "cuda"
        is_of_several_models = len(set(row.models_by_rank or ())) > 1
        if not is_sound or row.quick or row.neighbours or not model or is_of_several_models:
            continue
        of = defining_settings(row)
        if row.world_size > 1:
            of["node_count"] = str(row.node_count)
        joint = {len(uuids): "+", 1: "/"}.get(row.world_size)
        main = next((name for name in _FIGURES if getattr(row, name)), None)
        for name in filter(None, (main, _BURST)):
            if value := getattr(row, name):
                yield MeasuredValue(
                    model=model,
                    of=of,
                    metric=name,
                    unit=column_units("points")[name],
                    fabric="; ".join(row.transports or ()) if row.world_size > 1 else "",
                    value=value,
                    devices=joint.join(uuids) if joint else "",
                    point_id=row.point_id,
                )


def defining_settings(row: PointRow) -> dict[str, str]:
    """Return name -> text of the settings that define a point, without OPTIONAL at defaults.

    Also without what is not known. The batch has the name of its `batch_column`.
    """
    values: dict[str, Any] = {"workload": row.workload, **row.params}
    for name in OPTIONAL:
        if (value := setting_of(row, name)) != RUN_SETTINGS[name].default:
            values[name] = value
    for name in filter(None, ("precision", batch_column(row), "world_size")):
        values[name] = getattr(row, name)
    return {plain(n): plain(setting_text(v)) for n, v in values.items() if v is not None}
