"""Ctrl-C and SIGTERM: real signals, in processes of their own where they end the process."""

import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest
from rich.console import Console

from raybench.api.progress import ConsoleListener
from raybench.sweep.interrupts import Interrupts


def entered(**options):
    return Interrupts(ConsoleListener(Console(file=io.StringIO())), **options)


def held_back_for_good(interrupts):
    return interrupts.held_back(math.inf)


def interrupted(block, sent, reached):
    with entered() as interrupts, block(interrupts):
        assert not interrupts.stopping
        for name in sent:
            os.kill(os.getpid(), signal.Signals[name])
            reached.append(interrupts.stopping)


@pytest.mark.parametrize(
    ("block", "sent", "expected"),
    [
        (nullcontext, ["SIGINT"], []),
        (Interrupts.points_run, ["SIGINT", "SIGINT"], [True]),
        (Interrupts.points_run, ["SIGTERM"], []),
        (Interrupts.held_back, ["SIGINT", "SIGINT"], [True]),
        (held_back_for_good, ["SIGINT"], [True]),
        (held_back_for_good, ["SIGINT", "SIGINT"], [True, True]),
    ],
)
def test_each_block_decides_when_a_signal_interrupts(block, sent, expected):
    """expected: whether it is stopping, after each signal that lets the block go on."""
    reached, before = [], signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupted(block, sent, reached)
    assert reached == expected
    assert signal.getsignal(signal.SIGTERM) is before


def interrupted_while_rows_are_written(written):
    with entered():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            written.append(True)


def test_a_second_signal_does_not_interrupt_writing():
    written = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_while_rows_are_written(written)
    assert written


# A mutex that is locked twice: native code that no signal gets out of.
STUCK = """
import ctypes
from rich.console import Console
from raybench.api.progress import ConsoleListener
from raybench.sweep.interrupts import Interrupts
with Interrupts(ConsoleListener(Console(stderr=True))) as interrupts, interrupts.points_run():
    interrupts.in_flight = 2
    interrupts.farewell = lambda _: print("go on", flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("in native code", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


# As in `ray.init`: interrupted, it would crash the process at its exit.
HELD_BACK = """
import math, time
from rich.console import Console
from raybench.api.progress import ConsoleListener
from raybench.sweep.interrupts import Interrupts
console = Console(stderr=True, force_terminal=True)
with Interrupts(ConsoleListener(console)) as interrupts, interrupts.held_back(math.inf):
    console.show_cursor(False)
    print("held", flush=True)
    for _ in range(300):
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("program", "out", "err"),
    [
        (
            STUCK,
            "go on\n",
            "finishing the 2 points in flight, then stopping; Ctrl-C again stops now\n",
        ),
        (HELD_BACK, "", "\x1b[?25l\x1b[?25hinterrupted\n"),
    ],
    ids=["in native code", "where nothing may be raised"],
)
def test_the_second_ctrl_c_ends_the_process_promptly(program, out, err):
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        shown_after_s = time.monotonic()
        assert process.communicate(timeout=30) == (out, err)
        took_s = time.monotonic() - shown_after_s
    assert process.returncode == 130
    # 2 s, and what a busy machine needs; the program alone would go on for 30 s.
    assert took_s < 8


def signals_until_raised(most):
    """How many of these signals a guest takes until KeyboardInterrupt is raised."""
    for sent in range(1, most + 1):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            return sent
    return None


def test_a_guest_raises_again_and_restores_sigint():
    usual = signal.getsignal(signal.SIGINT)
    with entered(is_guest=True) as interrupts:
        with interrupts.points_run():
            assert signals_until_raised(5) == 2
        # The user insists, while the sweep cleans up.
        assert [signals_until_raised(5), signals_until_raised(5)] == [1, 1]
    assert signal.getsignal(signal.SIGINT) is usual


def test_a_guest_sends_sigterm_again_at_the_end():
    came = []
    usual = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), entered(is_guest=True):
            os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, usual)


def test_a_guest_in_another_thread_leaves_signals_alone():
    handlers = []

    def enter():
        with entered(is_guest=True) as interrupts:
            interrupts.take_signals()
            handlers.append((signal.getsignal(signal.SIGINT), interrupts.stopping))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [(signal.getsignal(signal.SIGINT), False)]


# The main thread hangs in native code; a process of the user must outlive that.
GUEST = """
import sys, time
from rich.console import Console
from raybench.api.progress import ConsoleListener
from raybench.sweep.interrupts import Interrupts
with Interrupts(ConsoleListener(Console(stderr=True)), is_guest=True) as interrupts:
    with interrupts.points_run():
        print("runs", flush=True)
        until_s = time.monotonic() + 4
        while time.monotonic() < until_s:
            try:
                time.sleep(0.1)
            except KeyboardInterrupt:
                pass
print("lives", flush=True)
"""


@pytest.mark.long
def test_no_signal_ends_a_guest():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", GUEST], stdout=pipe, text=True) as process:
        process.stdout.readline()
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.communicate(timeout=60)[0] == "lives\n"
    assert process.returncode == 0
