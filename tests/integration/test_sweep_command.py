"""`raybench sweep` as a user types it: real Ray, real gloo, real Parquet."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from raybench import cli
from raybench.analysis.step_times import step_times
from raybench.records.environment import usable_cores

SWEEP = [sys.executable, "-m", "raybench", "sweep"]
FAULTY = "tests.integration.probe_workloads:Faulty"


def write_job(folder: Path, text: str) -> Path:
    job = folder / "job.yaml"
    job.write_text("version: 1\nname: small\n" + text)
    return job


def sweep(job: Path, results: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWEEP, str(job), "-o", str(results), "--device", "cpu", *options],
        capture_output=True,
        text=True,
        timeout=240,
    )


def browse(results: Path, *command: str) -> Result:
    """A command in this process: it needs no Ray, and a new one takes seconds to import."""
    return CliRunner().invoke(cli.raybench, [*command, "--results", str(results)])


def points_of(results: Path) -> pd.DataFrame:
    return pd.read_parquet(results / "points")


MLP_JOB = """\
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2, 64], precision: [fp32, bf16], batch_size: 16}
measure: {warmup: 3, iterations: 10}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    options = ("--address", "local", "--profile", "world_size == 2 and precision == 'bf16'")
    done = sweep(write_job(folder, MLP_JOB), folder / "results", *options)
    return done, folder / "results"


def test_a_sweep_ends_with_0_and_prints_its_report_on_stdout(swept):
    done, _ = swept
    assert done.returncode == 0, done.stderr
    assert "speed-up" in done.stdout
    assert f"needs 64 devices, the cluster has {usable_cores()}" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_stderr_has_one_line_per_point_and_nothing_of_rays(swept):
    done, _ = swept
    first, *lines, traces = done.stderr.splitlines()
    workers = f"{usable_cores()} CPU worker{'s' * (usable_cores() != 1)}"
    assert first.startswith(f"private Ray on this host, up to {workers}; run small-")
    assert [re.match(r"\[(\d)/6\]  (ok|skipped) ", line).groups() for line in lines] == [
        ("1", "ok"),
        ("2", "ok"),
        ("3", "ok"),
        ("4", "ok"),
        ("5", "skipped"),
        ("6", "skipped"),
    ]
    assert traces.startswith("traces: ")


def test_pandas_and_pyarrow_read_what_was_written(swept):
    _, results = swept
    points = points_of(results)
    assert list(points["status"]) == ["ok"] * 4 + ["skipped"] * 2
    ok = points[points["status"] == "ok"]
    assert (ok["step_ms_p50"] > 0).all()
    assert (ok["setup_s"] > 0).all()
    assert list(ok["backend"].fillna("none")) == ["none", "none", "gloo", "gloo"]
    samples = pq.read_table(results / "samples").to_pandas()
    counts = samples.groupby(["point_id", "rank", "is_warmup"]).size()
    assert set(counts.xs(True, level="is_warmup")) == {3}
    assert set(counts.xs(False, level="is_warmup")) == {10}
    assert len(counts) == 2 * (1 + 1 + 2 + 2)
    runs = pd.read_parquet(results / "runs")
    assert list(runs["status"]) == ["ok"]
    assert (runs["points_ok"].item(), runs["points_skipped"].item()) == (4, 2)
    assert len(pd.read_parquet(results / "devices")) == 2


def test_the_step_time_is_computed_from_the_samples_and_rates_follow_their_mean(swept):
    _, results = swept
    samples = pd.read_parquet(results / "samples")
    timed = samples[~samples["is_warmup"]]
    expected = {
        point_id: float(np.median(step_times(rows))) for point_id, rows in timed.groupby("point_id")
    }
    means = timed.groupby(["point_id", "rank"])["step_ns"].mean().groupby("point_id").max() / 1e6
    points = points_of(results).set_index("point_id")
    ok = points[points["status"] == "ok"]
    pd.testing.assert_series_equal(
        ok["step_ms_p50"].sort_index(), pd.Series(expected).sort_index(), check_names=False
    )
    pd.testing.assert_series_equal(
        ok["step_ms_mean"].sort_index(), means.sort_index(), check_names=False
    )
    items = 16 * ok["world_size"]
    pd.testing.assert_series_equal(
        ok["throughput"], items / (ok["step_ms_mean"] / 1e3), check_names=False
    )


def test_the_points_that_are_profiled_have_traces_and_the_times_of_modules(swept):
    _, results = swept
    traces = sorted((results / "traces").rglob("*.json.gz"))
    assert [path.name.split("-")[-1] for path in traces] == ["rank0.json.gz", "rank1.json.gz"]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        # The communication that the model has by itself is in it.
        assert any("allreduce" in str(event.get("name")) for event in events)
    modules = pd.read_parquet(results / "modules")
    assert set(modules["rank"]) == {0, 1}
    assert set(modules["module"]) == {"", "0", "1", "2"}


