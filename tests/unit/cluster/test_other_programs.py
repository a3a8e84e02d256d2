"""Which programs keep cores busy: real processes."""

import getpass
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from raybench.cluster.other_programs import ProgramWatch, describe


@pytest.fixture
def hog():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process.pid
        process.kill()


def looks(*own_ids):
    watch = ProgramWatch()
    assert watch.look("alpha", own_ids) == ()
    time.sleep(0.5)
    return {program.process_id: program for program in watch.look("alpha", own_ids)}


def test_busy_process_is_named_with_user_and_start(hog):
    program = looks()[hog]
    assert program.name.startswith("python")
    assert (program.host, program.user) == ("alpha", getpass.getuser())
    assert timedelta() <= datetime.now(UTC) - program.since < timedelta(minutes=1)
    assert program.busy_cores > 0.05


def test_own_processes_are_left_out(hog):
    assert hog not in looks(hog)


def test_second_look_at_once_repeats_the_first(hog):
    watch = ProgramWatch()
    watch.look("alpha", ())
    time.sleep(0.5)
    assert watch.look("alpha", ()) == watch.look("alpha", ())


def test_ended_process_has_no_name():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    program = describe(process.pid, "alpha", device_uuid="GPU-1")
    assert (program.name, program.user, program.since) == ("", "", None)
    assert describe(os.getpid(), "alpha").name
