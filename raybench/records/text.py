"""Text of users, made safe to print."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> str:
    """Return `str(value)` on one line, `printable`: one blank between words, none at the ends."""
    return printable(" ".join(str(value).split()))


def printable(text: str) -> str:
    """Return the text with `�` for each unprintable character, such as a tab or line break."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
