"""Options of `raybench health --quick`, and its report with and without --json."""

import json
import time

import psutil
import pytest
from commands import run_python

from raybench.health.node_files import read_node_reports
from raybench.health.quick import check
from raybench.records.node_report import NodeReport, NodeState, UntestedKind, UntestedReason

REASON = UntestedReason(kind=UntestedKind.BUSY, detail="python3 (process 4242) uses alpha GPU 1")


@pytest.fixture
def report(monkeypatch):
    """Make the check return a report of this state."""

    def set_state(state):
        found = NodeReport(
            host="alpha",
            state=state,
            began="2026-11-30T11:07:00+00:00",
            seconds=9.1,
            raybench_version="1",
            devices=("alpha GPU 0",),
            untested=(REASON,) if state is NodeState.UNTESTED else (),
        )
        monkeypatch.setattr(check, "quick_check", lambda *_, **__: found)

    return set_state


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--address", ["--address", "auto"]),
        ("--only", ["--only", "alone"]),
        ("--burn-in", ["--burn-in", "30m"]),
        ("--healthy-devices", ["--healthy-devices", "file.txt"]),
        ("--serial", ["--serial"]),
        ("--output", ["-o", "folder"]),
    ],
)
def test_options_of_the_full_check_are_refused(command, option, words):
    refusal = command("health", "--quick", *words, results=None).refusal
    assert refusal.startswith(f"{option}: not with --quick")


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (NodeState.HEALTHY, 0),
        (NodeState.SUSPECT, 1),
        (NodeState.DRAIN, 1),
        (NodeState.UNTESTED, 3),
    ],
)
def test_state_of_the_node_is_the_exit_code(command, report, state, code):
    report(state)
    assert command("health", "--quick", results=None).code == code


def test_json_has_the_whole_node_report(command, report):
    report(NodeState.UNTESTED)
    found = json.loads(command("health", "--quick", "--json", results=None).out)
    assert (found["state"], found["devices"]) == ("untested", ["alpha GPU 0"])
    assert found["untested"] == [{"kind": "busy", "detail": REASON.detail}]


def test_age_of_a_process_that_was_a_shell_is_limited(command, report, monkeypatch):
    report(NodeState.HEALTHY)
    began = []
    of_report = check.quick_check

    def note_beginning(*_, began_s, **__):
        began.append(time.monotonic() - began_s)
        return of_report()

    monkeypatch.setattr(check, "quick_check", note_beginning)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: time.time() - 600.0)
    assert command("health", "--quick", results=None).code == 0
    assert began[0] < 10.0


WITHOUT_PSUTIL = """
import sys
sys.modules["psutil"] = None
from raybench.cli import main
main()
"""


def test_missing_psutil_is_a_broken_installation(tmp_path):
    words = ("health", "--quick", "--json", "--report", tmp_path)
    done = run_python(WITHOUT_PSUTIL, *words)
    assert (done.returncode, done.stderr) == (3, "")
    [reason] = json.loads(done.stdout)["untested"]
    assert reason["kind"] == "broken installation"
    assert "psutil" in reason["detail"]
    [stored] = read_node_reports(tmp_path).reports.values()
    assert stored.untested[0].detail == reason["detail"]
