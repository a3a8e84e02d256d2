"""From the records of a health check to what was read of each subject, and to links. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from raybench.health.suite import Fleet, Probe
from raybench.records import Measurement, Record, Status
from raybench.records.health import (
    COMM_TEST,
    NOT_READ,
    WAIT_TEST,
    WRONG_RESULT,
    HealthTest,
    Link,
    Reading,
    Subject,
)
from raybench.stats.summary import median_above_smallest
from raybench.workloads.communication.pairings import Pair, pairs_of_turn, parse_groups, parse_pairs

_NS_PER_US = 1e3
_NS_PER_MS = 1e6
_WRONG_ERROR = "WrongResultError"
# How the bytes of a pair go, and of a device and its host.
_SENT_BY = {"cuda": "nccl", "cpu": "gloo"}
_HOST = "host"
_PARTS = {
    WAIT_TEST: "How long a rank waits in the last sum of gradients for the others.",
    COMM_TEST: "How long the sums of gradients take besides.",
}

# What a rank's median step comes to, by the unit of the test.
_OF_RANK: Mapping[str, Callable[[Measurement, float], float]] = {
    "TFLOP/s": lambda measured, step_ns: (measured.flops_per_step or 0.0) / step_ns / 1e3,
    "GB/s": lambda measured, step_ns: (measured.memory_bytes or 0) / step_ns,
    "µs": lambda _, step_ns: step_ns / _NS_PER_US,
    "ms": lambda _, step_ns: step_ns / _NS_PER_MS,
}


def read_record(record: Record, probe: Probe, fleet: Fleet) -> tuple[Reading, ...]:
    """Read what the record of a probe says of each subject.

    Of a point that failed each subject has a reading without a value; the problem of those that
    had no part in the failure begins with NOT_READ.
    """
    if record.status is not Status.OK:
        return tuple(
            _reading(record, test, subject, None, _why_unread(record, ranks, fleet))
            for test, subject, ranks in _asked(record, probe, fleet)
        )
    return tuple(_SHAPES[probe.shape](record, probe, fleet))


def median_step_ns(measured: Measurement) -> float:
    """Return the median over the timed samples of a rank."""
    return statistics.median(measured.step_ns)


def _reading(
    record: Record,
    test: HealthTest,
    subject: Subject,
    value: float | None,
    problem: str | None = None,
) -> Reading:
    return Reading(
        test=test,
        subject=subject,
        pass_number=record.round,
        value=value,
        problem=problem,
        point_id=record.point.point_id,
    )


def _read_ranks(record: Record, probe: Probe, fleet: Fleet) -> Iterator[Reading]:
    """Yield the figure of each rank that had a part in it."""
    value_of = _OF_RANK[probe.test.unit]
    for subject, measured in zip(fleet.subjects, record.measurements, strict=True):
        if probe.test.stage != "host-links" or measured.memory_bytes:
            value = value_of(measured, median_step_ns(measured))
            yield _reading(record, probe.test, subject, value)


def _read_bits(record: Record, probe: Probe, fleet: Fleet) -> Iterator[Reading]:
    """Yield the figure of each rank, and what is wrong with the bits of its product."""
    found = [
        {metric.name: value for metric, value in measured.workload_metrics.items()}
        for measured in record.measurements
    ]
    problems = wrong_bits(found, fleet.subjects)
    for rank, reading in enumerate(_read_ranks(record, probe, fleet)):
        yield replace(reading, problem=problems.get(rank))


def wrong_bits(
    metrics: Sequence[Mapping[str, float]], subjects: Sequence[Subject]
) -> dict[int, str]:
    """Say of which ranks the product is wrong, by what `same_bits` says of each rank.

    Those that differ from most devices of their model. Where no product is that of most, those
    that contradict themselves; where none does, all.
    """
    problems = {
        rank: "wrong bits: its product changed from one check to the next"
        for rank, found in enumerate(metrics)
        if found["changed_products"]
    }
    by_model: dict[str, list[int]] = {}
    for rank, subject in enumerate(subjects):
        by_model.setdefault(subject.model, []).append(rank)
    for ranks in by_model.values():
        problems = {**_differing(ranks, metrics, subjects), **problems}
    return problems


def _differing(
    ranks: Sequence[int], metrics: Sequence[Mapping[str, float]], subjects: Sequence[Subject]
) -> dict[int, str]:
    digests = {rank: metrics[rank]["digest"] for rank in ranks}
    usual, count = Counter(digests.values()).most_common(1)[0]
    if count == len(ranks):
        return {}
    if count > len(ranks) / 2:
        text = f"wrong bits: its product differs from that of {count} devices of its model"
        return {rank: text for rank, digest in digests.items() if digest != usual}
    inconsistent = [rank for rank in ranks if metrics[rank]["misplaced_products"]]
    if 0 < len(inconsistent) < len(ranks):
        text = "wrong bits: its product differs from the other's, and from itself when rows move"
        return dict.fromkeys(inconsistent, text)
    names = " and ".join(subjects[rank].name for rank in ranks)
    text = f"wrong bits: the same product differs between {names}; which is wrong is not known"
    return dict.fromkeys(ranks, text)


def _read_pairs(record: Record, probe: Probe, fleet: Fleet) -> Iterator[Reading]:
    """Yield the figure of each pair: of messages in turn, the slower of its ranks."""
    is_round_trip = record.point.params["direction"] == "round_trip"
    for pair in pairs_of(record, fleet):
        measured = [record.measurements[rank] for rank in pair]
        step_ns = max(map(median_step_ns, measured))
        size_bytes = measured[0].message_bytes or 0
        value = step_ns / 2 / _NS_PER_US if is_round_trip else size_bytes / step_ns
        yield _reading(record, _test_of(probe, pair, fleet), _pair(record, pair, fleet), value)


def pairs_of(record: Record, fleet: Fleet) -> tuple[Pair, ...]:
    """List the pairs of a point, the lower rank first."""
    params = record.point.params
    if partners := str(params.get("partners", "")):
        return parse_pairs(partners, fleet.size)
    return pairs_of_turn(fleet.size, int(params["turn"]))


def _test_of(probe: Probe, pair: Pair, fleet: Fleet) -> HealthTest:
    return probe.test if probe.between is None or fleet.on_one_node(pair) else probe.between


def _pair(record: Record, pair: Pair, fleet: Fleet) -> Subject:
    """Make the subject of a pair, from which the bytes go to which."""
    is_backward = record.point.params["direction"] == "backward"
    start, end = (fleet.subjects[rank] for rank in (pair[::-1] if is_backward else pair))
    return Subject(
        kind="pair",
        uuids=(*start.uuids, *end.uuids),
        name=f"{start.name} to {end.name}",
        model=start.model if start.model == end.model else f"{start.model} to {end.model}",
    )


def _read_groups(record: Record, probe: Probe, fleet: Fleet) -> Iterator[Reading]:
    """Yield the figure of each group: that of its slowest rank."""
    for ranks in parse_groups(str(record.point.params["groups"]), fleet.size):
        measured = [record.measurements[rank] for rank in ranks]
        step_ns = max(map(median_step_ns, measured))
        first = measured[0]
        bus_bytes = (first.message_bytes or 0) * (first.busbw_factor or 0.0)
        value = step_ns / _NS_PER_US if probe.test.unit == "µs" else bus_bytes / step_ns
        yield _reading(record, probe.test, group_subject(ranks, probe, fleet), value)


def group_subject(ranks: Sequence[int], probe: Probe, fleet: Fleet) -> Subject:
    """Make the subject of devices that work together: their node, or all of them."""
    models = dict.fromkeys(fleet.subjects[rank].model for rank in ranks)
    is_node = probe.test.kind == "node"
    return Subject(
        kind=probe.test.kind,
        uuids=tuple(fleet.subjects[rank].uuids[0] for rank in ranks),
        name=fleet.devices[ranks[0]].host if is_node else f"all {len(ranks)} devices",
        model=" and ".join(models),
    )


def _read_parts(record: Record, probe: Probe, fleet: Fleet) -> Iterator[Reading]:
    """Yield what each rank's step computes, waits and communicates."""
    broken_down = [one.breakdown for one in record.measurements if one.breakdown]
    for subject, one in zip(fleet.subjects, broken_down, strict=False):
        if any(one.local_ms):
            own_ms = statistics.median(chain(*one.local_ms))
            yield _reading(record, probe.test, subject, own_ms)
    tails_ms = [one.tail_ms for one in broken_down]
    if len(tails_ms) < fleet.size or not all(tails_ms):
        return
    wait, communication = (
        replace(probe.test, name=name, meaning=meaning) for name, meaning in _PARTS.items()
    )
    waits_ms = median_above_smallest(tails_ms)
    for subject, one, waited_ms in zip(fleet.subjects, broken_down, waits_ms, strict=True):
        yield _reading(record, wait, subject, waited_ms)
        shared_ms = max(0.0, statistics.median(one.comm_ms) - waited_ms)
        yield _reading(record, communication, subject, shared_ms)


