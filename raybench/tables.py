"""The tables of a results folder, read as frames, and the runs that are in it."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench import rows
from raybench.arrow_schemas import schema
from raybench.errors import ResultsError
from raybench.messages import did_you_mean
from raybench.parts import attempts_in, read_parts
from raybench.records import Latest, Status
from raybench.run import Run, RunStatus
from raybench.schemas import TABLES, units
from raybench.store import LATEST, has_driver

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = [
    "counted",
    "each_attempt",
    "find_run",
    "latest",
    "load",
    "load_attempt",
    "pick",
    "read_run",
    "read_runs",
    "read_table",
    "traces",
    "units",
]

_TIMES = ("started_at", "finished_at")  # of runs, in µs
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ATTEMPT = ("point_id", "attempt")
_ONE_ATTEMPT = re.compile(r"\d+-(\w+)-(\d+)\.parquet$")


def load(root: str | Path, table: str, run_id: str | None = None) -> pd.DataFrame:
    """One table as a pandas DataFrame, of all runs or of one.

    root: the results folder. table: runs, points, samples, devices, telemetry or modules.
    run_id: as `raybench report` takes it: an id, its unique prefix, `latest`, or a path.
    Columns are those of today's schema, also for parts of an older one (missing: null); maps
    are dicts. `raybench.units(table)` tells the units. Raises ResultsError for a table that
    does not exist and for a file that is not a part of it. `samples` and `modules` may hold an
    attempt that `points` has no row of, when its driver was killed between writing the two.
    """
    frame: pd.DataFrame = read_table(root, table, run_id).to_pandas(maps_as_pydicts="strict")
    return frame


def read_table(
    root: str | Path, table: str, run_id: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """As `load`, as an Arrow table; of some columns, or of all."""
    import pyarrow as pa

    if table not in TABLES:
        guess = did_you_mean(table, TABLES)
        raise ResultsError(f"table: must be one of {', '.join(TABLES)}, got {table!r}{guess}")
    whole = schema(table)
    wanted = whole if columns is None else pa.schema([whole.field(name) for name in columns])
    return read_parts(_parts(Path(root), table, run_id), table, wanted)


def load_attempt(root: Path, table: str, run_id: str, point_id: str, attempt: int) -> pd.DataFrame:
    """As `load`, the rows of one attempt at one point: of a table that has these columns."""
    home = _homes(root, table, run_id, [(point_id, attempt)]).get((point_id, attempt))
    paths = _parts(root, table, run_id) if home is None else [home]
    read = read_parts(paths, table, schema(table))
    frame: pd.DataFrame = read.to_pandas(maps_as_pydicts="strict")
    return frame[(frame["point_id"] == point_id) & (frame["attempt"] == attempt)]


def each_attempt(
    root: Path,
    table: str,
    run_id: str,
    attempts: Iterable[tuple[str, int]],
    columns: Sequence[str],
) -> Iterator[pd.DataFrame]:
    """The rows of each of these attempts (point_id, attempt), in turn; of some columns.

    One part at a time is in memory, but for attempts that somebody has put elsewhere.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = schema(table)
    wanted = pa.schema([whole.field(name) for name in dict.fromkeys((*_ATTEMPT, *columns))])
    attempts = list(attempts)
    homes = _homes(root, table, run_id, attempts)

    @lru_cache(maxsize=1)
    def rows_of(home: Path | None) -> pa.Table:
        paths = _parts(root, table, run_id) if home is None else [home]
        return read_parts(paths, table, wanted)

    for point_id, attempt in attempts:
        found = rows_of(homes.get((point_id, attempt)))
        is_mine = pc.and_(
            pc.equal(found["point_id"], point_id), pc.equal(found["attempt"], attempt)
        )
        frame: pd.DataFrame = found.filter(is_mine).select(list(columns)).to_pandas()
        yield frame


def _homes(
    root: Path, table: str, run_id: str, attempts: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Path]:
    """The parts that have these attempts, as far as names tell; somebody may have moved rows.

    A part of one attempt is named after it, one of several as that of their rows in `points`.
    """
    paths = {path.name: path for path in _parts(root, table, run_id)}
    named = {name: _ONE_ATTEMPT.match(name) for name in paths}
    homes = {(one[1], int(one[2])): paths[name] for name, one in named.items() if one}
    if not homes.keys() >= set(attempts):
        for points in _parts(root, "points", run_id):
            if points.name in paths and not named[points.name]:
                together = attempts_in([points], "points")
                homes.update(dict.fromkeys(together, paths[points.name]))
    return homes


def traces(root: Path, run_id: str, point_id: str, attempt: int) -> list[Path]:
    """The traces of a profiled attempt at a point, by rank; empty where there are none."""
    name = f"*-{point_id}-{attempt}-rank*.json.gz"
    return sorted((root / "traces" / run_id).glob(name), key=lambda path: (len(path.name), path))


def _parts(root: Path, table: str, run_id: str | None) -> list[Path]:
    """All files of a table, by run and name; those that start with . or _ are not ours to read."""
    if not root.is_dir():
        what = "a file, not a folder" if root.exists() else "no such folder"
        raise ResultsError(f"{root}: {what} of results; `raybench sweep JOB` makes one")
    if run_id and not any((root / name / run_id).is_dir() for name in TABLES):
        root, run_id = find_run(root, run_id)
    folder = root / table / run_id if run_id else root / table
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    hidden = (".", "_")
    return [p for p in found if not any(n.startswith(hidden) for n in p.relative_to(root).parts)]


