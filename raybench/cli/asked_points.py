"""Which points `raybench sweep` is asked for: those of a job, or those of a run once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from raybench.errors import UsageError

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.plan import Plan

UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `raybench sweep` is given, by the names of its parameters; None where nothing is."""

    job_file: Path | None
    address: str
    device: Literal["auto", "cuda", "cpu"]
    wait_s: float
    shared: bool
    devices_file: Path | None
    output: Path
    overrides: tuple[str, ...]
    expression: str | None
    resumed: str | None
    retry_failed: bool
    again: str | None
    only: str | None
    against: str | None
    profile_expression: str | None
    tags: Mapping[str, str]
    dry_run: bool
    as_json: bool


def load_asked(ctx: click.Context, asked: Asked) -> tuple[Job, Plan]:
    """Load the job of the command and make its points; of a run to resume all, whatever the filter.

    Raises UsageError.
    """
    from raybench.cli.plans import load_plan, select

    expression = asked.expression if asked.resumed is None else None
    if asked.again is None:
        if asked.only or asked.against:
            raise UsageError("--only and --against: go with --again RUN only")
        if asked.job_file is None:
            raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
        return load_plan(asked.job_file, asked.overrides, expression)
    if asked.job_file is not None or asked.resumed or asked.overrides:
        raise UsageError("--again RUN: has its job; give no JOB, --set or --resume")
    if asked.against and not asked.only:
        raise UsageError("--against BASE: goes with --only unclear")
    job, plan = _plan_again(asked.output, asked.again, asked.only, asked.against)
    return job, select(plan, expression)


def select_ids(plan: Plan, expression: str | None, option: str = "--filter") -> frozenset[str]:
    """Select the points for which `expression` is true, by their ids. Raises UsageError."""
    from raybench.cli.plans import select

    return frozenset(point.point_id for point in select(plan, expression, option).points)


def overrides_of_again(asked: Asked) -> tuple[str, ...]:
    """Read what was set in the run that `--again` names: the job file alone does not tell it."""
    from raybench.results import reader
    from raybench.sweep.resume import overrides_in

    if asked.again is None:
        return ()
    root, run_id = reader.find_run(asked.output, asked.again)
    argv = reader.read_run(root, run_id).argv
    return tuple(word for value in overrides_in(argv) for word in ("--set", value))


def _plan_again(output: Path, text: str, only: str | None, against: str | None) -> tuple[Job, Plan]:
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
    from raybench.results.run import run_ids

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

    frame = load_comparison(root, base, run_id, THRESHOLD).frame
    return {str(point_id) for point_id in frame.loc[frame["verdict"] == UNCLEAR, "point_id"]}
