"""`raybench health` for schedulers: files, lists and exit codes."""

import json
import re
import socket
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest
from builders import make_device, make_finding, make_node_report, make_run
from commands import run_python

from raybench.cli.node_reports import exit_code
from raybench.errors import ClusterError, DevicesInUseError, InstallationError
from raybench.health.node_files import read_node_reports, write_node_report
from raybench.health.report import HealthReport
from raybench.records.devices import Verdict
from raybench.records.node_report import (
    DrainKind,
    DrainReason,
    NodeState,
    UntestedKind,
    UntestedReason,
)
from raybench.records.status import RunStatus

HERE = socket.gethostname()
GPU = "alpha GPU 3"
DRAINED = (DrainReason(kind=DrainKind.FAILED_TWICE, device=GPU, test="same bits fp32 2048"),)
SLOW = (make_finding(verdict=Verdict.SUSPECT),)
BUSY = (UntestedReason(kind=UntestedKind.BUSY, detail="python of ann"),)
OF_STATE = {
    NodeState.DRAIN: {"drain": DRAINED},
    NodeState.SUSPECT: {"findings": SLOW},
    NodeState.UNTESTED: {"untested": BUSY},
    NodeState.HEALTHY: {},
}


def node(state, host="alpha", **changes):
    now = datetime.now(UTC).isoformat()
    return make_node_report(host=host, state=state, began=now, **OF_STATE[state], **changes)


@pytest.fixture
def check(command, monkeypatch, tmp_path):
    """Run `raybench health` with a check that ends with these reports, or with an error."""
    monkeypatch.chdir(tmp_path)

    def run(*words, reports=(), error=None, status=RunStatus.OK):
        found = Mock(run=make_run("health-1", status=status), node_reports=reports)
        document = HealthReport(
            run=found.run, machine="1 x H200", devices=[make_device()], findings=[make_finding()]
        )
        examine = Mock(return_value=found, side_effect=error)
        monkeypatch.setattr("raybench.health.check.examine", examine)
        monkeypatch.setattr("raybench.api.stored_runs.load_health", lambda *_: document)
        return command("health", *words, results=None)

    return run


@pytest.mark.parametrize(
    ("states", "usual", "slurm", "nagios", "word"),
    [
        (["healthy"], 0, 0, 0, "OK - 1 node healthy"),
        (
            ["suspect"],
            1,
            0,
            1,
            "WARNING - alpha: suspect: alpha GPU 0 is suspect in gemm bf16 8192",
        ),
        (["drain"], 1, 1, 2, f"CRITICAL - alpha: drain: {GPU} failed twice in same bits fp32 2048"),
        (["untested"], 3, 0, 3, "UNKNOWN - alpha: untested: busy: python of ann"),
        (["healthy", "drain", "suspect"], 1, 1, 2, "CRITICAL - beta: drain:"),
        ([], 3, 0, 3, "UNKNOWN - "),
    ],
)
def test_scheduler_gets_the_code_of_the_worst_node(check, states, usual, slurm, nagios, word):
    hosts = ["alpha", "beta", "gamma"]
    reports = [node(NodeState(state), host) for state, host in zip(states, hosts, strict=False)]
    # What the full check ends with is decided by its own report.
    assert check(reports=reports).code == 0
    assert exit_code(reports, None) == usual
    told = check("--exit-code", "slurm", reports=reports)
    assert told.code == slurm
    # Only what is not healthy is said.
    assert told.err.splitlines() == [
        line for line in told.err.splitlines() if re.match(r"(alpha|beta|gamma): ", line)
    ]
    told = check("--exit-code=nagios", reports=reports)
    assert told.code == nagios
    assert told.out.startswith(word)
    assert json.loads(check("--exit-code", "nagios", "--json", reports=reports).out)


