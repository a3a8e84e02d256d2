"""Which readings drain a node, and which do not."""

from dataclasses import replace
from typing import Any

import pytest
from builders import make_device, make_readings, make_subject, make_test

from raybench.health.nodes import CheckCourse, node_reports
from raybench.health.readings import Reading
from raybench.health.suite import test_named as row_named
from raybench.health.verdicts import judge
from raybench.records.device import Device
from raybench.records.devices import Action
from raybench.records.judgement import Problem, ProblemKind
from raybench.records.node_report import DrainKind, NodeReport, NodeState, UntestedKind
from raybench.records.status import Status

COURSE = CheckCourse(began="2026-11-30T10:00:00+00:00", seconds=60.0, is_whole=True)
FACT = make_test(
    name="Xid errors",
    stage="facts",
    unit="errors",
    floor=0.0,
    is_compared=False,
    action=Action.RESET,
)
FAILED = Problem(kind=ProblemKind.FAILED, status=Status.ERROR, detail="no answer")
ALL_REDUCE = make_test(
    name="all_reduce 1 GiB", stage="together", subjects="node", unit="GB/s", floor=0.02
)


def on_nodes(count: int, each: int, **changes: Any) -> list[Device]:
    return [
        make_device(
            rank,
            node_id=f"n{rank // each}",
            host=f"node{rank // each}",
            index=rank % each,
            **changes,
        )
        for rank in range(count)
    ]


def readings_of(values: list[float | None], each: int, **changes: Any) -> list[Reading]:
    """Readings of so many GPUs a node."""
    readings = make_readings(values, **changes)
    named = []
    for place, reading in enumerate(readings):
        rank = place % len(values)
        name = f"node{rank // each} GPU {rank % each}"
        named.append(replace(reading, subject=replace(reading.subject, name=name)))
    return named


def report_of(readings: list[Reading], fleet: list[Device], **changes: Any) -> NodeReport:
    """The report of the last node."""
    *_, last = node_reports(judge(readings, fleet), fleet, replace(COURSE, **changes))
    return last


def with_problem(readings: list[Reading], rank: int, problem: Problem, passes: int, value=None):
    """The readings, with a problem of one GPU in the first passes."""
    uuid = f"GPU-{rank}"
    return [
        replace(one, value=value, problem=problem)
        if one.subject.uuids == (uuid,) and one.pass_number <= passes
        else one
        for one in readings
    ]


@pytest.mark.parametrize("test", ["launch", "launch and wait", "smoke 784-256-10"])
def test_slow_launches_never_drain(test):
    row = row_named(test, "cuda")
    report = report_of(readings_of([16.3] * 7 + [143.0], each=4, test=row), on_nodes(8, each=4))
    assert (report.state, report.drain) == (NodeState.SUSPECT, ())


@pytest.mark.parametrize(
    ("slow", "passes", "state"),
    [(450.0, 3, "drain"), (450.0, 2, "drain"), (450.0, 1, "suspect"), (680.0, 3, "suspect")],
)
def test_device_slow_twice_drains_its_node(slow, passes, state):
    readings = readings_of([750.0] * 7 + [slow], each=4, passes=passes)
    fleet = on_nodes(8, each=4)
    first, second = node_reports(judge(readings, fleet), fleet, COURSE)
    assert (first.state, second.state) == ("healthy", state)
    assert second.devices == tuple(f"node1 GPU {number}" for number in range(4))
    drained = {(one.kind, one.device, one.test) for one in second.drain}
    wanted = {(DrainKind.FAILED_TWICE, "node1 GPU 3", "gemm bf16 8192")}
    assert drained == (wanted if state == "drain" else set())
    assert {one.subject.name for one in first.findings} <= {*first.devices, "all NVIDIA H200"}


def test_lowered_power_limit_does_not_drain():
    fleet = on_nodes(4, each=4)
    fleet[3] = replace(fleet[3], power_cap_w=300.0, power_cap_default_w=700.0)
    report = report_of(readings_of([750.0] * 3 + [400.0], each=4), fleet)
    assert (report.state, report.drain) == (NodeState.SUSPECT, ())


def test_slow_device_of_busy_node_is_untested():
    readings = readings_of(
        [750.0] * 3 + [400.0], each=4, other_programs=("python of ann",), point_id="p"
    )
    report = report_of(readings, on_nodes(4, each=4))
    assert (report.state, report.drain) == (NodeState.UNTESTED, ())
    [reason] = report.untested
    assert (reason.kind, reason.detail) == (UntestedKind.BUSY, "python of ann")


