"""What is known of models, and that each figure of it has a source."""

from pathlib import Path

from raybench.health.expected import Expected, datasheet, find_expected


def expected(test: str, where: str = "device", topology: str = "") -> Expected:
    found = find_expected("NVIDIA H200", test, where, topology)
    assert found is not None
    return found


def test_a_range_is_known_where_a_run_has_seen_it():
    found = expected("gemm bf16 8192")
    assert found.low <= found.high
    assert find_expected("NVIDIA H201", "gemm bf16 8192", "device") is None
    assert find_expected("NVIDIA H200", "gemm bf16 8191", "device") is None
    assert find_expected("NVIDIA H200", "gemm bf16 8192", "2 on a node") is None
    # Over links it is that of devices that have them.
    assert expected("all_reduce 1 GiB", "4 on a node", "NVLink x18, 1:PHB").low == 353
    where = ("NVIDIA H200", "all_reduce 1 GiB", "4 on a node")
    assert find_expected(*where, topology="1:PHB") is None


def test_a_datasheet_is_known_without_a_run():
    assert datasheet("NVIDIA A100-SXM4-80GB", "gemm bf16 8192") == 312
    assert datasheet("NVIDIA A100-SXM4-80GB", "memory 500 MB") == 2039
    assert datasheet("NVIDIA A100-SXM4-80GB", "gemm fp8 8192") is None
    assert datasheet("NVIDIA A100-SXM4-80GB", "launch") is None


def test_the_runs_that_are_named_are_committed():
    runs = {
        path.name for path in Path(__file__).parents[3].joinpath("results/examples/runs").iterdir()
    }
    for test in ("gemm bf16 8192", "memory 500 MB", "h2d alone"):
        shown, _, named = expected(test).source.partition("; ")
        assert "2026" in shown
        assert named.split()
        assert set(named.split()) <= runs
