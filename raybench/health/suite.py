"""The suite of a health check: a table of tests, and the points that each test is read from. Pure.

To add a test, add a row to `SUITE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any, Literal, get_args

from raybench.job import registry
from raybench.job.point import RUN_SETTINGS, USUAL_PRECISIONS, Point, Precision, Scalar
from raybench.job.settings import settings_of_class
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import (
    Action,
    DevicePlace,
    Stage,
    Subject,
    SubjectKind,
    is_time,
)
from raybench.report.words import health as words
from raybench.stats.outliers import BAD_RATIO
from raybench.workloads.collective import groups_text
from raybench.workloads.pairs import Pair, pairs_of_turn, pairs_text, turns

# What is read of the record of a point.
# ranks: a figure of each rank. bits: also whether each rank's product is bit-identical.
# pairs, groups: a figure of each pair or group of ranks.
# parts: compute, wait and communication times of each rank's training step.
Reads = Literal["ranks", "bits", "pairs", "groups", "parts"]
# Which devices take part in a point; see `_participants`.
RunOn = Literal[
    "each device",
    "several devices",
    "one local rank",
    "full nodes",
    "pairs on nodes",
    "all pairs",
    "groups by node",
    "one group over nodes",
    "one group",
]
STAGES: tuple[Stage, ...] = get_args(Stage)
BURN_IN: Stage = "burn-in"
ENVIRONMENT: Stage = "environment"
# The stages that are run in each pass; the burn-in comes after them.
PASS_STAGES = tuple(stage for stage in STAGES if stage != BURN_IN)

# Where the host sets the pace, healthy devices differ by 1.4 times and more. Other tests have
# `BAD_RATIO`.
_BAD_RATIO_OF_HOST = 3.0
# The tests of the stage "straggler": ms of each step in which a device computes, waits for the
# slowest device, or communicates.
COMPUTE_TEST, WAIT_TEST, COMM_TEST = "step compute", "step wait", "step communication"
# The tests of the stage "environment" that need work of the devices.
CONNECT_TEST, TRANSPORT_TEST = "first collective", "transport"
NETWORK_TEST = "transport between nodes"
# Stages whose tests use NCCL, except copies between memories.
_STAGES_OF_NCCL = ("pairs", "together", "smoke", "straggler", "burn-in")
_MIB = 2**20
_TRANSPORT_PROBE = "raybench.workloads.pairs:TransportProbe"
# Products up to this size make no references: the next version of a library may choose another
# kernel for them.
_SMALL_PRODUCT = 1024
# With more devices, devices of different nodes are paired only if they have the same local rank
# (the rails of a cluster).
_MOST_IN_ALL_PAIRS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTest:
    """A figure of every subject of a kind; most tests are rows of `SUITE`."""

    # Such as "gemm bf16 8192".
    name: str
    stage: Stage
    unit: str
    # Noise of the figure on healthy devices, as a share. A smaller spread counts as this spread.
    floor: float
    # The kind of subjects that the test judges.
    subjects: SubjectKind = "device"
    # Whether the host, and not the device, limits the speed: launches, tiny messages, small steps.
    is_paced_by_host: bool = False
    # Whether subjects are compared with each other. False for facts, wait and communication times.
    is_compared: bool = True
    # Workload of the points; "" if the test is read from the driver or derived from other tests.
    workload: str = ""
    params: Mapping[str, Scalar] = field(default_factory=dict)
    precision: Precision = Precision.FP32
    batch_size: int | None = None
    cuda_graph: bool = False
    # Which devices take part in a point.
    run_on: RunOn = "each device"
    reads: Reads = "ranks"
    # Memory that the data takes on a device.
    device_bytes: int = 0
    # Whether references are made of the figure. Not where it depends on the number of devices, and
    # not of "same bits", whose products another test times.
    is_reference: bool = True
    # Name of the same test of pairs on one node; empty if this test is not of pairs between nodes.
    within_nodes: str = ""
    # What to do about a wrong fact; None if the test is no fact.
    action: Action | None = None

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL carries the data of the test, on GPUs."""
        return self.stage in _STAGES_OF_NCCL and self.params.get("transport") != "copy"

    @property
    def is_time(self) -> bool:
        """Whether a smaller figure is better; False for rates."""
        return is_time(self.unit)

    @property
    def bad_ratio(self) -> float:
        """A subject that takes more than this many times as long as similar subjects is bad."""
        return _BAD_RATIO_OF_HOST if self.is_paced_by_host else BAD_RATIO

    @property
    def blames_host(self) -> bool:
        """Whether a slow figure is the fault of the host; between nodes it may be the network's."""
        return self.is_paced_by_host and not self.within_nodes

    @property
    def between_nodes(self) -> HealthTest:
        """The same test for pairs of devices on different nodes."""
        return replace(self, name=f"{self.name} between nodes", within_nodes=self.name)


