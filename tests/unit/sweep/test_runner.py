"""How a sweep ends, told apart by its exit, its row and its words; without Ray."""

import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
from builders import make_failed, make_measure, make_record, make_run, write_run
from fakes import (
    ScriptedWorker,
    make_cluster,
    make_device,
    make_measurement,
    make_settings,
    measured,
)
from rich.console import Console

from raybench import cli
from raybench.api.progress import ConsoleListener, PointProgress
from raybench.errors import ClusterError, ResultsError
from raybench.job.loading import load_job
from raybench.job.plan import make_plan
from raybench.records.code import code_of
from raybench.records.measurement import Failure, Profile
from raybench.records.record import TrialKey, status_by_point
from raybench.records.status import Cause, RunStatus, Status
from raybench.results.reader import count_points
from raybench.results.writer import RunStore, hold_run
from raybench.sweep import loop, run_state, runner
from raybench.sweep.interrupts import Interrupts
from raybench.sweep.loop import PointFinished
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_rows import RunRows
from raybench.sweep.run_state import RunState, RunTarget
from raybench.sweep.runner import record_run, run_sweep
from tests.local_cluster import LocalCluster, this_process

SETTINGS = make_settings(measure=make_measure())
RESUME = "raybench sweep job.yaml --resume run-a"
STARTING = "starting 1 worker\n"
GO_ON = f"go on with: {RESUME}\n"


class NoWorkers:
    """A cluster whose start goes wrong."""

    devices, capacity, kind, description = (), 1, "cpu", "no cluster"
    close = staticmethod(lambda: None)

    def __init__(self, error):
        self._error = error

    def start(self, count, strategy):
        self.strategy = strategy
        raise self._error


