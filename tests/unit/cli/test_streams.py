"""A stderr that is full, closed or without a reader ends no command."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAYS = f"""\
exec {sys.executable} -c '
import os, sys
from raybench.cli.output import make_console, say
from raybench.cli.output import keep_stderr_usable
keep_stderr_usable()
kept = open("kept", "w")
assert kept.fileno() > 2, "what others write to stderr would be in it"
console = make_console()
for number in range(2000):
    say(console, f"line {{number}} ü\\udce4")
with console.status("waiting"):
    print("beside", file=sys.stderr)
kept.write("all")
'"""


@pytest.mark.parametrize(
    "stderr", ["2>/dev/full", "2>&-", "<&- >&- 2>&-", "2>&1 >/dev/null | true", "2>log"]
)
def test_what_cannot_be_said_is_dropped_and_all_else_is_done(stderr, tmp_path):
    command, *pipe = stderr.split(" | ")
    text = f"{{ {SAYS} {command}; }}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", " | ".join([text, *pipe])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kept").read_text() == "all"
    if stderr == "2>log":
        lines = (tmp_path / "log").read_text().splitlines()
        assert len(lines) == 2001
        assert lines[0].startswith("line 0 ü")
