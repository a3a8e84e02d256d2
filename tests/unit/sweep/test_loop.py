"""Each point becomes one record, whatever its workers answer."""

import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from unittest.mock import Mock

import builders
import pytest
from fakes import (
    ChangingCluster,
    ScriptedSource,
    make_devices,
    make_measurement,
    make_plan_of,
    make_point,
    make_settings,
    make_started,
    measured,
)

from raybench.errors import DETAIL_CHARACTERS, ClusterError
from raybench.job.model import BatchSearch, Measure
from raybench.job.plan import Plan
from raybench.records.measurement import Failure
from raybench.records.record import TrialKey
from raybench.records.status import Status
from raybench.records.task import Task
from raybench.sweep import loop, point_record
from raybench.sweep.rounds import Attempt, Rounds


def begun(plan, cluster, written, source=None, stopping=lambda: False, count=1, **settings):
    """The events of a sweep, of which the records go to `written` with their indices."""
    rounds, chosen = Rounds(plan=plan, count=count), make_settings(**settings)
    return loop.sweep(rounds, chosen, cluster, written.extend, source, stopping)


def run(plan, cluster, **more):
    written = []
    events = list(begun(plan, cluster, written, **more))
    return [record for _, record in written], events


def statuses(records):
    return [record.status for record in records]


def together(parties):
    """A script that goes on only when so many points are in it at the same time."""
    meeting = threading.Barrier(parties, timeout=20)

    def script(point, rank):
        if rank == 0:
            meeting.wait()
        return make_measurement(rank)

    return script


def failure(rank, status, error_type="X", message="because"):
    return Failure(rank=rank, status=status, error_type=error_type, message=message)


def failing(status, *batch_sizes):
    """A script of which the points of these batch sizes fail."""

    def script(point, rank):
        return failure(rank, status) if point.batch_size in batch_sizes else measured(point, rank)

    return script


@pytest.fixture
def stuck():
    """A script of which each point waits until the test is over."""
    release = threading.Event()

    def script(point, rank):
        release.wait(30)
        return make_measurement(rank)

    yield script
    release.set()


def test_a_point_has_measurements_in_rank_order():
    records, events = run(make_plan_of(1, 3), make_started(make_devices(a=3)))
    assert statuses(records) == [Status.OK, Status.OK]
    assert [m.rank for m in records[1].measurements] == [0, 1, 2]
    assert [type(event) for event in events] == [loop.PointStarted, loop.PointFinished] * 2


def test_a_failed_rank_discards_measurements_and_is_named():
    def script(point, rank):
        failed = failure(1, Status.OOM)
        ranks = [failure(0, Status.LOST, "PeerFailed"), replace(failed, detail="in f")]
        return ranks[rank] if rank < 2 else make_measurement(rank)

    [record], _ = run(make_plan_of(3), make_started(make_devices(a=3), script))
    assert (record.status, record.measurements) == (Status.OOM, ())
    assert record.error_message == "because"
    assert (record.error_rank, record.error_detail) == (1, "in f")


def test_oom_skips_larger_batches():
    plan = Plan(points=tuple(make_point(batch_size=size) for size in (16, 32, 64, 8)))
    records, _ = run(plan, make_started(make_devices(a=1), failing(Status.OOM, 32)))
    assert [record.point.batch_size for record in records] == [8, 16, 32, 64]
    assert statuses(records) == [Status.OK, Status.OK, Status.OOM, Status.SKIPPED]
    assert records[3].error_message == "oom at batch_size 32"


@pytest.mark.parametrize(
    ("status", "stop_on_error", "search", "expected"),
    [
        (Status.ERROR, False, None, Status.OK),
        (Status.ERROR, True, None, Status.SKIPPED),
        (Status.OOM, True, None, Status.SKIPPED),
        (Status.OOM, True, BatchSearch(start=1), Status.OK),
    ],
)
def test_only_on_error_stop_skips_points_after_failures(status, stop_on_error, search, expected):
    plan = make_plan_of(1, 1, 2, batch_search=search)
    cluster = make_started(make_devices(a=2), failing(status, 2))
    records, _ = run(plan, cluster, stop_on_error=stop_on_error)
    assert statuses(records) == [Status.OK, status, expected]
    is_named = plan.points[1].point_id in (records[2].error_message or "")
    assert is_named == (expected is Status.SKIPPED)


def test_an_interrupt_in_a_point_thread_cancels_it():
    cluster = make_started(make_devices(a=1), Mock(side_effect=KeyboardInterrupt))
    told = [(0, Status.CANCELLED, "by the user")]
    assert in_flight(cluster, KeyboardInterrupt, make_plan_of(1)) == told


