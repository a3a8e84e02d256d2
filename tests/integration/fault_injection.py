"""A sweep that stands still in a point until something was done to it from outside."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.fault_marks import HARMED, mark
from tests.integration.fault_runs import marks, start_sweep
from tests.integration.sweeps import descendants, title_of

_START_S, _END_S = 120.0, 240.0
Waiting = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a harmed sweep ended. Times in s from the harm: its exit; its last process gone.

    gone_s: None where processes were still there 30 s after the exit; `left` are their titles.
    """

    code: int
    said: str
    end_s: float
    gone_s: float | None
    left: tuple[str, ...]


def harmed_sweep(
    command: Sequence[str],
    folder: Path,
    number: int,
    ranks: int,
    harm: Callable[[subprocess.Popen[str], Waiting], None],
    *,
    stay_s: float | None = 0.0,
) -> Ended:
    """Run the sweep; at point `number`, when all its ranks wait, do the harm and let them go on.

    harm: gets the sweep and the marks of the waiting ranks. stay_s: how long the ranks stay in the
    point after it; None leaves them waiting.
    """
    process = start_sweep(command, folder)
    try:
        waiting = _wait_for(process, folder, number, ranks)
        family = descendants(process.pid) | {each["pid"]: "" for each in waiting.values()}
        mark(folder, "fault", number=number, rank=-1)
        struck_s = time.monotonic()
        harm(process, waiting)
        if stay_s is not None:
            release(folder, stay_s)
        _, said = process.communicate(timeout=_END_S)
        end_s = time.monotonic() - struck_s
    finally:
        process.kill()
        release(folder, 0.0)
    gone = _gone(family)
    return Ended(
        code=process.returncode,
        said=said,
        end_s=end_s,
        gone_s=None if gone else time.monotonic() - struck_s,
        left=tuple(gone),
    )


def release(folder: Path, stay_s: float) -> None:
    aside = folder / f".{HARMED}"
    aside.write_text(str(stay_s))
    aside.replace(folder / HARMED)


def _wait_for(
    process: subprocess.Popen[str], folder: Path, number: int, ranks: int
) -> dict[int, Mapping[str, Any]]:
    deadline_s = time.monotonic() + _START_S
    while True:
        waiting = {
            each["rank"]: each
            for each in marks(folder)
            if each["event"] == "waiting" and each["number"] == number
        }
        if len(waiting) == ranks:
            return waiting
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise AssertionError(f"the point to be harmed was not reached: {process.communicate()}")
        time.sleep(0.02)


def _gone(family: Mapping[int, str]) -> list[str]:
    """Wait until none of these processes is there; the titles of those that stay."""
    deadline_s = time.monotonic() + 30
    while left := [title for pid in family if (title := title_of(pid))]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    return left
