"""What a health check runs: each test, and the points over all devices that it is read from.

A test is declared once, with the floor of its noise on healthy devices; `probes` makes the points
of a fleet, `split_by_room` leaves out those that a device has no memory for. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, zip_longest
from statistics import median
from typing import Literal, get_args

from raybench.job import registry
from raybench.job.model import Measure, Span
from raybench.job.point import RUN_SETTINGS, USUAL_PRECISIONS, Point, Precision, Scalar
from raybench.records import Device
from raybench.records.health import (
    COMPUTE_TEST,
    NOT_READ,
    HealthTest,
    Reading,
    Stage,
    Subject,
    SubjectKind,
)
from raybench.workloads.communication.pairings import (
    Pair,
    groups_text,
    pairs_of_turn,
    pairs_text,
    turns,
)


def device_subject(device: Device) -> Subject:
    """Make the subject of one device: "node7 GPU 3", or of a CPU "node7 worker 3"."""
    noun = "GPU" if device.kind == "cuda" else "worker"
    return Subject(
        kind="device",
        uuids=(device.uuid,),
        name=f"{device.host} {noun} {device.index}",
        model=device.name,
    )


def device_subjects(devices: Sequence[Device]) -> tuple[Subject, ...]:
    """Make the subjects of all devices of a check.

    A CPU worker is known by its place among those of its host: its process may be replaced, and
    Ray names the node anew in each run.
    """
    places = Counter[str]()
    found = []
    for device in devices:
        place = places[device.host]
        places[device.host] += 1
        if device.kind != "cuda":
            device = replace(device, index=place, uuid=f"{device.host}/{place}")
        found.append(device_subject(device))
    return tuple(found)


STAGES: tuple[Stage, ...] = get_args(Stage)

_MIB = 2**20
# The stage and the unit of each sort of test, and the noise of its figure on healthy devices as a
# share of it: of GPUs by the committed runs, then of CPU workers, which share cores and caches with
# whatever else runs on the host. A training step's own part took 5.4 and 6.2 ms on one H200 in two
# checks six minutes apart.
_SORTS: Mapping[str, tuple[Stage, str, float, float]] = {
    "gemm": ("alone", "TFLOP/s", 0.01, 0.1),
    "capped gemm": ("alone", "TFLOP/s", 0.025, 0.1),
    "memory": ("alone", "GB/s", 0.005, 0.1),
    "launch": ("alone", "µs", 0.3, 0.3),
    "link": ("host-links", "GB/s", 0.03, 0.1),
    "pair": ("pairs", "GB/s", 0.02, 0.15),
    "message": ("pairs", "µs", 0.3, 0.3),
    "sum": ("together", "GB/s", 0.02, 0.15),
    "small sum": ("together", "µs", 0.1, 0.2),
    "smoke": ("smoke", "ms", 0.3, 0.3),
    "step": ("straggler", "ms", 0.04, 0.1),
    "burn-in": ("burn-in", "TFLOP/s", 0.01, 0.1),
}
_GEMM_SIZES = {"cuda": (256, 512, 1024, 2048, 8192), "cpu": (256, 512, 1024)}
# The host sets the pace of shorter work: on GPUs products up to this size and sums of up to so many
# bytes are replayed from a CUDA graph.
_LARGEST_IN_GRAPH = {"cuda": 2048, "cpu": 0}
_MOST_BYTES_IN_GRAPH = {"cuda": 2**20, "cpu": 0}
# Of what the host paces two healthy devices differ by 1.4 times and more: a launch, a message of a
# few bytes. It says that something is wrong where it is this many times as long.
_HOST_BAD_RATIO = 3.0
_PACED_BY_HOST = {
    "cuda": ("launch", "message", "smoke"),
    "cpu": ("launch", "message", "smoke", "small sum"),
}
# Products on tensor cores from this size on draw all the power that a GPU may have: healthy H200s
# of one host differ by 6 % then (tf32 2048: 336 and 356 TFLOP/s in health-20261122-193240-9d20).
_LEAST_CAPPED = 2048
_PRECISIONS = {"cuda": USUAL_PRECISIONS, "cpu": (Precision.FP32,)}
# Of each of three arrays: 100, 500 and 1000 MB; on CPUs above most caches and soon done.
_ARRAY_BYTES = {"cuda": (10**8, 5 * 10**8, 10**9), "cpu": (16 * 10**6,)}
_SAME_BITS = {
    "cuda": ((Precision.FP32, 2048), (Precision.BF16, 2048)),
    "cpu": ((Precision.FP32, 256),),
}
_LAUNCHES = {
    "cuda": (
        (True, "launch and wait", "From a launch until the host knows that it is done."),
        (False, "launch", "Between two launches that queue up: the pace of the host."),
    ),
    "cpu": ((False, "launch", "The cost of an operator of torch: the pace of the host."),),
}
_HOST_COPY_BYTES = 128 * _MIB
_PAIR_BYTES = {"cuda": 256 * _MIB, "cpu": 4 * _MIB}
_LATENCY_BYTES = 8
_BURN_IN = {"cuda": (Precision.BF16, 8192), "cpu": (Precision.FP32, 512)}
_REDUCED_BYTES = {
    "cuda": (2**15, _MIB, 32 * _MIB, 2**30),
    "cpu": (2**15, _MIB, 8 * _MIB),
}
# A message so small that its time is latency.
_SMALL_MESSAGE = 2**15
# Of more devices the pairs between nodes are those of one local rank: the rails of a cluster.
_MOST_IN_ALL_PAIRS = 16
_TRAINED: Mapping[str, Mapping[str, Scalar]] = {
    "cuda": {"hidden": 4096, "layers": 8},
    "cpu": {"hidden": 256, "layers": 4},
}
_BATCH = {"cuda": 1024, "cpu": 64}

# Parameters that name a point also where they have their defaults, and how others are told.
_TOLD = ("direction", "m", "size", "size_bytes", "transport")
_WORDS = {"turn": "turn ", "local_rank": "local rank ", "wait": "wait "}

# How a record is read: of each rank that did something, its bits besides, of each pair, of each
# group, or the parts of each rank's step.
Shape = Literal["ranks", "bits", "pairs", "groups", "parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A point, and the test that its record is read for.

    between: of pairs, the test of those between nodes.
    """

    test: HealthTest
    point: Point
    shape: Shape = "ranks"
    between: HealthTest | None = None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The devices that are checked, in the order of their ranks."""

    devices: tuple[Device, ...]

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """Of the devices."""
        return self.devices[0].kind

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.devices)

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The devices as subjects, by rank."""
        return device_subjects(self.devices)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        found: dict[str, list[int]] = {}
        for rank, device in enumerate(self.devices):
            found.setdefault(device.node_id, []).append(rank)
        return tuple(map(tuple, found.values()))

    def on_one_node(self, pair: Pair) -> bool:
        """Whether both devices of a pair are on the same node."""
        return self.devices[pair[0]].node_id == self.devices[pair[1]].node_id

    def floor(self, sort: str) -> float:
        """Return the floor of a sort of test."""
        *_, on_gpus, on_cpus = _SORTS[sort]
        return on_gpus if self.kind == "cuda" else on_cpus

    def test(self, sort: str, name: str, meaning: str, kind: SubjectKind = "device") -> HealthTest:
        """Make a test of a sort."""
        stage, unit, *_ = _SORTS[sort]
        is_paced_by_host = sort in _PACED_BY_HOST[self.kind]
        return HealthTest(
            name=name,
            stage=stage,
            kind=kind,
            unit=unit,
            is_time=unit in ("µs", "ms"),
            floor=self.floor(sort),
            meaning=meaning,
            **({"bad_ratio": _HOST_BAD_RATIO} if is_paced_by_host else {}),
        )

    def point(
        self,
        workload: str,
        params: Mapping[str, Scalar],
        precision: Precision = Precision.FP32,
        batch_size: int | None = None,
    ) -> Point:
        """Make a point over all devices; the parameters that are not given have their defaults."""
        return Point(
            workload=workload,
            params=dict(sorted({**_defaults(workload), **params}.items())),
            world_size=self.size,
            precision=precision,
            batch_size=batch_size,
            global_batch_size=batch_size and batch_size * self.size,
            scaling=None if batch_size is None else "weak",
        )