class SlowToClose(LocalCluster):
    """A cluster whose end is too slow for the user."""

    def close(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The results, below the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("version: 1\nname: a\nworkload: {kind: mlp}\nmatrix: {batch_size: [1, 2]}\n")
    return load_job(path)


def state_of(job, **changes):
    """A run of the job of which nothing is done yet."""
    run = make_run("run-a", status=RunStatus.RUNNING, finished_at=None)
    rounds = Rounds(plan=make_plan(job), chosen=changes.pop("chosen", None))
    usual = {"is_resumed": False, "resume_command": RESUME}
    return RunState(**{"run": run, "rounds": rounds, **usual, **changes})


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def listener(console):
    return ConsoleListener(console)


@pytest.fixture
def said(console):
    """All that the user was told."""
    return console.file.getvalue


@pytest.fixture
def rows_of(folder, listener):
    def make(state):
        return RunRows(state, RunStore.create(folder, state.run, make_measure()), listener)

    return make


@pytest.fixture
def sweeping(job, listener, rows_of):
    """Record a run of the job on a cluster."""

    def call(cluster, **changes):
        with Interrupts(listener) as interrupts:
            return record_run(SETTINGS, cluster, 1, rows_of(state_of(job, **changes)), interrupts)

    return call


@pytest.fixture
def stored(folder):
    """What a column of a table holds."""
    return lambda table, column: list(pd.read_parquet(folder / table)[column])


def one_worker(script):
    return make_cluster([make_device()], script)


def interrupted_in_batch_size_2(point, rank):
    if point.batch_size == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return make_measurement()


def test_an_interrupt_while_workers_start_is_recorded(sweeping, stored, said):
    assert sweeping(NoWorkers(KeyboardInterrupt())).status is RunStatus.INTERRUPTED
    assert stored("runs", "status") == ["interrupted"]
    assert said() == STARTING + GO_ON + "interrupted before any point finished\n"


def test_a_failed_worker_start_marks_the_run_failed(sweeping, stored, said):
    with pytest.raises(ClusterError, match="no room"):
        sweeping(NoWorkers(ClusterError("no room")))
    assert stored("runs", "status") == ["failed"]
    assert said() == STARTING + GO_ON + "stopped before any point finished\n"


def test_a_written_row_counts_despite_an_interrupt(sweeping, said, monkeypatch):
    def interrupt(_, event):
        if isinstance(event, PointFinished):
            raise KeyboardInterrupt

    monkeypatch.setattr(PointProgress, "show", interrupt)
    run = sweeping(one_worker(measured))
    assert (run.status, run.points_ok, run.points_failed) == (RunStatus.INTERRUPTED, 1, 0)
    assert said().startswith(STARTING + GO_ON + "interrupted: 1 finished point is kept; see: ")


def test_the_run_says_where_its_traces_lie(sweeping, folder, said):
    traced = replace(make_measurement(), profile=Profile(trace=b"gzip"))
    sweeping(one_worker(lambda *_: traced))
    traces = folder / "traces" / "run-a"
    assert said().splitlines()[-1].startswith(f"traces: {traces} ")
    assert len(list(traces.iterdir())) == 2


def test_one_ctrl_c_finishes_only_the_running_point(sweeping, stored, said):
    def script(point, rank):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return make_measurement()

    run = sweeping(one_worker(script))
    assert (run.status, run.points_ok) == (RunStatus.INTERRUPTED, 1)
    assert (stored("runs", "status"), stored("summary", "status")) == (["interrupted"], ["ok"])
    _, finishing, line, *rest = said().splitlines()
    assert finishing.startswith("finishing the point in flight, then stopping")
    assert "[1/2]  ok " in line
    assert rest[0] + "\n" == GO_ON
    assert rest[1].startswith("interrupted: 1 finished point is kept; see: ")


def test_ctrl_c_in_the_last_point_interrupts_nothing(sweeping, said):
    run = sweeping(one_worker(interrupted_in_batch_size_2))
    assert (run.status, run.points_ok) == (RunStatus.OK, 2)
    assert GO_ON not in said()


def test_on_error_stop_skips_points_after_a_failure(tmp_path, job, folder, listener, monkeypatch):
    path = tmp_path / "job.yaml"
    path.write_text(path.read_text() + "on_error: stop\n")
    job = load_job(path)

    def script(point, rank):
        return Failure.of(Cause.TIMEOUT, rank=rank, message="no")

    monkeypatch.setattr(runner, "connect", lambda *_, **__: one_worker(script))
    where = RunTarget(address="local", device="cuda", output=folder, profiled=frozenset())
    run = run_sweep(job, state_of(job), where, listener)
    assert (run.status, run.points_failed, run.points_skipped) == (RunStatus.FAILED, 1, 1)


def test_a_slow_shutdown_names_the_run_once(job, folder, listener, said, monkeypatch):
    cluster = SlowToClose([make_device()], lambda _: ScriptedWorker(measured))
    monkeypatch.setattr(runner, "connect", lambda *_, **__: cluster)
    where = RunTarget(address="local", device="cuda", output=folder, profiled=frozenset())
    with pytest.raises(KeyboardInterrupt):
        run_sweep(job, state_of(job), where, listener)
    told = f"2 finished points are kept; see: `raybench report run-a --results {folder}`\n"
    assert said().endswith(f"\nended at once: {told}")


def test_kept_points_are_counted_as_in_the_list(job, rows_of, said):
    statuses = [Status.OK, Status.OOM, Status.LOST, Status.CANCELLED, Status.SKIPPED]
    ended = {TrialKey(str(number)): status for number, status in enumerate(statuses)}
    rows = rows_of(state_of(job, ended=ended, chosen=()))
    rows.tell_kept("stopped")
    rows.tell_kept("told again")
    listed = rows.close()
    assert (listed.points_ok, listed.points_failed) == (1, 2)
    kept = "stopped: 4 finished points are kept (1 ok, 2 failed, 1 skipped); see: "
    assert said().startswith(kept)
    assert len(said().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *(
            (("--wait", given), f"--wait {float(given):g}: must be from 0 to 1,000,000 seconds")
            for given in ("nan", "inf", "-1", "1e9")
        ),
        (("--tag", "rack"), "--tag rack: expected KEY=VALUE"),
        (("--profile", "nonsense > 1"), "--profile nonsense > 1: "),
    ],
)
def test_a_dry_run_refuses_invalid_options(job, words, told, command):
    done = command("sweep", "job.yaml", "--dry-run", *words, results=None)
    assert done.refusal.startswith(told)


