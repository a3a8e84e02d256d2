"""From records, and from the facts before and after a check, to what was read of each device."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from builders import make_device, make_failed, make_measurement, make_record

from raybench.health.readings import (
    Reading,
    drift,
    facts_readings,
    read_record,
    split_by_memory,
    wrong_bits,
)
from raybench.health.suite import PASS_STAGES, Fleet, Probe, probes, title
from raybench.job.point import Scalar
from raybench.records.devices import DeviceFacts, NvLink
from raybench.records.judgement import LinkErrors, Problem, ProblemKind
from raybench.records.measurement import Breakdown
from raybench.records.record import Record
from raybench.records.status import Cause, Status
from raybench.workloads.networks import NoMajorityError


def fleet_of(count: int = 2, **changes) -> Fleet:
    return Fleet(devices=tuple(make_device(rank, **changes) for rank in range(count)))


def probe_named(name: str, fleet: Fleet) -> Probe:
    return probes_named(name, fleet)[0]


def probes_named(name: str, fleet: Fleet, **params: Scalar) -> list[Probe]:
    """Those of the test with these parameters."""
    return [
        probe
        for probe in probes(fleet, PASS_STAGES)
        if probe.test.name == name and params.items() <= probe.point.params.items()
    ]


def two_nodes(each: int = 2) -> Fleet:
    devices = [
        make_device(rank % each, uuid=f"GPU-{rank}", node_id=f"node-{node}", host=node)
        for rank in range(2 * each)
        for node in ["ab"[rank // each]]
    ]
    return Fleet(devices=tuple(devices))


def record_of(probe: Probe, fleet: Fleet, *steps_ns: int, **changes) -> Record:
    measurements = tuple(
        replace(make_measurement(rank, [[ns] * 5]), **changes) for rank, ns in enumerate(steps_ns)
    )
    return make_record(probe.point, devices=fleet.devices, measurements=measurements)


def test_rate_follows_from_own_median_step():
    fleet = fleet_of()
    probe = probe_named("gemm bf16 8192", fleet)
    record = record_of(probe, fleet, 1_000_000, 2_000_000, flops_per_step=8e11)
    readings = read_record(record, probe, fleet)
    assert [one.value for one in readings] == pytest.approx([800.0, 400.0])
    assert [one.subject.name for one in readings] == ["alpha GPU 0", "alpha GPU 1"]
    assert [one.subject.uuids for one in readings] == [("GPU-0",), ("GPU-1",)]
    assert {one.point_id for one in readings} == {probe.point.point_id}


OF_RANK_1 = Problem(kind=ProblemKind.FAILED, status=Status.TIMEOUT, detail="no answer")
NOT_READ = Problem(kind=ProblemKind.OTHER_FAILED, status=Status.TIMEOUT, names=("alpha GPU 1",))
DISPUTED = Problem(kind=ProblemKind.DISPUTED_RESULT, status=Status.TIMEOUT, detail="no answer")


@pytest.mark.parametrize(
    ("error", "first", "second"),
    [
        (Cause.TIMEOUT, NOT_READ, OF_RANK_1),
        (NoMajorityError.__name__, DISPUTED, DISPUTED),
    ],
)
def test_failed_point_names_its_device(error, first, second):
    fleet = fleet_of()
    probe = probe_named("memory 100 MB", fleet)
    told = {"error_type": error, "error_message": "no answer", "error_rank": 1}
    record = make_failed(probe.point, status=Status.TIMEOUT, **told)
    readings = read_record(record, probe, fleet)
    assert [(one.value, one.problem) for one in readings] == [(None, first), (None, second)]


def test_only_the_copying_rank_is_read():
    fleet = fleet_of()
    [probe] = probes_named("h2d alone", fleet, local_rank=1)
    measured = record_of(probe, fleet, 100, 2_000_000)
    idle, busy = measured.measurements
    both = replace(idle, memory_bytes=0), replace(busy, memory_bytes=10**8)
    [reading] = read_record(replace(measured, measurements=both), probe, fleet)
    assert (reading.subject.name, reading.value) == ("alpha GPU 1", pytest.approx(50.0))


@pytest.mark.parametrize(
    ("test", "direction", "name", "value"),
    [
        ("send 256 MiB", "forward", "alpha GPU 0 to alpha GPU 1", 100.0),
        ("send 256 MiB", "backward", "alpha GPU 1 to alpha GPU 0", 100.0),
        # Half of a round trip of the slower rank, in µs.
        ("send latency 8 B", "round_trip", "alpha GPU 0 to alpha GPU 1", 1000.0),
    ],
)
def test_pair_is_named_from_the_sender(test, direction, name, value):
    fleet = fleet_of()
    [probe] = probes_named(test, fleet, direction=direction)
    record = record_of(probe, fleet, 1_000_000, 2_000_000, message_bytes=2 * 10**8)
    [reading] = read_record(record, probe, fleet)
    assert (reading.subject.name, reading.value) == (name, pytest.approx(value))


@pytest.mark.parametrize("count", [2, 3])
def test_pairs_are_read_both_ways(count):
    fleet = two_nodes(count)
    read = Counter(
        (reading.test.name, reading.subject.uuids)
        for probe in probes(fleet, ["pairs"])
        for reading in read_record(
            record_of(probe, fleet, *[10**6] * len(fleet.devices), message_bytes=8), probe, fleet
        )
    )
    each = {name: [u for n, u in read if n == name] for name in {name for name, _ in read}}
    within = 2 * count * (count - 1)
    assert len(each["send 256 MiB"]) == len(each["copy 256 MiB"]) == within
    assert len(each["send 256 MiB between nodes"]) == 2 * count * count
    assert set(read.values()) == {1}


def test_groups_are_read_per_node_and_together():
    fleet = two_nodes()
    node, cluster = probes_named("all_reduce 1 GiB", fleet)
    figures = {"message_bytes": 2**30, "busbw_factor": 1.0}
    first, second = read_record(record_of(node, fleet, *[10**7] * 4, **figures), node, fleet)
    assert (first.subject.name, first.subject.model) == ("a", "NVIDIA H200")
    assert second.subject.uuids == ("GPU-2", "GPU-3")
    assert first.value == pytest.approx(107.4, abs=0.1)
    [whole] = read_record(record_of(cluster, fleet, *[10**7] * 4, **figures), cluster, fleet)
    assert (whole.subject.kind, whole.subject.name) == ("cluster", "all 4 devices")


def test_training_step_is_read_in_parts():
    fleet = fleet_of()
    probe = probe_named("step compute", fleet)
    slow = Breakdown(local_ms=((4.0, 4.2, 4.1), (5.0, 5.0, 5.2)), comm_ms=(2.0,), tail_ms=(1.5,))
    fast = Breakdown(local_ms=((3.0,) * 3, (3.0,) * 3), comm_ms=(3.5,), tail_ms=(3.0,))
    record = record_of(probe, fleet, 10**7, 10**7)
    parts = zip(record.measurements, (slow, fast), strict=True)
    measurements = tuple(replace(one, breakdown=breakdown) for one, breakdown in parts)
    readings = read_record(replace(record, measurements=measurements), probe, fleet)
    values = {(one.test.name, one.subject.name): one.value for one in readings}
    assert values["step compute", "alpha GPU 0"] == 4.6
    assert values["step wait", "alpha GPU 0"] == 0.0
    assert values["step wait", "alpha GPU 1"] == 1.5
    assert values["step communication", "alpha GPU 1"] == 2.0
    assert not read_record(record_of(probe, fleet, 10**7, 10**7), probe, fleet)


def bits(*digests: int, changed: int | None = None, misplaced: int | None = None):
    return [
        dict(digest=digest, changed_products=rank == changed, misplaced_products=rank == misplaced)
        for rank, digest in enumerate(digests)
    ]


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (bits(7, 7, 7, 7), set()),
        (bits(7, 7, 8, 7), {2}),
        (bits(7, 8), {0, 1}),
        (bits(7, 8, misplaced=1), {1}),
        (bits(7, 7, misplaced=1), set()),
        (bits(7, 7, changed=0), {0}),
        (bits(7, 8, changed=0), {0}),
        (bits(7, 7, 8, 9, misplaced=3), {2, 3}),
    ],
)
def test_wrong_bits_are_those_of_the_minority(found, named):
    problems = wrong_bits(found, fleet_of(len(found)).subjects)
    assert set(problems) == named
    is_disputed = named == {0, 1}
    assert {one.effect for one in problems.values()} <= {"disputed" if is_disputed else "fault"}
    assert {one.names for one in problems.values()} <= {
        ("alpha GPU 0", "alpha GPU 1") if is_disputed else ()
    }
    devices = (make_device(0), make_device(1, name="Other GPU"))
    assert not wrong_bits(bits(7, 8), Fleet(devices=devices).subjects)


def test_failed_pair_of_a_turn_is_named():
    fleet = fleet_of(4)
    probe = probes_named("send 256 MiB", fleet, direction="forward")[0]
    record = make_failed(
        probe.point,
        status=Status.ERROR,
        error_type="WrongResultError",
        error_message="ranks 1 and 3: a wrong payload",
        error_rank=3,
    )
    told = {one.subject.uuids: one.problem for one in read_record(record, probe, fleet)}
    culprit = told.pop(("GPU-1", "GPU-3"))
    assert (culprit.kind, culprit.effect) == (ProblemKind.WRONG_RESULT, "fault")
    assert culprit.detail == record.error_message
    other = Problem(kind=ProblemKind.OTHER_FAILED, status=Status.ERROR, names=("alpha GPU 3",))
    assert list(told.values()) == [other]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_points_and_titles_of_a_check_differ(kind, count):
    made = probes(fleet_of(count, kind=kind), PASS_STAGES)
    assert len({probe.point.point_id for probe in made}) == len(made)
    assert {probe.point.world_size for probe in made} == {count}
    titles = {title(probe.point) for probe in made}
    assert len(titles) == len(made)
    if kind == "cuda" and count == 2:
        assert {"gemm bf16 256", "memory 100 MB", "host_copy d2h local rank 1 128 MiB"} <= titles


def test_tests_without_room_are_not_run():
    fleet = fleet_of()
    made = probes(fleet, ["alone"])
    free = {"GPU-0": 100 * 2**30, "GPU-1": 2 * 2**30}
    fitting, unread = split_by_memory(made, fleet, free)
    names = {probe.test.name for probe in fitting}
    assert "gemm bf16 2048" in names
    assert "memory 1000 MB" not in names
    [lacking] = [one for one in unread if one.test.name == "memory 1000 MB"]
    assert lacking.subject.name == "alpha GPU 1"
    needed = 2**30 + 3 * 10**9
    assert lacking.problem == Problem(kind=ProblemKind.NO_ROOM, value=2**31, limit=needed)
    assert split_by_memory(made, fleet, {}) == (made, ())


@pytest.mark.parametrize(("last", "ratio"), [(100.0, 1.0), (80.0, 1.25)])
def test_drift_compares_last_tenth_with_first(last, ratio):
    fleet = fleet_of(1)
    [probe] = probes(fleet, ["burn-in"])
    readings = [
        Reading(test=probe.test, subject=fleet.subjects[0], pass_number=number, value=value)
        for number, value in enumerate([100.0] * 18 + [last] * 2, 4)
    ]
    [found] = drift(readings, 0.01)
    assert found.value == pytest.approx(ratio)
    assert found.test.name == f"{probe.test.name} drift"
    assert not list(drift(readings[:1], 0.01))


AT_S = 1000.0
NO_ERRORS = {"crc": 0, "replay": 0, "recovery": 0}
LINKS = tuple(NvLink(link=link, is_active=True, errors=NO_ERRORS) for link in range(4))


def facts_of(index: int = 0, **changes) -> DeviceFacts:
    """A healthy device of an NVSwitch system."""
    healthy = {
        "device": make_device(index),
        "read_s": AT_S,
        "memory_free_bytes": 139 * 2**30,
        "ecc_errors": 0,
        "remapped_rows": 1,
        "is_remap_pending": False,
        "is_remap_failed": False,
        "retired_pages": 2,
        "is_retirement_pending": False,
        "pcie_replays": 3,
        "pcie_lanes": 16,
        "pcie_lanes_max": 16,
        "nvlinks": LINKS,
        "fabric_state": "completed",
        "kernel_xids": (31,),
        "new_xids": (),
        "xids_watched_since_s": AT_S,
    }
    return DeviceFacts(**{**healthy, **changes})


def later(facts: DeviceFacts, **changes) -> DeviceFacts:
    """The same device three minutes afterwards."""
    return replace(facts, **{"read_s": AT_S + 180, **changes})


def problems(*readings: Reading) -> dict[str, Problem]:
    return {one.test.name: one.problem for one in readings if one.problem is not None}


def links(down: int = -1, **errors: int) -> tuple[NvLink, ...]:
    return tuple(
        replace(one, is_active=one.link != down, errors=NO_ERRORS | errors) for one in LINKS
    )


def told(kind: str, **changes: Any) -> Problem:
    return Problem(kind=ProblemKind(kind), **changes)


def link_errors(kind: str, count: int) -> Problem:
    found = (LinkErrors(link=link.link, kind=kind, count=count) for link in LINKS)
    return told("link_errors", link_errors=tuple(found))


def test_healthy_device_has_facts_and_no_problem():
    before = facts_of()
    readings = facts_readings([before], [later(before)])
    assert problems(*readings) == {}
    # Nor where it does what good ones do too: replays 8 a minute, errors of links 100 a second, a
    # log that was full, other programs. Nor where it was never read.
    busy = {"pcie_replays": 27, "nvlinks": links(crc=18_000), "memory_free_bytes": 2**30}
    for changes in (busy | {"kernel_xids": ()}, {"new_xids": None, "kernel_xids": None}):
        assert problems(*facts_readings([before], [later(before, **changes)])) == {}
    unread, other = (later(before, unread=why) for why in ("no NVML", "no agent"))
    assert problems(*facts_readings([unread], [other])) == {}
    assert {one.test.name: one.value for one in readings} == {
        "free memory": 139.0,
        "memory errors": 0.0,
        "remapped rows": 1.0,
        "failed remaps": 0.0,
        "retired pages": 2.0,
        "Xid errors": 1.0,
        "PCIe replays": 3.0,
        "PCIe lanes": 16.0,
        "NVLinks up": 4.0,
        "NVLink errors": 0.0,
        "NVLink fabric": 0.0,
    }
    assert {(one.subject.name, one.test.stage) for one in readings} == {("alpha GPU 0", "facts")}


@pytest.mark.parametrize(
    ("changes", "test", "problem"),
    [
        ({"ecc_errors": 2}, "memory errors", told("memory_errors", value=2, limit=2)),
        ({"is_remap_pending": True}, "remapped rows", told("row_pending")),
        ({"remapped_rows": 2}, "remapped rows", told("bad_rows", value=1)),
        ({"is_remap_failed": True}, "failed remaps", told("no_spare_row")),
        ({"is_retirement_pending": True}, "retired pages", told("page_pending")),
        ({"retired_pages": 4}, "retired pages", told("bad_pages", value=2)),
        ({"kernel_xids": (31, 13)}, "Xid errors", told("new_xids", numbers=(13,))),
        (
            {"kernel_xids": None, "new_xids": (94,)},
            "Xid errors",
            told("new_xids", numbers=(94,)),
        ),
        ({"pcie_replays": 28}, "PCIe replays", told("pcie_replays", value=25)),
        ({"pcie_lanes": 8}, "PCIe lanes", told("few_lanes", value=8, limit=16)),
        ({"nvlinks": links(down=2)}, "NVLinks up", told("links_down", numbers=(2,))),
        ({"nvlinks": links(replay=1)}, "NVLink errors", link_errors("replay", 1)),
        ({"nvlinks": links(crc=18_001)}, "NVLink errors", link_errors("crc", 18_001)),
        ({"fabric_faults": ("slow",)}, "NVLink fabric", told("fabric", names=("slow",))),
    ],
)
def test_each_fault_is_one_facts_problem(changes, test, problem):
    before = facts_of()
    found = problems(*facts_readings([before], [later(before, **changes)]))
    assert found == {test: problem}


def test_only_own_earlier_errors_count():
    before = facts_of(kernel_xids=(13, 79), ecc_errors=1, pcie_replays=10**6, nvlinks=links(crc=9))
    assert problems(*facts_readings([before], [later(before)])) == {
        "memory errors": told("memory_errors", limit=1),
        "Xid errors": told("old_xids", numbers=(79,)),
    }
    # A watch that began anew counts from its own beginning.
    before = facts_of(kernel_xids=None, new_xids=(31, 31))
    again = later(before, new_xids=(79,), xids_watched_since_s=AT_S + 60)
    during = {"Xid errors": told("new_xids", numbers=(79,))}
    assert problems(*facts_readings([before], [again])) == during


def test_unused_link_is_not_missed():
    bridged = (*LINKS[:2], *(replace(link, is_active=False) for link in LINKS[2:]))
    pair = [facts_of(index, fabric_state=None, nvlinks=bridged) for index in range(2)]
    assert problems(*facts_readings(pair, pair)) == {}
    worse = replace(pair[1], nvlinks=tuple(replace(link, is_active=False) for link in LINKS))
    found = problems(*facts_readings(pair, [pair[0], worse]))
    assert found == {"NVLinks up": told("links_down", numbers=(0, 1))}
    both = [replace(one, nvlinks=worse.nvlinks) for one in pair]  # a bridge fails at both its ends
    found = [one.test.name for one in facts_readings(pair, both) if one.problem]
    assert found == ["NVLinks up"] * 2
