"""The job of `raybench sweep --script train.py --world-size 1,2 -- --batch-size 64`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from raybench.errors import UsageError

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.problems import KeyPath

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


class ScriptGiven(NamedTuple):
    """What a command says of a script, in place of a job file."""

    path: str
    arguments: Sequence[str]
    world_sizes: str
    items_per_step: str

    @property
    def options(self) -> list[str]:
        """The words of a command that say so, but for the arguments."""
        words = ["--script", self.path, "--world-size", self.world_sizes]
        return [*words, *(["--items-per-step", self.items_per_step] if self.items_per_step else [])]


def load_script_job(given: ScriptGiven, overrides: Sequence[str]) -> Job:
    """Write the job of a script and load it. Raises JobError and UsageError."""
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
    """Write the job file that the options stand for. Raises UsageError."""
    sizes = given.world_sizes.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(f"--world-size {given.world_sizes}: must be counts of ranks, as in 1,2,4")
    name = _NOT_IN_NAMES.sub("-", PurePath(given.path).stem)[:64].lstrip("_.-") or "script"
    workload = {"kind": "script", "path": given.path, "args": shlex.join(given.arguments)}
    if given.items_per_step:
        workload["items_per_step"] = given.items_per_step
    # JSON is YAML.
    return (
        "version: 1\n"
        f"name: {json.dumps(name)}\n"
        f"workload: {json.dumps(workload, ensure_ascii=False)}\n"
        f"matrix: {{world_size: [{', '.join(str(int(size)) for size in sizes)}]}}\n"
    )
