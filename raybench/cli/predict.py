"""`raybench predict`: what a run's steps would take on more devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raybench.cli.completion import complete_run
from raybench.cli.options import (
    format_asked,
    json_format_option,
    results_option,
    text_format_option,
)
from raybench.cli.output import color, width, write_result
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    from raybench.analysis.prediction import Network
    from raybench.report.prediction import Forecast
    from raybench.stats.communication import Link, ReduceTimes

_LINK = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:GB/s)?\s*@\s*(\d+(?:\.\d+)?)\s*(?:us|µs|μs)?\s*")
_MOST_DEVICES = 1_000_000
# Runs near in name that are looked at for all_reduces on the same devices.
_MOST_READ = 60
_COLUMNS = ("workload", "params", "world_size", "status", "step_ms_p50", "device_name")


def read_world_sizes(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Read the value of --world-size: numbers with commas between them."""
    names = [name.strip() for name in text.split(",")]
    if all(re.fullmatch(r"\d{1,7}", name) and 2 <= int(name) <= _MOST_DEVICES for name in names):
        return tuple(sorted({int(name) for name in names}))
    raise UsageError(
        f"--world-size: must be numbers from 2 up to {_MOST_DEVICES:,}, as in 8,64,512, "
        f"got {text!r}"
    )


@click.command("predict")
@click.argument("run", default="latest", shell_complete=complete_run)
@click.option(
    "--world-size",
    "world_sizes",
    callback=read_world_sizes,
    required=True,
    metavar="N,N,…",
    help="Numbers of devices, each more than the run measured.",
)
@click.option(
    "--network",
    "asked",
    metavar="GB/s@µs|RUN",
    shell_complete=complete_run,
    help="The network between nodes: busbw of a large all_reduce and time of a tiny one, as in "
    "45@30; or a run with all_reduces, as of jobs/collectives.yaml.",
)
@results_option
@text_format_option
@json_format_option
def predict_command(
    run: str,
    world_sizes: tuple[int, ...],
    asked: str | None,
    results: Path,
    kind: str | None,
    as_json: bool,
) -> None:
    """Predict the data-parallel steps of RUN on more devices than it measured, with intervals.

    RUN is as for `raybench report`. The cost of communication is that of all_reduces which some run
    measured on the same devices, of --network, or else what the run itself shows. Needs no cluster.
    """
    kind = format_asked(kind, as_json) or "terminal"
    forecast = load_forecast(results, run, world_sizes, asked)
    write_result(_format(forecast, kind))


def load_forecast(
    results: Path, run: str, world_sizes: tuple[int, ...], asked: str | None
) -> Forecast:
    """Read the run and predict. Raises ResultsError where nothing can be predicted."""
    from raybench.analysis.prediction import omissions, predict
    from raybench.analysis.start_noise import known_starts
    from raybench.report.prediction import Forecast
    from raybench.results import reader

    root, run_id = reader.find_run(results, run)
    found, points = reader.read_run(root, run_id), reader.load(root, "points", run_id)
    largest = int(points["world_size"].max()) if len(points) else 0
    if world_sizes[0] <= largest:
        raise UsageError(
            f"--world-size {world_sizes[0]}: must be more than the {largest} that {run_id} measured"
        )
    network, source = _find_network(results, root, run_id, largest, asked)
    try:
        predictions = predict(points, world_sizes, network, known_starts(root, found))
    except ResultsError as error:
        raise ResultsError(f"{run_id}: nothing to predict: {error}") from error
    return Forecast(
        run=found,
        predictions=predictions,
        network=network,
        source=source,
        left_out=tuple(omissions(points).values()),
    )


_BY_THE_RUN = (
    "No measured all_reduce tells how communication grows: what the run itself exposes of it is "
    "taken to grow as the bytes that a device sends, 2 (n - 1) / n; all_reduces on more of these "
    "devices, as of jobs/collectives.yaml, or --network would tell."
)


