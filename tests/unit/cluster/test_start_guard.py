"""What ends this process when Ray dies while this process waits inside of Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from raybench.cluster.ray_cluster.start_guard import StartGuard


def test_a_block_that_is_left_in_time_goes_on() -> None:
    ended: list[str] = []
    with StartGuard(lambda: "its head is gone", ended.append, patience_s=5.0):
        time.sleep(0.5)
    assert ended == []


def test_a_process_that_hangs_in_the_block_is_ended_with_the_exit_code_of_a_lost_cluster() -> None:
    hangs = (
        "import time\n"
        "from raybench.cluster.ray_cluster.start_guard import StartGuard, end_process\n"
        "with StartGuard(lambda: 'its head is gone', end_process, patience_s=0.1):\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, timeout=30, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "its head is gone\n")
