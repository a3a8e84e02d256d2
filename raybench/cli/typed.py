"""Commands to be copied, as the user types them here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def program() -> str:
    """`raybench`, or how it was called where that may not be on the PATH."""
    is_module = bool(sys.argv) and Path(sys.argv[0]).name == "__main__.py"
    return "python -m raybench" if is_module else "raybench"


def command(*words: str) -> str:
    """A command of raybench, quoted for a shell."""
    return f"{program()} {shlex.join(words)}"