def _find_network(
    results: Path, root: Path, run_id: str, largest: int, asked: str | None
) -> tuple[Network, str]:
    """Find what communication costs, and a sentence on where that is from.

    largest: world that the run measured; all_reduces of fewer devices do not tell of more.
    """
    from raybench.analysis.prediction import Network

    if asked is not None and "@" not in asked:
        times, name = _read_times(results, root, run_id, asked)
        if times.largest_world <= largest:
            raise ResultsError(
                f"--network {name}: has all_reduces of up to {times.largest_world} devices, "
                f"{run_id} steps on {largest}; more devices than that are needed"
            )
        return Network(times=times), _source_of(name, times)
    found = _times_beside(root, run_id)
    beside = next((one for one in found if one[0].largest_world > largest), None)
    network = Network(times=beside[0] if beside else None)
    if asked is None:
        return network, _source_of(beside[1], beside[0]) if beside else _BY_THE_RUN
    link = read_link(asked)
    said = (
        f"Between nodes all_reduces have a busbw of {link.bus_gb_s:g} GB/s and take "
        f"{link.latency_us:g} µs at least."
    )
    return replace(network, link=link, devices_per_node=_devices_per_node(root, run_id)), said


def read_link(text: str) -> Link:
    """Read a network as `45@30` or `45GB/s@30µs`. Raises UsageError."""
    from raybench.stats.communication import Link

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


def _read_times(results: Path, root: Path, run_id: str, asked: str) -> tuple[ReduceTimes, str]:
    """Read the all_reduces of the run that --network names. Raises ResultsError without any."""
    from raybench.analysis.prediction import reduce_times
    from raybench.results import reader

    home, name = reader.find_run(results, asked)
    rows = _rows(home, name)
    times = reduce_times(rows)
    if times is None:
        raise ResultsError(
            f"--network {name}: has no all_reduce of several devices; "
            "`raybench sweep jobs/collectives.yaml` measures some"
        )
    models = {str(row["device_name"]) for row in rows}
    own = {str(row["device_name"]) for row in _rows(root, run_id)}
    if not own & models:
        raise ResultsError(
            f"--network {name}: ran on {', '.join(sorted(models))}, {run_id} on "
            f"{', '.join(sorted(own))}; name a run on the same model"
        )
    return times, name


def _times_beside(root: Path, run_id: str) -> Iterator[tuple[ReduceTimes, str]]:
    """Find all_reduces that other runs measured on the same devices, the newest first."""
    from raybench.analysis.prediction import reduce_times
    from raybench.results.run import run_ids

    own = _uuids(root, run_id)
    others = (one for one in reversed(run_ids(root)) if one != run_id)
    for other in islice(others, _MOST_READ):
        if own and own <= _uuids(root, other) and (times := reduce_times(_rows(root, other))):
            yield times, other


def _uuids(root: Path, run_id: str) -> set[str]:
    """Read which devices a run had; none of a damaged one."""
    from raybench.results import reader

    try:
        rows = reader.read_table(root, "devices", run_id, ("uuid",)).to_pylist()
    except ResultsError:
        return set()
    return {row["uuid"] for row in rows if row["uuid"]}


def _rows(root: Path, run_id: str) -> list[dict[str, Any]]:
    from raybench.results import reader

    table = reader.read_table(root, "points", run_id, _COLUMNS)
    return list(table.to_pylist(maps_as_pydicts="strict"))


def _devices_per_node(root: Path, run_id: str) -> int:
    from collections import Counter

    from raybench.results import reader

    rows = reader.read_table(root, "devices", run_id, ("node_id",)).to_pylist()
    return max(Counter(row["node_id"] for row in rows).values(), default=1)


def _format(forecast: Forecast, kind: str) -> str:
    from raybench.report.text import prediction as text

    if kind == "md":
        return text.format_markdown(forecast)
    if kind == "json":
        return text.format_json(forecast)
    return text.format_terminal(forecast, width=width(), color=color())
