"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

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
