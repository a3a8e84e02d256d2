"""A process is brought back to what it was, or what a workload has left in it is named."""

import ctypes
import gc
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from state_changes import STATE_CHANGES

from raybench.worker.state import ProcessState, process_settings

CPU = torch.device("cpu")
SETTINGS = {setting.name: setting for setting in process_settings()}


@pytest.fixture
def state():
    return ProcessState(CPU)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_is_restored_silently(name):
    state, before = ProcessState(CPU), SETTINGS[name].read()
    STATE_CHANGES[name]()
    changed = SETTINGS[name].read() != before
    assert state.restore() == ()
    assert changed
    assert SETTINGS[name].read() == before


def test_a_setting_that_cannot_be_restored_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    state = ProcessState(CPU)
    os.chdir(tmp_path)
    (tmp_path / "gone").rmdir()
    assert state.restore() == ("a changed working directory",)


def test_garbage_collection_changes_no_mode_later(state):
    def hold_mode():
        with torch.enable_grad():
            yield

    torch.set_grad_enabled(False)
    held = [hold_mode()]
    next(held[0])
    held.append(held)  # only a collection ends it now, and switches the gradients off again
    del held
    assert state.restore() == ()
    gc.collect()
    assert torch.is_grad_enabled()


def test_a_thread_about_to_end_is_waited_for(state):
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    assert state.restore() == ()


def test_the_thread_of_a_progress_bar_is_ended(state, monkeypatch):
    stop = threading.Event()
    monitor = SimpleNamespace(exit=stop.set)
    bars = SimpleNamespace(tqdm=SimpleNamespace(monitor=monitor))
    monkeypatch.setitem(sys.modules, "tqdm.std", bars)
    threading.Thread(target=stop.wait, name="tqdm_monitor").start()
    assert state.restore() == ()
    assert bars.tqdm.monitor is None


def test_a_sleeping_compiler_timer_is_ignored(state):
    from torch._inductor.compile_worker.timer import Timer

    timer = Timer(4, lambda: None)
    timer.record_call()
    timer.quit()
    assert state.restore() == ()


def test_only_running_child_processes_are_reported(state):
    rename = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'odd\\xff) Z', 0, 0, 0)"
    script = f"{rename}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert state.restore() == ("1 child process (odd\ufffd) Z)",)
        child.kill()
        time.sleep(0.1)
        assert state.restore() == ()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls have other numbers")
def test_a_child_that_ends_without_a_signal_is_found(state):
    clone, no_flags, wait_for_all = 56, 0, 0x4000_0000
    child = ctypes.CDLL(None).syscall(clone, no_flags, 0, 0, 0, 0)
    if child == 0:
        signal.pause()
    try:
        [leftover] = state.restore()
        assert leftover.startswith("1 child process (")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, wait_for_all)


def test_processes_started_before_the_point_are_ignored(state):
    with subprocess.Popen(["sleep", "60"]) as child:
        state.begin()
        assert state.restore() == ()
        child.kill()
