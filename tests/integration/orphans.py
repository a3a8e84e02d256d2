"""Sweeps whose ranks hang and have children, and what is left of them."""

import json
import os
import signal
import subprocess
from contextlib import contextmanager

import psutil

from tests.integration.sweeps import begin, title_of, wait_for, write_text

JOB = """\
workload: {{kind: "tests.integration.probe_workloads:Orphans", folder: {folder}}}
matrix: {{world_size: 2}}
baseline: {{world_size: 2}}
measure: {{timeout_s: 600}}
"""
# In the environment of all that a driver starts, so that the tests find it.
_FAMILY = "RAYBENCH_TEST_FAMILY"


@contextmanager
def hanging_sweep(folder, *options, terminal=None, **variables):
    """A driver whose two workers hang, and have children; it leads a session of its own."""
    write_text(folder, JOB.format(folder=folder))
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (folder / "stderr").open("wb") as stderr:
        driver = begin(
            folder,
            *options,
            env={**usual, _FAMILY: str(folder), **variables},
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
    """Return the worker of each of the two ranks, with its children."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


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