def test_damaged_runs_do_not_disturb_a_sweep(job, folder, command, monkeypatch):
    write_run(folder, "a-20261101-101010-abcd", [make_record()])
    for table in ("runs", "points", "samples"):
        for path in (folder / table).rglob("*.parquet"):
            path.write_bytes(b"no parquet")
    monkeypatch.setattr(runner, "connect", lambda *_, **__: one_worker(measured))
    done = command("sweep", "job.yaml", "--address", "local", "--device", "cuda", results=None)
    assert (done.code, "2 points" in done.out) == (0, True), done.err


@pytest.mark.long
def test_a_sweep_heats_each_device_once(job, stored, command, monkeypatch):
    monkeypatch.setattr(runner, "connect", lambda *_, **__: this_process())
    measure = ("heat_s=0.5", "rounds=2", "warmup=2", "iterations=3", "breakdown=false")
    words = [word for given in measure for word in ("--set", f"measure.{given}")]
    done = command(
        "sweep", "job.yaml", "--address", "local", "--device", "cuda", *words, results=None
    )
    assert done.code == 0, done.err
    assert done.err.count("heating 1 device for 0.5 s") == 1
    (heated_s,) = [one for one in stored("points", "heated_s") if one > 0]
    assert heated_s >= 0.5
    assert len(stored("points", "status")) == 6  # with a control in each round


@pytest.fixture
def sweep_of_many(job, folder, command, monkeypatch):
    """`raybench sweep job.yaml` with three points, which are many; a script makes each go right."""
    monkeypatch.setattr("raybench.api.sweeps._MANY_PARTS", 2)

    def call(script, *options):
        monkeypatch.setattr(runner, "connect", lambda *_, **__: one_worker(script))
        words = ("--address", "local", "--device", "cuda", "--set", "matrix.batch_size=1,2,4")
        return command("sweep", "job.yaml", *words, *options, results=None)

    call.parts = lambda: len(list(folder.glob("points/*/*.parquet")))
    return call


def test_a_retry_merges_all_points_into_one_part(sweep_of_many, stored):
    def script(point, rank):
        if point.batch_size == 2:
            return Failure.of(Cause.TIMEOUT, rank=rank, message="no")
        return make_measurement()

    assert sweep_of_many(script).code == 1
    assert sweep_of_many.parts() == 1
    done = sweep_of_many(measured, "--resume", "latest", "--retry-failed")
    assert (done.code, "3 points" in done.out) == (0, True), done.err
    assert sweep_of_many.parts() == 1
    assert stored("points", "status") == ["ok", "timeout", "ok", "ok"]


def test_resuming_an_interrupted_sweep_merges_its_parts(sweep_of_many, stored):
    assert sweep_of_many(interrupted_in_batch_size_2).code == 130
    assert sweep_of_many.parts() == 2
    assert sweep_of_many(measured, "--resume", "latest").code == 0
    assert sweep_of_many.parts() == 1
    assert stored("points", "status") == ["ok", "ok", "ok"]


def test_points_that_cannot_be_merged_are_reported(sweep_of_many, monkeypatch):
    def denied(path, missing_ok=False):
        if not path.name.startswith("."):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", denied)
        done = sweep_of_many(measured)
    assert (done.code, "3 points" in done.out) == (0, True), done.err
    told = done.err.splitlines()[-1]
    assert told.startswith("the points stay in many parts: results/points/")
    assert ".parquet: cannot be deleted: Permission denied; delete it yourself; put them" in told


