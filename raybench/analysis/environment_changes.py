"""What two runs were made with, and where that differs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

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
    """What is not as it was: its values in the two runs, `none` where one has none."""

    name: str
    base: str
    new: str


def facts(run: Run, devices: pd.DataFrame) -> dict[str, str]:
    """Return what can change a number, by name. devices: the rows of the run in that table.

    Where devices differ among themselves, their values stand beside each other.
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
    """Return the facts that differ, in the order of `facts`; code only where both runs have it."""
    both_tell_of_code = _CODE in base and _CODE in new
    return tuple(
        Change(name=name, base=base.get(name, NONE), new=new.get(name, NONE))
        for name in dict.fromkeys([*base, *new])
        if base.get(name) != new.get(name) and (both_tell_of_code or not name.startswith("code "))
    )


def _merge(of_driver: Any, of_workers: pd.Series) -> dict[str, str]:
    """Return versions or variables of the workers, and those that only the driver process has."""
    seen: dict[str, list[Any]] = {}
    for one in of_workers:
        for name, value in dict(one or {}).items():
            seen.setdefault(name, []).append(value)
    return dict(of_driver) | {name: _join(values) for name, values in seen.items()}


def _join(values: Iterable[Any]) -> str:
    known = {_text(value) for value in values if not pd.isna(value)}
    return ", ".join(sorted(known)) or NONE


def _text(value: Any) -> str:
    # An integer column with nulls holds floats.
    return f"{value:g}" if isinstance(value, float) else str(value)


def _count(names: pd.Series) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(names).items()))