def _environment(size_bytes: int) -> tuple[HealthTest, HealthTest]:
    """Return the two tests that `health/transports.py` judges; they run once, not in each pass."""
    connect = HealthTest(
        name=CONNECT_TEST,
        stage=ENVIRONMENT,
        unit="s",
        floor=0.0,
        is_compared=False,
        is_reference=False,
        workload="collective",
        params={"operation": "all_reduce", "size_bytes": size_bytes, "dtype": "float32"},
        run_on="several devices",
        device_bytes=size_bytes,
    )
    probe = replace(connect, name=TRANSPORT_TEST, unit="", workload=_TRANSPORT_PROBE, params={})
    return connect, probe


def _size_text(size_bytes: int) -> str:
    """Return `256 MiB`, `500 MB` or `8 B`: the largest unit that divides the size."""
    for name, unit in (("GiB", 2**30), ("MiB", _MIB), ("MB", 10**6), ("KiB", 2**10)):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def _product(
    workload: Literal["gemm", "same_bits"],
    precision: Precision,
    size: int,
    floor: float,
    *,
    cuda_graph: bool = False,
) -> HealthTest:
    """Return the test of the rate of square matrix products, alone on each device."""
    is_gemm = workload == "gemm"
    return HealthTest(
        name=f"{workload.replace('_', ' ')} {precision} {size}",
        stage="alone",
        unit="TFLOP/s",
        floor=floor,
        workload=workload,
        params=dict.fromkeys("mnk", size) if is_gemm else {"size": size},
        precision=precision,
        cuda_graph=cuda_graph,
        reads="ranks" if is_gemm else "bits",
        device_bytes=16 * size**2,
        is_reference=is_gemm and size > _SMALL_PRODUCT,
    )


def _memory(size_bytes: int, floor: float) -> HealthTest:
    """Return the test of the bandwidth of device memory: a triad of three arrays."""
    return HealthTest(
        name=f"memory {_size_text(size_bytes)}",
        stage="alone",
        unit="GB/s",
        floor=floor,
        workload="memory",
        params={"size_bytes": size_bytes},
        device_bytes=3 * size_bytes,
    )


# Time between two queued launches, which the host needs for a launch.
_LAUNCH = HealthTest(
    name="launch",
    stage="alone",
    unit="µs",
    floor=0.3,
    is_paced_by_host=True,
    workload="launch",
    params={"wait": False},
)


def _host_copies(direction: str) -> tuple[HealthTest, HealthTest]:
    """Return the tests of copies between host and device: one device of a node, then all."""
    alone = HealthTest(
        name=f"{direction} alone",
        stage="host-links",
        unit="GB/s",
        floor=0.03,
        workload="host_copy",
        params={"direction": direction, "size_bytes": 128 * _MIB},
        run_on="one local rank",
        device_bytes=4 * 128 * _MIB,
    )
    at_once = replace(
        alone, name=f"{direction} all at once", run_on="full nodes", is_reference=False
    )
    return alone, at_once


def _pair_tests(
    transport: Literal["copy", "send"], size_bytes: int, floor: float
) -> tuple[HealthTest, HealthTest]:
    """Return the test of the bandwidth between two devices, in both directions.

    Args:
        transport: "copy" between their memories, or "send" by NCCL or gloo.
    """
    forward = HealthTest(
        name=f"{transport} {_size_text(size_bytes)}",
        stage="pairs",
        subjects="pair",
        unit="GB/s",
        floor=floor,
        workload="pairs",
        params={"direction": "forward", "size_bytes": size_bytes, "transport": transport},
        run_on="pairs on nodes" if transport == "copy" else "all pairs",
        reads="pairs",
        device_bytes=5 * size_bytes,
    )
    return forward, replace(forward, params={**forward.params, "direction": "backward"})


# Half of the round trip of a message.
_LATENCY = replace(
    _pair_tests("send", 8, 0.3)[0],
    name="send latency 8 B",
    unit="µs",
    is_paced_by_host=True,
    params={"direction": "round_trip", "size_bytes": 8},
)