def test_only_chosen_points_run_with_their_plan_indices():
    plan, written = make_plan_of(1, 1, 1), []
    chosen = plan.points[1].point_id
    rounds = Rounds(plan=plan, attempts_before={chosen: 2}, chosen=[chosen])
    list(loop.sweep(rounds, make_settings(), make_started(make_devices(a=1)), written.extend))
    assert [(index, one.point.batch_size, one.attempt) for index, one in written] == [(1, 2, 3)]


def test_isolation_device_runs_points_at_once():
    cluster = make_started(make_devices(a=4), together(2))
    records, events = run(make_plan_of(2, 2), cluster, isolation="device")
    assert [type(event) for event in events] == [loop.PointStarted] * 2 + [loop.PointFinished] * 2
    assert statuses(records) == [Status.OK] * 2
    ids = {record.point.point_id for record in records}
    assert all({record.point.point_id, *record.neighbours} == ids for record in records)
    assert sorted(device.index for one in records for device in one.devices) == [0, 1, 2, 3]


def test_only_points_that_overlapped_are_neighbours():
    first_is_done = threading.Event()

    def script(point, rank):
        if point.batch_size == 1:
            first_is_done.wait(20)
        elif point.batch_size == 3:
            first_is_done.set()
            time.sleep(0.1)
        return make_measurement(rank)

    cluster = make_started(make_devices(a=2), script)
    records, _ = run(make_plan_of(1, 1, 1), cluster, isolation="device")
    by_batch = {record.point.batch_size: record for record in records}
    ids = {batch: record.point.point_id for batch, record in by_batch.items()}
    assert set(by_batch[1].neighbours) == {ids[2], ids[3]}
    assert by_batch[2].neighbours == (ids[1],)
    assert by_batch[3].neighbours == (ids[1],)


def test_records_are_written_on_the_calling_thread():
    threads = []
    list(
        loop.sweep(
            Rounds(plan=make_plan_of(1, 1)),
            make_settings(isolation="device"),
            make_started(make_devices(a=2), together(2)),
            lambda _: threads.append(threading.current_thread()),
        )
    )
    assert set(threads) == {threading.current_thread()}


def test_stopping_finishes_running_points_and_retries_none():
    ended = []
    meet = together(2)

    def script(point, rank):
        meet(point, rank)
        ended.append(True)
        return make_measurement(rank) if point.batch_size == 1 else failure(rank, Status.LOST)

    cluster = make_started(make_devices(a=2), script)
    plan = make_plan_of(1, 1, 1, 1)
    records, events = run(plan, cluster, isolation="device", stopping=lambda: bool(ended))
    assert {record.point.batch_size for record in records} == {1, 2}
    assert not any(isinstance(event, loop.PointRetried) for event in events)


def in_flight(cluster, error, plan, *, before=lambda: None):
    """The rows that are written when the sweep ends with `error`."""
    written = []
    events = begun(plan, cluster, written, isolation="device")
    before()
    with pytest.raises(error):
        list(events)
    return [(index, record.status, record.error_message) for index, record in written]


def test_an_interrupt_does_not_wait_for_stuck_points(stuck):
    def interrupt():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    began_s = time.monotonic()
    # A shell that runs the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cluster = make_started(make_devices(a=2), stuck)
    written = in_flight(cluster, KeyboardInterrupt, make_plan_of(1, 1, 1), before=interrupt)
    # The points are stuck for 30 s.
    assert time.monotonic() - began_s < 15
    assert written == [(index, Status.CANCELLED, "by the user") for index in (0, 1)]


def test_a_lost_cluster_makes_running_points_lost(stuck):
    meet = together(2)

    def script(point, rank):
        meet(point, rank)
        if point.batch_size == 1:
            raise ClusterError("Ray's head does not answer")
        return stuck(point, rank)

    cluster = make_started(make_devices(a=2), script)
    written = in_flight(cluster, ClusterError, make_plan_of(1, 1, 1))
    assert written == [(index, Status.LOST, "Ray's head does not answer") for index in (0, 1)]


def test_losing_the_cluster_after_measuring_keeps_all_rows(monkeypatch):
    cluster = make_started(make_devices(a=1))
    asked = iter([None, None])

    def refresh(_):
        if next(asked, "gone") == "gone":
            raise ClusterError("Ray's head does not answer")

    monkeypatch.setattr(cluster, "refresh", refresh)
    records, events = run(make_plan_of(1, 1), cluster)
    assert statuses(records) == [Status.OK] * 2
    assert sum(isinstance(event, loop.PointFinished) for event in events) == 2


def test_closing_the_sweep_cancels_running_points(stuck):
    written, cluster = [], make_started(make_devices(a=2), stuck)
    with closing(begun(make_plan_of(1, 1), cluster, written, isolation="device")) as events:
        next(events)
        # With the second event the first point is on its way, and the second is not yet.
        next(events)
    assert [(index, record.status) for index, record in written] == [(0, Status.CANCELLED)]


