"""The suite of a health check: a table of tests, and the points that each of them is read from.

To add a test, add a row to `SUITE`: a `HealthTest` with its workload, what is read of a record, the
noise on healthy devices and which devices take part. `probes` makes the points of a fleet. Pure.
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
from raybench.workloads.collective import groups_text
from raybench.workloads.pairs import Pair, pairs_of_turn, pairs_text, turns

# What is read of the record of a point: a figure of each rank, the same and whether its product is
# bit-identical, of each pair, of each group, or the parts of each rank's training step.
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

# The host sets the pace of a launch, or of a message of a few bytes, and healthy devices differ by
# 1.4 times and more there: bad is a device that takes this many times as long.
_HOST_BAD_RATIO = 3.0
# The tests of the stage "straggler", in ms a step of each device: what it computes, how long it
# waits for the slowest one, how long it communicates.
COMPUTE_TEST, WAIT_TEST, COMM_TEST = "step compute", "step wait", "step communication"
# The tests of the stage "environment" that need work of the devices.
CONNECT_TEST, TRANSPORT_TEST = "first collective", "transport"
NETWORK_TEST = "transport between nodes"
# Stages whose tests use NCCL, but for copies between memories.
_STAGES_OF_NCCL = ("pairs", "together", "smoke", "straggler", "burn-in")
_MIB = 2**20
_TRANSPORT_PROBE = "raybench.workloads.pairs:TransportProbe"
# A library may do a product up to this size by another kernel in its next version.
_SMALL_PRODUCT = 1024
# With more devices, nodes are paired only by devices of the same local rank (the rails of a
# cluster).
_MOST_IN_ALL_PAIRS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTest:
    """One figure that is read of every subject of a kind; for most tests a row of `SUITE`.

    name: such as "gemm bf16 8192". stage: `raybench health --only STAGE` runs it.
    subjects: the kind that it judges. unit: of its figure. is_compared: whether subjects are
    compared by it; facts, waiting and communication are not. floor: the noise of the figure on
    healthy devices, as a share of it; a smaller spread between subjects counts as this. bad_ratio:
    a subject that takes more than this many times as long as similar ones is bad.
    workload, params, precision, batch_size, cuda_graph: of its points; a test without a workload
    is read from the driver or derived from other tests. run_on: which devices take part in each
    point. reads: what of a record. device_bytes: memory that its data takes on a device.
    """

    name: str
    stage: Stage
    unit: str
    floor: float
    subjects: SubjectKind = "device"
    bad_ratio: float = 1.5
    is_compared: bool = True
    workload: str = ""
    params: Mapping[str, Scalar] = field(default_factory=dict)
    precision: Precision = Precision.FP32
    batch_size: int | None = None
    cuda_graph: bool = False
    run_on: RunOn = "each device"
    reads: Reads = "ranks"
    device_bytes: int = 0
    # Whether references are made of its figure. The rate that all devices of a host reach at once
    # depends on their number, and products that are compared by their bits are timed elsewhere.
    is_reference: bool = True
    # Name of the same test of pairs on one node; empty if this test is not of pairs between nodes.
    within_nodes: str = ""
    # What to do about a fact that is wrong; None if the test is no fact.
    action: Action | None = None

    @property
    def uses_nccl(self) -> bool:
        """Return whether NCCL carries the data of the test, on GPUs."""
        return self.stage in _STAGES_OF_NCCL and self.params.get("transport") != "copy"

    @property
    def is_time(self) -> bool:
        """Return whether the unit is no rate ("/s"): if so, less is better where `is_compared`."""
        return is_time(self.unit)

    @property
    def between_nodes(self) -> HealthTest:
        """Return the test for pairs of devices on different nodes."""
        return replace(self, name=f"{self.name} between nodes", within_nodes=self.name)


def _environment(size_bytes: int) -> tuple[HealthTest, HealthTest]:
    """Return the first all_reduce of the workers, and the probe of their transports.

    Both run once, not in each pass; `health/transports.py` judges them.
    """
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
    """Return a size in the first of GiB, MiB, MB, KiB that divides it, `256 MiB`; else as `8 B`."""
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
    """Return the test of the rate of square matrix products, alone on each device.

    same_bits: also that all devices of a model get the same bits. floor: noise on healthy devices,
    as a share. cuda_graph: replay the product from a graph.
    """
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
    """Return the test of the bandwidth of device memory: a triad of three such arrays."""
    return HealthTest(
        name=f"memory {_size_text(size_bytes)}",
        stage="alone",
        unit="GB/s",
        floor=floor,
        workload="memory",
        params={"size_bytes": size_bytes},
        device_bytes=3 * size_bytes,
    )


# Between two launches that queue up: the pace of the host.
_LAUNCH = HealthTest(
    name="launch",
    stage="alone",
    unit="µs",
    floor=0.3,
    bad_ratio=_HOST_BAD_RATIO,
    workload="launch",
    params={"wait": False},
)


def _host_copies(direction: str) -> tuple[HealthTest, HealthTest]:
    """Return the tests of copies between host and device: one device a node at a time, then all.

    direction: "h2d", "d2h" or "both".
    """
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
    """Return the test of the bandwidth between two devices, one way and the other way.

    transport: "copy" between their memories, or "send" and receive by NCCL or gloo.
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