def _all_reduces(size_bytes: int, floor: float, **changes: Any) -> tuple[HealthTest, HealthTest]:
    """Return the tests of an all_reduce in each node, and of an all_reduce over all nodes.

    The unit is GB/s of bus bandwidth, as in nccl-tests, unless `changes` has another unit.
    """
    in_nodes = HealthTest(
        name=f"all_reduce {_size_text(size_bytes)}",
        stage="together",
        subjects="node",
        floor=floor,
        workload="grouped_collective",
        params={"size_bytes": size_bytes},
        run_on="groups by node",
        reads="groups",
        device_bytes=size_bytes,
        **{"unit": "GB/s", **changes},
    )
    return in_nodes, replace(in_nodes, subjects="cluster", run_on="one group over nodes")


# Fails if the gradients of ranks differ, or if the loss does not fall.
_SMOKE = HealthTest(
    name="smoke 784-256-10",
    stage="smoke",
    unit="ms",
    floor=0.3,
    is_paced_by_host=True,
    workload="smoke",
)
# The time that a rank computes in a training step of an MLP.
_STEP = HealthTest(
    name=COMPUTE_TEST, stage="straggler", unit="ms", floor=0.1, workload="mlp", reads="parts"
)


def _burn_in(product: HealthTest, all_reduce: HealthTest) -> tuple[HealthTest, HealthTest]:
    """Return the two tests that a burn-in alternates, made from tests of other stages."""
    return (
        replace(
            product,
            name=f"burn-in product {product.precision} {product.params['size']}",
            stage=BURN_IN,
        ),
        replace(all_reduce, name=f"burn-in {all_reduce.name}", stage=BURN_IN, run_on="one group"),
    )


# The floors are from the committed runs. They are large on CPU workers, which share cores and
# caches with other programs. The compute time of a training step was 5.4 and 6.2 ms on one H200 in
# two checks six minutes apart. A CUDA graph replays work that is shorter than its launch. Products
# on tensor cores from 2048 on need all the power that a GPU may draw, so healthy H200s of one host
# differ by 6 % (tf32 2048: 336 and 356 TFLOP/s in health-20261122-193240-9d20). They come late,
# because a point waits until clocks that a power cap has lowered have been high for 0.3 s.
SUITE: Mapping[DeviceKind, tuple[HealthTest, ...]] = {
    "cuda": (
        *_environment(256 * _MIB),
        *(
            _product("gemm", precision, size, 0.01, cuda_graph=True)
            for precision in USUAL_PRECISIONS
            for size in (256, 512, 1024)
        ),
        *(_memory(size_bytes, 0.005) for size_bytes in (10**8, 5 * 10**8, 10**9)),
        # Time from a launch until the host knows that the kernel has ended.
        replace(_LAUNCH, name="launch and wait", params={"wait": True}),
        _LAUNCH,
        *(
            _product(
                "gemm",
                precision,
                size,
                0.01 if precision is Precision.FP32 else 0.025,
                cuda_graph=size == 2048,
            )
            for precision in USUAL_PRECISIONS
            for size in (2048, 8192)
        ),
        _product("same_bits", Precision.FP32, 2048, 0.01, cuda_graph=True),
        _product("same_bits", Precision.BF16, 2048, 0.025, cuda_graph=True),
        *_host_copies("h2d"),
        *_host_copies("d2h"),
        *_host_copies("both"),
        *_pair_tests("copy", 256 * _MIB, 0.02),
        *_pair_tests("send", 256 * _MIB, 0.02),
        _LATENCY,
        *_all_reduces(2**15, 0.1, unit="µs", cuda_graph=True),
        *_all_reduces(_MIB, 0.02, cuda_graph=True),
        *_all_reduces(32 * _MIB, 0.02),
        *_all_reduces(2**30, 0.02),
        _SMOKE,
        replace(
            _STEP,
            params={"hidden": 4096, "layers": 8},
            precision=Precision.BF16,
            batch_size=1024,
            floor=0.04,
        ),
        *_burn_in(_product("same_bits", Precision.BF16, 8192, 0.01), _all_reduces(2**30, 0.02)[1]),
    ),
    # A CPU worker has no link to its host, and cannot copy from the memory of another worker.
    "cpu": (
        *_environment(16 * _MIB),
        *(_product("gemm", Precision.FP32, size, 0.1) for size in (256, 512, 1024)),
        # Larger than most caches, and still quick.
        _memory(16 * 10**6, 0.1),
        _LAUNCH,
        _product("same_bits", Precision.FP32, 256, 0.1),
        *_pair_tests("send", 4 * _MIB, 0.15),
        _LATENCY,
        *_all_reduces(2**15, 0.2, unit="µs", is_paced_by_host=True),
        *_all_reduces(_MIB, 0.15),
        *_all_reduces(8 * _MIB, 0.15),
        _SMOKE,
        replace(_STEP, params={"hidden": 256, "layers": 4}, batch_size=64),
        *_burn_in(_product("same_bits", Precision.FP32, 512, 0.1), _all_reduces(8 * _MIB, 0.15)[1]),
    ),
}


