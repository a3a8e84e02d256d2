"""A health check as a run: its points go the way of a sweep's, and its records become findings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from raybench.health.examiner import Examiner, MakeProbes
from raybench.health.store import past_values
from raybench.health.suite import device_subjects, probes
from raybench.health.verdicts import judge
from raybench.job.model import Job, load_job
from raybench.job.plan import Plan
from raybench.records import Device
from raybench.records.health import Finding, Link, Reading, Stage, Verdict
from raybench.results.run import Run, RunStatus
from raybench.results.writer import RunStore
from raybench.sweep.listener import Listener
from raybench.sweep.run_state import RunTarget, start_run
from raybench.sweep.runner import run_sweep

_NOT_HEALTHY = (Verdict.BAD, Verdict.SUSPECT, Verdict.UNTESTED)
_JOB = Path(__file__).with_name("job.yaml")


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
    examiner = Examiner(
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
    if run.status is RunStatus.INTERRUPTED:
        # A test that was cut short goes: what disturbs one pass is nobody's fault.
        whole = {one.test.name for one in readings if one.pass_number >= job.measure.rounds}
        readings = tuple(one for one in readings if one.test.name in whole)
    found = Examination(
        run=run,
        devices=examiner.devices,
        readings=readings,
        links=examiner.links,
        findings=judge(readings, examiner.devices, past),
    )
    store = RunStore(root=where.output, run_id=run.run_id, measure=job.measure)
    store.write_health(found.findings, found.links)
    return found


def health_job() -> Job:
    """Load the job of a check, without its points."""
    return load_job(_JOB)
