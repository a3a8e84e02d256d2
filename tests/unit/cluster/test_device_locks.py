"""Locks of devices across sweeps: real processes, real files, and files that mean harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raybench.cluster.device_locks import CPU, FOLDER_VARIABLE, DeviceLocks, Holder, this_process

HOLD = """
import sys, time
from raybench.cluster.device_locks import DeviceLocks, this_process
locks = DeviceLocks()
claim = locks.claim(sys.argv[2:], this_process(sys.argv[1]), shared=True)
print(claim.problem or "held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another sweep, which has the processors and one GPU."""
    command = [sys.executable, "-c", HOLD, "run other-1", CPU, "GPU-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def me(what: str = "run mine-1") -> Holder:
    return this_process(what)


def test_a_device_that_another_sweep_has_is_refused_and_nothing_is_held(
    other: subprocess.Popen[str],
) -> None:
    locks = DeviceLocks()
    claim = locks.claim(["GPU-0", "GPU-1"], me(), shared=False)
    [holder] = claim.others.pop("GPU-1")  # type: ignore[attr-defined]
    assert not claim.others
    assert (holder.what, holder.process_id) == ("run other-1", other.pid)
    assert "run other-1 of" in str(holder)
    assert f"(process {other.pid} on " in str(holder)
    assert not DeviceLocks().claim(["GPU-0"], me(), shared=False).others


def test_the_kernel_frees_the_devices_of_a_killed_sweep(other: subprocess.Popen[str]) -> None:
    [holder] = DeviceLocks().others([CPU]).others[CPU]
    assert not holder.has_ended
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert holder.has_ended
    locks = DeviceLocks()
    assert not locks.claim([CPU, "GPU-1"], me(), shared=False).others
    locks.close()


def test_who_shares_takes_its_place_and_keeps_later_ones_out(other: subprocess.Popen[str]) -> None:
    shared = DeviceLocks()
    assert [one.what for one in shared.claim([CPU], me("run b"), shared=True).others[CPU]] == [
        "run other-1"
    ]
    other.kill()
    other.wait()
    claim = DeviceLocks().claim([CPU], me("run c"), shared=False)
    assert [one.what for one in claim.others[CPU]] == ["run b"]
    shared.close()
    assert not DeviceLocks().claim([CPU], me("run c"), shared=False).others


def test_two_nodes_of_one_sweep_on_one_host_do_not_keep_each_other_out() -> None:
    first, second, mine = DeviceLocks(), DeviceLocks(), me()
    assert not first.claim([CPU], mine, shared=False).others
    assert not second.claim([CPU], mine, shared=False).others
    first.close()
    assert DeviceLocks().claim([CPU], me(), shared=False).others
    second.close()


def test_a_sweep_may_claim_what_it_holds_again() -> None:
    locks, mine = DeviceLocks(), me()
    for _ in range(3):
        assert not locks.claim([CPU], mine, shared=False).others
    locks.close()
    assert not DeviceLocks().others([CPU]).others


def test_others_may_lock_and_nobody_may_remove_anothers_file(folder: Path) -> None:
    locks = DeviceLocks()
    locks.claim([CPU], me(), shared=False)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert (folder / "cpu.0").stat().st_mode & 0o777 == 0o666
    locks.close()


def test_a_link_in_the_place_of_a_lock_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "cpu.0").symlink_to(victim)
    os.link(victim, folder / "cpu.1")
    (folder / "cpu.2").mkdir()
    os.mkfifo(folder / "cpu.3")
    locks = DeviceLocks()
    claim = locks.claim([CPU], me(), shared=False)
    assert (claim.others, claim.problem) == ({}, "")
    assert victim.read_text() == "precious"
    assert json.loads((folder / "cpu.4").read_text())["what"] == "run mine-1"
    assert [one.what for one in DeviceLocks().others([CPU]).others[CPU]] == ["run mine-1"]
    locks.close()


def test_a_folder_that_is_a_link_gives_no_locks_and_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    claim = DeviceLocks().claim([CPU], me(), shared=False)
    assert str(folder) in claim.problem
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[1]", b"9" * 5000, b"[" * 2048, b'{"process_id": 1e400, "what": 3}'],
)
def test_what_a_slot_says_is_not_believed(folder: Path, content: bytes) -> None:
    locks = DeviceLocks()
    locks.claim([CPU], me(), shared=False)
    (folder / "cpu.0").write_bytes(content)
    [holder] = DeviceLocks().others([CPU]).others[CPU]
    assert str(holder) == "unknown of unknown (process 0 on unknown)"
    assert not holder.has_ended
    locks.close()


def test_what_a_slot_says_is_shown_on_one_short_line(folder: Path) -> None:
    locks = DeviceLocks()
    evil = replace(me(), what="run \x1b[31m\n\u202e" + "x" * 500, process_id=2**40)
    locks.claim([CPU], evil, shared=False)
    [holder] = DeviceLocks().others([CPU]).others[CPU]
    assert str(holder).isprintable()
    assert len(str(holder)) < 500
    assert holder.process_id == 0
    locks.close()


def test_who_holds_the_gate_for_ever_keeps_nobody_out(folder: Path) -> None:
    import fcntl

    DeviceLocks().others([CPU])
    with (folder / "gate").open("rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        begun_s = time.monotonic()
        locks = DeviceLocks()
        assert not locks.claim([CPU], me(), shared=False).others
        assert time.monotonic() - begun_s < 15
    locks.close()
