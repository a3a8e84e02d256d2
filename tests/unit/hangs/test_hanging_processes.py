"""Real processes that hang, asked from outside."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from raybench.hangs import processes, stacks
from raybench.hangs.evidence import RankPlace, collect
from raybench.hangs.processes import NoAnswer
from raybench.hangs.stacks import Wait
from raybench.records.hang import RecorderState

BEGIN = """\
import ctypes, os, sys, threading, time
from raybench.hangs.responder import Responder
responder = Responder()
responder.serve()
def ready(): print(os.getpid(), flush=True)
"""
SLEEPS = "ready()\ntime.sleep(600)\n"
LOCKED = "lock = threading.Lock()\nlock.acquire()\nready()\nlock.acquire()\n"
EVENT = "ready()\nthreading.Event().wait()\n"
LOOPS = "ready()\nwhile True:\n    pass\n"
# C code that keeps the interpreter lock.
HOLDS = """\
lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
ready()
lock(mutex)
"""
# The thread that runs the rank need not be the main one.
THREAD = """\
def run():
    responder.watch_this_thread()
    ready()
    threading.Event().wait()
threading.Thread(target=run, daemon=True).start()
while True:
    time.sleep(1)
"""


@contextmanager
def running(tmp_path, code, begin=BEGIN):
    file = tmp_path / "train.py"
    file.write_text(begin + code)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process.pid, int(process.stdout.readline())
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def asked(pid, timeout_s=5.0):
    time.sleep(0.3)  # until it is stuck
    (answer,) = processes.ask([pid], timeout_s)
    frames = stacks.read(answer.stack)
    return answer, frames, stacks.classify_wait(frames, answer.facts.kernel_wait)


@pytest.mark.parametrize(
    ("code", "wait", "line"),
    [
        (SLEEPS, Wait.SLEEP, 7),
        (LOCKED, Wait.LOCK, 9),
        (EVENT, Wait.LOCK, 7),
        (THREAD, Wait.LOCK, 9),
        (LOOPS, Wait.NOTHING_KNOWN, None),
    ],
)
def test_a_stuck_rank_shows_its_line(tmp_path, code, wait, line):
    with running(tmp_path, code) as (pid, _):
        answer, frames, known = asked(pid)
    assert known is wait
    assert stacks.find_user_frame(frames).path.endswith("train.py")
    assert line in (None, stacks.find_user_frame(frames).line)
    assert isinstance(answer.dumps, processes.Dumps)  # empty: torch is not loaded
    assert not answer.dumps.data


def test_without_told_handlers_no_signal_is_sent(tmp_path, monkeypatch):
    # As on gVisor, whose kernel tells no handlers: the thread of the responder writes the stack.
    monkeypatch.setattr(processes, "has_handler", lambda *_: False)
    with running(tmp_path, LOCKED) as (pid, _):
        answer, frames, wait = asked(pid)
    assert str(stacks.find_user_frame(frames)) == "train.py:9"
    assert wait is Wait.LOCK
    assert answer.dumps.stack == answer.stack


def test_finding_a_process_leaves_no_file_open(tmp_path):
    with running(tmp_path, SLEEPS) as (pid, _):
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert processes.rank_process(os.getpid()) == pid
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_handlers_are_read_from_the_kernel(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nSigCgt:\t0000000000000400\n")
    assert processes.has_handler(status, 11)
    assert not processes.has_handler(status, 10)
    status.write_text("Name:\tpython\n")
    assert not processes.has_handler(status, 11)
    assert not processes.has_handler(tmp_path / "gone", 11)


def test_a_held_interpreter_lock_shows_the_stack(tmp_path):
    with running(tmp_path, HOLDS) as (pid, _):
        answer, frames, _ = asked(pid, timeout_s=1.0)
    assert answer.dumps is NoAnswer.LATE
    assert str(stacks.find_user_frame(frames)) == "train.py:9"


def test_a_stopped_process_is_seen_as_stopped(tmp_path):
    with running(tmp_path, SLEEPS) as (pid, _):
        os.kill(pid, signal.SIGSTOP)
        answer, frames, _ = asked(pid, timeout_s=1.0)
        os.kill(pid, signal.SIGCONT)
        assert answer.facts.is_stopped
        assert (frames, answer.dumps) == ((), NoAnswer.NOT_RUNNING)
        # It was sent no signal that it would act on now.
        again, frames, _ = asked(pid)
        assert not again.facts.is_stopped
        assert frames


def test_a_dead_process_has_ended(tmp_path):
    with running(tmp_path, SLEEPS) as (pid, _):
        pass
    answer, frames, _ = asked(pid)
    assert answer.facts.has_ended
    assert (frames, answer.dumps) == ((), NoAnswer.NO_RESPONDER)


def test_a_process_without_responder_gets_no_signal(tmp_path):
    begin = "import os, time\ndef ready(): print(os.getpid(), flush=True)\n"
    with running(tmp_path, SLEEPS, begin=begin) as (pid, _):
        answer, _, _ = asked(pid, timeout_s=1.0)
        assert answer.dumps is NoAnswer.NO_RESPONDER


def test_a_program_that_took_the_signal_survives(tmp_path):
    reset = "import signal\nfor n in range(34, 65): signal.signal(n, signal.SIG_DFL)\n"
    with running(tmp_path, reset + SLEEPS) as (pid, _):
        answer, frames, _ = asked(pid)
        # The thread of the responder has written the stack.
        assert str(stacks.find_user_frame(frames)) == "train.py:9"
        assert isinstance(answer.dumps, processes.Dumps)


def test_the_process_below_a_worker_is_the_rank(tmp_path):
    # As a worker with a script, which has a child that holds the files of its parent.
    (tmp_path / "script.py").write_text(BEGIN + "if os.fork(): ready()\n" + "time.sleep(600)\n")
    code = (
        "import subprocess\n"
        f"child = subprocess.Popen([sys.executable, {str(tmp_path / 'script.py')!r}])\n"
        "child.wait()\n"
    )
    with running(tmp_path, code) as (worker, script):
        assert worker != script
        assert processes.rank_process(worker) == script
        time.sleep(0.5)  # until it sleeps
        place = RankPlace(rank=0, host="here", device_kind="cpu", device_index=0, worker_pid=worker)
        (found,) = collect([place], 5.0, world_size=1)
        children = [int(pid) for pid in _children(script)]
    for pid in (*children, script):
        os.kill(pid, signal.SIGKILL)
    assert found.process.pid == script
    assert (str(found.line), found.wait) == ("script.py:7", Wait.SLEEP)
    assert found.recorder is RecorderState.OFF


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
