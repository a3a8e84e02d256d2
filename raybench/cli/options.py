"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

from raybench.errors import UsageError

results_option = click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder of the result tables.",
)
overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a job setting; may be repeated.",
)
json_format_option = click.option(
    "--json", "as_json", is_flag=True, help="The same as --format json."
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


def format_asked(kind: str | None, as_json: bool) -> str | None:
    """Return the format that --format or --json asks for."""
    if as_json and kind not in (None, "json"):
        raise UsageError(f"--json: means --format json, got --format {kind}")
    return "json" if as_json else kind
