"""A run: one execution of a job, as the table `runs` tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from raybench.job.point import Scalar


class RunStatus(StrEnum):
    """How far a run has come; one that says `running` without a driver was interrupted.

    UNKNOWN is read where a later version has written another status; none is written.
    """

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> RunStatus:
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a job.

    workload_sha256, workload_files, raybench_sha256: as `raybench.records.sources.Code`; None in a
    run of a version that did not tell.
    seed: of the order of the points in rounds.
    paused_s: from the end of a sweep to `--resume`, in all; None in a run that was never resumed.
    """

    run_id: str
    job_name: str
    job_text: str
    job_sha256: str
    argv: tuple[str, ...]
    status: RunStatus
    started_at: datetime
    finished_at: datetime | None = None
    paused_s: float | None = None
    points_total: int
    points_ok: int = 0
    points_failed: int = 0
    points_skipped: int = 0
    baseline: Mapping[str, Scalar] = field(default_factory=dict)
    seed: int | None = None
    cluster: str
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    workload_sha256: str | None = None
    raybench_sha256: str | None = None
    workload_files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
