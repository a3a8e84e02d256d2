"""The commands, through the one place that turns errors into exit codes."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from builders import START, make_device, make_failed, make_point, make_record, open_run, write_run

from raybench.records.measurement import Breakdown, ModuleTime, Profile, RegionTime

RUNS = ("run-old", "run-new")


@pytest.fixture
def results(tmp_path):
    root = tmp_path / "results"
    two, four = (make_point(world_size=size) for size in (2, 4))
    records = [make_record(), make_record(two, step_ms=10.0)]
    records.append(make_failed(four, error_message="[b]full[/b]"))
    devices = [make_device(index) for index in range(2)]
    for day, run_id in enumerate(RUNS):
        started_at = START - timedelta(days=2 - day)
        write_run(root, run_id, records, devices, started_at=started_at, tags={"driver": "590"})
    return root


@pytest.fixture
def raybench(results, command):
    """The command, with these results."""
    return partial(command, results=results)


def test_report_writes_its_formats_to_files(raybench, tmp_path):
    named, ended = tmp_path / "report.txt", tmp_path / "report.MD"
    assert raybench("report", "run-o", "--format", "md", "-o", named)[:2] == (0, "")
    assert raybench("report", "run-o", "-o", ended)[:2] == (0, "")
    assert named.read_text() == ended.read_text()
    assert named.read_text().startswith("## How does mlp scale from 1 GPU to 2 GPUs?\n")
    assert "Run ddp\\_scaling run-old" in named.read_text()
    assert json.loads(raybench("report", "--format", "json").out)["run"]["run_id"] == "run-new"
    page = tmp_path / "page.html"
    done = raybench("report", "run-new", "-o", page)
    assert (done.code, done.err) == (0, f"{page}: open it in a browser\n")


def test_commands_name_impossible_values_of_points(command, tmp_path):
    root = tmp_path / "results"
    points = make_point(), make_point(world_size=2)
    records = [make_record(point, step_ms=ms) for point, ms in zip(points, (8.0, 1.0), strict=True)]
    for run_id in RUNS:
        write_run(root, run_id, records)
    said = "an efficiency of 800 % (speed-up 16.00 on 2 devices) cannot be true"
    report = " ".join(command("report", "run-old", results=root).out.split())
    assert "1 point has numbers that cannot be true." in report
    assert f"2 GPUs: {said}. Measure again: the baseline may be slowed. If the value" in report
    for args in (
        ("show", "run-old", points[1].point_id),
        ("compare", *RUNS),
        ("export", "run-old", "--format", "csv"),
    ):
        told = " ".join(command(*args, results=root).out.split())
        assert "an efficiency of 800 %" in told
        assert " cannot be true" in told


def test_failed_chart_keeps_report(raybench, results, tmp_path):
    done = raybench("report", "--chart", tmp_path / "no" / "folder.svg")
    assert done.code == 2
    assert done.out == raybench("report").out
    assert "cannot be written" in done.err
    shutil.rmtree(results / "points" / "run-new")
    done = raybench("report", "--chart", tmp_path / "a.svg")
    assert done.code == 2
    assert "No point has been finished yet." in done.out
    assert done.err.endswith("nothing to draw: no point of this run has been finished yet\n")


def test_compact_prints_one_line(raybench, results):
    before = raybench("report", "run-new").out
    done = raybench("compact", "run-new")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("run-new: 7 parts are now 4, ")
    assert done.out.count("\n") == 1
    assert raybench("report", "run-new").out == before
    assert raybench("compact", "run-new").out == "run-new: 4 parts, nothing to put together\n"
    assert raybench("compact", "nothing").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nothing"], "no run 'nothing'"),
        (["compare", "latest", "9" * 5000], "no run '999"),
        (["report", "--chart", "a.pdf"], "--chart: must end in .svg or .png, got a.pdf"),
        (["report", "-o", "no/such/folder/a.md"], "cannot be written: No such file"),
        (["show", "run-new", "zzz"], "no point 'zzz'"),
        (["report", "--format", "pdf"], "'pdf' is not one of"),
        (["report", "--github"], "--github: goes with --format md only, got --format terminal"),
        (["report", "--github", "--format", "md"], "--github: GITHUB_STEP_SUMMARY is not set"),
        (["compare", "run-new", "run-new"], "run-new is on both sides"),
        (["compare", "run-old,run-new", "run-new"], "run-new is on both sides"),
        (["compare", "run-old", "driver=1"], "with the tag 'driver=1'; there are: driver=590"),
        (["compare", *RUNS, "--threshold", "150 %\t"], "--threshold: must be from 0% to below 100"),
        (["history", "--filter", "world_size > 9"], "keeps none of the 3 points"),
        (["history", "--point", "zzz"], "no point 'zzz'"),
        (["export"], "give --format csv|github-action-benchmark|json|junit|reference, or --to ml"),
        (["export", "--format", "csv", "--to", "wandb"], "give --format csv"),
        (["export", "--to", "wandb", "-o", "x.csv"], "-o: goes with --format only"),
        (["export", "--format", "csv", "-o", "no/such/x.csv"], "no/such/x.csv: cannot be written"),
    ],
)
def test_user_error_is_one_line(raybench, monkeypatch, arguments, message):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert message in raybench(*arguments).refusal


def test_run_without_row_is_named(raybench, results):
    path = results / "runs" / "run-new" / "run.parquet"
    path.unlink()
    told = f"{results}: run run-new has points, but no row; put {path} back\n"
    done = raybench("list")
    assert (done.code, done.err) == (0, told)
    done = raybench("report", "run-new")
    assert (done.code, done.err) == (2, told)


@pytest.fixture
def clone(results, monkeypatch):
    """A results folder that is empty but for a folder with the runs of others."""
    mine = results.with_name("mine")
    mine.mkdir()
    results.rename(mine / "examples")
    monkeypatch.chdir(mine.parent)
    return mine


def test_without_runs_commands_say_what_to_type(clone, command):
    told = (
        "mine: no runs yet; `raybench sweep JOB` makes one; mine/examples has 2: "
        "`raybench list --results mine/examples`, `raybench report examples/RUN`\n"
    )
    done = command("list", results=Path("mine"))
    assert (done.code, done.out, done.err) == (0, "", told)
    done = command("report", results=Path("mine"))
    assert (done.code, done.out, done.err) == (2, "", told)
    done = command("list", "--json", results=Path("mine"))
    assert (done.code, json.loads(done.out)["runs"]) == (0, [])
    done = command("list", results=Path("mine/nothing"))
    assert (done.code, done.out) == (2, "")


def test_run_in_inner_folder_is_found(clone, command):
    write_run(clone, "mine-1")
    for run in ("examples/run-o", "examples/latest", "examples/ddp_scaling", "mine/examples/run-n"):
        done = command("show", run, results=Path("mine"))
        assert (done.code, done.err) == (0, "")
        assert make_point().point_id in done.out
    # The runs of others are not mine.
    done = command("list", "--json", results=Path("mine"))
    assert [run["run_id"] for run in json.loads(done.out)["runs"]] == ["mine-1"]


def test_job_name_means_newest_run(tmp_path, command):
    days = {"ddp-20260820-101112-ffff": 0, "ddp-20260821-101112-0000": 1, "named-by-me": 2}
    for run_id, day in days.items():
        started_at = START + timedelta(days=day - 1)
        write_run(tmp_path, run_id, job_name="ddp", started_at=started_at)
    other = write_run(tmp_path, "ddp_big-20260822-101112-0000", job_name="ddp_big")
    ask = lambda run: command("report", run, "--full", results=tmp_path)  # noqa: E731
    assert "\nRun ddp  named-by-me, " in ask("ddp").out
    assert f"\nRun {other.run_id}, " in ask("ddp_big").out
    assert "\nRun ddp-20260820-101112-ffff, " in ask("ddp-20260820").out
    done = ask("dd")
    assert done.code == 2
    assert "run 'dd' is ambiguous: ddp-20260820-101112-ffff, ddp-20260821-101112-0000" in done.err
    assert done.err.endswith("; give more of the id, or the name of a job for its newest run\n")


def test_list_counts_older_runs(tmp_path, command):
    for number in range(52):
        write_run(tmp_path, f"ddp-20260821-1011{number:02}-0000")
    ask = lambda *words: command("list", *words, results=tmp_path)  # noqa: E731
    done = ask()
    assert len(done.out.splitlines()) == 51
    assert "ddp-20260821-101151-0000" in done.out
    assert done.err == "not shown: 2 older runs; --all\n"
    for done, lines in ((ask("--all"), 53), (ask("-n", "3"), 4)):
        assert (len(done.out.splitlines()), done.err) == (lines, "")
    runs = [run["run_id"] for run in json.loads(ask("--json").out)["runs"]]
    assert len(runs) == 52
    assert runs == sorted(runs)


def test_report_appends_to_github_summary(raybench, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = raybench("report", "--format", "md", "--github")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert summary.read_text() == "before\n" + raybench("report", "--format", "md").out


def test_show_prints_logs_of_ranks(raybench, results):
    record = replace(make_record(make_point(world_size=2)), attempt=2)
    point_id = record.point.point_id
    assert "wrote nothing that is kept" in raybench("show", "latest", "--logs").err
    written = open_run(results, "run-new")
    hostile = "[stdout]\nfrom\x1b[2J rank 1 \ud800"
    written.write_records([(1, replace(record, outputs=("", hostile)))])
    written.write_records([(1, replace(record, attempt=3, outputs=("[stderr]\nsame",) * 2))])
    said = raybench("show", "latest", "--logs").out
    assert "\x1b" not in said
    heads = [line for line in said.splitlines() if line.startswith("==")]
    assert heads == [f"== {point_id}, attempt 2, rank 1", f"== {point_id}, attempt 3, ranks 0, 1"]
    assert raybench("show", "latest", point_id[:6], "--logs").out == said
    [log, *_] = json.loads(raybench("show", "latest", "--logs", "--json").out)["logs"]
    assert (log["attempt"], log["rank"]) == (2, 1)
    assert "with --logs" in raybench("show", "latest", point_id).out
    assert raybench("list").code == raybench("report").code == 0
    (results / "logs" / "run-new" / f"00001-{point_id}-9-rank0.txt").mkdir()
    assert "rank0.txt: cannot be read: Is a dir" in raybench("show", "latest", "--logs").refusal


def test_show_has_modules_regions_and_traces(raybench, results):
    modules = tuple(
        ModuleTime(name=name, kind="Linear", calls=1, forward_ms=ms, backward_ms=None)
        for name, ms in (("first", 1.0), ("second", 2.0))
    )
    breakdown = Breakdown(
        methods={"wait_ms": "tail less the shortest"},
        regions=(RegionTime(name="attention", calls=8, ms=2.5, share=0.5),),
    )
    told = {"profile": Profile(trace=b"{}", modules=modules), "breakdown": breakdown}
    record = make_record(attempt=2, of_ranks=told)
    open_run(results, "run-new").write_records([(0, record)])
    text = raybench("show", "latest", record.point.point_id).out
    assert "wait_ms  tail less the shortest" in text
    assert text.index("second  Linear") < text.index("first   Linear")
    content = json.loads(raybench("show", "latest", record.point.point_id, "--json").out)
    [trace] = content["traces"]
    # Not folded, however long it is.
    assert trace in text.splitlines()
    assert trace.endswith("-2-rank0.json.gz")
    assert [module["module"] for module in content["modules"]] == ["second", "first"]
    assert content["point"]["methods"] == {"wait_ms": "tail less the shortest"}
    region = {"region": "attention", "calls": 8, "region_ms": 2.5, "share_pct": 50.0}
    assert [region.items() <= one.items() for one in content["regions"]] == [True]
    reported = json.loads(raybench("report", "latest", "--json").out)["regions"]
    assert reported == {record.point.point_id: [region]}


def test_show_has_all_attempts_as_json(raybench, results):
    detail = "".join(f"line {n}\n" for n in range(40))
    point = make_point(world_size=4)
    again = make_failed(point, attempt=2, error_rank=3, error_detail=detail)
    open_run(results, "run-new").write_records([(2, again)])
    text = raybench("show", "latest", point.point_id).out
    assert "line 39\n" in text
    assert "line 24\n" not in text
    assert "[b]full[/b]" in text.partition("Attempts")[2]
    content = json.loads(raybench("show", "latest", point.point_id, "--json").out)
    assert content["point"]["error_detail"] == detail
    assert (content["point"]["error_rank"], content["point"]["error_device"]) == (3, "cuda:3")
    assert [row["attempt"] for row in content["attempts"]] == [1, 2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("report --results {} | head -n 1", ""),
        ("report --results {} | true", ""),
        ("explain references | grep -ca '?(1 + 1'", ""),  # a square root
        ("explain references >&-", ""),
        ("list --results {} > /dev/full", "stdout: cannot be written: No space left on device\n"),
    ],
)
def test_stdout_errors_are_handled(results, words, told):
    command = f"{sys.executable} -m raybench {words.format(results)}"
    encoding = {**os.environ, "PYTHONIOENCODING": "iso8859-2"}
    run = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(run, capture_output=True, text=True, env=encoding)
    assert (done.returncode, done.stderr) == (2 if told else 0, told)


EXITED = "the code of a workload ended the command: SystemExit: no message\n"


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [(KeyboardInterrupt, 130, "\ninterrupted\n"), (SystemExit, 2, EXITED)],
)
def test_an_interrupt_or_an_exit_is_one_line(raised, code, told, raybench, monkeypatch):
    monkeypatch.setattr("raybench.analysis.run_data.load_run_data", Mock(side_effect=raised))
    done = raybench("report")
    assert (done.code, done.out, done.err) == (code, "", told)


def test_bug_exits_with_4_and_traceback(raybench, monkeypatch):
    monkeypatch.setattr("raybench.analysis.run_data.load_run_data", lambda *_: {}["gone"])
    done = raybench("report")
    assert (done.code, done.out) == (4, "")
    assert "KeyError: 'gone'" in done.err
    assert done.err.splitlines()[-1].startswith("raybench: this is a bug of raybench")


def test_resumed_run_has_no_pauses(tmp_path, command):
    devices = [make_device(), make_device(node_id="node-b", uuid="GPU-b")]
    times = {"finished_at": START + timedelta(hours=2), "paused_s": 7140.0}
    write_run(tmp_path, "run-a", [make_record(devices=devices[:1])], devices, **times)
    ask = lambda *words: command(*words, results=tmp_path).out  # noqa: E731
    assert " 1m" in ask("list").splitlines()[1]
    text = ask("report")
    assert "1 min, resumed after 1 h 59 min," in " ".join(text.split())
    full = ask("report", "--full")
    assert "2 x NVIDIA H200 on 2 nodes, at most 1 node in a point\n" in full


def test_restarted_ray_counts_as_same_node(tmp_path, command):
    devices = [make_device(), make_device(1, node_id="node-b")]
    write_run(tmp_path, "run-a", [make_record(devices=devices[:1])], devices)
    text = command("report", results=tmp_path).out
    assert "\n2 x NVIDIA H200, 1 round, " in text


def test_an_object_for_programs_is_asked_for_alike(raybench):
    for command in (["report"], ["export"], ["compare", *RUNS]):
        asked = raybench(*command, "--json")
        assert (asked.code, asked.err) == (0, "")
        assert asked.out == raybench(*command, "--format", "json").out
        done = raybench(*command, "--json", "--format", "csv" if command == ["export"] else "md")
        assert done.refusal.startswith("--json: means --format json")


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_knows_no_escapes_gets_none(term, monkeypatch):
    from raybench.cli import shared

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shared.color()
    monkeypatch.setenv("TERM", term)
    assert not shared.color()


def test_a_point_that_ran_as_control_is_shown(raybench, results):
    lone = make_point(world_size=8)
    write_run(results, "run-cut", [make_record(), make_record(lone, round=1, control_of=8)])
    done = raybench("show", "run-cut", lone.point_id)
    assert (done.code, done.err) == (0, "")
    assert lone.point_id in done.out


def test_a_results_folder_may_have_a_colon(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("h200:baseline"), "run-a", [make_record()])
    for words in (["report"], ["list"], ["show", "run-a"], ["compact", "run-a"]):
        done = command(*words, results=Path("h200:baseline"))
        assert (done.code, done.err) == (0, ""), words


@pytest.fixture
def many_models(results):
    """A run on 16 devices whose joined names are longer than a file name may be."""
    point = make_point(world_size=16)
    devices = tuple(make_device(rank, name=f"NVIDIA model number {rank}") for rank in range(16))
    write_run(results, "run-many", [replace(make_record(point), devices=devices)], devices)


@pytest.mark.parametrize("words", [["report"], ["export", "--format", "csv"]])
def test_many_models_are_reported(raybench, many_models, words):
    done = raybench(words[0], "run-many", *words[1:])
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    "words",
    [["report", "--results"], ["sweep", "jobs/gemm.yaml", "-o"], ["health", "-o"]],
    ids=lambda words: words[0],
)
def test_a_url_is_no_results_folder(command, words):
    done = command(*words, "s3://bucket/runs", results=None)
    assert (done.code, done.out) == (2, "")
    assert "s3://bucket/runs: must be a folder of this machine, not a URL" in done.err


def test_a_dash_is_stdout(raybench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = raybench("export", "run-old", "--format", "csv")
    assert plain.code == 0
    assert raybench("export", "run-old", "--format", "csv", "-o", "-") == plain
    assert not (tmp_path / "-").exists()


def test_a_python_file_is_no_job(command):
    said = command("sweep", "train.py", results=None).refusal
    assert "train.py: a job is a YAML file; did you mean --script train.py?" in said
