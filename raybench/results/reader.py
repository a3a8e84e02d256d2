"""Find the runs of a results folder, their status, and their tables as frames.

Ids that raybench makes contain the name of the job and the start, so runs can be listed without
their rows: reading the rows of 10,000 runs would take seconds. For other ids the row is read.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from raybench.errors import ResultsError, ResultsWarning
from raybench.job.problems import did_you_mean, quote
from raybench.records.record import TrialKey, status_by_point
from raybench.records.status import RunStatus, Status
from raybench.results.columns import (
    TABLE_NAMES,
    UnreadablePartsError,
    arrow_schema,
    columns_of,
    entries_of,
    from_row,
    parts_of,
    plain_rows,
    read_parts,
)
from raybench.results.tables import Run, schema

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# Means the newest run, so it is no valid id.
LATEST = "latest"
# Folder of logs of ranks, beside the tables.
LOGS = "logs"
# Number of ids that a message lists.
_MAX_LISTED = 5
# An id that raybench made: job, start, random suffix.
_GENERATED_ID = re.compile(r"(?P<job>.+)-(?P<start>\d{8}-\d{6})-[0-9a-f]+")
# Lock file of the driver, in the folder of the run; always empty.
LOCK = ".driver"


def find_run(root: str | Path, text: str) -> tuple[Path, str]:
    """Return (results folder, run_id) of the run that `text` means.

    If the row of the newest run cannot be read, an older run is taken with a ResultsWarning.

    Args:
        text: an id, `latest`, the name of a job (its newest run), or a unique prefix of an id. A
            folder inside `root`, or a path, may precede it: `examples/gemm`. The path of a run in a
            table is valid too.

    Raises:
        ResultsError: no run or several runs match, or the folder cannot be read.
    """
    folder, name = _split_folder(Path(root), text)
    job_of_run = {run_id: origin.job for run_id, origin in _origins(folder).items()}
    ids = list(job_of_run)
    if not ids:
        raise ResultsError(no_runs_message(folder))
    if name not in job_of_run:
        # Candidates for the newest run, oldest first.
        if name == LATEST:
            candidates = ids
        else:
            candidates = [run_id for run_id, job in job_of_run.items() if name and job == name]
        # Take the newest run whose row can be read.
        for run_id in reversed(candidates):
            if _read_origin(folder, run_id):
                return folder, run_id
        if candidates:
            return folder, candidates[-1]
        if name and name in _run_folders(folder / "points"):
            raise ResultsError(f"{folder}: {_missing_row_message(folder, name)}")
    way_out = "; give more of the id, or the name of a job for its newest run"
    jobs = {job for job in job_of_run.values() if job}
    return folder, pick(name, ids, kind="run", where=str(folder), way_out=way_out, names=jobs)


def _split_folder(root: Path, text: str) -> tuple[Path, str]:
    """Split `text` into a results folder, `root` if the text names none, and the rest."""
    folder_text, name = os.path.split(text)
    if not folder_text:
        return root, text
    # The path of a run, such as results/runs/RUN, or of a part in it.
    for path in (Path(text), Path(folder_text)):
        # Use os.path, because the methods of Path raise for long names.
        if path.parent.name in TABLE_NAMES and os.path.isdir(path):  # noqa: PTH112
            return path.parents[1], path.name
    for folder in (root / folder_text, Path(folder_text)):
        if os.path.isdir(folder / "runs"):  # noqa: PTH112
            return folder, name
    raise ResultsError(
        f"{text}: not a run of {root}; give {root}/runs/RUN_ID, or the folder with --results"
    )


def run_ids(root: Path) -> list[str]:
    """Return the ids of the runs, oldest first; runs with an unknown start come first.

    Runs that cannot be read cause a ResultsWarning.

    Raises:
        ResultsError: `root` is no folder, or its `runs` cannot be listed.
    """
    return list(_origins(root))


class _Origin(NamedTuple):
    """When a run started, and from which job; both are empty if unknown."""

    # YYYYMMDD-HHMMSS in UTC.
    start: str = ""
    job: str = ""


def _origins(root: Path) -> dict[str, _Origin]:
    """Return the origin of each run by id, oldest first."""
    _check_folder(root)
    origins: dict[str, _Origin] = {}
    parts = _parts_of_runs(root, "runs", _run_folders(root / "runs"))
    # A folder without a part is no run.
    ids = dict.fromkeys(path.parent.name for path in parts)
    for run_id in ids:
        match = _GENERATED_ID.fullmatch(run_id)
        origin = _Origin(match["start"], match["job"]) if match else _read_origin(root, run_id)
        origins[run_id] = origin or _Origin()
    oldest_first = sorted(origins, key=lambda run_id: (origins[run_id].start, run_id))
    return {run_id: origins[run_id] for run_id in oldest_first}


def _read_origin(root: Path, run_id: str) -> _Origin | None:
    """Return the origin of a run by its row; None without a row, or for a bad row (a warning)."""
    columns = [column for column in columns_of(Run) if column.name in ("job_name", "started_at")]
    try:
        paths = parts_of(root, "runs", run_id)
        [row] = plain_rows(read_parts(paths, "runs", arrow_schema("runs", columns)))
    except ValueError:
        # The run was removed after the folder was listed.
        return None
    except ResultsError as error:
        warnings.warn(f"{error}; run {run_id} is left out", ResultsWarning, stacklevel=2)
        return None
    start = "" if row["started_at"] is None else f"{row['started_at']:%Y%m%d-%H%M%S}"
    return _Origin(start, row["job_name"] or "")


def pick(
    prefix: str,
    ids: Sequence[str],
    *,
    kind: str,
    where: str,
    way_out: str = "",
    names: Iterable[str] = (),
) -> str:
    """Return the id that equals `prefix`, or else the only id that starts with it.

    Args:
        ids: all ids, without repetitions.
        kind: what the ids name, for messages.
        where: the folder that has the ids, for messages.
        way_out: end of the message for several matches, such as "; give more".
        names: further names that the message may suggest.

    Raises:
        ResultsError: no id or several ids start with `prefix`.
    """
    if prefix in ids:
        return prefix
    matches = [whole_id for whole_id in ids if prefix and whole_id.startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = _newest_ids(matches)
        raise ResultsError(f"{where}: {kind} {prefix!r} is ambiguous: {listed}{way_out}")
    guess = did_you_mean(prefix, [*ids, *names]) or f"; there are: {_newest_ids(ids) or 'none'}"
    raise ResultsError(f"{where}: no {kind} {prefix!r}{guess}")


def _newest_ids(ids: Sequence[str]) -> str:
    """Return the last five ids, and the number of the ids before them, for a message."""
    others = len(ids) - _MAX_LISTED
    return ", ".join(ids[-_MAX_LISTED:]) + (f" and {others} more" if others > 0 else "")


def _check_folder(root: Path) -> None:
    """Raise ResultsError unless `root` is a folder."""
    try:
        is_folder, exists = root.is_dir(), root.exists()
    except OSError as error:
        raise ResultsError(f"--results {quote(str(root))}: {error.strerror}") from None
    if not is_folder:
        what = "a file, not a folder" if exists else "no such folder"
        raise ResultsError(f"{root}: {what} of results; `raybench sweep JOB` makes one")


def _run_folders(folder: Path) -> list[str]:
    """Return the sorted names of the entries of a table that are not files."""
    return [entry.name for entry in entries_of(folder) if not os.path.isfile(entry)]  # noqa: PTH113


def _parts_of_runs(root: Path, table: str, ids: Iterable[str]) -> list[Path]:
    """Return the parts of these runs; a run that cannot be listed is skipped with a warning."""
    parts = []
    for run_id in ids:
        try:
            parts += parts_of(root, table, run_id)
        except ResultsError as error:
            _warn(f"{error}; run {run_id} is left out")
    return parts


def _missing_row_message(root: Path, run_id: str) -> str:
    """Return the message that a run has points, but no row in `runs`."""
    return f"run {run_id} has points, but no row; put {root}/runs/{run_id}/run.parquet back"


def no_runs_message(root: Path) -> str:
    """Return the message that a folder has no runs; it names subfolders that have runs."""
    message = f"{root}: no runs yet; `raybench sweep JOB` makes one"
    for name in _run_folders(root):
        if name in TABLE_NAMES:
            continue
        runs: list[str] = []
        # The folder may belong to another user.
        with suppress(ResultsError):
            runs = _run_folders(root / name / "runs")
        if runs:
            message += (
                f"; {root / name} has {len(runs)}: `raybench list --results {root / name}`, "
                f"`raybench report {name}/RUN`"
            )
    return message


def _has_driver(root: Path, run_id: str) -> bool | None:
    """Return whether a driver holds the lock of the run; None if the lock cannot be tested."""
    try:
        with (root / "runs" / run_id / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


_ATTEMPT_COLUMNS = ("point_id", "attempt")
# Name of a log or trace: trial, point, attempt and rank.
RANK_FILE = re.compile(r"(\d+)-(\w+)-(\d+)-rank(\d+)\.(?:txt|json\.gz)")
# Name of a part that holds a single attempt: trial, point and attempt.
_ATTEMPT_PART = re.compile(r"\d+-(\w+)-(\d+)\.parquet$")


def load_table(root: str | Path, table: str, run_id: str | None = None) -> pd.DataFrame:
    """Return a table as a frame: null is NaN or None, maps and structs are dicts, lists are arrays.

    Args:
        table: one of TABLE_NAMES.
        run_id: the run, in any form that `find_run` takes; None or "": all runs; an unreadable
            run is then skipped with a ResultsWarning.

    Raises:
        ResultsError: the folder, table or run does not exist or cannot be read.
    """
    return to_frame(read_table(root, table, run_id))


def to_frame(table: pa.Table, types: Mapping[Any, Any] = MappingProxyType({})) -> pd.DataFrame:
    """Return an Arrow table as a frame.

    Args:
        types: Arrow type -> pandas type; other types are pandas's choice.
    """
    import numpy as np
    import pyarrow as pa

    frame: pd.DataFrame = table.to_pandas(maps_as_pydicts="strict", types_mapper=types.get)
    for field in table.schema:
        if pa.types.is_struct(field.type):
            # pyarrow makes the integers of structs floats where any row of the column is null.
            frame[field.name] = np.array(table[field.name].to_pylist(), dtype=object)
    return frame


def read_table(
    root: str | Path, table: str, run_id: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return a stored table as an Arrow table, sorted by run_id and part.

    Args:
        table: one of TABLE_NAMES.
        run_id: the run, in any form that `find_run` takes; None or "": all runs; an unreadable
            run is then skipped with a ResultsWarning.
        columns: names of columns; None: all.

    Raises:
        ResultsError: the folder, table or run does not exist or cannot be read.
        KeyError: a column is unknown.
    """
    import pyarrow as pa

    if table not in TABLE_NAMES:
        guess = did_you_mean(table, TABLE_NAMES)
        raise ResultsError(f"table: must be one of {', '.join(TABLE_NAMES)}, got {table!r}{guess}")
    whole_schema = schema(table)
    wanted_schema = whole_schema
    if columns is not None:
        wanted_schema = pa.schema([whole_schema.field(name) for name in columns])
    parts = _parts(Path(root), table, run_id)
    if run_id:
        rows = read_parts(parts, table, wanted_schema)
    else:
        rows = _read_undamaged(Path(root) / table, parts, table, wanted_schema)
    if set(parts) <= set(_parts(Path(root), table, run_id)):
        return rows
    # Parts were merged during the reading, so some rows may be missing: read again.
    return read_table(root, table, run_id, columns)


