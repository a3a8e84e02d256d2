"""What ends this process when a program of Ray dies while this process waits inside of Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raybench.cluster.ray_cluster.start_watch import StartedPrograms

# Does what the name of a program says, as the kernel shows it: a copy of it has that name.
SLEEP = Path("/bin/sleep")


def wait_for(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def program(folder: Path, name: str) -> subprocess.Popen[bytes]:
    path = folder / name
    path.symlink_to(SLEEP)
    started = subprocess.Popen([str(path), "60"])
    wait_for(lambda: Path(f"/proc/{started.pid}/comm").read_text() == f"{name}\n")
    return started


@pytest.mark.parametrize(
    ("name", "told"), [("gcs_server", "its head"), ("raylet", "its raylet")], ids=["head", "raylet"]
)
def test_a_server_that_was_killed_is_told_with_its_signal(
    name: str, told: str, tmp_path: Path
) -> None:
    started = StartedPrograms(os.getpid())
    process = program(tmp_path, name)
    try:
        assert started.gone() == ""
        process.send_signal(signal.SIGTERM)
        wait_for(started.gone)
        assert started.gone() == f"{told} was ended by SIGTERM"
    finally:
        process.kill()
        process.wait()
    assert started.gone() == f"{told} has ended", "also when somebody has waited for it"


def test_other_children_are_no_part_of_ray(tmp_path: Path) -> None:
    started = StartedPrograms(os.getpid())
    process = program(tmp_path, "other")
    process.kill()
    assert started.gone() == ""
    process.wait()


def runs_python(process: int) -> bool:
    return Path(f"/proc/{process}/cmdline").read_bytes().startswith(sys.executable.encode())


def test_an_agent_of_the_raylet_that_has_ended_is_told_before_the_raylet_ends(
    tmp_path: Path,
) -> None:
    agent, other = tmp_path / "agent.py", tmp_path / "other.py"
    for path in (agent, other):
        path.write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "raylet").symlink_to("/bin/bash")
    python = sys.executable
    script = f"{python} {agent} & echo $!; {python} {other} & echo $!; wait; sleep 60"
    started = StartedPrograms(os.getpid())
    with subprocess.Popen(
        [str(tmp_path / "raylet"), "-c", script], stdout=subprocess.PIPE, text=True
    ) as raylet:
        assert raylet.stdout is not None
        agent_id, other_id = (int(raylet.stdout.readline()) for _ in range(2))
        try:
            for process in (agent_id, other_id):
                wait_for(lambda here=process: runs_python(here))
            assert started.gone() == ""
            os.kill(other_id, signal.SIGKILL)
            time.sleep(0.3)
            assert started.gone() == "", "a raylet goes on without its other children"
            os.kill(agent_id, signal.SIGKILL)
            wait_for(started.gone)
            assert started.gone().startswith("its raylet, or an agent of that, ")
        finally:
            for process in (agent_id, raylet.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


# Waits with Python's lock held, as Ray does, when its head has ended.
WAITS_IN_NATIVE_CODE = """\
import ctypes, os, subprocess, sys
from raybench.cluster.ray_cluster.start_watch import watch_programs
folder, program = sys.argv[1:]
files = {"made": f"{folder}/made", "removed": f"{folder}/removed"}
with watch_programs("it did not start: ", "; type it again", **files):
    # Bound to a name: without one Python might wait for it, and nobody would see how it ended.
    head = subprocess.Popen([program, "60"])
    head.kill()
    ctypes.PyDLL(None).sleep(60)
"""


def test_a_process_that_waits_with_pythons_lock_is_ended_when_its_head_is_gone(
    tmp_path: Path,
) -> None:
    head, removed = tmp_path / "gcs_server", tmp_path / "removed"
    head.symlink_to(SLEEP)
    removed.touch()
    begun_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WAITS_IN_NATIVE_CODE, str(tmp_path), str(head)],
        capture_output=True,
        text=True,
        timeout=70,
    )
    told = "it did not start: its head was ended by SIGKILL; type it again\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", told)
    # Alone it would wait for 60 s.
    assert time.monotonic() - begun_s < 40
    assert (tmp_path / "made").exists()
    assert not removed.exists()


LEAVES_IN_TIME = """\
import os, signal, subprocess, sys, time
from raybench.cluster.ray_cluster.start_watch import watch_programs
folder, program = sys.argv[1:]
# A shell that runs the tests in the background has them ignore it.
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
with watch_programs("", "", made=f"{folder}/made", removed=f"{folder}/removed"):
    head = subprocess.Popen([program, "60"])
    time.sleep(0.5)
head.kill()
time.sleep(0.5)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGQUIT)
"""


def test_a_block_that_is_left_goes_on_and_its_signal_is_as_before(tmp_path: Path) -> None:
    head = tmp_path / "gcs_server"
    head.symlink_to(SLEEP)
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_IN_TIME, str(tmp_path), str(head)],
        capture_output=True,
        text=True,
        timeout=70,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGQUIT, "goes on\n")
    assert not (tmp_path / "made").exists()
