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
_MOST_NAMED = 5
_STAMPED = re.compile(r"(?P<job>.+)-(?P<start>\d{8}-\d{6})-[0-9a-f]+")
# Lock file of the driver, in the folder of the run; always empty.
LOCK = ".driver"


def find_run(root: str | Path, text: str) -> tuple[Path, str]:
    """Return (results folder, run_id) of the run that `text` means.

    Args:
        text: an id, `latest`, the name of a job (its newest run), or a unique prefix of an id. A
            folder inside `root`, or a path, may precede it: `examples/gemm`. The path of a run in a
            table is valid too. Newest runs with an unreadable row are skipped with a
            ResultsWarning.

    Raises:
        ResultsError: no run or several runs match, or the folder cannot be read.
    """
    folder, name = _separate(Path(root), text)
    jobs = {run_id: origin.job for run_id, origin in _origins(folder).items()}
    ids = list(jobs)
    if not ids:
        raise ResultsError(no_runs_message(folder))
    if name not in jobs:
        # The ids of the job, oldest first; of all jobs for `latest`.
        job_ids = ids if name == LATEST else [i for i in ids if name and jobs[i] == name]
        if job_ids:
            readable = (run_id for run_id in reversed(job_ids) if _read_origin(folder, run_id))
            return folder, next(readable, job_ids[-1])
        if name and name in _run_folders(folder / "points"):
            raise ResultsError(f"{folder}: {_no_row_of(folder, name)}")
    way_out = "; give more of the id, or the name of a job for its newest run"
    names = {job for job in jobs.values() if job}
    return folder, pick(name, ids, kind="run", where=str(folder), way_out=way_out, names=names)


def _separate(root: Path, text: str) -> tuple[Path, str]:
    """Return the results folder that `text` names, else `root`, and the text without the folder."""
    head, name = os.path.split(text)
    if not head:
        return root, text
    # The path of a run, such as results/runs/RUN, or of a part in it.
    for path in (Path(text), Path(head)):
        # Use os.path, because the methods of Path raise for long names.
        if path.parent.name in TABLE_NAMES and os.path.isdir(path):  # noqa: PTH112
            return path.parents[1], path.name
    for folder in (root / head, Path(head)):
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
    ids = _run_folders(root / "runs")
    for run_id in dict.fromkeys(path.parent.name for path in _listed(root, "runs", ids)):
        stamp = _STAMPED.fullmatch(run_id)
        origin = _Origin(stamp["start"], stamp["job"]) if stamp else _read_origin(root, run_id)
        origins[run_id] = origin or _Origin()
    return dict(sorted(origins.items(), key=lambda item: (item[1].start, item[0])))


