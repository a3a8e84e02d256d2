"""Ctrl-C and SIGTERM: real signals, in processes of their own where they end the process."""

import io
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from raybench.cli.output import ConsoleListener
from raybench.sweep.interrupts import Interrupts


def tell(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def entered():
    return Interrupts(ConsoleListener(Console(file=io.StringIO())))


def interrupted_before_points(reached):
    with entered():
        tell()
        reached.append("went on")


def interrupted_twice_while_points_run(reached):
    with entered() as interrupts, interrupts.points_run():
        reached.append(f"stopping: {interrupts.stopping}")
        tell()
        reached.append(f"stopping: {interrupts.stopping}")
        tell()
        reached.append("went on")


def terminated_while_points_run(reached):
    with entered() as interrupts, interrupts.points_run():
        tell(signal.SIGTERM)
        reached.append("went on")


def interrupted_again_while_rows_are_written(reached):
    with entered():
        try:
            tell()
        finally:
            tell()
            reached.append("written")


def interrupted_once_while_held_back(reached):
    with entered() as interrupts, interrupts.held_back(math.inf):
        tell()
        reached.append("the end")


def interrupted_twice_while_held_back(reached):
    with entered() as interrupts, interrupts.held_back():
        tell()
        reached.append("after the first")
        tell()
        reached.append("after the second")


def interrupted_twice_while_held_back_for_good(reached):
    with entered() as interrupts, interrupts.held_back(math.inf):
        tell()
        tell()
        reached.append("the end")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (interrupted_before_points, []),
        (interrupted_twice_while_points_run, ["stopping: False", "stopping: True"]),
        (terminated_while_points_run, []),
        (interrupted_again_while_rows_are_written, ["written"]),
        (interrupted_once_while_held_back, ["the end"]),
        (interrupted_twice_while_held_back, ["after the first"]),
        (interrupted_twice_while_held_back_for_good, ["the end"]),
    ],
)
def test_what_asks_to_stop_now_raises_once_and_nothing_else_does(block, expected):
    reached = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        block(reached)
    assert reached == expected
    assert signal.getsignal(signal.SIGTERM) is before


# A mutex that is locked twice: native code that no signal gets out of.
STUCK = """
import ctypes
from rich.console import Console
from raybench.cli.output import ConsoleListener
from raybench.sweep.interrupts import Interrupts
with Interrupts(ConsoleListener(Console(stderr=True))) as interrupts, interrupts.points_run():
    interrupts.in_flight = 3
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
from raybench.cli.output import ConsoleListener
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
            "finishing the 3 points in flight, then stopping; Ctrl-C again stops now\n",
        ),
        (HELD_BACK, "", "\x1b[?25l\x1b[?25hinterrupted\n"),
    ],
    ids=["in native code", "where nothing may be raised"],
)
def test_the_second_ctrl_c_ends_the_process_within_2_s(program, out, err):
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
