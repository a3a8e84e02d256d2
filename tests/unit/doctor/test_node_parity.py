"""all_reduces over nodes: what torchrun is asked on each, and how the sides are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import make_cluster, make_device, make_measurement

from raybench.doctor import node_parity, parity
from raybench.doctor.facts import Verdict
from raybench.job.point import Point
from raybench.records import Answer, Cause, Failure

STEPS = node_parity.steps("cuda")
DEVICES = [make_device(node, index) for node in "ab" for index in range(2)]


class Script:
    """Answers as workers do: torchrun's all_reduces take 2 ms, those of the points 1 ms."""

    def __init__(self, **answer: Any) -> None:
        self.points: list[Point] = []
        self._answer = answer

    def __call__(self, point: Point, rank: int) -> Answer:
        self.points.append(point)
        if point.workload == "collective":
            return make_measurement(rank)
        steps = json.loads(str(point.params["spec"]))["steps"]
        told = {str(size): 2.0 for size, _, _ in steps} | self._answer
        output = f"[stdout]\nraybench: torchrun {json.dumps(told)}" if rank == 0 else ""
        return replace(make_measurement(rank), output=output)


def compare(script: Any) -> list[parity.Parity]:
    cluster = make_cluster(DEVICES, script)
    cluster.start(4, "pack")
    return node_parity.compare(cluster, STEPS, 2, lambda _: None)


def test_torchrun_starts_on_each_node_with_the_devices_that_workers_have() -> None:
    task = node_parity.launch_task(DEVICES, [[0, 1], [2, 3]], STEPS)
    params = task.point.params
    assert task.point.world_size == 2
    assert (params["addresses"], params["processes"]) == ("10.0.0.1,10.0.0.2", 2)
    spec = json.loads(str(params["spec"]))
    assert (spec["device"], spec["indexes"]) == ("cuda", [0, 1])
    assert [size for size, _, _ in spec["steps"]] == [2**15, 2**20, 2**24, 2**28]


def test_each_size_is_timed_by_both_sides_in_each_start_and_judged_alone() -> None:
    script = Script()
    compared = compare(script)
    assert [one.step.name for one in compared] == [
        "parity, all_reduce 32 KiB",
        "parity, all_reduce 1 MiB",
        "parity, all_reduce 16 MiB",
        "parity, all_reduce 256 MiB",
    ]
    assert {one.torchrun_ms for one in compared} == {(2.0, 2.0)}
    assert {one.raybench_ms for one in compared} == {(1.0, 1.0)}
    checks = [parity.judge(one, is_cuda=True) for one in compared]
    assert {check.verdict for check in checks} == {Verdict.FAIL}
    assert checks[0].details["workload"] == "collective"
    starts = [point.workload for point in script.points if point.world_size == 2]
    assert len(starts) == 2 * 2, "one worker a node, twice"


def test_new_processes_are_for_the_first_size_of_a_start_only() -> None:
    tasks = [parity.task_of(STEPS[0], 4, fresh=fresh) for fresh in (True, False)]
    assert [task.settings.fresh_workers for task in tasks] == [True, False]
    assert (tasks[0].point.batch_size, tasks[0].point.scaling) == (None, None)


def test_a_torchrun_that_fails_or_says_nothing_is_told() -> None:
    def failing(point: Point, rank: int) -> Answer:
        return Failure.of(Cause.TIMEOUT, rank=rank, message="RuntimeError: no route")

    (one,) = compare(failing)
    assert (one.step.name, one.error) == ("parity, all_reduce", "torchrun: RuntimeError: no route")
    (silent,) = compare(lambda _, rank: make_measurement(rank))
    assert silent.error == "torchrun: no answer"


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (DEVICES, ""),
        (DEVICES[:1], "there is one device"),
        (DEVICES[:3], "nodes have different numbers of devices"),
    ],
)
def test_nodes_must_be_alike_for_torchrun(devices: list[Any], why: str) -> None:
    assert node_parity.why_not(devices) == why
