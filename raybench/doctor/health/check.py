"""A health check as a run: its points go the way of a sweep's, and its records become findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raybench.cluster import Cluster
from raybench.doctor.health.burn_in import drift, measure_of_burn_in, probes_of_burn_in
from raybench.doctor.health.device_facts import facts_readings, read_device_facts
from raybench.doctor.health.follow_up import (
    Split,
    confirmations,
    halve,
    slow_groups,
    slower_half,
)
from raybench.doctor.health.readings import make_links, read_record
from raybench.doctor.health.room import split_by_room
from raybench.doctor.health.subjects import device_subjects
from raybench.doctor.health.suite import Fleet, Probe, probes
from raybench.doctor.health.verdicts import judge
from raybench.job.model import Job, Measure, load_job
from raybench.job.plan import Plan
from raybench.job.point import Point
from raybench.records import Device, Record
from raybench.records.device_facts import DeviceFacts
from raybench.records.environment import usable_cores
from raybench.records.health import Finding, Link, Reading, Stage, Verdict
from raybench.results.health import past_values
from raybench.results.run import Run
from raybench.results.writer import RunStore
from raybench.sweep.listener import Listener
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunTarget, start_run
from raybench.sweep.runner import run_sweep

_NOT_HEALTHY = (Verdict.BAD, Verdict.SUSPECT, Verdict.UNTESTED)
_JOB = Path(__file__).with_name("job.yaml")

MakeProbes = Callable[[Fleet], tuple[Probe, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What a check has read, and what is said of it. devices: those checked, by rank."""

    run: Run
    devices: tuple[Device, ...]
    readings: tuple[Reading, ...]
    links: tuple[Link, ...]
    findings: tuple[Finding, ...]

    @property
    def healthy_devices(self) -> tuple[Device, ...]:
        """The devices that nothing is held against, by themselves or by their node."""
        ill = {
            uuid
            for finding in self.findings
            if finding.verdict in _NOT_HEALTHY
            and finding.subject.kind in ("device", "node")
            and not finding.culprit
            for uuid in finding.subject.uuids
        }
        subjects = device_subjects(self.devices)
        pairs = zip(subjects, self.devices, strict=True)
        return tuple(device for subject, device in pairs if subject.uuids[0] not in ill)


@dataclass(slots=True)
class _Examiner:
    """Makes the points of the check when its devices are known, and keeps what was read.

    stages: that are run. measure: of the job. burn_in_s: how long the devices are burnt in.
    asked: probes of further rounds. split: the group that is being halved.
    """

    make_probes: MakeProbes
    stages: Collection[Stage]
    measure: Measure
    burn_in_s: float = 0.0
    devices_wanted: int = field(default_factory=usable_cores)
    fleet: Fleet = field(default_factory=lambda: Fleet(devices=()))
    probes: dict[str, Probe] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    linked: list[tuple[Record, Probe]] = field(default_factory=list)
    _cluster: Cluster | None = None
    _before: tuple[DeviceFacts, ...] = ()
    _planned: tuple[Probe, ...] = ()
    _splits: list[Split] | None = None
    _burn_in: tuple[Probe, ...] = ()
    _burnt_until_s: float = 0.0

    def rounds(self, cluster: Cluster) -> Rounds:
        """As PointSource."""
        alive = [one for place, one in enumerate(cluster.devices) if place not in cluster.lost]
        self._cluster, self._before = cluster, read_device_facts(cluster)
        self.fleet = Fleet(devices=tuple(alive))
        free = {
            facts.device.uuid: facts.memory_free_bytes
            for facts in self._before
            if facts.memory_free_bytes is not None
        }
        fitting, without_room = split_by_room(self.make_probes(self.fleet), self.fleet, free)
        self.readings += without_room
        self._planned = fitting
        self.probes = {probe.point.point_id: probe for probe in fitting}
        return Rounds(
            plan=Plan(points=tuple(probe.point for probe in fitting)),
            count=self.measure.rounds,
            seed=None,
            has_controls=False,
            in_fresh_workers=False,
        )

    def measure_of(self, point: Point) -> Measure | None:
        """As PointSource."""
        if any(probe.point == point for probe in self._burn_in):
            return measure_of_burn_in()
        probe = self.probes.get(point.point_id)
        # In each round anew: it tells who is slow only by steps that are taken apart.
        return self.measure if probe is not None and probe.shape == "parts" else None

    def note(self, record: Record) -> None:
        """As PointSource."""
        probe = self.probes[record.point.point_id]
        self.readings += read_record(record, probe, self.fleet)
        if probe.shape == "pairs" or probe.test.stage == "host-links":
            self.linked.append((record, probe))

    def further(self, number: int) -> Sequence[Point]:
        """As PointSource. What the devices count is read once more when all is done."""
        if asked := (*self._suspects(), *self._turn_of_burn_in()):
            self.probes |= {probe.point.point_id: probe for probe in asked}
            return [probe.point for probe in asked]
        if self._cluster is not None and "facts" in self.stages:
            after = read_device_facts(self._cluster)
            self.readings = [*facts_readings(self._before, after), *self.readings]
        self.readings += drift(self.readings, self.fleet.floor("gemm"))
        return ()

    def _suspects(self) -> Sequence[Probe]:
        """Return what tells who is to blame, by what was read so far; nothing once that is done."""
        if self._splits is None:
            findings = judge(self.readings, self.fleet.devices)
            self._splits = slow_groups(self._planned, self.readings, findings, self.fleet)
            confirmed = confirmations(self._planned, findings, self.fleet)
            return [*(split.probe for split in self._splits), *confirmed]
        halves = [
            halve(ranks, split.probe, self.fleet)
            for split in self._splits
            if (ranks := slower_half(split, self.readings, self.fleet))
        ]
        self._splits = halves
        return [split.probe for split in halves]

    def _turn_of_burn_in(self) -> Sequence[Probe]:
        """Return what is burnt in next; nothing when the time is over."""
        if self.burn_in_s and not self._burn_in:
            self._burn_in = probes_of_burn_in(self.fleet)
            self._burnt_until_s = time.monotonic() + self.burn_in_s
        return self._burn_in if time.monotonic() < self._burnt_until_s else ()


def examine(
    where: RunTarget,
    listener: Listener,
    stages: Collection[Stage],
    argv: Sequence[str],
    *,
    serial: bool = False,
    burn_in_s: float = 0.0,
    make_probes: MakeProbes | None = None,
) -> Examination:
    """Run the stages on all devices of a cluster, judge what was read, and keep it in the tables.

    serial: one pair at a time. burn_in_s: the least of the stage burn-in, 0 for none.
    make_probes: what is run instead of the suite.
    Raises ClusterError and ResultsError.
    """
    job = health_job()
    examiner = _Examiner(
        make_probes or (lambda fleet: probes(fleet, stages, serial=serial)),
        stages,
        job.measure,
        burn_in_s,
    )
    start = start_run(
        job, Plan(points=()), argv=argv, tags={}, resume_command=lambda _: "raybench health"
    )
    past = past_values(where.output)
    run = run_sweep(job, start, where, listener, examiner)
    readings = tuple(examiner.readings)
    found = Examination(
        run=run,
        devices=examiner.fleet.devices,
        readings=readings,
        links=make_links(examiner.linked, examiner.fleet),
        findings=judge(readings, examiner.fleet.devices, past),
    )
    store = RunStore(root=where.output, run_id=run.run_id, measure=job.measure)
    store.write_health(found.findings, found.links)
    return found


def health_job() -> Job:
    """Load the job of a check, without its points."""
    return load_job(_JOB)
