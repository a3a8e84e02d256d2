"""What the run ran on, as a section of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from raybench.report import wording
from raybench.report.html_text import definitions, escaped, folded, section, table
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
    "omp_num_threads": "OMP threads",
    "uuid": "UUID",
}


def environment_section(summary: Summary, devices: pd.DataFrame) -> str:
    """Of the run, its devices, their variables, and the job file."""
    run = summary.run
    columns, rows = _devices(devices)
    return section(
        "environment",
        "Environment",
        [
            definitions((name, text) for name, text in _facts(summary) if text),
            folded(f"Table: devices, {len(rows)}", table(columns, rows, len(columns)))
            if rows
            else "",
            folded("Job file", _preformatted(run.job_text)) if run.job_text.strip() else "",
        ],
    )


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    run = summary.run
    yield "run", run.run_id
    yield "started", wording.when(run.started_at)
    yield "took", wording.course(run)
    yield "points", summary.counts
    yield "machine", summary.machine
    yield "cluster", wording.plain(run.cluster)
    yield "driver ran on", wording.plain(run.host)
    yield "command", wording.plain(" ".join(run.argv))
    yield "versions", wording.versions(summary.versions)
    yield "git commit", wording.plain(run.git_commit or "")
    yield "variables", wording.settings(run.environment)
    yield "tags", wording.settings(run.tags)
    yield "in all points", wording.settings(summary.shared)
    yield "job file's SHA-256", run.job_sha256
    yield "nodes lost", ", ".join(summary.lost_nodes)


def _devices(devices: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    used = [name for name in _HEADS if name in devices and devices[name].notna().any()]
    ordered = devices.sort_values(["host", "index"]) if len(devices) else devices
    rows = [[_cell(name, row[name]) for name in used] for row in ordered[used].to_dict("records")]
    return [_HEADS[name] for name in used], rows


def _cell(name: str, value: object) -> str:
    if not wording.known(value):
        return ""
    if name.endswith("_bytes"):
        return wording.size(float(str(value)))
    return f"{value:g}" if isinstance(value, float) else wording.plain(value)


def _preformatted(text: str) -> str:
    lines: Sequence[str] = wording.plain_lines(text)
    return f'<pre tabindex="0">{chr(10).join(escaped(line) for line in lines)}</pre>'
