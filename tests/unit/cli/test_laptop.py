"""The section `cpu` on the command line: which lines of a sweep say it, and which runs resume."""

import json
from pathlib import Path

import pytest
from builders import make_sweep, write_run

from raybench.errors import ClusterError
from raybench.job.loading import job_from_text

JOB = """\
version: 1
name: test
workload: {kind: mlp, hidden: 4096}
matrix: {world_size: [1, 2, 4], batch_size: [8]}
cpu:
  workload: {hidden: 64}
  matrix: {world_size: [1]}
  measure: {seconds: 1}
"""
REPLACED = "the section cpu: of job.yaml replaces hidden, world_size and seconds"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)


@pytest.fixture
def dry(command):
    """`raybench sweep job.yaml --dry-run --json`: its lines on stderr, and its points."""

    def call(*words):
        code, out, err = command("sweep", "job.yaml", "--dry-run", "--json", *words, results=None)
        assert code == 0, err
        return err.splitlines(), json.loads(out)["points"]

    return call


@pytest.fixture
def kind(monkeypatch):
    """Set which devices the cluster has."""

    def choose(found):
        monkeypatch.setattr("raybench.cluster.starts_private", lambda address: address != "x:1")
        monkeypatch.setattr("raybench.cluster.find_kind", lambda address, device: found)

    return choose


def test_first_line_says_what_is_replaced_and_why(dry, kind):
    kind("cpu")
    lines, points = dry()
    assert lines == [f"no GPU here: {REPLACED}"]
    assert [point["hidden"] for point in points] == [64]
    assert dry("--device", "cpu")[0] == [f"--device cpu: {REPLACED}"]


def test_gpus_run_the_job_as_it_is(dry, kind):
    kind("cuda")
    lines, points = dry()
    assert lines == []
    assert [point["hidden"] for point in points] == [4096] * 3


def test_joined_cluster_is_asked_first(dry, kind):
    kind("cpu")
    lines, _ = dry("--address", "x:1")
    assert lines == [
        "asking the Ray cluster whether it has GPUs",
        f"no GPU here: {REPLACED}",
    ]


def test_overridden_keys_are_not_said_to_be_replaced(dry, kind):
    kind("cpu")
    (line,), _ = dry("--set", "workload.hidden=32")
    assert line == "no GPU here: the section cpu: of job.yaml replaces world_size and seconds"
    words = ["--set", "workload.hidden=32", "--set", "matrix.world_size=1,2"]
    (line,), points = dry(*words, "--set", "measure.seconds=2")
    assert line == "no GPU here: --set replaces all keys of the section cpu: of job.yaml"
    assert [point["world_size"] for point in points] == [1, 2]


def test_job_without_section_asks_for_no_devices(dry, monkeypatch):
    def refuse(*_):
        raise ClusterError("asked")

    monkeypatch.setattr("raybench.cluster.find_kind", refuse)
    Path("job.yaml").write_text(JOB[: JOB.index("cpu:")])
    lines, points = dry()
    assert (lines, len(points)) == ([], 3)


def test_plan_shows_what_cpu_workers_run(command):
    out = command("plan", "job.yaml", "--device", "cpu", results=None).out
    assert "on CPU workers: its section cpu: replaces workload.hidden," in out
    assert "1 point; the largest needs 1 device" in out
    out = " ".join(command("plan", "job.yaml", results=None).out.split())
    assert "`raybench plan --device cpu` shows the points of CPU workers" in out
    assert "3 points" in out


def test_job_for_gpus_ends_with_its_reason(command, kind):
    kind("cpu")
    Path("job.yaml").write_text(JOB[: JOB.index("cpu:")] + "cpu: {why_not: it is about NCCL}\n")
    for words in (["sweep", "job.yaml"], ["plan", "job.yaml", "--device", "cpu"]):
        code, out, err = command(*words, results=None)
        assert (code, out) == (3, "")
        assert err == "job.yaml: needs a GPU: it is about NCCL\n"


@pytest.fixture
def resumed(tmp_path, command, kind):
    """`--resume` of a run of the job that did or did not use its section `cpu`."""

    def call(*words, was_on_cpu):
        kind("cuda")
        job = job_from_text("job.yaml", JOB, on_cpu=was_on_cpu)
        facts = {"job_sha256": job.meaning_sha256, "job_text": JOB}
        root = tmp_path / str(was_on_cpu)
        write_run(root, "run-a", [], cpu_section=was_on_cpu, **facts)
        options = ("--resume", "run-a", "--dry-run", "-o", root)
        return command("sweep", "job.yaml", *options, *words, results=None)

    return call


def test_run_is_resumed_with_its_own_section(resumed):
    # The code of this made-up run differs; the job must not.
    told = resumed(was_on_cpu=True).err
    assert told.startswith(f"as before: {REPLACED}\n--resume run-a: the code is not that of")
    told = resumed(was_on_cpu=False).err
    assert told.startswith("--resume run-a: the code is not that of")


def test_run_with_the_section_skips_gpus(resumed):
    told = resumed("--device", "cuda", was_on_cpu=True).refusal
    assert told.startswith("--resume run-a: it used the section cpu: of its job, so it goes on")


def test_compare_refuses_runs_with_and_without_the_section(tmp_path, command):
    results = tmp_path / "results"
    for run_id, used in (("run-a", True), ("run-b", False), ("run-c", None)):
        write_run(results, run_id, make_sweep(), cpu_section=used)
    for other in ("run-b", "run-c"):
        told = command("compare", other, "run-a", results=results).refusal
        assert told.startswith(f"run-a used the section cpu: of its job and {other} did not, so ")
    assert command("compare", "run-b", "run-c", results=results).code == 0


@pytest.mark.parametrize(("used", "count"), [(True, 1), (False, 0), (None, 0)])
def test_reports_say_that_the_section_was_used(tmp_path, command, used, count):
    write_run(tmp_path, "run-a", make_sweep(), cpu_section=used)
    for words in (["--format", "issue"], ["--full"]):
        out = command("report", "run-a", *words).out
        assert out.count("with the section cpu: of the job") == count
