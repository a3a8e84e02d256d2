"""The command line, called in this process as users type it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from raybench import cli


class Answer(NamedTuple):
    """What a command ended with and wrote."""

    code: int
    out: str
    err: str


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