_SHAPES: Mapping[str, Callable[[Record, Probe, Fleet], Iterator[Reading]]] = {
    "ranks": _read_ranks,
    "bits": _read_bits,
    "pairs": _read_pairs,
    "groups": _read_groups,
    "parts": _read_parts,
}


def presence(fleet: Fleet, lost: Collection[int]) -> Iterator[Reading]:
    """Yield of each device whether its worker was there to the end."""
    test = HealthTest(
        name="worker",
        stage="facts",
        kind="device",
        unit="",
        is_time=False,
        floor=0.0,
        meaning="Whether the device had a worker to the end of the check.",
    )
    for rank, subject in enumerate(fleet.subjects):
        is_lost = rank in lost
        yield Reading(
            test=test,
            subject=subject,
            pass_number=1,
            value=None if is_lost else 1.0,
            problem="lost: no worker could be started on it any more" if is_lost else None,
        )


def _asked(
    record: Record, probe: Probe, fleet: Fleet
) -> Iterator[tuple[HealthTest, Subject, Sequence[int]]]:
    """Yield the subjects of a point, with their ranks."""
    if probe.shape == "pairs":
        for pair in pairs_of(record, fleet):
            yield _test_of(probe, pair, fleet), _pair(record, pair, fleet), pair
    elif probe.shape == "groups":
        for ranks in parse_groups(str(record.point.params["groups"]), fleet.size):
            yield probe.test, group_subject(ranks, probe, fleet), ranks
    else:
        local_rank = record.point.params.get("local_rank")
        for rank, subject in enumerate(fleet.subjects):
            if local_rank is None or _local_rank(rank, fleet) == local_rank:
                yield probe.test, subject, (rank,)


