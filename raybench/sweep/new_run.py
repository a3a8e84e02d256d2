"""A new run: what is known of it before its first point."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.environment import git_commit, package_versions, variables_that_matter
from raybench.job.registry import module_of
from raybench.records.sources import Code, code_of
from raybench.results.run import Run, RunStatus
from raybench.sweep.loop import Before
from raybench.sweep.rounds import Rounds
from raybench.sweep.run_state import RunState

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.plan import Plan


def start_run(
    job: Job,
    plan: Plan,
    *,
    argv: Sequence[str],
    tags: Mapping[str, str],
    resume_command: Callable[[str], str],
) -> RunState:
    """Make a run of which nothing is done yet. Raises UsageError as `code_of_job`.

    resume_command: gives what the user types to go on with a run, of which it takes the id.
    """
    code = code_of_job(job)
    run = _make_run(job, plan, argv, tags, code)
    return RunState(
        run=run,
        code=code,
        rounds=replace(rounds_of_job(job, plan), seed=run.seed or 0),
        before=Before(),
        is_resumed=False,
        resume_command=resume_command(run.run_id),
    )


def rounds_of_job(job: Job, plan: Plan) -> Rounds:
    """Return the rounds in which the points are run, without a seed of their order."""
    has_controls = job.placement.isolation == "cluster"
    return Rounds(plan=plan, count=job.measure.rounds, has_controls=has_controls)


def code_of_job(job: Job) -> Code:
    """Read the sources of the job's workload, which is imported, and of raybench.

    Raises UsageError where there is no such workload.
    """
    return code_of(module_of(job.workload.kind))


def _make_run(
    job: Job, plan: Plan, argv: Sequence[str], tags: Mapping[str, str], code: Code
) -> Run:
    now = datetime.now(UTC)
    return Run(
        run_id=f"{job.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        job_name=job.name,
        job_text=job.text,
        job_sha256=job.meaning_sha256,
        argv=tuple(argv),
        status=RunStatus.RUNNING,
        started_at=now,
        points_total=len(plan.points),
        baseline=job.baseline,
        seed=secrets.randbits(31),
        cluster="",
        host=socket.gethostname(),
        versions=package_versions(),
        git_commit=git_commit(Path.cwd()),
        workload_sha256=code.workload_sha256,
        raybench_sha256=code.raybench_sha256,
        workload_files=code.workload,
        environment=variables_that_matter(),
        tags=tags,
    )