@pytest.mark.parametrize("words", [["sweep", "job.yaml"], ["health"]], ids=lambda words: words[0])
def test_a_ray_job_refuses_a_relative_output(job, folder, command, monkeypatch, words):
    config = '{"runtime_env": {"working_dir": "gcs://_ray_pkg_0d3a.zip"}}'
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", config)
    told = command(*words, results=None).refusal
    assert told.startswith("--output results: a Ray job's working directory is thrown away; give")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("oversubscribe", "wait", "wanted"), [("false", (), 7), ("true", (), 4), ("false", ("9",), 4)]
)
def test_parallel_points_request_devices_unless_waiting_or_oversubscribed(
    job, monkeypatch, oversubscribe, wait, wanted
):
    connect = Mock(return_value=NoWorkers(ClusterError("seen")))
    monkeypatch.setattr(runner, "connect", connect)
    argv = ["sweep", f"--set=placement={{isolation: device, oversubscribe: {oversubscribe}}}"]
    axes = ("world_size=1,2,4", "batch_size=4", "strategy=spread")
    argv += ["job.yaml", *(f"--set=matrix.{axis}" for axis in axes)]
    options = ["--address", "local", "--device", "cpu", *(("--wait", *wait) if wait else ())]
    for words in (["health"], argv):  # a check takes the devices that are there
        with pytest.raises(ClusterError, match="seen"):
            cli.raybench.main([*words, *options], standalone_mode=False)
    counts = [call.args[0].devices_wanted for call in connect.call_args_list]
    assert (counts, connect().strategy) == ([0, wanted], "spread")


def test_a_full_disk_stops_and_keeps_written_rows(sweeping, stored, said, monkeypatch):
    full = Mock(side_effect=ResultsError("samples: no space left"))

    def script(point, rank):
        if point.batch_size == 2:
            monkeypatch.setattr(RunStore, "write_records", full)
        return make_measurement()

    with pytest.raises(ResultsError, match=r"^samples: no space left$"):
        sweeping(one_worker(script))
    assert said().splitlines()[-2] + "\n" == GO_ON
    assert said().splitlines()[-1].startswith("stopped: 1 finished point is kept; see: ")
    assert stored("points", "status") == ["ok"]


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({"PYTHONUTF8": "1"}, b"k=\xfe"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"k=\xc3\xa9"),
    ],
)
def test_arguments_that_are_not_utf8_are_refused(variables, given):
    command = [*map(str.encode, (sys.executable, "-m", "raybench", "list", "--results")), given]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **variables})
    assert done.returncode == 2
    assert done.stderr.startswith(b"arguments must be UTF-8 and the locale too, given b'k=")
    assert done.stderr.count(b"\n") == 1


def test_a_lost_point_counts_as_its_last_attempt(sweeping, stored, said):
    lost = Failure(rank=0, status=Status.LOST, error_type="Died", message="gone")
    script = Mock(side_effect=[lost, make_measurement(), make_measurement()])
    run = sweeping(one_worker(script))
    assert [call.args[0].batch_size for call in script.call_args_list] == [1, 1, 2]
    assert (run.status, run.points_ok, run.points_failed) == (RunStatus.OK, 2, 0)
    assert "rank 0 (host-a, cuda:0): gone (tried once more)" in said()
    assert stored("points", "status") == ["lost", "ok", "ok"]
    assert stored("points", "attempt") == [1, 2, 1]


def test_a_clock_set_back_shortens_no_duration(job, sweeping, stored, monkeypatch):
    offset = timedelta(0)

    class WallClock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + offset

    def script(point, rank):
        nonlocal offset
        offset -= timedelta(hours=1)
        if point.batch_size == 2:
            raise ClusterError("gone")
        return make_measurement(rank)

    for module in (loop, run_state):
        monkeypatch.setattr(module, "datetime", WallClock)
    run = replace(state_of(job).run, started_at=datetime.now(UTC))
    with pytest.raises(ClusterError):
        sweeping(one_worker(script), run=run)
    assert stored("points", "status") == ["ok", "lost"]
    assert min(stored("points", "duration_s")) >= 0
    (ended,) = [*stored("runs", "finished_at")]
    assert ended >= run.started_at


