"""The launchers that need no Ray hold what is asked of every cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raybench.cluster import Cluster
from raybench.cluster.connect import connect
from tests.cluster_contract import WORLD_SIZE, GroupContract, PointContract, is_alive
from tests.process_cluster import start_forks


class TestThisProcess(PointContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[Cluster]:
        joined = connect("in-process", "local", "cpu", 1, end=pytest.fail)
        joined.start(1, "pack")
        yield joined
        joined.close()


class TestProcesses(GroupContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        joined = start_forks(WORLD_SIZE, tmp_path_factory.mktemp("logs"))
        joined.start(WORLD_SIZE, "pack")
        yield joined
        devices = joined.devices
        joined.close()
        assert not any(map(is_alive, devices))
