"""How a sweep ends, told apart by its exit, its row and its words; without Ray."""

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest
from builders import make_failed, make_measure, make_run
from fakes import make_cluster, make_device, make_measurement
from rich.console import Console

from raybench import cli
from raybench.cli.output import ConsoleListener
from raybench.cli.progress import LineProgress
from raybench.cluster.local import LocalCluster
from raybench.errors import ClusterError, ResultsError, UsageError
from raybench.job.model import load_job
from raybench.job.plan import make_plan
from raybench.records import Device, Failure, Profile, Status, TrialKey, by_point
from raybench.records.environment import code_of
from raybench.results.reader import count_points
from raybench.results.run import RunStatus
from raybench.results.writer import RunStore, hold_run
from raybench.sweep.interrupts import Interrupts
from raybench.sweep.loop import Before, PointFinished, SweepSettings
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunRows, RunState
from raybench.sweep.runner import _closing, record_run

SETTINGS = SweepSettings(measure=make_measure(), strategy="pack", stop_on_error=False)
GO_ON = "go on with: raybench sweep job.yaml --resume run-a\n"


class NoWorkers:
    """A cluster whose start goes wrong."""

    devices: tuple[Device, ...] = ()
    capacity = 1

    def __init__(self, error):
        self._error = error

    def start(self, count, strategy):
        raise self._error


