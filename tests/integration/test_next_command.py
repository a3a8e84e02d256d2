"""The command that a report ends with, taken from its text and run."""

import re
import shlex

import pytest

from tests.integration.sweeps import RAYBENCH, raybench

OWN = """\
from pathlib import Path


class Own:
    def __init__(self, context, *, folder: str) -> None:
        self.items_per_step = context.batch_size
        self.broken = Path(folder) / "broken"

    def step(self) -> None:
        if self.items_per_step > 1 and self.broken.exists():
            raise RuntimeError("a part is missing: " + "long " * 60 + "; install the part")
"""
JOB = """\
version: 1
name: small
workload: {{kind: 'own:Own', folder: {folder}}}
matrix: {{batch_size: [1, 2, 3]}}
measure: quick
"""


def follow(done, folder, expected, *more):
    """Run the command behind `Next`, which must have the expected words, with more options."""
    [text] = re.findall(r"^Next[^:]*:\s(.*)^`", done.stdout, re.MULTILINE | re.DOTALL)
    words = shlex.split(text.replace("\\\n", " "))
    assert words[: len(RAYBENCH)][1:] == RAYBENCH[1:]
    assert expected in " ".join(words)
    return raybench(*words[len(RAYBENCH) :], *more, cwd=folder)


@pytest.mark.long
def test_each_next_command_runs_as_printed(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "job.yaml").write_text(JOB.format(folder=tmp_path))
    (tmp_path / "broken").touch()
    done = raybench("sweep", "job.yaml", "--address", "local", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    told = " ".join(done.stdout.split())
    assert "2 points: error: RuntimeError: a part is missing:" in told
    assert "; install the part, at own.py:11 in step. At " in told
    shown = raybench("show", "latest", cwd=tmp_path)
    assert "at own.py:11 in step" in " ".join(shown.stdout.split())
    (tmp_path / "broken").unlink()
    done = follow(done, tmp_path, "--retry-failed")
    assert done.returncode == 0, done.stderr
    planned = follow(done, tmp_path, "--set measure.rounds=3", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "3 rounds" in planned.stdout