@pytest.mark.parametrize("command", [["list"], ["show", "latest"], ["report"]])
def test_the_results_can_be_browsed(swept, command):
    _, results = swept
    done = browse(results, *command)
    assert done.exit_code == 0, done.stderr
    assert "small" in done.stdout or "fp32" in done.stdout


@contextmanager
def hanging_sweep(folder, *, in_its_own_session=False):
    """A sweep into folder/results whose first point has ended and whose second one hangs."""
    job = write_job(
        folder,
        f"workload: {{kind: '{FAULTY}'}}\n"
        "matrix: {fault: [none, hang], batch_size: 4}\n"
        "measure: {warmup: 2, iterations: 4}\n",
    )
    results = folder / "results"
    command = [*SWEEP, str(job), "-o", str(results), "--address", "local", "--device", "cpu"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=in_its_own_session,
    ) as process:
        deadline_s = time.monotonic() + 120
        while not list(results.glob("points/*/[!.]*.parquet")):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.2)
        yield process


@pytest.mark.parametrize(
    "told",
    [pytest.param((signal.SIGINT, signal.SIGINT), marks=pytest.mark.long), (signal.SIGTERM,)],
)
def test_stopping_now_keeps_what_finished_and_exits_with_130(tmp_path, told):
    results = tmp_path / "results"
    with hanging_sweep(tmp_path) as process:
        running = browse(results, "report")
        for number in told:
            process.send_signal(number)
            time.sleep(0.5)
            shown_after_s = time.time()
        stdout, stderr = process.communicate(timeout=60)
    assert running.exit_code == 0, running.stderr
    assert "unfinished; 2 points: 1 ok, 0 failed, 0 skipped, 1 not run" in running.stdout
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    said = (
        r"interrupted: 1 finished point is kept; see: python -m raybench report (small-\S+) "
        r"--results (\S+)"
    )
    run_id, folder = re.fullmatch(said, stderr.splitlines()[-1]).groups()
    command = [sys.executable, "-m", "raybench", "report", run_id, "--results", folder]
    assert subprocess.run(command, capture_output=True, text=True).stdout == stdout
    assert "2 points: 1 ok, 0 failed, 0 skipped, 1 cancelled" in " ".join(stdout.split())
    assert list(points_of(results)["status"]) == ["ok", "cancelled"]
    (run,) = pd.read_parquet(results / "runs").to_dict("records")
    assert run["status"] == "interrupted"
    # Whatever hangs: here the point does, for minutes.
    assert run["finished_at"].timestamp() < shown_after_s + 10
    assert stderr.count("finishing the point in flight") == len(told) - 1


@pytest.mark.long
def test_a_sigterm_to_all_processes_of_a_sweep_is_exit_130_without_a_crash(tmp_path):
    with hanging_sweep(tmp_path, in_its_own_session=True) as process:
        os.killpg(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=90)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    assert list(points_of(tmp_path / "results")["status"])[:1] == ["ok"]


