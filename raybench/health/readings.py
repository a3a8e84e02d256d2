"""The readings of each subject of a health check, from its records and the driver, in groups. Pure.

Facts that the driver tells of a device are not compared between devices: a fact that is wrong has a
problem. One that the driver does not tell has no value, and a problem only if the GPU is lost.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from raybench.health.suite import (
    COMM_TEST,
    WAIT_TEST,
    Fleet,
    HealthTest,
    Probe,
    device_subject,
    device_subjects,
)
from raybench.records.device import Device
from raybench.records.devices import (
    Action,
    DeviceFacts,
    Stage,
    Subject,
    SubjectKind,
    read_topology,
)
from raybench.records.judgement import LinkErrors, Problem, ProblemKind
from raybench.records.measurement import Measurement
from raybench.records.other_program import OtherProgram
from raybench.records.record import Record
from raybench.records.status import Status
from raybench.report.words import health as words
from raybench.stats.outliers import Floats
from raybench.stats.summary import median_above_smallest
from raybench.workloads.collective import parse_groups
from raybench.workloads.pairs import parse_pairs

_GIB = 2**30
_WRONG_ERROR, _DISPUTED_ERROR = "WrongResultError", "NoMajorityError"
# The memory that libraries' buffers take on a device, and what torch keeps for the next point.
_LIBRARY_BYTES = _GIB
# The burn-in compares the first and the last of so many parts.
_PARTS_OF_BURN_IN = 10
# Limits of NVIDIA's DCGM (dcgm_gpu_hardware_limits.h): so many are part of a good link's work.
_REPLAYS_PER_MIN = 8.0
_CRC_ERRORS_PER_S = 100.0
# Xid errors by which the driver says that the hardware is at fault, in NVIDIA's catalogue:
# uncorrectable memory, the microcontroller, remapping, NVLink, off the bus, uncontained memory,
# the system processor (two), unrecovered memory. Others are mostly a program's, or told elsewhere.
HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})

FREE_MEMORY, MEMORY_ERRORS, PCIE_LANES = "free memory", "memory errors", "PCIe lanes"


class _Fact(NamedTuple):
    """A fact that the driver tells of a device.

    action: what to do about a problem with it. read: returns its value, None if it is not known.
    """

    unit: str
    action: Action
    read: Callable[[DeviceFacts], float | None]


def _count_xids(facts: DeviceFacts) -> int | None:
    known = [len(found) for found in (facts.kernel_xids, facts.new_xids) if found is not None]
    return max(known, default=None)


def _count_link_errors(facts: DeviceFacts) -> int | None:
    counts = [sum(link.errors.values()) for link in facts.nvlinks or () if link.errors]
    return sum(counts) if counts else None


def _count_links_up(facts: DeviceFacts) -> int | None:
    return None if facts.nvlinks is None else sum(link.is_active for link in facts.nvlinks)


_FACTS: Mapping[str, _Fact] = {
    # What workloads can have; other programs may hold the rest.
    FREE_MEMORY: _Fact(
        "GiB", Action.SETTING, lambda one: one.memory_free_bytes and one.memory_free_bytes / _GIB
    ),
    # Errors that could not be corrected: results are lost.
    MEMORY_ERRORS: _Fact("errors", Action.RESET, lambda one: one.ecc_errors),
    # Rows of memory that a spare one replaces, at once or at a reset.
    "remapped rows": _Fact("rows", Action.RESET, lambda one: one.remapped_rows),
    # A bad row has no spare one left.
    "failed remaps": _Fact("", Action.REPLACE, lambda one: one.is_remap_failed),
    "retired pages": _Fact("pages", Action.RESET, lambda one: one.retired_pages),
    # What the driver noted as errors of the device or of a program.
    "Xid errors": _Fact("errors", Action.RESET, _count_xids),
    # Packets sent again: a bad contact or cable.
    "PCIe replays": _Fact("packets", Action.WATCH, lambda one: one.pcie_replays),
    # Fewer lanes in use carry less between host and GPU.
    PCIE_LANES: _Fact("lanes", Action.REPLACE, lambda one: one.pcie_lanes),
    "NVLinks up": _Fact("links", Action.RESET, _count_links_up),
    # Transfers that had to be repeated.
    "NVLink errors": _Fact("errors", Action.WATCH, _count_link_errors),
    # What the fabric manager says of the device's links.
    "NVLink fabric": _Fact(
        "faults", Action.RESET, lambda one: len(one.fabric_faults) if one.fabric_state else None
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The value of one subject in one pass of one test.

    pass_number: counts from 1. value: None where the test gave none; of a rate 0 where the amount
    of work is not known.
    other_programs: who else used the devices meanwhile, in words. programs: the processes among
    them, as data. throttle_reasons: why NVML says that the clocks of a single device were limited.
    temperature_c: of that device. routes: the network transport at each end of a pair, as NCCL
    names it; empty where it does not tell.
    point_id: of the rows of `points` and `samples`; None where it is of no point, as a fact.
    """

    test: HealthTest
    subject: Subject
    pass_number: int
    value: float | None
    problem: Problem | None = None
    other_programs: tuple[str, ...] = ()
    programs: tuple[OtherProgram, ...] = ()
    throttle_reasons: tuple[str, ...] = ()
    temperature_c: float | None = None
    routes: tuple[str, ...] = ()
    point_id: str | None = None