@pytest.fixture
def resume(folder, job, monkeypatch, command):
    """`raybench sweep --resume run-a` of a run that ended so: what it began with, if it did."""
    first, second = make_plan(job).points
    code = code_of("raybench.workloads.networks")

    def call(status, /, *options, has_both=False, **of_run):
        settings = {
            "job_sha256": job.meaning_sha256,
            "job_text": job.text,
            "status": RunStatus.INTERRUPTED,
            "points_total": 2,
            "workload_files": code.workload,
            "raybench_sha256": code.raybench_sha256,
        }
        records = [make_failed(first, status=status), *[make_failed(second)] * has_both]
        write_run(folder, "run-a", records, **(settings | of_run))
        starts = []

        def run_sweep(_, start, *__):
            starts.append(start)
            return count_points(start.run, status_by_point(start.ended))

        monkeypatch.setattr(runner, "run_sweep", run_sweep)
        words = ("sweep", "job.yaml", "-o", folder, "--resume", "run-a", *options)
        call.done = command(*words, results=None)
        return starts[0] if starts else None

    return call


def refusal(resume, *asked, **of_run):
    """The one line with which it is refused to go on."""
    assert resume(*asked, **of_run) is None
    return resume.done.refusal


@pytest.mark.parametrize(
    ("status", "options", "attempts"),
    [
        (Status.OK, (), [None, 1]),
        (Status.CANCELLED, (), [2, 1]),
        (Status.SKIPPED, (), [2, 1]),
        (Status.OOM, (), [None, 1]),
        (Status.LOST, (), [2, 1]),
        (Status.OOM, ("--retry-failed",), [2, 1]),
        (Status.OK, ("--retry-failed",), [None, 1]),
        (Status.CANCELLED, ("--filter", "batch_size == 1"), [2, None]),
    ],
)
def test_resuming_runs_failed_points_only_with_retry_failed(resume, job, status, options, attempts):
    start = resume(status, *options)
    made = start.rounds.attempts_before
    left = {key.point_id: made.get(key.point_id, 0) + 1 for key in start.rounds.todo}
    assert [left.get(p.point_id) for p in make_plan(job).points] == attempts
    assert (start.run.run_id, start.run.points_total, start.run.finished_at) == ("run-a", 2, None)
    assert start.run.started_at == make_run().started_at
    words = shlex.split(start.resume_command)
    assert words[3:6] == ["--resume", "run-a", "-o"]
    assert tuple(words[7:]) == options


def test_pauses_before_each_resume_add_up(resume):
    ended_at = datetime.now(UTC) - timedelta(hours=1)
    start = resume(Status.CANCELLED, finished_at=ended_at, paused_s=10.0)
    assert 3610 <= start.run.paused_s < 3700


def test_resuming_removes_files_left_by_a_killed_driver(resume, folder):
    for table, name in [("samples", "0-a-1.parquet"), ("logs", "0-a-1-rank0.txt")]:
        (folder / table / "run-a").mkdir(parents=True)
        (folder / table / "run-a" / f".{name}.4711").write_bytes(b"half")
        (folder / table / "run-a" / ".theirs").touch()
    assert resume(Status.OK)
    left = [path.name for table in ("samples", "logs") for path in (folder / table).rglob(".*")]
    assert left == [".theirs", ".theirs"]


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--dry-run", "--json")])
def test_resuming_a_finished_run_reports_nothing_to_do(resume, options):
    assert resume(Status.OOM, "--filter", "batch_size == 1", *options) is None
    code, out, err = resume.done
    assert err.startswith("run run-a: nothing to do; the points that failed: --retry-failed\n")
    assert code == (not options)
    assert ("run-a" in out) == (not options)
    assert "--json" not in options or json.loads(out)["points"] == []


@pytest.mark.parametrize(("points_total", "status"), [(1, "ok"), (2, "interrupted"), (2, "failed")])
def test_resuming_ends_a_run_whose_driver_died(resume, stored, points_total, status):
    asked = ("--filter", "batch_size == 1", "--tag", "side=new")
    failed = {"has_both": status == "failed"}  # the filter leaves it out
    assert resume(Status.OK, *asked, points_total=points_total, **failed) is None
    assert resume.done.err.startswith("run run-a: nothing to do\n")
    assert stored("runs", "status") == [status]
    assert dict(*stored("runs", "tags")) == {"rack": "7", "side": "new"}


