"""The runs of a results folder: which a word means, how they stand, and their tables as frames.

The ids that raybench gives tell the job and the start: to read the rows of 10,000 runs would take
seconds. Of a run with another id the row is read.
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
from typing import TYPE_CHECKING, Any

from raybench.errors import ResultsError, ResultsWarning
from raybench.job.problems import did_you_mean, quote
from raybench.records.record import TrialKey, by_point
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

LATEST = "latest"  # means the newest run, so no run may be named so
LOGS = "logs"  # the folder of what ranks wrote, beside the tables
_MOST_NAMED = 5
_STAMPED = re.compile(r"(?P<job>.+)-(?P<start>\d{8}-\d{6})-[0-9a-f]+")
LOCK = ".driver"  # of its driver, in the run's folder of `runs`; always empty


def find_run(root: str | Path, text: str) -> tuple[Path, str]:
    """Return (results folder, run_id) of the run that `text` means.

    text: an id in `root`, else `latest` or a job's name (newest run), else a unique prefix of an
    id; one of these after a results folder, inside `root` (`examples/gemm`) or by its path; or the
    path of a run in a table. A newest run with an unreadable row is skipped with a ResultsWarning,
    unless all are such. Raises ResultsError if it means none or several, else as `run_ids` does.
    """
    folder, name = _separate(Path(root), text)
    jobs = {run_id: job for run_id, (_, job) in _origins(folder).items()}
    ids = list(jobs)
    if not ids:
        raise ResultsError(no_runs_message(folder))
    if name not in jobs:
        of_job = ids if name == LATEST else [one for one in ids if name and jobs[one] == name]
        if of_job:  # the newest whose row can be read; where there is none, the newest
            readable = (one for one in reversed(of_job) if _read_origin(folder, one))
            return folder, next(readable, of_job[-1])
        if name and name in _run_folders(folder / "points"):
            raise ResultsError(f"{folder}: {_no_row_of(folder, name)}")
    way_out = "; give more of the id, or the name of a job for its newest run"
    names = {job for job in jobs.values() if job}
    return folder, pick(name, ids, kind="run", where=str(folder), way_out=way_out, names=names)


def _separate(root: Path, text: str) -> tuple[Path, str]:
    """Return the results folder that `text` names, `root` without one, and the rest of the text.

    Raises ResultsError where the text has a folder that holds no runs.
    """
    head, name = os.path.split(text)
    if not head:
        return root, text
    # The path of a run in a table, as results/runs/RUN, or of a part in it.
    for path in (Path(text), Path(head)):
        # Path's own would raise for a name that is too long.
        if path.parent.name in TABLE_NAMES and os.path.isdir(path):  # noqa: PTH112
            return path.parents[1], path.name
    for folder in (root / head, Path(head)):
        if os.path.isdir(folder / "runs"):  # noqa: PTH112
            return folder, name
    raise ResultsError(
        f"{text}: not a run of {root}; give {root}/runs/RUN_ID, or the folder with --results"
    )


def run_ids(root: Path) -> list[str]:
    """Return the ids of the runs that have a file in `runs`, oldest first; unknown starts first.

    Warns (ResultsWarning) if an id tells no start and its row cannot be read, and of a run left out
    as its folder cannot be listed. Raises ResultsError if `root` is no folder or `runs` is closed.
    """
    return list(_origins(root))


def _origins(root: Path) -> dict[str, tuple[str, str]]:
    """Return run_id -> (start, job) of the runs in a results folder, oldest first.

    start: YYYYMMDD-HHMMSS in UTC. Both are empty where nothing tells.
    """
    _check_folder(root)
    found: dict[str, tuple[str, str]] = {}
    ids = _run_folders(root / "runs")
    for run_id in dict.fromkeys(path.parent.name for path in _listed(root, "runs", ids)):
        stamp = _STAMPED.fullmatch(run_id)
        told = (stamp["start"], stamp["job"]) if stamp else _read_origin(root, run_id)
        found[run_id] = told or ("", "")
    return dict(sorted(found.items(), key=lambda item: (item[1][0], item[0])))


def _read_origin(root: Path, run_id: str) -> tuple[str, str] | None:
    """Return (start, job) of a run by its row; None, with a warning, where it cannot be read."""
    columns = [one for one in columns_of(Run) if one.name in ("job_name", "started_at")]
    try:
        paths = parts_of(root, "runs", run_id)
        [row] = plain_rows(read_parts(paths, "runs", arrow_schema("runs", columns)))
    except ValueError:
        # Removed since the folder was listed.
        return None
    except ResultsError as error:
        warnings.warn(f"{error}; run {run_id} is left out", ResultsWarning, stacklevel=2)
        return None
    start = "" if row["started_at"] is None else f"{row['started_at']:%Y%m%d-%H%M%S}"
    return start, row["job_name"] or ""


def pick(
    prefix: str,
    ids: Sequence[str],
    *,
    kind: str,
    where: str,
    way_out: str = "",
    names: Iterable[str] = (),
) -> str:
    """Return the id that is `prefix`, else the only one that starts with it.

    ids: each once. Raises ResultsError if several start with it, naming the last five, and if none
    does or it is empty, naming a similar one of `ids` and `names`, else the last five ids. For its
    text: kind, where: what the ids name, and where. way_out: its end for several, as "; give more".
    """
    found = [known for known in ids if prefix and known.startswith(prefix)]
    if prefix in ids or len(found) == 1:
        return prefix if prefix in ids else found[0]
    if found:
        raise ResultsError(f"{where}: {kind} {prefix!r} is ambiguous: {_some(found)}{way_out}")
    guess = did_you_mean(prefix, [*ids, *names]) or f"; there are: {_some(ids) or 'none'}"
    raise ResultsError(f"{where}: no {kind} {prefix!r}{guess}")


def _some(ids: Sequence[str]) -> str:
    """Return the last five ids and how many more there are: the newest are the likeliest."""
    more = len(ids) - _MOST_NAMED
    return ", ".join(ids[-_MOST_NAMED:]) + (f" and {more} more" if more > 0 else "")


def _check_folder(root: Path) -> None:
    """Raise ResultsError where `root` is no folder."""
    try:
        is_folder, is_there = root.is_dir(), root.exists()
    except OSError as error:  # a name that no folder can have
        raise ResultsError(f"--results {quote(str(root))}: {error.strerror}") from None
    if not is_folder:
        what = "a file, not a folder" if is_there else "no such folder"
        raise ResultsError(f"{root}: {what} of results; `raybench sweep JOB` makes one")


def _run_folders(folder: Path) -> list[str]:
    """Return the names of the folders in the folder of a table, but for hidden ones, sorted.

    Links that lead nowhere count too. Raises ResultsError where it cannot be listed.
    """
    return [entry.name for entry in entries_of(folder) if not os.path.isfile(entry)]  # noqa: PTH113


def _listed(root: Path, table: str, ids: Iterable[str]) -> list[Path]:
    """Return the parts of these runs; a run whose folder cannot be listed is left out, and told."""
    found = []
    for run_id in ids:
        try:
            found += parts_of(root, table, run_id)
        except ResultsError as error:
            _warn(f"{error}; run {run_id} is left out")
    return found


def _no_row_of(root: Path, run_id: str) -> str:
    """Return a message: the run has points and no row in `runs`."""
    return f"run {run_id} has points, but no row; put {root}/runs/{run_id}/run.parquet back"


def no_runs_message(root: Path) -> str:
    """Return the message that a folder has no runs; it names folders inside that have some.

    Raises ResultsError where the folder cannot be listed.
    """
    inside = [name for name in _run_folders(root) if name not in TABLE_NAMES]
    counts = dict.fromkeys(inside, 0)
    for name in inside:
        with suppress(ResultsError):  # somebody else's folder
            counts[name] = len(_run_folders(root / name / "runs"))
    elsewhere = "".join(
        f"; {root / name} has {count}: `raybench list --results {root / name}`, "
        f"`raybench report {name}/RUN`"
        for name, count in counts.items()
        if count
    )
    return f"{root}: no runs yet; `raybench sweep JOB` makes one{elsewhere}"


def _has_driver(root: Path, run_id: str) -> bool | None:
    """Return whether a driver holds the run; None without a lock file, or locks at all."""
    try:
        with (root / "runs" / run_id / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


_ATTEMPT = ("point_id", "attempt")
# The name of a log or trace: of which trial, point, attempt and rank it is.
OF_RANK = re.compile(r"(\d+)-(\w+)-(\d+)-rank(\d+)\.(?:txt|json\.gz)")
_ONE_ATTEMPT = re.compile(r"\d+-(\w+)-(\d+)\.parquet$")


def load_table(root: str | Path, table: str, run_id: str | None = None) -> pd.DataFrame:
    """Return a table as a frame: nulls for `isna` to find (numbers: NaN), maps dicts, lists arrays.

    Empty where a run has no rows. run_id: as `find_run` takes it; None or "": all runs. table: one
    of TABLE_NAMES. Raises ResultsError where there is no such folder, table or run, or a folder or
    part cannot be read; of all runs, such a run is left out with a ResultsWarning.
    """
    frame: pd.DataFrame = read_table(root, table, run_id).to_pandas(maps_as_pydicts="strict")
    return frame


def read_table(
    root: str | Path, table: str, run_id: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return one stored table as an Arrow table, its rows by run_id and name of the part.

    columns: names of those to read, None for all; raises KeyError for an unknown one. run_id: as of
    `load_table`. Raises ResultsError as `load_table` does, and warns as it does.
    """
    import pyarrow as pa

    if table not in TABLE_NAMES:
        guess = did_you_mean(table, TABLE_NAMES)
        raise ResultsError(f"table: must be one of {', '.join(TABLE_NAMES)}, got {table!r}{guess}")
    whole = schema(table)
    wanted = whole if columns is None else pa.schema([whole.field(name) for name in columns])
    parts = _parts(Path(root), table, run_id)
    if run_id:
        found = read_parts(parts, table, wanted)
    else:
        found = _read_undamaged(Path(root) / table, parts, table, wanted)
    if set(parts) <= set(_parts(Path(root), table, run_id)):
        return found
    return read_table(root, table, run_id, columns)  # parts were put together meanwhile


