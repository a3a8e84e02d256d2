"""A health check as a run: a sweep runs its points, and their records become findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raybench.analysis.references import SHIPPED, References
from raybench.cluster import Cluster, find_kind
from raybench.errors import ClusterError
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
    STAGES,
    SUITE,
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
from raybench.report.formatting import quoted
from raybench.results.tables import Run
from raybench.results.writer import RunStore
from raybench.sweep.listener import Listener
from raybench.sweep.point_source import PointSource
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunTarget, start_run
from raybench.sweep.runner import run_sweep

_JOB = Path(__file__).with_name("job.yaml")
# A point of the burn-in is long enough to heat a device, and short enough to notice a hang soon.
_BURN_IN_POINT_S = 10.0
_BURN_IN_MEASURE = Measure(
    warmup=Span(min=10, max=10),
    seconds=_BURN_IN_POINT_S,
    max_seconds=1.5 * _BURN_IN_POINT_S,
    timeout_s=60.0,
    breakdown=False,
)
# A long timeout, because the processes of these tests import torch, which takes seconds on a busy
# host.
_ENVIRONMENT_MEASURE = Measure(
    warmup=Span(min=5, max=5), iterations=20, max_seconds=2.0, timeout_s=120.0, breakdown=False
)
# Waits in a step depend on the hosts, whose speed fluctuates within tenths of a second.
_CHANGES_FOR_PARTS = {"breakdown": True, "iterations": 100}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Which tests a health check runs."""

    stages: Collection[Stage] = STAGES
    # Test one pair of devices at a time, so that no pair shares a path with another pair.
    serial: bool = False
    # Least duration of the burn-in, which runs whatever `stages` are; 0: no burn-in.
    burn_in_s: float = 0.0
    # Makes the probes of a pass. Default: the probes of `stages`.
    make_probes: Callable[[Fleet], tuple[Probe, ...]] | None = None

    def probes_of_pass(self, fleet: Fleet) -> tuple[Probe, ...]:
        """Return the probes that run in each pass."""
        if self.make_probes is not None:
            return self.make_probes(fleet)
        stages = [stage for stage in PASS_STAGES if stage in self.stages]
        return probes(fleet, stages, serial=self.serial)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The result of a health check."""

    run: Run
    # Devices by rank; devices that were lost during the check are included.
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
        """Return the devices without an unhealthy finding about themselves or their node, by rank.

        Findings that blame a culprit do not count. After an interrupt, tests may be missing.
        """
        unhealthy: set[str] = set()
        for finding in self.findings:
            is_own = finding.subject.kind in ("device", "node") and not finding.culprit
            if finding.verdict.is_unhealthy and is_own:
                unhealthy.update(finding.subject.uuids)
        healthy = []
        for subject, device in zip(device_subjects(self.devices), self.devices, strict=True):
            if subject.uuids[0] not in unhealthy:
                healthy.append(device)
        return tuple(healthy)


def examine(
    where: RunTarget,
    listener: Listener,
    settings: CheckSettings,
    argv: Sequence[str],
    references: References = SHIPPED,
) -> Examination:
    """Run a health check, which takes minutes, and write its run and findings to `where.output`.

    Call it from the main thread, because it handles SIGINT and SIGTERM as `run_sweep` does. After
    an interrupt the run is `interrupted`, and tests without their last pass have no findings.

    Args:
        argv: the command, for the table `runs`.

    Raises:
        ClusterError: the cluster cannot be used, another sweep has the devices, or only GPUs have
            tests in these stages and there is no GPU.
        UsageError: the address is invalid.
        ResultsError: tables cannot be read or written.
        KeyboardInterrupt: before the workers start, or after the end.
    """
    _check_stages(settings, where)
    job = health_job()
    examiner = Examiner(settings, job.measure)
    start = start_run(
        job, Plan(points=()), argv=argv, tags={}, resume_command=lambda _: quoted(*argv)
    )
    past = read_findings(where.output)
    run = run_sweep(job, start, where, listener, examiner)
    readings = tuple(examiner.readings)
    if run.status is RunStatus.INTERRUPTED:
        readings = _complete_tests(readings, job.measure.rounds)
    judged = judge(readings, examiner.devices, past, references)
    examination = Examination(
        run=run, devices=examiner.devices, judgements=(*examiner.environment, *judged)
    )
    store = RunStore(root=where.output, run_id=run.run_id, measure=job.measure)
    store.write_health(examination.findings)
    return examination


def _check_stages(settings: CheckSettings, where: RunTarget) -> None:
    """Raise ClusterError if the check would have CPU workers alone, and no test for them."""
    stages_of_cpus = {test.stage for test in SUITE["cpu"]}
    if settings.burn_in_s or stages_of_cpus.intersection(settings.stages):
        return
    if find_kind(where.address, where.device) == "cpu":
        options = " ".join(f"--only {stage}" for stage in settings.stages)
        raise ClusterError(
            f"{options}: only GPUs have such tests, and this check would use CPU workers; "
            "choose another stage"
        )


def _complete_tests(readings: Sequence[Reading], passes: int) -> tuple[Reading, ...]:
    """Return the readings of tests with all passes; facts are read only once."""
    complete = set()
    for reading in readings:
        if reading.pass_number >= passes or reading.test.stage == "facts":
            complete.add(reading.test.name)
    return tuple(reading for reading in readings if reading.test.name in complete)


def health_job() -> Job:
    """Return the job with the settings of all health checks; it has no points."""
    return load_job(_JOB)


@dataclass(slots=True)
class Examiner(PointSource):
    """Makes the points of a health check, and collects the readings of their records."""

    settings: CheckSettings
    # How the job measures its points.
    measure: Measure
    # Devices at the start of the check, by rank.
    devices: tuple[Device, ...] = ()
    # Complete when `further_round` has returned no points.
    readings: list[Reading] = field(default_factory=list)
    _environment_facts: EnvironmentFacts | None = None
    # Name of a test -> judgements of its point in the stage "environment". A dict, because a
    # repeated attempt replaces the earlier judgements.
    _environment_judgements: dict[str, tuple[Judgement, ...]] = field(default_factory=dict)
    _cluster: Cluster | None = None
    # Indices into `_cluster.devices`, by rank.
    _places: tuple[int, ...] = ()
    # Devices that are not lost.
    _fleet: Fleet = field(default_factory=lambda: Fleet(devices=()))
    _facts_before: tuple[DeviceFacts, ...] = ()
    # Point id -> probe of the current pass.
    _probes: dict[str, Probe] = field(default_factory=dict)
    # Passes to repeat after a device was lost.
    _passes_left: int = 0
    _burn_in: tuple[Probe, ...] = ()
    _burn_in_ends_s: float = 0.0

    def rounds(self, cluster: Cluster) -> Rounds:
        """Return the passes as rounds; call it once, when the workers have started."""
        self._cluster, self._facts_before = cluster, cluster.read_device_facts()
        self._use_devices(range(len(cluster.devices)))
        self.devices = self._fleet.devices
        once = [probe.point for probe in self._probes.values() if _runs_once(probe)]
        if ENVIRONMENT in self.settings.stages and self.devices:
            self._environment_facts = EnvironmentFacts(
                devices=self.devices,
                missing=cluster.capacity - len(cluster.devices),
                is_private=cluster.is_private,
                other_sweeps=cluster.other_sweeps,
                states=self._facts_before,
            )
        points = self._points_of_pass()
        count = self.measure.rounds if points else 1
        # Points that run once count as done in the later rounds.
        done = {
            TrialKey(point.point_id, number): Status.OK
            for number in range(2, count + 1)
            for point in once
        }
        return Rounds(
            plan=Plan(points=(*once, *points)),
            count=count,
            seed=None,
            has_controls=False,
            in_fresh_workers=False,
            kept=done,
        )

    @property
    def environment(self) -> tuple[Judgement, ...]:
        """Return the judgements of the stage "environment" so far."""
        judged: list[Judgement] = []
        if self._environment_facts is not None:
            judged += judge_environment(self._environment_facts)
        for judgements in self._environment_judgements.values():
            judged += judgements
        return tuple(judged)

    def _points_of_pass(self) -> list[Point]:
        """Return the points of one pass; only before the burn-in, which adds probes."""
        return [probe.point for probe in self._probes.values() if not _runs_once(probe)]

    def _use_devices(self, places: Iterable[int]) -> None:
        """Make fleet and probes of the devices at these places of the cluster, without lost ones.

        Devices with too little free memory for a probe get a reading instead.
        """
        assert self._cluster is not None
        # Devices keep their names when a device was lost.
        subjects = dict(zip(self._places, self._fleet.subjects, strict=True))
        self._places = tuple(place for place in places if place not in self._cluster.lost)
        self._fleet = Fleet(
            devices=tuple(self._cluster.devices[place] for place in self._places),
            # The first call has no earlier subjects.
            known=tuple(subjects[place] for place in self._places) if subjects else (),
        )
        free_bytes = {
            facts.device.uuid: facts.memory_free_bytes
            for facts in self._facts_before
            if facts.memory_free_bytes is not None
        }
        if self._places:
            planned = self.settings.probes_of_pass(self._fleet)
            fitting, left_out = split_by_memory(planned, self._fleet, free_bytes)
            self.readings += left_out
            self._probes = {probe.point.point_id: probe for probe in fitting}

    def measure_of(self, point: Point) -> Measure | None:
        """Return how to measure a point; None: as the job says."""
        if any(probe.point == point for probe in self._burn_in):
            return _BURN_IN_MEASURE
        probe = self._probes.get(point.point_id)
        if probe is not None and _runs_once(probe):
            return _ENVIRONMENT_MEASURE
        if probe is not None and probe.test.reads == "parts":
            return self.measure.model_copy(update=_CHANGES_FOR_PARTS)
        return None

    def note(self, record: Record) -> None:
        """Keep the readings, or the judgements, of an attempt."""
        probe = self._probes[record.point.point_id]
        test, facts = probe.test.name, self._environment_facts
        if not _runs_once(probe):
            self.readings += read_record(record, probe, self._fleet)
        # The stage "environment" runs once and has no readings: its records are judged at once.
        elif facts is not None:
            judge_record = judge_first_collective if test == CONNECT_TEST else judge_transports
            self._environment_judgements[test] = tuple(judge_record(facts, record))

    def further_round(self, number: int) -> Sequence[Point]:
        """Return the points of one more round; without points the check is over.

        Passes and burn-in start anew without the devices that were lost since the last call. The
        burn-in follows the passes. The last call adds the readings of facts and of drift.
        """
        assert self._cluster is not None
        lost = self._cluster.lost
        if lost_ranks := [rank for rank, place in enumerate(self._places) if place in lost]:
            self.readings += presence(self._fleet, lost_ranks)
            self._use_devices(self._places)
            self._passes_left = self.measure.rounds if self._points_of_pass() else 0
            self._burn_in, self._burn_in_ends_s = (), 0.0
        if self._passes_left and self._places:
            self._passes_left -= 1
            return self._points_of_pass()
        burn_in_s, stages = self.settings.burn_in_s, self.settings.stages
        if burn_in_s and self._places and not self._burn_in:
            self._burn_in = probes(self._fleet, [BURN_IN])
            self._probes |= {probe.point.point_id: probe for probe in self._burn_in}
            self._burn_in_ends_s = time.monotonic() + burn_in_s
        if time.monotonic() < self._burn_in_ends_s:
            return [probe.point for probe in self._burn_in]
        if "facts" in stages or ENVIRONMENT in stages:
            after = self._cluster.read_device_facts()
            self.readings[:0] = facts_readings(self._facts_before, after)
        if self._burn_in:
            self.readings += drift(self.readings, self._burn_in[0].test.floor)
        return ()


def _runs_once(probe: Probe) -> bool:
    """Return whether a probe runs only in the first round: it is of the stage "environment"."""
    return probe.test.stage == ENVIRONMENT
