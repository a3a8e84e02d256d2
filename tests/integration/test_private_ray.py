"""How the Ray that a sweep starts for itself brings up processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raybench.cluster.ray_actors import start_standby
from raybench.cluster.ray_connection import connect
from tests.integration.fault_runs import descendants, wait_for

_STUCK = """\
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
time.sleep(600)
"""


@pytest.fixture
def raylet() -> Iterator[int]:
    """The process of a private Ray that was told of one CPU."""
    connect("local", "cpu", wanted=1)
    yield ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    ray.shutdown()


class Nothing:
    pass


def test_a_process_that_does_not_come_up_keeps_no_other_waiting_and_none_comes_unasked(
    raylet: int, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_STUCK)
    environment = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    _stuck = ray.remote(Nothing).options(num_cpus=0, runtime_env=environment).remote()
    wait_for((tmp_path / "begun").exists, within_s=30)
    node_id = ray.get_runtime_context().get_node_id()
    standbys = [start_standby(node_id) for _ in range(2)]
    assert ray.get([standby.is_loaded.remote() for standby in standbys], timeout=60) == [True, True]
    titles = descendants(raylet).values()
    assert sum(title.startswith("ray::_Seat") for title in titles) == 2
    assert [title for title in titles if title.startswith("ray::IDLE")] == []
