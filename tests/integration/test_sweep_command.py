"""`raybench sweep` as a user types it: real Ray, real gloo, real Parquet."""

import gzip
import json
import os
import re
import signal
import socket
import time
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from raybench import cli
from raybench.records.environment import usable_cores
from tests.integration.sweeps import (
    begin,
    cpu_sweep,
    raybench,
    sweep_command,
    table,
    wait_for_rows,
    write_text,
)
from tests.unit.commands import command

__all__ = ["command"]  # a fixture


def browse(folder, *command):
    """A command in this process: it needs no Ray, and a new one takes seconds to import."""
    return CliRunner().invoke(cli.raybench, [*command, "--results", str(folder / "results")])


MLP_JOB = """\
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2, 64], precision: [fp32, bf16], batch_size: 16}
measure: {warmup: 3, iterations: 10}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    write_text(folder, MLP_JOB)
    return cpu_sweep(folder, "--profile", "world_size == 2 and precision == 'bf16'"), folder


def test_sweep_prints_its_report_on_stdout(swept):
    done, _ = swept
    assert done.returncode == 0, done.stderr
    assert "Speed-up from 1 worker to " in done.stdout
    assert f"needs 64 devices, the cluster has {usable_cores()}" in " ".join(done.stdout.split())
    # A command to be typed is as wide as its paths are long.
    report, *_ = done.stdout.partition("\nNext")
    assert max(map(len, report.splitlines())) <= 80


def test_stderr_has_phases_then_one_line_per_point(swept):
    done, _ = swept
    estimate, phase, joined, started, *lines, traces = done.stderr.splitlines()
    workers = f"{usable_cores()} CPU worker{'s' * (usable_cores() != 1)}"
    assert re.match(r"6 points: about (\d+ min )?\d+ s, 15 s of it to start Ray", estimate)
    assert phase == "starting Ray on this machine"
    assert joined.startswith(f"private Ray on this host, up to {workers}; run small-")
    assert re.fullmatch(r"starting \d workers?", started)
    found = [re.match(r"\[(\d)/6\]  (ok|skipped) ", line).groups() for line in lines]
    statuses = ["ok"] * 4 + ["skipped"] * 2
    assert found == [(str(number), status) for number, status in enumerate(statuses, 1)]
    assert traces.startswith("traces: ")


def test_pandas_and_pyarrow_read_what_was_written(swept):
    _, folder = swept
    points = table(folder)
    assert list(points["status"]) == ["ok"] * 4 + ["skipped"] * 2
    ok = points[points["status"] == "ok"]
    assert (ok["step_ms_p50"] > 0).all()
    assert (ok["setup_s"] > 0).all()
    assert list(ok["backend"].fillna("none")) == ["none", "none", "gloo", "gloo"]
    samples = pq.read_table(folder / "results" / "samples").to_pandas()
    counts = samples.groupby(["point_id", "rank", "is_warmup"]).size()
    assert set(counts.xs(True, level="is_warmup")) == {3}
    assert set(counts.xs(False, level="is_warmup")) == {10}
    assert len(counts) == 2 * (1 + 1 + 2 + 2)
    runs = table(folder, "runs")
    assert list(runs["status"]) == ["ok"]
    assert (runs["points_ok"].item(), runs["points_skipped"].item()) == (4, 2)
    assert len(table(folder, "devices")) == 2


def test_profiled_points_have_traces_and_module_times(swept):
    _, folder = swept
    traces = sorted((folder / "results" / "traces").rglob("*.json.gz"))
    assert [path.name.split("-")[-1] for path in traces] == ["rank0.json.gz", "rank1.json.gz"]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        # The communication that the model has by itself is in it.
        assert any("allreduce" in str(event.get("name")) for event in events)
    modules = table(folder, "modules")
    assert set(modules["rank"]) == {0, 1}
    assert set(modules["module"]) == {"", "0", "1", "2"}


HANGING = """\
workload: {{kind: 'tests.integration.fault_workloads:Faulty', folder: {folder}, faulty_rank: 0}}
matrix: {{fault: [none, sleep], batch_size: 4}}
measure: {{warmup: 2, iterations: 4}}
"""


@contextmanager
def hanging_sweep(folder, **more):
    """A sweep whose first point has ended and whose second one hangs."""
    write_text(folder, HANGING.format(folder=folder))
    with begin(folder, **more) as process:
        wait_for_rows(process, folder, 1)
        yield process


@pytest.mark.long
@pytest.mark.parametrize(
    "told",
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)],
)
def test_stopping_keeps_finished_points_and_exits_130(tmp_path, told):
    with hanging_sweep(tmp_path) as process:
        running = browse(tmp_path, "report")
        for number in told:
            process.send_signal(number)
            time.sleep(0.5)
            shown_after_s = time.time()
        stdout, stderr = process.communicate(timeout=60)
    assert running.exit_code == 0, running.stderr
    assert "unfinished, 1 of 2 points ok, 1 not run" in " ".join(running.stdout.split())
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    said = (
        r"interrupted: 1 finished point is kept; see: `python -m raybench report (small-\S+) "
        r"--results (\S+)`"
    )
    run_id, folder = re.fullmatch(said, stderr.splitlines()[-1]).groups()
    assert raybench("report", run_id, "--results", folder).stdout == stdout
    assert ", 1 of 2 points ok, 1 cancelled" in " ".join(stdout.split())
    assert list(table(tmp_path)["status"]) == ["ok", "cancelled"]
    (run,) = table(tmp_path, "runs").to_dict("records")
    assert run["status"] == "interrupted"
    # Whatever hangs: here the point does, for minutes.
    assert run["finished_at"].timestamp() < shown_after_s + 10
    assert stderr.count("finishing the point in flight") == len(told) - 1


@pytest.mark.long
def test_sigterm_to_all_processes_exits_130(tmp_path):
    with hanging_sweep(tmp_path, start_new_session=True) as process:
        os.killpg(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=90)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    assert list(table(tmp_path)["status"])[:1] == ["ok"]


@pytest.mark.parametrize("wait_s", [pytest.param(2, marks=pytest.mark.long), 4])
def test_interrupt_during_ray_start_exits_130(tmp_path, wait_s):
    write_text(tmp_path, MLP_JOB)
    with begin(tmp_path) as process:
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    # A busy machine takes too long to leave Ray's start: then the signal ends it, 130 in a shell.
    assert process.returncode in (130, -signal.SIGINT), stderr
    assert stderr.splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in stderr


# No device can join a private Ray, so --wait changes nothing.
@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.long), ("--wait", "600")])
def test_too_large_points_exit_3_without_results(tmp_path, options):
    write_text(tmp_path, "workload: {kind: mlp}\nmatrix: {world_size: [64], batch_size: 4}\n")
    done = cpu_sweep(tmp_path, *options)
    assert done.returncode == 3
    assert "the smallest needs 64 devices, the cluster has" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("address", "code", "text"),
    [
        ("127.0.0.1:1", 3, "no Ray cluster answers there"),
        ("host..local:6379", 3, "no Ray cluster answers there"),
        ("http://127.0.0.1:8265", 2, "from elsewhere: ray job submit --address http://HOST:8265"),
        ("ray://127.0.0.1:10001", 2, "expected auto, local or HOST:PORT on a node"),
        ("nowhere", 2, "expected auto, local or HOST:PORT"),
    ],
)
def test_a_bad_address_is_one_line(tmp_path, command, address, code, text):
    write_text(tmp_path, MLP_JOB)
    _, _, _, *words = sweep_command(tmp_path, "--device", "cpu", address=address)
    done = command(*words, results=None)
    assert done.code == code
    estimate, phase, line = done.err.splitlines()
    assert (estimate.partition(":")[0], phase) == ("6 points", "connecting to Ray")
    assert text in line
    assert not (tmp_path / "results").exists()


MINE = """\
import torch

