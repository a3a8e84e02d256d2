"""Sizes in bytes as people write them: 4096, 4KiB, 141GB."""

from __future__ import annotations

import re

_UNITS = {
    **dict.fromkeys(("", "B"), 1),
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("kMGT", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]iB|[kMGT]?B|)")
_MOST_BYTES = 2**63 - 1


def read_bytes(text: str) -> float | None:
    """Read a number of bytes above 0, which is whole unless the text gives parts of one.

    None where the text is none.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit = found.groups()
    count = float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit]
    return count if 0 < count <= _MOST_BYTES else None
