"""What is not as it was in another run: what it was made with, and parts and clocks of its points.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from raybench.records import Status
from raybench.results.breakdown import why_no_breakdown
from raybench.results.point_row import PointRow
from raybench.results.run import Run

NONE = "none"
_CODE = "code of raybench"  # told by every run since version 4 of the schema
# What tells devices of one model apart, and what follows from which of them a run was given.
_UUIDS, _HOSTS = "device UUIDs", "hosts"
_OF_ALLOCATION = frozenset(
    {
        _UUIDS,
        _HOSTS,
        "variable CUDA_VISIBLE_DEVICES",
        "variable NCCL_HOSTID",
    }
)
_COMMIT_CHARS = 12

# Column of `devices` -> what it is called. Not what changes from start to start by itself.
_DEVICE_FACTS = {
    "driver_version": "driver",
    "power_cap_w": "power cap W",
    "sm_clock_max_mhz": "highest SM clock MHz",
    "memory_clock_mhz": "memory clock MHz",
    "topology": "topology",
    "pcie_link_max": "PCIe link",
    "mig_mode": "MIG",
    "persistence_mode": "persistence mode",
    "memory_bytes": "memory bytes",
    "cpu_count": "CPU cores",
    "omp_num_threads": "OMP threads",
    "niceness": "niceness",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A fact that differs between two runs. base, new: its text in each; `none` where missing."""

    name: str
    base: str
    new: str


def facts(run: Run, devices: pd.DataFrame) -> dict[str, str]:
    """Return name -> text of all that can change a measured time in a run: versions, devices, code.

    What is not known is left out. Where devices differ, their values stand beside each other, with
    commas. devices: the rows of the run in that table.
    """
    found = {
        "job file": run.job_sha256[:12],
        "git commit": _commit(run.git_commit),
        # A file that only one of two runs has is not loaded by the other.
        **{f"code {name}": digest[:12] for name, digest in run.workload_files.items()},
        _CODE: (run.raybench_sha256 or NONE)[:12],
        "devices": _count(devices["name"]) if len(devices) else NONE,
        # A point may use fewer of them.
        "nodes of the run": str(devices["node_id"].nunique()),
        _HOSTS: _join(devices["host"]),
        # Of a CPU worker it names a process, which is another one in each run.
        _UUIDS: _join(devices.loc[devices["kind"] != "cpu", "uuid"]),
    }
    found |= {name: _join(devices[column]) for column, name in _DEVICE_FACTS.items()}
    for name, version in _merge(run.versions, devices["versions"]).items():
        found[name] = version
    for name, value in _merge(run.environment, devices["environment"]).items():
        found[f"variable {name}"] = value
    return {name: value for name, value in found.items() if value != NONE}


def lasting_changes(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[Change, ...]:
    """Return the changes, without those that only tell devices of one model apart."""
    return tuple(one for one in changes(base, new) if one.name not in _OF_ALLOCATION)


def _commit(text: str | None) -> str:
    """Return 12 digits of the commit, and `+changes` where files were changed."""
    commit, plus, changes = (text or NONE).partition("+")
    return commit[:_COMMIT_CHARS] + plus + changes


def changes(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[Change, ...]:
    """Return the facts that differ; of code only where both runs tell of theirs.

    In the order of `base`, then those that only `new` has. What a run lacks is told as `NONE`.
    """
    both_tell_of_code = _CODE in base and _CODE in new
    return tuple(
        Change(name=name, base=base.get(name, NONE), new=new.get(name, NONE))
        for name in dict.fromkeys([*base, *new])
        if base.get(name) != new.get(name) and (both_tell_of_code or not name.startswith("code "))
    )


def _merge(of_driver: Any, of_workers: pd.Series) -> dict[str, str]:
    """Return name -> text of the workers' versions or variables, and of those only the driver has.

    of_workers: a mapping or None for each. Values that differ stand beside each other, with commas.
    """
    seen: dict[str, list[Any]] = {}
    for one in of_workers:
        for name, value in dict(one or {}).items():
            seen.setdefault(name, []).append(value)
    return dict(of_driver) | {name: _join(values) for name, values in seen.items()}


def _join(values: Iterable[Any]) -> str:
    """Return the known values once each, sorted, with commas; `none` where none is known."""
    known = {_text(value) for value in values if not pd.isna(value)}
    return ", ".join(sorted(known)) or NONE


def _text(value: Any) -> str:
    # An integer column with nulls holds floats.
    return f"{value:g}" if isinstance(value, float) else str(value)


def _count(names: pd.Series) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(names).items()))


_PARTS = {
    "compute_ms": "compute",
    "optimizer_ms": "optimizer",
    "comm_exposed_ms": "exposed communication",
    "straggler_ms": "one rank slower",
    "data_ms": "waiting for data",
    "host_gap_ms": "device idle",
}
_STATES = {"throttled": "throttled", "host_bound": "host-bound"}
# A part is told where it explains at least this share of the change of the step.
_LEAST_SHARE = 0.25
# Clocks move by a few steps of 15 MHz from run to run.
_LEAST_CLOCK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChange:
    """A figure or a state of a point in two runs. unit: empty for a state."""

    name: str
    base: float | bool
    new: float | bool
    unit: str = ""


def point_changes(base: PointRow, new: PointRow) -> tuple[PointChange, ...]:
    """Return the parts of the step that moved the way the step did, the largest first, then states.

    No part where one of the two breakdowns contradicts its step. The states are throttled and
    host-bound, and the SM clock where it moved by 2 % or more.
    """
    step_ms = (new.step_ms_p50 or 0.0) - (base.step_ms_p50 or 0.0)
    is_broken_down = not (why_no_breakdown(base) or why_no_breakdown(new))
    parts = []
    for column, name in _PARTS.items():
        before, now = getattr(base, column), getattr(new, column)
        is_known = is_broken_down and before is not None and now is not None
        if is_known and step_ms and (now - before) / step_ms >= _LEAST_SHARE:
            parts.append(PointChange(name=name, base=before, new=now, unit="ms"))
    parts.sort(key=lambda part: -abs(part.new - part.base))
    states = [
        PointChange(name=name, base=before, new=now)
        for column, name in _STATES.items()
        if (before := getattr(base, column)) is not None
        and (now := getattr(new, column)) is not None
        and before != now
    ]
    before, now = base.sm_clock_mhz_p50, new.sm_clock_mhz_p50
    if before and now and abs(now / before - 1) >= _LEAST_CLOCK:
        states.append(PointChange(name="SM clock", base=before, new=now, unit="MHz"))
    return (*parts, *states)


def all_point_changes(
    base: Sequence[PointRow], new: Sequence[PointRow]
) -> dict[str, tuple[PointChange, ...]]:
    """Return point_id -> `point_changes` of the points that are ok in both runs.

    base, new: one row a point (`mean_of_rounds`).
    """
    of_base = {row.point_id: row for row in base if row.status is Status.OK}
    return {
        row.point_id: point_changes(of_base[row.point_id], row)
        for row in new
        if row.status is Status.OK and row.point_id in of_base
    }
