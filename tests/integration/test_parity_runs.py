"""The same step by torchrun and by workers of a real Ray cluster."""

from __future__ import annotations

import pytest

from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.doctor import parity
from tests.cluster_contract import run


def test_the_same_step_is_timed_by_torchrun_and_by_fresh_workers(three_workers: RayCluster) -> None:
    step = parity.Step(
        name="tiny", params={"hidden": 32, "layers": 2}, batch_size=8, iterations=50, margin=0.05
    )
    host = three_workers.devices[0].host
    worker_ids = parity.local_worker_ids(three_workers.devices, host)
    assert worker_ids == (0, 1), "those of the first node"
    # What is used already is replaced; who starts when is tested of `parity.order`.
    run(three_workers, *worker_ids)
    before = {device.process_id for device in three_workers.devices[:2]}
    told: list[str] = []
    done = parity.compare(three_workers, worker_ids, step, 1, told.append)
    assert done.error == ""
    assert min(*done.torchrun_ms, *done.raybench_ms) > 0
    assert [line.split()[1] for line in told] == ["torchrun", "raybench"]
    assert done.differing == {}
    assert before.isdisjoint({device.process_id for device in three_workers.devices[:2]})


@pytest.mark.long
def test_a_step_that_cannot_be_built_is_told_with_its_exception(three_workers: RayCluster) -> None:
    step = parity.Step(name="none", params={"hiddenn": 1}, batch_size=1, iterations=1, margin=0.05)
    done = parity.compare(three_workers, (0, 1), step, 2, lambda _: None)
    assert done.error.startswith("torchrun: TypeError: ")
    assert "hiddenn" in done.error