# Half of the time that a message takes there and back.
_LATENCY = replace(
    _pair_tests("send", 8, 0.3)[0],
    name="send latency 8 B",
    unit="µs",
    bad_ratio=_HOST_BAD_RATIO,
    params={"direction": "round_trip", "size_bytes": 8},
)


def _all_reduces(size_bytes: int, floor: float, **changes: Any) -> tuple[HealthTest, HealthTest]:
    """Return the tests of an all_reduce in each node, and of one over all nodes.

    In GB/s of bus bandwidth, as nccl-tests counts it. changes: other values of fields, of both.
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


# Equal gradients on all ranks, and a loss that falls.
_SMOKE = HealthTest(
    name="smoke 784-256-10",
    stage="smoke",
    unit="ms",
    floor=0.3,
    bad_ratio=_HOST_BAD_RATIO,
    workload="smoke",
)
# The time that a rank computes in a training step of an MLP.
_STEP = HealthTest(
    name=COMPUTE_TEST, stage="straggler", unit="ms", floor=0.1, workload="mlp", reads="parts"
)


def _burn_in(product: HealthTest, all_reduce: HealthTest) -> tuple[HealthTest, HealthTest]:
    """Return the two tests that a burn-in alternates, made from tests of the other stages.

    product: one of same bits, on each device. all_reduce: becomes one over all devices.
    """
    return (
        replace(
            product,
            name=f"burn-in product {product.precision} {product.params['size']}",
            stage=BURN_IN,
        ),
        replace(all_reduce, name=f"burn-in {all_reduce.name}", stage=BURN_IN, run_on="one group"),
    )


# The floors are from the committed runs. CPU workers share cores and caches with whatever else runs
# on their host. A training step's own part took 5.4 and 6.2 ms on one H200 in two checks six
# minutes apart. Work that is shorter than its launch is replayed from a CUDA graph on GPUs.
# Products on tensor cores from 2048 on draw all the power that a GPU may have: healthy H200s of
# one host differ by 6 % then (tf32 2048: 336 and 356 TFLOP/s in health-20261122-193240-9d20).
SUITE: Mapping[DeviceKind, tuple[HealthTest, ...]] = {
    "cuda": (
        *_environment(256 * _MIB),
        *(
            _product(
                "gemm",
                precision,
                size,
                0.025 if precision is not Precision.FP32 and size >= 2048 else 0.01,
                cuda_graph=size <= 2048,
            )
            for precision in USUAL_PRECISIONS
            for size in (256, 512, 1024, 2048, 8192)
        ),
        *(_memory(size_bytes, 0.005) for size_bytes in (10**8, 5 * 10**8, 10**9)),
        # From a launch until the host knows that it is done.
        replace(_LAUNCH, name="launch and wait", params={"wait": True}),
        _LAUNCH,
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
    # A CPU worker has no link to its host, and no copy from the memory of another one.
    "cpu": (
        *_environment(16 * _MIB),
        *(_product("gemm", Precision.FP32, size, 0.1) for size in (256, 512, 1024)),
        # Above most caches and soon done.
        _memory(16 * 10**6, 0.1),
        _LAUNCH,
        _product("same_bits", Precision.FP32, 256, 0.1),
        *_pair_tests("send", 4 * _MIB, 0.15),
        _LATENCY,
        *_all_reduces(2**15, 0.2, unit="µs", bad_ratio=_HOST_BAD_RATIO),
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
    """The devices that are checked, all of one kind, in the order of their ranks.

    known: their subjects in a larger fleet, of which others are lost; empty where none is.
    """

    devices: tuple[Device, ...]
    known: tuple[Subject, ...] = ()

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Return the devices as subjects, by rank: `known`, else as of `device_subjects`."""
        return self.known or device_subjects(self.devices)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each node, ascending; nodes in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank, device in enumerate(self.devices):
            found.setdefault(device.node_id, []).append(rank)
        return tuple(map(tuple, found.values()))

    def _probe(self, test: HealthTest, **participants: Scalar) -> Probe:
        """Return the test with a point of it over all devices.

        participants: parameters that say which devices take part. With one device a test that
        `reads` the parts of a step reads "ranks".
        """
        batch_size, world_size = test.batch_size, len(self.devices)
        params = {**_defaults(test.workload), **test.params, **participants}
        point = Point(
            workload=test.workload,
            params=dict(sorted(params.items())),
            world_size=world_size,
            precision=test.precision,
            batch_size=batch_size,
            global_batch_size=batch_size and batch_size * world_size,
            scaling=None if batch_size is None else "weak",
            cuda_graph=test.cuda_graph,
        )
        if test.reads == "parts" and world_size == 1:
            test = replace(test, reads="ranks")
        return Probe(test=test, point=point)


