"""Locks of devices across sweeps: real processes, real files, and files that mean harm."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from raybench.cluster.device_locks import CPU, FOLDER_VARIABLE, DeviceLocks, this_process

HOLD = """
import sys, time
from raybench.cluster.device_locks import DeviceLocks, this_process
locks = DeviceLocks()
claim = locks.claim(sys.argv[2:], this_process(sys.argv[1]), shared=True)
print(claim.problem or "held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def other():
    """Another sweep, which has the processors and one GPU."""
    command = [sys.executable, "-c", HOLD, "run other-1", CPU, "GPU-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def me(what="run mine-1"):
    return this_process(what)


def claimed(locks, holder=None, *, shared=False):
    """What is said of the others where the processors are claimed."""
    found = locks.claim([CPU], holder or me(), shared=shared)
    assert not found.problem
    return [one.what for one in found.others.get(CPU, ())]


def test_a_device_that_another_sweep_has_is_refused_and_nothing_is_held(other):
    locks = DeviceLocks()
    claim = locks.claim(["GPU-0", "GPU-1"], me(), shared=False)
    [holder] = claim.others.pop("GPU-1")
    assert not claim.others
    assert (holder.what, holder.process_id) == ("run other-1", other.pid)
    assert "run other-1 of" in str(holder)
    assert f"(process {other.pid} on " in str(holder)
    assert not DeviceLocks().claim(["GPU-0"], me(), shared=False).others


def test_the_kernel_frees_the_devices_of_a_killed_sweep(other):
    [holder] = DeviceLocks().others([CPU]).others[CPU]
    assert not holder.has_ended
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert holder.has_ended
    locks = DeviceLocks()
    assert not locks.claim([CPU, "GPU-1"], me(), shared=False).others
    locks.close()


def test_who_shares_takes_its_place_and_keeps_later_ones_out(other):
    shared = DeviceLocks()
    assert claimed(shared, me("run b"), shared=True) == ["run other-1"]
    other.kill()
    other.wait()
    assert claimed(DeviceLocks(), me("run c")) == ["run b"]
    shared.close()
    assert claimed(DeviceLocks(), me("run c")) == []


def test_who_shares_beside_one_alone_is_seen_and_has_the_device_after_it():
    alone, shared = DeviceLocks(), DeviceLocks()
    mine = me("run a")
    assert claimed(alone, mine) == []
    assert claimed(shared, me("run b"), shared=True) == ["run a"]
    assert [one.what for one in alone.others([CPU], mine.sweep).others[CPU]] == ["run b"]
    alone.close()
    assert claimed(DeviceLocks(), me("run c")) == ["run b"]
    shared.close()
    assert not DeviceLocks().others([CPU]).others


def test_two_nodes_of_one_sweep_on_one_host_do_not_keep_each_other_out():
    first, second, mine = DeviceLocks(), DeviceLocks(), me()
    for locks in (first, second, first):
        assert claimed(locks, mine) == []
    first.close()
    assert claimed(DeviceLocks())
    second.close()
    assert not DeviceLocks().others([CPU]).others


def test_of_two_sweeps_that_start_at_once_one_has_the_device(monkeypatch):
    flock, start, took = fcntl.flock, threading.Barrier(2), []

    def in_two_steps(file, mode):
        """Turn a lock into a shared one as the kernel does, with a longer moment between."""
        if mode & fcntl.LOCK_SH:
            flock(file, fcntl.LOCK_UN)
            time.sleep(0.2)
        flock(file, mode)

    def claim():
        locks, mine = DeviceLocks(), me()
        start.wait()
        if not claimed(locks, mine):
            took.append(locks)

    monkeypatch.setattr(fcntl, "flock", in_two_steps)
    threads = [threading.Thread(target=claim) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 1


# Drops its rights after the imports, for which it may need those of who runs the tests.
STRANGER = HOLD.replace(
    "locks =", "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\nlocks =", 1
)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_two_users_lock_the_same_file_and_neither_can_remove_it(monkeypatch):
    with TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        folder = Path(place, "locks")
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        locks = DeviceLocks()
        assert claimed(locks, shared=True) == []
        assert folder.stat().st_mode & 0o7777 == 0o1777
        assert (folder / CPU).stat().st_mode & 0o777 == 0o666
        command = [sys.executable, "-c", STRANGER, "run other-1", CPU]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "held\n"
            [other] = locks.others([CPU], me().sweep).others[CPU][1:]
            assert (other.what, other.process_id) == ("run other-1", process.pid)
            process.kill()
        locks.close()


@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "pipe"])
def test_what_is_planted_in_the_place_of_a_file_is_not_followed_and_told(kind, folder, tmp_path):
    folder.mkdir()
    victim, place = tmp_path / "victim", folder / CPU
    victim.write_text("precious")
    make = {"link": place.symlink_to, "hard link": place.hardlink_to}
    make.get(kind, lambda _: place.mkdir() if kind == "folder" else os.mkfifo(place))(victim)
    assert str(folder) in DeviceLocks().claim([CPU], me(), shared=False).problem
    assert victim.read_text() == "precious"


def test_a_folder_that_is_a_link_gives_no_locks_and_says_so(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    claim = DeviceLocks().claim([CPU], me(), shared=False)
    assert str(folder) in claim.problem
    assert not list((tmp_path / "elsewhere").iterdir())


STRANGE = [b"", b"\xff\xfe", b"[1]", b"9" * 5000, b"[" * 2048, b'{"process_id": 1e400, "what": 3}']


@pytest.mark.parametrize("content", STRANGE)
def test_what_a_line_says_is_not_believed(folder, content):
    locks = DeviceLocks()
    locks.claim([CPU], me(), shared=False)
    (folder / CPU).write_bytes(content)
    [holder] = DeviceLocks().others([CPU]).others[CPU]
    assert str(holder) == "unknown of unknown (process 0 on unknown)"
    assert not holder.has_ended
    locks.close()


def test_what_a_line_says_is_shown_on_one_short_line():
    locks = DeviceLocks()
    evil = replace(me(), what="run \x1b[31m\n\u202e" + "x" * 500, process_id=2**40)
    locks.claim([CPU], evil, shared=False)
    [holder] = DeviceLocks().others([CPU]).others[CPU]
    assert str(holder).isprintable()
    assert len(str(holder)) < 500
    assert holder.process_id == 0
    locks.close()
