"""Lists of host names, as Slurm writes them: `gpu[01-12,15],login1`."""

from __future__ import annotations

import math
import os
import re
from itertools import product
from pathlib import Path

from raybench.errors import UsageError, shorten

# Above the limit of Slurm's own lists; a typing error must not fill the memory.
_MOST_HOSTS = 100_000
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_QUOTED_CHARACTERS = 80


def read_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a file, or those that the text itself lists, each once and in order.

    A text with a slash, or with the name of an existing file, is a file: names and lists in lines,
    with comments after `#`.

    Raises:
        UsageError: the file cannot be read, a list is wrong, or there is no host.
    """
    path = Path(text)
    if os.sep in text or path.is_file():
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
            raise UsageError(f"--expect {text}: {reason}") from None
        lists = [line.partition("#")[0].strip() for line in lines]
    else:
        lists = [text.strip()]
    hosts: dict[str, None] = {}
    for host_list in filter(None, lists):
        hosts |= dict.fromkeys(expand_hosts(host_list))
    if not hosts:
        raise UsageError(f"--expect {text}: names no node")
    return tuple(hosts)


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as `gpu[01-12,15],login1`.

    Raises:
        UsageError: the list is wrong.
    """
    hosts: list[str] = []
    # Split at commas outside of brackets.
    for item in re.split(r",(?![^\[]*\])", text):
        # Names and contents of brackets by turns: "rack", "1-2", "n", "01-04", "".
        parts = re.split(r"\[([^\[\]]*)\]", item.strip())
        choices: list[list[str]] = []
        for position, part in enumerate(parts):
            is_bracket = position % 2 == 1
            if is_bracket:
                choices.append(_bracket_numbers(part, text))
            elif part and not _NAME.fullmatch(part):
                raise _list_error(text, item)
            else:
                choices.append([part])
        # Count the hosts before they are listed: there may be billions.
        count = math.prod(map(len, choices))
        if not item.strip() or count + len(hosts) > _MOST_HOSTS:
            raise _list_error(text, item)
        hosts += map("".join, product(*choices))
    return hosts


def _bracket_numbers(text: str, host_list: str) -> list[str]:
    """Return the numbers of a bracket such as `01-12,15`, with their leading zeros."""
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _list_error(host_list, text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_HOSTS:
            raise _list_error(host_list, text)
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _list_error(host_list: str, wrong_part: str) -> UsageError:
    """Return the error for a list of hosts with a wrong part."""
    quoted = shorten(host_list, _QUOTED_CHARACTERS)
    wrong = shorten(wrong_part, _QUOTED_CHARACTERS)
    return UsageError(
        f"--expect {quoted}: must be a file with one node a line, or a list such as "
        f"gpu[01-12,15],login1 with at most {_MOST_HOSTS:,} nodes; {wrong!r} is wrong"
    )