def test_cut_off_points_name_their_neighbours(stuck):
    written, cluster = [], make_started(make_devices(a=2), stuck)
    plan = make_plan_of(1, 1)
    with closing(begun(plan, cluster, written, isolation="device")) as events:
        assert [type(next(events)) for _ in plan.points] == [loop.PointStarted] * 2
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(events)
    first, second = (point.point_id for point in plan.points)
    told = [(record.status, record.neighbours) for _, record in written]
    assert told == [(Status.CANCELLED, (second,)), (Status.CANCELLED, (first,))]


def test_follow_up_points_run_after_the_plan():
    def follow(record):
        size = record.point.batch_size
        return (make_point(batch_size=2 * size),) if size < 8 else ()

    plan, written = Plan(points=(make_point(batch_size=2), make_point(batch_size=64))), []
    cluster = make_started(make_devices(a=1))
    events = list(begun(plan, cluster, written, source=ScriptedSource(follow_ups=follow)))
    ran = [(index, record.point.batch_size) for index, record in written]
    assert ran == [(0, 2), (1, 64), (2, 4), (3, 8)]
    assert [event.index for event in events if isinstance(event, loop.PointAdded)] == [2, 3]


def test_oom_in_an_earlier_sweep_skips_larger_batches():
    kept = {TrialKey(make_point(batch_size=2).point_id): Status.OOM}
    rounds, written = Rounds(plan=make_plan_of(1, 1, 1), kept=kept), []
    list(loop.sweep(rounds, make_settings(), make_started(make_devices(a=1)), written.extend))
    assert statuses(record for _, record in written) == [Status.OK, Status.SKIPPED]


def test_points_that_fit_run_before_workers_join():
    devices = make_devices(a=2, b=2)
    cluster = ChangingCluster(devices[:2], measured, late=devices[2:])
    cluster.start(2, "pack")
    records, _ = run(make_plan_of(4, 2, 8, baseline={"world_size": 2}), cluster, count=2)
    told = [(len(r.devices), r.control_of) for r in records if r.round == 1]
    assert told == [(2, 0), (2, 2), (0, 0), (2, 8), (4, 0), (2, 4)]  # a control ends its block


def test_a_device_that_comes_late_is_used_meanwhile():
    first_is_running, second_has_begun = threading.Event(), threading.Event()

    class WhileOneRuns(ChangingCluster):
        def refresh(self, timeout_s):
            super().refresh(1.0 if first_is_running.is_set() else 0.0)

    def script(point, rank):
        if point.batch_size == 1:
            first_is_running.set()
            if not second_has_begun.wait(20):
                return failure(rank, Status.ERROR)
        second_has_begun.set()
        return make_measurement(rank)

    devices = make_devices(a=2)
    cluster = WhileOneRuns(devices[:1], script, late=devices[1:])
    cluster.start(1, "pack")
    records, _ = run(make_plan_of(1, 1), cluster, isolation="device")
    assert statuses(records) == [Status.OK] * 2


def test_a_late_node_sorting_first_renumbers_no_device():
    late, *early = make_devices(a=1, b=1)
    cluster = ChangingCluster(early, measured, late=[late])
    cluster.start(1, "pack")
    points = (make_point(devices="0"), make_point(devices="1"), make_point(world_size=2))
    records, _ = run(Plan(points=points), cluster, count=2)
    used = {(r.round, r.point.devices): [d.node_id for d in r.devices] for r in records}
    assert used == {
        **{(number, "0"): ["b"] for number in (1, 2)},
        **{(number, "1"): ["a"] for number in (1, 2)},
        **{(number, "any"): ["a", "b"] for number in (1, 2)},
    }


def test_only_cold_devices_are_heated(monkeypatch):
    clock_s = 1000.0

    def script(point, rank):
        nonlocal clock_s
        clock_s += (20.0 if point.batch_size == 2 else 4.0) * (rank == 0)
        return failure(rank, Status.ERROR) if point.batch_size == 5 else make_measurement(rank)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock_s))
    settings = {"measure": Measure(heat_s=30.0)}
    # The second device is cold at first, and again after 20 s of the first one alone.
    plan = make_plan_of(1, 1, 2, 2)
    _, events = run(plan, make_started(make_devices(a=2), script), **settings)
    heated_s = [event.heat_s for event in events if isinstance(event, loop.PointStarted)]
    assert heated_s == [30.0, 0.0, 30.0, 0.0]
    # A point that failed may have heated nothing.
    failed = Plan(points=tuple(make_point(batch_size=batch) for batch in (5, 6, 7)))
    _, events = run(failed, make_started(make_devices(a=1), script), **settings)
    heated_s = [event.heat_s for event in events if isinstance(event, loop.PointStarted)]
    assert heated_s == [30.0, 30.0, 0.0]


