"""A health check as a run: its points are run as those of a sweep, its records become findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from raybench.analysis.references import SHIPPED, References
from raybench.cluster import Cluster
from raybench.health.environment import judge_environment
from raybench.health.environment_facts import EnvironmentFacts
from raybench.health.nodes import CheckCourse, node_reports
from raybench.health.readings import (
    Reading,
    drift,
    facts_readings,
    presence,
    read_record,
    split_by_memory,
)
from raybench.health.references import read_findings
from raybench.health.suite import (
    BURN_IN,
    CONNECT_TEST,
    ENVIRONMENT,
    PASS_STAGES,
    Fleet,
    Probe,
    device_subjects,
    probes,
)
from raybench.health.transports import judge_first_collective, judge_transports
from raybench.health.verdicts import Judgement, judge
from raybench.job.loading import load_job
from raybench.job.model import Job, Measure, Span
from raybench.job.plan import Plan
from raybench.job.point import Point
from raybench.records.device import Device
from raybench.records.devices import DeviceFacts, Finding, Stage
from raybench.records.node_report import NodeReport
from raybench.records.record import Record, TrialKey
from raybench.records.status import RunStatus, Status
from raybench.results.tables import Run
from raybench.results.writer import RunStore
from raybench.sweep.listener import Listener
from raybench.sweep.point_source import PointSource
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunTarget, start_run
from raybench.sweep.runner import run_sweep

MakeProbes = Callable[[Fleet], tuple[Probe, ...]]

_JOB = Path(__file__).with_name("job.yaml")
# A point of the burn-in: long enough to heat a device, and so short that a hang is noticed soon.
_BURN_IN_POINT_S = 10.0
_BURN_IN_MEASURE = Measure(
    warmup=Span(min=10, max=10),
    seconds=_BURN_IN_POINT_S,
    max_seconds=1.5 * _BURN_IN_POINT_S,
    timeout_s=60.0,
    breakdown=False,
)
# The tests of the environment run once. Their processes import torch, which takes seconds on a busy
# host.
_ENVIRONMENT_MEASURE = Measure(
    warmup=Span(min=5, max=5), iterations=20, max_seconds=2.0, timeout_s=120.0, breakdown=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The result of a check. devices: those that it began with, also lost ones, by rank."""

    run: Run
    devices: tuple[Device, ...]
    judgements: tuple[Judgement, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the rows of the table `health`."""
        return tuple(judgement.finding for judgement in self.judgements)

    @property
    def node_reports(self) -> tuple[NodeReport, ...]:
        """Return what the check says of each node."""
        ended = self.run.finished_at or self.run.started_at
        course = CheckCourse(
            began=self.run.started_at.isoformat(),
            seconds=round((ended - self.run.started_at).total_seconds(), 3),
            is_whole=self.run.status is not RunStatus.INTERRUPTED,
        )
        return node_reports(self.judgements, self.devices, course)

    @property
    def healthy_devices(self) -> tuple[Device, ...]:
        """Return the devices, by rank, with no unhealthy finding about themselves or their node.

        Unhealthy is bad, suspect or untested. Findings that name a culprit, or are about pairs or
        the cluster, do not count. After an interrupt tests may be missing: look at `run.status`.
        """
        unhealthy = {
            uuid
            for finding in self.findings
            if finding.verdict.is_unhealthy
            and finding.subject.kind in ("device", "node")
            and not finding.culprit
            for uuid in finding.subject.uuids
        }
        subjects = device_subjects(self.devices)
        pairs = zip(subjects, self.devices, strict=True)
        return tuple(device for subject, device in pairs if subject.uuids[0] not in unhealthy)


def examine(
    where: RunTarget,
    listener: Listener,
    stages: Collection[Stage],
    argv: Sequence[str],
    *,
    serial: bool = False,
    burn_in_s: float = 0.0,
    make_probes: MakeProbes | None = None,
    references: References = SHIPPED,
) -> Examination:
    """Run a health check on the devices of `where`, and return its findings; takes minutes.

    Writes a run below `where.output`, with the findings in `health`. For the main thread: it takes
    SIGINT and SIGTERM, and may end the process, as `run_sweep`. An interrupt while tests run ends
    it early: the run is `interrupted`, and tests without their last pass have no findings. argv:
    the command, for the table `runs`. serial: test one pair at a time. burn_in_s: least duration of
    the burn-in, whatever `stages`; 0: none. make_probes: returns the probes of a pass, in place of
    `stages` (but for facts) and `serial`. Raises ClusterError where the cluster cannot be used or
    another sweep has the devices, UsageError for a bad address, ResultsError where tables cannot be
    read or written, KeyboardInterrupt before workers start or after the end.
    """
    job = health_job()
    of_passes = [stage for stage in PASS_STAGES if stage in stages]
    make_probes = make_probes or (lambda fleet: probes(fleet, of_passes, serial=serial))
    examiner = Examiner(make_probes, stages, job.measure, burn_in_s)
    start = start_run(
        job, Plan(points=()), argv=argv, tags={}, resume_command=lambda _: "raybench health"
    )
    past = read_findings(where.output)
    run = run_sweep(job, start, where, listener, examiner)
    readings = tuple(examiner.readings)
    if run.status is RunStatus.INTERRUPTED:
        # Tests without all passes go, but no facts: what disturbs one pass is nobody's fault.
        whole = {one.test.name for one in readings if one.pass_number >= job.measure.rounds}
        whole |= {one.test.name for one in readings if one.test.stage == "facts"}
        readings = tuple(one for one in readings if one.test.name in whole)
    judged = judge(readings, examiner.devices, past, references)
    examination = Examination(
        run=run, devices=examiner.devices, judgements=(*examiner.environment, *judged)
    )
    store = RunStore(root=where.output, run_id=run.run_id, measure=job.measure)
    store.write_health(examination.findings)
    return examination


def health_job() -> Job:
    """Return the job that all checks have, for its settings; the points come from `probes`."""
    return load_job(_JOB)


@dataclass(slots=True)
class Examiner(PointSource):
    """The source of the points of a check, for `run_sweep`; it keeps the readings of its records.

    make_probes: returns the probes of each pass. stages: if "facts" is one, these are read too.
    measure: of the job. burn_in_s: how long the burn-in lasts at least; 0: none.
    devices: those at the start, by rank. readings: all so far; to be read when the check is over.
    """

    make_probes: MakeProbes
    stages: Collection[Stage]
    measure: Measure
    burn_in_s: float = 0.0
    devices: tuple[Device, ...] = ()
    readings: list[Reading] = field(default_factory=list)
    _environment_facts: EnvironmentFacts | None = None
    # Of the points of the stage "environment", by test: an attempt may be repeated.
    _of_points: dict[str, tuple[Judgement, ...]] = field(default_factory=dict)
    _cluster: Cluster | None = None
    # Positions in the cluster's devices, by rank.
    _places: tuple[int, ...] = ()
    _fleet: Fleet = field(default_factory=lambda: Fleet(devices=()))
    _facts_before: tuple[DeviceFacts, ...] = ()
    # Of one pass, by point_id.
    _probes: dict[str, Probe] = field(default_factory=dict)
    _passes_left: int = 0
    _burn_in: tuple[Probe, ...] = ()
    _burn_in_ends_s: float = 0.0

    def rounds(self, cluster: Cluster) -> Rounds:
        """Return the passes over the probes, as rounds, on the devices that are not lost.

        Call it first and once, with the workers started. Sets `devices`, and reads their facts. A
        probe that needs more memory than a device has free is left out; that device gets a reading.
        """
        self._cluster, self._facts_before = cluster, cluster.read_device_facts()
        self._use_devices(range(len(cluster.devices)))
        self.devices = self._fleet.devices
        first = [probe.point for probe in self._probes.values() if _runs_once(probe)]
        if ENVIRONMENT in self.stages and self.devices:
            self._environment_facts = EnvironmentFacts(
                devices=self.devices,
                missing=cluster.capacity - len(cluster.devices),
                other_sweeps=cluster.other_sweeps,
                states=self._facts_before,
            )
        count = self.measure.rounds if self._points else 1
        # Points that run once count as done in the later rounds.
        done = {
            TrialKey(point.point_id, number): Status.OK
            for number in range(2, count + 1)
            for point in first
        }
        return Rounds(
            plan=Plan(points=(*first, *self._points)),
            count=count,
            seed=None,
            has_controls=False,
            in_fresh_workers=False,
            kept=done,
        )

    @property
    def environment(self) -> tuple[Judgement, ...]:
        """Return the judgements of the stage "environment" so far."""
        facts = self._environment_facts
        own = () if facts is None else judge_environment(facts)
        return (*own, *chain.from_iterable(self._of_points.values()))

    @property
    def _points(self) -> list[Point]:
        """Return the points of one pass; before a burn-in begins, which adds its own probes."""
        return [probe.point for probe in self._probes.values() if not _runs_once(probe)]

    def _use_devices(self, places: Iterable[int]) -> None:
        """Make the fleet and the probes anew, for those of these devices that are not lost.

        places: positions in the cluster. A probe that a device has no memory for becomes a reading
        of that device.
        """
        assert self._cluster is not None
        subjects = dict(zip(self._places, self._fleet.subjects, strict=True))
        self._places = tuple(place for place in places if place not in self._cluster.lost)
        self._fleet = Fleet(
            devices=tuple(self._cluster.devices[place] for place in self._places),
            known=tuple(subjects[place] for place in self._places if subjects),
        )
        free = {
            facts.device.uuid: facts.memory_free_bytes
            for facts in self._facts_before
            if facts.memory_free_bytes is not None
        }
        if self._places:
            planned, left_out = split_by_memory(self.make_probes(self._fleet), self._fleet, free)
            self.readings += left_out
            self._probes = {probe.point.point_id: probe for probe in planned}

    def measure_of(self, point: Point) -> Measure | None:
        """Return how to measure a point; None: as the job says, no breakdown after the first round.

        Not None for the burn-in, and for the straggler test on several devices: it needs its
        breakdown in every round.
        """
        if any(probe.point == point for probe in self._burn_in):
            return _BURN_IN_MEASURE
        probe = self._probes.get(point.point_id)
        if probe is not None and _runs_once(probe):
            return _ENVIRONMENT_MEASURE
        return self.measure if probe is not None and probe.test.reads == "parts" else None

    def note(self, record: Record) -> None:
        """Append the readings of an attempt to `readings`; to be called before `further_round`."""
        probe = self._probes[record.point.point_id]
        if not _runs_once(probe):
            self.readings += read_record(record, probe, self._fleet)
        elif self._environment_facts is not None:
            is_first = probe.test.name == CONNECT_TEST
            judge_record = judge_first_collective if is_first else judge_transports
            self._of_points[probe.test.name] = tuple(judge_record(self._environment_facts, record))

    def further_round(self, number: int) -> Sequence[Point]:
        """Return the points of one more round; empty when the check is over: do not call it again.

        If a device was lost since the last call, passes and burn-in start anew without it, and a
        reading is added for each device: lost or not. A burn-in follows the passes, until
        `burn_in_s` are over. At the end `readings` gets those of the facts, if "facts" is among
        `stages`, and of the drift in a burn-in. number: not used.
        """
        assert self._cluster is not None
        lost = self._cluster.lost
        if gone := [rank for rank, place in enumerate(self._places) if place in lost]:
            self.readings += presence(self._fleet, gone)
            self._use_devices(self._places)
            self._passes_left = self.measure.rounds if self._points else 0
            self._burn_in, self._burn_in_ends_s = (), 0.0
        if self._passes_left and self._places:
            self._passes_left -= 1
            return self._points
        if self.burn_in_s and self._places and not self._burn_in:
            self._burn_in = probes(self._fleet, [BURN_IN])
            self._probes |= {probe.point.point_id: probe for probe in self._burn_in}
            self._burn_in_ends_s = time.monotonic() + self.burn_in_s
        if time.monotonic() < self._burn_in_ends_s:
            return [probe.point for probe in self._burn_in]
        if "facts" in self.stages or ENVIRONMENT in self.stages:
            after = self._cluster.read_device_facts()
            self.readings[:0] = facts_readings(self._facts_before, after)
        if self._burn_in:
            self.readings += drift(self.readings, self._burn_in[0].test.floor)
        return ()


def _runs_once(probe: Probe) -> bool:
    return probe.test.stage == ENVIRONMENT
