"""Timers and signal handlers that a class of the user's leaves behind end with their point."""

import pytest

from tests.integration.sweeps import cpu_sweep, table, write_text

pytestmark = pytest.mark.long

CLASS = """\
import faulthandler
import signal
import time

HANDLED = (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)


def handle(number, frame):
    raise TimeoutError(signal.Signals(number).name)


def handlers():
    return [signal.getsignal(number) for number in HANDLED]


class Leaving:
    flops_per_step = items_per_step = 1
    usual = None

    def __init__(self, context, *, leaves: str) -> None:
        Leaving.usual = Leaving.usual or handlers()
        assert handlers() == Leaving.usual
        self._leaves = leaves

    def step(self) -> None:
        until_s = time.monotonic() + 0.01
        while time.monotonic() < until_s:  # timers of the processor's time run too
            pass

    def close(self) -> None:
        if self._leaves == "handlers":
            for number in HANDLED:
                signal.signal(number, handle)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
            signal.raise_signal(signal.SIGUSR2)  # of this thread: it stays pending
            signal.alarm(1)
        elif self._leaves == "alarm":
            signal.alarm(1)
        elif self._leaves == "stacks":
            faulthandler.dump_traceback_later(1, exit=True)
        elif self._leaves != "nothing":
            signal.setitimer(getattr(signal, f"ITIMER_{self._leaves}"), 0.5, 0.5)
"""
JOB = """\
workload: {kind: 'leaving:Leaving'}
matrix: {leaves: [handlers, alarm, REAL, VIRTUAL, PROF, stacks, nothing], batch_size: 1}
measure: {warmup: 2, iterations: 100, breakdown: false}
"""


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    (folder / "leaving.py").write_text(CLASS)
    write_text(folder, JOB)
    done = cpu_sweep(folder, cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    return table(folder)


def test_points_after_left_signals_are_ok(points):
    assert list(points["status"]) == ["ok"] * 7, list(points["error_message"])


def test_left_signals_cost_no_process(points):
    kinds = {doubt["kind"] for doubt in points["doubts"].explode().dropna()}
    assert "left_behind" not in kinds
    assert list(points["new_processes"]) == [True] + [False] * 6