def _read_origin(root: Path, run_id: str) -> _Origin | None:
    """Return the origin of a run by its row; None, with a warning, if it cannot be read."""
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
        kind, where: what the ids name, and the folder that has them, for messages.
        way_out: end of the message for several matches, such as "; give more".
        names: further names that the message may suggest.

    Raises:
        ResultsError: no id or several ids start with `prefix`.
    """
    matches = [run_id for run_id in ids if prefix and run_id.startswith(prefix)]
    if prefix in ids or len(matches) == 1:
        return prefix if prefix in ids else matches[0]
    if matches:
        raise ResultsError(f"{where}: {kind} {prefix!r} is ambiguous: {_some(matches)}{way_out}")
    guess = did_you_mean(prefix, [*ids, *names]) or f"; there are: {_some(ids) or 'none'}"
    raise ResultsError(f"{where}: no {kind} {prefix!r}{guess}")


def _some(ids: Sequence[str]) -> str:
    """Return the last five ids, which are the newest, and the number of other ids."""
    others = len(ids) - _MOST_NAMED
    return ", ".join(ids[-_MOST_NAMED:]) + (f" and {others} more" if others > 0 else "")


def _check_folder(root: Path) -> None:
    try:
        is_folder, is_there = root.is_dir(), root.exists()
    except OSError as error:
        raise ResultsError(f"--results {quote(str(root))}: {error.strerror}") from None
    if not is_folder:
        what = "a file, not a folder" if is_there else "no such folder"
        raise ResultsError(f"{root}: {what} of results; `raybench sweep JOB` makes one")


def _run_folders(folder: Path) -> list[str]:
    """Return the sorted names of the entries that are no files: folders and dead links."""
    return [entry.name for entry in entries_of(folder) if not os.path.isfile(entry)]  # noqa: PTH113


def _listed(root: Path, table: str, ids: Iterable[str]) -> list[Path]:
    """Return the parts of these runs; a run that cannot be listed is skipped with a warning."""
    parts = []
    for run_id in ids:
        try:
            parts += parts_of(root, table, run_id)
        except ResultsError as error:
            _warn(f"{error}; run {run_id} is left out")
    return parts


def _no_row_of(root: Path, run_id: str) -> str:
    """Return the message that a run has points, but no row in `runs`."""
    return f"run {run_id} has points, but no row; put {root}/runs/{run_id}/run.parquet back"


def no_runs_message(root: Path) -> str:
    """Return the message that a folder has no runs; it names subfolders that have runs."""
    inside = [name for name in _run_folders(root) if name not in TABLE_NAMES]
    counts = dict.fromkeys(inside, 0)
    for name in inside:
        # The folder may belong to another user.
        with suppress(ResultsError):
            counts[name] = len(_run_folders(root / name / "runs"))
    elsewhere = "".join(
        f"; {root / name} has {count}: `raybench list --results {root / name}`, "
        f"`raybench report {name}/RUN`"
        for name, count in counts.items()
        if count
    )
    return f"{root}: no runs yet; `raybench sweep JOB` makes one{elsewhere}"


def _has_driver(root: Path, run_id: str) -> bool | None:
    """Return whether a driver holds the run; None if the lock cannot be tested."""
    try:
        with (root / "runs" / run_id / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


_ATTEMPT = ("point_id", "attempt")
# Name of a log or trace: trial, point, attempt and rank.
OF_RANK = re.compile(r"(\d+)-(\w+)-(\d+)-rank(\d+)\.(?:txt|json\.gz)")
_ONE_ATTEMPT = re.compile(r"\d+-(\w+)-(\d+)\.parquet$")


def load_table(root: str | Path, table: str, run_id: str | None = None) -> pd.DataFrame:
    """Return a table as a frame: null is NaN or None, maps are dicts, lists are arrays.

    Args:
        table: one of TABLE_NAMES.
        run_id: as in `find_run`; None or "": all runs.

    Raises:
        ResultsError: the folder, table or run does not exist or cannot be read. With all runs, an
            unreadable run is skipped with a ResultsWarning.
    """
    frame: pd.DataFrame = read_table(root, table, run_id).to_pandas(maps_as_pydicts="strict")
    return frame


def read_table(
    root: str | Path, table: str, run_id: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return a stored table as an Arrow table, sorted by run_id and part.

    Args:
        run_id: as in `load_table`.
        columns: names of columns; None: all.

    Raises:
        ResultsError: as `load_table`.
        KeyError: a column is unknown.
    """
    import pyarrow as pa

    if table not in TABLE_NAMES:
        guess = did_you_mean(table, TABLE_NAMES)
        raise ResultsError(f"table: must be one of {', '.join(TABLE_NAMES)}, got {table!r}{guess}")
    whole = schema(table)
    wanted = whole if columns is None else pa.schema([whole.field(name) for name in columns])
    parts = _parts(Path(root), table, run_id)
    if run_id:
        rows = read_parts(parts, table, wanted)
    else:
        rows = _read_undamaged(Path(root) / table, parts, table, wanted)
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
    """Yield a frame for each attempt (point_id, attempt), in their order.

    Files are read while iterating, because all may not fit into memory. Rows are missing if their
    part was merged or removed since the first attempt.

    Args:
        table: a table with the columns point_id and attempt.
        run_id: of one run, as in `find_run`.
        columns: as in `read_table`.

    Raises:
        ResultsError: as `read_table`, while iterating.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = schema(table)
    columns = whole.names if columns is None else list(columns)
    wanted = pa.schema([whole.field(name) for name in dict.fromkeys((*_ATTEMPT, *columns))])
    paths = _parts(root, table, run_id)
    # A part is named after its attempt. Other parts hold several attempts, so they may hold any.
    by_attempt: dict[tuple[str, int], tuple[Path, ...]] = {}
    of_several: list[Path] = []
    for path in paths:
        if name := _ONE_ATTEMPT.match(path.name):
            by_attempt[name[1], int(name[2])] = (path,)
        else:
            of_several.append(path)

    # Attempts of the same parts often follow each other.
    @lru_cache(maxsize=1)
    def read(paths: tuple[Path, ...]) -> pa.Table:
        return read_parts(paths, table, wanted)

    for point_id, attempt in attempts:
        rows = read(by_attempt.get((point_id, attempt), tuple(of_several)))
        is_wanted = pc.and_(
            pc.equal(rows["point_id"], point_id), pc.equal(rows["attempt"], attempt)
        )
        yield rows.filter(is_wanted).select(columns).to_pandas(maps_as_pydicts="strict")


def traces(root: Path, run_id: str, point_id: str, attempt: int) -> list[Path]:
    """Return the trace files of an attempt, in rank order; ids must be whole."""
    # Shorter names first: rank2 comes before rank10.
    name = f"*-{point_id}-{attempt}-rank*.json.gz"
    return sorted((root / "traces" / run_id).glob(name), key=lambda path: (len(path.name), path))


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
    matches = [OF_RANK.fullmatch(p.name) for p in (root / LOGS / run_id).glob(f"*-{point_id}-*")]
    names = sorted((m for m in matches if m), key=lambda m: (int(m[1]), int(m[3]), int(m[4])))
    try:
        return [
            RankLog(
                point_id=name[2],
                attempt=int(name[3]),
                rank=int(name[4]),
                text=(root / LOGS / run_id / name[0]).read_text("utf-8", "replace"),
            )
            for name in names
        ]
    except OSError as error:
        raise ResultsError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _parts(root: Path, table: str, run_id: str | None) -> list[Path]:
    """Return the files of a table, of one run or of all runs, sorted by run and name."""
    _check_folder(root)
    # A whole id is a folder of a table. Everything else, such as `latest`, must be searched.
    tables = () if "/" in (run_id or "") else TABLE_NAMES
    if run_id and not any(os.path.isdir(root / name / run_id) for name in tables):  # noqa: PTH112
        root, run_id = find_run(root, run_id)
    if run_id:
        return parts_of(root, table, run_id)
    return _listed(root, table, _run_folders(root / table))


def _read_undamaged(folder: Path, paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Return the rows of these parts; runs with a damaged part are skipped with a warning."""
    try:
        return read_parts(paths, table, wanted)
    except UnreadablePartsError as error:
        damaged = {p.relative_to(folder).parts[0]: why for p, why in error.reasons.items()}
    for run_id, reason in damaged.items():
        _warn(f"{reason}; run {run_id} is left out")
    sound = [path for path in paths if path.relative_to(folder).parts[0] not in damaged]
    return read_parts(sound, table, wanted)