def rows_of_attempts(
    root: Path,
    table: str,
    run_id: str,
    attempts: Iterable[tuple[str, int]],
    columns: Sequence[str] | None = None,
) -> Iterator[pd.DataFrame]:
    """Yield a frame for each of these attempts (point_id, attempt), in order; empty without rows.

    table: one that has these two columns; KeyError for others. run_id: of one run, as `find_run`
    takes it. columns: as of `read_table`. Files are read while iterating, as all may not fit into
    memory; those that hold several attempts (all of a compacted run) together. It raises then, as
    `read_table` does; rows whose part was merged or removed since the first attempt are missing.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

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
        yield found.filter(is_wanted).select(columns).to_pandas(maps_as_pydicts="strict")


def traces(root: Path, run_id: str, point_id: str, attempt: int) -> list[Path]:
    """Return the trace files of an attempt, in rank order; [] without any. Takes whole ids only."""
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
    """Return the logs of the ranks that wrote something, of one point or of all.

    Round by round in the order of the plan, then by attempt and rank; [] without any, also for a
    run or point that is not there. run_id, point_id: whole ids; "*": all points. Raises
    ResultsError where a log cannot be read.
    """
    found = [OF_RANK.fullmatch(p.name) for p in (root / LOGS / run_id).glob(f"*-{point_id}-*")]
    names = sorted((m for m in found if m), key=lambda m: (int(m[1]), int(m[3]), int(m[4])))
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
    """Return the files of a table, of one run or of all, by run and name, but for hidden ones.

    Empty without a folder of the table. Raises ResultsError without a results folder or such a run,
    and where a folder cannot be listed; of all runs, one with such a folder is left out.
    """
    _check_folder(root)
    tables = () if "/" in (run_id or "") else TABLE_NAMES
    if run_id and not any(os.path.isdir(root / name / run_id) for name in tables):  # noqa: PTH112
        root, run_id = find_run(root, run_id)
    if run_id:
        return parts_of(root, table, run_id)
    return _listed(root, table, _run_folders(root / table))


def _read_undamaged(folder: Path, paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Return the rows of these parts of many runs; a run with a damaged one is left out.

    Warns of each such run. Raises UnreadablePartsError for parts that are damaged meanwhile.
    """
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
    """Return all runs, or what can be read of the `newest` newest (at least 1), oldest first.

    A run whose driver died on this host is interrupted, not running. A run with points but no row
    is left out, with a ResultsWarning; so is one whose row, or whose points if its driver died,
    cannot be read. Raises ResultsError if `root` is no folder, or cannot list `runs` or `points`.
    """
    root = Path(root)
    if newest is None:
        parts = _parts(root, "runs", None)
    else:
        parts = _listed(root, "runs", run_ids(root)[-newest:])
    table = _read_undamaged(root / "runs", parts, "runs", arrow_schema("runs", columns_of(Run)))
    found = []
    for row in plain_rows(table):
        try:  # of a run whose driver died its points are read too
            found.append(_as_it_stands(root, _run_from_row(row)))
        except ResultsError as error:
            _warn(f"{error}; run {row['run_id']} is left out")
    for run_id in _run_folders(root / "points"):
        with suppress(ResultsError):  # told where the rows are read
            if parts_of(root, "points", run_id) and not parts_of(root, "runs", run_id):
                _warn(f"{root}: {_no_row_of(root, run_id)}")
    return sorted(found, key=lambda run: (run.started_at, run.run_id))


