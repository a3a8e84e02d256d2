"""Text of users, made safe to print."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> str:
    """Return `str(value)` as one printable line with single blanks."""
    return printable(" ".join(str(value).split()))


def printable(text: str) -> str:
    """Replace each unprintable character, such as a tab or a line break, by `�`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