def _local_rank(rank: int, fleet: Fleet) -> int:
    return next(ranks.index(rank) for ranks in fleet.nodes if rank in ranks)


def _why_unread(record: Record, ranks: Sequence[int], fleet: Fleet) -> str:
    reason = record.error_message or record.status.clause
    if not record.devices:
        return f"{NOT_READ}{reason}"
    if record.error_rank is None or record.error_rank in ranks:
        is_wrong = record.error_type == _WRONG_ERROR
        return f"{WRONG_RESULT if is_wrong else f'{record.status.label}: '}{reason}"
    return f"{NOT_READ}{fleet.subjects[record.error_rank].name} {record.status.clause}"


def make_links(read: Iterable[tuple[Record, Probe]], fleet: Fleet) -> tuple[Link, ...]:
    """Make the matrix of links from the records of pairs and of copies to and from hosts.

    Each figure is the median of its passes.
    """
    gathered: dict[tuple[str, ...], list[tuple[Record, Reading]]] = {}
    for record, probe in read:
        if record.status is Status.OK and _has_links(record, probe):
            for reading in read_record(record, probe, fleet):
                kind = _link_kind(record, fleet)
                key = (kind, reading.test.unit, *reading.subject.uuids)
                gathered.setdefault(key, []).append((record, reading))
    links = [_link(kind, found) for (kind, *_), found in gathered.items()]
    return tuple(one for link in links for one in link)


def _has_links(record: Record, probe: Probe) -> bool:
    is_host_copy = probe.test.stage == "host-links"
    params = record.point.params
    is_one_way = "local_rank" in params and params.get("direction") != "both"
    return probe.shape == "pairs" or (is_host_copy and is_one_way)


def _link_kind(record: Record, fleet: Fleet) -> str:
    params = record.point.params
    if "transport" not in params:
        return str(params["direction"])
    return "copy" if params["transport"] == "copy" else _SENT_BY[fleet.kind]


def _link(kind: str, found: Sequence[tuple[Record, Reading]]) -> Iterator[Link]:
    record, reading = found[0]
    value = statistics.median(one.value for _, one in found if one.value is not None)
    is_latency = reading.test.unit == "µs"
    size_bytes = int(record.point.params["size_bytes"])
    for start, end in _ends(kind, reading.subject, both=is_latency):
        yield Link(
            from_uuid=start[0],
            to_uuid=end[0],
            from_name=start[1],
            to_name=end[1],
            kind=kind,
            message_bytes=size_bytes,
            gb_per_s=None if is_latency else value,
            latency_us=value if is_latency else None,
        )


def _ends(
    kind: str, subject: Subject, *, both: bool
) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield from where to where, each as uuid and name; a round trip is both ways."""
    if subject.kind == "device":
        device, host = (subject.uuids[0], subject.name), (_HOST, _HOST)
        yield (host, device) if kind == "h2d" else (device, host)
        return
    names = subject.name.split(" to ")
    start, end = zip(subject.uuids, names, strict=True)
    yield start, end
    if both:
        yield end, start