def _warn(text: str) -> None:
    warnings.warn(text, ResultsWarning, stacklevel=3)


def read_runs(root: str | Path, newest: int | None = None) -> list[Run]:
    """Return all runs, or the newest ones, oldest first.

    A run whose driver died on this host is interrupted. Runs without a row and unreadable runs are
    skipped with a ResultsWarning.

    Args:
        newest: how many runs, at least 1; None: all.

    Raises:
        ResultsError: `root` is no folder, or its tables cannot be listed.
    """
    root = Path(root)
    if newest is None:
        parts = _parts(root, "runs", None)
    else:
        parts = _listed(root, "runs", run_ids(root)[-newest:])
    table = _read_undamaged(root / "runs", parts, "runs", arrow_schema("runs", columns_of(Run)))
    runs = []
    for row in plain_rows(table):
        try:
            runs.append(_as_it_stands(root, _run_from_row(row)))
        except ResultsError as error:
            _warn(f"{error}; run {row['run_id']} is left out")
    for run_id in _run_folders(root / "points"):
        # Reading the rows has already warned of folders that cannot be listed.
        with suppress(ResultsError):
            if parts_of(root, "points", run_id) and not parts_of(root, "runs", run_id):
                _warn(f"{root}: {_no_row_of(root, run_id)}")
    return sorted(runs, key=lambda run: (run.started_at, run.run_id))


