"""A run: one execution of a job. Its row in `runs`, which run a word means, and who writes it.

The ids that raybench gives tell the job and the start, so that no row is read for them: in a folder
of 10,000 runs the rows take seconds. Of a run with another id the row is read. One driver at a time
writes a run, and only inside of the results folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

from raybench.errors import ResultsError, ResultsWarning
from raybench.job.point import Scalar
from raybench.job.problems import did_you_mean, quote
from raybench.records import Column
from raybench.results.columns import TABLE_NAMES, arrow_schema, columns_of
from raybench.results.parts import one_line, plain_rows, read_parts

LATEST = "latest"  # means the newest run, so no run may be named so
LOGS = "logs"  # the folder of what ranks wrote, beside the tables
# Files and folders that begin so are not ours to read.
HIDDEN = (".", "_")
_MOST_NAMED = 5
_STAMPED = re.compile(r"(?P<job>.+)-(?P<start>\d{8}-\d{6})-[0-9a-f]+")
# No separator, no leading dot: a run_id is one folder name that cannot leave the results. Not
# all digits, or readers take it for a number.
_RUN_ID = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")
_LOCK = ".driver"  # in the run's folder of `runs`; always empty
_READERS_S = 1.0  # a reader that tests the lock has it for far less


class RunStatus(StrEnum):
    """How far a run has come; one that says `running` without a driver was interrupted."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a job.

    workload_sha256, workload_files, raybench_sha256: as `raybench.records.environment.Code`; None
    in a run of a version that did not tell.
    seed: of the order of the points in rounds.
    only_devices: names of those that `--devices` named; empty where all could be used.
    paused_s: from the end of a sweep to `--resume`, in all; None in a run that was never resumed.
    """

    run_id: Annotated[str, Column("", "id of the run")]
    job_name: Annotated[str, Column("", "name in the job file")]
    job_text: Annotated[str, Column("", "job file as it was read")]
    job_sha256: Annotated[str, Column("", "SHA-256 of what the job means")]
    argv: Annotated[tuple[str, ...], Column("", "command line")]
    status: Annotated[RunStatus, Column("", "running, ok, failed or interrupted")]
    started_at: Annotated[datetime, Column("UTC", "start")]
    finished_at: Annotated[datetime | None, Column("UTC", "end; null while running")] = None
    paused_s: Annotated[
        float | None, Column("s", "not swept, until --resume; null: never resumed")
    ] = None
    points_total: Annotated[int, Column("points", "in the plan")]
    points_ok: Annotated[int, Column("points", "measured")] = 0
    points_failed: Annotated[int, Column("points", "failed")] = 0
    points_skipped: Annotated[int, Column("points", "not run")] = 0
    baseline: Annotated[Mapping[str, Scalar], Column("", "settings of the baseline points")] = (
        field(default_factory=dict)
    )
    only_devices: Annotated[
        tuple[str, ...], Column("", "those that --devices named; empty: all")
    ] = ()
    seed: Annotated[int | None, Column("", "of the order in rounds")] = None
    cluster: Annotated[str, Column("", "where the workers ran")]
    host: Annotated[str, Column("", "where the driver ran")]
    versions: Annotated[Mapping[str, str], Column("", "software versions")] = field(
        default_factory=dict
    )
    git_commit: Annotated[str | None, Column("", "commit of the working directory")] = None
    workload_sha256: Annotated[str | None, Column("", "of the workload's source files")] = None
    raybench_sha256: Annotated[str | None, Column("", "of raybench's files that measure")] = None
    workload_files: Annotated[Mapping[str, str], Column("", "SHA-256 of each source file")] = field(
        default_factory=dict
    )
    environment: Annotated[
        Mapping[str, str], Column("", "NCCL_, TORCH_, CUDA_ and OMP_ variables")
    ] = field(default_factory=dict)
    tags: Annotated[Mapping[str, str], Column("", "given with --tag")] = field(default_factory=dict)


def find_run(root: str | Path, text: str) -> tuple[Path, str]:
    """Return the results folder and the run_id that `text` means.

    text: an id in `root`, a unique prefix of one, the name of a job (its newest run), `latest`, one
    of these after the name of a results folder inside `root` (`examples/gemm`), or the path of a
    run in any results folder. Raises ResultsError, naming the candidates, when it means none or
    several.
    """
    folder, name = _separate(Path(root), text)
    origins = _origins(folder)
    ids = list(origins)
    if not ids:
        raise ResultsError(no_runs(folder))
    if name not in origins:
        of_job = ids if name == LATEST else [one for one in ids if origins[one].job == name]
        if of_job:  # the newest whose row can be read; where there is none, the newest
            return folder, next(
                (i for i in reversed(of_job) if _read_origin(folder, i)), of_job[-1]
            )
        if name and name in run_folders(folder / "points"):
            raise ResultsError(f"{folder}: {no_row_of(folder, name)}")
    way_out = "; give more of the id, or the name of a job for its newest run"
    jobs = {origin.job for origin in origins.values() if origin.job}
    return folder, pick(name, ids, kind="run", where=str(folder), way_out=way_out, names=jobs)


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


class _Origin(NamedTuple):
    """The start of a run, as YYYYMMDD-HHMMSS in UTC, and its job; empty where nothing tells."""

    start: str = ""
    job: str = ""


def run_ids(root: Path) -> list[str]:
    """Return the ids of the runs in a results folder, oldest first.

    Raises ResultsError where there is no such folder.
    """
    return list(_origins(root))


def _origins(root: Path) -> dict[str, _Origin]:
    """Return the origin of each run of a results folder by run_id, oldest first."""
    check_folder(root)
    found: dict[str, _Origin] = {}
    for run_id in run_folders(root / "runs"):
        if has_parts(root / "runs" / run_id):
            stamp = _STAMPED.fullmatch(run_id)
            origin = _Origin(**stamp.groupdict()) if stamp else _read_origin(root, run_id)
            found[run_id] = origin or _Origin()
    return dict(sorted(found.items(), key=lambda item: (item[1].start, item[0])))


def _read_origin(root: Path, run_id: str) -> _Origin | None:
    """Return the origin of a run by its row; None, with a warning, where it cannot be read."""
    columns = [one for one in columns_of(Run) if one.name in ("job_name", "started_at")]
    folder = root / "runs" / run_id
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(HIDDEN)]
    try:
        [row] = plain_rows(read_parts(paths, "runs", arrow_schema("runs", columns)))
    except ValueError:
        # Removed since the folder was listed.
        return None
    except ResultsError as error:
        warnings.warn(f"{error}; run {run_id} is left out", ResultsWarning, stacklevel=2)
        return None
    start = "" if row["started_at"] is None else f"{row['started_at']:%Y%m%d-%H%M%S}"
    return _Origin(start=start, job=row["job_name"] or "")


def pick(
    prefix: str,
    ids: Sequence[str],
    *,
    kind: str,
    where: str,
    way_out: str = "",
    names: Iterable[str] = (),
) -> str:
    """Return the one id that is `prefix` or starts with it.

    kind, where: what the ids name, and where they are, for the error. way_out: what else to type
    where several start with it. names: what else may have been meant.
    Raises ResultsError, naming the candidates, where none or several start with it.
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