@cache
def _defaults(workload: str) -> Mapping[str, Scalar]:
    settings = registry.settings(registry.load(workload))
    return {
        name: setting.default
        for name, setting in settings.items()
        if name not in RUN_SETTINGS and setting.default is not None
    }


def title(point: Point) -> str:
    """Name a point of a health check in a few words."""
    precision = () if point.precision is Precision.FP32 else (point.precision.value,)
    usual = _defaults(point.workload)
    shown = [
        _size_text(int(value)) if name == "size_bytes" else f"{_WORDS.get(name, '')}{value}"
        for name, value in point.params.items()
        if name in _TOLD or value != usual.get(name)
    ]
    return " ".join(dict.fromkeys((point.workload, *precision, *shown)))


def probes(fleet: Fleet, stages: Collection[Stage], *, serial: bool = False) -> tuple[Probe, ...]:
    """List the probes of these stages on these devices, in the order in which they are run.

    serial: one pair at a time, so that none shares a path with another.
    """
    makers: Mapping[Stage, Callable[[Fleet], Iterator[Probe]]] = {
        "alone": _alone,
        "host-links": _host_links,
        "pairs": _serial_pairs if serial else _pairs,
        "together": _together,
        "smoke": _smoke,
        "straggler": _straggler,
    }
    return tuple(
        probe for stage, make in makers.items() if stage in stages for probe in make(fleet)
    )