@pytest.mark.parametrize(
    ("words", "error", "complaint"),
    [
        (["--nonsense"], None, "No such option"),
        (["--only", "nothing"], None, "is not one of"),
        (["--only", "burn-in"], None, "needs a time"),
        ([], ClusterError("no Ray here"), "no Ray here"),
        ([], ModuleNotFoundError("No module named 'torch'", name="torch"), "torch"),
        ([], ImportError("libcudart.so.12: cannot open"), "libcudart"),
        ([], RuntimeError("a bug"), "a bug"),
        ([], KeyboardInterrupt(), "interrupted"),
    ],
)
def test_no_mistake_drains_a_node(check, words, error, complaint):
    told = check(*words, "--exit-code", "slurm", error=error)
    assert told.code == 0
    assert complaint in told.err
    assert "no node is drained" in told.err.splitlines()[-1]
    told = check("--exit-code=nagios", *words, error=error)
    assert (told.code, told.out.partition(" ")[0]) == (3, "UNKNOWN")
    assert check(*words, error=error).code not in (0, 1)


def test_other_commands_keep_their_codes(command):
    told = command("sweep", "--exit-code", "slurm", results=None)
    assert told.code == 2


def test_interrupted_check_still_drains(check, tmp_path):
    words = ("--exit-code", "slurm", "--report", tmp_path / "checks")
    for state, code in ((NodeState.DRAIN, 1), (NodeState.UNTESTED, 0)):
        told = check(*words, reports=[node(state)], status=RunStatus.INTERRUPTED)
        assert told.code == code
        assert read_node_reports(tmp_path / "checks").reports["alpha"].state is state
    assert check(reports=[], status=RunStatus.INTERRUPTED).code == 130


def test_each_node_gets_a_file(check, tmp_path):
    reports = [node(NodeState.HEALTHY), node(NodeState.DRAIN, "beta")]
    assert check("--report", tmp_path / "new" / "checks", reports=reports).code == 0
    stored = read_node_reports(tmp_path / "new" / "checks").reports
    assert stored == {"alpha": reports[0], "beta": reports[1]}


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (ClusterError("no Ray here"), "no devices", "no Ray here"),
        (InstallationError("no Ray here"), "broken installation", "no Ray here"),
        (ImportError("no Ray here"), "broken installation", "no Ray here"),
        (DevicesInUseError("no Ray here"), "busy", "no Ray here"),
        (KeyboardInterrupt(), "out of time", "interrupted"),
    ],
)
def test_check_without_result_reports_its_host(check, tmp_path, error, kind, detail):
    check("--report", tmp_path / "checks", error=error)
    report = read_node_reports(tmp_path / "checks").reports[HERE]
    assert report.state is NodeState.UNTESTED
    assert [(one.kind, one.detail) for one in report.untested] == [(kind, detail)]


def test_metrics_are_of_this_host_only(check, tmp_path):
    path = tmp_path / "raybench.prom"
    told = check("--textfile", path, reports=[node(NodeState.HEALTHY)])
    assert not path.exists()
    assert "this host is not among the checked nodes: alpha" in told.err
    reports = [node(NodeState.HEALTHY), node(NodeState.DRAIN, HERE)]
    assert check("--textfile", path, reports=reports).code == 0
    assert 'raybench_health_state{state="drain"} 1' in path.read_text()


def test_name_that_the_collector_skips_is_refused(check):
    words, error = ("--textfile", "x.txt"), AssertionError("the check began")
    refusal = check(*words, error=error).refusal
    assert refusal == "--textfile x.txt: the textfile collector reads only files named *.prom\n"
    for codes, code in (("slurm", 0), ("nagios", 3)):
        told = check(*words, "--exit-code", codes, error=error)
        assert (told.code, refusal in told.err) == (code, True)


def test_unwritable_folder_is_refused_before_the_check(check, tmp_path):
    (tmp_path / "file").write_text("")
    words = ("--report", tmp_path / "file" / "checks")
    told = check(*words, error=AssertionError("the check began"))
    assert (told.code, told.err.count("\n")) == (2, 1)
    # A scheduler gets its verdict nevertheless.
    told = check(*words, "--exit-code", "slurm", reports=[node(NodeState.DRAIN)])
    assert told.code == 1
    assert "cannot be written" in told.err


