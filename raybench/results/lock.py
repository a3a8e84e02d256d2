"""Who writes a run: one driver at a time, and only inside of the results folder."""

from __future__ import annotations

import errno
import fcntl
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from raybench.errors import ResultsError
from raybench.results.columns import TABLE_NAMES
from raybench.results.folder import LATEST

# No separator, no leading dot: a run_id is one folder name that cannot leave the results. Not
# all digits, or readers take it for a number.
_RUN_ID = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")
_LOCK = ".driver"  # in the run's folder of `runs`; always empty
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READERS_S = 1.0  # a reader that tests the lock has it for far less
LOGS = "logs"  # the folder of what ranks wrote, beside the tables


@contextmanager
def hold_run(root: Path, run_id: str) -> Iterator[None]:
    """Hold the lock of a run inside the `with` block: only one driver may write it.

    The system frees the lock when the process dies.

    Raises ResultsError when another driver has it, and when what is written would not stay in
    `root`. Where files cannot be locked nothing is held.
    """
    _check_inside(root, run_id)
    path = root / "runs" / run_id / _LOCK
    with one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        if not _lock(file):
            raise ResultsError(
                f"{root}: run {run_id} is being written by another sweep; wait for its end, "
                "or stop it"
            )
        yield


def check_run_id(run_id: str) -> None:
    """Raise ResultsError for an id that cannot be the name of a folder."""
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise ResultsError(
            f"run_id: must be letters, digits, '.', '_' or '-', not all digits and not "
            f"'{LATEST}', got {run_id!r}"
        )


def _check_inside(root: Path, run_id: str) -> None:
    """Check that a run is inside its results folder.

    Somebody else's may have any id, and links in the place of its folders.
    """
    check_run_id(run_id)
    for table in (*TABLE_NAMES, "traces", LOGS):
        folder = root / table / run_id
        for path in (folder, folder / _LOCK):
            if not path.resolve().is_relative_to(root.resolve()):
                raise ResultsError(f"{path}: a link that leads out of {root}; remove it")


def _lock(file: IO[bytes]) -> bool:
    deadline_s = time.monotonic() + _READERS_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        except OSError:
            # A file system without locks must not keep anyone from a sweep.
            return True
        else:
            return True


def has_driver(root: Path, run_id: str) -> bool | None:
    """Return whether a driver holds the run; None on file systems without locks."""
    try:
        with (root / "runs" / run_id / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


@contextmanager
def one_line(path: Path) -> Iterator[None]:
    """Raise ResultsError, in one line, for an OSError inside the `with` block."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        remedy = "make room there" if error.errno in _FULL else "choose another folder"
        raise ResultsError(f"{path}: cannot be written: {reason}; {remedy}") from error
