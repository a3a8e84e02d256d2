"""Real Ray clusters on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Before Ray is imported: the address of a cluster that happens to run here must not be joined.
os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the workloads of the tests below the current directory."""
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[str]:
    """The address of a Ray cluster of three nodes with two CPU slots each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=0)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()
