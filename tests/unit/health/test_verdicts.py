"""What is said of readings of which the fault is known."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from builders import make_device, make_finding, make_pair, make_readings, make_subject, make_test

from raybench.health.readings import Reading
from raybench.health.suite import COMPUTE_TEST, SUITE, WAIT_TEST, HealthTest, device_subjects
from raybench.health.suite import test_named as row_named
from raybench.health.verdicts import EXPECTED_TEST, Judgement, judge
from raybench.records.device import Device
from raybench.records.devices import Action, Verdict
from raybench.records.judgement import (
    CommandKind,
    PeerValue,
    Problem,
    ProblemKind,
    Reason,
    ReasonKind,
    ValueRange,
)
from raybench.records.status import Status

PAIRS = make_test(name="copy 256 MiB", stage="pairs", subjects="pair", unit="GB/s", floor=0.02)
FACT = make_test(
    name="Xid errors",
    stage="facts",
    unit="errors",
    floor=0.0,
    is_compared=False,
    action=Action.RESET,
)
FAILED = Problem(kind=ProblemKind.FAILED, status=Status.TIMEOUT, detail="no answer")
NOT_READ = Problem(kind=ProblemKind.OTHER_FAILED, status=Status.TIMEOUT, names=("alpha GPU 0",))
WRONG = Problem(kind=ProblemKind.WRONG_RESULT, status=Status.ERROR, detail="other bytes")
UNKNOWN_MODEL = {"name": "gemm bf16 8191"}


def devices(count: int, **changes: Any) -> list[Device]:
    return [make_device(rank, **changes) for rank in range(count)]


def on_nodes(count: int, each: int) -> list[Device]:
    return [
        make_device(rank, node_id=f"n{rank // each}", host=f"node{rank // each}", index=rank % each)
        for rank in range(count)
    ]


def unhealthy(findings: Iterable[Judgement]) -> dict[str, Judgement]:
    """By subject, without those that another is to blame for, and what is not known."""
    fine = (Verdict.HEALTHY, Verdict.UNKNOWN)
    ill = [one for one in findings if one.verdict not in fine and not one.culprit]
    return {one.subject.name: one for one in ill}


def pair_readings(count: int, slow: Iterable[tuple[int, int]]) -> list[Reading]:
    slow = set(slow)
    return [
        Reading(
            test=PAIRS,
            subject=make_pair(first, second),
            pass_number=number,
            value=100 * (0.5 if (first, second) in slow else 1),
        )
        for number in (1, 2, 3)
        for first, second in permutations(range(count), 2)
    ]


def in_one_of_three(problem: Problem) -> Reason:
    return Reason(kind=ReasonKind.PROBLEMS, problems=(problem,), value=1, limit=3)


def peers(count: int, *, best: bool = False) -> tuple[int, bool]:
    return count, best


def told_of(expected: PeerValue | ValueRange) -> object:
    """Of peers how many, and whether their best; of a range its source."""
    if isinstance(expected, PeerValue):
        return peers(expected.count, best=expected.is_best)
    return expected.source


LIMITED = {"power_cap_w": 400.0, "power_cap_default_w": 700.0}
ALL, BOTH = "all 4 NVIDIA H200", "both NVIDIA H200"


@pytest.mark.parametrize(("failed", "count"), [(0, 4), (3, 4), (0, 1)])
def test_device_slow_in_all_its_passes_is_bad(failed, count):
    readings = make_readings([750.0] * (count - 1) + [375.0], passes=3)
    for place, one in enumerate(readings):
        if one.pass_number == 2:
            problem = FAILED if one.subject.name == f"alpha GPU {failed}" else NOT_READ
            readings[place] = replace(one, value=None, problem=problem)
    found = unhealthy(judge(readings, devices(count)))[f"alpha GPU {count - 1}"]
    assert (found.verdict, round(found.ratio)) == (Verdict.BAD, 2)
    problem = FAILED if failed == count - 1 else NOT_READ
    assert (problem,) in [one.problems for one in found.evidence]


def test_a_pass_that_was_tried_again_counts_once():
    readings = make_readings([750.0] * 4, passes=3)
    ill = [one for one in readings if one.subject.name == "alpha GPU 3" and one.pass_number == 1]
    failed = [replace(one, value=None, problem=FAILED) for one in ill * 2]
    found = unhealthy(judge([*failed, *readings], devices(4)))["alpha GPU 3"]
    assert found.reason == in_one_of_three(FAILED)


@pytest.mark.parametrize(
    ("kind", "verdict", "action", "command"),
    [
        (ProblemKind.WRONG_RESULT, Verdict.BAD, Action.REPLACE, CommandKind.DRAIN_SLURM),
        (ProblemKind.DISPUTED_RESULT, Verdict.SUSPECT, Action.WATCH, CommandKind.BURN_IN),
    ],
)
@pytest.mark.parametrize("value", [None, 750.0])
@pytest.mark.parametrize("count", [1, 4])
def test_wrong_results_in_all_passes_are_named(count, value, kind, verdict, action, command):
    problem = replace(WRONG, kind=kind)
    readings = [replace(one, problem=problem) for one in make_readings([value] * count)]
    fleet = devices(count, power_cap_w=400.0, power_cap_default_w=700.0)
    found = unhealthy(judge(readings, fleet)).values()
    assert {(one.verdict, one.action) for one in found} == {(verdict, action)}
    assert {one.commands[0].kind for one in found} == {command}
    assert {one.reason for one in found} == {Reason(kind=ReasonKind.PROBLEMS, problems=(problem,))}


@pytest.mark.parametrize(
    ("values", "named", "verdict", "action", "expected"),
    [
        ([750.0] * 5 + [690.0] + [750.0] * 2, "alpha GPU 5", "suspect", "watch", peers(8)),
        ([450.0] + [750.0] * 3, "alpha GPU 0", "bad", "reset", peers(4)),
        # Of two devices the other is what is expected; of one, what its model reaches.
        ([750.0, 720.0], None, "", "", None),
        ([750.0, 615.0], "alpha GPU 1", "suspect", "watch", peers(2, best=True)),
        ([750.0, 450.0], "alpha GPU 1", "bad", "reset", peers(2, best=True)),
        ([750.0], None, "", "", None),
        ([600.0], "alpha GPU 0", "suspect", "watch", "reference"),
        # Where all are slow none is blamed.
        ([400.0] * 4, ALL, "suspect", "watch", "reference"),
        ([400.0] * 2, BOTH, "suspect", "watch", "reference"),
        # Without a value nothing is healthy.
        ([750.0, 750.0, None, 750.0, 750.0], "alpha GPU 2", "untested", None, None),
        ([750.0, float("nan"), 750.0], "alpha GPU 1", "untested", None, None),
        ([750.0, 0.0, 750.0], "alpha GPU 1", "untested", None, None),
    ],
)
def test_a_device_is_held_against_those_alike(values, named, verdict, action, expected):
    found = unhealthy(judge(make_readings(values), devices(len(values))))
    assert list(found) == ([named] if named else [])
    for one in found.values():
        assert one.verdict.value == verdict
        assert action is None or one.action.value == action
        assert expected is None or expected in map(told_of, one.expected)
        assert verdict != "bad" or one.commands[0].kind is CommandKind.RESET_GPU


@pytest.mark.parametrize(
    ("changes", "others_w", "action", "command"),
    [
        ({"other_processes": 1}, 700.0, Action.WAIT, CommandKind.SHOW_GPU_PROCESSES),
        (LIMITED, 700.0, Action.SETTING, CommandKind.SET_POWER_LIMIT),
        # All are limited, and one is slow.
        (LIMITED, 400.0, Action.RESET, CommandKind.RESET_GPU),
    ],
)
def test_process_or_power_limit_of_one_device(changes, others_w, action, command):
    fleet = [*devices(3, power_cap_w=others_w), make_device(3, **changes)]
    found = unhealthy(judge(make_readings([750.0] * 3 + [450.0]), fleet))["alpha GPU 3"]
    assert found.action is action
    [typed] = found.commands
    assert (typed.kind, typed.uuid, typed.hosts) == (command, "GPU-3", ("alpha",))
    assert typed.value == (700 if command is CommandKind.SET_POWER_LIMIT else 0)


@pytest.mark.parametrize("count", [1, 4])
def test_burn_in_that_ends_slower_is_suspect(count):
    test = make_test(name="burn-in product drift", stage="burn-in", unit="x")
    for drift, is_slow in ((1.05, False), (1.3, True)):
        found = unhealthy(judge(make_readings([drift] * count, test, passes=1), devices(count)))
        assert bool(found) == is_slow


def test_failing_device_is_bad_its_victim_untested():
    problems = (FAILED, NOT_READ)
    none = make_readings([None, None])
    readings = [replace(one, problem=problems[place % 2]) for place, one in enumerate(none)]
    found = unhealthy(judge(readings, devices(2)))
    assert [one.verdict for one in found.values()] == [Verdict.BAD, Verdict.UNTESTED]


@pytest.mark.parametrize(
    ("problem", "value", "verdict", "action"),
    [
        (FAILED, None, Verdict.SUSPECT, Action.WATCH),
        (WRONG, None, Verdict.BAD, Action.REPLACE),
        (Problem(kind=ProblemKind.CHANGED_BITS), 750.0, Verdict.BAD, Action.REPLACE),
        (NOT_READ, None, None, None),
    ],
)
def test_a_problem_in_one_pass_of_three(problem, value, verdict, action):
    readings = make_readings([750.0, 750.0], passes=3)
    assert (readings[3].pass_number, readings[3].subject.name) == (2, "alpha GPU 1")
    readings[3] = replace(readings[3], value=value, problem=problem)
    found = unhealthy(judge(readings, devices(2)))
    assert list(found) == (["alpha GPU 1"] if verdict else [])
    for one in found.values():
        assert (one.verdict, one.action) == (verdict, action)
        is_bad = verdict is Verdict.BAD
        always = Reason(kind=ReasonKind.PROBLEMS, problems=(problem,))
        assert one.reason == (always if is_bad else in_one_of_three(problem))
        if action is Action.REPLACE:
            told = [(typed.kind, typed.hosts) for typed in one.commands]
            kinds = (CommandKind.DRAIN_SLURM, CommandKind.CORDON)
            assert told == [(kind, ("alpha",)) for kind in kinds]


def test_only_used_variables_are_named():
    variables = {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "0", "NCCL_ALGO": "Tree"}
    fleet = devices(4, topology="NVLink x18", environment=variables)
    together = make_test(name="all_reduce 1 GiB", stage="together", subjects="node", unit="GB/s")
    all_four = make_subject(kind="node", uuids=tuple(make_subject(n).uuids[0] for n in range(4)))
    reading = Reading(test=together, subject=all_four, pass_number=1, value=100.0)
    [found] = unhealthy(judge([reading], fleet)).values()
    assert [typed.names for typed in found.commands] == [("NCCL_ALGO",)]
    [found] = unhealthy(judge(make_readings([20.0] * 4, host_links()), fleet)).values()
    assert [typed.kind for typed in found.commands] == [CommandKind.SHOW_HOST_TOPOLOGY]


def host_links(stage: str = "host-links") -> HealthTest:
    return make_test(name="both alone", stage=stage, unit="GB/s", floor=0.03)


@pytest.mark.parametrize(
    ("values", "named"), [([60.0] * 2, []), ([60.0], []), ([40.0] * 2, ["both NVIDIA H200"])]
)
def test_host_links_depend_on_the_host(values, named):
    readings = make_readings(values, host_links())
    assert list(unhealthy(judge(readings, devices(len(values))))) == named


def test_lone_device_without_comparison_is_unknown():
    burn_in = make_test(name="burn-in product drift", stage="burn-in", unit="x")
    readings = make_readings([600.0], make_test(**UNKNOWN_MODEL)) + make_readings([1.0], burn_in)
    device, _, model = judge(readings, devices(1))
    assert device.verdict is Verdict.UNKNOWN
    assert (device.reason.kind, device.reason.model) == (ReasonKind.NOTHING_KNOWN, "NVIDIA H200")
    assert (round(device.reason.value), device.reason.unit) == (990, "TFLOP/s")
    assert (model.test.name, model.verdict) == (EXPECTED_TEST, Verdict.UNKNOWN)


@pytest.mark.parametrize(
    ("before", "now", "floor", "named", "expected"),
    [
        # One of two is compared with its own past.
        ([[700, 702, 698], [700, 690, 710]], [700, 595], 0.03, "alpha GPU 1", ("own checks", 3)),
        # All of a fleet with the past of their model, from three checks on.
        ([[700, 702, 698]], [560] * 6, 0.01, "all 6 NVIDIA H200", ("checks of model", 3)),
        ([[700, 702]] * 4, [560] * 4, 0.01, None, None),
        # Workers that share their cores may all have a busy hour.
        ([[25, 26, 25.5]], [11.5] * 2, 0.1, None, None),
        ([[25, 26, 25.5]], [2] * 2, 0.1, "both NVIDIA H200", ("checks of model", 3)),
    ],
)
def test_a_device_is_compared_with_earlier_checks(before, now, floor, named, expected):
    test = make_test(**UNKNOWN_MODEL, floor=floor)
    past = [
        (f"run-{check}", make_finding(make_subject(rank), test=test.name, value=value))
        for rank, values in enumerate(before)
        for check, value in enumerate(values)
    ]
    # Values of devices that were bad do not count.
    bad = make_finding(test=test.name, value=1.0, verdict=Verdict.BAD)
    past += [(f"bad-{check}", bad) for check in range(3)]
    found = unhealthy(judge(make_readings(now, test), devices(len(now)), past))
    assert list(found) == ([named] if named else [])
    told = [(known.source, known.checks) for one in found.values() for known in one.expected]
    assert told == ([expected] if expected else [])


def test_fact_is_wrong_by_itself():
    readings = make_readings([0.0, 3.0, 0.0, 0.0], FACT, passes=1)
    assert unhealthy(judge(readings, devices(4))) == {}
    readings[1] = replace(readings[1], problem=Problem(kind=ProblemKind.NEW_XIDS, numbers=(79,)))
    found = unhealthy(judge(readings, devices(4)))["alpha GPU 1"]
    assert (found.verdict, found.action) == (Verdict.BAD, Action.RESET)


def both_ways(*pairs: tuple[int, int]) -> set[tuple[int, int]]:
    return {*pairs, *((second, first) for first, second in pairs)}


def names(ways: Iterable[tuple[int, int]]) -> set[str]:
    return {f"alpha GPU {first} to alpha GPU {second}" for first, second in ways}


FROM_0 = both_ways((0, 1), (0, 2))
ALL_OF_NODE_1 = both_ways(*((mine, other) for mine in (2, 3) for other in (0, 1, 4, 5)))
GPUS_023 = ("alpha GPU 0", "alpha GPU 2", "alpha GPU 3")
OF_GPU_1 = Reason(kind=ReasonKind.SLOW_WITH_PARTNERS, value=3, subject="device")
OF_NODE_1 = Reason(kind=ReasonKind.SLOW_WITH_PARTNERS, value=2, subject="node")
OF_NODE_PATH = Reason(kind=ReasonKind.SLOW_PATH, value=8, limit=8)
NODE_0_TO_1 = both_ways(*((mine, other) for mine in (0, 1) for other in (2, 3)))


@pytest.mark.parametrize(
    ("fleet", "slow", "named", "kind", "reason", "partners"),
    [
        # Slow with all partners, which are fast with others.
        (
            devices(4),
            both_ways((1, 0), (1, 2), (1, 3)),
            {"alpha GPU 1"},
            "device",
            OF_GPU_1,
            GPUS_023,
        ),
        # Fast with most partners: two paths.
        (devices(8), FROM_0, names(FROM_0), "pair", "path", ()),
        # Without other partners neither the devices nor the path.
        (devices(2), {(0, 1)}, names({(0, 1)}), "pair", "path or end", ()),
        (on_nodes(6, 2), ALL_OF_NODE_1, {"node1"}, "node", OF_NODE_1, ("node0", "node2")),
        # One finding for all devices of two nodes.
        (on_nodes(6, 2), NODE_0_TO_1, {"node0 to node1"}, "pair", OF_NODE_PATH, ()),
    ],
)
def test_slow_pairs_have_a_root_cause(fleet, slow, named, kind, reason, partners):
    findings = judge(pair_readings(len(fleet), slow), fleet)
    found = unhealthy(findings)
    assert set(found) == named
    assert {one.subject.kind for one in found.values()} == {kind}
    blame = isinstance(reason, str)
    assert {one.reason.blame if blame else one.reason for one in found.values()} == {reason}
    told = [one.names for cause in found.values() for one in cause.evidence if one.names]
    assert told == ([partners] if partners else [])
    victims = [one for one in findings if one.culprit]
    assert len(victims) == (0 if named == names(slow) else len(slow))


def test_pairs_that_failed_once_are_not_slow():
    readings = [
        replace(one, value=None, problem=FAILED)
        if one.pass_number == 2 and "GPU-0" in one.subject.uuids
        else one
        for one in pair_readings(4, ())
    ]
    found = unhealthy(judge(readings, devices(4)))
    assert set(found) == names(both_ways((0, 1), (0, 2), (0, 3)))
    assert {one.reason for one in found.values()} == {in_one_of_three(FAILED)}


def straggler(wait_ms: Sequence[float], compute_ms: Sequence[float]) -> list[Reading]:
    wait = make_test(name=WAIT_TEST, stage="straggler", unit="ms", floor=0.1, is_compared=False)
    compute = replace(wait, name=COMPUTE_TEST, is_compared=True)
    return [*make_readings(wait_ms, wait), *make_readings(compute_ms, compute)]


def test_all_awaited_ranks_are_named():
    late, other = straggler([4e3, 4e3, 4e3, 1e3, 1], [6e3] * 5), straggler([4, 0.1, 4], [6] * 3)
    other = [
        replace(one, subject=replace(one.subject, name=f"beta{one.subject.name[5:]}", model="A100"))
        for one in other
    ]
    # Slow launches are no fault of a device.
    launches = make_readings([10.0] * 3 + [90.0, 10.0], row_named("launch", "cuda"))
    readings = [*make_readings([750.0] * 4 + [450.0]), *launches, *late, *other]
    waits = [one for one in judge(readings, devices(5)) if one.test.name == WAIT_TEST]
    told = {one.subject.name: one for one in waits if one.verdict is Verdict.SUSPECT}
    assert list(told) == ["alpha GPU 3", "alpha GPU 4", "beta GPU 1"]
    # Of a good device the CPU or the data is late.
    kinds = {name: [reason.kind for reason in one.evidence] for name, one in told.items()}
    assert kinds["alpha GPU 3"] == [ReasonKind.CPU_OR_DATA]
    assert kinds["alpha GPU 4"] == [ReasonKind.SLOW_ALONE]
    assert told["alpha GPU 4"].action is Action.WATCH
    named = ["alpha GPU 4"] * 3 + [""] * 2 + ["beta GPU 1", "", "beta GPU 1"]
    assert [one.culprit.name if one.culprit else "" for one in waits] == named
    [waited] = waits[0].evidence
    assert (waits[0].verdict, waited.kind, round(waited.value)) == ("healthy", "waits", 4001)


def test_rank_late_in_two_passes_is_no_straggler():
    readings = straggler([4, 4, 0.1, 4], [6, 6, 6, 6])
    readings = [
        replace(one, value=0.1) if one.pass_number == 3 and one.test.name == WAIT_TEST else one
        for one in readings
    ]
    assert unhealthy(judge(readings, devices(4))) == {}


def test_bad_ratio_of_a_test_is_kept():
    readings = make_readings([50.0, 25.0], make_test(floor=0.1))
    lenient = [replace(one, test=replace(one.test, is_paced_by_host=True)) for one in readings]
    assert Verdict.BAD in {one.verdict for one in judge(readings, devices(2))}
    assert Verdict.BAD not in {one.verdict for one in judge(lenient, devices(2))}


def test_often_used_devices_are_suspect():
    """Two CPU workers and a neighbour on one of two cores: gemm 1024 took 1.33 times as long."""
    test = make_test(name="gemm fp32 1024", floor=0.1)
    workers = devices(2, kind="cpu", name="Xeon")
    beside = ("other processes kept 1 of 2 processors busy on alpha",)
    readings = [
        Reading(
            test=test,
            subject=subject,
            pass_number=number,
            value=value,
            other_programs=beside if number < 3 else (),
            point_id="a",
        )
        for number in (1, 2, 3)
        for subject, value in zip(device_subjects(workers), (0.0597, 0.0448), strict=True)
    ]
    [found] = unhealthy(judge(readings, workers)).values()
    assert (found.subject.name, found.verdict) == ("both CPU workers", Verdict.SUSPECT)
    assert found.reason == Reason(kind=ReasonKind.OTHER_PROGRAMS, value=2, limit=3)
    assert [one.names for one in found.evidence] == [beside]
    assert [typed.kind for typed in found.commands] == [CommandKind.SHOW_ALL_CPU_LOAD]
    in_one_pass = [replace(one, other_programs=()) for one in readings if one.pass_number > 1]
    assert unhealthy(judge([*readings[:2], *in_one_pass], workers)) == {}


def test_pcie_is_compared_within_the_same_slot():
    test = replace(host_links(), name="of no reference")
    half = make_finding(test=test.name, value=50.0, link="gen5 x16")
    past = [(f"run-{check}", half) for check in range(3)]
    slots = ["gen4 x16"] * 4 + ["gen5 x16"] * 4
    fleet = [make_device(rank, pcie_link_max=slot) for rank, slot in enumerate(slots)]
    readings = make_readings([25.0] * 4 + [50.0] * 4, test)
    assert unhealthy(judge(readings, fleet, past)) == {}
    slow = judge(make_readings([25.0] * 4, test), devices(4, pcie_link_max="gen5 x16"), past)
    assert list(unhealthy(slow)) == [ALL]


def test_pairs_are_compared_by_their_bridges():
    # 0 with 1, and 2 with 3.
    reached = [f"{rank ^ 1}:NV, {rank ^ 2}:SYS, {rank ^ 3}:SYS" for rank in range(4)]
    fleet = [
        make_device(rank, topology=f"NVLink x12, {others}", pcie_link_max="gen4 x16")
        for rank, others in enumerate(reached)
    ]
    without = both_ways((0, 2), (0, 3), (1, 2), (1, 3))
    found = judge(pair_readings(4, without), fleet)
    assert unhealthy(found) == {}
    links = {one.subject.name: one.link for one in found if one.subject.kind == "pair"}
    assert links["alpha GPU 2 to alpha GPU 3"] == "NVLink x12"
    assert {links[name] for name in names(without)} == {"NVLink x0, gen4 x16, SYS"}
    apart = [replace(one, node_id=f"n{rank}") for rank, one in enumerate(fleet)]
    assert {one.link for one in judge(pair_readings(4, ()), apart)} == {""}


# What two healthy H200s of one host have read, on two hosts: medians of `raybench health` with
# torch 2.11, November 2026. The run of the first was not kept; in the second, which is
# health-20261122-192647-9705, copies between host and device were a false alarm once.
H200_FIGURES = {
    "gemm tf32 2048": [(328, 335)],
    "gemm fp16 8192": [(643, 664), (657, 664)],
    "gemm bf16 8192": [(687, 686), (672, 701)],
    "memory 1000 MB": [(4355, 4357), (4355, 4354)],
    "launch and wait": [(14.6, 20.1), (29.6, 26.5)],
    "launch": [(6.53, 9.02), (11.3, 11.2)],
    "h2d alone": [(49.4, 51.0)],
    "h2d all at once": [(42.1, 42.0)],
    "d2h alone": [(55.1, 55.2)],
    "both alone": [(100, 99.4), (78.9, 78.3)],
    "both all at once": [(70.9, 71.4), (58.8, 58.8)],
    "smoke 784-256-10": [(1.37, 1.39)],
    "step compute": [(5.92, 6.23)],
}
H200S = tuple(make_device(rank, topology="NVLink x18, 1:PHB") for rank in range(2))
TESTS = {test.name: test for test in SUITE["cuda"]}


def judge_h200s(check: int, **changes: tuple[float, float]) -> list[Judgement]:
    """check: 0 or -1, the first or the second."""
    values = {name: found[check] for name, found in H200_FIGURES.items()} | changes
    readings = [
        Reading(test=TESTS[name], subject=subject, pass_number=number, value=value)
        for name, both in values.items()
        for subject, value in zip(device_subjects(H200S), both, strict=True)
        for number in (1, 2, 3)
    ]
    return [one for one in judge(readings, H200S) if one.verdict is not Verdict.HEALTHY]


def test_confined_h200_is_named_beside_healthy_ones():
    assert judge_h200s(0) == judge_h200s(-1) == []
    [ill] = judge_h200s(0, **{"gemm bf16 8192": (684, 0.82 * 684)})
    assert (ill.subject.name, ill.test.name) == ("alpha GPU 1", "gemm bf16 8192")