def read_record(record: Record, probe: Probe, fleet: Fleet) -> tuple[Reading, ...]:
    """Return the readings of all subjects that took part in a point, from its record.

    If the point is not ok, each has a problem and no value; a device with wrong bits has both. Of
    the parts of a training step a device has up to three, each of another test; none if its step
    was not taken apart. probe: of the same point. fleet: the devices that ran it, by rank.
    """
    found: list[tuple[HealthTest, Subject, float | None, Problem | None]]
    if record.status is not Status.OK:
        found = [
            (test, subject, None, _why_unread(record, ranks, fleet))
            for test, subject, ranks in _participants(record, probe, fleet)
        ]
    elif probe.test.reads == "parts":
        found = [(*part, None) for part in _step_parts(record, probe, fleet)]
    else:
        problems: dict[int, Problem] = {}
        if probe.test.reads == "bits":
            metrics = [
                {metric.name: value for metric, value in measured.workload_metrics.items()}
                for measured in record.measurements
            ]
            problems = wrong_bits(metrics, fleet.subjects)
        found = [
            (
                test,
                subject,
                _value(test, [record.measurements[rank] for rank in ranks]),
                problems.get(ranks[0]),
            )
            for test, subject, ranks in _participants(record, probe, fleet)
        ]
    measured_by_uuid: dict[str, Measurement] = {}
    for one, measured in zip(fleet.subjects, record.measurements, strict=False):
        measured_by_uuid[one.uuids[0]] = measured
    readings = []
    for test, subject, value, problem in found:
        reading = Reading(
            test=test,
            subject=subject,
            pass_number=record.round,
            value=value,
            problem=problem,
            other_programs=record.neighbours,
            programs=record.other_programs,
            point_id=record.point.point_id,
        )
        of_ends = [measured_by_uuid[uuid] for uuid in subject.uuids if uuid in measured_by_uuid]
        readings.append(_with_conditions(reading, of_ends))
    return tuple(readings)


def _with_conditions(reading: Reading, measured: Sequence[Measurement]) -> Reading:
    """Return the reading with the clocks of a device, or the routes of a pair."""
    if len(measured) == 1 and reading.subject.kind == "device":
        [one] = measured
        return replace(
            reading, throttle_reasons=one.throttle_reasons, temperature_c=one.temperature_c
        )
    if reading.subject.kind == "pair":
        routes = []
        for one in measured:
            by_network = (route for route in one.transports if route.startswith("NET/"))
            routes.append(next(by_network, ""))
        return replace(reading, routes=tuple(routes))
    return reading