@cache
def tests_by_name(kind: Literal["cuda", "cpu"]) -> Mapping[str, HealthTest]:
    """Find each test of such devices, on any number of nodes."""
    places = [(node, index) for node in ("a", "b") for index in range(2)]
    fleet = Fleet(
        devices=tuple(
            Device(
                kind=kind,
                node_id=node,
                host=node,
                address="",
                index=index,
                uuid=f"{node}/{index}",
                name="",
                process_id=0,
                cpu_count=0,
                niceness=0,
                omp_num_threads=0,
            )
            for node, index in places
        )
    )
    planned = (*probes(fleet, STAGES), *burn_in_probes(fleet))
    tests = (test for probe in planned for test in (probe.test, probe.between) if test)
    return {test.name: test for test in tests}


def _alone(fleet: Fleet) -> Iterator[Probe]:
    """Yield what each device does alone, all at the same time, without communication."""
    most_in_graph = _LARGEST_IN_GRAPH[fleet.kind]
    for precision in _PRECISIONS[fleet.kind]:
        for size in _GEMM_SIZES[fleet.kind]:
            is_short = size <= most_in_graph
            meaning = (
                "Arithmetic of the device in small products, without their launches."
                if is_short
                else "Arithmetic of the device, under its limits of power and temperature."
            )
            point = fleet.point("gemm", {"m": size, "n": size, "k": size}, precision)
            yield Probe(
                test=fleet.test(_gemm_sort(precision, size), f"gemm {precision} {size}", meaning),
                point=replace(point, cuda_graph=is_short),
            )
    meaning = "Bandwidth of the device's memory, by a triad of three such arrays."
    for size_bytes in _ARRAY_BYTES[fleet.kind]:
        yield Probe(
            test=fleet.test("memory", f"memory {_size_text(size_bytes)}", meaning),
            point=fleet.point("memory", {"size_bytes": size_bytes}),
        )
    for waits, name, meaning in _LAUNCHES[fleet.kind]:
        yield Probe(
            test=fleet.test("launch", name, meaning), point=fleet.point("launch", {"wait": waits})
        )
    meaning = "The same product on all devices of a model, compared to the last bit."
    for precision, size in _SAME_BITS[fleet.kind]:
        point = fleet.point("same_bits", {"size": size}, precision)
        yield Probe(
            test=fleet.test(_gemm_sort(precision, size), f"same bits {precision} {size}", meaning),
            point=replace(point, cuda_graph=size <= most_in_graph),
            shape="bits",
        )


