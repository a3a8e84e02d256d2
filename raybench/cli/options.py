"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from raybench.errors import UsageError

_LONGEST_WAIT_S = 1_000_000.0

Option = Callable[[Callable[..., Any]], Callable[..., Any]]

results_option = click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder of the result tables.",
)
output_option = click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder for the result tables.",
)
overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a job setting; may be repeated. baseline.precision=fp32 sets one key beside "
    "those of the file, 'baseline={precision: fp32}' takes their place.",
)
text_format_option = click.option(
    "--format",
    "kind",
    type=click.Choice(["terminal", "md", "json"]),
    show_default="terminal",
    help="For a terminal, for a pull request, or for another program.",
)
json_format_option = click.option(
    "--json", "as_json", is_flag=True, help="The same as --format json."
)


def address_option(meaning: str = "The Ray cluster, as for `raybench sweep`.") -> Option:
    """Make the option that names the cluster."""
    return click.option(
        "--address",
        default="auto",
        show_default=True,
        metavar="auto|local|HOST:PORT",
        help=meaning,
    )


def device_option(meaning: str) -> Option:
    """Make the option that chooses the kind of the devices."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        default="auto",
        show_default=True,
        help=meaning,
    )


def _check_wait(_: click.Context, __: click.Parameter, wait_s: float) -> float:
    # Nothing is above or below NaN: it fails this test, and passes that of click's ranges.
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise UsageError(f"--wait {wait_s:g}: must be from 0 to {_LONGEST_WAIT_S:,.0f} seconds")
    return wait_s


wait_option = click.option(
    "--wait",
    "wait_s",
    type=float,
    callback=_check_wait,
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for devices: for other sweeps that use them to end, and for nodes that "
    "join late. Points that fit run meanwhile.",
)
shared_option = click.option(
    "--shared",
    is_flag=True,
    help="Measure beside other sweeps on the same devices; each row says who was there.",
)


def devices_option(more: str = "") -> Option:
    """Make the option that names the devices."""
    return click.option(
        "--devices",
        "devices_file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Use only the devices that FILE names, one a line: the UUID of a GPU, or HOST:NUMBER "
        f"of a CPU worker.{more}",
    )


class DeviceCount(click.ParamType[int]):
    """A number of devices, or a file that names them. most: how many there may be."""

    name = "N|FILE"

    def __init__(self, *, most: int) -> None:
        self._range = click.IntRange(min=1, max=most)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Count the devices. Raises UsageError for a file that names none, or something else."""
        if value.lstrip("-").isdecimal():
            return int(click.IntRange.convert(self._range, int(value), param, ctx))
        from raybench.records.device_list import read_device_list

        return len(read_device_list(Path(value)).names)


class Size(click.ParamType[int]):
    """A number of bytes with its unit."""

    name = "SIZE"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the bytes. Raises BadParameter for a text that is no size."""
        from raybench.job.sections import read_bytes

        count = None if value.replace(".", "").isdecimal() else read_bytes(value)
        if count is None:
            rule = "must be a size with its unit, as in 141GB or 80GiB"
            raise click.BadParameter(f"{rule}, given {value!r}", ctx, param)
        return round(count)


def format_asked(kind: str | None, as_json: bool) -> str | None:
    """Return the format that --format or --json asks for."""
    if as_json and kind not in (None, "json"):
        raise UsageError(f"--json: means --format json, got --format {kind}")
    return "json" if as_json else kind
