"""Which run of a results folder a word means: an id, a prefix, a job, `latest` or a path.

The ids that raybench gives tell the job and the start, so that no row is read for them: in a folder
of 10,000 runs the rows take seconds. Of a run with another id the row is read.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raybench.errors import ResultsError, ResultsWarning
from raybench.job.problems import did_you_mean
from raybench.results.columns import TABLE_NAMES, arrow_schema, columns_of
from raybench.results.parts import plain_rows, read_parts
from raybench.results.run import Run

LATEST = "latest"  # means the newest run, so no run may be named so


_STAMPED = re.compile(r"(?P<job>.+)-(?P<start>\d{8}-\d{6})-[0-9a-f]+")
_MOST_NAMED = 5
# Files and folders that begin so are not ours to read.
HIDDEN = (".", "_")
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """The job of a run and its start, as YYYYMMDD-HHMMSS in UTC; empty where nothing tells them."""

    job: str = ""
    start: str = ""


def find_run(root: str | Path, text: str) -> tuple[Path, str]:
    """Find the results folder and the run_id that `text` means.

    text: an id in `root`, a unique prefix of one, the name of a job (its newest run), `latest`, one
    of these after the name of a results folder inside `root` (`examples/gemm`), or the path of a
    run in any results folder. Raises ResultsError, naming the candidates, when it means none or
    several.
    """
    folder, name = _separate(Path(root), text)
    ids = _origins(folder)
    if not ids:
        raise ResultsError(no_runs(folder))
    if name == LATEST:
        return folder, _newest_readable(folder, list(ids))
    return folder, _resolve(folder, name, ids)


def run_ids(root: Path) -> list[str]:
    """Ids of the runs in a results folder, oldest first. Raises ResultsError without the folder."""
    return list(_origins(root))


def results_folders(root: Path) -> list[str]:
    """Names of the results folders inside a results folder, such as `examples`."""
    inside = [name for name in run_folders(root) if name not in TABLE_NAMES]
    return [name for name in inside if (root / name / "runs").is_dir()]


def pick(
    prefix: str,
    ids: Sequence[str],
    *,
    kind: str,
    where: str,
    way_out: str = "",
    names: Iterable[str] = (),
) -> str:
    """Find the one id that is `prefix` or starts with it.

    Raises ResultsError naming the candidates.

    way_out: what else to type where several start with it. names: what else may have been meant.
    """
    if prefix in ids:
        return prefix
    found = [known for known in ids if prefix and known.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ResultsError(f"{where}: {kind} {prefix!r} is ambiguous: {_some(found)}{way_out}")
    guess = did_you_mean(prefix, [*ids, *names]) or f"; there are: {_some(ids) or 'none'}"
    raise ResultsError(f"{where}: no {kind} {prefix!r}{guess}")


def check_folder(root: Path) -> None:
    """Raise ResultsError where there is no results folder."""
    try:
        is_folder, is_there = root.is_dir(), root.exists()
    except OSError as error:  # a name that no folder can have
        raise ResultsError(f"--results {str(root)[:_SHOWN]}: {error.strerror}") from None
    if not is_folder:
        what = "a file, not a folder" if is_there else "no such folder"
        raise ResultsError(f"{root}: {what} of results; `raybench sweep JOB` makes one")


def has_parts(folder: Path) -> bool:
    """Whether a folder holds a file that is ours to read."""
    with os.scandir(folder) as entries:
        return any(not entry.name.startswith(HIDDEN) for entry in entries)


def no_row_of(root: Path, run_id: str) -> str:
    """Say that a run has points and no row in `runs`."""
    return f"run {run_id} has points, but no row; put {root}/runs/{run_id}/run.parquet back"


def no_runs(root: Path) -> str:
    """Say of a results folder without runs what to type, and where there are some."""
    counts = {name: len(run_folders(root / name / "runs")) for name in results_folders(root)}
    elsewhere = "".join(
        f"; {root / name} has {count}: `raybench list --results {root / name}`, "
        f"`raybench report {name}/RUN`"
        for name, count in counts.items()
        if count
    )
    return f"{root}: no runs yet; `raybench sweep JOB` makes one{elsewhere}"


def _separate(root: Path, text: str) -> tuple[Path, str]:
    """Return the results folder, and what is asked of it."""
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


def _resolve(root: Path, name: str, ids: Mapping[str, _Origin]) -> str:
    if name not in ids and (of_job := [i for i, origin in ids.items() if origin.job == name]):
        return _newest_readable(root, of_job)
    if name not in ids and name and name in run_folders(root / "points"):
        raise ResultsError(f"{root}: {no_row_of(root, name)}")
    way_out = "; give more of the id, or the name of a job for its newest run"
    jobs = {origin.job for origin in ids.values() if origin.job}
    return pick(name, list(ids), kind="run", where=str(root), way_out=way_out, names=jobs)


def _newest_readable(root: Path, ids: Sequence[str]) -> str:
    """Find the newest of these runs whose row can be read; where there is none, the newest."""
    return next((run_id for run_id in reversed(ids) if _origin_in_row(root, run_id)), ids[-1])


def _origins(root: Path) -> dict[str, _Origin]:
    """List the runs of a results folder, oldest first."""
    check_folder(root)
    origins = {
        name: _origin_in_id(name) or _origin_in_row(root, name) or _Origin()
        for name in run_folders(root / "runs")
        if has_parts(root / "runs" / name)
    }
    return dict(sorted(origins.items(), key=lambda item: (item[1].start, item[0])))


def _origin_in_id(run_id: str) -> _Origin | None:
    """Read what an id tells; None for an id that raybench has not given."""
    found = _STAMPED.fullmatch(run_id)
    return _Origin(**found.groupdict()) if found else None


def _origin_in_row(root: Path, run_id: str) -> _Origin | None:
    """Read what the row of a run tells; None, with a warning, where it cannot be read."""
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
    started_at = row["started_at"]
    start = "" if started_at is None else f"{started_at:%Y%m%d-%H%M%S}"
    return _Origin(job=row["job_name"] or "", start=start)


def run_folders(folder: Path) -> list[str]:
    """Names of the folders in the folder of a table, but for hidden ones."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(HIDDEN) and e.is_dir())


def _some(ids: Sequence[str]) -> str:
    """Name the last few ids: runs are in order of time, and the newest are the likeliest."""
    shown = ", ".join(ids[-_MOST_NAMED:])
    more = len(ids) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
