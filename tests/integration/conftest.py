"""Real Ray clusters on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from raybench.cluster.ray_cluster.cluster import RayCluster

REPOSITORY = Path(__file__).parents[2]

# Before Ray is imported.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    """Workers find the workloads of the tests below the current directory."""
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(scope="module")
def place():
    """A folder as /tmp is, short enough for Ray's sockets, which pytest's own are not."""
    with TemporaryDirectory(prefix="rb", dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


# Those that take longest go first, so that no process is left with one of them at the end.
_LONGEST = ["sweep_command", "resume", "health", "faults", "hosts", "nodes", "environment_runs"]
# Built-in workloads before classes of the user's, which cost workers their processes.
_ON_WORKERS = ["script_ranks", "breakdown_of_ranks"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what shares workers be together, and where they can stay."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[bool, bool, int]:
    used, name = _fixtures(item), item.path.stem.removeprefix("test_")
    first = _ON_WORKERS if "three_workers" in used else _LONGEST
    place = first.index(name) if name in first else len(first)
    return "three_workers" not in used, "three_nodes" not in used, place


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def three_nodes(_workers):
    """The address of a Ray cluster of three nodes, of two racks, with two CPU slots each."""
    from tests.integration.clusters import start_cluster

    cluster = start_cluster(num_cpus=2, labels={"rack": "left"})
    for rack in ("left", "right"):
        cluster.add_node(num_cpus=2, num_gpus=0, labels={"rack": rack})
    cluster.wait_for_nodes()
    yield cluster.address
    _workers.close()
    cluster.shutdown()


class _Workers:
    """Three workers on the cluster, for all tests that leave them fit for others."""

    def __init__(self) -> None:
        self._cluster: RayCluster | None = None
        self._patch = pytest.MonkeyPatch()

    def on(self, address: str) -> RayCluster:
        from raybench.cluster.ray_cluster.cluster import RayCluster
        from raybench.cluster.ray_cluster.start import connect_ray

        if self._cluster is None:
            # A rank that comes out of its collective may first have to read from the disk what it
            # has not needed before.
            self._patch.setattr("raybench.cluster.timeouts.ABORT_S", 10.0)
            # The nodes run already, so workers have only what the driver gives them. Tests replace
            # workers, so the variables stay set until the workers are closed.
            self._patch.setenv("RAYBENCH_FORWARDED", "PROBE_GIVEN")
            self._patch.setenv("PROBE_GIVEN", "1")
            self._patch.setenv("PROBE_KEPT", "1")
            self._cluster = RayCluster(connect_ray(address, "cpu", wanted=3))
            self._cluster.start(3, "pack")
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        self._cluster = None
        self._patch.undo()


@pytest.fixture(scope="session")
def _workers():
    return _Workers()


@pytest.fixture(scope="module", autouse=True)
def _connection_is_free(request, _workers):
    """Let go of the workers before a file that may connect to Ray itself: one at a time can."""
    here = [item for item in request.session.items if item.path == request.path]
    if not any("three_workers" in _fixtures(item) for item in here):
        _workers.close()


@pytest.fixture(scope="module")
def three_workers(three_nodes, _workers):
    """Two workers on one node and one on another; who uses them finds the processes of others."""
    return _workers.on(three_nodes)
