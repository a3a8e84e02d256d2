"""`raybench ab` with sweeps that write rows without measuring: git, resuming, exit codes, texts."""

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from fake_sweeps import fake_sweep, git, starts, write_steps

from raybench.ab import gate
from raybench.ab.gate import run_sweep as real_sweep
from raybench.ab.plan import lock_gate
from raybench.errors import ResultsError


def is_running(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def ab(command):
    """Run `raybench ab ci.yaml WORDS`, with fake sweeps."""

    def run(*words, job=("ci.yaml",)):
        return command("ab", *job, *words, results=None)

    return run


def sides(folder):
    tags = [
        [word for word in words if "=" in word and word[:4] in ("side", "pair")]
        for words in starts(folder)
    ]
    return [dict(tag.split("=") for tag in of_start) for of_start in tags]


def test_same_revision_is_the_same(ab, repository):
    answer = ab("--old", "HEAD", "--new", "HEAD", "--json")
    assert answer.code == 0, answer
    verdict = json.loads(answer.out)
    assert verdict["verdict"] == "same"
    assert [point["pairs"] for point in verdict["points"]] == [3, 3, 3]
    assert (
        verdict["commits"]["old"]
        == verdict["commits"]["new"]
        == git(repository, "rev-parse", "HEAD")
    )
    assert git(repository, "worktree", "list").count("\n") == 0


@pytest.mark.parametrize(
    ("words", "is_told"),
    [(("--old", "HEAD"), True), ((), True), (("--new-env", "A=1"), False)],
)
def test_sides_without_a_difference_are_told(words, is_told, ab, repository):
    answer = ab(*words)
    assert answer.code == 0, answer
    assert ("OLD and NEW do not differ" in answer.out) == is_told


def test_same_job_in_another_folder_is_a_difference(ab, repository):
    folder = repository / "elsewhere"
    folder.mkdir()
    (folder / "ci.yaml").write_text((repository / "ci.yaml").read_text())
    assert "do not differ" in ab("--old-job", repository / "ci.yaml").out
    assert "do not differ" not in ab("--old-job", folder / "ci.yaml").out


def test_uncommitted_files_on_both_sides_are_one_commit(ab, repository, monkeypatch, tmp_path):
    write_steps(repository, a=11.0, b=20.0, c=30.0)
    # A git by whose clock an hour passes before each commit.
    program = tmp_path / "programs" / "git"
    program.parent.mkdir()
    hours = tmp_path / "hours"
    hours.touch()
    program.write_text(
        "#!/bin/sh\n"
        f"test $1 = commit-tree && echo >> {hours}\n"
        f'GIT_COMMITTER_DATE="$((1800000000 + 3600 * $(wc -l < {hours}))) +0000"\n'
        "export GIT_COMMITTER_DATE\n"
        f'exec {shutil.which("git")} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    answer = ab("--old", "WORKTREE", "--new", "WORKTREE", "--json")
    assert len(set(json.loads(answer.out)["commits"].values())) == 1


def test_uncommitted_slowdown_is_slower(ab, repository):
    write_steps(repository, a=10.0, b=23.0, c=30.0)
    (repository / "untracked").touch()
    answer = ab("--old", "main")
    assert answer.code == 1, answer
    assert re.search(r"1 of 3 points is slower, the worst by 1[23]\.\d % \(", answer.out)
    folders = {start[0] for start in starts(repository)}
    assert {Path(folder).name for folder in folders} == {"old", "new"}
    assert git(repository, "status", "--short") == "M steps.json\n?? untracked"


@pytest.mark.long
def test_only_open_points_are_measured_again(ab, repository):
    write_steps(repository, a=10.0, b=23.0, c=30.0)
    assert ab("--old", "main").code == 1
    filters = [
        words[words.index("--filter") + 1] if "--filter" in words else ""
        for words in starts(repository)
    ]
    assert filters == [""] * 6 + ["point_id in ('b',)"] * 6


def test_pairs_have_both_sides_in_balanced_order(ab, repository):
    write_steps(repository, a=10.0, b=23.0, c=30.0)
    assert ab("--old", "main").code == 1
    order = [(start["pair"], start["side"]) for start in sides(repository)]
    pairs = [order[index : index + 2] for index in range(0, 12, 2)]
    assert [{pair for pair, _ in starts_} for starts_ in pairs] == [{str(n)} for n in range(1, 7)]
    firsts = [starts_[0][1] for starts_ in pairs]
    assert [set(firsts[index : index + 2]) for index in (0, 2, 4)] == [{"old", "new"}] * 3


def test_later_starts_use_the_devices_of_the_first(ab, repository):
    assert ab("--old", "HEAD", "--new", "HEAD").code == 0
    first, *later = starts(repository)
    assert "--devices" not in first
    assert all("--devices" in words for words in later)


def test_settings_of_the_sides_reach_the_sweeps(ab, repository):
    answer = ab("--new-env", "FAKE_SLOWER=0.9", "--set", "x.y=1", "--new-set", "x.z=2", "--json")
    assert (answer.code, json.loads(answer.out)["verdict"]) == (0, "faster")
    for words, tags in zip(starts(repository), sides(repository), strict=True):
        assert words[0] == str(repository)
        assert "x.y=1" in words
        assert ("x.z=2" in words) == (tags["side"] == "new")


def test_failing_point_is_not_measured(ab, repository):
    write_steps(repository, a=10.0, b="CUDA error", c=30.0)
    answer = ab("--old", "main")
    assert answer.code == 5, answer
    assert "1 of 3 points fails on NEW" in answer.out
    assert "it fails on NEW: error: CUDA error" in answer.out
    filters = [
        words[words.index("--filter") + 1] for words in starts(repository) if "--filter" in words
    ]
    assert filters == ["point_id in ('a', 'c',)"] * 2


def test_point_of_one_side_is_not_measured(ab, repository):
    write_steps(repository, a=10.0, b=20.0, c=30.0, d=40.0)
    answer = ab("--old", "main", "--json")
    assert answer.code == 5
    [point] = [point for point in json.loads(answer.out)["points"] if point["why"]]
    assert (point["point_id"], point["why"]["kind"]) == ("d", "one_sided")


def test_failed_set_up_measures_nothing_and_resumes(ab, repository):
    answer = ab(
        "--old", "HEAD", "--setup", "test -e $PWD/../../../../ready || { echo no compiler; false; }"
    )
    assert answer.code == 5, answer
    assert "OLD cannot be measured: --setup ended with exit code 1: no compiler" in answer.out
    assert "No start has ended." in answer.out
    [log] = re.findall(r"^Log of OLD: (.*setup-old.log)$", answer.out, re.MULTILINE)
    assert Path(log).read_text() == "no compiler\n"
    assert "Go on with: " in answer.out
    assert list(repository.glob("results/ab/*/starts.jsonl")) == []
    (repository / "results" / "ready").touch()
    assert ab("--resume", "latest", job=()).code == 0


def test_interrupted_set_up_leaves_no_process(ab, repository):
    pid_file = repository / "results" / "pid"
    command = f"sleep 300 & echo $! > {pid_file}; wait"

    def interrupt_when_started():
        while not (pid_file.exists() and pid_file.read_text().strip()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    pid_file.parent.mkdir(exist_ok=True)
    interrupt = threading.Thread(target=interrupt_when_started)
    interrupt.start()
    answer = ab("--old", "HEAD", "--setup", command)
    interrupt.join()
    assert answer.code == 130
    assert "setting up OLD: sleep 300" in answer.err
    child = int(pid_file.read_text())
    deadline_s = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_running(child)


@pytest.mark.parametrize("broken", ["old", "new", "old new"])
def test_broken_sweep_is_not_measured_and_resumes(broken, ab, repository):
    (repository / "broken").write_text(broken)
    answer = ab("--new-env", "FAKE_SLOWER=1", "--json")
    assert answer.code == 5
    stopped = json.loads(answer.out)["stopped"]["text"]
    assert "the sweep ended with exit code 3: address: no cluster there" in stopped
    (repository / "broken").unlink()
    assert ab("--resume", "latest", job=()).code == 0


def test_time_limit_leaves_points_undecided(ab, repository):
    answer = ab("--old", "HEAD", "--new", "HEAD", "--max-minutes", "0.001", "--json")
    assert answer.code == 5
    verdict = json.loads(answer.out)
    assert (verdict["verdict"], verdict["pairs"]) == ("undecided", 1)
    assert {point["why"]["kind"] for point in verdict["points"]} == {"time"}
    resumed = ab("--resume", verdict["gate_id"], "--max-minutes", "10", "--json", job=())
    assert (resumed.code, json.loads(resumed.out)["pairs"]) == (0, 3)


def test_gate_folder_has_all_formats(ab, repository):
    write_steps(repository, a=10.0, b=23.0, c=30.0)
    answer = ab("--old", "main")
    assert answer.code == 1
    [folder] = repository.glob("results/ab/*")
    assert answer.err.endswith(f"report.md, report.html and verdict.json are in {folder}\n")
    assert json.loads((folder / "verdict.json").read_text())["exit_code"] == 1
    assert "> **1 of 3 points is slower" in (folder / "report.md").read_text()
    assert "<svg" in (folder / "report.html").read_text()


def test_full_stdout_loses_no_report(ab, repository, monkeypatch):
    def fail(*_, **__):
        raise ResultsError("stdout: cannot be written")

    monkeypatch.setattr("raybench.cli.ab.write_document", fail)
    answer = ab("--old", "main")
    assert answer.code == 2, answer
    assert "stdout: cannot be written" in answer.err
    names = {path.name for path in repository.glob("results/ab/*/*")}
    assert {"verdict.json", "report.md", "report.html"} <= names


def test_ignored_results_of_an_earlier_sweep_are_no_obstacle(ab, repository):
    (repository / "results" / "runs").mkdir(parents=True)
    assert ab("--old", "HEAD").code == 0


def test_results_in_the_current_folder_hide_no_file(ab, repository):
    write_steps(repository, a=10.0, b=23.0, c=30.0)
    assert ab("--old", "HEAD", "-o", ".").code == 1


def test_hook_keeps_its_index(ab, repository, monkeypatch):
    index = repository / ".git" / "index"
    (repository / "untracked").touch()
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(index))
    before = index.read_bytes()
    assert ab("--old", "HEAD").code == 0
    assert index.read_bytes() == before


def test_running_cluster_gets_variables_of_a_side(ab, repository, monkeypatch):
    checkouts = []

    def sweep(words, checkout, log):
        checkouts.append(checkout)
        return fake_sweep(words, checkout, log)

    monkeypatch.setattr(gate, "run_sweep", sweep)
    assert ab("--new-env", "MINE=1", "--new-env", "RAY_ADDRESS=auto", "--old", "HEAD").code == 0
    forwarded = {checkout.env["RAYBENCH_FORWARDED"] for checkout in checkouts}
    assert forwarded == {"", "MINE"}


def test_missing_interpreter_is_not_measured(ab, repository, monkeypatch):
    monkeypatch.setattr(gate, "run_sweep", real_sweep)
    answer = ab("--old", "HEAD", "--python", ".venv/bin/python", "--json")
    assert answer.code == 5
    stopped = json.loads(answer.out)["stopped"]["text"]
    assert stopped.endswith(".venv/bin/python: cannot be started: No such file or directory")


def test_interpreter_without_raybench_tells_its_error(ab, repository, monkeypatch):
    monkeypatch.setattr(gate, "run_sweep", real_sweep)
    program = repository / "python"
    program.write_text("#!/bin/sh\necho No module named raybench >&2; exit 1\n")
    program.chmod(0o755)
    answer = ab("--old", "HEAD", "--python", "./python", "--json")
    assert "no finished run: No module named raybench" in json.loads(answer.out)["stopped"]["text"]


def test_devices_reach_the_sweep(ab, repository):
    (repository / "chosen.txt").write_text("host:0\n")
    assert ab("--devices", "chosen.txt").code == 0
    for words in starts(repository):
        assert words[words.index("--devices") + 1] == str(repository / "chosen.txt")


def test_missing_device_file_is_refused_before_any_start(ab, repository):
    assert "--devices missing.txt: No such file" in ab("--devices", "missing.txt").refusal
    assert not (repository / "results").exists()


def test_job_of_another_encoding_is_one_line(ab, repository):
    (repository / "ci.yaml").write_bytes(b"name: \xff")
    assert "ci.yaml: a job file is UTF-8" in ab().refusal


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--old", "", "--new", "HEAD"), "--old: the revision is empty"),
        (("--old", "no-such"), "--old no-such: git knows no such revision"),
        (("--setup", "make"), "--setup: the command runs in the worktrees of two revisions"),
        (("--old-job", "other.yaml"), "other.yaml: no such job file"),
        (("--new-env", "A"), "--new-env A: expected NAME=VALUE"),
        (("--resume", "ci"), "--resume: the gate has its own settings; leave out JOB"),
    ],
)
def test_wrong_options_are_refused(words, told, ab, repository):
    assert told in ab(*words).refusal


def test_revision_needs_a_repository(ab, tmp_path, monkeypatch):
    (tmp_path / "ci.yaml").write_text("version: 1\n")
    monkeypatch.chdir(tmp_path)
    assert "not in a git repository" in ab("--old", "HEAD").refusal


@pytest.mark.parametrize("revision", ["WORKTREE", "HEAD", "main"])
def test_repository_without_a_commit_is_refused(revision, ab, repository):
    git(repository, "update-ref", "-d", "HEAD")
    assert "the git repository has no commit" in ab("--old", revision).refusal


def test_missing_gate_is_one_line(ab, repository):
    assert "results/ab has none" in ab("--resume", "latest", job=()).refusal


def test_gate_is_held_by_one_process(ab, repository):
    assert ab("--old", "HEAD", "--new", "HEAD").code == 0
    [folder] = repository.glob("results/ab/*")
    with lock_gate(folder):
        assert "another process" in ab("--resume", "latest", job=()).refusal
