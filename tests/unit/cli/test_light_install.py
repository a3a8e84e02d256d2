"""The commands without the packages of the extra `run`, and where stderr takes nothing."""

import subprocess
import sys

import pytest
from commands import run_python

# A finder ahead of all others, which finds these nowhere.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("ray", "torch", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from raybench.cli import main
for line in sys.argv[1:]:
    sys.argv = ["raybench", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("exit", end.code or 0, file=sys.stderr)
"""
INSTALL = "in the checkout of raybench: pip install -e '.[run]'\n"
RUN = "ddp_scaling-20261122-142621-6209 --results results/examples"


def raybench(*lines):
    """Run these commands in one process; return what it wrote."""
    return run_python(WITHOUT, *lines)


def test_planning_and_reading_need_neither_ray_nor_torch():
    lines = ["plan jobs/ddp_scaling.yaml", f"report {RUN}", f"compare ddp_scaling-20261121 {RUN}"]
    done = raybench(*lines)
    assert done.stderr.split() == ["exit", "0"] * 3
    assert done.stdout


def test_measuring_without_libraries_names_the_install_command(tmp_path):
    done = raybench(f"sweep jobs/ddp_scaling.yaml -o {tmp_path}", "health")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("exit 2\n") == done.stderr.count(INSTALL) == 2


def test_a_notebook_completes_the_public_names():
    import raybench

    assert {"load", "units", "Workload", "Answer"} <= set(dir(raybench)) == set(raybench.__all__)
    assert not hasattr(raybench, "nothing")


SAYS = f"""\
exec {sys.executable} -c '
import os, sys
from raybench.cli.shared import make_console, say
from raybench.cli.shared import keep_stderr_usable
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
def test_unwritable_messages_do_not_stop_the_program(stderr, tmp_path):
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
