"""Exports are read back by what is to read them: csv, json, an XML parser, MLflow and W&B."""

import csv
import io
import json
import sys
from xml.etree import ElementTree as ET

import pytest
from builders import make_device, make_failed, make_point, make_record, write_run
from commands import EXAMPLES, Answer, run_python

from raybench.analysis.run_data import load_run_data
from raybench.errors import ResultsError
from raybench.records.status import RunStatus, Status
from raybench.report.export import csv_text, export_csv, export_github, export_json, export_junit

HOSTILE = 'a "b" <c> & ]]> \x1b[31m\x00 ünï\n=1+1,2'
RUN_ID = "run-of-three"


def stored(root, **changes):
    """A run with a point that is ok, one that failed with a hostile message, one not run."""
    devices = [make_device(index) for index in range(2)]
    store = write_run(root, RUN_ID, devices=devices, **changes)
    told = {"error_message": HOSTILE, "error_detail": f"Traceback\n  {HOSTILE}"}
    failed = make_failed(make_point(world_size=2), **told)
    not_run = {"status": Status.SKIPPED, "error_message": "too few"}
    skipped = make_failed(make_point(world_size=4), **not_run)
    store.write_records(list(enumerate([make_record(), failed, skipped])))
    return load_run_data(root, RUN_ID)


@pytest.fixture
def summary(tmp_path):
    return stored(tmp_path / "results", status=RunStatus.FAILED)


def test_csv_has_a_line_for_each_point(summary):
    rows = list(csv.DictReader(io.StringIO(export_csv(summary))))
    assert [row["status"] for row in rows] == ["ok", "oom", "skipped"]
    assert [row["params.hidden"] for row in rows] == ["4096"] * 3
    assert [row["speed_up"] for row in rows] == ["1.0", "", ""]
    assert rows[0]["is_baseline"] == "true"
    assert rows[1]["error_message"] == 'a "b" <c> & ]]> \ufffd[31m\ufffd ünï\n=1+1,2'
    assert float(rows[0]["step_ms_p50"]) == summary.rows[0].step_ms_p50
    assert csv_text(["\x0c=1+1"], []) == '"\'\n=1+1"\n'  # all line breaks become the same


def test_json_has_units_devices_and_all_columns(summary):
    content = json.loads(export_json(summary))
    assert content["run"]["run_id"] == RUN_ID
    assert content["units"]["step_ms_p50"] == "ms"
    assert [device["uuid"] for device in content["devices"]] == ["GPU-0", "GPU-1"]
    assert [point["efficiency"] for point in content["points"]] == [1.0, None, None]


def test_junit_counts_and_tells_what_failed(summary):
    (suite,) = ET.fromstring(export_junit(summary))
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "0", "errors": "1", "skipped": "1"}
    ok, oom, skipped = suite.findall("testcase")
    assert [child.tag for child in ok] == ["properties"]
    assert len({case.get("name") for case in (ok, oom, skipped)}) == 3
    error = oom.find("error")
    assert 'a "b" <c> & ]]>' in error.get("message")
    assert error.text.startswith("Traceback\n  a")
    assert "\x1b" not in error.text
    assert skipped.find("skipped").get("message") == "too few"
    figures = {p.get("name"): p.get("value") for p in ok.iter("property")}
    assert figures["iterations"] == "6"
    assert float(figures["step_ms_p50"]) == summary.rows[0].step_ms_p50


def test_batch_search_exports_no_out_of_memory_error(tmp_path):
    searched = {"status": RunStatus.FAILED, "job_text": "matrix: {batch_size: {start: 8}}"}
    (suite,) = ET.fromstring(export_junit(stored(tmp_path, **searched)))
    assert suite.get("errors") == "0"
    assert suite.findall("testcase")[1].find("error") is None


def test_github_benchmark_name_does_not_depend_on_run(summary, tmp_path):
    (entry,) = json.loads(export_github(summary))
    assert entry["unit"] == "ms"
    assert entry["value"] == summary.rows[0].step_ms_p50
    assert "range" not in entry  # one start
    # Alone in its run, nothing varies: the name must not depend on that.
    write_run(tmp_path, "lone", [make_record()])
    (lone,) = json.loads(export_github(load_run_data(tmp_path, "lone")))
    assert lone["name"] == entry["name"]


