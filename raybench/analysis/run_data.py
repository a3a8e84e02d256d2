"""One run as plain data: its rows, and values computed from them, without decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
from raybench.job.source import YamlSource, overrides_in, parse_source
from raybench.records.doubts import worst_of_each
from raybench.records.status import Cause, Status
from raybench.records.text import plain
from raybench.results import reader
from raybench.results.point_row import PointRow
from raybench.results.tables import RegionRow, Run, column_units


class Ranks(StrEnum):
    """What the ranks of a run are, in the plural."""

    GPUS = "GPUs"
    WORKERS = "workers"


class NodeCounts(NamedTuple):
    """How many nodes a run had, and how many of them worked on one point."""

    # All nodes that the run ever had; `--resume` may have added other hosts.
    of_run: int
    # Nodes of the point that used the most nodes; 0 if unknown.
    of_largest_point: int


@dataclass(frozen=True, kw_only=True)  # no slots, because of cached properties
class RunData:
    """A run with its rows of the tables. Callers must not change the lists, which are cached."""

    run: Run
    # Rows of the table `devices`.
    devices: pd.DataFrame
    # All attempts, with controls, in table order.
    points: Sequence[PointRow]
    # The results folder.
    folder: Path = Path("results")
    # Rows of the table `regions`.
    region_rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    references: References = SHIPPED

    @cached_property
    def rows(self) -> list[ScaledRow]:
        """One row per point, ok or not, with speed-ups and a doubt for each impossible figure."""
        rows = []
        for row in scaling(self.points, self.run.baseline):
            attempts_s = [attempt.duration_s for attempt in self.trials.rounds(row).values()]
            impossible = impossible_figures(row, self.references, attempts_s)
            if impossible:
                doubts = without_repeated_mfu((*(row.doubts or ()), *impossible))
                row = replace(row, doubts=worst_of_each(doubts))
            rows.append(row)
        return rows

    @cached_property
    def ok_rows(self) -> list[ScaledRow]:
        """The points of `rows` whose status is ok."""
        return [row for row in self.rows if row.status is Status.OK]

    @cached_property
    def trials(self) -> Trials:
        """The ok trials of `points` by round, and their controls."""
        return Trials(self.points)

    @cached_property
    def attempts(self) -> list[PointRow]:
        """The last attempt at each point in each round, without controls."""
        return without_controls(latest_trials(self.points))

    @cached_property
    def doubts(self) -> tuple[DoubtGroup, ...]:
        """The merged doubts about the run and its points, the most harmful first."""
        return doubts_of_run(self.rows, self.trials)

    @cached_property
    def standings(self) -> list[Standing]:
        """The measured values of `rows` that have a reference."""
        return standings(measured_values(self.rows), self.references, self.run.run_id)

    @cached_property
    def ranks(self) -> Ranks:
        """What reports call the ranks: workers on CPUs, else GPUs."""
        # All devices of a run are of one kind. Without devices, the points may know the kind.
        if self.devices.empty:
            kinds = {row.device_type for row in self.rows}
        else:
            kinds = {self.devices["kind"].iloc[0]}
        return Ranks.WORKERS if kinds - {None, ""} == {"cpu"} else Ranks.GPUS

    @cached_property
    def node_counts(self) -> NodeCounts:
        """The number of nodes of the run, and of its largest point."""
        nodes_of_largest_point = max((row.node_count or 0 for row in self.rows), default=0)
        # The ids of nodes change when Ray restarts, so count hosts by name and address.
        devices_per_index = self.devices.groupby(["host", "address", "index"]).size()
        # Hosts may share name and address. Each host has one device of an index, so the most
        # frequent index shows the number of hosts.
        hosts = int(devices_per_index.groupby(level=["host", "address"]).max().sum())
        # If a point used more nodes, or no point knows its nodes, count the ids.
        if not 0 < nodes_of_largest_point <= hosts:
            hosts = int(self.devices["node_id"].nunique())
        return NodeCounts(of_run=hosts, of_largest_point=nodes_of_largest_point)

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Versions of the software by name, as the workers loaded it, and of the GPU driver.

        If workers differ, the text lists all versions: `2.27.3 and 2.28.9`.
        """
        worker_versions: dict[str, set[str]] = {}
        for device in self.devices.to_dict("records"):
            versions = dict(device["versions"] or {})
            if isinstance(gpu_driver := device["driver_version"], str):
                versions["driver"] = gpu_driver
            for name, version in versions.items():
                worker_versions.setdefault(name, set()).add(version)
        joined = {name: " and ".join(sorted(texts)) for name, texts in worker_versions.items()}
        # The process of the sweep knows the versions of software that workers do not load.
        return {**self.run.versions, **joined}

    @cached_property
    def settings(self) -> list[str]:
        """Names of the settings that distinguish the points."""
        return distinguishing_settings(self.rows)

    @cached_property
    def shared(self) -> Mapping[str, Any]:
        """The settings that have the same value in all points, by name.

        These are parameters of the workload, and OPTIONAL settings that are not at their default.
        """
        if not self.rows:
            return {}
        first = self.rows[0]
        shared: dict[str, Any] = {}
        for name, value in first.params.items():
            if all(row.params.get(name) == value for row in self.rows):
                shared[name] = value
        for name in OPTIONAL:
            value = getattr(first, name)
            is_changed = value is not None and value != RUN_SETTINGS[name].default
            if is_changed and all(getattr(row, name) == value for row in self.rows):
                shared[name] = value
        return shared

    @cached_property
    def has_throughput(self) -> bool:
        """Whether a point has a throughput; without ok points, whether a point has a batch."""
        if self.ok_rows:
            return any(row.throughput is not None for row in self.rows)
        return any(batch_column(row) for row in self.rows)

    @cached_property
    def fleets(self) -> Sequence[UnevenFleet]:
        """Groups of ok points that differ in `shares` alone."""
        return fleets(self.rows) if any(row.shares != EQUAL for row in self.rows) else ()

    @cached_property
    def regions(self) -> Mapping[str, Sequence[RegionRow]]:
        """The regions of each point on their slowest rank, by point_id."""
        return regions_by_point(typed_rows(self.region_rows, RegionRow))

    @cached_property
    def lost_nodes(self) -> tuple[str, ...]:
        """Hosts whose loss ended an attempt."""
        hosts = (row.error_host for row in self.points if row.error_type == Cause.NODE_LOST)
        return tuple(dict.fromkeys(host for host in hosts if host is not None))

    @cached_property
    def overrides(self) -> list[str]:
        """The values that the command of the run gave with `--set`."""
        return overrides_in(self.run.argv)

    @cached_property
    def job(self) -> Mapping[str, Any]:
        """The job file of the run with its overrides, not validated; {} if it cannot be read."""
        with suppress(JobError):
            return dict(self._read_job().data)
        return {}

    @cached_property
    def has_other_world_sizes(self) -> bool:
        """Whether `--set` or section `cpu` changed world_size, so the job's question may not fit.

        A section `cpu` that also replaces the question does not count.
        """
        if any(text.startswith("matrix.world_size") for text in self.overrides):
            return True
        with suppress(JobError):
            changed = self._read_job().replaced.keys()
            return ("matrix", "world_size") in changed and ("question",) not in changed
        return False

    def _read_job(self) -> YamlSource:
        """Return the job file of the run as the run used it; may raise JobError."""
        on_cpu = bool(self.run.cpu_section)
        return parse_source("job", self.run.job_text, self.overrides, on_cpu=on_cpu)

    @property
    def is_precision_unknown(self) -> bool:
        """Whether the precision in rows is unknown: a script ran, and the job sets none."""
        is_script = bool(self.points) and self.points[0].workload == "script"
        return is_script and "precision" not in _axes(self.job)

    @property
    def is_batch_search(self) -> bool:
        """Whether the job searched for the largest batch, so that out of memory is a result."""
        matrix = self.job.get("matrix")
        return isinstance(matrix, dict) and isinstance(matrix.get("batch_size"), str | dict)


