"""The errors that a user can cause, each with its exit code.

RaybenchError
├── UsageError               2   the command or a declaration is invalid
│   ├── JobError             2   the job file, with a line for each problem
│   └── ResultsError         2   a run does not exist, or results cannot be read or written
└── ClusterError             3   the cluster is unreachable or unusable, or no point fits it
    └── DevicesInUseError    3   another sweep uses the devices

Errors of click and missing packages exit with 2, Ctrl-C with 130. Any other exception is a bug of
raybench and exits with 4. Every class takes one string, so that instances can be pickled.

The functions describe any exception and never raise: an exception of a workload may have a
`__str__` or `__getattr__` that raises, invalid notes, or a text of 10 MB.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TypeAlias

# File, line and function.
Frame: TypeAlias = tuple[str, int, str]
# How the CPU allocator, cuBLAS and NCCL say so: they have no exception class for it.
OUT_OF_MEMORY_PHRASES = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
_PACKAGE = f"{Path(__file__).parent}/"


class RaybenchError(Exception):
    """An error whose text is meant for the user: where, the rule, the value, what to do."""

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


class ResultsWarning(UserWarning):
    """Part of the results is skipped, such as a damaged run."""


class DevicesInUseError(ClusterError):
    """Another sweep uses one of the devices; no point is run."""


# Longest message with its notes, and longest traceback or log.
MESSAGE_CHARACTERS = 2000
DETAIL_CHARACTERS = 4000


def message_of(error: BaseException) -> str:
    """Return the first line of the error's text and of each note, joined by "; ".

    An error without a text gives `TypeName: no message`. At most 2,000 characters.
    """
    texts: list[str] = []
    with suppress(Exception):
        if isinstance(error.__notes__, list):
            texts = [note for note in error.__notes__ if isinstance(note, str)]
    lines = [_first_line(_text(error)) or brief(error), *filter(None, map(_first_line, texts))]
    return shorten("; ".join(lines), MESSAGE_CHARACTERS)


def brief(error: BaseException) -> str:
    """Return `TypeName: first line of its text`, at most 2,000 characters."""
    text = _first_line(_text(error)) or "no message"
    return shorten(f"{type(error).__name__}: {text}", MESSAGE_CHARACTERS)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of the error with its causes; the last 4,000 characters."""
    lines = [*traceback.format_tb(error.__traceback__), brief(error)]
    with suppress(Exception):
        lines = traceback.format_exception(error)
    return shorten_start("".join(lines), DETAIL_CHARACTERS)


def frames_of(error: BaseException) -> list[Frame]:
    """Return the frames of the traceback, the innermost last."""
    walked = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]


def place_among(frames: Iterable[Frame]) -> str:
    """Return the last frame in a file of the user as `net.py:60 in step`, or "".

    Files of raybench, of Python and of installed packages are not files of the user.
    """
    in_user_files = [
        f"{PurePath(path).name}:{line} in {function}"
        for path, line, function in frames
        if not path.startswith(("<", _PACKAGE)) and "/lib/python3" not in path
    ]
    return in_user_files[-1] if in_user_files else ""


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
    """Return the text, or its start and a mark of the original length, `characters` in all.

    Args:
        characters: more than the length of the mark.
    """
    if len(text) <= characters:
        return text
    mark = f" ... [cut: {len(text):,} characters]"
    return text[: characters - len(mark)] + mark


def shorten_start(text: str, characters: int) -> str:
    """Return the text, or a mark of the original length and its end, `characters` in all."""
    if len(text) <= characters:
        return text
    mark = f"[cut: {len(text):,} characters] ..."
    return mark + text[len(mark) - characters :]


def _text(error: BaseException) -> str:
    """Return str(error); "" if its `__str__` raises."""
    try:
        text = str(error)
    except BaseException:
        return ""
    # The text of a KeyError is only the key.
    return f"no such key: {text}" if isinstance(error, KeyError) and text else text


def _first_line(text: str) -> str:
    """Return the first line that is not blank."""
    return next(iter(text.strip().splitlines()), "")
