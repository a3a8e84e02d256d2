"""The commands without the packages of the extra `run`, and where stderr takes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A finder ahead of all others, which finds these nowhere.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("ray", "torch", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from raybench.cli import main
main()
"""
RUN = "ddp_scaling-20261122-142621-6209"


def raybench(*words):
    command = [sys.executable, "-c", WITHOUT, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "jobs/ddp_scaling.yaml"),
        ("workloads", "mlp"),
        ("report", RUN, "--results", "results/examples"),
        ("compare", "ddp_scaling-20261121", RUN, "--results", "results/examples"),
    ],
    ids=lambda words: words[0],
)
def test_planning_and_reading_need_neither_ray_nor_torch(words):
    done = raybench(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("words", [("sweep", "jobs/ddp_scaling.yaml"), ("doctor",), ("health",)])
def test_measuring_without_them_says_in_one_line_what_to_install(words, tmp_path):
    done = raybench(*words, *(("-o", str(tmp_path)) if words[0] == "sweep" else ()))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "pip install 'raybench[run]'" in done.stderr.splitlines()[-1]


def test_a_notebook_completes_the_public_names():
    import raybench

    assert {"load", "units", "Workload", "Answer"} <= set(dir(raybench)) == set(raybench.__all__)


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