def load_run_data(results: Path, run: str, references: References = SHIPPED) -> RunData:
    """Return the data of a run.

    Args:
        run: an id, a unique prefix of an id, the name of a job, `latest`, or a path.
        references: normal figures of device models; by default the figures that come with raybench.

    Raises:
        ResultsError: there is no such run, or several, or the run cannot be read.
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
    """Return the names in matrix, zip and include of a job that was not validated."""
    mappings = [job.get("matrix")]
    for name in ("zip", "include"):
        entries = job.get(name)
        mappings += entries if isinstance(entries, list) else []
    axes: set[str] = set()
    for mapping in mappings:
        if isinstance(mapping, Mapping):
            axes.update(mapping)
    return axes


# A point is compared with references by the first of these columns that it has.
_MAIN_FIGURES = (
    *("busbw_gb_s", "throughput", "memory_gb_s", "achieved_tflops_per_device"),
    "step_ms_p50",
)
_BURST = "burst_tflops_per_device"


def measured_values(rows: Iterable[PointRow], uuids: Sequence[str] = ()) -> Iterator[MeasuredValue]:
    """Yield the main rate or step time of each row, and its burst rate.

    Only rows count that are ok, on GPUs of a single model, neither quick nor disturbed by other
    work.

    Args:
        rows: attempts; controls and repeated attempts count too.
        uuids: UUIDs of all devices of the run; without them the devices of values are unknown.
    """
    for row in rows:
        model = row.device_name or ""
        is_ok_on_gpu = row.status is Status.OK and row.device_type == "cuda"
        has_several_models = len(set(row.models_by_rank or ())) > 1
        if not is_ok_on_gpu or row.quick or row.neighbours or not model or has_several_models:
            continue
        settings = defining_settings(row)
        if row.world_size > 1:
            settings["node_count"] = str(row.node_count)
        # "a/b": one of both devices, and which is unknown. "a+b": both devices.
        if row.world_size == 1:
            devices = "/".join(uuids)
        elif row.world_size == len(uuids):
            devices = "+".join(uuids)
        else:
            # The point used several, but not all devices of the run.
            devices = ""
        # At most one name: the first main figure that the row has.
        main_figure = [name for name in _MAIN_FIGURES if getattr(row, name)][:1]
        for name in (*main_figure, _BURST):
            if value := getattr(row, name):
                yield MeasuredValue(
                    model=model,
                    of=settings,
                    metric=name,
                    unit=column_units("points")[name],
                    fabric="; ".join(row.transports or ()) if row.world_size > 1 else "",
                    value=value,
                    devices=devices,
                    point_id=row.point_id,
                )


def defining_settings(row: PointRow) -> dict[str, str]:
    """Return the settings that define a point, as text by name.

    OPTIONAL settings at their default are left out.
    """
    values: dict[str, Any] = {"workload": row.workload, **row.params}
    for name in OPTIONAL:
        value = setting_of(row, name)
        if value != RUN_SETTINGS[name].default:
            values[name] = value
    for column in ("precision", batch_column(row), "world_size"):
        # A point without a batch has no column of a batch.
        if column is not None:
            values[column] = getattr(row, column)
    return {
        plain(name): plain(setting_text(value))
        for name, value in values.items()
        if value is not None
    }