def _gemm_sort(precision: Precision, size: int) -> str:
    """Return the sort of a product: healthy devices differ more where one draws all power."""
    is_capped = precision is not Precision.FP32 and size >= _LEAST_CAPPED
    return "capped gemm" if is_capped else "gemm"


def _host_links(fleet: Fleet) -> Iterator[Probe]:
    """Yield copies between host and device: each device of a node alone, then all at once.

    A CPU worker has no link to its host.
    """
    if fleet.kind == "cpu":
        return
    most = max(map(len, fleet.nodes))
    for direction in ("h2d", "d2h", "both"):
        # The only device of each node is alone anyhow.
        for local_rank in (*range(most), None) if most > 1 else (0,):
            is_alone = local_rank is not None
            which: dict[str, Scalar] = {} if local_rank is None else {"local_rank": local_rank}
            meaning = "The link between the device and its host's memory, pinned"
            meaning += "." if is_alone else ", while all devices of the node use theirs."
            name = f"{direction} {'alone' if is_alone else 'all at once'}"
            params = {"direction": direction, "size_bytes": _HOST_COPY_BYTES, **which}
            yield Probe(
                test=fleet.test("link", name, meaning), point=fleet.point("host_copy", params)
            )


def _pairs(fleet: Fleet) -> Iterator[Probe]:
    """Yield messages between two: all pairs, in turns of disjoint ones."""
    if fleet.kind == "cuda":
        for pairs in _turns_on_nodes(fleet):
            yield from _bandwidths(fleet, "copy", partners=pairs_text(pairs))
    if fleet.size <= _MOST_IN_ALL_PAIRS:
        for turn in range(turns(fleet.size) if fleet.size > 1 else 0):
            yield from _sends(fleet, turn=turn)
    else:
        for pairs in (*_turns_on_nodes(fleet), *_rails(fleet)):
            yield from _sends(fleet, partners=pairs_text(pairs))


def _serial_pairs(fleet: Fleet) -> Iterator[Probe]:
    """Yield the same as `_pairs`, one pair at a time."""
    for first in range(fleet.size):
        for second in range(first + 1, fleet.size):
            partners = pairs_text([(first, second)])
            if fleet.kind == "cuda" and fleet.on_one_node((first, second)):
                yield from _bandwidths(fleet, "copy", partners=partners)
            yield from _sends(fleet, partners=partners)


def _turns_on_nodes(fleet: Fleet) -> Iterator[list[Pair]]:
    """Yield the turns in which all pairs on each node come, on all nodes at the same time."""
    of_nodes = [
        [
            [(ranks[low], ranks[high]) for low, high in pairs_of_turn(len(ranks), turn)]
            for turn in range(turns(len(ranks)))
        ]
        for ranks in fleet.nodes
        if len(ranks) > 1
    ]
    for turn in zip_longest(*of_nodes, fillvalue=[]):
        yield list(chain.from_iterable(turn))


def _rails(fleet: Fleet) -> Iterator[list[Pair]]:
    """Yield the turns in which each node meets each other, by devices of the same local rank."""
    nodes = fleet.nodes
    for turn in range(turns(len(nodes)) if len(nodes) > 1 else 0):
        yield [
            pair
            for low, high in pairs_of_turn(len(nodes), turn)
            for pair in zip(nodes[low], nodes[high], strict=False)
        ]


def _sends(fleet: Fleet, **which: Scalar) -> Iterator[Probe]:
    yield from _bandwidths(fleet, "send", **which)
    name = f"send latency {_size_text(_LATENCY_BYTES)}"
    meaning = "Half of the time that a message there and back takes"
    params = {"direction": "round_trip", "size_bytes": _LATENCY_BYTES, **which}
    yield Probe(
        test=fleet.test("message", name, f"{meaning}.", "pair"),
        between=fleet.test("message", f"{name} between nodes", f"{meaning} between nodes.", "pair"),
        point=fleet.point("pairs", params),
        shape="pairs",
    )


