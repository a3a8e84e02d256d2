"""What is known of models, and that each figure of it has a source."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.hardware.expected import Expected, datasheet, find_expected


def expected(test: str, where: str = "device", topology: str = "") -> Expected:
    found = find_expected("NVIDIA H200", test, where, topology)
    assert found is not None
    return found


def test_a_known_model_has_a_range_with_its_source() -> None:
    found = expected("gemm bf16 8192")
    assert found.low <= found.high
    assert "gemm-20261122-143010-684e" in found.source


def test_a_figure_over_links_is_of_devices_that_have_them() -> None:
    assert expected("all_reduce 1 GiB", "4 on a node", "NVLink x18, 1:PHB").low == 353
    where = ("NVIDIA H200", "all_reduce 1 GiB", "4 on a node")
    assert find_expected(*where, topology="1:PHB") is None


@pytest.mark.parametrize(
    ("model", "test", "where"),
    [
        ("NVIDIA H201", "gemm bf16 8192", "device"),
        ("NVIDIA H200", "gemm bf16 8191", "device"),
        ("NVIDIA H200", "gemm bf16 8192", "2 on a node"),
    ],
)
def test_what_no_run_has_seen_is_not_known(model: str, test: str, where: str) -> None:
    assert find_expected(model, test, where) is None


def test_a_datasheet_is_known_without_a_run() -> None:
    assert datasheet("NVIDIA A100-SXM4-80GB", "gemm bf16 8192") == 312
    assert datasheet("NVIDIA A100-SXM4-80GB", "memory 500 MB") == 2039
    assert datasheet("NVIDIA A100-SXM4-80GB", "gemm fp8 8192") is None
    assert datasheet("NVIDIA A100-SXM4-80GB", "launch") is None


def test_the_runs_that_are_named_are_committed() -> None:
    runs = {
        path.name for path in Path(__file__).parents[3].joinpath("results/examples/runs").iterdir()
    }
    for test in ("gemm bf16 8192", "memory 500 MB", "h2d alone"):
        shown, _, named = expected(test).source.partition("; ")
        assert "2026" in shown
        assert named.split()
        assert set(named.split()) <= runs
