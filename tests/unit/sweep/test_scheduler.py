"""Which point runs next, and where, also on devices of several models."""

import itertools
import time
from dataclasses import replace

import pytest
from builders import scaling_rows
from fakes import (
    ScriptedWorker,
    make_device,
    make_devices,
    make_measurement,
    make_plan_of,
    make_point,
    make_settings,
)
from hypothesis import given
from hypothesis import strategies as st

from jobs import MLP, plan
from raybench.job.plan import Plan
from raybench.job.point import Precision
from raybench.records.doubts import NotCompared, NotComparedKind
from raybench.records.status import Cause
from raybench.sweep.loop import sweep
from raybench.sweep.rounds import Attempt, Rounds, smaller_batches_first
from raybench.sweep.scheduler import Assign, Schedule, Skip, workers_needed
from tests.local_cluster import LocalCluster


def attempts(points):
    return [Attempt(index=index, point=point, number=1) for index, point in enumerate(points)]


def filled(points, isolation):
    made = Schedule(isolation)
    for attempt in smaller_batches_first(attempts(points)):
        made.add(attempt)
    return made


def schedule(points, devices, isolation="cluster", ran_out=()):
    made = filled(points, isolation)
    for point in ran_out:
        made.note_oom(point)
    made.update_cluster(devices, len(devices), frozenset(), 0)
    return made


def started(made):
    """What starts before anything ends: (index, workers)."""
    return [(d.attempt.index, d.worker_ids) for d in iter(made.next, None) if isinstance(d, Assign)]


def run_sweep(made):
    """All decisions when every point ends before the next one starts."""
    decisions = []
    while (decision := made.next()) is not None:
        decisions.append(decision)
        if isinstance(decision, Assign):
            made.free(decision.attempt)
    return decisions


def skipped(made):
    return {d.attempt.index: (d.cause, d.reason) for d in run_sweep(made) if type(d) is Skip}


@pytest.mark.parametrize(
    ("world_size", "capacity", "lost", "cause", "told"),
    [
        (8, 4, (), "TooFewDevices", "the cluster has 4"),
        (5, 6, (), "TooFewDevices", "4 have a worker: the others did not come"),
        (4, 2, (2, 3), "NodeLost", "2 left; lost: node host-b"),
        (8, 2, (2, 3), "TooFewDevices", "the cluster has 2"),
        (4, 4, (2,), "WorkerLost", "3 left; lost: 1 of the workers on host-b"),
    ],
)
def test_a_point_that_does_not_fit_is_skipped(world_size, capacity, lost, cause, told):
    for kind in ("cuda", "cpu"):
        devices = [replace(device, kind=kind) for device in make_devices(a=2, b=2)]
        made = schedule([make_point(world_size=n) for n in (world_size, 2)], devices)
        made.update_cluster(devices, capacity, frozenset(lost), 0)
        [(of, why)] = skipped(made).values()
        why, _, hint = why.partition("; a private Ray has a CPU worker for each core")
        assert (of, why) == (cause, f"needs {world_size} devices, {told}")
        assert bool(hint) == (kind == "cpu" and told.startswith("the cluster has"))


def test_a_cuda_graph_on_a_cpu_is_skipped():
    gpus = make_devices(a=2)
    cpus = [replace(device, kind="cpu") for device in gpus]
    point = replace(make_point(world_size=2), cuda_graph=True)
    told = "cuda_graph: true needs CUDA devices"
    assert skipped(schedule([point], cpus)) == {0: ("NeedsCuda", told)}
    assert started(schedule([point], gpus)) == [(0, (0, 1))]


def test_only_as_many_workers_start_as_needed():
    plan, too_big = make_plan_of(1, 2, 4, 64), make_plan_of(8)
    assert [workers_needed(plan, 8), workers_needed(plan, 64)] == [4, 64]
    assert [workers_needed(plan, capacity, "device") for capacity in (8, 6)] == [7, 6]
    assert workers_needed(plan, 8, "node") == 8
    assert workers_needed(too_big, 4) == workers_needed(too_big, 4, "node") == 0


