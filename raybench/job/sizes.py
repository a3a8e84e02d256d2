"""Sizes in bytes as a job file may write them: 4KiB, and ranges of them, 8:1GiB:x2. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raybench.job.problems import KeyPath, Problem, quote

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]iB|B|)")
_MAX_BYTES = 2**63 - 1
_RULE = "must be bytes, as in 4096 or 4KiB, or a range FIRST:LAST:xFACTOR, as in 8:1GiB:x2"
# Where a range stands for several points; elsewhere a size is one.
_AXES = ("matrix", "zip", "exclude")
_SECTIONS = (*_AXES, "include", "baseline", "workload")


def with_sizes(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Read a job file's data with each size of a setting `*_bytes` as a number, and what is wrong.

    A size that is wrong is left out of its list, so that the rest can be checked.
    """
    problems: list[Problem] = []
    told = dict(data)
    for section in _SECTIONS:
        given = told.get(section)
        if isinstance(given, dict):
            told[section] = _settings(given, (section,), problems)
        elif isinstance(given, list):
            told[section] = [
                _settings(entry, (section, place), problems) if isinstance(entry, dict) else entry
                for place, entry in enumerate(given)
            ]
    return told, problems


def _settings(given: Mapping[str, Any], path: KeyPath, problems: list[Problem]) -> dict[str, Any]:
    return {
        name: _values(value, (*path, name), problems) if str(name).endswith("_bytes") else value
        for name, value in given.items()
    }


def _values(value: Any, path: KeyPath, problems: list[Problem]) -> Any:
    if not isinstance(value, list):
        found = _expand(value, path, problems)
        return found[0] if len(found) == 1 else found or value
    return [
        size for place, one in enumerate(value) for size in _expand(one, (*path, place), problems)
    ]


def _expand(value: Any, path: KeyPath, problems: list[Problem]) -> list[Any]:
    """Return what stands for a value: itself, unless it is the text of a size or a range."""
    if not isinstance(value, str) or not value[:1].isdigit():
        return [value]
    first, *rest = value.split(":")
    if not rest:
        size = _bytes(first)
        sizes, complaint = ([size], "") if size else ([], _RULE)
    elif path[0] not in _AXES:
        sizes, complaint = (
            [],
            "must be one size, as in 4KiB; a range is for matrix, zip and exclude",
        )
    else:
        sizes, complaint = _range(first, rest)
    if complaint:
        problems.append(Problem(path=path, message=f"{complaint}, given {quote(value)}"))
    return sizes


def _range(first: str, rest: list[str]) -> tuple[list[int], str]:
    """List the sizes from the first to the last, and what is wrong with them."""
    ends = _bytes(first), _bytes(rest[0])
    factor = re.fullmatch(r"x(\d+)", rest[1]) if len(rest) == 2 else None
    if factor is None or None in ends:
        return [], _RULE
    low, high = (end or 0 for end in ends)
    if int(factor[1]) < 2:
        return [], "the factor of a range must be at least 2"
    if low > high:
        return [], "the last size of a range must not be below the first"
    sizes = [low]
    while sizes[-1] * int(factor[1]) <= high:
        sizes.append(sizes[-1] * int(factor[1]))
    return sizes, ""


def _bytes(text: str) -> int | None:
    """Read a whole number of bytes above 0; None where the text is none."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    count = (
        float(found[1]) * _UNITS[found[2]] if "." in found[1] else int(found[1]) * _UNITS[found[2]]
    )
    return int(count) if 0 < count <= _MAX_BYTES and count == int(count) else None
