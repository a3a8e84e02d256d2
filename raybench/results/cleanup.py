"""What a killed driver left behind of attempts that have no row in `points`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raybench.results.parts import attempts_in
from raybench.results.schema import TABLES
from raybench.results.writer import LOGS

_Attempts = frozenset[tuple[str, int]]


def clear_leftovers(root: Path, run_id: str) -> None:
    """Remove halves of parts, and samples, modules, traces and logs of attempts without a row.

    The run must be held: those attempts are made again. Raises ResultsError for damaged parts.
    """
    for table in TABLES:
        for path in (root / table / run_id).glob(".*.parquet.*"):
            path.unlink(missing_ok=True)
    doubtful = {**dict(_parts_without_twins(root, run_id)), **dict(_files_of_ranks(root, run_id))}
    if doubtful:
        known = attempts_in(_parts(root, "points", run_id), "points")
        for path, attempts in doubtful.items():
            if not attempts & known:
                path.unlink(missing_ok=True)


def _parts_without_twins(root: Path, run_id: str) -> Iterator[tuple[Path, _Attempts]]:
    """Parts that have none of the same name in `points`, with their attempts.

    Their rows may be in another part: somebody may have put many into one.
    """
    twins = {path.name for path in _parts(root, "points", run_id)}
    for table in ("samples", "modules", "regions"):
        for path in _parts(root, table, run_id):
            if path.name not in twins:
                yield path, attempts_in([path], table)


def _files_of_ranks(root: Path, run_id: str) -> Iterator[tuple[Path, _Attempts]]:
    for folder in ("traces", LOGS):
        for path in (root / folder / run_id).glob("*-*-*-rank*"):
            _, point_id, attempt, _ = path.name.split("-", 3)
            yield path, frozenset({(point_id, int(attempt))})


def _parts(root: Path, table: str, run_id: str) -> list[Path]:
    return sorted((root / table / run_id).glob("[!._]*.parquet"))
