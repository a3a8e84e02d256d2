"""What comparisons and histories of runs say."""

from __future__ import annotations

from collections.abc import Mapping

from raybench.analysis.compare import (
    LEAST_RUNS,
    UNCLEAR,
    Fact,
    FactKind,
    NotDecided,
    PointChange,
    Undecided,
)
from raybench.report import formatting

# What changed around the points, where nothing did.
SAME_AROUND = "nothing that the tables tell: devices, driver, versions, variables, commit"
NO_CAUSE = "nothing changed that the tables tell"

_OF_RUN = {
    "job_sha256": "job file",
    "git_commit": "git commit",
    "raybench_sha256": "code of raybench",
}
_OF_DEVICES = {
    "name": "devices",
    "node_id": "nodes of the run",
    "host": "hosts",
    "uuid": "device UUIDs",
    "driver_version": "driver",
    "nccl_path": "NCCL file",
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
_OF_POINTS: Mapping[str, str] = {
    "compute_ms": "compute",
    "optimizer_ms": "optimizer",
    "comm_exposed_ms": "exposed communication",
    "unexplained_ms": "unexplained",
    "straggler_ms": "one rank slower",
    "data_ms": "waiting for data",
    "host_gap_ms": "device idle",
    "throttled": "throttled",
    "host_bound": "host-bound",
    "sm_clock_mhz_p50": "SM clock",
}


def not_decided(why: NotDecided) -> str:
    """Return why a point has no verdict, as `1 run of base, and a verdict needs 2`."""
    match why.kind:
        case Undecided.OTHER_DEVICE | Undecided.OTHER_NODE_COUNT:
            what = "device" if why.kind is Undecided.OTHER_DEVICE else "nodes"
            names = ("none" if value is None else str(value) for value in why.values)
            return f"other {what}: {', then '.join(names)}"
        case Undecided.FEW_RUNS:
            return f"{why.runs} run of {why.side}, and a verdict needs {LEAST_RUNS}"
        case Undecided.CHANCE:
            return "runs of the same thing may differ as much"
        case Undecided.WIDE:
            interval = f"{why.low:+.1%} to {why.high:+.1%}"
            return f"known to {interval} only, which is not within the threshold"


def fact_name(one: Fact) -> str:
    """Return what a fact of a run is called: `driver`, `code net.py`, `variable NCCL_ALGO`."""
    match one.kind:
        case FactKind.RUN:
            return _OF_RUN[one.name]
        case FactKind.DEVICE:
            return _OF_DEVICES[one.name]
        case FactKind.VERSION:
            return one.name
        case FactKind.CODE:
            return f"code {one.name}"
        case FactKind.VARIABLE:
            return f"variable {one.name}"


def point_change(one: PointChange) -> str:
    """Return what changed at a point, with its values before and now."""
    name = _OF_POINTS[one.column]
    if isinstance(one.base, bool):
        return f"{name} {'now' if one.new else 'before'}, not {'before' if one.new else 'now'}"
    before, now = (formatting.number(value, 3) for value in (one.base, one.new))
    return f"{name} {before} -> {now} {one.unit}"


def verdict_word(name: str | None, likely: str | None) -> str:
    """Return a verdict, as `slower`, or `slower?` for an unclear one that is likely slower."""
    return f"{likely}?" if name == UNCLEAR and likely else str(name)
