"""Collectives, swept for real: Ray, gloo, two ranks, rows."""

import pandas as pd
import pytest

from tests.integration.sweeps import cpu_sweep, table, write_text

COLLECTIVES = """\
workload: {kind: collective, size_bytes: 1048576}
matrix:
  operation: [all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, sendrecv]
  world_size: 2
include:
  - {operation: all_reduce, world_size: 1}
  - {operation: all_reduce, world_size: 2, cuda_graph: true}
  - {operation: all_gather, world_size: 2, dtype: int8}
baseline: {}
measure: {warmup: 3, iterations: 10, max_seconds: 2, breakdown: false}
"""


def test_every_operation_is_measured_with_its_bandwidths_and_none_where_it_cannot_be(tmp_path):
    write_text(tmp_path, COLLECTIVES)
    done = cpu_sweep(tmp_path)
    assert done.returncode == 1, done.stderr
    points = table(tmp_path)
    ok = points[points["status"] == "ok"]
    assert len(ok) == 7
    for _, row in ok.iterrows():
        algbw = 1048576 / (row["step_ms_mean"] / 1e3) / 1e9
        # n is 2: 2 (n - 1) / n and 1 for the operations that have it, else 1/2.
        factor = {"all_reduce": 1.0, "broadcast": 1.0, "sendrecv": 1.0}
        operation = dict(row["params"])["operation"]
        assert row["algbw_gb_s"] == pytest.approx(algbw)
        assert row["busbw_gb_s"] == pytest.approx(algbw * factor.get(operation, 0.5))
        assert pd.isna(row["batch_size"])
        assert pd.isna(row["throughput"])
    by_type = points.dropna(subset="error_type").set_index("error_type")["error_message"]
    assert by_type["NeedsCuda"] == "cuda_graph: true needs CUDA devices"
    assert "needs at least 2 ranks, world_size is 1; raise world_size" in by_type["UsageError"]
    assert len(by_type) == 2
