"""The readings of a health check, from records of points and facts of the driver, in groups. Pure.

Facts are not compared between devices: a wrong fact has a problem. A fact that the driver does not
report has no value, and a problem only if the GPU is lost.
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
# Memory of a device for the buffers of libraries, and for what torch keeps for the next point.
_LIBRARY_BYTES = _GIB
# The drift of a burn-in compares its first tenth with its last tenth.
_PARTS_OF_BURN_IN = 10
# Limits of NVIDIA's DCGM (dcgm_gpu_hardware_limits.h): a good link has as many errors.
_REPLAYS_PER_MIN = 8.0
_CRC_ERRORS_PER_S = 100.0
# Xid errors of the hardware in NVIDIA's catalogue: uncorrectable memory, the microcontroller,
# remapping, NVLink, off the bus, uncontained memory, the system processor (two), unrecovered
# memory. Programs cause most other Xids, or another fact reports them.
HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})

FREE_MEMORY, MEMORY_ERRORS, PCIE_LANES = "free memory", "memory errors", "PCIe lanes"


class _Fact(NamedTuple):
    """A fact that the driver reports of a device."""

    unit: str
    # What to do about a problem with the fact.
    action: Action
    # Returns None if the driver does not report the value.
    read: Callable[[DeviceFacts], float | None]


def _count_xids(facts: DeviceFacts) -> int | None:
    logs = (facts.kernel_xids, facts.new_xids)
    return max((len(xids) for xids in logs if xids is not None), default=None)


def _free_gib(facts: DeviceFacts) -> float | None:
    return None if facts.memory_free_bytes is None else facts.memory_free_bytes / _GIB


def _count_fabric_faults(facts: DeviceFacts) -> int | None:
    return len(facts.fabric_faults) if facts.fabric_state else None


def _count_link_errors(facts: DeviceFacts) -> int | None:
    counts = [sum(link.errors.values()) for link in facts.nvlinks or () if link.errors]
    return sum(counts) if counts else None


def _count_links_up(facts: DeviceFacts) -> int | None:
    return None if facts.nvlinks is None else sum(link.is_active for link in facts.nvlinks)


_FACTS: Mapping[str, _Fact] = {
    FREE_MEMORY: _Fact("GiB", Action.SETTING, _free_gib),
    # Uncorrected errors: results are lost.
    MEMORY_ERRORS: _Fact("errors", Action.RESET, lambda facts: facts.ecc_errors),
    # Rows of memory that a spare row replaces, at once or at a reset.
    "remapped rows": _Fact("rows", Action.RESET, lambda facts: facts.remapped_rows),
    "failed remaps": _Fact("", Action.REPLACE, lambda facts: facts.is_remap_failed),
    "retired pages": _Fact("pages", Action.RESET, lambda facts: facts.retired_pages),
    # Errors of the device or of a program.
    "Xid errors": _Fact("errors", Action.RESET, _count_xids),
    # Packets are sent again because of a bad contact or cable.
    "PCIe replays": _Fact("packets", Action.WATCH, lambda facts: facts.pcie_replays),
    PCIE_LANES: _Fact("lanes", Action.REPLACE, lambda facts: facts.pcie_lanes),
    "NVLinks up": _Fact("links", Action.RESET, _count_links_up),
    "NVLink errors": _Fact("errors", Action.WATCH, _count_link_errors),
    "NVLink fabric": _Fact("faults", Action.RESET, _count_fabric_faults),
}


# A value, or a problem, of one subject in one test.
_Result = tuple[HealthTest, Subject, float | None, Problem | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The value of one subject in one pass of one test."""

    test: HealthTest
    subject: Subject
    # Counted from 1.
    pass_number: int
    # None without a result. A rate of 0 means that the amount of work is unknown.
    value: float | None
    problem: Problem | None = None
    # Other users of the devices, in words, and the processes among them.
    other_programs: tuple[str, ...] = ()
    programs: tuple[OtherProgram, ...] = ()
    # Why NVML says that the clocks of the device were limited. Only for single devices.
    throttle_reasons: tuple[str, ...] = ()
    temperature_c: float | None = None
    # NCCL's name of the network transport at each end of a pair; "" if unknown.
    routes: tuple[str, ...] = ()
    # None for facts, which are read without a point.
    point_id: str | None = None


