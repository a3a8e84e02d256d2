"""The points of a run once more: `raybench sweep --again RUN`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import UsageError

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.plan import Plan

UNCLEAR = "unclear"


def overrides_of(output: Path, run: str) -> tuple[str, ...]:
    """Read what was set in the run that `run` means: the job file alone does not tell it."""
    from raybench.job.source import overrides_in
    from raybench.results import reader

    root, run_id = reader.find_run(output, run)
    argv = reader.read_run(root, run_id).argv
    return tuple(word for value in overrides_in(argv) for word in ("--set", value))


def plan_again(output: Path, text: str, only: str | None, against: str | None) -> tuple[Job, Plan]:
    """Load the job of the run that `text` means, and its points.

    only: UNCLEAR for those that `raybench compare AGAINST RUN` calls so; against: by default the
    run of the job before it. Raises UsageError and ResultsError.
    """
    from raybench.job.plan import make_plan
    from raybench.results import reader
    from raybench.sweep.resume import job_of_run

    root, run_id = reader.find_run(output, text)
    job = job_of_run(reader.read_run(root, run_id))
    if job is None:
        raise UsageError(
            f"--again {run_id}: this version cannot tell its job; sweep the job file instead"
        )
    plan = make_plan(job)
    if only is None:
        return job, plan
    base = against or _run_before(root, run_id, job.name)
    unclear = _unclear(root, base, run_id)
    points = tuple(point for point in plan.points if point.point_id in unclear)
    if not points:
        raise UsageError(f"--only unclear: no point of {run_id} is unclear against {base}")
    return job, replace(plan, points=points)


def _run_before(root: Path, run_id: str, job_name: str) -> str:
    from raybench.results.folder import run_ids

    ids = run_ids(root)
    earlier = [one for one in ids[: ids.index(run_id)] if one.startswith(f"{job_name}-")]
    if not earlier:
        raise UsageError(
            f"--only unclear: {root} has no run of {job_name} before {run_id}; name the one to "
            "compare with, as in --against RUN"
        )
    return earlier[-1]


def _unclear(root: Path, base: str, run_id: str) -> set[str]:
    """Find the ids of the points that are unclear between two runs."""
    from raybench.analysis.history import THRESHOLD
    from raybench.cli.compare import load_comparison

    points = load_comparison(root, base, run_id, THRESHOLD).points
    return {point.point_id for point in points if point.verdict == UNCLEAR}
