"""A head, or a raylet, that has died is found out at once; one that missed a call is there."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from raybench.cluster.ray_cluster import liveness
from raybench.cluster.ray_cluster.liveness import HeadMonitor
from raybench.errors import ClusterError


@contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("dies", ["the head", "this host's Ray"])
def test_what_has_just_answered_and_died_is_found_gone_before_an_actor_is_replaced(dies):
    other = {"the head": "this host's Ray", "this host's Ray": "the head"}[dies]
    with listening() as stays:
        with listening() as address:
            found = HeadMonitor({other: stays, dies: address})
            found.check(afresh=True)
        found.check()
        started_s = time.monotonic()
        with pytest.raises(ClusterError, match=f"{dies} at {address} is gone"):
            found.check(afresh=True)
        assert time.monotonic() < started_s + 10
        assert found.gone()


def test_a_head_that_missed_one_call_is_there(monkeypatch):
    answers = iter([False, True])
    monkeypatch.setattr(liveness, "_listens", lambda _: next(answers))
    assert not HeadMonitor({"the head": "127.0.0.1:1"}).gone()


def test_a_process_that_hangs_in_the_block_is_ended_with_the_exit_code_of_a_lost_cluster():
    hangs = (
        "import time\n"
        "from raybench.cluster.ray_cluster.liveness import StartGuard, end_process\n"
        "with StartGuard(lambda: 'its head is gone', end_process, patience_s=0.1):\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, timeout=30, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "its head is gone\n")
