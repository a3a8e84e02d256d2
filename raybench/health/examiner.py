"""What a health check runs next, by its devices and by what it has read so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from raybench.cluster import Cluster
from raybench.health.device_facts import facts_readings, read_device_facts
from raybench.health.follow_up import (
    Split,
    confirmations,
    halve,
    slow_groups,
    slower_half,
)
from raybench.health.readings import make_links, presence, read_record
from raybench.health.suite import (
    Fleet,
    Probe,
    burn_in_probes,
    drift,
    measure_of_burn_in,
    split_by_room,
)
from raybench.health.verdicts import judge
from raybench.job.model import Measure
from raybench.job.plan import Plan
from raybench.job.point import Point
from raybench.records import Device, Record
from raybench.records.device_facts import DeviceFacts
from raybench.records.environment import usable_cores
from raybench.records.health import Link, Reading, Stage
from raybench.sweep.rounds import Rounds

MakeProbes = Callable[[Fleet], tuple[Probe, ...]]


@dataclass(slots=True)
class Examiner:
    """Makes the points of a check when its devices are known, and keeps what was read.

    stages: that are run. measure: of the job. burn_in_s: how long the devices are burnt in.
    """

    make_probes: MakeProbes
    stages: Collection[Stage]
    measure: Measure
    burn_in_s: float = 0.0
    devices_wanted: int = field(default_factory=usable_cores)
    devices: tuple[Device, ...] = ()
    readings: list[Reading] = field(default_factory=list)
    _cluster: Cluster | None = None
    # Positions in the cluster's devices, by rank.
    _places: tuple[int, ...] = ()
    _fleet: Fleet = field(default_factory=lambda: Fleet(devices=()))
    _before: tuple[DeviceFacts, ...] = ()
    _planned: tuple[Probe, ...] = ()
    _probes: dict[str, Probe] = field(default_factory=dict)
    _linked: list[tuple[Record, Probe]] = field(default_factory=list)
    _earlier_links: tuple[Link, ...] = ()
    _passes_left: int = 0
    _splits: list[Split] | None = None
    _burn_in: tuple[Probe, ...] = ()
    _burnt_until_s: float = 0.0

    @property
    def links(self) -> tuple[Link, ...]:
        """The matrix of links; of those that were read again the last figure."""
        found = (*self._earlier_links, *make_links(self._linked, self._fleet))
        by_way = {
            (one.from_uuid, one.to_uuid, one.kind, one.gb_per_s is None): one for one in found
        }
        return tuple(by_way.values())

    def rounds(self, cluster: Cluster) -> Rounds:
        """As PointSource."""
        lost = cluster.lost
        self._cluster, self._before = cluster, read_device_facts(cluster)
        self._take([place for place in range(len(cluster.devices)) if place not in lost])
        self.devices = self._fleet.devices
        return Rounds(
            plan=Plan(points=tuple(probe.point for probe in self._planned)),
            count=self.measure.rounds,
            seed=None,
            has_controls=False,
            in_fresh_workers=False,
        )

    def _take(self, places: Sequence[int]) -> None:
        """Make the probes of these devices."""
        assert self._cluster is not None
        devices = self._cluster.devices
        self._places = tuple(places)
        self._fleet = Fleet(devices=tuple(devices[place] for place in places))
        free = {
            facts.device.uuid: facts.memory_free_bytes
            for facts in self._before
            if facts.memory_free_bytes is not None
        }
        self._planned, without_room = split_by_room(
            self.make_probes(self._fleet), self._fleet, free
        )
        self.readings += without_room
        self._probes = {probe.point.point_id: probe for probe in self._planned}

    def measure_of(self, point: Point) -> Measure | None:
        """As PointSource."""
        if any(probe.point == point for probe in self._burn_in):
            return measure_of_burn_in()
        probe = self._probes.get(point.point_id)
        # In each round anew: it tells who is slow only by steps that are taken apart.
        return self.measure if probe is not None and probe.shape == "parts" else None

    def note(self, record: Record) -> None:
        """As PointSource."""
        probe = self._probes[record.point.point_id]
        self.readings += read_record(record, probe, self._fleet)
        if probe.shape == "pairs" or probe.test.stage == "host-links":
            self._linked.append((record, probe))

    def further(self, number: int) -> Sequence[Point]:
        """As PointSource. What the devices count is read once more when all is done."""
        if again := self._passes_without_lost():
            return [probe.point for probe in again]
        if asked := (*self._suspects(), *self._turn_of_burn_in()):
            self._probes |= {probe.point.point_id: probe for probe in asked}
            return [probe.point for probe in asked]
        if self._cluster is not None and "facts" in self.stages:
            after = read_device_facts(self._cluster)
            self.readings = [*facts_readings(self._before, after), *self.readings]
        self.readings += drift(self.readings, self._fleet.floor("gemm"))
        return ()

    def _passes_without_lost(self) -> Sequence[Probe]:
        """Return all probes once more on the devices that are left, where some were lost."""
        assert self._cluster is not None
        lost = self._cluster.lost
        gone = [rank for rank, place in enumerate(self._places) if place in lost]
        if gone:
            self.readings += presence(self._fleet, gone)
            self._earlier_links = self.links
            self._linked.clear()
            left = [place for place in self._places if place not in lost]
            if not left:
                return ()
            self._take(left)
            self._passes_left = self.measure.rounds
        if not self._passes_left:
            return ()
        self._passes_left -= 1
        return self._planned

    def _suspects(self) -> Sequence[Probe]:
        """Return what tells who is to blame, by what was read so far; nothing once that is done."""
        fleet = self._fleet
        if self._splits is None:
            own = {uuid for subject in fleet.subjects for uuid in subject.uuids}
            readings = [one for one in self.readings if own.issuperset(one.subject.uuids)]
            findings = judge(readings, fleet.devices)
            self._splits = slow_groups(self._planned, readings, findings, fleet)
            confirmed = confirmations(self._planned, findings, fleet)
            return [*(split.probe for split in self._splits), *confirmed]
        self._splits = [
            halve(ranks, split.probe, fleet)
            for split in self._splits
            if (ranks := slower_half(split, self.readings, fleet))
        ]
        return [split.probe for split in self._splits]

    def _turn_of_burn_in(self) -> Sequence[Probe]:
        """Return what is burnt in next; nothing when the time is over."""
        if self.burn_in_s and not self._burn_in:
            self._burn_in = tuple(burn_in_probes(self._fleet))
            self._burnt_until_s = time.monotonic() + self.burn_in_s
        return self._burn_in if time.monotonic() < self._burnt_until_s else ()
