"""What a health check runs after its passes: halves of slow groups, and slow pairs alone. Pure.

A group of devices whose collective is slow is halved until two are left, as long as one half is
slower than the other. A slow pair is run once more, one at a time, beside each of its devices with
a partner that it was fast with: that tells a device from the path between two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from raybench.health.readings import Reading
from raybench.health.suite import Fleet, Probe
from raybench.records.health import Finding
from raybench.workloads.communication.collective import groups_text
from raybench.workloads.communication.pairs import Pair, pairs_text

# A collective over devices reaches more than this share of the bandwidth of their pairs.
_PROMISED_SHARE = 0.4
# A half is to blame where the other is faster by more than this.
_FASTER = 1.25
_LEAST_TO_HALVE = 4
_MOST_PAIRS = 4

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A slow group in two halves, and the probe that times both at the same time."""

    halves: tuple[Ranks, Ranks]
    probe: Probe


def slow_groups(
    probes: Iterable[Probe], readings: Sequence[Reading], findings: Sequence[Finding], fleet: Fleet
) -> list[Split]:
    """Return the halves of each group whose largest sum is slow, by a finding or by its pairs."""
    largest = {
        probe.test.subjects: probe
        for probe in probes
        if probe.test.reads == "groups" and not probe.test.is_time
    }
    return [
        halve(ranks, probe, fleet)
        for probe in largest.values()
        for ranks in _slow_groups(probe, readings, findings, fleet)
        if len(ranks) >= _LEAST_TO_HALVE
    ]


def _slow_groups(
    probe: Probe, readings: Sequence[Reading], findings: Sequence[Finding], fleet: Fleet
) -> Iterator[Ranks]:
    """Yield the ranks of each group that a finding calls slow, or that is slower than its pairs."""
    rank_of = {subject.uuids[0]: rank for rank, subject in enumerate(fleet.subjects)}
    slow = {one.subject for one in findings if one.test == probe.test.name and one.verdict.is_slow}
    values: dict[tuple[str, ...], list[float]] = {}
    subjects = {}
    for reading in readings:
        if reading.test == probe.test and reading.value is not None:
            values.setdefault(reading.subject.uuids, []).append(reading.value)
            subjects[reading.subject.uuids] = reading.subject
    for uuids, read in values.items():
        between_two = [
            reading.value
            for reading in readings
            if reading.value is not None
            and reading.test.name.startswith("send ")
            and reading.test.unit == "GB/s"
            and set(uuids).issuperset(reading.subject.uuids)
        ]
        is_low = bool(between_two) and median(read) < _PROMISED_SHARE * median(between_two)
        if subjects[uuids] in slow or is_low:
            yield tuple(rank_of[uuid] for uuid in uuids)


def halve(ranks: Ranks, probe: Probe, fleet: Fleet) -> Split:
    """Return the halves of a group in the order of its ranks, which is by node, and their probe."""
    middle = len(ranks) // 2
    halves = (ranks[:middle], ranks[middle:])
    return Split(halves=halves, probe=fleet.probe(probe.test, groups=groups_text(halves)))


def slower_half(split: Split, readings: Iterable[Reading], fleet: Fleet) -> Ranks | None:
    """Return the half to split further; None where neither is slower, or it has fewer than four."""
    values: dict[tuple[str, ...], float] = {
        reading.subject.uuids: reading.value
        for reading in readings
        if reading.value is not None and reading.point_id == split.probe.point.point_id
    }
    read = [
        values.get(tuple(fleet.subjects[rank].uuids[0] for rank in ranks)) for ranks in split.halves
    ]
    first, second = read
    if first is None or second is None or max(first, second) < _FASTER * min(first, second):
        return None
    slower = split.halves[0] if first < second else split.halves[1]
    return slower if len(slower) >= _LEAST_TO_HALVE else None


def confirmations(
    probes: Iterable[Probe], findings: Sequence[Finding], fleet: Fleet
) -> tuple[Probe, ...]:
    """Return probes of one pair each: slow pairs, and their devices with fast partners.

    Probes that were run already are left out.
    """
    rank_of = {subject.uuids[0]: rank for rank, subject in enumerate(fleet.subjects)}
    by_test: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.subject.kind == "pair" and len(finding.subject.uuids) == 2:
            by_test.setdefault(finding.test, []).append(finding)
    made: dict[str, Probe] = {}
    for probe in probes:
        for test in (probe.test, probe.between_nodes):
            if probe.test.reads != "pairs" or test is None or test.name not in by_test:
                continue
            for pair in _to_confirm(by_test[test.name], rank_of):
                alone = replace(test, name=f"{test.name}, one pair at a time")
                params = {**probe.point.params, "partners": pairs_text([pair]), "turn": 0}
                point = replace(probe.point, params=params)
                made[point.point_id] = replace(probe, test=alone, between_nodes=None, point=point)
    known = {probe.point.point_id for probe in probes}
    return tuple(probe for point_id, probe in made.items() if point_id not in known)


def _to_confirm(findings: Sequence[Finding], rank_of: Mapping[str, int]) -> list[Pair]:
    """Return the first slow pairs of one test, and for each of their devices one fast pair."""
    slow, good = (
        {
            (min(ranks), max(ranks))
            for one in findings
            if one.verdict.is_slow == is_slow and one.value is not None
            for ranks in [[rank_of[uuid] for uuid in one.subject.uuids]]
        }
        for is_slow in (True, False)
    )
    found: dict[Pair, None] = {}
    for pair in sorted(slow)[:_MOST_PAIRS]:
        found[pair] = None
        for rank in pair:
            partner = next((one for one in sorted(good - slow) if rank in one), None)
            if partner is not None:
                found[partner] = None
    return list(found)
