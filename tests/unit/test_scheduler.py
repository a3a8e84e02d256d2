"""Which point runs next, and where."""

from dataclasses import replace

from fakes import make_devices, make_point

from raybench.plan import Plan
from raybench.point import Precision
from raybench.scheduler import Assign, Skip, decide, workers_needed


def test_a_point_that_fits_gets_seats_in_rank_order():
    decision = decide(make_point(world_size=2), make_devices(a=4), 4, "pack", None)
    assert decision == Assign(seats=(0, 1))


def test_a_point_that_does_not_fit_is_skipped_with_both_numbers():
    decision = decide(make_point(world_size=8), make_devices(a=2), 4, "pack", None)
    assert isinstance(decision, Skip)
    assert decision.reason == "needs 8 devices, the cluster has 4"


def test_a_cuda_graph_on_a_cpu_is_skipped():
    gpus = make_devices(a=2)
    cpus = [replace(device, kind="cpu") for device in gpus]
    point = replace(make_point(world_size=2), cuda_graph=True)
    assert decide(point, cpus, 2, "pack", None) == Skip(
        error_type="NeedsCuda", reason="cuda_graph: true needs CUDA devices"
    )
    assert decide(point, gpus, 2, "pack", None) == Assign(seats=(0, 1))


def test_after_a_stop_every_point_is_skipped_and_names_the_failed_one():
    decision = decide(make_point(), make_devices(a=2), 2, "pack", "abc123")
    assert decision == Skip(
        error_type="Stopped", reason="on_error: stop, after point abc123 failed"
    )


def test_the_biggest_point_that_fits_decides_how_many_workers_are_started():
    plan = Plan(points=tuple(make_point(world_size=n) for n in (1, 2, 4, 64)))
    assert workers_needed(plan, capacity=8) == 4
    assert workers_needed(plan, capacity=64) == 64
    assert workers_needed(Plan(points=(make_point(world_size=8),)), capacity=4) == 0


def test_what_needs_more_memory_than_a_batch_that_ran_out_is_not_tried():
    devices, ran_out = make_devices(a=2), (make_point(batch_size=256), make_point(batch_size=128))

    def decided(**changes):
        return decide(make_point(**changes), devices, 2, "pack", None, ran_out)

    assert decided(batch_size=512) == Skip(
        error_type="OutOfMemoryBefore", reason="oom at batch_size 128"
    )
    assert decided(batch_size=64) == Assign(seats=(0,))
    # Another series may fit.
    assert isinstance(decided(batch_size=512, world_size=2), Assign)
    assert isinstance(decided(batch_size=512, precision=Precision.BF16), Assign)
    assert isinstance(decided(batch_size=512, params={"hidden": 1}), Assign)


def test_a_workload_without_batches_is_tried_each_time():
    point = make_point(batch_size=None, global_batch_size=None, scaling=None)
    assert isinstance(decide(point, make_devices(a=1), 1, "pack", None, (point,)), Assign)