@pytest.mark.parametrize(
    ("problem", "state"),
    [
        (Problem(kind=ProblemKind.MEMORY_ERRORS, value=0, limit=2), "drain"),
        (Problem(kind=ProblemKind.LINKS_DOWN, numbers=(4,)), "drain"),
        (Problem(kind=ProblemKind.NEW_XIDS, numbers=(13, 79)), "drain"),
        # Xid 13 and 45 come from programs, and old Xids stay in the log after a repair.
        (Problem(kind=ProblemKind.NEW_XIDS, numbers=(13, 45)), "suspect"),
        (Problem(kind=ProblemKind.OLD_XIDS, numbers=(79,)), "suspect"),
        (Problem(kind=ProblemKind.FEW_LANES, value=8, limit=16), "suspect"),
        (Problem(kind=ProblemKind.DEVICE_UNREAD, detail="no answer in 20 s"), "suspect"),
        (Problem(kind=ProblemKind.WORKER_LOST), "suspect"),
    ],
)
def test_only_errors_of_the_driver_drain(problem, state):
    readings = make_readings([1.0] * 2, FACT, passes=1)
    report = report_of(with_problem(readings, 1, problem, 1, 1.0), on_nodes(2, each=2))
    assert report.state == state
    assert {one.kind for one in report.drain} == ({"driver error"} if state == "drain" else set())


@pytest.mark.parametrize(
    ("problem", "passes", "each", "state"),
    [
        (FAILED, 3, 4, "drain"),
        (replace(FAILED, status=Status.TIMEOUT), 3, 4, "drain"),
        # The software of this node may be broken: nothing else on it shows that it works.
        (FAILED, 3, 1, "suspect"),
        (replace(FAILED, status=Status.OOM), 3, 4, "suspect"),
        (replace(FAILED, status=Status.LOST), 3, 4, "suspect"),
        (FAILED, 1, 4, "suspect"),
        (Problem(kind=ProblemKind.CHANGED_BITS), 2, 4, "drain"),
        (Problem(kind=ProblemKind.CHANGED_BITS), 1, 4, "suspect"),
        (Problem(kind=ProblemKind.WRONG_RESULT), 2, 1, "drain"),
        (Problem(kind=ProblemKind.OTHER_BITS, value=3), 3, 4, "drain"),
        (Problem(kind=ProblemKind.OTHER_BITS, value=3), 3, 1, "suspect"),
    ],
)
def test_failures_drain_if_no_software_explains_them(problem, passes, each, state):
    value = None if problem.kind is ProblemKind.FAILED else 750.0
    readings = with_problem(readings_of([750.0] * 4, each=each), 3, problem, passes, value)
    assert report_of(readings, on_nodes(4, each=each)).state == state


def test_missing_memory_makes_a_node_untested():
    no_room = Problem(kind=ProblemKind.NO_ROOM, value=0, limit=2**30)
    readings = with_problem(readings_of([750.0] * 4, each=4), 3, no_room, 3)
    report = report_of(readings, on_nodes(4, each=4))
    assert (report.state, report.untested[0].kind) == (NodeState.UNTESTED, UntestedKind.BUSY)


def node_readings(rates: list[float]) -> list[Reading]:
    """Readings of an all_reduce in nodes of two GPUs."""
    return [
        Reading(
            test=ALL_REDUCE,
            subject=make_subject(
                kind="node",
                uuids=(f"GPU-{2 * number}", f"GPU-{2 * number + 1}"),
                name=f"node{number}",
            ),
            pass_number=pass_number,
            value=rate,
        )
        for pass_number in (1, 2, 3)
        for number, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(
    ("rates", "states"),
    [
        ([300.0, 302.0, 298.0, 301.0, 100.0], ["healthy"] * 4 + ["drain"]),
        # Nothing says whether a single node is slow by a fault or by its settings.
        ([100.0], ["healthy"]),
    ],
)
def test_node_is_drained_beside_faster_nodes_only(rates, states):
    fleet = on_nodes(2 * len(rates), each=2)
    # A check always has values that are healthy.
    readings = [*node_readings(rates), *make_readings([0.0] * len(fleet), FACT, passes=1)]
    reports = node_reports(judge(readings, fleet), fleet, COURSE)
    assert [report.state for report in reports] == states


def test_failure_of_another_node_is_not_counted():
    other = Problem(kind=ProblemKind.OTHER_FAILED, status=Status.ERROR, names=("node0 GPU 1",))
    test = make_test(name="send 4 MiB", stage="pairs", subjects="pair", unit="GB/s")
    subject = make_subject(kind="pair", uuids=("GPU-1", "GPU-2"), name="node0 GPU 1 to node1 GPU 0")
    failed = [
        Reading(test=test, subject=subject, pass_number=number, value=None, problem=other)
        for number in (1, 2, 3)
    ]
    fleet = on_nodes(4, each=2)
    readings = [*readings_of([750.0] * 4, each=2), *failed]
    states = [one.state for one in node_reports(judge(readings, fleet), fleet, COURSE)]
    assert states == ["untested", "healthy"]


def test_interrupted_check_is_out_of_time():
    report = report_of(readings_of([750.0] * 4, each=4), on_nodes(4, each=4), is_whole=False)
    assert (report.state, report.untested[0].kind) == (NodeState.UNTESTED, "out of time")


def test_values_without_comparison_are_no_health():
    test = make_test(name="gemm bf16 8191")
    report = report_of(make_readings([750.0], test), on_nodes(1, each=1))
    assert (report.state, report.untested[0].kind) == (NodeState.UNTESTED, "no comparison")
