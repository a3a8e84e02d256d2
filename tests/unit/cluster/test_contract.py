"""The cluster in this process holds what is asked of every cluster."""

import pytest

from tests.cluster_contract import PointContract
from tests.local_cluster import this_process


class TestThisProcess(PointContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls):
        joined = this_process()
        joined.start(1, "pack")
        yield joined
        joined.close()
