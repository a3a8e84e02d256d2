"""What makes a point's number doubtful, told from its row alone."""

from __future__ import annotations

from typing import Any

import pytest

from raybench.doubts import BREAKDOWN, half_interval, is_imprecise, why_no_breakdown

NAN = float("nan")


def row(step_ms: float, device_type: str = "cuda", **columns: Any) -> dict[str, Any]:
    ends = {"step_ms_ci_low": None, "step_ms_ci_high": None}
    known = dict.fromkeys(BREAKDOWN)
    return {"step_ms_p50": step_ms, "device_type": device_type, **ends, **known, **columns}


def test_an_interval_is_wide_beyond_a_tenth_of_the_step_to_either_side() -> None:
    assert half_interval(row(10.0, step_ms_ci_low=9.0, step_ms_ci_high=12.0)) == pytest.approx(0.15)
    assert is_imprecise(row(10.0, step_ms_ci_low=8.9, step_ms_ci_high=11.0))
    assert not is_imprecise(row(10.0, step_ms_ci_low=9.1, step_ms_ci_high=11.0))


@pytest.mark.parametrize("nothing", [None, NAN])
def test_what_is_not_known_of_an_interval_is_no_reason_to_doubt(nothing: float | None) -> None:
    unknown = {"step_ms_ci_low": nothing, "step_ms_ci_high": nothing}
    assert half_interval(row(10.0, **unknown)) is None
    assert not is_imprecise(row(10.0, **unknown))
    assert not is_imprecise(row(NAN))


@pytest.mark.parametrize(
    ("parts", "contradicts"),
    [
        ({"compute_ms": 7.0, "optimizer_ms": 2.0, "comm_exposed_ms": 2.1}, True),
        ({"compute_ms": 7.0, "optimizer_ms": 2.0, "comm_exposed_ms": 1.9}, False),
        ({"compute_ms": 9.0, "host_gap_ms": 2.1}, True),
        ({"local_step_ms": 11.1}, True),
        ({"local_step_ms": 10.9}, False),
        # A slow rank's work is in the compute, and what the others wait for it is beside it.
        ({"compute_ms": 9.0, "comm_exposed_ms": 1.0, "wait_ms": 5.0}, False),
        ({"wait_ms": 11.1}, True),
        ({"compute_ms": NAN, "comm_exposed_ms": NAN}, False),
        ({}, False),
    ],
)
def test_parts_are_no_breakdown_beyond_a_tenth_above_the_step(
    parts: dict[str, float], contradicts: bool
) -> None:
    assert (why_no_breakdown(row(10.0, **parts)) is not None) is contradicts


def test_data_counts_beside_compute_on_a_cpu_alone() -> None:
    parts = {"compute_ms": 8.0, "data_ms": 4.0}
    assert why_no_breakdown(row(10.0, "cuda", **parts)) is None
    assert "the parts come to 12 ms, the step takes 10 ms" in str(
        why_no_breakdown(row(10.0, "cpu", **parts))
    )


def test_a_failed_point_has_no_parts_to_contradict() -> None:
    assert why_no_breakdown(row(NAN, compute_ms=3.0)) is None
