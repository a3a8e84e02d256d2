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


def format_asked(kind: str | None, as_json: bool) -> str | None:
    """Return the format that --format or --json asks for."""
    if as_json and kind not in (None, "json"):
        raise UsageError(f"--json: means --format json, got --format {kind}")
    return "json" if as_json else kind
