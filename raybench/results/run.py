"""A run: one execution of a job, a row of the table `runs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from raybench.job.point import Scalar
from raybench.records.metric import Column


class RunStatus(StrEnum):
    """How far a run has come; one that says `running` without a driver was interrupted."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a job.

    workload_sha256, workload_files, raybench_sha256: as `raybench.records.environment.Code`; None
    in a run of a version that did not tell.
    seed: of the order of the points in rounds.
    only_devices: names of those that `--devices` named; empty where all could be used.
    paused_s: from the end of a sweep to `--resume`, in all; None in a run that was never resumed.
    """

    run_id: Annotated[str, Column("", "id of the run")]
    job_name: Annotated[str, Column("", "name in the job file")]
    job_text: Annotated[str, Column("", "job file as it was read")]
    job_sha256: Annotated[str, Column("", "SHA-256 of what the job means")]
    argv: Annotated[tuple[str, ...], Column("", "command line")]
    status: Annotated[RunStatus, Column("", "running, ok, failed or interrupted")]
    started_at: Annotated[datetime, Column("UTC", "start")]
    finished_at: Annotated[datetime | None, Column("UTC", "end; null while running")] = None
    paused_s: Annotated[
        float | None, Column("s", "not swept, until --resume; null: never resumed")
    ] = None
    points_total: Annotated[int, Column("points", "in the plan")]
    points_ok: Annotated[int, Column("points", "measured")] = 0
    points_failed: Annotated[int, Column("points", "failed")] = 0
    points_skipped: Annotated[int, Column("points", "not run")] = 0
    baseline: Annotated[Mapping[str, Scalar], Column("", "settings of the baseline points")] = (
        field(default_factory=dict)
    )
    only_devices: Annotated[
        tuple[str, ...], Column("", "those that --devices named; empty: all")
    ] = ()
    seed: Annotated[int | None, Column("", "of the order in rounds")] = None
    cluster: Annotated[str, Column("", "where the workers ran")]
    host: Annotated[str, Column("", "where the driver ran")]
    versions: Annotated[Mapping[str, str], Column("", "software versions")] = field(
        default_factory=dict
    )
    git_commit: Annotated[str | None, Column("", "commit of the working directory")] = None
    workload_sha256: Annotated[str | None, Column("", "of the workload's source files")] = None
    raybench_sha256: Annotated[str | None, Column("", "of raybench's files that measure")] = None
    workload_files: Annotated[Mapping[str, str], Column("", "SHA-256 of each source file")] = field(
        default_factory=dict
    )
    environment: Annotated[
        Mapping[str, str], Column("", "NCCL_, TORCH_, CUDA_ and OMP_ variables")
    ] = field(default_factory=dict)
    tags: Annotated[Mapping[str, str], Column("", "given with --tag")] = field(default_factory=dict)
