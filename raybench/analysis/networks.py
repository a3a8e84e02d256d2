"""The network of a prediction: what all_reduces cost between the devices of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from raybench.analysis.prediction import Network, reduce_times
from raybench.analysis.rounds import ATTEMPT_COLUMNS
from raybench.analysis.rows import point_rows
from raybench.errors import ResultsError, UsageError
from raybench.results import reader
from raybench.results.point_row import PointRow
from raybench.results.run import run_ids
from raybench.stats.communication import Link, ReduceTimes

_LINK = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:GB/s)?\s*@\s*(\d+(?:\.\d+)?)\s*(?:us|µs|μs)?\s*")
# Runs near in name that are looked at for all_reduces on the same devices.
_MOST_READ = 60
_COLUMNS = (
    *ATTEMPT_COLUMNS,
    *("workload", "params", "world_size", "node_count", "step_ms_p50", "device_name"),
)

_BY_THE_RUN = (
    "No measured all_reduce tells how communication grows: what the run itself exposes of it is "
    "taken to grow as the bytes that a device sends, 2 (n - 1) / n; all_reduces on more of these "
    "devices, as of jobs/collectives.yaml, would tell."
)


def find_network(
    results: Path, root: Path, run_id: str, largest: int, asked: str | None
) -> tuple[Network, str]:
    """Return what communication costs, and a sentence on where that is from.

    largest: world that the run measured; all_reduces of fewer devices do not tell of more.
    asked: `--network`, as 45@30 or a run; None to look beside the run, for one node only.
    Raises UsageError, and ResultsError where the run that was asked for has no such all_reduces.
    """
    network = Network(devices_per_node=_devices_per_node(root, run_id))
    if asked is not None and "@" not in asked:
        return _network_of_run(network, results, root, run_id, largest, asked)
    found = _times_beside(root, run_id)
    beside = next((one for one in found if one[0].largest_world > largest), None)
    if beside:
        network = replace(network, times=beside[0])
    if asked is None:
        return network, _source_of(beside[1], beside[0]) if beside else _BY_THE_RUN
    link = read_link(asked)
    said = (
        f"Between nodes all_reduces have a busbw of {link.bus_gb_s:g} GB/s and take "
        f"{link.latency_us:g} µs at least."
    )
    return replace(network, link=link), said


def read_link(text: str) -> Link:
    """Return the link of a text such as `45@30` or `45GB/s@30µs`. Raises UsageError otherwise."""
    found = _LINK.fullmatch(text)
    gb_s, us = (float(number) for number in found.groups()) if found else (0.0, 0.0)
    if gb_s <= 0:
        raise UsageError(
            f"--network: must be GB/s@µs as in 45@30, above 0 GB/s, or a run, got {text!r}"
        )
    return Link(bus_gb_s=gb_s, latency_us=us)


def _source_of(name: str, times: ReduceTimes) -> str:
    return (
        f"All_reduces take as long as {name} measured them, on up to {times.largest_world} devices."
    )


def _network_of_run(
    network: Network, results: Path, root: Path, run_id: str, largest: int, asked: str
) -> tuple[Network, str]:
    """Return the network by the all_reduces of the run that --network names, and its source."""
    home, name = reader.find_run(results, asked)
    rows = _rows(home, name)
    times, between = (reduce_times(rows, between_nodes=one) for one in (False, True))
    known = [one for one in (times, between) if one is not None]
    if not known:
        raise ResultsError(
            f"--network {name}: has no all_reduce of several devices; "
            "`raybench sweep jobs/collectives.yaml` measures some"
        )
    models = {str(row.device_name) for row in rows}
    own = {str(row.device_name) for row in _rows(root, run_id)}
    if not own & models:
        raise ResultsError(
            f"--network {name}: ran on {', '.join(sorted(models))}, {run_id} on "
            f"{', '.join(sorted(own))}; name a run on the same model"
        )
    widest = max(known, key=lambda one: one.largest_world)
    if widest.largest_world <= largest and not between:
        raise ResultsError(
            f"--network {name}: has all_reduces of up to {widest.largest_world} devices, "
            f"{run_id} steps on {largest}; more devices than that are needed"
        )
    return replace(network, times=times, between=between), _source_of(name, widest)


def _times_beside(root: Path, run_id: str) -> Iterator[tuple[ReduceTimes, str]]:
    """Yield the all_reduces that other runs measured on the same devices, the newest first."""
    own = _uuids(root, run_id)
    others = (one for one in reversed(run_ids(root)) if one != run_id)
    for other in islice(others, _MOST_READ):
        if own and own <= _uuids(root, other) and (times := reduce_times(_rows(root, other))):
            yield times, other


def _uuids(root: Path, run_id: str) -> set[str]:
    """Return the UUIDs of the devices of a run; empty where its table is damaged."""
    try:
        rows = reader.read_table(root, "devices", run_id, ("uuid",)).to_pylist()
    except ResultsError:
        return set()
    return {row["uuid"] for row in rows if row["uuid"]}


def _rows(root: Path, run_id: str) -> list[PointRow]:
    table = reader.read_table(root, "points", run_id, _COLUMNS)
    return point_rows(table.to_pandas(maps_as_pydicts="strict"))


def _devices_per_node(root: Path, run_id: str) -> int:
    rows = reader.read_table(root, "devices", run_id, ("node_id",)).to_pylist()
    return max(Counter(row["node_id"] for row in rows).values(), default=1)
