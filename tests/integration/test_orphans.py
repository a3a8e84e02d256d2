"""Whatever ends the driver or a worker, nothing that they started is left 15 s later."""

import json
import os
import pty
import signal
import subprocess
from contextlib import contextmanager

import psutil
import pytest

from tests.integration.sweeps import begin, descendants, title_of, wait_for, write_text

JOB = """\
workload: {{kind: "tests.integration.probe_workloads:Orphans", folder: {folder}}}
matrix: {{world_size: 2}}
baseline: {{world_size: 2}}
measure: {{timeout_s: 600}}
"""
# In the environment of all that a driver starts, so that the tests find it.
_FAMILY = "RAYBENCH_TEST_FAMILY"


@contextmanager
def hanging_sweep(folder, *options, terminal=None):
    """A driver whose two workers hang, and have children; it leads a session of its own."""
    write_text(folder, JOB.format(folder=folder))
    with (folder / "stderr").open("wb") as stderr:
        driver = begin(
            folder,
            *options,
            env={**os.environ, _FAMILY: str(folder)},
            stdin=terminal,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal is not None else None,
        )
    with driver:
        try:
            wait_for(lambda: len(list(folder.glob("?.json"))) == 2, within_s=180)
            yield driver
        finally:
            driver.kill()


def _take_terminal():
    import fcntl
    import termios

    # As in a shell, also where the tests run under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def orphans_in(folder):
    """Rank -> its worker and the children of that."""
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)}


def lives(process_id):
    return title_of(process_id) is not None


def family(folder):
    """What lives of all that was started with the environment of this test's driver."""
    found = psutil.process_iter(["environ"])
    return [
        one.pid
        for one in found
        if (one.info["environ"] or {}).get(_FAMILY) == str(folder) and lives(one.pid)
    ]


def test_a_killed_driver_leaves_nothing_of_its_private_ray(tmp_path):
    with hanging_sweep(tmp_path) as driver:
        assert len(family(tmp_path)) > 8, "Ray's processes, two workers and their children"
        first, second = orphans_in(tmp_path).values()
        rays = descendants(driver.pid)
        driver.kill()
        driver.wait()
        took_s = wait_for(lambda: not any(map(lives, first + second)), 15)
        all_took_s = took_s + wait_for(
            lambda: not family(tmp_path) and not any(map(lives, rays)), 30 - took_s
        )
    print(f"gone after the driver's SIGKILL: workers {took_s:.1f} s, all {all_took_s:.1f} s")


@pytest.mark.long
def test_a_closed_terminal_leaves_nothing(tmp_path):
    ours, theirs = pty.openpty()
    with hanging_sweep(tmp_path, terminal=theirs) as driver:
        rays = descendants(driver.pid)
        os.close(theirs)
        os.close(ours)
        took_s = wait_for(lambda: driver.poll() is not None and not family(tmp_path), 15)
        took_s += wait_for(lambda: not any(map(lives, rays)), 15 - took_s)
    print(f"gone after the terminal was closed: {took_s:.1f} s")


@pytest.mark.long
def test_a_killed_worker_or_driver_leaves_nothing_on_a_cluster(tmp_path, three_nodes):
    with hanging_sweep(tmp_path, "--address", three_nodes) as driver:
        first, second = orphans_in(tmp_path).values()
        os.kill(first[0], signal.SIGKILL)
        child_s = wait_for(lambda: not any(map(lives, first)), 10)
        assert driver.poll() is None
        driver.kill()
        driver.wait()
        took_s = wait_for(lambda: not any(map(lives, second)), 15)
    print(f"gone: children of a killed worker {child_s:.1f} s; after the driver's {took_s:.1f} s")