def rows_of_attempts(
    root: Path,
    table: str,
    run_id: str,
    attempts: Iterable[tuple[str, int]],
    columns: Sequence[str] | None = None,
) -> Iterator[pd.DataFrame]:
    """Yield the rows of each attempt (point_id, attempt) as a frame.

    Files are read while iterating, because all rows may not fit into memory. Rows are missing if
    their part was merged or removed since the first attempt.

    Args:
        table: a table with the columns point_id and attempt.
        run_id: the run, in any form that `find_run` takes.
        columns: names of columns; None: all.

    Raises:
        ResultsError: while iterating: the table or run does not exist or cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    whole_schema = schema(table)
    columns = whole_schema.names if columns is None else list(columns)
    names = dict.fromkeys((*_ATTEMPT_COLUMNS, *columns))
    read_schema = pa.schema([whole_schema.field(name) for name in names])
    # The name of a part tells its attempt, unless the part holds several attempts.
    part_of_attempt: dict[tuple[str, int], tuple[Path, ...]] = {}
    parts_of_several: list[Path] = []
    for path in _parts(root, table, run_id):
        if match := _ATTEMPT_PART.match(path.name):
            part_of_attempt[match[1], int(match[2])] = (path,)
        else:
            parts_of_several.append(path)

    # Attempts of the same parts often follow each other.
    @lru_cache(maxsize=1)
    def read(paths: tuple[Path, ...]) -> pa.Table:
        return read_parts(paths, table, read_schema)

    for point_id, attempt in attempts:
        rows = read(part_of_attempt.get((point_id, attempt), tuple(parts_of_several)))
        is_of_attempt = pc.and_(
            pc.equal(rows["point_id"], point_id), pc.equal(rows["attempt"], attempt)
        )
        yield rows.filter(is_of_attempt).select(columns).to_pandas(maps_as_pydicts="strict")


def traces(root: Path, run_id: str, point_id: str, attempt: int) -> list[Path]:
    """Return the trace files of an attempt, in rank order; ids must be whole."""
    pattern = f"*-{point_id}-{attempt}-rank*.json.gz"
    paths = (root / "traces" / run_id).glob(pattern)
    # Shorter names first: rank2 comes before rank10.
    return sorted(paths, key=lambda path: (len(path.name), path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """What one rank wrote to stdout and stderr in an attempt."""

    point_id: str
    attempt: int
    rank: int
    text: str


def logs(root: Path, run_id: str, point_id: str = "*") -> list[RankLog]:
    """Return the logs of the ranks, in the order of rounds, plan, attempts and ranks.

    Args:
        point_id: whole id; "*": all points.

    Raises:
        ResultsError: a log cannot be read.
    """
    logs_of_ranks: dict[tuple[int, int, int], RankLog] = {}
    try:
        for path in (root / LOGS / run_id).glob(f"*-{point_id}-*"):
            if match := RANK_FILE.fullmatch(path.name):
                # The trials of a run are numbered in the order of rounds and plan.
                trial, attempt, rank = int(match[1]), int(match[3]), int(match[4])
                text = path.read_text("utf-8", "replace")
                log = RankLog(point_id=match[2], attempt=attempt, rank=rank, text=text)
                logs_of_ranks[trial, attempt, rank] = log
    except OSError as error:
        raise ResultsError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return [logs_of_ranks[key] for key in sorted(logs_of_ranks)]


def _parts(root: Path, table: str, run_id: str | None) -> list[Path]:
    """Return the files of a table, of one run or of all runs, sorted by run and name."""
    _check_folder(root)
    if not run_id:
        return _parts_of_runs(root, table, _run_folders(root / table))
    # A whole id is the name of a folder in a table; `latest` and the like are searched.
    is_whole_id = "/" not in run_id and any(
        os.path.isdir(root / name / run_id)  # noqa: PTH112
        for name in TABLE_NAMES
    )
    if not is_whole_id:
        root, run_id = find_run(root, run_id)
    return parts_of(root, table, run_id)


def _read_undamaged(folder: Path, paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Return the rows of these parts; runs with a damaged part are skipped with a warning."""

    def run_of(path: Path) -> str:
        return path.relative_to(folder).parts[0]

    try:
        return read_parts(paths, table, wanted)
    except UnreadablePartsError as error:
        reason_of_run = {run_of(path): why for path, why in error.reasons.items()}
    for run_id, reason in reason_of_run.items():
        _warn(f"{reason}; run {run_id} is left out")
    undamaged = [path for path in paths if run_of(path) not in reason_of_run]
    return read_parts(undamaged, table, wanted)


