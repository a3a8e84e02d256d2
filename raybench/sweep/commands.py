"""Commands to be copied, as the user types them here."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def program() -> str:
    """`raybench`, or how it was called where that may not be on the PATH."""
    is_module = bool(sys.argv) and Path(sys.argv[0]).name == "__main__.py"
    return "python -m raybench" if is_module else "raybench"


def name_program(text: str) -> str:
    """Write the commands of a message, which stand in backticks, as they are to be typed."""
    return text.replace("`raybench ", f"`{program()} ")


def command(*words: str) -> str:
    """Return a command of raybench, quoted for a shell."""
    return " ".join([program(), *map(_quote, words)])


def _quote(word: str) -> str:
    r"""Quote for a shell; what would control the terminal as bash and zsh write it: `$'a\nb'`."""
    if word.isprintable():
        return shlex.quote(word)
    letters = (letter if letter.isprintable() else _escape(letter) for letter in word)
    return "$'" + "".join("\\" + one if one in ("'", "\\") else one for one in letters) + "'"


def _escape(letter: str) -> str:
    # In octal: a digit that follows is no part of it.
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(letter))