def test_larger_batches_are_skipped_after_oom():
    points = [
        make_point(batch_size=512),
        make_point(batch_size=64),
        # Another series may fit.
        make_point(batch_size=512, world_size=2),
        make_point(batch_size=512, precision=Precision.BF16),
        make_point(batch_size=512, params={"hidden": 1}),
        make_point(batch_size=512, env={"NCCL_ALGO": "Ring"}),
    ]
    ran_out = (make_point(batch_size=256), make_point(batch_size=128))
    made = schedule(points, make_devices(a=2), ran_out=ran_out)
    assert skipped(made) == {0: ("OutOfMemoryBefore", "oom at batch_size 128")}


def test_a_workload_without_batches_is_tried_each_time():
    point = make_point(batch_size=None, global_batch_size=None, scaling=None)
    assert skipped(schedule([point], make_devices(a=1), ran_out=[point])) == {}


def test_points_run_by_world_size_then_batch():
    axes = [(1, 64), (2, 16), (1, 8), (2, 32), (1, 16)]
    points = [make_point(world_size=n, batch_size=batch) for n, batch in axes]
    made = schedule(points, make_devices(a=2))
    assert [decision.attempt.index for decision in run_sweep(made)] == [2, 4, 0, 1, 3]


@given(sizes=st.lists(st.integers(1, 6), max_size=30), strategy=st.sampled_from(["pack", "spread"]))
def test_the_order_adds_no_process_group_changes(sizes, strategy):
    def changes(used):
        return sum(one != other for one, other in itertools.pairwise(used))

    points = [
        make_point(world_size=n, batch_size=i + 1, strategy=strategy) for i, n in enumerate(sizes)
    ]
    made = schedule(points, make_devices(a=2, b=4))
    ordered = [decision.worker_ids for decision in run_sweep(made)]
    assert len(ordered) == len(sizes)
    assert changes(ordered) <= changes(sizes)


def test_each_point_has_devices_by_its_own_strategy():
    points = [make_point(world_size=2, strategy=one) for one in ("pack", "spread")]
    decisions = run_sweep(schedule(points, make_devices(a=2, b=2)))
    assert [decision.worker_ids for decision in decisions] == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("strategies", "workers"), [(["spread"], 2), (["rail"], 8), (["pack", "spread"], 8)]
)
def test_rails_and_mixed_strategies_need_all_devices(strategies, workers):
    points = tuple(make_point(world_size=2, strategy=one) for one in strategies)
    assert workers_needed(Plan(points=points), 8) == workers


def test_isolation_device_starts_large_points_first():
    points = make_plan_of(1, 2, 4, 1, 1).points
    made = schedule(points, make_devices(a=8), "device")
    assert started(made) == [(2, (0, 1, 2, 3)), (1, (4, 5)), (0, (6,)), (3, (7,))]


def test_points_for_different_models_run_side_by_side():
    devices = make_devices(a=2)
    devices[1] = replace(devices[1], name="old")
    points = [make_point(devices=model) for model in (devices[0].name, devices[0].name, "old")]
    made = schedule(points, devices, "device")
    assert started(made) == [(0, (0,)), (2, (1,))]


def test_isolation_node_gives_each_point_whole_nodes():
    points = make_plan_of(1, 4, 1, 1).points
    made = schedule(points, make_devices(a=2, b=2, c=2), "node")
    assert started(made) == [(1, (0, 1, 2, 3)), (0, (4,))]
    made.free(Attempt(index=1, point=points[1], number=1))
    assert started(made) == [(2, (0,)), (3, (2,))]


def test_a_retried_attempt_goes_first():
    points = make_plan_of(1, 1, 1).points
    made = schedule(points, make_devices(a=1))
    [(index, _)] = started(made)
    made.free(attempts(points)[index])
    made.add(Attempt(index=index, point=points[index], number=2, tries=2))
    assert started(made) == [(index, (0,))]


