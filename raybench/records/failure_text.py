"""What an exception says, whatever it is: bounded, and without running into it again.

A workload's exception may have a `__str__` that raises, notes that are no text, or a text of 10 MB.
"""

from __future__ import annotations

import traceback
from contextlib import suppress

# Of a message, with its notes; of the name of an exception's type; of a traceback or a log.
MESSAGE_CHARACTERS = 2000
TYPE_CHARACTERS = 200
DETAIL_CHARACTERS = 4000
_NO_MESSAGE = "no message"


def message_of(error: BaseException) -> str:
    """Return the first line of the error's text, and of each of its notes."""
    text = _first_line(_text(error)) or f"{type_of(error)}: {_NO_MESSAGE}"
    notes = getattr(error, "__notes__", None)
    texts = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    told = "; ".join([text, *filter(None, map(_first_line, texts))])
    return shorten(told, MESSAGE_CHARACTERS)


def brief(error: BaseException) -> str:
    """Return the error's type and the first line of its text, for use in a sentence."""
    text = _first_line(_text(error)) or _NO_MESSAGE
    return shorten(f"{type_of(error)}: {text}", MESSAGE_CHARACTERS)


def type_of(error: BaseException) -> str:
    """Return the name of the error's type."""
    return shorten(type(error).__name__, TYPE_CHARACTERS)


def traceback_of(error: BaseException) -> str:
    """Return the end of the error's traceback, at most 4,000 characters."""
    return shorten_start("".join(traceback.format_exception(error)), DETAIL_CHARACTERS)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to the error, unless its `__notes__` is no list any more."""
    with suppress(TypeError):
        error.add_note(note)


def mentions(error: BaseException, *words: str) -> bool:
    """Return whether the error's text has one of these words."""
    text = _text(error)
    return any(word in text for word in words)


def shorten(text: str, characters: int) -> str:
    """Return the text, or its beginning with a mark where it has more characters."""
    if len(text) <= characters:
        return text
    mark = f" ... [cut: {len(text):,} characters]"
    return text[: characters - len(mark)] + mark


def shorten_start(text: str, characters: int) -> str:
    """Return the text, or its end behind a mark where it has more characters."""
    if len(text) <= characters:
        return text
    mark = f"[cut: {len(text):,} characters] ..."
    return mark + text[len(mark) - characters :]


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        return ""
    if isinstance(error, KeyError) and text:
        return f"no such key: {text}"  # its own text is the key alone
    return text


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
