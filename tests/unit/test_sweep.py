"""Each point becomes one record, whatever its workers answer."""

import pytest
from fakes import make_cluster, make_device, make_devices, make_measurement, make_point

from raybench.errors import ClusterError
from raybench.job import Measure
from raybench.plan import Plan
from raybench.records import Failure, Status
from raybench.sweep import PointFinished, PointRetried, PointStarted, SweepSettings, sweep


def run(plan, cluster, *, stop_on_error=False):
    settings = SweepSettings(measure=Measure(), strategy="pack", stop_on_error=stop_on_error)
    written = []
    events = list(sweep(plan, settings, cluster, lambda index, record: written.append(record)))
    return written, events


def started(devices, script):
    cluster = make_cluster(devices, script)
    cluster.start(len(devices), "pack")
    return cluster


def failure(rank, status, error_type="X", message="because"):
    return Failure(rank=rank, status=status, error_type=error_type, message=message)


def test_a_measured_point_has_one_measurement_per_rank_in_rank_order():
    plan = Plan(points=(make_point(world_size=1), make_point(world_size=3)))
    cluster = started(make_devices(a=3), lambda point, rank: make_measurement(rank))
    records, events = run(plan, cluster)
    assert [record.status for record in records] == [Status.OK, Status.OK]
    assert [m.rank for m in records[1].measurements] == [0, 1, 2]
    assert [type(event) for event in events] == [PointStarted, PointFinished] * 2


def test_a_record_is_written_before_its_event_is_seen():
    written = []
    cluster = started(make_devices(a=1), lambda point, rank: make_measurement(rank))
    settings = SweepSettings(measure=Measure(), strategy="pack", stop_on_error=False)
    plan = Plan(points=(make_point(),))
    for event in sweep(plan, settings, cluster, lambda index, record: written.append(record)):
        if isinstance(event, PointFinished):
            assert written == [event.record]


def test_one_failed_rank_drops_the_measurements_of_all():
    def script(point, rank):
        return failure(1, Status.OOM) if rank == 1 else make_measurement(rank)

    records, _ = run(Plan(points=(make_point(world_size=2),)), started(make_devices(a=2), script))
    assert records[0].status is Status.OOM
    assert records[0].measurements == ()
    assert records[0].error_message == "rank 1 (host-a, cuda:1): because"


def test_after_a_batch_that_ran_out_of_memory_the_bigger_ones_are_skipped():
    def script(point, rank):
        return failure(0, Status.OOM) if point.batch_size == 32 else make_measurement(rank)

    plan = Plan(points=tuple(make_point(batch_size=size) for size in (16, 32, 64, 8)))
    records, _ = run(plan, started(make_devices(a=1), script))
    assert [record.status for record in records] == [
        Status.OK,
        Status.OOM,
        Status.SKIPPED,
        Status.OK,
    ]
    assert records[2].error_message == "oom at batch_size 32"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(Status.ERROR, "RuntimeError"), (Status.LOST, "WorkerDied")], Status.LOST),
        ([(Status.LOST, "PeerFailed"), (Status.ERROR, "ValueError")], Status.ERROR),
        ([(Status.ERROR, "RuntimeError"), (Status.OOM, "OutOfMemoryError")], Status.OOM),
        ([(Status.TIMEOUT, "Timeout"), (Status.TIMEOUT, "Timeout")], Status.TIMEOUT),
    ],
)
def test_the_cause_is_told_and_not_what_it_did_to_the_peers(answers, expected):
    def script(point, rank):
        return failure(rank, *answers[rank])

    records, _ = run(Plan(points=(make_point(world_size=2),)), started(make_devices(a=2), script))
    assert records[0].status is expected


def test_a_failed_point_costs_no_other_point():
    def script(point, rank):
        return failure(rank, Status.ERROR) if point.batch_size == 2 else make_measurement(rank)

    plan = Plan(points=tuple(make_point(batch_size=n) for n in (1, 2, 4)))
    records, _ = run(plan, started(make_devices(a=1), script))
    assert [record.status for record in records] == [Status.OK, Status.ERROR, Status.OK]


def test_on_error_stop_leaves_the_rest_as_skipped_rows():
    def script(point, rank):
        return failure(rank, Status.ERROR)

    plan = Plan(points=tuple(make_point(batch_size=n) for n in (1, 2)))
    records, _ = run(plan, started(make_devices(a=1), script), stop_on_error=True)
    assert [record.status for record in records] == [Status.ERROR, Status.SKIPPED]
    assert plan.points[0].point_id in (records[1].error_message or "")


def test_a_point_too_big_for_the_cluster_is_a_skipped_row():
    cluster = started(make_devices(a=1), lambda point, rank: make_measurement(rank))
    records, events = run(Plan(points=(make_point(world_size=2), make_point())), cluster)
    assert [record.status for record in records] == [Status.SKIPPED, Status.OK]
    assert records[0].error_message == "needs 2 devices, the cluster has 1"
    assert [type(event) for event in events] == [PointFinished, PointStarted, PointFinished]


@pytest.mark.parametrize(
    ("stop", "status", "message"),
    [
        (KeyboardInterrupt(), Status.CANCELLED, "by the user"),
        (ClusterError("a worker did not start"), Status.LOST, "a worker did not start"),
    ],
)
def test_what_ends_the_sweep_leaves_a_row_of_the_point_in_flight_and_goes_on(stop, status, message):
    def script(point, rank):
        raise stop

    written = []
    settings = SweepSettings(measure=Measure(), strategy="pack", stop_on_error=False)
    cluster = started(make_devices(a=1), script)
    events = sweep(
        Plan(points=(make_point(),)), settings, cluster, lambda _, record: written.append(record)
    )
    with pytest.raises(type(stop)):
        list(events)
    assert [(one.status, one.error_message) for one in written] == [(status, message)]


def test_cpu_workers_that_share_cores_are_told():
    devices = [
        make_device("a", index, kind="cpu", cpu_count=2, uuid=f"a/{index}") for index in range(4)
    ]
    cluster = started(devices, lambda point, rank: make_measurement(rank))
    records, _ = run(Plan(points=(make_point(world_size=2), make_point(world_size=4))), cluster)
    assert records[0].warnings == ()
    assert records[1].warnings == ("4 CPU workers share 2 cores of one node",)


def test_a_lost_point_is_tried_once_more_and_both_attempts_are_rows():
    cluster = started(make_devices(a=1), lambda point, rank: failure(rank, Status.LOST))
    records, events = run(Plan(points=(make_point(),)), cluster)
    assert [(one.status, one.attempt) for one in records] == [(Status.LOST, 1), (Status.LOST, 2)]
    assert [type(event) for event in events] == [
        PointStarted,
        PointRetried,
        PointStarted,
        PointFinished,
    ]


def test_only_the_attempts_asked_for_are_made_and_indices_are_those_of_the_whole_plan():
    plan = Plan(points=tuple(make_point(batch_size=n) for n in (1, 2, 4)))
    cluster = started(make_devices(a=1), lambda point, rank: make_measurement(rank))
    settings = SweepSettings(measure=Measure(), strategy="pack", stop_on_error=False)
    written = []
    attempts = {plan.points[1].point_id: 3}
    list(sweep(plan, settings, cluster, lambda *args: written.append(args), attempts))
    assert [(index, one.point.batch_size, one.attempt) for index, one in written] == [(1, 2, 3)]
