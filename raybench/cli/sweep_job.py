"""The job of `raybench sweep`: a file, a script with its options, or a run once more."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from raybench.errors import UsageError

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.plan import Plan
    from raybench.job.problems import KeyPath

UNCLEAR = "unclear"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


def name_after(path: PurePath, otherwise: str) -> str:
    """Return a name for a job, made of the name of a file; `otherwise` where nothing is left."""
    return _NOT_IN_NAMES.sub("-", path.stem)[:64].lstrip("_.-") or otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptGiven:
    """What `--script PATH --world-size N,N --items-per-step N -- ARGUMENTS` gives."""

    path: str
    arguments: Sequence[str] = ()
    world_sizes: str = "1"
    items_per_step: str = ""

    @property
    def options(self) -> list[str]:
        """The words of a command that give the same, but for the arguments."""
        words = ["--script", self.path, "--world-size", self.world_sizes]
        return [*words, *(["--items-per-step", self.items_per_step] if self.items_per_step else [])]


def load_script_job(given: ScriptGiven, overrides: Sequence[str]) -> Job:
    """Write the job of a script and load it.

    Raises UsageError for world sizes that are no numbers, and JobError for what else is wrong, said
    of the option that gave it.
    """
    from raybench.job.model import job_from_text

    name = f"--script {given.path}"
    options: dict[KeyPath, str] = {
        ("workload", "path"): name,
        ("workload", "args"): f"{name} -- {shlex.join(given.arguments)}",
        ("workload", "items_per_step"): f"--items-per-step {given.items_per_step}",
        ("matrix", "world_size"): f"--world-size {given.world_sizes}",
    }
    return job_from_text(name, job_text(given), overrides, options)


def job_text(given: ScriptGiven) -> str:
    """Return the job file that the options stand for. Raises UsageError for other world sizes."""
    sizes = given.world_sizes.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(f"--world-size {given.world_sizes}: must be counts of ranks, as in 1,2,4")
    workload = {"kind": "script", "path": given.path, "args": shlex.join(given.arguments)}
    if given.items_per_step:
        workload["items_per_step"] = given.items_per_step
    # JSON is YAML.
    return (
        "version: 1\n"
        f"name: {json.dumps(name_after(PurePath(given.path), 'script'))}\n"
        f"workload: {json.dumps(workload, ensure_ascii=False)}\n"
        f"matrix: {{world_size: [{', '.join(str(int(size)) for size in sizes)}]}}\n"
    )


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
    from raybench.analysis.history import THRESHOLD
    from raybench.cli.compare import load_comparison

    base = against or _run_before(root, run_id, job.name)
    found = load_comparison(root, base, run_id, THRESHOLD).points
    unclear = {point.point_id for point in found if point.verdict == UNCLEAR}
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
