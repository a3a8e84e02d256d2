"""`raybench sweep --again`: which points of which run are measured once more."""

import json

import pytest
from builders import make_measure, make_record, make_run

from raybench.job.model import load_job
from raybench.job.plan import make_plan
from raybench.results.run import RunStatus
from raybench.results.writer import RunStore
from raybench.sweep.run_state import code_of_job

TEXT = "version: 1\nname: a\nworkload: {kind: mlp}\nmatrix: {batch_size: [1, 2, 4]}\n"
FIRST, SECOND = "a-20261101-000000-0001", "a-20261102-000000-0002"


@pytest.fixture
def results(tmp_path):
    """Two runs: the second is as fast, 2 % slower and 30 % slower than the first, once each."""
    (tmp_path / "job.yaml").write_text(TEXT)
    job = load_job(tmp_path / "job.yaml", ["matrix.batch_size=1,2,4,8"])
    for run_id, slower in ((FIRST, (1, 1, 1, 1)), (SECOND, (1, 1.02, 1.3, 1))):
        keep(tmp_path / "results", run_id, job, slower)
    return tmp_path / "results"


def keep(root, run_id, job, slower):
    code = code_of_job(job)
    run = make_run(
        run_id,
        workload_files=code.workload,
        raybench_sha256=code.raybench_sha256,
        job_name="a",
        job_text=job.text,
        job_sha256=job.meaning_sha256,
        status=RunStatus.OK,
        argv=("raybench", "sweep", "job.yaml", "--set", "matrix.batch_size=1,2,4,8"),
    )
    store = RunStore.create(root, run, make_measure())
    for index, (point, times) in enumerate(zip(make_plan(job).points, slower, strict=True)):
        record = make_record(point, step_ms=10.0 * times, count=100)
        store.write_records([(index, record)])
        store.write_devices(record.devices)


@pytest.fixture
def call(results, command):
    def ask(*words):
        done = command("sweep", *words, "-o", results, "--dry-run", "--json", results=None)
        points = json.loads(done.out)["points"] if done.out else []
        return [point["batch_size"] for point in points], done.err

    return ask


def test_only_unclear_are_the_points_that_compare_calls_so(call):
    # One run a side decides nothing.
    assert call("--again", SECOND, "--only", "unclear", "--against", FIRST)[0] == [1, 2, 4, 8]
    assert call("--again", "latest", "--only", "unclear")[0] == [1, 2, 4, 8]


def test_all_points_of_the_run_with_what_was_set_there(call):
    assert call("--again", SECOND)[0] == [1, 2, 4, 8]
    assert call("--again", SECOND, "--filter", "batch_size > 2")[0] == [4, 8]


def test_a_run_goes_on_with_its_own_settings_which_need_not_be_said_again(call, results):
    job = results.parent / "job.yaml"
    assert call(job, "--resume", SECOND)[0] == []
    assert call(job, "--resume", SECOND, "--set", "measure.rounds=2")[0] == [1, 2, 4, 8]
    points, error = call(job, "--resume", SECOND, "--set", "matrix.batch_size=1")
    assert points == []
    assert "matrix.batch_size was [1, 2, 4, 8], is [1]" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--again", FIRST, "--only", "unclear"), "has no run of a before"),
        (("--again", SECOND, "--against", FIRST), "--against BASE: goes with --only unclear"),
        (("--only", "unclear"), "--only and --against: go with --again RUN only"),
        (("--again", SECOND, "--set", "measure.rounds=2"), "--again RUN: has its job"),
    ],
)
def test_what_cannot_be_meant_is_one_line(call, words, said):
    points, error = call(*words)
    assert points == []
    assert said in error
    assert len(error.splitlines()) == 1
