"""A health check as a run: its points go the way of a sweep's, and its records become readings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raybench.doctor.health.readings import make_links, read_record
from raybench.doctor.health.suite import Fleet, Probe, probes
from raybench.job.model import Job, load_job
from raybench.job.plan import Plan
from raybench.job.point import Point
from raybench.records import Device, Record
from raybench.records.environment import usable_cores
from raybench.records.health import Link, Reading, Stage
from raybench.results.run import Run
from raybench.sweep.listener import Listener
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunTarget, start_run
from raybench.sweep.runner import run_sweep

_JOB = Path(__file__).with_name("job.yaml")

MakeProbes = Callable[[Fleet], Sequence[Probe]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What a check has read. devices: those that were checked, by rank."""

    run: Run
    devices: tuple[Device, ...]
    readings: tuple[Reading, ...]
    links: tuple[Link, ...]


@dataclass(slots=True)
class _Examiner:
    """Makes the points of the check when its devices are known, and keeps what was measured."""

    make_probes: MakeProbes
    count: int
    devices_wanted: int = field(default_factory=usable_cores)
    fleet: Fleet = field(default_factory=lambda: Fleet(devices=()))
    probes: dict[str, Probe] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    records: list[tuple[Record, Probe]] = field(default_factory=list)

    def rounds(self, devices: Sequence[Device]) -> Rounds:
        """As PointSource."""
        self.fleet = Fleet(devices=tuple(devices))
        self.probes = {probe.point.point_id: probe for probe in self.make_probes(self.fleet)}
        points = tuple(probe.point for probe in self.probes.values())
        return Rounds(
            plan=Plan(points=points),
            count=self.count,
            seed=None,
            has_controls=False,
            in_fresh_workers=False,
        )

    def note(self, record: Record) -> None:
        """As PointSource."""
        probe = self.probes[record.point.point_id]
        self.readings += read_record(record, probe, self.fleet)
        if probe.shape == "pairs" or probe.test.stage == "host-links":
            self.records.append((record, probe))

    def further(self, number: int) -> Sequence[Point]:
        """As PointSource."""
        return ()


def examine(
    where: RunTarget,
    listener: Listener,
    stages: Collection[Stage],
    argv: Sequence[str],
    *,
    make_probes: Callable[[Fleet, Collection[Stage]], Sequence[Probe]] = probes,
) -> Examination:
    """Run the stages on all devices of a cluster. Raises ClusterError and ResultsError."""
    job = health_job()
    examiner = _Examiner(lambda fleet: make_probes(fleet, stages), job.measure.rounds)
    start = start_run(
        job,
        Plan(points=()),
        argv=argv,
        tags={},
        resume_command=lambda _: "raybench health",
    )
    run = run_sweep(job, start, where, listener, examiner)
    return Examination(
        run=run,
        devices=examiner.fleet.devices,
        readings=tuple(examiner.readings),
        links=make_links(examiner.records, examiner.fleet),
    )


def health_job() -> Job:
    """Load the job of a check, without its points."""
    return load_job(_JOB)