def read_record(record: Record, probe: Probe, fleet: Fleet) -> tuple[Reading, ...]:
    """Return the readings of all subjects that took part in a point.

    If the point failed, each subject has a problem and no value. The straggler test gives up to
    three readings of a device, each of its own test.

    Args:
        probe: of the same point.
        fleet: the devices that ran the point, by rank.
    """
    results: list[_Result] = []
    if record.status is not Status.OK:
        for test, subject, ranks in _participants(record, probe, fleet):
            results.append((test, subject, None, _why_unread(record, ranks, fleet)))
    elif probe.test.reads == "parts":
        results = [(*part, None) for part in _step_parts(record, probe, fleet)]
    else:
        problems: dict[int, Problem] = {}
        if probe.test.reads == "bits":
            metrics = []
            for measured in record.measurements:
                by_metric = measured.workload_metrics.items()
                metrics.append({metric.name: value for metric, value in by_metric})
            problems = wrong_bits(metrics, fleet.subjects)
        for test, subject, ranks in _participants(record, probe, fleet):
            figure = _value(test, [record.measurements[rank] for rank in ranks])
            results.append((test, subject, figure, problems.get(ranks[0])))
    measured_by_uuid: dict[str, Measurement] = {}
    for device, measured in zip(fleet.subjects, record.measurements, strict=False):
        measured_by_uuid[device.uuids[0]] = measured
    readings = []
    for test, subject, value, problem in results:
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
        [measurement] = measured
        return replace(
            reading,
            throttle_reasons=measurement.throttle_reasons,
            temperature_c=measurement.temperature_c,
        )
    if reading.subject.kind == "pair":
        routes = []
        for measurement in measured:
            by_network = (route for route in measurement.transports if route.startswith("NET/"))
            routes.append(next(by_network, ""))
        return replace(reading, routes=tuple(routes))
    return reading


def _value(test: HealthTest, measured: Sequence[Measurement]) -> float:
    """Return the value of a subject in the unit of the test, by its slowest rank's median step."""
    first = measured[0]
    step_ns = max(statistics.median(measurement.step_ns) for measurement in measured)
    if test.unit == "TFLOP/s":
        return (first.flops_per_step or 0.0) / step_ns / 1e3
    if test.unit == "GB/s":
        # Bytes per ns.
        if test.reads == "ranks":
            return (first.memory_bytes or 0) / step_ns
        # The rate of a collective is its bus bandwidth, as in nccl-tests.
        factor = first.busbw_factor or 0.0 if test.reads == "groups" else 1.0
        return (first.message_bytes or 0) * factor / step_ns
    if test.unit == "ms":
        return step_ns / 1e6
    # The unit is µs.
    step_us = step_ns / 1e3
    # The step of a pair is a round trip, and the latency is half of the round trip.
    return step_us / 2 if test.reads == "pairs" else step_us


def wrong_bits(
    metrics: Sequence[Mapping[str, float]], subjects: Sequence[Subject]
) -> dict[int, Problem]:
    """Return rank -> why its matrix product is wrong or disputed.

    A product that changes between repetitions is wrong. The other products of a model are compared:

    - If more than half of them are equal, the others are wrong.
    - Otherwise products that change when rows move are wrong, and the rest is compared again.
    - If all products change so, or none, all are disputed.

    Args:
        metrics: of the workload `same_bits`, by rank.
        subjects: devices by rank.
    """
    problems: dict[int, Problem] = {}
    # A product that changes is not compared with products of other devices.
    steady = [rank for rank, of_rank in enumerate(metrics) if not of_rank["changed_products"]]
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
    for rank, of_rank in enumerate(metrics):
        if of_rank["changed_products"]:
            problems[rank] = Problem(kind=ProblemKind.CHANGED_BITS)
    return problems