from helper import os


class Sum:
    def __init__(self, context, *, length: int = 8) -> None:
        self._vector = torch.rand(length, device=context.device)
        self.items_per_step = context.batch_size

    def step(self) -> None:
        self._vector.sum()
        print('a step of', len(self._vector))
        if len(self._vector) == 9:
            os.kill(os.getpid(), 9)
        if len(self._vector) == 64:
            raise ValueError('too long')
"""
MINE_JOB = """\
workload: {kind: 'mine:Sum'}
matrix: {length: [8, 64, 9], batch_size: 1}
measure: {warmup: 2, iterations: 5}
"""


def list_second_worker(folder):
    """Write a list of devices that names one of this host's workers; its options for a sweep."""
    (folder / "list").write_text(f"{socket.gethostname()}:1  # the second worker\n")
    return "--devices", str(folder / "list")


@pytest.mark.long
def test_workload_of_current_directory_runs_on_listed_devices(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("import os\nprint('on stdout at import')\n")
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, MINE_JOB)
    done = cpu_sweep(tmp_path, "--json", *list_second_worker(tmp_path))
    assert done.returncode == 1, done.stderr
    run = json.loads(done.stdout)["run"]
    assert run["only_devices"] == [f"{socket.gethostname()}:1"]
    assert f"up to 1 CPU worker of --devices {tmp_path / 'list'}; run" in done.stderr
    assert set(table(tmp_path, "devices")["index"]) == {1}
    assert "on stdout at import" in done.stderr
    points = table(tmp_path)
    assert list(points["status"]) == ["ok", "error", "lost", "lost"]
    assert points["workload_sha256"].nunique() == points["raybench_sha256"].nunique() == 1

    def log_of(point_id):
        return browse(tmp_path, "show", "latest", point_id, "--logs").stdout

    ok, failed, lost, _ = points["point_id"]
    assert log_of(lost).count("a step of 9") == 2
    assert "a step of 8" in log_of(ok)
    assert "a step of 64" in log_of(failed)
    assert "a step of 8" not in log_of(failed)
    assert points["error_detail"][1].endswith("a step of 64")
    (tmp_path / "helper.py").write_text("import os\n")
    refused = cpu_sweep(tmp_path, "--resume", "latest", "--retry-failed")
    assert refused.returncode == 2
    assert "the code is not that of the run: helper.py has changed" in refused.stderr


