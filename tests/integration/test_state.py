"""A worker's process is as good after a point as it was before, or it is replaced."""

import itertools
import json
import subprocess

import pytest

from raybench.job.model import Measure
from raybench.records import Measurement, Task
from tests.integration.sweeps import wait_for
from tests.unit.fakes import make_point

MESS = "tests.integration.probe_workloads:Mess"
FAULTY = "tests.integration.probe_workloads:Failing"
OTHER = "tests.integration.probe_workloads:Straggler"


@pytest.fixture
def cluster(three_workers):
    """Points are on the first two."""
    return three_workers


def process_ids(cluster):
    return [device.process_id for device in cluster.devices[:2]]


def measure(cluster, workload, world_size, **params):
    point = make_point(workload=workload, params=params, world_size=world_size)
    settings = Measure(warmup=2, iterations=2, breakdown=False, timeout_s=60.0)
    answers = cluster.run(Task(point=point, settings=settings), tuple(range(world_size)))
    measurements = [answer for answer in answers if isinstance(answer, Measurement)]
    assert len(measurements) == world_size, answers
    return measurements


def run(cluster, folder, mess="none"):
    """What each of two ranks saw before it made its mess, and its measurement."""
    answers = measure(cluster, MESS, 2, folder=str(folder), mess=mess)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], answers


@pytest.mark.parametrize(
    ("mess", "phrase"),
    [
        pytest.param("thread", "1 running thread (", marks=pytest.mark.long),
        ("child", "1 child process (sleep)"),
    ],
)
def test_what_cannot_be_undone_is_told_and_costs_the_process_in_which_it_is(
    cluster, tmp_path, mess, phrase
):
    before, messy = run(cluster, tmp_path, mess)
    assert messy[0].warnings == ()
    (warning,) = messy[1].warnings
    assert warning.startswith(f"the workload left {phrase}")
    assert " behind: the next point gets new processes" in warning
    now = process_ids(cluster)
    assert [one["pid"] == pid for one, pid in zip(before, now, strict=True)] == [True, False]
    after, clean = run(cluster, tmp_path)
    assert [one["pid"] for one in after] == process_ids(cluster)
    assert [one.warnings for one in clean] == [(), ()]
    # A child process ends with the worker that left it.
    wait_for(lambda: subprocess.run(["pgrep", "-f", "^sleep 3601$"]).returncode != 0, within_s=15)


def test_another_class_of_the_users_has_a_new_process_and_the_same_class_keeps_its_own(cluster):
    used = []
    for workload in (FAULTY, FAULTY, OTHER):
        measure(cluster, workload, 1)
        used.append(cluster.devices[0].process_id)
    is_kept = [before == after for before, after in itertools.pairwise(used)]
    assert is_kept == [True, False]
