"""A command that is shown can be copied and typed, whatever is in its names."""

import subprocess

import pytest

from raybench.sweep.messages import command

NAMES = [
    "plain",
    "two words",
    "it's",
    "a\nb",
    "a\x1b[31m1",
    "tab\tend\\",
    "\u202e'x'\n7",
    "ü ä",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_shell_reads_the_name_that_was_meant_and_the_terminal_nothing_else(name):
    text = command("sweep", name, "--json")
    assert text.isprintable()
    shown = text.partition(" ")[2].removeprefix("-m raybench ")
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {shown}"], capture_output=True)
    assert done.stdout.decode().split("\0")[:-1] == ["sweep", name, "--json"]
