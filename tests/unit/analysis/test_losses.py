from __future__ import annotations

import pytest
from builders import make_row
from hypothesis import given
from hypothesis import strategies as st

from raybench.analysis.scaling import LOSSES, shares_of_loss


def row(step_ms, *local_ms, **parts):
    """A point on GPUs of which each rank's own step is known, and takes its device all the time."""
    slowest = max(local_ms, default=None)
    several = {
        "straggler_ms": sorted(local_ms)[-1] - sorted(local_ms)[(len(local_ms) - 2) // 2],
        "comm_exposed_ms": step_ms - max(local_ms),
    }
    known = {
        "world_size": len(local_ms),
        "step_ms_p50": step_ms,
        "step_ms_mean": step_ms,
        "device_type": "cuda",
        "local_step_ms": slowest,
        "local_step_ms_by_rank": local_ms,
        "device_ms_by_rank": local_ms,
        "comm_ms": 100.0,
    }
    return make_row(**known | (several if len(local_ms) > 1 else {}) | parts)


def lost(point, base, work=1.0):
    """work: share of the baseline's step in perfect scaling."""
    name = "step_ms_mean" if point.local_step_ms_by_rank else "step_ms_p50"
    efficiency = work * getattr(base, name) / getattr(point, name)
    shares = shares_of_loss(point, base, efficiency)
    assert tuple(shares) == LOSSES
    known = [share for share in shares.values() if share is not None]
    assert sum(known) == pytest.approx(1 - efficiency)
    return {name.removeprefix("lost_"): share for name, share in shares.items()}


def test_what_the_step_takes_beyond_the_ranks_own_is_communication():
    found = lost(row(10.0, 8.4, 8.4), row(8.0, 8.0))
    assert (found["comm"], found["compute"], found["wait"]) == pytest.approx((0.16, 0.04, 0.0))
    assert found["unexplained"] == pytest.approx(0.0)
    assert found["data"] is None


def test_a_slow_rank_costs_what_its_own_step_is_longer_and_is_no_slower_compute():
    found = lost(row(12.0, 8.4, 11.4, 8.4, 8.4), row(8.0, 8.0))
    assert (found["wait"], found["compute"]) == pytest.approx((3.0 / 12, 0.4 / 12))
    assert found["comm"] == pytest.approx(0.6 / 12)
    assert found["unexplained"] == pytest.approx(0.0)


def test_a_slow_host_is_no_slower_host_of_the_others():
    late = row(10.0, 8.0, 9.5, device_ms_by_rank=[7.9, 7.9])
    found = lost(late, row(8.0, 8.0, device_ms_by_rank=[7.9]))
    assert (found["wait"], found["host"], found["compute"]) == pytest.approx((0.15, 0.0, 0.0))


def test_more_than_was_timed_of_communication_is_unexplained():
    found = lost(row(10.0, 8.0, 8.0, comm_ms=0.5), row(8.0, 8.0))
    assert (found["comm"], found["unexplained"]) == pytest.approx((0.05, 0.15))
    in_turn = lost(row(10.0, 8.0, 8.0, comm_ms=0.5, late_in_turn_ms=1.0), row(8.0, 8.0))
    assert (in_turn["comm"], in_turn["unexplained"]) == pytest.approx((0.15, 0.05))


def test_communication_that_was_not_timed_is_unexplained():
    found = lost(row(10.0, 8.0, 8.0, comm_ms=None), row(8.0, 8.0))
    assert (found["comm"], found["unexplained"]) == (None, pytest.approx(0.2))


def test_communication_whose_calls_were_counted_is_what_local_copies_do_not_take():
    calls = {"all_to_all": 4}
    found = lost(row(10.0, 8.0, 8.0, comm_ms=None, comm_calls=calls), row(8.0, 8.0))
    assert (found["comm"], found["unexplained"]) == pytest.approx((0.2, 0.0))


def test_a_step_shorter_than_its_ranks_own_is_unexplained():
    found = lost(row(9.0, 9.5, 9.5), row(8.0, 8.0))
    assert (found["comm"], found["unexplained"]) == pytest.approx((0.0, -0.5 / 9))


def test_a_baseline_that_is_not_the_sum_of_its_parts_is_unexplained():
    found = lost(row(10.0, 8.4, 8.4), row(8.0, 8.4))
    assert (found["comm"], found["compute"]) == pytest.approx((0.16, 0.0))
    assert found["unexplained"] == pytest.approx(0.04)


def test_a_baseline_does_not_idle_longer_than_its_timed_step_leaves():
    # Taken apart, its steps were 0.6 ms longer than they were when they were timed.
    base = row(8.0, 8.6, device_ms_by_rank=[7.9])
    found = lost(row(10.0, 8.4, 8.4, device_ms_by_rank=[7.9, 7.9]), base)
    assert (found["compute"], found["host"]) == pytest.approx((0.0, 0.04))
    assert found["unexplained"] == pytest.approx(0)


def test_stalls_that_are_too_rare_for_the_median_are_unexplained():
    found = lost(row(10.0, 8.4, 8.4, step_ms_mean=10.5), row(8.0, 8.0))
    assert (found["comm"], found["compute"]) == pytest.approx((1.6 / 10.5, 0.4 / 10.5))
    assert found["unexplained"] == pytest.approx(0.5 / 10.5)


def test_a_late_batch_costs_a_gpu_nothing_while_it_is_busy():
    base = row(8.0, 8.0, data_ms=0.0)
    assert lost(row(9.0, 9.0, 9.0, data_ms=1.0), base)["data"] == 0
    idle = row(10.0, 10.0, 10.0, data_ms=1.0, device_ms_by_rank=[8.5, 8.5])
    found = lost(idle, base)
    assert (found["data"], found["host"]) == pytest.approx((0.1, 0.05))


def test_on_a_cpu_all_waiting_for_data_is_lost():
    on_cpu = {"device_type": "cpu", "device_ms_by_rank": None}
    base = row(8.0, 8.0, data_ms=0.5, **on_cpu)
    found = lost(row(10.0, 9.0, 9.0, data_ms=1.5, **on_cpu), base)
    assert (found["data"], found["compute"]) == pytest.approx((0.1, 0.0))
    assert found["host"] is None


def test_in_strong_scaling_work_that_does_not_shrink_is_lost():
    found = lost(row(6.0, 6.0, 6.0), row(10.0, 10.0), work=0.5)
    assert found["compute"] == pytest.approx(1 / 6)
    assert found["unexplained"] == pytest.approx(0)


def test_a_baseline_of_several_ranks_keeps_its_own_communication_and_slow_rank():
    base = row(9.0, 8.0, 7.5)
    found = lost(row(10.0, 8.5, 7.5, 7.5, 7.5), base)
    assert (found["comm"], found["wait"]) == pytest.approx((0.05, 0.05))
    assert found["compute"] == pytest.approx(0.0)


def test_without_a_breakdown_all_is_unexplained():
    bare = {"device_type": "cuda", "step_ms_mean": 99.0}
    four, one = (make_row(world_size=n, step_ms_p50=ms, **bare) for n, ms in ((4, 10.0), (1, 8.0)))
    found = lost(four, one)
    assert found.pop("unexplained") == pytest.approx(0.2)
    assert set(found.values()) == {None}


MS = st.floats(0.1, 1000.0)


@given(
    st.lists(MS, min_size=2, max_size=8),
    st.lists(MS, min_size=1, max_size=4),
    *(MS,) * 4,
    st.floats(0.1, 1.0),
)
def test_the_shares_are_the_identity_of_the_step_and_its_parts(
    local, base_local, step_ms, base_ms, comm_ms, idle, work
):
    """1 - efficiency = X/S + E/S + (M - w M_base)/S - w (X_base + E_base)/S, for any figures."""
    point = row(step_ms, *local, comm_ms=comm_ms, device_ms_by_rank=[ms - idle for ms in local])
    base = row(base_ms, *base_local)
    found = lost(point, base, work)
    explained = min(max(0.0, step_ms - max(local)), comm_ms)
    beyond = (step_ms - max(local)) - explained
    of_base = base_ms - max(base_local)
    if len(base_local) > 1:
        of_base -= min(max(0.0, of_base), 100.0)
    assert found["unexplained"] * step_ms == pytest.approx(beyond - work * of_base, abs=1e-6)