def _warn(text: str) -> None:
    # stacklevel: name the caller of the function that warns.
    warnings.warn(text, ResultsWarning, stacklevel=3)


def read_runs(root: str | Path, newest: int | None = None) -> list[Run]:
    """Return all runs, or only the newest runs; the oldest comes first.

    If the driver of a run died on this host, its status is interrupted. Runs without a row and
    unreadable runs are skipped with a ResultsWarning.

    Args:
        newest: number of runs, at least 1; None: all.

    Raises:
        ResultsError: `root` is no folder, or its tables cannot be listed.
    """
    root = Path(root)
    if newest is None:
        parts = _parts(root, "runs", None)
    else:
        parts = _parts_of_runs(root, "runs", run_ids(root)[-newest:])
    table = _read_undamaged(root / "runs", parts, "runs", arrow_schema("runs", columns_of(Run)))
    runs = []
    for row in plain_rows(table):
        try:
            runs.append(_with_current_status(root, _run_from_row(row)))
        except ResultsError as error:
            _warn(f"{error}; run {row['run_id']} is left out")
    for run_id in _run_folders(root / "points"):
        # Reading the rows has already warned of folders that cannot be listed.
        with suppress(ResultsError):
            if parts_of(root, "points", run_id) and not parts_of(root, "runs", run_id):
                _warn(f"{root}: {_missing_row_message(root, run_id)}")
    return sorted(runs, key=lambda run: (run.started_at, run.run_id))