def test_a_lost_node_moves_its_point_elsewhere():
    def script(point, rank):
        if point.world_size == 2 and not cluster.gone:
            cluster.gone.update((0, 1))
            return failure(rank, Status.LOST, "NodeLost")
        return make_measurement(rank)

    cluster = ChangingCluster(make_devices(a=2, b=2), script)
    cluster.start(4, "pack")
    records, _ = run(make_plan_of(2, 2, 4), cluster)
    assert [record.point.world_size for record in records] == [2, 2, 2, 4]
    assert statuses(records) == [Status.LOST, Status.OK, Status.OK, Status.LOST]
    assert {device.node_id for device in records[1].devices} == {"b"}
    assert records[3].error_message == "needs 4 devices, 2 left; lost: node host-a"


def test_a_lost_point_is_tried_once_more():
    cluster = make_started(make_devices(a=1), failing(Status.LOST, 1))
    records, events = run(make_plan_of(1, 1), cluster)
    told = [(record.point.batch_size, record.attempt, record.status) for record in records]
    assert told == [(1, 1, Status.LOST), (1, 2, Status.LOST), (2, 1, Status.OK)]
    retried = [event.record for event in events if isinstance(event, loop.PointRetried)]
    assert retried == records[:1]


def submitted(running, cluster, sizes):
    """Start a point for each batch size, and return when the last has ended."""
    for index, size in enumerate(sizes):
        attempt = Attempt(index=index, point=make_point(batch_size=size), number=1)
        task, before = Task(point=attempt.point, settings=Measure()), set(threading.enumerate())
        running.submit(attempt, task, (0,), cluster.devices)
        for thread in set(threading.enumerate()) - before:
            thread.join()


@pytest.fixture
def one_device():
    def answer(point, rank):
        if point.batch_size == 13:
            raise ClusterError("the head is gone")
        return make_measurement(rank)

    return make_started(make_devices(a=1), answer)


def test_finished_attempts_are_taken_in_batches_of_64(one_device):
    running = loop.InFlight(one_device)
    submitted(running, one_device, range(20, 90))
    taken = [running.next_finished(None), running.next_finished(None)]
    assert [len(each) for each in taken] == [64, 6]
    indices = [attempt.index for each in taken for attempt, _ in each]
    assert indices == list(range(70))
    assert not running.running
    assert running.next_finished(0.01) == []


def test_attempts_finished_before_losing_the_cluster_are_kept(one_device):
    running = loop.InFlight(one_device)
    submitted(running, one_device, [1, 2, 13])
    assert [attempt.index for attempt, _ in running.next_finished(None)] == [0, 1]
    with pytest.raises(ClusterError, match="the head is gone"):
        running.next_finished(None)
    assert [*running.running] == [2]


def record_of(point=None, *, status=Status.ERROR, error_type="ValueError", **facts):
    """The record of rank 0, which failed, and rank 1, which wrote nothing."""
    failure = Failure(rank=0, status=status, error_type=error_type, message="no", **facts)
    attempt = Attempt(index=0, point=point or make_point(), number=1)
    running = point_record.RunningAttempt(
        attempt=attempt,
        devices=(builders.make_device(), builders.make_device(1)),
        started_at=datetime.now(UTC),
        outcome=(failure, replace(failure, rank=1, output="")),
    )
    return point_record.make_record(running)


def test_the_last_output_lines_follow_the_traceback():
    lines = [f"line {number}" for number in range(20)]
    record = record_of(detail="Traceback\nValueError: no", output="\n".join(lines))
    last = ["the last lines that rank 0 wrote:", *lines[-10:]]
    assert record.error_detail.splitlines() == ["Traceback", "ValueError: no", "", *last]
    assert record.outputs == ("\n".join(lines), "")


def test_script_exit_message_ends_with_its_last_line():
    output = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x"
    message = record_of(output=output, error_type="ScriptExit").error_message
    assert message.endswith("no; its last line: train.py: error: unrecognized arguments: --x")
    assert "last line" not in record_of(output=output).error_message


@pytest.mark.parametrize("output", ["", "o" * DETAIL_CHARACTERS])
def test_error_detail_is_cut_to_the_maximum_length(output):
    found = record_of(detail="t" * (DETAIL_CHARACTERS + 1), output=output)
    assert len(found.error_detail) == DETAIL_CHARACTERS
    assert found.error_detail.startswith("[cut: ")


def test_oom_message_names_estimate_and_fitting_batch():
    params = {"grad_accumulation": 1, "hidden": 65_536, "layers": 1, "mode": "train"}
    point = make_point(params=params, batch_size=4_194_304)
    record = record_of(point, status=Status.OOM, error_type="OutOfMemoryError")
    assert record.mem_estimate_bytes
    assert "no; by an estimate, the point needs " in record.error_message
    assert " has 140 GiB; what should fit: batch_size " in record.error_message