def test_github_benchmark_of_nothing_is_refused(tmp_path):
    write_run(tmp_path, "none", [make_failed()])
    with pytest.raises(ResultsError, match="no point is ok"):
        export_github(load_run_data(tmp_path, "none"))


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_missing_tracker_names_the_package_to_install(tracker, command, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker, None)
    told = command("export", "ddp_scaling", "--to", tracker, results=EXAMPLES).refusal
    assert told.endswith(f"in the checkout of raybench: pip install -e '.[{tracker}]'\n")


# What it imports warns of many things, and takes seconds: one process for all of MLflow.
TO_MLFLOW = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from raybench.cli import main

def export(uri):
    os.environ["MLFLOW_TRACKING_URI"] = uri
    sys.argv = ["raybench", "export", "--to", "mlflow", "--results", sys.argv[-1]]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            return end.code or 0, out.getvalue(), err.getvalue()

done = list(map(export, ["http://127.0.0.1:9", "file:/dev/null/a", *["file:" + sys.argv[1]] * 2]))
from mlflow import MlflowClient
client = MlflowClient()
experiment = client.get_experiment_by_name("ddp_scaling").experiment_id
runs = [
    [run.info.status, run.data.params, run.data.metrics, run.data.tags]
    for run in client.search_runs([experiment])
]
print(json.dumps([done, runs]))
"""


@pytest.mark.long
def test_mlflow_gets_each_run_and_point_once(summary, tmp_path):
    variables = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    store, results = tmp_path / "mlruns", tmp_path / "results"
    told = run_python(TO_MLFLOW, store, results, **variables)
    [*unusable, first, again], found = json.loads(told.stdout)
    assert all("--to mlflow: " in Answer(*one).refusal for one in unusable)
    assert "has run-of-three already" in Answer(*again).refusal
    assert (first[0], first[2]) == (0, "")
    assert "experiment ddp_scaling" in first[1]
    runs = {tags.get("status", "run"): rest for *rest, tags in found}
    ends = {"run": "FAILED", "ok": "FINISHED", "oom": "FAILED", "skipped": "KILLED"}
    assert {name: end for name, (end, _, _) in runs.items()} == ends
    _, params, figures = runs["ok"]
    assert (params["hidden"], params["world_size"], params["precision"]) == ("4096", "1", "fp32")
    assert figures["step_ms_p50"] == summary.rows[0].step_ms_p50
    assert "speed_up" not in runs["oom"][2]


@pytest.mark.long
def test_wandb_gets_a_run_for_each_point_offline(summary, tmp_path):
    folders = ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
    offline = {"WANDB_MODE": "offline", **dict.fromkeys(folders, str(tmp_path))}
    words = ("export", "--to", "wandb", "--results", tmp_path / "results")
    done = run_python("from raybench.cli import main; main()", *words, **offline)
    assert (done.returncode, done.stderr) == (0, "")
    assert "project ddp_scaling, group run-of-three: 3 runs" in done.stdout
    found = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(found) == 3
    written = next(path for path in found if summary.rows[0].point_id in path.name).read_bytes()
    for text in (b"step_ms_p50", b"run-of-three", b"NVIDIA H200", b"4096"):
        assert text in written
    done = run_python("from raybench.cli import main; main()", *words, WANDB_MODE="no such")
    assert "--to wandb: " in Answer(done.returncode, done.stdout, done.stderr).refusal


@pytest.mark.usefixtures("summary")
@pytest.mark.parametrize("kind", ["csv", "json", "junit", "github-action-benchmark"])
def test_a_file_holds_what_is_printed(tmp_path, command, kind):
    words, target = ("export", "--format", kind), tmp_path / "exported"
    code, out, _ = command(*words, results=tmp_path / "results")
    assert (code, len(out) > 100) == (0, True)
    assert command(*words, "-o", target, results=tmp_path / "results") == (0, "", "")
    assert target.read_text() == out
