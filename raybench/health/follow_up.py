"""What is run after the passes, because of what they read: halves of slow groups, and slow pairs.

A group of devices whose collective is slow is halved until two are left, as long as one half is
slower than the other. A slow pair is run once more, one at a time, beside each of its devices with
a partner that it was fast with: that tells a device from the path between two. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from raybench.health.suite import Fleet, Probe, reduction
from raybench.records.health import Finding, Reading
from raybench.workloads.communication.pairings import Pair, pairs_text

# Of the bandwidth of its pairs a collective over devices reaches more than this share.
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
    """Halve each group whose largest sum is slow, by what is said of it or by its pairs."""
    found = {}
    for probe in probes:
        if probe.shape == "groups" and probe.test.unit != "µs":
            found[probe.test.kind] = probe
    return [
        halve(ranks, probe, fleet)
        for probe in found.values()
        for ranks in _slow_of(probe, readings, findings, fleet)
        if len(ranks) >= _LEAST_TO_HALVE
    ]


def _slow_of(
    probe: Probe, readings: Sequence[Reading], findings: Sequence[Finding], fleet: Fleet
) -> Iterator[Ranks]:
    rank_of = {subject.uuids[0]: rank for rank, subject in enumerate(fleet.subjects)}
    said = {one.subject for one in findings if one.test == probe.test.name and one.verdict.is_slow}
    values: dict[tuple[str, ...], list[float]] = {}
    subjects = {}
    for reading in readings:
        if reading.test == probe.test and reading.value is not None:
            values.setdefault(reading.subject.uuids, []).append(reading.value)
            subjects[reading.subject.uuids] = reading.subject
    for uuids, read in values.items():
        promised = _promised(readings, set(uuids))
        is_low = promised is not None and median(read) < _PROMISED_SHARE * promised
        if subjects[uuids] in said or is_low:
            yield tuple(rank_of[uuid] for uuid in uuids)


def _promised(readings: Sequence[Reading], uuids: set[str]) -> float | None:
    """Return the median bandwidth of messages between two of these devices."""
    found = [
        reading.value
        for reading in readings
        if reading.value is not None
        and reading.test.name.startswith("send ")
        and reading.test.unit == "GB/s"
        and uuids.issuperset(reading.subject.uuids)
    ]
    return median(found) if found else None


def halve(ranks: Ranks, probe: Probe, fleet: Fleet) -> Split:
    """Split a group in the order of its ranks, which is by node."""
    middle = len(ranks) // 2
    halves = (ranks[:middle], ranks[middle:])
    size_bytes = int(probe.point.params["size_bytes"])
    both = reduction(fleet, halves, size_bytes, probe.test.kind)
    return Split(halves=halves, probe=both)


def slower_half(split: Split, readings: Iterable[Reading], fleet: Fleet) -> Ranks | None:
    """Return the half that is to be split on; None where neither is, or it is small already."""
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
    """List slow pairs, and their devices with good partners, each to be run by itself."""
    rank_of = {subject.uuids[0]: rank for rank, subject in enumerate(fleet.subjects)}
    by_test: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.subject.kind == "pair" and len(finding.subject.uuids) == 2:
            by_test.setdefault(finding.test, []).append(finding)
    made: dict[str, Probe] = {}
    for probe in probes:
        for test in (probe.test, probe.between):
            if probe.shape != "pairs" or test is None or test.name not in by_test:
                continue
            for pair in _to_confirm(by_test[test.name], rank_of):
                alone = replace(test, name=f"{test.name}, one pair at a time")
                params = {**probe.point.params, "partners": pairs_text([pair]), "turn": 0}
                point = replace(probe.point, params=params)
                made[point.point_id] = replace(probe, test=alone, between=None, point=point)
    known = {probe.point.point_id for probe in probes}
    return tuple(probe for point_id, probe in made.items() if point_id not in known)


def _to_confirm(findings: Sequence[Finding], rank_of: Mapping[str, int]) -> list[Pair]:
    """List slow pairs of one test, and for each of their devices one pair that is not."""
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