@cache
def _tests_by_name(kind: DeviceKind) -> Mapping[str, HealthTest]:
    tests: dict[str, HealthTest] = {}
    for test in SUITE[kind]:
        tests.setdefault(test.name, test)
        if test.subjects == "pair":
            tests.setdefault(test.between_nodes.name, test.between_nodes)
    return tests


def test_named(name: str, kind: DeviceKind) -> HealthTest | None:
    """Return the first row of the suite with this name, also for pairs between nodes."""
    return _tests_by_name(kind).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A point, and the health test for which its record is read."""

    test: HealthTest
    point: Point


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The devices of a check, all of one kind, by rank."""

    devices: tuple[Device, ...]
    # Subjects of the devices in a larger fleet, so that they keep their names when others are lost.
    # Empty if the fleet is whole.
    known: tuple[Subject, ...] = ()

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The devices as subjects, by rank."""
        return self.known or device_subjects(self.devices)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending; nodes in the order of their first ranks."""
        by_node: dict[str, list[int]] = {}
        for rank, device in enumerate(self.devices):
            by_node.setdefault(device.node_id, []).append(rank)
        return tuple(map(tuple, by_node.values()))

    def _probe(self, test: HealthTest, **participants: Scalar) -> Probe:
        """Return the test with a point; `participants` are its parameters that choose devices."""
        batch_size, world_size = test.batch_size, len(self.devices)
        params = {**_defaults(test.workload), **test.params, **participants}
        point = Point(
            workload=test.workload,
            params=dict(sorted(params.items())),
            world_size=world_size,
            precision=test.precision,
            batch_size=batch_size,
            global_batch_size=None if batch_size is None else batch_size * world_size,
            scaling=None if batch_size is None else "weak",
            cuda_graph=test.cuda_graph,
        )
        if test.reads == "parts" and world_size == 1:
            # A single rank neither waits nor communicates.
            test = replace(test, reads="ranks")
        return Probe(test=test, point=point)


def device_subject(device: Device) -> Subject:
    """Return a GPU as a subject, without the other devices of its check."""
    place = DevicePlace(host=device.host, kind=device.kind, number=device.index)
    return _subject(device.uuid, place, device.name)


def device_subjects(devices: Sequence[Device]) -> tuple[Subject, ...]:
    """Return all devices of a check as subjects, in the same order."""
    places = zip(devices, _uuids_and_places(devices), strict=True)
    return tuple(_subject(uuid, place, device.name) for device, (uuid, place) in places)


def _subject(uuid: str, place: DevicePlace, model: str) -> Subject:
    return Subject(kind="device", uuids=(uuid,), name=words.device_name(place), model=model)


def device_places(devices: Iterable[Device]) -> dict[str, DevicePlace]:
    """Return uuid in `Subject.uuids` -> place of the device, for all devices of a check.

    In subjects a GPU has its own uuid, and a CPU worker has `HOST/NUMBER`, with numbers from 0 on
    each host: a CPU worker's own uuid changes with its process.
    """
    return dict(_uuids_and_places(devices))


def _uuids_and_places(devices: Iterable[Device]) -> Iterator[tuple[str, DevicePlace]]:
    """Yield (uuid in `Subject.uuids`, place) of each device; see `device_places`."""
    # Host -> number of its devices so far.
    counts = Counter[str]()
    for device in devices:
        number, uuid = device.index, device.uuid
        if device.kind == "cpu":
            number = counts[device.host]
            uuid = f"{device.host}/{number}"
        counts[device.host] += 1
        yield uuid, DevicePlace(host=device.host, kind=device.kind, number=number)


def device_kinds(subject: Subject) -> set[DeviceKind]:
    """Return the possible kinds of a subject's devices; both kinds if it names no device."""
    kinds: set[DeviceKind] = set()
    for uuid in subject.uuids:
        # The uuid of a CPU worker is `HOST/NUMBER`. Uuids of GPUs have no slash, or two slashes for
        # MIG with old drivers.
        kinds.add("cpu" if uuid.count("/") == 1 else "cuda")
    return kinds or {"cpu", "cuda"}


def probes(fleet: Fleet, stages: Collection[Stage], *, serial: bool = False) -> tuple[Probe, ...]:
    """Return the probes of these stages that the fleet can run, in the order of `SUITE`.

    Ask for the burn-in by itself: its points may be equal to points of other stages.

    Args:
        fleet: at least one device.
        serial: test one pair of devices at a time, so that no pair shares a path with another.
    """
    return tuple(
        fleet._probe(test, **participants)
        for test in SUITE[fleet.devices[0].kind]
        if test.stage in stages
        for participants in _participants(fleet, test.run_on, serial)
    )


