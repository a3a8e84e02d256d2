"""The jobs that come with raybench: a question each, and how to cut it down to two CPU cores.

They are the files of `jobs/`, which the package has as `raybench/jobs`. The comment that a file
begins with is in paragraphs: the question, what there is to know, and in the last one the command
for a machine without GPUs.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from raybench.errors import UsageError
from raybench.job.model import Job, job_from_text
from raybench.job.plan import make_plan
from raybench.job.problems import did_you_mean, quote

_SCHEMA = re.compile(r"(?<=\$schema=)\S+")
_COMMAND = "raybench sweep "


@dataclass(frozen=True)
class Template:
    """A job file that comes with raybench. text: all of it."""

    name: str
    text: str

    @cached_property
    def _paragraphs(self) -> list[str]:
        _, *lines = takewhile(lambda line: line.startswith("#"), self.text.splitlines())
        bare = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
        return [" ".join(paragraph.split()) for paragraph in bare.split("\n\n")]

    @property
    def question(self) -> str:
        """What it answers."""
        return self._paragraphs[0]

    @property
    def cut(self) -> tuple[str, ...]:
        """What `--set` is to be given on a machine without GPUs; with it, two cores suffice."""
        command = self._paragraphs[-1].partition(_COMMAND)[2]
        _, *words = shlex.split(command)
        return tuple(word for word in words if word != "--set")

    @property
    def device_counts(self) -> list[int]:
        """How many devices its points need."""
        return sorted({point.world_size for point in make_plan(self.load()).points})

    def load(self, overrides: tuple[str, ...] = ()) -> Job:
        """Load the job. Raises JobError where overrides do not fit it."""
        return job_from_text(f"{self.name}.yaml", self.text, overrides)

    def text_for(self, path: Path) -> str:
        """Write the file for `path`: its command names that, and the schema lies beside it."""
        text = _SCHEMA.sub("job.schema.json", self.text, count=1)
        # It stands in a comment, which a line feed would end.
        name = shlex.quote(str(path)) if str(path).isprintable() else f"{self.name}.yaml"
        return text.replace(f"jobs/{self.name}.yaml", name)


def templates() -> list[Template]:
    """List the jobs by name."""
    folder = files("raybench").joinpath("jobs")
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return [
        Template(entry.name.removesuffix(".yaml"), entry.read_text(encoding="utf-8"))
        for entry in sorted(found, key=lambda entry: entry.name)
    ]


def template(name: str) -> Template:
    """Find the job with this name. Raises UsageError."""
    known = {one.name: one for one in templates()}
    if name not in known:
        guess = did_you_mean(name, known)
        message = f"--template: no job {quote(name)}{guess}; see: `raybench init --list`"
        raise UsageError(message.replace("?;", "? All of them:"))
    return known[name]