@pytest.mark.parametrize("wait_s", [pytest.param(2, marks=pytest.mark.long), 4])
def test_an_interrupt_while_ray_starts_is_exit_130_without_a_crash(tmp_path, wait_s):
    job = write_job(tmp_path, MLP_JOB)
    command = [*SWEEP, str(job), "-o", str(tmp_path / "r"), "--address", "local"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in stderr


@pytest.mark.long
def test_two_sweeps_into_one_folder_at_the_same_time_are_both_whole(tmp_path):
    job = write_job(tmp_path, MLP_JOB)
    results = tmp_path / "results"
    with ThreadPoolExecutor() as pool:
        options = (job, results, "--address", "local", "--shared")
        both = [done.result() for done in [pool.submit(sweep, *options) for _ in range(2)]]
    assert [done.returncode for done in both] == [0, 0], [done.stderr for done in both]
    points = points_of(results)
    assert list(points.groupby("run_id").size()) == [6, 6]
    assert list(pd.read_parquet(results / "runs")["points_ok"]) == [4, 4]


def test_no_point_that_fits_is_exit_3_and_leaves_nothing(tmp_path):
    job = write_job(tmp_path, "workload: {kind: mlp}\nmatrix: {world_size: [64], batch_size: 4}\n")
    done = sweep(job, tmp_path / "results", "--address", "local")
    assert done.returncode == 3
    assert "the smallest needs 64 devices, the cluster has" in done.stderr
    assert not (tmp_path / "results").exists()


DEVICES_JOB = """\
workload: {kind: mlp, hidden: 32, layers: 1}
matrix: {world_size: [1, 2], batch_size: 16}
measure: {warmup: 2, iterations: 5}
"""


def list_second_worker(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A list with one of this host's workers, and the options of a sweep that keeps to it."""
    listed = folder / "list"
    listed.write_text(f"{socket.gethostname()}:1  # the second worker\n")
    return listed, ("--address", "local", "--devices", str(listed))


def test_only_the_devices_of_a_list_are_used_and_counted(tmp_path):
    job, results = write_job(tmp_path, DEVICES_JOB), tmp_path / "r"
    listed, options = list_second_worker(tmp_path)
    done = sweep(job, results, *options)
    assert done.returncode == 0, done.stderr
    assert f"up to 1 CPU worker of --devices {listed}; run" in done.stderr
    assert "only those that --devices named" in " ".join(done.stdout.split())
    points = points_of(results)
    assert dict(zip(points.world_size, points.status, strict=True)) == {1: "ok", 2: "skipped"}
    [run] = pd.read_parquet(results / "runs").itertuples()
    assert list(run.only_devices) == [f"{socket.gethostname()}:1"]
    assert list(pd.read_parquet(results / "devices")["index"]) == [1]


@pytest.mark.long
def test_a_run_that_goes_on_keeps_to_the_devices_of_its_list_and_others_must_be_there(tmp_path):
    job, results = write_job(tmp_path, DEVICES_JOB), tmp_path / "r"
    listed, options = list_second_worker(tmp_path)
    assert sweep(job, results, *options).returncode == 0
    [run] = pd.read_parquet(results / "runs").itertuples()
    again = sweep(job, results, "--address", "local", "--resume", "latest")
    assert f"up to 1 CPU worker of --devices of {run.run_id}; run" in again.stderr
    listed.write_text("no-such-host:0\n")
    done = sweep(job, results, *options)
    assert (done.returncode, done.stdout) == (3, "")
    assert "the cluster does not give no-such-host:0" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("address", "code", "text"),
    [
        ("127.0.0.1:1", 3, "no Ray cluster answers there"),
        ("http://127.0.0.1:8265", 2, "ray job submit --address http://127.0.0.1:8265"),
        ("ray://127.0.0.1:10001", 2, "Ray Client is not supported"),
        ("nowhere", 2, "expected auto, local or HOST:PORT"),
    ],
)
def test_a_bad_address_is_one_line(tmp_path, address, code, text):
    done = sweep(write_job(tmp_path, MLP_JOB), tmp_path / "results", "--address", address)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert text in line
    assert not (tmp_path / "results").exists()


def test_results_that_cannot_be_written_are_one_line_and_exit_2(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    job = write_job(tmp_path, MLP_JOB)
    done = sweep(job, tmp_path / "file" / "results", "--address", "local")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "file") in done.stderr.splitlines()[-1]


def test_a_workload_of_ones_own_is_found_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n\nfrom helper import os\n\n\n"
        "class Sum:\n"
        '    """Adds a vector up."""\n\n'
        "    def __init__(self, context, *, length: int = 8) -> None:\n"
        "        self._vector = torch.rand(length, device=context.device)\n"
        "        self.items_per_step = context.batch_size\n\n"
        "    def step(self) -> None:\n"
        "        self._vector.sum()\n"
        "        print('a step of', len(self._vector))\n"
        "        if len(self._vector) == 9:\n"
        "            os.kill(os.getpid(), 9)\n"
        "        if len(self._vector) == 64:\n"
        "            raise ValueError('too long')\n"
    )
    (tmp_path / "helper.py").write_text("import os\nprint('on stdout at import')\n")
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "results"
    job = write_job(
        tmp_path,
        "workload: {kind: 'mine:Sum'}\nmatrix: {length: [8, 64, 9], batch_size: 1}\n"
        "measure: {warmup: 2, iterations: 5}\n",
    )
    done = sweep(job, results, "--address", "local", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["run"]["job_name"]
    assert "on stdout at import" in done.stderr
    points = points_of(results)
    assert list(points["status"]) == ["ok", "error", "lost", "lost"]
    assert points["workload_sha256"].nunique() == points["raybench_sha256"].nunique() == 1
    ok, failed, lost, _ = points["point_id"]
    assert browse(results, "show", "latest", lost, "--logs").stdout.count("a step of 9") == 2
    assert "a step of 8" in browse(results, "show", "latest", ok, "--logs").stdout
    assert "a step of 64" in browse(results, "show", "latest", failed, "--logs").stdout
    assert "a step of 8" not in browse(results, "show", "latest", failed, "--logs").stdout
    assert points["error_detail"][1].endswith("a step of 64")
    (tmp_path / "helper.py").write_text("import os\n")
    refused = sweep(job, results, "--resume", "latest", "--retry-failed")
    assert refused.returncode == 2
    assert "the code is not that of the run: helper.py has changed" in refused.stderr


@pytest.mark.long
def test_the_tour_answers_each_of_its_questions_on_two_cores(tmp_path):
    from raybench.cli.demo import STOPS

    done = subprocess.run(
        [*SWEEP, "--demo", "-o", str(tmp_path), "--device", "cpu", "--address", "local"],
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == len(STOPS)
    assert set(points_of(tmp_path)["status"]) == {"ok"}
    assert (tmp_path / "demo.html").stat().st_size > 100_000
