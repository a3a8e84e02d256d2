"""What the datasheet says of a test."""

from raybench.health.expected import datasheet


def test_a_datasheet_is_known_without_a_run():
    assert datasheet("NVIDIA A100-SXM4-80GB", "gemm bf16 8192") == 312
    assert datasheet("NVIDIA A100-SXM4-80GB", "memory 500 MB") == 2039
    assert datasheet("NVIDIA A100-SXM4-80GB", "gemm fp8 8192") is None
    assert datasheet("NVIDIA A100-SXM4-80GB", "launch") is None