def _participants(fleet: Fleet, run_on: RunOn, serial: bool) -> Iterator[Mapping[str, Scalar]]:
    """Yield the parameters that choose devices, for each point of a test.

    Yields nothing if there are too few devices.
    """
    all_ranks = tuple(range(len(fleet.devices)))
    most_on_a_node = max(map(len, fleet.nodes))
    match run_on:
        case "each device":
            yield {}
        case "several devices":
            if len(fleet.devices) > 1:
                yield {}
        case "one local rank":
            # One device of each node at the same time.
            for local_rank in range(most_on_a_node):
                yield {"local_rank": local_rank}
        case "full nodes":
            # On nodes with one device, "one local rank" is the same test.
            if most_on_a_node > 1:
                yield {}
        case "pairs on nodes" | "all pairs":
            are_on_nodes = run_on == "pairs on nodes"
            for pairs in _pairs_of_points(fleet, are_on_nodes=are_on_nodes, serial=serial):
                yield {"partners": pairs_text(pairs)}
        case "groups by node":
            # All nodes work at the same time. The only device of a node has no partner.
            groups = tuple(ranks for ranks in fleet.nodes if len(ranks) > 1)
            if groups:
                yield {"groups": groups_text(groups)}
        case "one group" | "one group over nodes":
            must_be_several = fleet.nodes if run_on == "one group over nodes" else all_ranks
            if len(must_be_several) > 1:
                yield {"groups": groups_text((all_ranks,))}


def _pairs_of_points(fleet: Fleet, *, are_on_nodes: bool, serial: bool) -> Iterator[list[Pair]]:
    """Yield the pairs of each point: all pairs of a turn, or a single pair if `serial`."""
    for disjoint_pairs in _turns_of_pairs(fleet, are_on_nodes=are_on_nodes):
        if serial:
            yield from ([pair] for pair in disjoint_pairs)
        else:
            yield disjoint_pairs


def _turns_of_pairs(fleet: Fleet, *, are_on_nodes: bool) -> Iterator[list[Pair]]:
    """Yield turns of disjoint pairs, as in a round-robin tournament, until all were paired."""
    # Groups of ranks in which every rank is paired with every other rank. The groups of one list
    # are disjoint and take their turns at the same time.
    group_lists: list[list[Sequence[int]]] = [list(fleet.nodes)]
    if not are_on_nodes and len(fleet.devices) <= _MOST_IN_ALL_PAIRS:
        group_lists = [[range(len(fleet.devices))]]
    elif not are_on_nodes:
        # A rail has the ranks with the same local rank on all nodes.
        rails: list[Sequence[int]] = []
        for rail in zip_longest(*fleet.nodes):
            rails.append([rank for rank in rail if rank is not None])
        group_lists.append(rails)
    for group_list in group_lists:
        groups = [ranks for ranks in group_list if len(ranks) > 1]
        for turn in range(max((turns(len(ranks)) for ranks in groups), default=0)):
            yield [
                (ranks[low], ranks[high])
                for ranks in groups
                if turn < turns(len(ranks))
                for low, high in pairs_of_turn(len(ranks), turn)
            ]


# Parameters that a point's title names even at their default.
_ALWAYS_NAMED = ("direction", "m", "size", "size_bytes", "transport")
# Parameter -> text before its value in a title.
_PREFIXES = {"local_rank": "local rank ", "wait": "wait "}


def title(point: Point) -> str:
    """Return `host_copy d2h local rank 1 128 MiB`: workload, precision and parameters of a point.

    Equal values stand once, as in `gemm 512` of 512 x 512 x 512. Points may share a title.
    """
    precision = () if point.precision is Precision.FP32 else (point.precision.value,)
    defaults = _defaults(point.workload)
    values = []
    for name, value in point.params.items():
        if name == "size_bytes":
            values.append(_size_text(int(value)))
        elif name in _ALWAYS_NAMED or value != defaults.get(name):
            values.append(f"{_PREFIXES.get(name, '')}{value}")
    workload = "transports" if point.workload == _TRANSPORT_PROBE else point.workload
    return " ".join(dict.fromkeys((workload, *precision, *values)))


@cache
def _defaults(workload: str) -> Mapping[str, Scalar]:
    """Return the defaults of a workload's parameters, without settings of the run."""
    settings = settings_of_class(registry.load_workload(workload))
    return {
        name: setting.default
        for name, setting in settings.items()
        if name not in RUN_SETTINGS and setting.default is not None
    }