def read_run(root: str | Path, run_id: str) -> Run:
    """Return a run; its status is interrupted if its driver died on this host.

    Args:
        run_id: whole id.

    Raises:
        ResultsError: the run has no row, or cannot be read.
    """
    return _with_current_status(Path(root), _read_stored_run(Path(root), run_id))


def _read_stored_run(root: Path, run_id: str) -> Run:
    """Return a run by its row, with the status that the row has."""
    rows = plain_rows(read_table(root, "runs", run_id))
    if len(rows) != 1:
        raise ResultsError(f"{root}: run {run_id} has {len(rows)} rows in `runs`, not one")
    return _run_from_row(rows[0])


def baselines(root: Path, run_id: str | None = None) -> dict[str, dict[str, str]]:
    """Return the settings of the baseline points of each run as text, by run_id.

    Args:
        run_id: the run, in any form that `find_run` takes; None: all runs.
    """
    rows_of_runs = plain_rows(read_table(root, "runs", run_id, ["run_id", "baseline"]))
    return {row["run_id"]: row["baseline"] or {} for row in rows_of_runs}


def _run_from_row(row: Mapping[str, Any]) -> Run:
    if row["started_at"] is None or row["status"] not in set(RunStatus):
        raise ResultsError(f"run {row['run_id']}: its row has no start, or no status")
    return from_row(Run, row)