def check_folder(root: Path) -> None:
    """Raise ResultsError where there is no results folder."""
    try:
        is_folder, is_there = root.is_dir(), root.exists()
    except OSError as error:  # a name that no folder can have
        raise ResultsError(f"--results {quote(str(root))}: {error.strerror}") from None
    if not is_folder:
        what = "a file, not a folder" if is_there else "no such folder"
        raise ResultsError(f"{root}: {what} of results; `raybench sweep JOB` makes one")


def run_folders(folder: Path) -> list[str]:
    """Return the names of the folders in the folder of a table, but for hidden ones, sorted."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(HIDDEN) and e.is_dir())


def has_parts(folder: Path) -> bool:
    """Return whether a folder holds a file that is ours to read."""
    with os.scandir(folder) as entries:
        return any(not entry.name.startswith(HIDDEN) for entry in entries)


def results_folders(root: Path) -> list[str]:
    """Return the names of the results folders inside a results folder, such as `examples`."""
    inside = [name for name in run_folders(root) if name not in TABLE_NAMES]
    return [name for name in inside if (root / name / "runs").is_dir()]


def no_row_of(root: Path, run_id: str) -> str:
    """Return a message: the run has points and no row in `runs`."""
    return f"run {run_id} has points, but no row; put {root}/runs/{run_id}/run.parquet back"


def no_runs(root: Path) -> str:
    """Return a message: the folder has no runs, what to type, and which folders in it have some."""
    counts = {name: len(run_folders(root / name / "runs")) for name in results_folders(root)}
    elsewhere = "".join(
        f"; {root / name} has {count}: `raybench list --results {root / name}`, "
        f"`raybench report {name}/RUN`"
        for name, count in counts.items()
        if count
    )
    return f"{root}: no runs yet; `raybench sweep JOB` makes one{elsewhere}"


@contextmanager
def hold_run(root: Path, run_id: str) -> Iterator[None]:
    """Hold the lock of a run inside the `with` block: only one driver may write it.

    The system frees the lock when the process dies. Where files cannot be locked nothing is held.
    Raises ResultsError for an id that cannot be the name of a folder, when another driver holds the
    run for more than a second, and where a link would lead what is written out of `root`.
    """
    check_run_id(run_id)
    for table in (*TABLE_NAMES, "traces", LOGS):
        folder = root / table / run_id
        for path in (folder, folder / _LOCK):
            if not path.resolve().is_relative_to(root.resolve()):
                raise ResultsError(f"{path}: a link that leads out of {root}; remove it")
    path = root / "runs" / run_id / _LOCK
    with one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        deadline_s = time.monotonic() + _READERS_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ResultsError(
                        f"{root}: run {run_id} is being written by another sweep; wait for its "
                        "end, or stop it"
                    ) from None
                time.sleep(0.05)
            except OSError:
                break  # a file system without locks must not keep anyone from a sweep
        yield


def check_run_id(run_id: str) -> None:
    """Raise ResultsError for an id that is no plain folder name, all digits, or `latest`."""
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise ResultsError(
            f"run_id: must be letters, digits, '.', '_' or '-', not all digits and not "
            f"'{LATEST}', got {run_id!r}"
        )


def has_driver(root: Path, run_id: str) -> bool | None:
    """Return whether a driver holds the run; None where that cannot be told.

    As on file systems without locks, and where the run has no lock file.
    """
    try:
        with (root / "runs" / run_id / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
