"""Points of a run for other programs: as files, or uploaded to trackers.

To add a format, add a module to formats/ with `export(summary) -> str`; its name, with `-` for `_`,
is that of the format. To add a tracker, add a module to trackers/ with `upload(summary) -> str`,
which returns a line about what it wrote.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raybench.report.summary import Summary


def format_names() -> list[str]:
    """Return the names of all formats; imports none of them."""
    return _names("formats")


def tracker_names() -> list[str]:
    """Return the names of all trackers; imports none of them."""
    return _names("trackers")


def export(summary: Summary, name: str) -> str:
    """Return the points of a run in a format."""
    text: str = _module("formats", name).export(summary)
    return text


def upload(summary: Summary, name: str) -> str:
    """Write the points of a run to a tracker and return a line about it.

    Raises UsageError where the tracker's library is missing or the tracker refuses.
    """
    line: str = _module("trackers", name).upload(summary)
    return line


def _names(folder: str) -> list[str]:
    found = pkgutil.iter_modules([str(Path(__file__).parent / folder)])
    return sorted(module.name.replace("_", "-") for module in found)


def _module(folder: str, name: str):  # type: ignore[no-untyped-def]
    return import_module(f"{__name__}.{folder}.{name.replace('-', '_')}")