def _with_current_status(root: Path, run: Run) -> Run:
    """Return the run as interrupted if its driver died on this host; else unchanged."""
    # Some network file systems do not show locks of other hosts.
    runs_here = run.status is RunStatus.RUNNING and run.host == socket.gethostname()
    if not runs_here or _has_driver(root, run.run_id) is not False:
        return run
    # The driver may have finished after the row was read.
    run = _read_stored_run(root, run.run_id)
    if run.status is not RunStatus.RUNNING:
        return run
    # The run ended at its last sign of life: the last start of a point. The times of files are of
    # no use, because copying a file changes its time.
    starts = read_table(root, "points", run.run_id, ["started_at"]).column("started_at")
    finished_at = max(starts.drop_null().to_pylist(), default=run.started_at)
    status_of_trial = {trial: last.status for trial, last in latest(root, run.run_id).items()}
    statuses = status_by_point(status_of_trial)
    if run.paused_s:
        # `--resume` rewrites the row, so a resumed run was alive at that time.
        rewritten = (root / "runs" / run.run_id / "run.parquet").stat().st_mtime
        finished_at = max(finished_at, datetime.fromtimestamp(rewritten, UTC))
    run = count_points(run, statuses)
    return replace(run, status=RunStatus.INTERRUPTED, finished_at=finished_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The latest attempt at a trial."""

    attempt: int
    status: Status


def latest(root: Path, run_id: str) -> dict[TrialKey, Latest]:
    """Return the latest attempt at each trial of a run, in the order of the first rows.

    Raises:
        ResultsError: the run does not exist, or its parts are damaged, newer, or have an unknown
            status.
    """
    columns = ["point_id", "attempt", "status", "round", "control_of"]
    rows = read_table(root, "points", run_id, columns).sort_by("attempt").to_pylist()
    latest_attempts: dict[TrialKey, Latest] = {}
    for row in rows:
        trial = TrialKey(row["point_id"], row["round"] or 1, row["control_of"] or 0)
        try:
            status = Status(row["status"])
        except ValueError as error:
            message = f"{root}: run {run_id}: {error}; remove or restore its file"
            raise ResultsError(message) from error
        latest_attempts[trial] = Latest(attempt=row["attempt"], status=status)
    return latest_attempts


def count_points(run: Run, statuses: Mapping[str, str]) -> Run:
    """Return the run with the counts of its points, and failed or ok as its status.

    Args:
        statuses: status of each point, by point_id.
    """
    counts = Counter(statuses.values())
    ok, skipped = counts[Status.OK], counts[Status.SKIPPED]
    failed = counts.total() - ok - skipped - counts[Status.CANCELLED]
    status = RunStatus.FAILED if failed else RunStatus.OK
    return replace(run, status=status, points_ok=ok, points_skipped=skipped, points_failed=failed)
