"""Points of a run for other programs: as files, or uploaded to trackers.

To add a format, add a module to formats/ with `export(summary) -> str`; its name, with `-` for `_`,
is that of the format. To add a tracker, add a module to trackers/ with `upload(summary) -> str`,
which returns a line about what it wrote. Nothing here imports them before they are needed.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raybench.report.summary import Summary


def format_names() -> list[str]:
    """Return the names of all formats, sorted."""
    return _names("formats")


def tracker_names() -> list[str]:
    """Return the names of all trackers, sorted."""
    return _names("trackers")


def _names(folder: str) -> list[str]:
    found = pkgutil.iter_modules([str(Path(__file__).parent / folder)])
    return sorted(module.name.replace("_", "-") for module in found)


def export(summary: Summary, name: str) -> str:
    """Return the points of a run as the text of a file, in a format of `format_names`.

    Raises ResultsError where no point has what the format is made of.
    """
    return str(import_module(f"{__name__}.formats.{name.replace('-', '_')}").export(summary))


def upload(summary: Summary, name: str) -> str:
    """Write the points of a run to a tracker of `tracker_names`; return a line about it.

    Raises UsageError where the tracker's library is missing or the tracker refuses.
    """
    return str(import_module(f"{__name__}.trackers.{name.replace('-', '_')}").upload(summary))