def _value(test: HealthTest, measured: Sequence[Measurement]) -> float:
    """Return the figure of one subject in the unit of the test, by the slowest rank's median step.

    measured: of the ranks of the subject. A rate is 0 where the amount of work is not known.
    """
    first = measured[0]
    step_ns = max(statistics.median(one.step_ns) for one in measured)
    if test.unit == "TFLOP/s":
        return (first.flops_per_step or 0.0) / step_ns / 1e3
    if test.unit == "GB/s":
        if test.reads == "ranks":
            return (first.memory_bytes or 0) / step_ns
        factor = first.busbw_factor or 0.0 if test.reads == "groups" else 1.0
        return (first.message_bytes or 0) * factor / step_ns
    if test.unit == "ms":
        return step_ns / 1e6
    # A latency is half of a round trip.
    return step_ns / 1e3 / (2 if test.reads == "pairs" else 1)


def wrong_bits(
    metrics: Sequence[Mapping[str, float]], subjects: Sequence[Subject]
) -> dict[int, Problem]:
    """Return rank -> why its matrix product is wrong or disputed; empty if none is.

    A product that changed between repetitions is wrong. The others of a model are compared: one is
    wrong if more than half of them agree on another. Without such a majority those are wrong that
    change when rows move, and the rest are compared again; if all do so, or none, all are disputed.
    metrics: of the workload `same_bits`, by rank, with digest, changed_products and
    misplaced_products. subjects: devices by rank.
    """
    problems: dict[int, Problem] = {}
    # A product that changed says nothing of those of others.
    steady = [rank for rank, one in enumerate(metrics) if not one["changed_products"]]
    for model in dict.fromkeys(subjects[rank].model for rank in steady):
        ranks = [rank for rank in steady if subjects[rank].model == model]
        while len(counts := Counter(metrics[rank]["digest"] for rank in ranks)) > 1:
            [(usual, count)] = counts.most_common(1)
            wrong = [rank for rank in ranks if metrics[rank]["digest"] != usual]
            problem = Problem(kind=ProblemKind.OTHER_BITS, value=count)
            if 2 * count <= len(ranks):
                wrong = [rank for rank in ranks if metrics[rank]["misplaced_products"]]
                problem = Problem(kind=ProblemKind.MISPLACED_BITS)
                if len(wrong) in (0, len(ranks)):
                    wrong, names = ranks, tuple(subjects[rank].name for rank in ranks)
                    problem = Problem(kind=ProblemKind.DISPUTED_BITS, names=names)
            problems |= dict.fromkeys(wrong, problem)
            ranks = [rank for rank in ranks if rank not in wrong]
    for rank, found in enumerate(metrics):
        if found["changed_products"]:
            problems[rank] = Problem(kind=ProblemKind.CHANGED_BITS)
    return problems


def _step_parts(
    record: Record, probe: Probe, fleet: Fleet
) -> Iterator[tuple[HealthTest, Subject, float]]:
    """Yield (test, device, ms) for the parts of each rank's training step.

    First how long each rank computes; then how long it waits and how long it communicates, if all
    ranks tell that. A rank whose step was not taken apart is left out.
    """
    of_ranks = [one.breakdown for one in record.measurements]
    for subject, found in zip(fleet.subjects, of_ranks, strict=True):
        if found and any(found.local_ms):
            yield probe.test, subject, statistics.median(chain(*found.local_ms))
    broken_down = [one for one in of_ranks if one]
    tails_ms = [one.tail_ms for one in broken_down]
    if len(tails_ms) < len(fleet.devices) or not all(tails_ms):
        return
    wait, communication = (
        replace(probe.test, name=name, is_compared=False) for name in (WAIT_TEST, COMM_TEST)
    )
    waits_ms = median_above_smallest(tails_ms)
    for subject, one, waited_ms in zip(fleet.subjects, broken_down, waits_ms, strict=True):
        yield wait, subject, waited_ms
        yield communication, subject, max(0.0, statistics.median(one.comm_ms) - waited_ms)