@pytest.fixture
def folder(tmp_path):
    """A folder of reports: five nodes of each kind, and a damaged file."""
    checks = tmp_path / "checks"
    for number, state in enumerate(NodeState):
        write_node_report(checks, node(state, f"gpu{number}"))
    write_node_report(checks, make_node_report(host="gpu4", began="2026-01-01T00:00:00+00:00"))
    (checks / "gpu5.json").write_text("{")
    return checks


def test_reports_become_lists_and_a_summary(command, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = command("health", "--collect", folder, "--expect", "gpu[0-6]", results=None)
    assert told.code == 1
    answer, *rest = told.out.splitlines()
    assert answer.startswith("Red: 1 of 7 nodes fails; 3 are silent; 1 was not tested; 2 pass")
    assert max(map(len, [answer, *rest])) <= 80
    assert {path.name: path.read_text().split() for path in folder.glob("*.txt")} == {
        "passing.txt": ["gpu1", "gpu3"],
        "failing.txt": ["gpu0"],
        "silent.txt": ["gpu4", "gpu5", "gpu6"],
        "untested.txt": ["gpu2"],
    }
    assert told.err == f"{folder}/gpu5.json: no report of a node: not JSON, or not complete\n"
    told = command("health", "--collect", folder, "--expect", "gpu[0-6]", "--json", results=None)
    fields = json.loads(told.out)
    assert (told.code, fields["failing"], fields["suspect"]) == (1, ["gpu0"], ["gpu1"])
    assert fields["why"]["gpu4"].startswith("old report: its check ended")


@pytest.mark.parametrize(("nodes", "code"), [("gpu1,gpu3", 0), ("gpu3,gpu4", 3), ("gpu2", 3)])
def test_silent_nodes_are_no_success(command, folder, nodes, code):
    told = command("health", "--collect", folder, "--expect", nodes, results=None)
    assert told.code == code


def test_age_of_reports_can_be_chosen(command, folder):
    words = ("health", "--collect", folder, "--expect", "gpu[3-4]", "--max-age", "9999d")
    assert command(*words, results=None).code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--collect", "DIR"], "add --expect NODES"),
        (["--expect", "gpu1"], "goes with --collect"),
        (["--collect", "DIR", "--expect", "gpu1", "--exit-code", "nagios"], "tests nothing"),
        (["--collect", "DIR", "--expect", "gpu[1"], "gpu[01-12,15],login1"),
        (["--collect", "DIR/none", "--expect", "gpu1"], "cannot be read"),
        (["--collect", "DIR", "--expect", "gpu1", "--max-age", "soon"], "--max-age soon: must be"),
    ],
)
def test_wrong_collection_is_refused(command, folder, words, said):
    told = command("health", *(word.replace("DIR", str(folder)) for word in words), results=None)
    assert said in told.err
    assert (told.code, told.out.partition(" ")[0]) in ((2, ""), (3, "UNKNOWN"))


COLLECT_WITHOUT_TORCH = """
import sys
for name in ("torch", "ray", "pynvml"):
    sys.modules[name] = None
from raybench.cli import main
sys.argv = ["raybench", *sys.argv[1:]]
main()
"""


def test_login_node_collects_without_torch(folder):
    done = run_python(
        COLLECT_WITHOUT_TORCH, "health", "--collect", str(folder), "--expect", "gpu1,gpu3"
    )
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr


def test_missing_torch_is_reported_and_drains_nothing(tmp_path):
    words = ["health", "--report", str(tmp_path), "--exit-code", "slurm"]
    done = run_python(COLLECT_WITHOUT_TORCH, *words, "-o", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    [report] = read_node_reports(tmp_path).reports.values()
    assert (report.host, report.untested[0].kind) == (HERE, UntestedKind.BROKEN_INSTALLATION)
