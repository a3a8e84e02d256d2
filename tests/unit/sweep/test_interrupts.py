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
import ctypes, sys
from rich.console import Console
from raybench.cli.output import ConsoleListener
from raybench.sweep.interrupts import Interrupts
with Interrupts(ConsoleListener(Console(stderr=True))) as interrupts, interrupts.points_run():
    interrupts.in_flight = int(sys.argv[1])
    interrupts.farewell = lambda _: print("go on", flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("in native code", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


def test_the_second_ctrl_c_works_within_2_s_while_the_main_thread_is_stuck():
    command = [sys.executable, "-c", STUCK, "3"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        shown_after_s = time.monotonic()
        said, stopping = process.communicate(timeout=30)
        took_s = time.monotonic() - shown_after_s
    assert process.returncode == 130
    assert said == "go on\n"
    assert stopping == ("finishing the 3 points in flight, then stopping; Ctrl-C again stops now\n")
    # 2 s, and what a busy machine needs; the program alone would go on for 30 s.
    assert took_s < 8


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


def test_the_second_ctrl_c_ends_the_process_where_nothing_may_be_raised():
    with subprocess.Popen(
        [sys.executable, "-c", HELD_BACK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        shown_after_s = time.monotonic()
        _, said = process.communicate(timeout=30)
        took_s = time.monotonic() - shown_after_s
    assert process.returncode == 130
    assert said == "\x1b[?25l\x1b[?25hinterrupted\n"
    # 2 s, and what a busy machine needs; the program alone would go on for 30 s.
    assert took_s < 8
