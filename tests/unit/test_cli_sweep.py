"""How a sweep ends, told apart by its exit, its row and its words; without Ray."""

from __future__ import annotations

import io
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from builders import make_failed, make_measure, make_run
from fakes import make_cluster, make_device, make_measurement
from rich.console import Console

from raybench import cli
from raybench.cli import sweep as command
from raybench.cli.interrupts import interrupt_held_back, interrupted_by_sigterm
from raybench.cli.progress import LineProgress
from raybench.cli.recording import Start, recorded
from raybench.cluster import Cluster
from raybench.errors import ClusterError
from raybench.job import Job, load_job
from raybench.plan import make_plan
from raybench.point import Point
from raybench.records import Answer, Failure, Profile, Status
from raybench.run import Run, RunStatus
from raybench.store import RunStore, hold_run
from raybench.sweep import Event, PointFinished, SweepSettings
from raybench.tables import counted

SETTINGS = SweepSettings(measure=make_measure(), strategy="pack", stop_on_error=False)
GO_ON = "go on with: raybench sweep job.yaml --resume run-a\n"


class NoWorkers:
    """A cluster whose start goes wrong."""

    devices = ()
    capacity = 1

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def start(self, count: int, strategy: str) -> None:
        raise self._error


@pytest.fixture
def job(tmp_path: Path) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text("version: 1\nname: a\nworkload: {kind: mlp}\nmatrix: {batch_size: [1, 2]}\n")
    return load_job(path)


@pytest.fixture
def sweeping(tmp_path: Path, job: Job) -> Callable[[Cluster], tuple[Run, str]]:
    def call(cluster: Cluster) -> tuple[Run, str]:
        run = make_run("run-a", status=RunStatus.RUNNING, finished_at=None)
        store = RunStore.create(tmp_path / "results", run, make_measure())
        console, plan = Console(file=io.StringIO(), width=200), make_plan(job)
        try:
            start = Start(
                run=run,
                plan=plan,
                attempts={point.point_id: 1 for point in plan.points},
                ended={},
                is_resumed=False,
                resume_command="raybench sweep job.yaml --resume run-a",
            )
            ended = recorded(SETTINGS, start, cluster, 1, store, console)
        finally:
            assert isinstance(console.file, io.StringIO)
            call.said = console.file.getvalue()
        return ended, call.said

    return call


def stored_status(tmp_path: Path) -> str:
    return str(pd.read_parquet(tmp_path / "results" / "runs")["status"].item())


def test_an_interrupt_while_workers_start_leaves_no_run_that_seems_to_go_on(
    sweeping, tmp_path: Path
) -> None:
    run, said = sweeping(NoWorkers(KeyboardInterrupt()))
    assert run.status is RunStatus.INTERRUPTED
    assert stored_status(tmp_path) == "interrupted"
    assert said == GO_ON + "interrupted before any point finished\n"


def test_workers_that_cannot_start_make_the_run_failed_and_the_error_goes_on(
    sweeping, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match="no room"):
        sweeping(NoWorkers(ClusterError("no room")))
    assert stored_status(tmp_path) == "failed"
    assert sweeping.said == GO_ON + "stopped before any point finished\n"


def test_a_point_whose_row_is_written_counts_even_if_the_interrupt_comes_as_it_is_shown(
    sweeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: LineProgress, event: Event) -> None:
        if isinstance(event, PointFinished):
            raise KeyboardInterrupt

    monkeypatch.setattr(LineProgress, "show", interrupt)
    run, said = sweeping(make_cluster([make_device()], lambda *_: make_measurement()))
    assert (run.status, run.points_ok, run.points_failed) == (RunStatus.INTERRUPTED, 1, 0)
    assert said.startswith(
        GO_ON + "interrupted: 1 finished point is kept; see: raybench report run-a "
    )


def test_the_run_says_where_its_traces_lie(sweeping, tmp_path: Path) -> None:
    traced = replace(make_measurement(), profile=Profile(trace=b"gzip"))
    _, said = sweeping(make_cluster([make_device()], lambda *_: traced))
    folder = tmp_path / "results" / "traces" / "run-a"
    assert said.splitlines()[-1].startswith(f"traces: {folder} ")
    assert len(list(folder.iterdir())) == 2


def test_the_point_that_an_interrupt_cut_short_is_neither_finished_nor_failed(
    sweeping, tmp_path: Path
) -> None:
    def script(point: Point, _: int) -> Answer:
        if point.batch_size == 2:
            raise KeyboardInterrupt
        return make_measurement()

    run, said = sweeping(make_cluster([make_device()], script))
    assert (run.points_ok, run.points_failed, run.points_skipped) == (1, 0, 0)
    assert said.splitlines()[-1].startswith("interrupted: 1 finished point is kept")
    assert list(pd.read_parquet(tmp_path / "results" / "points")["status"]) == ["ok", "cancelled"]


def test_a_folder_that_cannot_be_written_is_told_before_ray_starts(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "carried_out", lambda *_: pytest.fail("went on"))
    (tmp_path / "file").touch()
    argv = ["raybench", "sweep", str(tmp_path / "job.yaml"), "-o", str(tmp_path / "file")]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("file is not a folder; choose another folder\n")