def _bandwidths(
    fleet: Fleet, transport: Literal["send", "copy"], **which: Scalar
) -> Iterator[Probe]:
    size_bytes = _PAIR_BYTES[fleet.kind]
    name = f"{transport} {_size_text(size_bytes)}"
    how = {"send": "by a send and a receive", "copy": "by a copy between their memories"}
    meaning = f"Bandwidth from one device to another, {how[transport]}"
    for direction in ("forward", "backward"):
        params = {"direction": direction, "size_bytes": size_bytes, "transport": transport, **which}
        yield Probe(
            test=fleet.test("pair", name, f"{meaning}.", "pair"),
            between=fleet.test(
                "pair", f"{name} between nodes", f"{meaning} of another node.", "pair"
            ),
            point=fleet.point("pairs", params),
            shape="pairs",
        )


def _together(fleet: Fleet) -> Iterator[Probe]:
    """Yield collectives of each node's devices, and of all."""
    crowded = tuple(ranks for ranks in fleet.nodes if len(ranks) > 1)
    everyone = (tuple(range(fleet.size)),)
    for size_bytes in _REDUCED_BYTES[fleet.kind]:
        if crowded:
            yield reduction(fleet, crowded, size_bytes, "node")
        if len(fleet.nodes) > 1:
            yield reduction(fleet, everyone, size_bytes, "cluster")


def reduction(
    fleet: Fleet, groups: tuple[tuple[int, ...], ...], size_bytes: int, kind: SubjectKind
) -> Probe:
    """Make the probe of an all_reduce in groups, all at the same time."""
    params: dict[str, Scalar] = {"groups": groups_text(groups), "size_bytes": size_bytes}
    sort, meaning = (
        ("small sum", "Latency of a small sum over devices.")
        if size_bytes <= _SMALL_MESSAGE
        else ("sum", "Bus bandwidth of a sum over devices, as nccl-tests counts it.")
    )
    return Probe(
        test=fleet.test(sort, f"all_reduce {_size_text(size_bytes)}", meaning, kind),
        point=replace(
            fleet.point("grouped_collective", params),
            cuda_graph=size_bytes <= _MOST_BYTES_IN_GRAPH[fleet.kind],
        ),
        shape="groups",
    )


def _size_text(size_bytes: int) -> str:
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10)):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def _smoke(fleet: Fleet) -> Iterator[Probe]:
    """Yield a training step whose gradients and loss are checked."""
    meaning = "Training works: equal gradients on all ranks, and a loss that falls."
    test = fleet.test("smoke", "smoke 784-256-10", meaning)
    yield Probe(test=test, point=fleet.point("smoke", {}))


def _straggler(fleet: Fleet) -> Iterator[Probe]:
    """Yield a training step that is taken apart, so that it tells who the others wait for."""
    precision = Precision.BF16 if fleet.kind == "cuda" else Precision.FP32
    meaning = (
        "What a rank's training step takes without communication: the others wait for the longest."
    )
    yield Probe(
        test=fleet.test("step", COMPUTE_TEST, meaning),
        point=fleet.point("mlp", _TRAINED[fleet.kind], precision, batch_size=_BATCH[fleet.kind]),
        shape="parts" if fleet.size > 1 else "ranks",
    )


def burn_in_probes(fleet: Fleet) -> Iterator[Probe]:
    """Yield what a burn-in alternates: a product compared to the last bit, and a sum over all."""
    precision, size = _BURN_IN[fleet.kind]
    meaning = "The same product on all devices for minutes, compared to the last bit."
    yield Probe(
        test=fleet.test("burn-in", f"burn-in product {precision} {size}", meaning),
        point=fleet.point("same_bits", {"size": size}, precision),
        shape="bits",
    )
    if fleet.size > 1:
        size_bytes = _REDUCED_BYTES[fleet.kind][-1]
        everyone = reduction(fleet, (tuple(range(fleet.size)),), size_bytes, "cluster")
        test = replace(everyone.test, name=f"burn-in {everyone.test.name}", stage="burn-in")
        yield replace(everyone, test=test)