def _step_parts(
    record: Record, probe: Probe, fleet: Fleet
) -> Iterator[tuple[HealthTest, Subject, float]]:
    """Yield (test, device, ms): compute time of each rank, then wait and communication times.

    Ranks without a breakdown are left out. Wait times need a breakdown of every rank.
    """
    of_ranks = [measured.breakdown for measured in record.measurements]
    for subject, breakdown in zip(fleet.subjects, of_ranks, strict=True):
        if breakdown and any(breakdown.local_ms):
            # Durations of steps without communication, in blocks.
            yield probe.test, subject, statistics.median(chain(*breakdown.local_ms))
    breakdowns = [breakdown for breakdown in of_ranks if breakdown]
    # [ranks][steps]: from the last gradient of a rank to the end of the last collective.
    tails_ms = [breakdown.tail_ms for breakdown in breakdowns]
    if len(tails_ms) < len(fleet.devices) or not all(tails_ms):
        return
    wait_test = replace(probe.test, name=WAIT_TEST, is_compared=False)
    comm_test = replace(wait_test, name=COMM_TEST)
    # The last rank does not wait, so the smallest tail of a step is communication alone, and the
    # rest of a longer tail is a wait.
    waits_ms = median_above_smallest(tails_ms)
    for subject, breakdown, wait_ms in zip(fleet.subjects, breakdowns, waits_ms, strict=True):
        yield wait_test, subject, wait_ms
        # The time in collectives includes the wait.
        in_collectives_ms = statistics.median(breakdown.comm_ms)
        yield comm_test, subject, max(0.0, in_collectives_ms - wait_ms)