@pytest.mark.parametrize("isolation", ["cluster", "node", "device"])
def test_scheduling_time_grows_linearly_with_workers(isolation):
    """Eight times as many take eight times as long, and 64 times where each looks at each."""

    def took_s(workers):
        points = make_plan_of(1, 8, 64, 256, workers).points
        devices = make_devices(**{f"node{number}": 8 for number in range(workers // 8)})
        began_s = time.thread_time()
        decided = run_sweep(schedule(points, devices, isolation))
        assert len(decided) == 5
        return time.thread_time() - began_s

    few_s, many_s = (min(took_s(workers) for _ in range(2)) for workers in (512, 4096))
    assert many_s < 3 * 8 * few_s


STEP_NS = {"NVIDIA H200": 1_000_000, "NVIDIA A100": 2_000_000}
# Two of each node; ranks are by node, so 0 and 1 are an H200 and an A100.
FLEET = [make_device(node, index, name=name) for node in "ab" for index, name in enumerate(STEP_NS)]


@pytest.mark.parametrize("isolation", ["cluster", "node", "device"])
def test_points_run_on_the_devices_they_request(isolation):
    points = [make_point(world_size=2, devices=one) for one in ("H200", "A100", "any", "3/0")]
    decisions = run_sweep(schedule(points, FLEET, isolation))
    found = {decision.attempt.point.devices: decision.worker_ids for decision in decisions}
    assert found == {"H200": (0, 2), "A100": (1, 3), "any": (0, 1), "3/0": (0, 3)}


def test_a_point_with_too_few_devices_is_skipped():
    made = schedule([make_point(world_size=3, devices="A100")], FLEET)
    told = "needs 3 devices, 2 are A100; the cluster has 2 x NVIDIA H200, 2 x NVIDIA A100"
    assert skipped(made) == {0: (Cause.TOO_FEW_DEVICES, told)}


def worker_of(device):
    """A worker that keeps step with the slowest of its point."""

    def script(point, rank):
        is_mixed = point.devices == "any" and point.world_size > 1
        step_ns = max(STEP_NS.values()) if is_mixed else STEP_NS[device.name]
        return make_measurement(rank, (step_ns,) * 6)

    return ScriptedWorker(script)


def scaled(matrix):
    """The points of a sweep with their speed-up, by the devices asked for and their number."""
    cluster, written = LocalCluster(FLEET, worker_of), []
    cluster.start(len(FLEET), "pack")
    made = plan(f"{MLP}matrix: {{batch_size: 8, {matrix}}}\nbaseline: {{}}\n")
    list(sweep(Rounds(plan=made), make_settings(), cluster, written.extend))
    rows = scaling_rows([record for _, record in written], {"world_size": 1})
    return {(row.devices, row.world_size): row for row in rows}


def test_efficiency_uses_the_speed_of_each_model_alone():
    rows = scaled("world_size: [1, 2, 4], devices: [H200, A100, any]")
    assert rows["any", 4].models_by_rank == ("NVIDIA H200", "NVIDIA A100") * 2
    assert rows["H200", 2].efficiency == pytest.approx(1.0)
    assert rows["A100", 2].efficiency == pytest.approx(1.0)
    # Four samples sets in 2 ms; two H200s and two A100s alone do six.
    assert rows["any", 4].speed_up == pytest.approx(2.0)
    assert rows["any", 4].efficiency == pytest.approx(4 / 6)
    assert rows["any", 2].efficiency == pytest.approx(2 / 3)
    assert rows["any", 4].lost_comm is None


def test_efficiency_needs_every_model_measured_alone():
    rows = scaled("world_size: [1, 2]")
    assert rows["any", 2].efficiency is None
    kind = NotComparedKind.NOT_MEASURED_ALONE
    assert rows["any", 2].why == NotCompared(kind=kind, subject="NVIDIA A100")
