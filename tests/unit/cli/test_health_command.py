"""`raybench health` refuses what cannot go well before it starts a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from raybench import cli
from raybench.errors import UsageError
from raybench.sweep.run_state import RunTarget


def run(*words: str) -> None:
    CliRunner().invoke(cli.raybench, ["health", *words], catch_exceptions=False)


def test_a_list_that_cannot_be_written_is_refused_before_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "raybench.doctor.health.check.examine", lambda *_, **__: pytest.fail("checked")
    )
    missing = tmp_path / "missing" / "healthy.txt"
    with pytest.raises(UsageError, match=r"healthy\.txt: cannot be written: No such file"):
        run("-o", str(tmp_path / "results"), "--healthy-devices", str(missing))


def test_only_the_devices_of_a_file_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def examine(where: RunTarget, *_: object, **__: object) -> None:
        asked.append(where.only)
        raise UsageError("stopped")

    monkeypatch.setattr("raybench.doctor.health.check.examine", examine)
    some = tmp_path / "some.txt"
    some.write_text("alpha:1  # the second worker\n")
    with pytest.raises(UsageError, match="stopped"):
        run("-o", str(tmp_path / "results"), "--devices", str(some))
    [only] = asked
    assert only is not None
    assert only.names == ("alpha:1",)
    with pytest.raises(UsageError, match=r"missing\.txt: No such file"):
        run("-o", str(tmp_path / "results"), "--devices", str(tmp_path / "missing.txt"))


def test_a_list_of_an_earlier_check_stays_until_there_is_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(*_: object, **__: object) -> None:
        raise UsageError("stopped")

    monkeypatch.setattr("raybench.doctor.health.check.examine", examine)
    kept = tmp_path / "healthy.txt"
    kept.write_text("GPU-1\n")
    with pytest.raises(UsageError, match="stopped"):
        run("-o", str(tmp_path / "results"), "--healthy-devices", str(kept))
    assert kept.read_text() == "GPU-1\n"