def read_run(root: str | Path, run_id: str) -> Run:
    """Return one run; its status is interrupted if its driver died on this host.

    run_id: the whole id. Raises ResultsError where it has no row, or one that cannot be read; if
    its driver died also where its points cannot be read.
    """
    return _as_it_stands(Path(root), _read_stored_run(Path(root), run_id))


def _read_stored_run(root: Path, run_id: str) -> Run:
    """Return a run as its row says. Raises ResultsError where it has no row, or several."""
    found = plain_rows(read_table(root, "runs", run_id))
    if len(found) != 1:
        raise ResultsError(f"{root}: run {run_id} has {len(found)} rows in `runs`, not one")
    return _run_from_row(found[0])


def baselines(root: Path, run_id: str | None = None) -> dict[str, dict[str, str]]:
    """Return run_id -> settings of its baseline points, as text; of one run, or of all for None.

    A run without its own has {}, one without a row is left out. Raises as `load_table`.
    """
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
    if not is_here or _has_driver(root, run.run_id) is not False:
        return run
    # Its driver may have come to the end after the row was read.
    run = _read_stored_run(root, run.run_id)
    if run.status is not RunStatus.RUNNING:
        return run
    # Its last sign of life. Not the time of its files, which a copy of them changes.
    starts = read_table(root, "points", run.run_id, ["started_at"]).column("started_at")
    finished_at = max(starts.drop_null().to_pylist(), default=run.started_at)
    statuses = by_point({key: one.status for key, one in latest(root, run.run_id).items()})
    if run.paused_s:
        # Its row was written when it went on.
        rewritten = (root / "runs" / run.run_id / "run.parquet").stat().st_mtime
        finished_at = max(finished_at, datetime.fromtimestamp(rewritten, UTC))
    return replace(
        count_points(run, statuses), status=RunStatus.INTERRUPTED, finished_at=finished_at
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The latest attempt at a trial that a run has a row of."""

    attempt: int
    status: Status


def latest(root: Path, run_id: str) -> dict[TrialKey, Latest]:
    """Return the latest attempt at each trial of a run that has a row in `points`; {} for none.

    In order of the first rows, by attempt. run_id: as `find_run` takes it, not "". ResultsError for
    parts damaged or newer than this raybench, an unknown status, and where there is no such run.
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
    """Return the run with the counts of its points; its status is failed if one failed, else ok.

    statuses: as `by_point` returns them. Cancelled ones are not counted.
    """
    counts = Counter(statuses.values())
    ok, skipped = counts[Status.OK], counts[Status.SKIPPED]
    failed = counts.total() - ok - skipped - counts[Status.CANCELLED]
    status = RunStatus.FAILED if failed else RunStatus.OK
    return replace(run, status=status, points_ok=ok, points_skipped=skipped, points_failed=failed)