def device_subject(device: Device) -> Subject:
    """Return a device as a subject, by its own uuid and index: "node7 GPU 3", "node7 worker 3"."""
    place = DevicePlace(host=device.host, kind=device.kind, number=device.index)
    return _subject(device.uuid, place, device.name)


def device_subjects(devices: Sequence[Device]) -> tuple[Subject, ...]:
    """Return all devices of a check as subjects, in their order, as of `device_places`."""
    places = zip(devices, _uuids_and_places(devices), strict=True)
    return tuple(_subject(uuid, place, device.name) for device, (uuid, place) in places)


def _subject(uuid: str, place: DevicePlace, model: str) -> Subject:
    return Subject(kind="device", uuids=(uuid,), name=words.device_name(place), model=model)


def device_places(devices: Iterable[Device]) -> dict[str, DevicePlace]:
    """Return the uuid of each device of a check as a subject, and where it is; in their order.

    A GPU keeps its uuid. A CPU worker gets `HOST/NUMBER`, with NUMBER in its name: its place, from
    0, among `devices` of its host, not its index; its own uuid changes with its process.
    """
    return dict(_uuids_and_places(devices))


def _uuids_and_places(devices: Iterable[Device]) -> Iterator[tuple[str, DevicePlace]]:
    counts = Counter[str]()
    for device in devices:
        number, uuid = device.index, device.uuid
        if device.kind != "cuda":
            number = counts[device.host]
            uuid = f"{device.host}/{number}"
        counts[device.host] += 1
        yield uuid, DevicePlace(host=device.host, kind=device.kind, number=number)


def device_kinds(subject: Subject) -> set[DeviceKind]:
    """Return the kinds that the devices of a subject can have; both if it names no device."""
    # Only the uuid of a CPU worker (`device_places`) has a slash.
    kinds: set[DeviceKind] = {"cpu" if uuid.count("/") == 1 else "cuda" for uuid in subject.uuids}
    return kinds or {"cpu", "cuda"}


def probes(fleet: Fleet, stages: Collection[Stage], *, serial: bool = False) -> tuple[Probe, ...]:
    """Return the probes of these stages, in the order of `SUITE`, whatever that of `stages`.

    A test that needs more devices or nodes than there are is left out; "facts" has no probes. Ask
    for the burn-in by itself: it can have points that other stages have too. serial: one pair of
    devices per probe, so that no pair shares a path with another. fleet: one device or more.
    """
    return tuple(
        fleet._probe(test, **participants)
        for test in SUITE[fleet.devices[0].kind]
        if test.stage in stages
        for participants in _participants(fleet, test.run_on, serial)
    )


