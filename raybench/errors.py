"""The errors that a user can cause, each with its exit code.

RaybenchError
├── UsageError               2   the command or a declaration is invalid
│   ├── JobError             2   the job file, with a line for each problem
│   └── ResultsError         2   a run does not exist, or results cannot be read or written
├── ClusterError             3   the cluster is unreachable or unusable, or no point fits it
│   ├── DevicesInUseError    3   another sweep uses the devices
│   └── InstallationError    3   a driver or a package must be repaired, or no worker starts
└── StepError                1   a function that Python sent to workers has failed there

Errors of click and missing packages exit with 2, Ctrl-C with 130. Any other exception is a bug of
raybench and exits with 4. Every class takes one string, so that instances can be pickled.

The functions never raise, although an exception of a workload may have a `__str__` or `__getattr__`
that raises, invalid notes, or a text of 10 MB.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TypeAlias

# File, line and function.
Frame: TypeAlias = tuple[str, int, str]
# The CPU allocator, cuBLAS and NCCL report it by these words only, not by an exception class.
OUT_OF_MEMORY_PHRASES = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
_PACKAGE = f"{Path(__file__).parent}/"


class RaybenchError(Exception):
    """An error whose text tells the user where, the rule, the value and what to do."""

    exit_code = 4


class UsageError(RaybenchError):
    """The command line or a declaration is invalid."""

    exit_code = 2


class JobError(UsageError):
    """The job is invalid: a line for each problem, at most 50."""


class ResultsError(UsageError):
    """A run or point does not exist, or results cannot be read or written."""


class ClusterError(RaybenchError):
    """The cluster cannot be reached or used, or no point fits it."""

    exit_code = 3


class StepError(RaybenchError):
    """A function of `raybench.measure` failed on a worker; its traceback ends the text."""

    exit_code = 1


class ResultsWarning(UserWarning):
    """Part of the results is skipped, such as a damaged run."""


class DevicesInUseError(ClusterError):
    """Another sweep uses one of the devices; no point is run."""


class InstallationError(ClusterError):
    """A driver or a package of a node must be repaired, or no worker starts; no point is run."""


# Longest message with its notes, and longest traceback or log.
MESSAGE_CHARACTERS = 2000
DETAIL_CHARACTERS = 4000


def message_of(error: BaseException) -> str:
    """Return the first line of the error's text and of each note, joined by "; ", shortened.

    An error without a text gives `TypeName: no message`.
    """
    notes: list[str] = []
    # An exception of a workload may have invalid notes.
    with suppress(Exception):
        if isinstance(error.__notes__, list):
            notes = [note for note in error.__notes__ if isinstance(note, str)]
    first_lines = [_first_line(_text(error)) or brief(error), *map(_first_line, notes)]
    return shorten("; ".join(filter(None, first_lines)), MESSAGE_CHARACTERS)


def brief(error: BaseException) -> str:
    """Return the type and the first line of the text, as `TypeName: text`, shortened."""
    text = _first_line(_text(error)) or "no message"
    return shorten(f"{type(error).__name__}: {text}", MESSAGE_CHARACTERS)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of the error with its causes; the last 4,000 characters."""
    # Without the causes, in case the error makes `format_exception` fail.
    lines = [*traceback.format_tb(error.__traceback__), brief(error)]
    with suppress(Exception):
        lines = traceback.format_exception(error)
    return shorten_start("".join(lines), DETAIL_CHARACTERS)


def frames_of(error: BaseException) -> list[Frame]:
    """Return the frames of the traceback, the innermost last."""
    return [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]


def last_user_frame(frames: Iterable[Frame]) -> str:
    """Return the last frame in a file of the user as `net.py:60 in step`, or ""."""
    location = ""
    for path, line, function in frames:
        # Skip raybench, and under /lib/python3… Python itself and installed packages.
        if not path.startswith(("<", _PACKAGE)) and "/lib/python3" not in path:
            location = f"{PurePath(path).name}:{line} in {function}"
    return location


def add_note(error: BaseException, note: str) -> None:
    """Add a note to the error if possible."""
    with suppress(Exception):
        error.add_note(note)


def mentions(error: BaseException, *words: str) -> bool:
    """Return whether the text of the error contains any of `words`; case matters."""
    text = _text(error)
    return any(word in text for word in words)


def how_to_install(extra: str) -> str:
    """Return how to install an extra of raybench, which is on no package index."""
    return f"in the checkout of raybench: pip install -e '.[{extra}]'"


def shorten(text: str, characters: int) -> str:
    """Return the text; if it is too long, its start and a mark with the original length.

    Args:
        characters: largest length of the result; more than the length of the mark.
    """
    if len(text) <= characters:
        return text
    mark = f" ... [cut: {len(text):,} characters]"
    return text[: characters - len(mark)] + mark


def shorten_start(text: str, characters: int) -> str:
    """Return the text; if it is too long, a mark with the original length and the text's end.

    Args:
        characters: largest length of the result; more than the length of the mark.
    """
    if len(text) <= characters:
        return text
    mark = f"[cut: {len(text):,} characters] ..."
    return mark + text[len(mark) - characters :]


def _text(error: BaseException) -> str:
    """Return str(error); "" if `__str__` raises."""
    try:
        text = str(error)
    except BaseException:
        return ""
    # The text of a KeyError is only the key.
    return f"no such key: {text}" if isinstance(error, KeyError) and text else text


def _first_line(text: str) -> str:
    """Return the first line that is not blank."""
    lines = text.strip().splitlines()
    return lines[0] if lines else ""
