"""What the run ran on: facts, devices and the job file, for the page."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from raybench.report import formatting
from raybench.report.charts.figure import Table
from raybench.report.summary import Summary

_HEADS = {
    "host": "host",
    "index": "index",
    "name": "model",
    "memory_bytes": "memory",
    "driver_version": "driver",
    "sm_clock_max_mhz": "SM clock at most, MHz",
    "power_cap_w": "power limit, W",
    "pcie_link": "PCIe",
    "numa_node": "NUMA",
    "cpu_count": "CPU cores of the node",
    "omp_num_threads": "OMP threads",
    "uuid": "UUID",
}


def facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Names and what is known of each."""
    run = summary.run
    yield "run", run.run_id
    yield "started", formatting.when(run.started_at)
    yield "took", formatting.course(run)
    yield "points", summary.counts
    yield "machine", summary.machine
    yield "cluster", formatting.plain(run.cluster)
    yield "driver ran on", formatting.plain(run.host)
    yield "command", formatting.plain(" ".join(run.argv))
    yield "versions", formatting.versions(summary.versions)
    yield "git commit", formatting.plain(run.git_commit or "")
    yield "variables", formatting.settings(run.environment)
    yield "tags", formatting.settings(run.tags)
    yield "in all points", formatting.settings(summary.shared)
    yield "job file's SHA-256", run.job_sha256
    yield "nodes lost", ", ".join(summary.lost_nodes)


def device_table(devices: pd.DataFrame) -> Table:
    """List what is known of each device, a row each."""
    used = [name for name in _HEADS if name in devices and devices[name].notna().any()]
    ordered = devices.sort_values(["host", "index"]) if len(devices) else devices
    rows = [[_cell(name, row[name]) for name in used] for row in ordered[used].to_dict("records")]
    return Table(columns=[_HEADS[name] for name in used], rows=rows, texts=len(used))


def _cell(name: str, value: object) -> str:
    if not formatting.has_value(value):
        return ""
    if name.endswith("_bytes"):
        return formatting.size(float(str(value)))
    return f"{value:g}" if isinstance(value, float) else formatting.plain(value)