def _participants(fleet: Fleet, run_on: RunOn, serial: bool) -> Iterator[Mapping[str, Scalar]]:
    """Yield for each point of a test the parameters that say which devices take part.

    Nothing where there are too few devices. serial: one pair in each point, not disjoint ones.
    """
    match run_on:
        case "each device":
            yield {}
        case "several devices":
            if len(fleet.devices) > 1:
                yield {}
        case "one local rank":
            # One device of each node at the same time.
            yield from ({"local_rank": rank} for rank in range(max(map(len, fleet.nodes))))
        case "full nodes":
            # The only device of a node is alone anyhow.
            if max(map(len, fleet.nodes)) > 1:
                yield {}
        case "pairs on nodes" | "all pairs":
            for pairs in _turns_of_pairs(fleet, are_on_nodes=run_on == "pairs on nodes"):
                for at_once in [[pair] for pair in pairs] if serial else [pairs]:
                    yield {"partners": pairs_text(at_once)}
        case "groups by node" | "one group" | "one group over nodes":
            everyone = tuple(range(len(fleet.devices)))
            together = fleet.nodes if run_on == "groups by node" else (everyone,)
            # All groups at the same time.
            groups = tuple(ranks for ranks in together if len(ranks) > 1)
            if groups and (run_on != "one group over nodes" or len(fleet.nodes) > 1):
                yield {"groups": groups_text(groups)}


def _turns_of_pairs(fleet: Fleet, *, are_on_nodes: bool) -> Iterator[list[Pair]]:
    """Yield turns of disjoint pairs until all were paired: on each node, or of all devices.

    Of many devices, those of different nodes are paired only if they have the same local rank.
    """
    together: list[Sequence[Sequence[int]]] = [fleet.nodes]
    if not are_on_nodes and len(fleet.devices) <= _MOST_IN_ALL_PAIRS:
        together = [[range(len(fleet.devices))]]
    elif not are_on_nodes:
        rails = zip_longest(*fleet.nodes)
        together.append([[rank for rank in rail if rank is not None] for rail in rails])
    for groups in together:
        groups = [ranks for ranks in groups if len(ranks) > 1]
        for turn in range(max((turns(len(ranks)) for ranks in groups), default=0)):
            yield [
                (ranks[low], ranks[high])
                for ranks in groups
                if turn < turns(len(ranks))
                for low, high in pairs_of_turn(len(ranks), turn)
            ]


# Parameters that are part of a point's title even at their default.
_ALWAYS_NAMED = ("direction", "m", "size", "size_bytes", "transport")
# What stands before the value of a parameter in a title.
_PREFIXES = {"local_rank": "local rank ", "wait": "wait "}


def title(point: Point) -> str:
    """Return the title of a point: workload, precision unless fp32, parameters not at default.

    Direction, transport, m and sizes are always in it: `host_copy d2h local rank 1 128 MiB`. Equal
    values stand once, as in `gemm 512` of 512 x 512 x 512. Other run settings are not in it, so
    that points can share a title. Imports the module. Raises as `load`, `settings` of `registry`.
    """
    precision = () if point.precision is Precision.FP32 else (point.precision.value,)
    usual = _defaults(point.workload)
    shown = [
        _size_text(int(value)) if name == "size_bytes" else f"{_PREFIXES.get(name, '')}{value}"
        for name, value in point.params.items()
        if name in _ALWAYS_NAMED or value != usual.get(name)
    ]
    workload = "transports" if point.workload == _TRANSPORT_PROBE else point.workload
    return " ".join(dict.fromkeys((workload, *precision, *shown)))


@cache
def _defaults(workload: str) -> Mapping[str, Scalar]:
    """Return the defaults of the parameters of a workload, without settings of the run.

    Parameters without a default are left out.
    """
    settings = settings_of_class(registry.load_workload(workload))
    return {
        name: setting.default
        for name, setting in settings.items()
        if name not in RUN_SETTINGS and setting.default is not None
    }
