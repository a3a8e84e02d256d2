"""The errors that a user can cause, each with its exit code.

RaybenchError
├── UsageError          2   a command that cannot be carried out as it was given
│   ├── JobError        2   the job file: one line per problem, up to 50 at once
│   └── ResultsError    2   a run that is not there, a folder that cannot be read or written
└── ClusterError        3   the cluster is not there, gone or of no use, or no point fits it
    └── DevicesInUseError    3   another sweep has the devices

click's own errors and a package that is not installed but needed to measure exit with 2, Ctrl-C
with 130. Anything else that escapes is a bug of raybench and exits with 4.
Every class takes one string, so that an instance survives pickling between processes.

The functions tell what any exception says, bounded, and raise nothing: a workload's may have a
`__str__` or `__getattr__` that raises, notes that are no text, or a text of 10 MB.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TypeAlias

# The file, the line and the function of a frame.
Frame: TypeAlias = tuple[str, int, str]
_PACKAGE = f"{Path(__file__).parent}/"


class RaybenchError(Exception):
    """A failure whose text is meant for the user: where, the rule, what was given, what to do."""

    exit_code = 4


class UsageError(RaybenchError):
    """The command line asks for something that cannot be done."""

    exit_code = 2


class JobError(UsageError):
    """A job that cannot be run: a line per problem, up to 50, with place, key and rule."""


class ResultsError(UsageError):
    """A run or point that is not in the results, or results that cannot be read or written."""


class ClusterError(RaybenchError):
    """The cluster cannot be reached or used, or no point of the plan fits it."""

    exit_code = 3


class ResultsWarning(UserWarning):
    """Part of the results is left out, as a damaged run; commands print it in a line on stderr."""


class DevicesInUseError(ClusterError):
    """Another sweep has one of the devices: no point is run, and a new run is not kept."""


# The most that is kept: of a message with its notes, and of a traceback or a log.
MESSAGE_CHARACTERS = 2000
DETAIL_CHARACTERS = 4000


def message_of(error: BaseException) -> str:
    """Return the first non-blank line of the error's text and of each note, joined by "; ".

    Without the name of its type, but `TypeName: no message` if it has no text, or its `__str__`
    raises. Of a KeyError it is `no such key: 'KEY'`. Longer than 2,000 characters: `shorten` cuts.
    """
    texts: list[str] = []
    with suppress(Exception):
        if isinstance(error.__notes__, list):
            texts = [note for note in error.__notes__ if isinstance(note, str)]
    told = [_first_line(_text(error)) or brief(error), *filter(None, map(_first_line, texts))]
    return shorten("; ".join(told), MESSAGE_CHARACTERS)


def brief(error: BaseException) -> str:
    """Return `TypeName: first line of its text`, for use in a sentence; at most 2,000 characters.

    `TypeName: no message` for an error without a text. The text is as in `message_of`.
    """
    text = _first_line(_text(error)) or "no message"
    return shorten(f"{type(error).__name__}: {text}", MESSAGE_CHARACTERS)


def traceback_of(error: BaseException) -> str:
    """Return the error's traceback with its causes; `shorten_start` cuts it to 4,000 characters."""
    lines = [*traceback.format_tb(error.__traceback__), brief(error)]
    with suppress(Exception):
        lines = traceback.format_exception(error)
    return shorten_start("".join(lines), DETAIL_CHARACTERS)


def frames_of(error: BaseException) -> list[Frame]:
    """Return the frames of the error's traceback, the innermost last."""
    walked = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]


def place_among(frames: Iterable[Frame]) -> str:
    """Return the last frame in a user's file as `net.py:60 in step`; empty where there is none.

    Files of raybench, of Python and of installed packages are nobody's own.
    """
    own = [
        f"{PurePath(path).name}:{line} in {function}"
        for path, line, function in frames
        if not path.startswith(("<", _PACKAGE)) and "/lib/python3" not in path
    ]
    return own[-1] if own else ""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to the error in place; does nothing if its `__notes__` is no list or raises."""
    with suppress(Exception):
        error.add_note(note)


def mentions(error: BaseException, *words: str) -> bool:
    """Return whether the error's whole text, without notes, has any of `words`; case matters."""
    text = _text(error)
    return any(word in text for word in words)


def how_to_install(extra: str) -> str:
    """Return where and how to install an extra of raybench, which is on no package index."""
    return f"in the checkout of raybench: pip install -e '.[{extra}]'"


def shorten(text: str, characters: int) -> str:
    """Return the text; a longer one as its start and a mark, together `characters` long.

    The mark is " ... [cut: 12,345 characters]", with the length of the whole text; `characters`
    must be more than that of the mark.
    """
    if len(text) <= characters:
        return text
    mark = f" ... [cut: {len(text):,} characters]"
    return text[: characters - len(mark)] + mark


def shorten_start(text: str, characters: int) -> str:
    """Return the text; a longer one as a mark, "[cut: 12,345 characters] ...", and its end.

    Otherwise as `shorten`.
    """
    if len(text) <= characters:
        return text
    mark = f"[cut: {len(text):,} characters] ..."
    return mark + text[len(mark) - characters :]


def _text(error: BaseException) -> str:
    """Return str(error), of a KeyError in a sentence; empty where its `__str__` raises."""
    try:
        text = str(error)
    except BaseException:
        return ""
    # The text of a KeyError is the key alone.
    return f"no such key: {text}" if isinstance(error, KeyError) and text else text


def _first_line(text: str) -> str:
    """Return the first line that is not blank, without blanks before it; empty where none is."""
    return next(iter(text.strip().splitlines()), "")
