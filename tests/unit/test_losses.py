from __future__ import annotations

from typing import Any

import pytest

from raybench.analysis.losses import LOSSES, lost_shares

NOTHING = dict.fromkeys(
    ("comm_exposed_ms", "compute_ms", "optimizer_ms", "wait_ms", "data_ms", "host_gap_ms")
)


def row(world_size: int, step_ms: float, device_type: str = "cuda", **parts: Any) -> dict[str, Any]:
    return {
        **NOTHING,
        "world_size": world_size,
        "step_ms_p50": step_ms,
        "device_type": device_type,
        **parts,
    }


def lost(point: dict[str, Any], base: dict[str, Any], efficiency: float) -> dict[str, Any]:
    shares = lost_shares(point, base, efficiency)
    assert tuple(shares) == LOSSES
    known = [share for share in shares.values() if share is not None]
    assert sum(known) == pytest.approx(1 - efficiency)
    return {name.removeprefix("lost_"): share for name, share in shares.items()}


def test_the_shares_add_up_to_what_is_lost_and_the_rest_is_unexplained() -> None:
    base = row(1, 8.0, compute_ms=7.0, optimizer_ms=0.9, host_gap_ms=0.1)
    point = row(
        4, 10.0, comm_exposed_ms=1.2, compute_ms=7.4, optimizer_ms=0.9, wait_ms=0, host_gap_ms=0.3
    )
    found = lost(point, base, 0.8)
    assert found["comm"] == pytest.approx(0.12)
    assert found["compute"] == pytest.approx(0.04)
    assert found["host"] == pytest.approx(0.02)
    assert found["unexplained"] == pytest.approx(0.02)
    assert found["data"] is None


def test_what_makes_the_slowest_rank_late_is_not_counted_as_compute_too() -> None:
    base = row(1, 8.0, compute_ms=8.0)
    slow_rank = row(4, 10.0, comm_exposed_ms=0.5, compute_ms=9.5, wait_ms=1.5)
    found = lost(slow_rank, base, 0.8)
    assert (found["wait"], found["compute"]) == pytest.approx((0.15, 0.0))
    jitter = row(4, 10.0, comm_exposed_ms=2.0, compute_ms=8.0, wait_ms=0.5)
    found = lost(jitter, base, 0.8)
    assert (found["wait"], found["comm"]) == pytest.approx((0.05, 0.15))


def test_a_late_batch_costs_a_gpu_nothing_while_it_is_busy() -> None:
    base = row(1, 8.0, data_ms=0.0, host_gap_ms=0.0)
    assert lost(row(2, 9.0, data_ms=1.0, host_gap_ms=0.0), base, 8 / 9)["data"] == 0
    found = lost(row(2, 10.0, data_ms=1.0, host_gap_ms=1.5), base, 0.8)
    assert (found["data"], found["host"]) == pytest.approx((0.1, 0.05))


def test_on_a_cpu_all_waiting_for_data_is_lost() -> None:
    base = row(1, 8.0, "cpu", data_ms=0.5, compute_ms=7.5)
    found = lost(row(2, 10.0, "cpu", data_ms=1.5, compute_ms=7.5, comm_exposed_ms=1.0), base, 0.8)
    assert found["data"] == pytest.approx(0.1)
    assert found["host"] is None


def test_in_strong_scaling_work_that_does_not_shrink_is_lost() -> None:
    base = row(1, 10.0, compute_ms=8.0, optimizer_ms=2.0)
    point = row(2, 6.0, compute_ms=4.0, optimizer_ms=2.0, comm_exposed_ms=0.0)
    found = lost(point, base, 10 / 12)
    assert found["compute"] == pytest.approx(1 / 6)
    assert found["unexplained"] == pytest.approx(0)


def test_a_baseline_of_several_ranks_keeps_its_own_communication() -> None:
    base = row(2, 9.0, comm_exposed_ms=1.0)
    assert lost(row(4, 10.0, comm_exposed_ms=1.5), base, 0.9)["comm"] == pytest.approx(0.05)


def test_without_a_breakdown_all_is_unexplained() -> None:
    found = lost(row(4, 10.0), row(1, 8.0), 0.8)
    assert found.pop("unexplained") == pytest.approx(0.2)
    assert set(found.values()) == {None}