class SlowToClose:
    """A cluster whose end is too slow for the user."""

    def close(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("version: 1\nname: a\nworkload: {kind: mlp}\nmatrix: {batch_size: [1, 2]}\n")
    return load_job(path)


@pytest.fixture
def sweeping(tmp_path, job):
    def call(cluster):
        run = make_run("run-a", status=RunStatus.RUNNING, finished_at=None)
        store = RunStore.create(tmp_path / "results", run, make_measure())
        console, plan = Console(file=io.StringIO(), width=200), make_plan(job)
        try:
            start = RunState(
                run=run,
                rounds=Rounds(plan=plan),
                before=Before(),
                is_resumed=False,
                resume_command="raybench sweep job.yaml --resume run-a",
            )
            rows = RunRows(start, store, ConsoleListener(console))
            with Interrupts(ConsoleListener(console)) as interrupts:
                ended = record_run(SETTINGS, cluster, 1, rows, interrupts)
        finally:
            assert isinstance(console.file, io.StringIO)
            call.said = console.file.getvalue()
        return ended, call.said

    return call


def stored_status(tmp_path):
    return str(pd.read_parquet(tmp_path / "results" / "runs")["status"].item())


def test_an_interrupt_while_workers_start_leaves_no_run_that_seems_to_go_on(sweeping, tmp_path):
    run, said = sweeping(NoWorkers(KeyboardInterrupt()))
    assert run.status is RunStatus.INTERRUPTED
    assert stored_status(tmp_path) == "interrupted"
    assert said == GO_ON + "interrupted before any point finished\n"


def test_workers_that_cannot_start_make_the_run_failed_and_the_error_goes_on(sweeping, tmp_path):
    with pytest.raises(ClusterError, match="no room"):
        sweeping(NoWorkers(ClusterError("no room")))
    assert stored_status(tmp_path) == "failed"
    assert sweeping.said == GO_ON + "stopped before any point finished\n"


def test_a_point_whose_row_is_written_counts_even_if_the_interrupt_comes_as_it_is_shown(
    sweeping, tmp_path, monkeypatch
):
    def interrupt(_, event):
        if isinstance(event, PointFinished):
            raise KeyboardInterrupt

    monkeypatch.setattr(LineProgress, "show", interrupt)
    run, said = sweeping(make_cluster([make_device()], lambda *_: make_measurement()))
    assert (run.status, run.points_ok, run.points_failed) == (RunStatus.INTERRUPTED, 1, 0)
    assert said.startswith(
        GO_ON + "interrupted: 1 finished point is kept; see: raybench report run-a "
    )


def test_the_run_says_where_its_traces_lie(sweeping, tmp_path):
    traced = replace(make_measurement(), profile=Profile(trace=b"gzip"))
    _, said = sweeping(make_cluster([make_device()], lambda *_: traced))
    folder = tmp_path / "results" / "traces" / "run-a"
    assert said.splitlines()[-1].startswith(f"traces: {folder} ")
    assert len(list(folder.iterdir())) == 2


def test_the_point_that_an_interrupt_cut_short_is_neither_finished_nor_failed(sweeping, tmp_path):
    def script(point, _):
        if point.batch_size == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        return make_measurement()

    run, said = sweeping(make_cluster([make_device()], script))
    assert (run.points_ok, run.points_failed, run.points_skipped) == (1, 0, 0)
    assert said.splitlines()[-1].startswith("interrupted: 1 finished point is kept")
    assert list(pd.read_parquet(tmp_path / "results" / "points")["status"]) == ["ok", "cancelled"]


def test_one_ctrl_c_lets_the_point_in_flight_finish_and_starts_no_other(sweeping, tmp_path):
    def script(point, _):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return make_measurement()

    run, said = sweeping(make_cluster([make_device()], script))
    assert (run.status, run.points_ok) == (RunStatus.INTERRUPTED, 1)
    assert stored_status(tmp_path) == "interrupted"
    finishing, line, *rest = said.splitlines()
    assert finishing == ("finishing the point in flight, then stopping; Ctrl-C again stops now")
    assert "[1/2]  ok " in line
    assert rest[0] + "\n" == GO_ON
    assert rest[1].startswith("interrupted: 1 finished point is kept; see: ")


def test_ctrl_c_in_the_last_point_interrupts_nothing(sweeping, tmp_path):
    def script(point, _):
        if point.batch_size == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return make_measurement()

    run, said = sweeping(make_cluster([make_device()], script))
    assert (run.status, run.points_ok) == (RunStatus.OK, 2)
    assert GO_ON not in said


def test_an_end_that_takes_too_long_is_told_where_the_whole_run_is(tmp_path, job):
    run = make_run("run-a")
    store = RunStore.create(tmp_path / "results", run, make_measure())
    start = RunState(
        run=run,
        rounds=Rounds(plan=make_plan(job)),
        ended={TrialKey(point.point_id): Status.OK for point in make_plan(job).points},
        before=Before(chosen=()),
        is_resumed=True,
        resume_command="raybench sweep job.yaml --resume run-a",
    )
    cluster, console = SlowToClose(), Console(file=io.StringIO(), width=200)
    rows = RunRows(start, store, ConsoleListener(console))
    with Interrupts(ConsoleListener(console)) as interrupts:
        interrupts.farewell = rows.tell_kept
        with pytest.raises(KeyboardInterrupt), _closing(cluster, interrupts):
            pass
    rows.tell_kept("told again")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == (
        "ended at once: 2 finished points are kept; "
        f"see: raybench report run-a --results {store.root}\n"
    )


def test_what_is_kept_of_a_run_that_was_cut_short_is_counted_as_in_the_list_of_runs(tmp_path, job):
    statuses = [Status.OK, Status.OOM, Status.LOST, Status.CANCELLED]
    store = RunStore.create(tmp_path / "results", make_run("run-a"), make_measure())
    start = RunState(
        run=make_run("run-a"),
        rounds=Rounds(plan=make_plan(job)),
        ended={TrialKey(str(number)): status for number, status in enumerate(statuses)},
        before=Before(chosen=()),
        is_resumed=True,
        resume_command="",
    )
    console = Console(file=io.StringIO(), width=200)
    rows = RunRows(start, store, ConsoleListener(console))
    rows.tell_kept("stopped")
    listed = rows.close()
    assert (listed.points_ok, listed.points_failed) == (1, 2)
    assert isinstance(console.file, io.StringIO)
    told = "stopped: 3 finished points are kept (1 ok, 2 failed); see: raybench report run-a "
    assert console.file.getvalue().startswith(told)


@pytest.mark.parametrize("given", ["nan", "inf", "-1", "1e9"])
def test_a_wait_that_no_clock_can_keep_is_refused(tmp_path, job, given, monkeypatch, capsys):
    argv = ["raybench", "sweep", str(tmp_path / "job.yaml"), "--dry-run", "--wait", given]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    told = f"--wait {float(given):g}: must be from 0 to 1,000,000 seconds\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize(("oversubscribe", "wanted"), [("false", 7), ("true", 4)])
def test_points_beside_each_other_ask_for_more_devices_but_not_on_cores_that_they_share(
    tmp_path, monkeypatch, oversubscribe, wanted
):
    path = tmp_path / "job.yaml"
    path.write_text(
        "version: 1\nname: a\nworkload: {kind: mlp}\n"
        "matrix: {world_size: [1, 2, 4], batch_size: 4}\n"
        f"placement: {{isolation: device, oversubscribe: {oversubscribe}}}\n"
    )
    asked = []

    def connect(_address, _device, count, **_):
        asked.append(count)
        raise ClusterError("seen")

    monkeypatch.setattr("raybench.sweep.runner.connect", connect)
    argv = ["sweep", str(path), "-o", str(tmp_path / "results"), "--address", "local"]
    with pytest.raises(ClusterError, match="seen"):
        cli.raybench.main([*argv, "--device", "cpu"], standalone_mode=False)
    assert asked == [wanted]


def test_a_search_without_a_maximum_leaves_no_run_on_cpu_workers(tmp_path, monkeypatch):
    path = tmp_path / "job.yaml"
    path.write_text("version: 1\nname: a\nworkload: {kind: mlp}\nmatrix: {batch_size: auto}\n")
    cpus = LocalCluster([make_device(kind="cpu")], lambda _: pytest.fail("a worker started"))
    monkeypatch.setattr("raybench.sweep.runner.connect", lambda *_, **__: cpus)
    argv = ["raybench", "sweep", str(path), "-o", str(tmp_path / "results")]
    with pytest.raises(UsageError, match="auto on CPU workers"):
        cli.raybench.main(argv[1:], standalone_mode=False)
    assert not (tmp_path / "results" / "runs").exists()


def test_a_disk_that_is_full_is_told_once_and_what_is_written_stays(
    sweeping, tmp_path, monkeypatch
):
    def script(point, _):
        if point.batch_size == 2:
            monkeypatch.setattr(RunStore, "_write", full)
        return make_measurement()

    def full(self, table, *_):
        raise ResultsError(f"{table}: no space left")

    with pytest.raises(ResultsError, match=r"^samples: no space left$"):
        sweeping(make_cluster([make_device()], script))
    assert sweeping.said.splitlines()[-2] + "\n" == GO_ON
    assert sweeping.said.splitlines()[-1].startswith("stopped: 1 finished point is kept; see: ")
    assert list(pd.read_parquet(tmp_path / "results" / "points")["status"]) == ["ok"]


def test_rows_that_are_removed_while_the_sweep_runs_are_told_and_left_to_be_run(sweeping, tmp_path):
    def script(point, _):
        if point.batch_size == 2:
            shutil.rmtree(tmp_path / "results" / "points")
        return make_measurement()

    with pytest.raises(ResultsError, match=r"points/run-a: the rows of 1 point were removed"):
        sweeping(make_cluster([make_device()], script))
    assert GO_ON in sweeping.said
    assert "stopped: 1 finished point is kept; see: " in sweeping.said
    assert stored_status(tmp_path) == "failed"
    assert len(pd.read_parquet(tmp_path / "results" / "points")) == 1


def test_a_folder_that_cannot_be_written_is_told_before_ray_starts(
    tmp_path, job, monkeypatch, capsys
):
    monkeypatch.setattr("raybench.sweep.runner.run_sweep", lambda *_: pytest.fail("went on"))
    (tmp_path / "file").touch()
    argv = ["raybench", "sweep", str(tmp_path / "job.yaml"), "-o", str(tmp_path / "file")]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("file is not a folder; choose another folder\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sweep"], "Missing argument 'JOB'; see: raybench sweep --help\n"),
        (["swep"], "unknown command 'swep'; did you mean 'sweep'?\n"),
        (["repot"], "unknown command 'repot'; did you mean 'report'?\n"),
        (["report", "--xyz"], "No such option '--xyz'; see: raybench report --help\n"),
        (
            ["plan", "job.yaml", "--nodes", "0"],
            "Invalid value for '--nodes': 0 is not in the range x>=1; see: raybench plan --help\n",
        ),
    ],
)
def test_a_mistake_in_the_command_is_one_line(words, told, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["raybench", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == told


def test_a_command_to_be_typed_is_quoted_and_called_as_this_one_was(
    tmp_path, job, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["/x/raybench/__main__.py", "init", "my job.yaml"])
    monkeypatch.chdir(tmp_path)
    for words, told in (
        (["init", "my job.yaml"], "look at its points with: python -m raybench plan 'my job.yaml'"),
        (["list"], "`python -m raybench sweep JOB` makes one"),
    ):
        monkeypatch.setattr("sys.argv", ["/x/raybench/__main__.py", *words])
        with pytest.raises(SystemExit):
            cli.main()
        assert told in "".join(capsys.readouterr())
    store = RunStore.create(tmp_path / "two words", make_run("run-a"), make_measure())
    start = RunState(
        run=make_run("run-a"),
        rounds=Rounds(plan=make_plan(job)),
        ended={TrialKey("1"): Status.OK},
        before=Before(chosen=()),
        is_resumed=True,
        resume_command="",
    )
    console = Console(file=io.StringIO(), width=200)
    RunRows(start, store, ConsoleListener(console)).tell_kept("stopped")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith(
        f"see: python -m raybench report run-a --results '{store.root}'\n"
    )


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({"PYTHONUTF8": "1"}, b"k=\xfe"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"k=\xc3\xa9"),
    ],
)
def test_bytes_that_are_no_text_here_are_one_line(variables, given, tmp_path):
    command = [*map(str.encode, (sys.executable, "-m", "raybench", "list", "--results")), given]
    done = subprocess.run(
        command, capture_output=True, cwd=tmp_path, env={**os.environ, **variables}
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"arguments must be UTF-8 and the locale too, given b'k=")
    assert done.stderr.count(b"\n") == 1