def read_run(root: str | Path, run_id: str) -> Run:
    """Return one run; its status is interrupted if its driver died on this host.

    Args:
        run_id: whole id.

    Raises:
        ResultsError: the run has no row, or cannot be read.
    """
    return _as_it_stands(Path(root), _read_stored_run(Path(root), run_id))


def _read_stored_run(root: Path, run_id: str) -> Run:
    """Return a run by its row, with the status that the row has."""
    rows = plain_rows(read_table(root, "runs", run_id))
    if len(rows) != 1:
        raise ResultsError(f"{root}: run {run_id} has {len(rows)} rows in `runs`, not one")
    return _run_from_row(rows[0])


def baselines(root: Path, run_id: str | None = None) -> dict[str, dict[str, str]]:
    """Return the settings of the baseline points of each run as text, by run_id.

    Args:
        run_id: as in `load_table`; None: all runs.
    """
    rows_of_runs = plain_rows(read_table(root, "runs", run_id, ["run_id", "baseline"]))
    return {row["run_id"]: row["baseline"] or {} for row in rows_of_runs}


def _run_from_row(row: Mapping[str, Any]) -> Run:
    if row["started_at"] is None or row["status"] not in set(RunStatus):
        raise ResultsError(f"run {row['run_id']}: its row has no start, or no status")
    return from_row(Run, row)


def _as_it_stands(root: Path, run: Run) -> Run:
    """Return the run; a run without a driver on this host is interrupted."""
    # Some network file systems do not show locks of other hosts.
    is_here = run.status is RunStatus.RUNNING and run.host == socket.gethostname()
    if not is_here or _has_driver(root, run.run_id) is not False:
        return run
    # The driver may have finished after the row was read.
    run = _read_stored_run(root, run.run_id)
    if run.status is not RunStatus.RUNNING:
        return run
    # The run ended at its last sign of life: the last start of a point. The times of files do not
    # tell, because copying a file changes its time.
    starts = read_table(root, "points", run.run_id, ["started_at"]).column("started_at")
    finished_at = max(starts.drop_null().to_pylist(), default=run.started_at)
    statuses = status_by_point(
        {key: newest.status for key, newest in latest(root, run.run_id).items()}
    )
    if run.paused_s:
        # `--resume` rewrites the row, so a resumed run was alive at that time.
        rewritten = (root / "runs" / run.run_id / "run.parquet").stat().st_mtime
        finished_at = max(finished_at, datetime.fromtimestamp(rewritten, UTC))
    return replace(
        count_points(run, statuses), status=RunStatus.INTERRUPTED, finished_at=finished_at
    )


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
    try:
        return {
            TrialKey(row["point_id"], row["round"] or 1, row["control_of"] or 0): Latest(
                attempt=row["attempt"], status=Status(row["status"])
            )
            for row in rows
        }
    except ValueError as error:
        raise ResultsError(f"{root}: run {run_id}: {error}; remove or restore its file") from error


def count_points(run: Run, statuses: Mapping[str, str]) -> Run:
    """Return the run with the counts of its points, and failed or ok as its status.

    Args:
        statuses: as `status_by_point` returns.
    """
    counts = Counter(statuses.values())
    ok, skipped = counts[Status.OK], counts[Status.SKIPPED]
    failed = counts.total() - ok - skipped - counts[Status.CANCELLED]
    status = RunStatus.FAILED if failed else RunStatus.OK
    return replace(run, status=status, points_ok=ok, points_skipped=skipped, points_failed=failed)
