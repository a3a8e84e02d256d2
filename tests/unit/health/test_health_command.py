"""`raybench health` refuses what cannot go well before it starts a worker."""

from typing import Any

import pytest

from raybench.errors import UsageError


@pytest.fixture
def examined(monkeypatch):
    """The devices that each check was asked for; none is made."""
    asked: list[Any] = []

    def examine(where, *_, **__):
        asked.append(where.only)
        raise UsageError("stopped")

    monkeypatch.setattr("raybench.health.check.examine", examine)
    return asked


def test_a_list_that_cannot_be_written_is_refused_before_the_check(tmp_path, examined, command):
    missing = tmp_path / "missing" / "healthy.txt"
    words = ("health", "-o", tmp_path, "--healthy-devices", missing)
    told = f"{missing}: cannot be written: No such file"
    assert told in command(*words, results=None).err
    assert examined == []


def test_only_the_devices_of_a_file_are_checked(tmp_path, examined, command):
    some = tmp_path / "some.txt"
    some.write_text("alpha:1  # the second worker\n")
    kept = tmp_path / "healthy.txt"
    kept.write_text("GPU-1\n")
    words = ("--devices", some, "--healthy-devices", kept)
    command("health", "-o", tmp_path, *words, results=None)
    assert [only.names for only in examined] == [("alpha:1",)]
    # The list of an earlier check stays until there is a new one.
    assert kept.read_text() == "GPU-1\n"
    missing = command("health", "-o", tmp_path, "--devices", tmp_path / "no.txt", results=None)
    assert "no.txt: No such file" in missing.err