def test_a_reader_of_the_help_that_has_left_is_no_error():
    piped = f"{shlex.quote(sys.executable)} -m raybench --help | :"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {piped}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_of_the_progress_that_has_left_does_not_end_the_sweep():
    reader, writer = os.pipe()
    os.close(reader)
    script = (
        "from raybench.cli.output import make_console, say\n"
        "from raybench.cli.output import keep_stderr_usable\n"
        "keep_stderr_usable()\n"
        "console = make_console()\n"
        "for number in range(3): say(console, str(number))\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"went on\n")


def test_a_bad_tag_is_told_by_a_dry_run_too(tmp_path, job, monkeypatch, capsys):
    argv = ["raybench", "sweep", str(tmp_path / "job.yaml"), "--dry-run", "--tag", "rack"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "--tag rack: expected KEY=VALUE" in capsys.readouterr().err


def test_a_lost_point_is_tried_once_more_and_counts_as_its_last_attempt(sweeping, tmp_path):
    calls = []

    def script(point, rank):
        calls.append(point.batch_size or 0)
        if len(calls) == 1:
            return Failure(rank=rank, status=Status.LOST, error_type="Died", message="gone")
        return make_measurement()

    run, said = sweeping(make_cluster([make_device()], script))
    assert calls == [1, 1, 2]
    assert (run.status, run.points_ok, run.points_failed) == (RunStatus.OK, 2, 0)
    assert "rank 0 (host-a, cuda:0): gone (tried once more)" in said
    points = pd.read_parquet(tmp_path / "results" / "points")
    assert list(zip(points["status"], points["attempt"], strict=True)) == [
        ("lost", 1),
        ("ok", 2),
        ("ok", 1),
    ]


@pytest.fixture
def resume(tmp_path, job, monkeypatch):
    """`raybench sweep --resume run-a` of a run that ended so; the Start that it came to."""
    results = tmp_path / "results"
    first = make_plan(job).points[0]
    code = code_of("raybench.workloads.mlp")

    def call(status, *options, **of_run):
        settings = {
            "job_sha256": job.meaning_sha256,
            "job_text": job.text,
            "status": RunStatus.INTERRUPTED,
            "points_total": 2,
            "workload_files": code.workload,
            "raybench_sha256": code.raybench_sha256,
        }
        run = make_run("run-a", **(settings | of_run))
        store = RunStore.create(results, run, make_measure())
        store.write_records([(0, make_failed(first, status=status))])
        starts = []

        def run_sweep(_, start, *__):
            starts.append(start)
            return count_points(start.run, by_point(start.ended))

        monkeypatch.setattr("raybench.sweep.runner.run_sweep", run_sweep)
        path = str(tmp_path / "job.yaml")
        argv = ["raybench", "sweep", path, "-o", str(results), "--resume", "run-a", *options]
        monkeypatch.setattr("sys.argv", argv)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        call.code = stopped.value.code
        return starts[0] if starts else None

    return call


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
def test_a_resumed_run_has_left_what_is_not_ok(resume, job, status, options, attempts):
    start = resume(status, *options)
    made = start.before.made
    left = {key.point_id: made.get(key.point_id, 0) + 1 for key in start.todo}
    assert [left.get(p.point_id) for p in make_plan(job).points] == attempts
    assert (start.run.run_id, start.run.points_total, start.run.finished_at) == ("run-a", 2, None)
    assert start.run.started_at == make_run().started_at
    ran_out = status is Status.OOM and not options
    assert [p.batch_size for p in start.ran_out] == [1] * ran_out
    words = shlex.split(start.resume_command)
    assert words[3:5] == ["--resume", "run-a"]
    assert words[5] == "-o"
    assert tuple(words[7:]) == options


def test_the_pause_before_a_run_goes_on_is_added_to_those_before(resume):
    ended_at = datetime.now(UTC) - timedelta(hours=1)
    start = resume(Status.CANCELLED, finished_at=ended_at, paused_s=10.0)
    assert 3610 <= start.run.paused_s < 3700
    assert make_run().paused_s is None


def test_what_a_killed_driver_left_half_written_is_gone_when_its_run_goes_on(resume, tmp_path):
    folder = tmp_path / "results" / "samples" / "run-a"
    folder.mkdir(parents=True)
    (folder / ".00001-0123456789ab-1.parquet.4711").write_bytes(b"PAR1")
    (folder / ".theirs").touch()
    assert resume(Status.OK)
    assert [path.name for path in folder.iterdir()] == [".theirs"]


def test_a_run_without_points_left_says_so_and_exits_by_its_rows(resume, capsys):
    assert resume(Status.OOM, "--filter", "batch_size == 1") is None
    assert resume.code == 1
    said = capsys.readouterr()
    assert "run run-a: nothing to do; the points that failed: --retry-failed" in said.err
    assert "run-a" in said.out


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_dry_run_without_points_left_says_so_and_prints_no_report(resume, capsys, options):
    assert resume(Status.OOM, "--filter", "batch_size == 1", "--dry-run", *options) is None
    assert resume.code == 0
    said = capsys.readouterr()
    assert said.err == "run run-a: nothing to do; the points that failed: --retry-failed\n"
    assert (json.loads(said.out)["points"] == []) if options else (said.out == "")


def test_a_job_that_means_something_else_is_refused_and_the_settings_are_named(resume, capsys):
    options = ("--set", "measure.timeout_s=99", "--set", "matrix.batch_size=1,2,3")
    assert resume(Status.OK, *options) is None
    assert resume.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "matrix.batch_size was [1, 2], is [1, 2, 3], measure.timeout_s was " in line


@pytest.mark.parametrize(
    ("of_run", "told"),
    [
        (
            {"workload_files": {"raybench/workloads/mlp.py": "0", "gone.py": "1"}},
            "gone.py is gone, raybench/workloads/__init__.py is new, "
            "raybench/workloads/base.py is new",
        ),
        ({"raybench_sha256": "0" * 64}, "raybench itself has changed; "),
    ],
)
def test_a_program_that_is_another_by_now_is_refused_and_its_files_are_named(
    resume, capsys, of_run, told
):
    assert resume(Status.OK, **of_run) is None
    assert resume.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--resume run-a: the code is not that of the run: {told}" in line
    assert line.endswith("; resume it with the same code, or start a new run")


def test_a_run_that_does_not_tell_of_its_code_goes_on_with_a_warning(resume, capsys):
    start = resume(Status.OK, workload_files={}, raybench_sha256=None)
    assert start is not None
    assert start.run.raybench_sha256 is None  # of its points, some are of code that nobody knows
    assert start.code.raybench_sha256
    (line,) = capsys.readouterr().err.splitlines()[:1]
    assert line.startswith("run run-a does not tell of which code its points are")


def test_a_run_that_another_driver_writes_is_refused_in_one_line(resume, tmp_path, capsys):
    with hold_run(tmp_path / "results", "run-a"):
        assert resume(Status.OK) is None
    assert resume.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run run-a is being written by another sweep" in line


def test_devices_that_come_during_the_run_have_their_rows(tmp_path, job):
    run, plan = make_run("run-a"), make_plan(job)
    store = RunStore.create(tmp_path, run, make_measure())
    start = RunState(
        run=run, rounds=Rounds(plan=plan), before=Before(), is_resumed=False, resume_command=""
    )
    rows = RunRows(start, store, ConsoleListener(Console(file=io.StringIO())))
    first, second = make_device(), make_device("b")
    for devices in ([first], [first], [first, second], [first, second]):
        rows.keep_devices(devices)
    assert sorted(pd.read_parquet(tmp_path / "devices")["host"]) == ["host-a", "host-b"]


def test_devices_of_another_model_do_not_go_into_a_resumed_run(tmp_path, job):
    run, plan = make_run("run-a"), make_plan(job)
    store = RunStore.create(tmp_path, run, make_measure())
    start = RunState(
        run=run,
        rounds=Rounds(plan=plan),
        before=Before(),
        models=frozenset({"Other GPU"}),
        is_resumed=True,
        resume_command="",
    )
    cluster = make_cluster([make_device()], lambda *_: make_measurement())
    console = Console(file=io.StringIO())
    rows, interrupts = (
        RunRows(start, store, ConsoleListener(console)),
        Interrupts(ConsoleListener(console)),
    )
    with pytest.raises(ClusterError, match="was measured on Other GPU, this cluster has Test GPU"):
        record_run(SETTINGS, cluster, 1, rows, interrupts)
