"""How a sweep ends, told apart by its exit, its row and its words; without Ray."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from builders import make_measure, make_run
from fakes import make_cluster, make_device, make_measurement
from rich.console import Console

from raybench.cli import sweep as command
from raybench.cli.interrupts import interrupt_held_back
from raybench.cli.progress import LineProgress
from raybench.cluster import Cluster
from raybench.errors import ClusterError
from raybench.job import Job, load_job
from raybench.plan import Point, make_plan
from raybench.records import Answer, Profile, Run, RunStatus
from raybench.store import RunStore
from raybench.sweep import Event, PointFinished, SweepSettings

SETTINGS = SweepSettings(measure=make_measure(), strategy="pack", stop_on_error=False)


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
def recorded(tmp_path: Path, job: Job) -> Callable[[Cluster], tuple[Run, str]]:
    def call(cluster: Cluster) -> tuple[Run, str]:
        run = make_run("run-a", status=RunStatus.RUNNING, finished_at=None)
        store = RunStore.create(tmp_path / "results", run, make_measure())
        console = Console(file=io.StringIO(), width=200)
        try:
            ended = command._recorded(SETTINGS, make_plan(job), run, cluster, 1, store, console)
        finally:
            assert isinstance(console.file, io.StringIO)
            call.said = console.file.getvalue()
        return ended, call.said

    return call


def stored_status(tmp_path: Path) -> str:
    return str(pd.read_parquet(tmp_path / "results" / "runs")["status"].item())


def test_an_interrupt_while_workers_start_leaves_no_run_that_seems_to_go_on(
    recorded, tmp_path: Path
) -> None:
    run, said = recorded(NoWorkers(KeyboardInterrupt()))
    assert run.status is RunStatus.INTERRUPTED
    assert stored_status(tmp_path) == "interrupted"
    assert said == "interrupted before any point finished\n"


def test_workers_that_cannot_start_make_the_run_failed_and_the_error_goes_on(
    recorded, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match="no room"):
        recorded(NoWorkers(ClusterError("no room")))
    assert stored_status(tmp_path) == "failed"
    assert recorded.said == "stopped before any point finished\n"


def test_a_point_whose_row_is_written_counts_even_if_the_interrupt_comes_as_it_is_shown(
    recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: LineProgress, event: Event) -> None:
        if isinstance(event, PointFinished):
            raise KeyboardInterrupt

    monkeypatch.setattr(LineProgress, "show", interrupt)
    run, said = recorded(make_cluster([make_device()], lambda *_: make_measurement()))
    assert (run.status, run.points_ok, run.points_failed) == (RunStatus.INTERRUPTED, 1, 0)
    assert said.startswith("interrupted: 1 finished point is kept; see: raybench report run-a ")


def test_the_run_says_where_its_traces_lie(recorded, tmp_path: Path) -> None:
    traced = replace(make_measurement(), profile=Profile(trace=b"gzip"))
    _, said = recorded(make_cluster([make_device()], lambda *_: traced))
    folder = tmp_path / "results" / "traces" / "run-a"
    assert said.splitlines()[-1].startswith(f"traces: {folder} ")
    assert len(list(folder.iterdir())) == 2


def test_the_point_that_an_interrupt_cut_short_is_neither_finished_nor_failed(
    recorded, tmp_path: Path
) -> None:
    def script(point: Point, _: int) -> Answer:
        if point.batch_size == 2:
            raise KeyboardInterrupt
        return make_measurement()

    run, said = recorded(make_cluster([make_device()], script))
    assert (run.points_ok, run.points_failed, run.points_skipped) == (1, 0, 0)
    assert said.splitlines()[-1].startswith("interrupted: 1 finished point is kept")
    assert list(pd.read_parquet(tmp_path / "results" / "points")["status"]) == ["ok", "cancelled"]


def test_a_folder_that_cannot_be_written_is_told_before_ray_starts(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from raybench import cli

    monkeypatch.setattr(command, "_carried_out", lambda *_: pytest.fail("went on"))
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
    from raybench import cli

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
