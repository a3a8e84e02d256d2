"""What ends this process when Ray dies while this process waits inside of Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raybench.cluster.start_guard import StartedPrograms, StartGuard

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
    started = StartedPrograms()
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
    started = StartedPrograms()
    process = program(tmp_path, "other")
    process.kill()
    assert started.gone() == ""
    process.wait()


def test_a_block_that_is_left_in_time_goes_on() -> None:
    ended: list[str] = []
    with StartGuard(lambda: "its head is gone", ended.append, patience_s=5.0):
        time.sleep(0.5)
    assert ended == []


def test_a_process_that_hangs_in_the_block_is_ended_with_the_exit_code_of_a_lost_cluster() -> None:
    hangs = (
        "import time\n"
        "from raybench.cluster.start_guard import StartGuard, end_process\n"
        "with StartGuard(lambda: 'its head is gone', end_process, patience_s=0.1):\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, timeout=30, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "its head is gone\n")