def read_runs(root: str | Path) -> list[Run]:
    """All runs, oldest first; one whose driver died on this host is interrupted, not running."""
    found = [rows.run_from_row(row) for row in _run_rows(Path(root))]
    found.sort(key=lambda run: (run.started_at, run.run_id))
    return [_as_it_stands(Path(root), run) for run in found]


def read_run(root: str | Path, run_id: str) -> Run:
    """One run, as in `read_runs`. run_id: the whole id of a run that is there."""
    [row] = _run_rows(Path(root), run_id)
    return _as_it_stands(Path(root), rows.run_from_row(row))


def _as_it_stands(root: Path, run: Run) -> Run:
    # Not every network file system tells of locks that another host holds.
    is_here = run.status is RunStatus.RUNNING and run.host == socket.gethostname()
    if not is_here or has_driver(root, run.run_id) is not False:
        return run
    # Its driver may have come to the end after the row was read.
    run = rows.run_from_row(_run_rows(root, run.run_id)[0])
    if run.status is not RunStatus.RUNNING:
        return run
    # Its last sign of life.
    folder = root / "points" / run.run_id
    written = [path.stat().st_mtime for path in folder.glob("[!.]*.parquet")]
    ended = datetime.fromtimestamp(max(written), UTC) if written else run.started_at
    statuses = {point_id: one.status for point_id, one in latest(root, run.run_id).items()}
    finished_at = max(ended, run.started_at)
    return replace(counted(run, statuses), status=RunStatus.INTERRUPTED, finished_at=finished_at)


def latest(root: Path, run_id: str) -> dict[str, Latest]:
    """The latest attempt at each point that has a row, by point_id."""
    found = read_table(root, "points", run_id, ["point_id", "attempt", "status"]).to_pylist()
    found.sort(key=lambda row: row["attempt"])
    return {
        row["point_id"]: Latest(attempt=row["attempt"], status=Status(row["status"]))
        for row in found
    }


def counted(run: Run, statuses: Mapping[str, Status]) -> Run:
    """The run with the counts of its points and the status that follows from them.

    statuses: of the latest attempt at each point, by point_id. A cancelled one counts nowhere.
    """
    counts = Counter(statuses.values())
    ok, skipped = counts[Status.OK], counts[Status.SKIPPED]
    failed = counts.total() - ok - skipped - counts[Status.CANCELLED]
    status = RunStatus.FAILED if failed else RunStatus.OK
    return replace(run, status=status, points_ok=ok, points_skipped=skipped, points_failed=failed)


def _run_rows(
    root: Path, run_id: str | None = None, columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    import pyarrow as pa

    table = read_table(root, "runs", run_id, columns)
    times = [name for name in _TIMES if name in table.column_names]
    # As numbers: pyarrow imports pandas to make a datetime, and pyarrow.compute to cast, and `list`
    # shall not wait for either.
    for name in times:
        numbers = table[name].combine_chunks().view(pa.int64())
        table = table.set_column(table.column_names.index(name), name, numbers)
    content: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    for row in content:
        for name in times:
            if row[name] is not None:
                row[name] = _EPOCH + timedelta(microseconds=row[name])
    return content


def _run_ids(root: Path) -> list[str]:
    """Ids of all runs, oldest first: what tells more of a run takes longer to read."""
    found = _run_rows(root, columns=["run_id", "started_at"])
    return [row["run_id"] for row in sorted(found, key=lambda r: (r["started_at"], r["run_id"]))]


def find_run(root: str | Path, text: str) -> tuple[Path, str]:
    """The results folder and the run_id that `text` means.

    text: an id in `root`, its unique prefix, `latest`, or the path of a run in any results folder.
    Raises ResultsError, naming the candidates, when it means none or several.
    """
    path = Path(text)
    if os.sep in text and path.is_dir() and path.resolve().parent.name in TABLES:
        root, text = path.resolve().parents[1], path.resolve().name
    ids = _run_ids(Path(root))
    if not ids:
        raise ResultsError(f"{root}: no runs yet; `raybench sweep JOB` makes one")
    if text == LATEST:
        return Path(root), ids[-1]
    wanted = _run_of_path(Path(root), text) if os.sep in text else text
    return Path(root), pick(wanted, ids, kind="run", where=str(root))


def pick(prefix: str, ids: Sequence[str], *, kind: str, where: str) -> str:
    """The one id that is `prefix` or starts with it. Raises ResultsError naming the candidates."""
    if prefix in ids:
        return prefix
    found = [known for known in ids if prefix and known.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ResultsError(f"{where}: {kind} {prefix!r} is ambiguous: {_some(found)}")
    guess = did_you_mean(prefix, ids) or f"; there are: {_some(ids)}"
    raise ResultsError(f"{where}: no {kind} {prefix!r}{guess}")


def _run_of_path(root: Path, text: str) -> str:
    path = Path(text).resolve()
    inside = path.relative_to(root.resolve()).parts if path.is_relative_to(root.resolve()) else ()
    if len(inside) < 2 or inside[0] not in TABLES:
        raise ResultsError(
            f"{text}: not a run of {root}; give {root}/runs/RUN_ID, or the folder with --results"
        )
    return inside[1]


def _some(ids: Sequence[str], most: int = 5) -> str:
    """The last few ids: runs are in order of time, and the newest are the likeliest."""
    shown = ", ".join(ids[-most:])
    return f"{shown} and {len(ids) - most} more" if len(ids) > most else shown