PRINTING = """\
import os
import time


class Printing:
    flops_per_step = items_per_step = 1

    def __init__(self, context) -> None: ...

    def step(self) -> None:
        os.write(1, (b"x" * 1023 + b"\\n") * 1024)

    def close(self) -> None:
        print("last words", flush=True)
        until_s = time.monotonic() + 20
        while (used_mib := os.fstat(1).st_blocks * 512 / 2**20) > 16:
            assert time.monotonic() < until_s, f"the log takes {used_mib:.0f} MiB"
            time.sleep(0.1)
"""
PRINTING_JOB = """\
workload: {kind: 'printing:Printing'}
matrix: {batch_size: 1}
measure: {warmup: 2, iterations: 30, breakdown: false}
"""


@pytest.mark.long
def test_a_workload_that_prints_much_fills_no_disk(tmp_path):
    (tmp_path / "printing.py").write_text(PRINTING)
    write_text(tmp_path, PRINTING_JOB)
    done = cpu_sweep(tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    [log] = (tmp_path / "results").glob("logs/*/*")
    assert re.search(r"\(\d{8,} bytes before this are not kept\)", log.read_text())
    assert log.read_text().endswith("x\nlast words\n")


DEVICES_JOB = """\
workload: {kind: mlp, hidden: 32, layers: 1}
matrix: {world_size: [1, 2], batch_size: 16}
measure: {warmup: 2, iterations: 5}
"""


@pytest.mark.long
def test_resume_keeps_listed_devices_and_missing_ones_fail(tmp_path):
    write_text(tmp_path, DEVICES_JOB)
    done = cpu_sweep(tmp_path, *list_second_worker(tmp_path))
    assert done.returncode == 0, done.stderr
    full = browse(tmp_path, "report", "--full").stdout
    assert "only those that --devices named" in " ".join(full.split())
    points = table(tmp_path)
    assert dict(zip(points.world_size, points.status, strict=True)) == {1: "ok", 2: "skipped"}
    [run] = table(tmp_path, "runs").itertuples()
    again = cpu_sweep(tmp_path, "--resume", "latest")
    assert f"up to 1 CPU worker of --devices of {run.run_id}; run" in again.stderr
    (tmp_path / "list").write_text("no-such-host:0\n")
    done = cpu_sweep(tmp_path, "--devices", str(tmp_path / "list"))
    assert (done.returncode, done.stdout) == (3, "")
    assert "the cluster does not give no-such-host:0" in done.stderr.splitlines()[-1]
