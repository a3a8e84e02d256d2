"""What a killed driver left behind of attempts that have no row in `points`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from raybench.parts import attempts_in
from raybench.schemas import TABLES

Known = Callable[[], frozenset[tuple[str, int]]]


def clear_leftovers(root: Path, run_id: str) -> None:
    """Remove halves of parts, and samples, modules and traces of attempts without a row.

    The run must be held: those attempts are made again. Raises ResultsError for damaged parts.
    """
    for table in TABLES:
        for path in (root / table / run_id).glob(".*.parquet.*"):
            path.unlink(missing_ok=True)

    @cache  # most runs have no such part, and need not be read
    def known() -> frozenset[tuple[str, int]]:
        return attempts_in(_parts(root, "points", run_id), "points")

    without_rows = _parts_without_rows(root, run_id, known)
    for path in [*without_rows, *_traces_without_rows(root, run_id, known)]:
        path.unlink(missing_ok=True)


def _parts_without_rows(root: Path, run_id: str, known: Known) -> Iterator[Path]:
    """Parts none of whose attempts has a row: somebody may have put many parts into one."""
    with_rows = {path.name for path in _parts(root, "points", run_id)}
    for table in ("samples", "modules"):
        for path in _parts(root, table, run_id):
            if path.name not in with_rows and not known() & attempts_in([path], table):
                yield path


def _traces_without_rows(root: Path, run_id: str, known: Known) -> Iterator[Path]:
    for path in (root / "traces" / run_id).glob("*-*-*-rank*.json.gz"):
        _, point_id, attempt, _ = path.name.split("-", 3)
        if (point_id, int(attempt)) not in known():
            yield path


def _parts(root: Path, table: str, run_id: str) -> list[Path]:
    return sorted((root / table / run_id).glob("[!._]*.parquet"))