_GIB = 2**30
# Beside the data of a test: libraries' buffers, and what torch keeps for the next one.
_BESIDE_BYTES = _GIB
_FP32_BYTES = 4


def split_by_room(
    probes: tuple[Probe, ...], fleet: Fleet, free_bytes: Mapping[str, int]
) -> tuple[tuple[Probe, ...], tuple[Reading, ...]]:
    """Leave out what a device has no room for; of these each device has a reading without a value.

    free_bytes: of devices by their uuids; of others it is not known, and taken for enough.
    """
    fitting, left_out = [], []
    for probe in probes:
        needed = bytes_needed(probe.point)
        lacking = {
            rank: free_bytes[device.uuid]
            for rank, device in enumerate(fleet.devices)
            if free_bytes.get(device.uuid, needed) < needed
        }
        if lacking:
            left_out += _unread(probe, fleet, lacking, needed)
        else:
            fitting.append(probe)
    return tuple(fitting), tuple(left_out)


def bytes_needed(point: Point) -> int:
    """Estimate the memory of a device that a point takes."""
    params = point.params
    size_bytes = int(params.get("size_bytes", 0))
    matrix = int(params.get("m", params.get("size", 0))) ** 2 * _FP32_BYTES
    arrays = {"memory": 3, "host_copy": 4, "pairs": 5}.get(point.workload, 1)
    return _BESIDE_BYTES + arrays * size_bytes + 4 * matrix


def _unread(probe: Probe, fleet: Fleet, lacking: Mapping[int, int], needed: int) -> list[Reading]:
    names = ", ".join(fleet.subjects[rank].name for rank in lacking)
    return [
        Reading(
            test=probe.test,
            subject=subject,
            pass_number=1,
            value=None,
            problem=f"no room: {lacking[rank] / _GIB:.1f} GiB of its memory are free, the test "
            f"needs {needed / _GIB:.1f}"
            if rank in lacking
            else f"{NOT_READ}{names} has no room",
        )
        for rank, subject in enumerate(fleet.subjects)
    ]


# Of each point of a burn-in: long enough that the device gets hot, short enough that a hang is soon
# noticed.
_POINT_S = 10.0
_TIMEOUT_S = 60.0
_SHARE = 10


def measure_of_burn_in() -> Measure:
    """Return how long each point of the stage is measured."""
    return Measure(
        warmup=Span(min=10, max=10),
        iterations=Span(min=10, max=1_000_000),
        min_seconds=_POINT_S,
        # Its time is what is asked for, not how well the median is known.
        target_ci=0.9,
        max_seconds=1.5 * _POINT_S,
        timeout_s=_TIMEOUT_S,
        breakdown=False,
    )


def drift(readings: Sequence[Reading], floor: float) -> Iterator[Reading]:
    """Yield how much longer each subject took in the last tenth of the burn-in than in the first.

    Heat and wear show there; the others of its model tell whether that is usual. Nothing of a
    burn-in of one turn.
    """
    series: dict[tuple[HealthTest, Subject], list[float]] = {}
    for reading in readings:
        if reading.test.stage == "burn-in" and reading.value:
            value = reading.value if reading.test.is_time else 1 / reading.value
            series.setdefault((reading.test, reading.subject), []).append(value)
    for (test, subject), times in series.items():
        if len(times) < 2:
            continue
        tenth = max(1, len(times) // _SHARE)
        yield Reading(
            test=HealthTest(
                name=f"{test.name} drift",
                stage="burn-in",
                kind=test.kind,
                unit="x",
                is_time=True,
                floor=floor,
                meaning="Time of the last tenth of the burn-in to that of the first.",
            ),
            subject=subject,
            pass_number=1,
            value=median(times[-tenth:]) / median(times[:tenth]),
        )