def _participants(
    record: Record, probe: Probe, fleet: Fleet
) -> Iterator[tuple[HealthTest, Subject, Sequence[int]]]:
    """Yield (test, subject, ranks of the subject) for each subject that took part in a point.

    A pair is named from the sender to the receiver, and between nodes its test has another name. A
    group of ranks is a node or the cluster.
    """
    params, test = record.point.params, probe.test
    subjects = fleet.subjects
    if test.reads == "pairs":
        for pair in parse_pairs(str(params["partners"]), len(fleet.devices)):
            is_backward = params["direction"] == "backward"
            start, end = (subjects[rank] for rank in (pair[::-1] if is_backward else pair))
            subject = Subject(
                kind="pair",
                uuids=(*start.uuids, *end.uuids),
                name=words.path_name(start.name, end.name),
                model=start.model if start.model == end.model else f"{start.model} to {end.model}",
            )
            on_one_node = len({fleet.devices[rank].node_id for rank in pair}) == 1
            yield test if on_one_node else test.between_nodes, subject, pair
    elif test.reads == "groups":
        for ranks in parse_groups(str(params["groups"]), len(fleet.devices)):
            is_node = test.subjects == "node"
            subject = Subject(
                kind=test.subjects,
                uuids=tuple(subjects[rank].uuids[0] for rank in ranks),
                name=fleet.devices[ranks[0]].host if is_node else f"all {len(ranks)} devices",
                model=" and ".join(dict.fromkeys(subjects[rank].model for rank in ranks)),
            )
            yield test, subject, ranks
    else:
        local_ranks = {rank: place for ranks in fleet.nodes for place, rank in enumerate(ranks)}
        for rank, subject in enumerate(subjects):
            if params.get("local_rank") in (None, local_ranks[rank]):
                yield test, subject, (rank,)


def _why_unread(record: Record, ranks: Sequence[int], fleet: Fleet) -> Problem:
    """Return the problem of a subject in a failed point.

    ranks: of the subject. "not read" where the rank of another subject made the point fail;
    "disputed" on all of them where no result has a majority.
    """
    status, detail = record.status, record.error_message or ""
    if not record.devices:
        return Problem(kind=ProblemKind.NOT_STARTED, status=status, detail=detail)
    if record.error_type == _DISPUTED_ERROR:
        return Problem(kind=ProblemKind.DISPUTED_RESULT, status=status, detail=detail)
    if record.error_rank is None or record.error_rank in ranks:
        is_wrong = record.error_type == _WRONG_ERROR
        kind = ProblemKind.WRONG_RESULT if is_wrong else ProblemKind.FAILED
        return Problem(kind=kind, status=status, detail=detail)
    culprit = fleet.subjects[record.error_rank].name
    return Problem(kind=ProblemKind.OTHER_FAILED, names=(culprit,), status=status)


def split_by_memory(
    probes: Iterable[Probe], fleet: Fleet, free_bytes: Mapping[str, int]
) -> tuple[tuple[Probe, ...], tuple[Reading, ...]]:
    """Return the probes that fit on all devices, and readings in place of the other probes.

    A probe needs its test's `device_bytes` and 1 GiB. Each device without so much gets a reading
    with a problem and no value. free_bytes: `Device.uuid` -> free memory; one not in it has enough.
    """
    fitting: list[Probe] = []
    left_out: list[Reading] = []
    for probe in probes:
        needed = _LIBRARY_BYTES + probe.test.device_bytes
        lacking = [
            Reading(
                test=probe.test,
                subject=subject,
                pass_number=1,
                value=None,
                problem=Problem(kind=ProblemKind.NO_ROOM, value=free, limit=needed),
            )
            for subject, device in zip(fleet.subjects, fleet.devices, strict=True)
            if (free := free_bytes.get(device.uuid, needed)) < needed
        ]
        left_out += lacking
        if not lacking:
            fitting.append(probe)
    return tuple(fitting), tuple(left_out)


