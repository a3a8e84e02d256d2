"""The parts of a finished run put into one part a table: each has a schema of some 30 KB with it.

A merged part is written aside and renamed before those that it is made of are removed, and its
metadata names them. Where the command is killed in between, raybench reads each row once all the
same, and the next `compact` removes what was left; pandas sees those rows twice until then. Who
has listed the folder before the rename and opens the parts after it finds them gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raybench.errors import ResultsError
from raybench.results.lock import hold_run
from raybench.results.parts import MERGED, attempts_in, read_parts
from raybench.results.reader import read_run
from raybench.results.run import RunStatus
from raybench.results.tables import TABLES, schema
from raybench.results.writer import (
    clear_leftovers,
    name_together,
    parts_of,
    replace_part,
)

# Tables whose parts are named after attempts at points; parts of one batch have one name in all.
# `points` is the last: until it is merged, readers look for the others by the rows that they have.
_BY_ATTEMPT = ("samples", "modules", "regions", "telemetry", "points")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """How many parts a run had and has, and their sizes."""

    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int


def compact_run(root: Path, run_id: str) -> Compaction:
    """Put the parts of a run into one a table; rows and their order stay as they are.

    Raises ResultsError for a run that is being measured, for parts that are damaged, and for those
    that a newer version of raybench has written.
    """
    if read_run(root, run_id).status is RunStatus.RUNNING:
        raise ResultsError(f"{root}: run {run_id} is still running; compact it when it has ended")
    with hold_run(root, run_id):
        before = list(_sizes(root, run_id))
        clear_leftovers(root, run_id)
        if points := parts_of(root, "points", run_id):
            name = _name_of_all(points)
            for table in _BY_ATTEMPT:
                _merge(table, parts_of(root, table, run_id), name)
        _merge("devices", parts_of(root, "devices", run_id), "devices")
        after = list(_sizes(root, run_id))
    return Compaction(
        parts_before=len(before),
        parts_after=len(after),
        bytes_before=sum(before),
        bytes_after=sum(after),
    )


def _sizes(root: Path, run_id: str) -> Iterator[int]:
    """Sizes of the parts of a run, in bytes."""
    for table in TABLES:
        yield from (path.stat().st_size for path in parts_of(root, table, run_id))


def _name_of_all(points: Sequence[Path]) -> str:
    """Name the part of all attempts of a run; as it is, where one part has them all."""
    if len(points) == 1:
        return points[0].stem
    count = len(attempts_in(points, "points"))
    return name_together(points[0].stem.partition("-and-")[0], count)


def _merge(table: str, parts: Sequence[Path], name: str) -> None:
    if len(parts) < 2:
        return
    path = parts[0].with_name(f"{name}.parquet")
    others = [part for part in parts if part != path]
    whole = read_parts(parts, table, schema(table))
    merged = {MERGED: "/".join(part.name for part in others).encode()}
    replace_part(path, table, whole.replace_schema_metadata(schema(table).metadata | merged))
    for part in others:
        part.unlink()