def test_a_filter_does_not_end_an_interrupted_run(resume, sweeping, job, stored):
    state = {"run": make_run("run-b"), "is_resumed": True, "was_cut_short": True}
    chosen = {make_plan(job).points[0].point_id}
    assert sweeping(one_worker(measured), chosen=chosen, **state).status is RunStatus.OK
    assert resume(Status.CANCELLED, "--filter", "batch_size == 2", has_both=True) is None
    assert "nothing to do" in resume.done.err
    assert stored("runs", "status") == ["interrupted", "interrupted"]


def test_a_failed_run_counts_as_cut_short(resume):
    assert resume(Status.CANCELLED, status=RunStatus.FAILED).was_cut_short


def test_a_renamed_run_is_not_resumed(resume, folder, command):
    resume(Status.CANCELLED)
    for table in folder.iterdir():
        (table / "run-a").rename(table / "mine")
    done = command("sweep", "job.yaml", "-o", folder, "--resume", "mine", results=None)
    assert "runs/mine: is run run-a by its row; give its folders that name" in done.refusal
    assert not list(folder.glob("*/run-a"))


def test_resuming_refuses_a_changed_job(resume):
    options = ("--set", "measure.timeout_s=99", "--set", "matrix.batch_size=1,2,3")
    line = refusal(resume, Status.OK, *options)
    assert "matrix.batch_size was [1, 2], is [1, 2, 3], measure.timeout_s was " in line


@pytest.mark.parametrize(
    ("of_run", "told"),
    [
        (
            {"workload_files": {"raybench/workloads/networks.py": "0", "gone.py": "1"}},
            "gone.py is gone, raybench/workloads/__init__.py is new, ",
        ),
        ({"raybench_sha256": "0" * 64}, "raybench itself has changed; "),
    ],
)
def test_resuming_refuses_changed_code(resume, of_run, told):
    line = refusal(resume, Status.OK, **of_run)
    assert f"--resume run-a: the code is not that of the run: {told}" in line


def test_resuming_refuses_a_run_being_written(resume, folder):
    with hold_run(folder, "run-a"):
        assert "run run-a is being written by another sweep" in refusal(resume, Status.OK)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_flock_one_driver_writes_a_run(resume, folder, monkeypatch, number):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, "No locks available")))
    with hold_run(folder, "run-a"):
        line = refusal(resume, Status.CANCELLED)
    held = folder / "runs" / "run-a" / ".driver.held"
    assert f"being written by 'process {os.getpid()} on " in line
    assert line.endswith(f"if it has, remove {held}\n")
    assert not held.exists()
    with hold_run(folder, "run-a"):
        assert held.exists()


def test_devices_that_join_during_a_run_are_stored(job, rows_of, stored, folder):
    rows = rows_of(state_of(job))
    first, second = make_device(), make_device("b")
    for devices in ([first], [first], [first, second], [first, second]):
        rows.keep_devices(devices)
    assert sorted(stored("devices", "host")) == ["host-a", "host-b"]
    # What is written once stays as it is.
    assert len(list((folder / "devices" / "run-a").iterdir())) == 2


def test_resuming_refuses_devices_of_another_model(sweeping):
    with pytest.raises(ClusterError, match="was measured on Other GPU, this cluster has Test GPU"):
        sweeping(one_worker(measured), models=frozenset({"Other GPU"}), is_resumed=True)


def test_an_unwritable_folder_is_refused_before_ray_starts(job, tmp_path, monkeypatch, command):
    monkeypatch.setattr(runner, "run_sweep", lambda *_: pytest.fail("went on"))
    (tmp_path / "file").touch()
    told = command("sweep", "job.yaml", "-o", "file", results=None).refusal
    assert told.endswith("file is not a folder; choose another folder\n")
