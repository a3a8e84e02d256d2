"""Which point runs next, and where."""

from dataclasses import replace

from fakes import make_devices, make_point

from raybench.plan import Plan
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
