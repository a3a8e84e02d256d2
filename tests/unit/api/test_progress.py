"""Progress on stderr: plain lines, and on a terminal what is redrawn below them."""

import io

import pytest
from builders import make_device, make_failed, make_measurement, make_point, make_record
from rich.console import Console

from raybench.api.progress import ConsoleListener, PointProgress, show_phase
from raybench.job.plan import Plan
from raybench.records.status import Status
from raybench.sweep.loop import PointAdded, PointFinished, PointRetried, PointStarted

PLAN = Plan(points=tuple(make_point(batch_size=2**power) for power in range(40)), warnings=())
LONG = "CUDA out of memory. " * 30


def console_of(kind):
    file, is_terminal = io.StringIO(), kind != "pipe"
    variables = {"TERM": "dumb" if kind == "dumb" else "xterm"}
    return Console(file=file, force_terminal=is_terminal, width=80, height=24, _environ=variables)


def written(console):
    return console.file.getvalue()


def show_all(progress):
    with progress:
        for index, point in enumerate(PLAN.points):
            progress.show(PointStarted(index=index, point=point, devices=()))
            record = make_record(point)
            if index == 5:
                device = make_device(3, host="a-node-with-a-long-name")
                placed = {"devices": (device,), "error_rank": 0}
                record = make_failed(point, error_message=LONG, **placed)
            if index == 6:
                told = "needs [b]8\x1b[2J"
                record = make_failed(point, status=Status.SKIPPED, error_message=told)
            progress.show(PointFinished(index=index, record=record))


@pytest.mark.parametrize(("kind", "is_redrawn"), [("pipe", False), ("dumb", False), ("tty", True)])
def test_only_terminals_with_cursor_movement_are_redrawn(kind, is_redrawn):
    console = console_of(kind)
    with ConsoleListener(console).waiting("[/x]"), show_phase(console, "[/y] a.yaml:100: b"):
        assert is_redrawn or written(console) == "[/x]\n[/y] a.yaml:100: b\n"  # not as an emoji
    with PointProgress(PLAN, console) as progress:
        progress.show(PointStarted(index=0, point=PLAN.points[0], devices=()))
    assert ("0 of 40 points" in written(console)) is is_redrawn


@pytest.mark.parametrize("kind", ["pipe", "tty"])
def test_every_point_leaves_one_line(kind):
    console = console_of(kind)
    show_all(PointProgress(PLAN, console))
    lines = written(console).splitlines()
    for number in range(1, 41):
        [line] = [line for line in lines if f"[{number:>2}/40]" in line and "runs" not in line]
        assert f"batch {2 ** (number - 1)}" in line
    [oom] = [line for line in lines if "oom" in line]
    assert "rank 0 (a-node-with-a-long-name, cuda:3): CUDA out of memory." in oom
    assert len(oom) < 400
    assert any("needs [b]8\N{REPLACEMENT CHARACTER}[2J" in line for line in lines)


def drawn(progress, console):
    lines = console.render_lines(progress.picture())
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_redrawn_lines_fit_the_screen_and_count_rest():
    console = console_of("tty")
    progress = PointProgress(PLAN, console)
    for index, point in enumerate(PLAN.points):
        progress.show(PointStarted(index=index, point=point, devices=()))
    lines = drawn(progress, console)
    assert len(lines) < 24
    assert lines[0].split() == ["runs", "batch", "1", "0", "s"]
    assert lines[-2] == "and 20 more are running"


def test_finished_and_retried_points_are_not_running():
    console = console_of("tty")
    progress = PointProgress(PLAN, console)
    first, second = PLAN.points[:2]
    for index, point in enumerate((first, second)):
        progress.show(PointStarted(index=index, point=point, devices=()))
    lost = make_failed(first, status=Status.LOST, error_message="rank 0: gone")
    progress.show(PointRetried(index=0, record=lost))
    assert "rank 0: gone (tried once more)" in written(console)
    progress.show(PointFinished(index=1, record=make_record(second)))
    (line,) = drawn(progress, console)
    assert line.startswith("1 of 40 points")


def test_time_left_is_known_at_the_start():
    console = console_of("tty")
    progress = PointProgress(PLAN, console, trials_s=400.0)
    assert drawn(progress, console)[-1] == "0 of 40 points  about 7 min left"
    progress.show(PointFinished(index=0, record=make_record(PLAN.points[0])))
    # The point took no time, and the estimate counts as one more point: half of it is left.
    assert drawn(progress, console)[-1] == "1 of 40 points  about 3 min left"
    without = PointProgress(PLAN, console)
    assert drawn(without, console)[-1] == "0 of 40 points"


def test_a_point_that_is_added_counts():
    console = console_of("pipe")
    progress = PointProgress(Plan(points=PLAN.points[:9]), console)
    added = make_point(batch_size=999)
    progress.show(PointAdded(index=9, point=added))
    progress.show(PointFinished(index=9, record=make_record(added)))
    assert written(console).startswith("[ 1/10]  ok       batch 999  ")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "2.000 ms     32,000 samples/s"),
        ({"message_bytes": 10**9, "busbw_factor": 1.5}, "750.0 GB/s busbw"),
        ({"memory_bytes": 8 * 10**9}, "4,000 GB/s"),
        ({"flops_per_step": 4e11}, "200.0 TFLOP/s"),
    ],
)
def test_finished_point_shows_step_time_and_rate(changes, told):
    items = {"items_per_step": None} if changes else {}
    measurement = make_measurement(0, [[2_000_000] * 6], **items, **changes)
    console = console_of("pipe")
    record = make_record(PLAN.points[0], measurements=(measurement,))
    PointProgress(PLAN, console).show(PointFinished(index=0, record=record))
    assert told in written(console)


def test_heating_is_told_before_its_point():
    console = console_of("pipe")
    devices = (make_device(0), make_device(1))
    started = PointStarted(index=0, point=PLAN.points[0], devices=devices, heat_s=30.0)
    PointProgress(PLAN, console).show(started)
    assert written(console) == "heating 2 devices for 30 s\n"
