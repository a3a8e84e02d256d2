"""Reports of nodes as files: `FOLDER/HOST.json`, written by the nodes and read by one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.conversion import MIB
from raybench.errors import ResultsError, shorten
from raybench.records.node_report import NodeReport
from raybench.results.columns import os_errors_in_one_line, replace_file

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 1
# A prolog runs as root, perhaps with a strict umask, and others collect the reports.
READABLE = 0o644
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REASON_CHARACTERS = 200
# The report of a node with 16 GPUs has less than 1 MB.
_MOST_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableReport:
    """A file that is no report of a node."""

    path: Path
    # One line.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReports:
    """The reports of a folder."""

    # Host -> its report.
    reports: Mapping[str, NodeReport]
    unreadable: tuple[UnreadableReport, ...]


def write_node_report(folder: Path, report: NodeReport) -> Path:
    """Write `FOLDER/HOST.json`, which replaces an earlier report of the host; return its path.

    Many nodes may write into one shared folder at the same time.

    Raises:
        ResultsError: the file cannot be written, or the name of the host is no file name.
    """
    if not _HOST.fullmatch(report.host):
        raise ResultsError(f"--report {folder}: host {report.host!r} cannot be a file name")
    path = folder / f"{report.host}.json"
    fields = {"schema_version": SCHEMA_VERSION, **asdict(report)}
    text = json.dumps(_without_nan(fields), indent=1, allow_nan=False)
    replace_file(path, f"{text}\n".encode(), READABLE)
    return path


def read_node_reports(folder: Path) -> StoredReports:
    """Read all reports of a folder; files that are no reports are returned with the reason.

    Raises:
        ResultsError: the folder cannot be read.
    """
    with os_errors_in_one_line(folder, "read", "give the folder of `--report`"):
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    reports = {}
    unreadable = []
    for path in paths:
        try:
            reports[path.stem] = _read(path)
        except (ValueError, OSError) as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            unreadable.append(UnreadableReport(path=path, reason=_first_line(text)))
    return StoredReports(reports=reports, unreadable=tuple(unreadable))


def _read(path: Path) -> NodeReport:
    """Read a report; raise ValueError or OSError if the file is none."""
    from pydantic import ValidationError

    # Anybody may write into a shared folder, and a pipe would block the collection.
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES // MIB} MiB")
    content = path.read_bytes()
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("not JSON, or not complete") from None
    version = fields.get("schema_version") if isinstance(fields, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION}, got {version!r}")
    try:
        report = _adapter().validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}") from None
    if report.host != path.stem:
        raise ValueError(f"host: must be {path.stem}, as the file is named, got {report.host!r}")
    try:
        began = datetime.fromisoformat(report.began)
    except ValueError:
        began = None
    if began is None or began.tzinfo is None:
        raise ValueError(f"began: must be a time with its time zone, got {report.began!r}")
    if not math.isfinite(report.seconds) or report.seconds < 0:
        raise ValueError(f"seconds: must be a number from 0 on, got {report.seconds}")
    return report


@cache
def _adapter() -> TypeAdapter[NodeReport]:
    from pydantic import TypeAdapter

    return TypeAdapter(NodeReport)


def _without_nan(value: Any) -> Any:
    """Return the value with None for each number that JSON has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _without_nan(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(member) for member in value]
    return value


def _first_line(text: str | None) -> str:
    lines = (text or "cannot be read").splitlines()
    return shorten(lines[0], _REASON_CHARACTERS)