def presence(fleet: Fleet, lost: Collection[int]) -> Iterator[Reading]:
    """Yield a reading of the fact "worker" for each device: value 1; None and a problem if lost.

    lost: ranks of the lost devices.
    """
    test = HealthTest(name="worker", stage="facts", unit="", floor=0.0, is_compared=False)
    gone = Problem(kind=ProblemKind.WORKER_LOST)
    for rank, subject in enumerate(fleet.subjects):
        is_lost = rank in lost
        yield Reading(
            test=test,
            subject=subject,
            pass_number=1,
            value=None if is_lost else 1.0,
            problem=gone if is_lost else None,
        )


def drift(readings: Iterable[Reading], floor: float) -> Iterator[Reading]:
    """Yield a reading per test and subject of the burn-in: how much slower its end is.

    The value is the median time in the last tenth of the values, one at least, over that in the
    first, above 1 if slower, of a test `NAME drift`. A subject with fewer than two values other
    than 0 is left out. readings: in the order of time; other stages are ignored. floor: of the
    yielded tests, the noise of the ratio on healthy devices (0.02: 2 %).
    """
    series: dict[tuple[str, Subject], list[Reading]] = {}
    for reading in readings:
        if reading.test.stage == "burn-in" and reading.value:
            series.setdefault((reading.test.name, reading.subject), []).append(reading)
    for (name, subject), found in series.items():
        times = [one.value if one.test.is_time else 1 / one.value for one in found if one.value]
        if len(times) < 2:
            continue
        count = max(1, len(times) // _PARTS_OF_BURN_IN)
        test = HealthTest(
            name=f"{name} drift",
            stage="burn-in",
            subjects=found[0].test.subjects,
            unit="x",
            floor=floor,
        )
        value = statistics.median(times[-count:]) / statistics.median(times[:count])
        yield Reading(test=test, subject=subject, pass_number=1, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many devices a subject has, and on how many nodes; only equal placements are compared.

    kind: a group on one node is a "node", on several a "cluster". level: for a pair on a node how
    the driver names its connection, as "NV" or "PHB"; empty where that is unknown.
    """

    kind: SubjectKind = "device"
    devices: int = 1
    nodes: int = 1
    level: str = ""

    def __str__(self) -> str:
        """Return its name in references: "device", "pair on a node", "4 on 2 nodes"."""
        if self.kind == "device":
            return "device"
        if self.kind == "pair":
            return "pair on a node" if self.nodes == 1 and self.devices == 2 else "pair of nodes"
        return f"{self.devices} on {'a node' if self.nodes < 2 else f'{self.nodes} nodes'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What carries the data of a subject. Unknown parts are None or empty."""

    # Active NVLinks of the first device; 0 where PCIe connects the subject.
    nvlinks: int | None = None
    # As in "gen5 x16"; empty if NVLink carries the data.
    pcie: str = ""
    # Of a pair, as the driver names it; empty if NVLink carries the data.
    level: str = ""

    def __str__(self) -> str:
        """Return its name in references: `gen5 x16`, `NVLink x18`, `NVLink x0, gen5 x16, PHB`."""
        nvlinks = "" if self.nvlinks is None else f"NVLink x{self.nvlinks}"
        return ", ".join(filter(None, (nvlinks, self.pcie, self.level)))


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class Group:
    """The readings of one test of subjects of one model and placement.

    link: of the first subject, as of `link_of`. values: [passes, subjects], NaN where there is
    none; passes with fewer than half as many values as the fullest one are left out. problems: by
    the column of the subject, of all passes, without repeats. failed_passes: in how many passes it
    failed by itself, by column. faulty_passes: in how many it failed by itself or was wrong.
    pass_count: of all passes.
    """

    test: HealthTest
    placement: Placement
    link: Link
    subjects: Sequence[Subject]
    values: Floats
    problems: Mapping[int, Sequence[Problem]]
    failed_passes: Mapping[int, int]
    faulty_passes: Mapping[int, int]
    pass_count: int

    @cached_property
    def typical(self) -> Floats:
        """Return for each subject the median over the passes, [subjects]; NaN without a value."""
        if not np.isnan(self.values).any():
            return np.asarray(np.median(self.values, axis=0))
        known = ~np.isnan(self.values).all(axis=0)
        found = np.full(self.values.shape[1], np.nan)
        found[known] = np.nanmedian(self.values[:, known], axis=0)
        return found

    @property
    def model(self) -> str:
        """Return the model of the subjects; of two models `A to B` for a pair, else `A and B`."""
        return self.subjects[0].model


def devices_by_uuid(devices: Sequence[Device]) -> dict[str, Device]:
    """Return uuid, as of `device_subjects`, -> device. devices: all of the check, by rank."""
    subjects = device_subjects(devices)
    return {subject.uuids[0]: device for subject, device in zip(subjects, devices, strict=True)}


def group_readings(readings: Iterable[Reading], known: Mapping[str, Device]) -> list[Group]:
    """Return the readings in groups of one test, model and placement, whether compared or not.

    Where PCIe carries the data, also of one PCIe link and level (`link_of`). In the order of first
    readings. Of several values of a subject in a pass the last counts. known: `devices_by_uuid`.
    """
    cells: dict[tuple[str, str, Placement, Link], list[Reading]] = {}
    paths: dict[tuple[Subject, Stage], tuple[Placement, Link]] = {}
    for reading in readings:
        subject, test = reading.subject, reading.test
        if (subject, test.stage) not in paths:
            # The number of NVLinks does not divide a group: a device with fewer is the slow one.
            slot = replace(link_of(subject, test.stage, known), nvlinks=None)
            paths[subject, test.stage] = placement_of(subject, known), slot
        kind = (test.name, subject.model, *paths[subject, test.stage])
        cells.setdefault(kind, []).append(reading)
    groups = []
    for (_, _, placement, _), own in cells.items():
        subjects = list({reading.subject.uuids: reading.subject for reading in own}.values())
        columns = {subject.uuids: column for column, subject in enumerate(subjects)}
        numbers = sorted({reading.pass_number for reading in own})
        lines = {number: line for line, number in enumerate(numbers)}
        values = np.full((len(numbers), len(subjects)), np.nan)
        problems: dict[int, list[Problem]] = {}
        failed: dict[int, set[int]] = {}
        faulty: dict[int, set[int]] = {}
        for reading in own:
            column, value = columns[reading.subject.uuids], reading.value
            # A rate is 0 where the amount of work is not known.
            if value is not None and np.isfinite(value) and (value or reading.test.is_time):
                values[lines[reading.pass_number], column] = value
            if reading.problem and reading.problem not in problems.setdefault(column, []):
                problems[column].append(reading.problem)
            if reading.problem and reading.problem.effect == "failed":
                failed.setdefault(column, set()).add(reading.pass_number)
            if reading.problem and reading.problem.effect in ("failed", "fault"):
                faulty.setdefault(column, set()).add(reading.pass_number)
        # In a pass of fewer than half of the subjects the median would be that of few.
        counts = (~np.isnan(values)).sum(axis=1)
        group = Group(
            test=own[0].test,
            placement=placement,
            link=link_of(subjects[0], own[0].test.stage, known),
            subjects=subjects,
            values=values[2 * counts >= counts.max()] if counts.any() else values,
            problems=problems,
            failed_passes={column: len(passes) for column, passes in failed.items()},
            faulty_passes={column: len(passes) for column, passes in faulty.items()},
            pass_count=len(numbers),
        )
        groups.append(group)
    return groups


def placement_of(subject: Subject, known: Mapping[str, Device]) -> Placement:
    """Return how many devices the subject has, on how many nodes, and the connection of a pair.

    known: as returned by `devices_by_uuid`. Of pairs and groups the devices that are not in it do
    not count: a path of nodes has 0. A device is always 1, on 1 node.
    """
    if subject.kind == "device":
        return Placement()
    devices = [known[uuid] for uuid in subject.uuids if uuid in known]
    nodes = len({device.node_id for device in devices})
    if subject.kind != "pair":
        # A half of the cluster may be a node.
        kind: SubjectKind = "node" if nodes < 2 else "cluster"
        return Placement(kind=kind, devices=len(devices), nodes=nodes)
    level = ""
    if len(devices) == 2 and nodes == 1:
        level = read_topology(devices[0]).levels.get(devices[1].index, "")
    return Placement(kind="pair", devices=len(devices), nodes=nodes, level=level)


def link_of(subject: Subject, stage: Stage, known: Mapping[str, Device]) -> Link:
    """Return what carries the data of a subject in the tests of a stage.

    It is that of the first device, also of a group on several nodes. Empty where it is unknown, for
    a pair on two nodes, and for a device except in host-links. known: as returned by
    `devices_by_uuid`.
    """
    device = known.get(subject.uuids[0]) if subject.uuids else None
    if device is None or (subject.kind == "device" and stage != "host-links"):
        return Link()
    pcie, topology = device.pcie_link_max or "", read_topology(device)
    if subject.kind == "device":
        return Link(pcie=pcie)
    placement = placement_of(subject, known)
    level = placement.level
    if subject.kind == "pair" and placement.nodes > 1:
        return Link()
    # On a board with bridges not every pair has one.
    has_no_bridge = level not in ("", "NV") and "NV" in topology.levels.values()
    nvlinks = 0 if has_no_bridge else topology.nvlinks
    return Link(nvlinks=0, pcie=pcie, level=level) if nvlinks == 0 else Link(nvlinks=nvlinks)


def facts_readings(
    before: Sequence[DeviceFacts], after: Sequence[DeviceFacts]
) -> tuple[Reading, ...]:
    """Return a reading of each fact of each GPU: its value after the check, and any problem.

    The value is None if the driver does not report it. A GPU that can no
    longer be read has a problem in each. before: a device that it lacks counts as unchanged. CPUs,
    and devices that `after` lacks, have no readings.
    """
    earlier = {facts.device.uuid: facts for facts in before}
    # By node and model, links that are up on any of these devices; all where an NVSwitch connects
    # any. Boards with bridges have some, and a virtual machine of one GPU may have none.
    expected_links: dict[tuple[str, str], set[int]] = {}
    for one in (*before, *after):
        links = one.nvlinks or ()
        is_switched = one.fabric_state is not None and any(link.is_active for link in links)
        expected_links.setdefault((one.device.node_id, one.device.name), set()).update(
            link.link for link in links if link.is_active or is_switched
        )
    found = []
    for now in (one for one in after if one.device.kind == "cuda"):
        was = earlier.get(now.device.uuid, now)
        # What was read before and is silent now is lost; many containers have no NVML at all.
        lost = None
        if now.unread and not was.unread:
            lost = Problem(kind=ProblemKind.DEVICE_UNREAD, detail=now.unread)
        problems = _fact_problems(was, now, expected_links[now.device.node_id, now.device.name])
        for name, fact in _FACTS.items():
            value = fact.read(now)
            reading = Reading(
                test=HealthTest(
                    name=name,
                    stage="facts",
                    unit=fact.unit,
                    floor=0.0,
                    is_compared=False,
                    action=fact.action,
                ),
                subject=device_subject(now.device),
                pass_number=1,
                value=None if value is None else float(value),
                problem=lost or problems.get(name),
            )
            found.append(reading)
    return tuple(found)


def _fact_problems(
    before: DeviceFacts, now: DeviceFacts, expected_links: Set[int]
) -> dict[str, Problem]:
    """Return what is wrong with facts of a GPU, by the name of the fact.

    expected_links: numbers of the NVLinks that should be up.
    """
    found: dict[str, Problem] = {}
    if xids := _xid_problem(before, now):
        found["Xid errors"] = xids
    if now.fabric_faults:
        found["NVLink fabric"] = Problem(kind=ProblemKind.FABRIC, names=now.fabric_faults)
    if now.ecc_errors:
        grown = _growth(before.ecc_errors, now.ecc_errors)
        found[MEMORY_ERRORS] = Problem(
            kind=ProblemKind.MEMORY_ERRORS, value=grown, limit=now.ecc_errors
        )
    if now.is_remap_pending:
        found["remapped rows"] = Problem(kind=ProblemKind.ROW_PENDING)
    elif rows := _growth(before.remapped_rows, now.remapped_rows):
        found["remapped rows"] = Problem(kind=ProblemKind.BAD_ROWS, value=rows)
    if now.is_retirement_pending:
        found["retired pages"] = Problem(kind=ProblemKind.PAGE_PENDING)
    elif pages := _growth(before.retired_pages, now.retired_pages):
        found["retired pages"] = Problem(kind=ProblemKind.BAD_PAGES, value=pages)
    if now.is_remap_failed:
        found["failed remaps"] = Problem(kind=ProblemKind.NO_SPARE_ROW)
    passed_s = now.read_s - before.read_s
    replays = _growth(before.pcie_replays, now.pcie_replays)
    if replays > _REPLAYS_PER_MIN * max(1.0, passed_s / 60):
        found["PCIe replays"] = Problem(kind=ProblemKind.PCIE_REPLAYS, value=replays)
    lanes, most_lanes = now.pcie_lanes, now.pcie_lanes_max
    if lanes is not None and most_lanes is not None and lanes < most_lanes:
        found[PCIE_LANES] = Problem(kind=ProblemKind.FEW_LANES, value=lanes, limit=most_lanes)
    links = now.nvlinks or ()
    if down := sorted(expected_links & {one.link for one in links if not one.is_active}):
        found["NVLinks up"] = Problem(kind=ProblemKind.LINKS_DOWN, numbers=tuple(down))
    earlier = {link.link: link.errors for link in before.nvlinks or ()}
    least = {"crc": _CRC_ERRORS_PER_S * max(1.0, passed_s)}
    grown_errors = tuple(
        LinkErrors(link=link.link, kind=kind, count=more)
        for link in links
        for kind, errors in link.errors.items()
        if (more := errors - earlier.get(link.link, {}).get(kind, errors)) > least.get(kind, 0.0)
    )
    if grown_errors:
        found["NVLink errors"] = Problem(kind=ProblemKind.LINK_ERRORS, link_errors=grown_errors)
    return found


def _xid_problem(before: DeviceFacts, now: DeviceFacts) -> Problem | None:
    """Return Xid errors of the check, else earlier ones of the hardware.

    NVML reports only errors since it is watched; the log is complete, where it may be read.
    """
    # A full log has lost its oldest lines meanwhile.
    logged = Counter(now.kernel_xids or ()) - Counter(before.kernel_xids or ())
    if before.kernel_xids is not None and logged:
        new = tuple(sorted(logged.elements()))
    else:
        # An agent that was replaced meanwhile watches anew.
        is_same_watch = now.xids_watched_since_s == before.xids_watched_since_s
        new = (now.new_xids or ())[len(before.new_xids or ()) if is_same_watch else 0 :]
    if new:
        return Problem(kind=ProblemKind.NEW_XIDS, numbers=new)
    old = tuple(xid for xid in now.kernel_xids or () if xid in HARDWARE_XIDS)
    return Problem(kind=ProblemKind.OLD_XIDS, numbers=old) if old else None


def _growth(before: int | None, now: int | None) -> int:
    """Return by how much a counter grew; 0 where it is unknown before or now.

    One that was reset meanwhile grew by all that it shows.
    """
    if before is None or now is None:
        return 0
    return now - before if now >= before else now
