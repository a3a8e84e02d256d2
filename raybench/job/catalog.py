"""The jobs that come with raybench, with a question each, and files to start from.

They are the files of `jobs/`, which the package has as `raybench/jobs`.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from raybench.errors import UsageError
from raybench.job.model import Job, job_from_text
from raybench.job.plan import make_plan
from raybench.job.problems import did_you_mean, quote

_NAME = re.compile(r"^name: \w+", re.MULTILINE)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_SCHEMA = re.compile(r"(?<=\$schema=)\S+")


@dataclass(frozen=True)
class Template:
    """A job file that comes with raybench. text: all of it."""

    name: str
    text: str

    @cached_property
    def job(self) -> Job:
        """Return the job as it is written."""
        return job_from_text(f"{self.name}.yaml", self.text)

    @property
    def question(self) -> str:
        """Return what the job asks."""
        return self.job.question

    @property
    def device_counts(self) -> list[int]:
        """Return the numbers of devices that its points need, in ascending order."""
        return sorted({point.world_size for point in make_plan(self.job).points})

    def text_for(self, path: Path, name: str) -> str:
        """Return the text of a file at `path`, whose job has this name.

        Its command names the path, and its schema is job.schema.json beside it.
        """
        text = _SCHEMA.sub("job.schema.json", self.text, count=1)
        # In quotes where YAML would take it for a number or for true.
        is_plain = name[0].isalpha() and name.lower() not in ("true", "false", "null")
        text = _NAME.sub(f"name: {name if is_plain else json.dumps(name)}", text, count=1)
        # It stands in a comment, which a line feed would end.
        here = shlex.quote(str(path)) if str(path).isprintable() else f"{self.name}.yaml"
        return text.replace(f"jobs/{self.name}.yaml", here)


def templates() -> list[Template]:
    """Return the jobs that come with raybench, sorted by name."""
    folder = files("raybench").joinpath("jobs")
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return [
        Template(entry.name.removesuffix(".yaml"), entry.read_text(encoding="utf-8"))
        for entry in sorted(found, key=lambda entry: entry.name)
    ]


def name_after(path: Path, otherwise: str) -> str:
    """Return a name for a job, made of the name of a file; `otherwise` where nothing is left."""
    return _NOT_IN_NAMES.sub("-", path.stem)[:64].lstrip("_.-") or otherwise


def starter() -> Template:
    """Return the annotated job to start from, which is not one of `templates`."""
    file = files("raybench").joinpath("job_template.yaml")
    return Template("job", file.read_text(encoding="utf-8"))


def template(name: str) -> Template:
    """Return the job with this name. Raises UsageError, with the nearest one, where none has it."""
    known = {one.name: one for one in templates()}
    if name not in known:
        guess = did_you_mean(name, known)
        message = f"--template: no job {quote(name)}{guess}; see: `raybench init --list`"
        raise UsageError(message.replace("?;", "? All of them:"))
    return known[name]
