"""The prolog for Slurm, run as slurmd runs it: without a PATH, for its exit code alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).parents[2] / "docs" / "launchers"
RAYBENCH = Path(sys.executable).with_name("raybench")
# Plays `raybench health --quick`: it writes a report of this state and ends with this code.
_FAKE = """\
#!{python}
import json, pathlib, sys, time
words = sys.argv[1:]
assert words[:2] == ["health", "--quick"] and words[2:4] == ["--exit-code", "slurm"]
folder = pathlib.Path(words[words.index("--report") + 1])
print("node0: what was found")
{code}
"""
_REPORT = '(folder / "node0.json").write_text(json.dumps({{"state": "{}"}}, indent=1))\n'

PLUG = Path(__file__).with_name("quick_faults")


@pytest.fixture
def prolog(tmp_path):
    """Run the prolog with a raybench that does `code`."""

    def run(code, script="health-prolog.sh", **variables):
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        fake = programs / "raybench"
        fake.write_text(_FAKE.format(python=sys.executable, code=code))
        fake.chmod(0o755)
        return run_prolog(script, RAYBENCH_BIN=str(programs), **variables)

    def run_prolog(script, **variables):
        own = {"RAYBENCH_REPORTS": str(tmp_path / "reports"), "TMPDIR": str(tmp_path)}
        return subprocess.run(
            ["/bin/bash", LAUNCHERS / script],
            env=own | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

    run.real = run_prolog
    return run


@pytest.mark.parametrize("script", ["health-prolog.sh", "health-epilog.sh"])
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (_REPORT.format("healthy"), 0),
        (_REPORT.format("suspect"), 0),
        (_REPORT.format("drain") + "sys.exit(1)", 1),
        # Python ends with 1 if it cannot import raybench.
        ("import nothing_of_this_name", 0),
        # A drain is only what the command and its report both say.
        (_REPORT.format("untested") + "sys.exit(1)", 0),
        (_REPORT.format("drain") + "sys.exit(0)", 0),
        ("sys.exit(2)", 0),
        ("import os; os.kill(os.getpid(), 9)", 0),
    ],
)
def test_only_a_report_of_a_drain_drains(prolog, code, exit_code, script):
    done = prolog(code, script)
    assert done.returncode == exit_code, done.stderr
    if exit_code:
        assert "node0: what was found" in done.stderr


def test_report_is_kept_for_collecting(prolog, tmp_path):
    for state in ("drain", "healthy"):
        prolog(_REPORT.format(state))
        [path] = (tmp_path / "reports").iterdir()
        assert path.name == "node0.json"
        assert json.loads(path.read_text())["state"] == state
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "reports"]


def test_hanging_check_ends_in_time_and_drains_nothing(prolog):
    began_s = time.monotonic()
    done = prolog(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)",
        RAYBENCH_LIMIT_S="1",
    )
    assert done.returncode == 0
    assert "not checked and is not drained" in done.stderr
    assert time.monotonic() - began_s < 20


def test_missing_raybench_drains_nothing(prolog, tmp_path):
    done = prolog.real("health-prolog.sh", RAYBENCH_BIN=str(tmp_path))
    assert done.returncode == 0
    assert "not checked and is not drained" in done.stderr


def test_textfile_is_asked_for(prolog, tmp_path):
    code = 'pathlib.Path(words[words.index("--textfile") + 1]).write_text("metrics")'
    path = tmp_path / "raybench.prom"
    assert prolog(code, RAYBENCH_TEXTFILE=str(path)).returncode == 0
    assert path.read_text() == "metrics"


@pytest.mark.long
def test_real_prolog_passes_a_healthy_host(prolog, tmp_path):
    done = prolog.real("health-prolog.sh", RAYBENCH_BIN=str(RAYBENCH.parent), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    [report] = (tmp_path / "reports").glob("*.json")
    assert report.stem == os.uname().nodename
    assert json.loads(report.read_text())["state"] in ("healthy", "suspect", "untested")


@pytest.mark.long
def test_real_prolog_drains_for_wrong_bits(prolog, tmp_path):
    fault = {"QUICK_FAULT": "wrong_bits", "QUICK_FAULT_DEVICE": "1", "PYTHONPATH": str(PLUG)}
    done = prolog.real(
        "health-prolog.sh", RAYBENCH_BIN=str(RAYBENCH.parent), HOME=str(tmp_path), **fault
    )
    assert done.returncode == 1
    assert "same bits fp32 256" in done.stderr
    [report] = (tmp_path / "reports").glob("*.json")
    assert json.loads(report.read_text())["state"] == "drain"
