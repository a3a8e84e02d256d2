"""A rank slowed on purpose, through Ray and gloo to the row of its point; and a profiled run."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.connection import connect
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records import Measurement, Record, Status, Task
from raybench.results import rows
from raybench.results.quality import is_slowed_by_one_rank

STRAGGLER = "tests.integration.probe_workloads:Straggler"
EXAMPLE = "docs.examples.convnet:ConvNet"
DELAY_MS = 60.0


@pytest.fixture(scope="module")
def cluster(three_nodes: str) -> Iterator[RayCluster]:
    joined = RayCluster(connect(three_nodes, "cpu", wanted=2))
    joined.start(2, "pack")
    yield joined
    joined.close()


def measured(
    cluster: RayCluster, workload: str = STRAGGLER, *, profile: bool = False, **params: Any
) -> dict[str, Any]:
    """The row of one point of two ranks."""
    point = Point(
        workload=workload,
        params=params,
        world_size=2,
        precision=Precision.FP32,
        batch_size=8,
        global_batch_size=16,
        scaling="weak",
    )
    settings = Measure(warmup=3, iterations=15)
    answers = cluster.run(Task(point=point, settings=settings, profile=profile), (0, 1))
    assert all(isinstance(answer, Measurement) for answer in answers), answers
    record = Record(
        point=point,
        attempt=1,
        status=Status.OK,
        started_at=datetime.now(UTC),
        duration_s=1.0,
        devices=cluster.devices,
        measurements=answers,
    )
    return rows.point_row("run-a", record, settings)


@pytest.mark.parametrize("slow_rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_slow_rank_is_named_with_its_delay(cluster: RayCluster, slow_rank: int) -> None:
    row = measured(cluster, slow_rank=slow_rank, delay_ms=DELAY_MS)
    assert is_slowed_by_one_rank(row)
    assert row["slowest_rank"] == slow_rank
    assert row["straggler_ms"] == pytest.approx(DELAY_MS, rel=0.2)
    assert [ms >= DELAY_MS for ms in row["local_step_ms_by_rank"]] == [
        rank == slow_rank for rank in (0, 1)
    ]
    said = f"rank {slow_rank} is slower: its own step takes "
    assert [text for text in row["warnings"] if text.startswith(said) and "(host)" in text]
    # Every step takes as long as the slow rank alone needs: that is no communication.
    assert row["local_step_ms"] >= DELAY_MS
    assert row["comm_ms"] < DELAY_MS / 2
    assert row["comm_exposed_ms"] < DELAY_MS / 2
    assert row["optimizer_ms"] > 0
    assert row["host_bound"] is None
    assert "noop_hook" in row["methods"]["comm_exposed_ms"]


def test_of_equal_ranks_none_is_slow(cluster: RayCluster) -> None:
    row = measured(cluster)
    assert not is_slowed_by_one_rank(row)
    assert row["slowest_rank"] is None
    assert row["straggler_ms"] < DELAY_MS / 3
    assert row["comm_ms"] > 0
    assert row["compute_ms"] > 0


def test_the_example_of_the_documents_is_taken_apart_but_not_compiled(
    cluster: RayCluster,
) -> None:
    small = {"channels": 4, "image_size": 8}
    parts = ("compute_ms", "comm_ms", "comm_exposed_ms", "straggler_ms", "optimizer_ms")
    row = measured(cluster, EXAMPLE, **small)
    assert all(row[name] is not None for name in parts), row
    assert row["throughput"] > 0
    compiled = measured(cluster, EXAMPLE, **small, compile=True)
    assert all(compiled[name] is None for name in parts)
    assert "a compiled model" in compiled["methods"]["comm_ms"]
    assert compiled["throughput"] > 0
    # The next point is not taken for compiled, too.
    assert measured(cluster, EXAMPLE, **small)["comm_ms"] is not None


def test_a_profiled_process_is_replaced(cluster: RayCluster) -> None:
    before = [device.process_id for device in cluster.devices]
    measured(cluster)
    assert [device.process_id for device in cluster.devices] == before
    measured(cluster, profile=True)
    measured(cluster)
    after = [device.process_id for device in cluster.devices]
    assert not set(before) & set(after)


def test_a_sweep_traces_the_points_it_is_told_to(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "version: 1\nname: traced\nworkload: {kind: mlp, hidden: 64, layers: 2}\n"
        "matrix: {world_size: [1, 2], batch_size: [8]}\nmeasure: {warmup: 3, iterations: 6}\n"
    )
    results = tmp_path / "results"
    command = [sys.executable, "-m", "raybench", "sweep", str(job), "--address", "local"]
    command += ["--device", "cpu", "-o", str(results), "--profile", "world_size == 2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "traces: " in done.stderr
    traces = sorted((results / "traces").rglob("*.json.gz"))
    assert [path.name.split("-")[-1] for path in traces] == ["rank0.json.gz", "rank1.json.gz"]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        # The communication that the model has by itself is in it.
        assert any("allreduce" in str(event.get("name")) for event in events)
    modules = pd.read_parquet(results / "modules")
    assert set(modules["rank"]) == {0, 1}
    assert set(modules["module"]) == {"", "0", "1", "2"}
