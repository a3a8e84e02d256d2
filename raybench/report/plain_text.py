"""Text from results and files made harmless for a terminal and a table."""

from __future__ import annotations

import re
from typing import Any

# All that `str.splitlines` takes for the end of a line, and tabs.
_BREAKS = re.compile("[\t\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")


def plain(value: Any) -> str:
    """Return text from results as one line without control characters."""
    return printable(" ".join(str(value).split()))


def printable(text: str) -> str:
    """Return the text with `�` for characters that control a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def one_line(text: str) -> str:
    """Return the text on one line, without characters that control a terminal; blanks are kept."""
    return text if text.isprintable() else printable(_BREAKS.sub(" ", text))


def plain_lines(text: str) -> list[str]:
    """Return the lines of a text without control characters; their indentation stays."""
    lines = [line.expandtabs() for line in text.splitlines()]
    return [" " * (len(line) - len(line.lstrip(" "))) + plain(line) for line in lines]


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters of a text; the last is `…` where it was cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def counted(count: int, noun: str) -> str:
    """Write `1 point`, `4 points`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(*texts: str) -> str:
    """Write the least and the most as `57.2% to 87.0%`; once where they are the same."""
    return " to ".join(dict.fromkeys(texts))
