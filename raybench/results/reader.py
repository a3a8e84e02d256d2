"""The tables of a results folder, read as frames, and the runs that are in it."""

from __future__ import annotations

import os
import re
import socket
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.errors import ResultsError, ResultsWarning
from raybench.job.problems import did_you_mean
from raybench.records import Latest, Status, TrialKey, by_point
from raybench.results.columns import TABLE_NAMES, arrow_schema, columns_of, from_row
from raybench.results.parts import (
    UnreadablePartsError,
    plain_rows,
    read_parts,
)
from raybench.results.run import (
    HIDDEN,
    LOGS,
    Run,
    RunStatus,
    check_folder,
    has_driver,
    has_parts,
    no_row_of,
    run_folders,
    run_ids,
)
from raybench.results.run import (
    find_run as find_run,
)
from raybench.results.run import (
    pick as pick,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ATTEMPT = ("point_id", "attempt")
_NAMED_LOG = re.compile(r"(\d+)-(\w+)-(\d+)-rank(\d+)\.txt")
_ONE_ATTEMPT = re.compile(r"\d+-(\w+)-(\d+)\.parquet$")


def load(root: str | Path, table: str, run_id: str | None = None) -> pd.DataFrame:
    """Return one table as a frame for a report: nulls of numbers are NaN, maps are dicts.

    root, table, run_id, and what is raised: as of `raybench.load`.
    """
    frame: pd.DataFrame = read_table(root, table, run_id).to_pandas(maps_as_pydicts="strict")
    return frame


def read_table(
    root: str | Path, table: str, run_id: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return one table as an Arrow table. columns: names of those to read; None: all.

    Takes and raises the same as `raybench.load`.
    """
    import pyarrow as pa

    if table not in TABLE_NAMES:
        guess = did_you_mean(table, TABLE_NAMES)
        raise ResultsError(f"table: must be one of {', '.join(TABLE_NAMES)}, got {table!r}{guess}")
    from raybench.results.tables import schema

    whole = schema(table)
    wanted = whole if columns is None else pa.schema([whole.field(name) for name in columns])
    parts = _parts(Path(root), table, run_id)
    if run_id:
        return read_parts(parts, table, wanted)
    return _read_undamaged(Path(root) / table, parts, table, wanted)


def rows_of_attempts(
    root: Path,
    table: str,
    run_id: str,
    attempts: Iterable[tuple[str, int]],
    columns: Sequence[str] | None = None,
) -> Iterator[pd.DataFrame]:
    """Yield a frame for each of these attempts (point_id, attempt), in turn; empty without rows.

    table: one that has these two columns. columns: None: all. The whole table may not fit into
    memory: a part that is named after an attempt is read when its turn comes, the others together.
    Raises ResultsError as `raybench.load`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from raybench.results.tables import schema

    whole = schema(table)
    columns = whole.names if columns is None else list(columns)
    wanted = pa.schema([whole.field(name) for name in dict.fromkeys((*_ATTEMPT, *columns))])
    paths = _parts(root, table, run_id)
    named = {path: _ONE_ATTEMPT.match(path.name) for path in paths}
    own = {(name[1], int(name[2])): (path,) for path, name in named.items() if name}
    others = tuple(path for path, name in named.items() if not name)

    @lru_cache(maxsize=1)
    def read(paths: tuple[Path, ...]) -> pa.Table:
        return read_parts(paths, table, wanted)

    for point_id, attempt in attempts:
        found = read(own.get((point_id, attempt), others))
        is_wanted = pc.and_(
            pc.equal(found["point_id"], point_id), pc.equal(found["attempt"], attempt)
        )
        frame: pd.DataFrame = (
            found.filter(is_wanted).select(columns).to_pandas(maps_as_pydicts="strict")
        )
        yield frame


def traces(root: Path, run_id: str, point_id: str, attempt: int) -> list[Path]:
    """Return the traces of a profiled attempt at a point, by rank; empty without any."""
    name = f"*-{point_id}-{attempt}-rank*.json.gz"
    return sorted((root / "traces" / run_id).glob(name), key=lambda path: (len(path.name), path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """What one rank wrote to stdout and stderr in an attempt at a point, as far as it is kept."""

    point_id: str
    attempt: int
    rank: int
    text: str


def logs(root: Path, run_id: str, point_id: str = "*") -> list[RankLog]:
    """Return the logs of all ranks, in the order of the plan; empty where they wrote nothing."""
    found = [_NAMED_LOG.fullmatch(p.name) for p in (root / LOGS / run_id).glob(f"*-{point_id}-*")]
    names = sorted((m for m in found if m), key=lambda m: (m[1], int(m[3]), int(m[4])))
    return [
        RankLog(
            point_id=name[2],
            attempt=int(name[3]),
            rank=int(name[4]),
            text=(root / LOGS / run_id / name[0]).read_text("utf-8", "replace"),
        )
        for name in names
    ]


def _parts(root: Path, table: str, run_id: str | None) -> list[Path]:
    """Return the files of a table, of one run or of all, by run and name, but for hidden ones.

    Empty where the table has no folder. Raises ResultsError where there is no results folder, or no
    such run.
    """
    check_folder(root)
    if run_id and not any((root / name / run_id).is_dir() for name in TABLE_NAMES):
        root, run_id = find_run(root, run_id)
    folder = root / table / run_id if run_id else root / table
    return list(_files(folder)) if folder.is_dir() else []


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below it, sorted in each, but for hidden ones."""
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(HIDDEN)]
    for entry in sorted(visible, key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def _read_undamaged(folder: Path, paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Return the rows of these parts of many runs; a run with a damaged one is left out.

    Warns of each such run. folder: of the table. Raises UnreadablePartsError for parts that are
    damaged meanwhile.
    """
    try:
        return read_parts(paths, table, wanted)
    except UnreadablePartsError as error:
        damaged = {_run_of(folder, path): reason for path, reason in error.reasons.items()}
    for run_id, reason in damaged.items():
        _warn(f"{reason}; run {run_id} is left out")
    return read_parts([p for p in paths if _run_of(folder, p) not in damaged], table, wanted)


def _run_of(folder: Path, path: Path) -> str:
    return path.relative_to(folder).parts[0]


def _warn(text: str) -> None:
    warnings.warn(text, ResultsWarning, stacklevel=3)


def read_runs(root: str | Path, newest: int | None = None) -> list[Run]:
    """Return all runs, or the newest ones alone, oldest first.

    A run whose driver died on this host is interrupted, not running. Warns of runs that cannot be
    read, and leaves them out.
    """
    root = Path(root)
    ids = None if newest is None else run_ids(root)[-newest:]
    if ids is None:
        parts = _parts(root, "runs", None)
    else:
        parts = [path for run_id in ids for path in _files(root / "runs" / run_id)]
    table = _read_undamaged(root / "runs", parts, "runs", arrow_schema("runs", columns_of(Run)))
    found = []
    for row in plain_rows(table):
        try:
            found.append(_run_from_row(row))
        except ResultsError as error:
            _warn(f"{root}: {error}; it is left out")
    for run_id in _without_row(root):
        _warn(f"{root}: {no_row_of(root, run_id)}")
    found.sort(key=lambda run: (run.started_at, run.run_id))
    return [_as_it_stands(root, run) for run in found]


def _without_row(root: Path) -> list[str]:
    """Return the ids of the runs that have points and no part of `runs`."""
    with_row = {name for name in run_folders(root / "runs") if has_parts(root / "runs" / name)}
    names = [name for name in run_folders(root / "points") if name not in with_row]
    return [name for name in names if has_parts(root / "points" / name)]


def read_run(root: str | Path, run_id: str) -> Run:
    """Return one run, interrupted where its driver died on this host.

    run_id: the whole id. Raises ResultsError where it has no row, or one that cannot be read.
    """
    return _as_it_stands(Path(root), _read_stored_run(Path(root), run_id))


def _read_stored_run(root: Path, run_id: str) -> Run:
    """Return a run as its row says. Raises ResultsError where it has no row, or several."""
    found = plain_rows(read_table(root, "runs", run_id))
    if len(found) != 1:
        raise ResultsError(f"{root}: run {run_id} has {len(found)} rows in `runs`, not one")
    return _run_from_row(found[0])


def baselines(root: Path, run_id: str | None = None) -> dict[str, dict[str, str]]:
    """Return the settings of the baseline points by run_id, as text; of one run or of all."""
    rows_of_runs = plain_rows(read_table(root, "runs", run_id, ["run_id", "baseline"]))
    return {row["run_id"]: row["baseline"] or {} for row in rows_of_runs}


def _run_from_row(row: Mapping[str, Any]) -> Run:
    """Return the run of a row. Raises ResultsError for one without a start or a known status."""
    if row["started_at"] is None or row["status"] not in set(RunStatus):
        raise ResultsError(f"run {row['run_id']}: its row has no start, or no status")
    return from_row(Run, row)


def _as_it_stands(root: Path, run: Run) -> Run:
    """Return the run; one that is running by its row, but without a driver here, as interrupted."""
    # Not every network file system tells of locks that another host holds.
    is_here = run.status is RunStatus.RUNNING and run.host == socket.gethostname()
    if not is_here or has_driver(root, run.run_id) is not False:
        return run
    # Its driver may have come to the end after the row was read.
    run = _read_stored_run(root, run.run_id)
    if run.status is not RunStatus.RUNNING:
        return run
    # Its last sign of life. Not the time of its files, which a copy of them changes.
    starts = read_table(root, "points", run.run_id, ["started_at"]).column("started_at")
    ended = max(starts.drop_null().to_pylist(), default=run.started_at)
    statuses = by_point({key: one.status for key, one in latest(root, run.run_id).items()})
    finished_at = max(ended, run.started_at)
    if run.paused_s:
        # Its row was written when it went on.
        rewritten = (root / "runs" / run.run_id / "run.parquet").stat().st_mtime
        finished_at = max(finished_at, datetime.fromtimestamp(rewritten, UTC))
    return replace(
        count_points(run, statuses), status=RunStatus.INTERRUPTED, finished_at=finished_at
    )


def latest(root: Path, run_id: str) -> dict[TrialKey, Latest]:
    """Return the latest attempt at each trial that has a row; without a round it is of the first.

    Raises ResultsError for parts that are damaged or newer than this raybench.
    """
    columns = ["point_id", "attempt", "status", "round", "control_of"]
    rows = sorted(
        read_table(root, "points", run_id, columns).to_pylist(), key=lambda row: row["attempt"]
    )
    return {
        TrialKey(row["point_id"], row["round"] or 1, row["control_of"] or 0): Latest(
            attempt=row["attempt"], status=Status(row["status"])
        )
        for row in rows
    }


def count_points(run: Run, statuses: Mapping[str, str]) -> Run:
    """Return the run with the counts of its points, and the status that follows from them.

    statuses: of the latest attempt at each point, by point_id. Cancelled ones are not counted.
    """
    counts = Counter(statuses.values())
    ok, skipped = counts[Status.OK], counts[Status.SKIPPED]
    failed = counts.total() - ok - skipped - counts[Status.CANCELLED]
    status = RunStatus.FAILED if failed else RunStatus.OK
    return replace(run, status=status, points_ok=ok, points_skipped=skipped, points_failed=failed)