def test_a_bad_tag_is_told_by_a_dry_run_too(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["raybench", "sweep", str(tmp_path / "job.yaml"), "--dry-run", "--tag", "rack"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "--tag rack: expected KEY=VALUE" in capsys.readouterr().err


def interrupted_twice_while_held_back(reached: list[str]) -> None:
    with interrupt_held_back():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after the first")
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after the second")


def interrupted_while_held_back(reached: list[str]) -> None:
    with interrupt_held_back():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the end")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (interrupted_while_held_back, ["the end"]),
        (interrupted_twice_while_held_back, ["after the first"]),
    ],
)
def test_an_interrupt_held_back_comes_after_the_block_and_a_second_one_at_once(
    block: Callable[[list[str]], None], expected: list[str]
) -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        block(reached)
    assert reached == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_lost_point_is_tried_once_more_and_counts_as_its_last_attempt(
    sweeping, tmp_path: Path
) -> None:
    calls: list[int] = []

    def script(point: Point, rank: int) -> Answer:
        calls.append(point.batch_size or 0)
        if len(calls) == 1:
            return Failure(rank=rank, status=Status.LOST, error_type="Died", message="gone")
        return make_measurement()

    run, said = sweeping(make_cluster([make_device()], script))
    assert calls == [1, 1, 2]
    assert (run.status, run.points_ok, run.points_failed) == (RunStatus.OK, 2, 0)
    assert "is tried once more: rank 0 (host-a, cuda:0): gone" in said
    points = pd.read_parquet(tmp_path / "results" / "points")
    assert list(zip(points["status"], points["attempt"], strict=True)) == [
        ("lost", 1),
        ("ok", 2),
        ("ok", 1),
    ]


@pytest.fixture
def resume(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch):
    """`raybench sweep --resume run-a` of a run that ended so; the Start that it came to."""
    results = tmp_path / "results"
    first = make_plan(job).points[0]

    def call(status: Status, *options: str) -> Start | None:
        sha = job.meaning_sha256
        run = make_run(
            "run-a", job_sha256=sha, job_text=job.text, status=RunStatus.INTERRUPTED, points_total=2
        )
        store = RunStore.create(results, run, make_measure())
        store.write_record(0, make_failed(first, status=status))
        starts: list[Start] = []

        def carried_out(_: Job, start: Start, *__: object) -> Run:
            starts.append(start)
            return counted(start.run, start.ended)

        monkeypatch.setattr(command, "carried_out", carried_out)
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
        (Status.LOST, ("--retry-failed",), [2, 1]),
        (Status.OK, ("--retry-failed",), [None, 1]),
        (Status.CANCELLED, ("--filter", "batch_size == 1"), [2, None]),
    ],
)
def test_a_resumed_run_has_left_what_is_not_ok(
    resume, job: Job, status: Status, options: tuple[str, ...], attempts: list[int | None]
) -> None:
    start = resume(status, *options)
    assert [start.attempts.get(p.point_id) for p in make_plan(job).points] == attempts
    assert (start.run.run_id, start.run.points_total, start.run.finished_at) == ("run-a", 2, None)
    assert start.run.started_at == make_run().started_at
    words = shlex.split(start.resume_command)
    assert words[3:5] == ["--resume", "run-a"]
    assert words[5] == "-o"
    assert tuple(words[7:]) == options


def test_a_run_without_points_left_says_so_and_exits_by_its_rows(
    resume, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(Status.OOM, "--filter", "batch_size == 1") is None
    assert resume.code == 1
    said = capsys.readouterr()
    assert "run run-a: nothing to do; the points that failed: --retry-failed" in said.err
    assert "run-a" in said.out


def test_a_job_that_means_something_else_is_refused_and_the_settings_are_named(
    resume, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--set", "measure.timeout_s=99", "--set", "matrix.batch_size=1,2,3")
    assert resume(Status.OK, *options) is None
    assert resume.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "matrix.batch_size was [1, 2], is [1, 2, 3], measure.timeout_s was " in line


def test_a_run_that_another_driver_writes_is_refused_in_one_line(
    resume, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_run(tmp_path / "results", "run-a"):
        assert resume(Status.OK) is None
    assert resume.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run run-a is being written by another sweep" in line


def test_sigterm_is_one_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), interrupted_by_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_devices_of_another_model_do_not_go_into_a_resumed_run(tmp_path: Path, job: Job) -> None:
    run, plan = make_run("run-a"), make_plan(job)
    store = RunStore.create(tmp_path, run, make_measure())
    start = Start(
        run=run,
        plan=plan,
        attempts={point.point_id: 1 for point in plan.points},
        ended={},
        models=frozenset({"Other GPU"}),
        is_resumed=True,
        resume_command="",
    )
    cluster = make_cluster([make_device()], lambda *_: make_measurement())
    with pytest.raises(ClusterError, match="was measured on Other GPU, this cluster has Test GPU"):
        recorded(SETTINGS, start, cluster, 1, store, Console(file=io.StringIO()))
