"""The command line, called in this process as users type it, and refusals of one line."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from raybench import cli

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "results" / "examples"


class Answer(NamedTuple):
    """What a command ended with and wrote."""

    code: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """The one line with which the command was refused, and wrote nothing else."""
        assert (self.code, self.out, self.err.count("\n")) == (2, "", 1), self
        return self.err


Command = Callable[..., Answer]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run `raybench WORDS --results tmp_path`; without the option where `results` is None."""

    def run(*words: object, results: Path | None = tmp_path) -> Answer:
        option = [] if results is None else ["--results", str(results)]
        monkeypatch.setattr(sys, "argv", ["raybench", *map(str, words), *option])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return Answer(int(stopped.value.code or 0), *capsys.readouterr())

    return run


def refusal_of(error: type[Exception], call: Callable[..., object], *given: object) -> str:
    """The message of the error that `call(*given)` raises, which is one line."""
    with pytest.raises(error) as caught:
        call(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_python(
    code: str, *words: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own. variables: of its environment."""
    command, env = [sys.executable, "-c", code, *map(str, words)], os.environ | variables
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