def _participants(
    record: Record, probe: Probe, fleet: Fleet
) -> Iterator[tuple[HealthTest, Subject, Sequence[int]]]:
    """Yield (test, subject, ranks of the subject) for each subject that took part in a point."""
    params, test = record.point.params, probe.test
    subjects = fleet.subjects
    if test.reads == "pairs":
        for pair in parse_pairs(str(params["partners"]), len(fleet.devices)):
            sender, receiver = (subjects[rank] for rank in pair)
            if params["direction"] == "backward":
                sender, receiver = receiver, sender
            model = sender.model
            if receiver.model != model:
                model = f"{sender.model} to {receiver.model}"
            subject = Subject(
                kind="pair",
                uuids=(*sender.uuids, *receiver.uuids),
                name=words.path_name(sender.name, receiver.name),
                model=model,
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
        local_ranks: dict[int, int] = {}
        for ranks in fleet.nodes:
            local_ranks |= {rank: local_rank for local_rank, rank in enumerate(ranks)}
        for rank, subject in enumerate(subjects):
            if params.get("local_rank") in (None, local_ranks[rank]):
                yield test, subject, (rank,)


def _why_unread(record: Record, ranks: Sequence[int], fleet: Fleet) -> Problem:
    """Return the problem of the subject with these ranks, in a failed point."""
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
    """Return the probes that fit on all devices, and a reading for each device without room.

    Args:
        free_bytes: `Device.uuid` -> free memory; other devices have enough.
    """
    fitting: list[Probe] = []
    left_out: list[Reading] = []
    for probe in probes:
        needed = _LIBRARY_BYTES + probe.test.device_bytes
        has_room = True
        for subject, device in zip(fleet.subjects, fleet.devices, strict=True):
            free = free_bytes.get(device.uuid, needed)
            if free >= needed:
                continue
            has_room = False
            reading = Reading(
                test=probe.test,
                subject=subject,
                pass_number=1,
                value=None,
                problem=Problem(kind=ProblemKind.NO_ROOM, value=free, limit=needed),
            )
            left_out.append(reading)
        if has_room:
            fitting.append(probe)
    return tuple(fitting), tuple(left_out)


def presence(fleet: Fleet, lost: Collection[int]) -> Iterator[Reading]:
    """Yield a reading of the fact "worker" for each device; `lost` are ranks."""
    test = HealthTest(name="worker", stage="facts", unit="", floor=0.0, is_compared=False)
    worker_lost = Problem(kind=ProblemKind.WORKER_LOST)
    for rank, subject in enumerate(fleet.subjects):
        is_lost = rank in lost
        yield Reading(
            test=test,
            subject=subject,
            pass_number=1,
            value=None if is_lost else 1.0,
            problem=worker_lost if is_lost else None,
        )


def drift(readings: Iterable[Reading], floor: float) -> Iterator[Reading]:
    """Yield how much slower the end of the burn-in was, for each of its tests and subjects.

    The value is the median time of the last tenth over the median time of the first tenth.

    Args:
        readings: oldest first; other stages are ignored.
        floor: noise of the ratio on healthy devices, as a share.
    """
    series: dict[tuple[str, Subject], list[Reading]] = {}
    for reading in readings:
        if reading.test.stage == "burn-in" and reading.value:
            series.setdefault((reading.test.name, reading.subject), []).append(reading)
    for (name, subject), of_subject in series.items():
        times = []
        for reading in of_subject:
            if reading.value:
                times.append(reading.value if reading.test.is_time else 1 / reading.value)
        if len(times) < 2:
            continue
        count = max(1, len(times) // _PARTS_OF_BURN_IN)
        test = HealthTest(
            name=f"{name} drift",
            stage="burn-in",
            subjects=of_subject[0].test.subjects,
            unit="x",
            floor=floor,
        )
        value = statistics.median(times[-count:]) / statistics.median(times[:count])
        yield Reading(test=test, subject=subject, pass_number=1, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectPlacement:
    """How many devices a subject has, and on how many nodes; only equal placements are compared."""

    # A group on one node is a "node", on several nodes a "cluster".
    kind: SubjectKind = "device"
    devices: int = 1
    nodes: int = 1
    # The driver's name of the connection of a pair on one node, as "NV" or "PHB"; "" if unknown.
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
    # The driver's name of a pair's connection; empty if NVLink carries the data.
    level: str = ""

    def __str__(self) -> str:
        """Return its name in references: `gen5 x16`, `NVLink x18`, `NVLink x0, gen5 x16, PHB`."""
        nvlinks = "" if self.nvlinks is None else f"NVLink x{self.nvlinks}"
        return ", ".join(filter(None, (nvlinks, self.pcie, self.level)))


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class Group:
    """The readings of one test, of subjects of one model and placement."""

    test: HealthTest
    placement: SubjectPlacement
    # Link of the first subject.
    link: Link
    subjects: Sequence[Subject]
    # [passes, subjects], NaN without a value. Passes with few values are left out.
    values: Floats
    # Column of a subject -> its problems in all passes, without repeats.
    problems: Mapping[int, Sequence[Problem]]
    # Column -> number of passes in which the subject itself failed.
    failed_passes: Mapping[int, int]
    # Column -> number of passes in which the subject itself failed or was wrong.
    faulty_passes: Mapping[int, int]
    # Number of all passes.
    pass_count: int

    @cached_property
    def typical(self) -> Floats:
        """Median of each subject over the passes, [subjects]; NaN without a value."""
        if not np.isnan(self.values).any():
            return np.asarray(np.median(self.values, axis=0))
        # nanmedian warns of columns without a value.
        has_value = ~np.isnan(self.values).all(axis=0)
        medians = np.full(self.values.shape[1], np.nan)
        medians[has_value] = np.nanmedian(self.values[:, has_value], axis=0)
        return medians

    @property
    def model(self) -> str:
        """The model of the subjects; for two models `A to B` (a pair) or `A and B`."""
        return self.subjects[0].model


def devices_by_uuid(devices: Sequence[Device]) -> dict[str, Device]:
    """Return uuid of a subject -> device, for all devices of a check by rank."""
    subjects = device_subjects(devices)
    return {subject.uuids[0]: device for subject, device in zip(subjects, devices, strict=True)}


def group_readings(readings: Iterable[Reading], by_uuid: Mapping[str, Device]) -> list[Group]:
    """Return the readings in groups of one test, model and placement, in order of first readings.

    Subjects on PCIe are also grouped by their link. The last value of a subject in a pass counts.

    Args:
        by_uuid: as `devices_by_uuid` returns it.
    """
    by_group: dict[tuple[str, str, SubjectPlacement, Link], list[Reading]] = {}
    # A cache, because a subject has many readings in a stage.
    connections: dict[tuple[Subject, Stage], tuple[SubjectPlacement, Link]] = {}
    for reading in readings:
        subject, test = reading.subject, reading.test
        if (subject, test.stage) not in connections:
            # Ignore the number of NVLinks: a device with fewer links is the slow one of its group.
            link = replace(link_of(subject, test.stage, by_uuid), nvlinks=None)
            connections[subject, test.stage] = placement_of(subject, by_uuid), link
        key = (test.name, subject.model, *connections[subject, test.stage])
        by_group.setdefault(key, []).append(reading)
    groups = []
    for (_, _, placement, _), members in by_group.items():
        link = link_of(members[0].subject, members[0].test.stage, by_uuid)
        groups.append(_group(members, placement, link))
    return groups


def _group(members: Sequence[Reading], placement: SubjectPlacement, link: Link) -> Group:
    """Return a group of readings of one test, with a row for each pass."""
    # The last subject with the same uuids counts.
    subjects = list({reading.subject.uuids: reading.subject for reading in members}.values())
    column_of = {subject.uuids: column for column, subject in enumerate(subjects)}
    pass_numbers = sorted({reading.pass_number for reading in members})
    row_of = {pass_number: row for row, pass_number in enumerate(pass_numbers)}
    values = np.full((len(pass_numbers), len(subjects)), np.nan)
    problems: dict[int, list[Problem]] = {}
    # Column -> numbers of the passes in which the subject itself failed.
    failed: dict[int, set[int]] = {}
    # Column -> numbers of the passes in which the subject itself failed or was wrong.
    faulty: dict[int, set[int]] = {}
    for reading in members:
        column, value = column_of[reading.subject.uuids], reading.value
        # A rate of 0 means that the amount of work is unknown.
        if value is not None and np.isfinite(value) and (value or reading.test.is_time):
            values[row_of[reading.pass_number], column] = value
        if reading.problem is None:
            continue
        if reading.problem not in problems.setdefault(column, []):
            problems[column].append(reading.problem)
        if reading.problem.effect == "failed":
            failed.setdefault(column, set()).add(reading.pass_number)
        if reading.problem.effect in ("failed", "fault"):
            faulty.setdefault(column, set()).add(reading.pass_number)
    value_counts = (~np.isnan(values)).sum(axis=1)
    if value_counts.any():
        # Leave out passes with few values: the median of few subjects is no reference.
        values = values[2 * value_counts >= value_counts.max()]
    return Group(
        test=members[0].test,
        placement=placement,
        link=link,
        subjects=subjects,
        values=values,
        problems=problems,
        failed_passes={column: len(passes) for column, passes in failed.items()},
        faulty_passes={column: len(passes) for column, passes in faulty.items()},
        pass_count=len(pass_numbers),
    )


def placement_of(subject: Subject, by_uuid: Mapping[str, Device]) -> SubjectPlacement:
    """Return how many devices the subject has, on how many nodes, and the connection of a pair.

    Args:
        by_uuid: as `devices_by_uuid` returns it; other devices do not count.
    """
    if subject.kind == "device":
        return SubjectPlacement()
    devices = [by_uuid[uuid] for uuid in subject.uuids if uuid in by_uuid]
    nodes = len({device.node_id for device in devices})
    if subject.kind != "pair":
        # All devices of a cluster, or of a group in it, may be on one node.
        kind: SubjectKind = "node" if nodes < 2 else "cluster"
        return SubjectPlacement(kind=kind, devices=len(devices), nodes=nodes)
    level = ""
    if len(devices) == 2 and nodes == 1:
        level = read_topology(devices[0]).levels.get(devices[1].index, "")
    return SubjectPlacement(kind="pair", devices=len(devices), nodes=nodes, level=level)


def link_of(subject: Subject, stage: Stage, by_uuid: Mapping[str, Device]) -> Link:
    """Return what carries the data of the subject's first device in the tests of a stage.

    Without parts if unknown, for a pair on two nodes, and for a device outside of host-links.

    Args:
        by_uuid: as `devices_by_uuid` returns it.
    """
    device = by_uuid.get(subject.uuids[0]) if subject.uuids else None
    if device is None or (subject.kind == "device" and stage != "host-links"):
        return Link()
    pcie, topology = device.pcie_link_max or "", read_topology(device)
    if subject.kind == "device":
        return Link(pcie=pcie)
    placement = placement_of(subject, by_uuid)
    level = placement.level
    if subject.kind == "pair" and placement.nodes > 1:
        return Link()
    # On a board with NVLink bridges some pairs have no bridge.
    has_no_bridge = level not in ("", "NV") and "NV" in topology.levels.values()
    nvlinks = 0 if has_no_bridge else topology.nvlinks
    return Link(nvlinks=0, pcie=pcie, level=level) if nvlinks == 0 else Link(nvlinks=nvlinks)


def facts_readings(
    before: Sequence[DeviceFacts], after: Sequence[DeviceFacts]
) -> tuple[Reading, ...]:
    """Return a reading of each fact of each GPU: its value after the check, and any problem.

    A GPU that can no longer be read has this problem in each fact. A GPU that is not in `before`
    counts as unchanged.
    """
    earlier = {facts.device.uuid: facts for facts in before}
    expected_links = _expected_links([*before, *after])
    readings = []
    for now in after:
        if now.device.kind != "cuda":
            continue
        at_start = earlier.get(now.device.uuid, now)
        # Without NVML, as in many containers, a GPU could not be read before either.
        lost = None
        if now.unread and not at_start.unread:
            lost = Problem(kind=ProblemKind.DEVICE_UNREAD, detail=now.unread)
        links = expected_links[now.device.node_id, now.device.name]
        problems = _fact_problems(at_start, now, links)
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
            readings.append(reading)
    return tuple(readings)


def _expected_links(states: Iterable[DeviceFacts]) -> dict[tuple[str, str], set[int]]:
    """Return (node, model) -> numbers of the NVLinks that should be up.

    Boards with bridges have only some links, and a virtual machine with one GPU may have none. So
    only links that are up on a similar GPU are expected; behind an NVSwitch, all links.
    """
    expected: dict[tuple[str, str], set[int]] = {}
    for facts in states:
        links = facts.nvlinks or ()
        is_switched = facts.fabric_state is not None and any(link.is_active for link in links)
        numbers = expected.setdefault((facts.device.node_id, facts.device.name), set())
        numbers.update(link.link for link in links if link.is_active or is_switched)
    return expected


def _fact_problems(
    before: DeviceFacts,
    now: DeviceFacts,
    expected_links: Set[int],  # Numbers of the NVLinks that should be up.
) -> dict[str, Problem]:
    """Return the name of a fact of a GPU -> what is wrong with the fact."""
    problems: dict[str, Problem] = {}
    if xids := _xid_problem(before, now):
        problems["Xid errors"] = xids
    if now.fabric_faults:
        problems["NVLink fabric"] = Problem(kind=ProblemKind.FABRIC, names=now.fabric_faults)
    if now.ecc_errors:
        # Errors from before the check are a problem too. `limit` is the number of all errors since
        # the driver was loaded, and `value` is the number of new errors.
        new_errors = _growth(before.ecc_errors, now.ecc_errors)
        problems[MEMORY_ERRORS] = Problem(
            kind=ProblemKind.MEMORY_ERRORS, value=new_errors, limit=now.ecc_errors
        )
    if now.is_remap_pending:
        problems["remapped rows"] = Problem(kind=ProblemKind.ROW_PENDING)
    elif rows := _growth(before.remapped_rows, now.remapped_rows):
        problems["remapped rows"] = Problem(kind=ProblemKind.BAD_ROWS, value=rows)
    if now.is_retirement_pending:
        problems["retired pages"] = Problem(kind=ProblemKind.PAGE_PENDING)
    elif pages := _growth(before.retired_pages, now.retired_pages):
        problems["retired pages"] = Problem(kind=ProblemKind.BAD_PAGES, value=pages)
    if now.is_remap_failed:
        problems["failed remaps"] = Problem(kind=ProblemKind.NO_SPARE_ROW)
    # A check of less than a minute may have the replays of a minute.
    minutes = max(1.0, (now.read_s - before.read_s) / 60)
    replays = _growth(before.pcie_replays, now.pcie_replays)
    if replays > _REPLAYS_PER_MIN * minutes:
        problems["PCIe replays"] = Problem(kind=ProblemKind.PCIE_REPLAYS, value=replays)
    lanes, max_lanes = now.pcie_lanes, now.pcie_lanes_max
    if lanes is not None and max_lanes is not None and lanes < max_lanes:
        problems[PCIE_LANES] = Problem(kind=ProblemKind.FEW_LANES, value=lanes, limit=max_lanes)
    inactive = {link.link for link in now.nvlinks or () if not link.is_active}
    if down := sorted(expected_links & inactive):
        problems["NVLinks up"] = Problem(kind=ProblemKind.LINKS_DOWN, numbers=tuple(down))
    if link_errors := tuple(_new_link_errors(before, now)):
        problems["NVLink errors"] = Problem(kind=ProblemKind.LINK_ERRORS, link_errors=link_errors)
    return problems


def _new_link_errors(before: DeviceFacts, now: DeviceFacts) -> Iterator[LinkErrors]:
    """Yield the errors of NVLinks during the check; CRC errors only above DCGM's limit."""
    earlier = {link.link: link.errors for link in before.nvlinks or ()}
    limits = {"crc": _CRC_ERRORS_PER_S * max(1.0, now.read_s - before.read_s)}
    for link in now.nvlinks or ():
        for kind, errors in link.errors.items():
            count = errors - earlier.get(link.link, {}).get(kind, errors)
            if count > limits.get(kind, 0.0):
                yield LinkErrors(link=link.link, kind=kind, count=count)


def _xid_problem(before: DeviceFacts, now: DeviceFacts) -> Problem | None:
    """Return new Xid errors; without new errors, earlier Xid errors of the hardware."""
    # Prefer the kernel's log: NVML misses errors from before the watch. Count the lines, because a
    # full log has lost its oldest lines meanwhile.
    logged = Counter(now.kernel_xids or ()) - Counter(before.kernel_xids or ())
    if before.kernel_xids is not None and logged:
        new = tuple(sorted(logged.elements()))
    else:
        # A replaced agent starts a new watch, whose errors are all new.
        is_same_watch = now.xids_watched_since_s == before.xids_watched_since_s
        new = (now.new_xids or ())[len(before.new_xids or ()) if is_same_watch else 0 :]
    if new:
        return Problem(kind=ProblemKind.NEW_XIDS, numbers=new)
    old = tuple(xid for xid in now.kernel_xids or () if xid in HARDWARE_XIDS)
    return Problem(kind=ProblemKind.OLD_XIDS, numbers=old) if old else None


def _growth(before: int | None, now: int | None) -> int:
    """Return by how much a counter grew; 0 if unknown. A smaller value means a reset."""
    if before is None or now is None:
        return 0
    return now - before if now >= before else now
