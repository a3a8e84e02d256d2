"""What a report says of another sweep that used the devices of a run."""

import subprocess
import sys

import pytest
from builders import START, make_apart, make_device, make_point, write_run

from raybench.cluster.device_reservation import (
    FOLDER_VARIABLE,
    DeviceLocks,
    other_users,
    read_node_use,
    this_process,
)
from raybench.records.measurement import RankAnswer
from raybench.sweep import point_record
from raybench.sweep.rounds import Attempt

HOLD = """
import sys, time
from raybench.cluster.device_reservation import DeviceLocks, this_process
locks = DeviceLocks()
result = locks.lock(sys.argv[1:], this_process("run other-1"), shared=True)
print(result.problem or "held", flush=True)
time.sleep(60)
"""
GPU = make_device()


@pytest.fixture
def other_sweep(tmp_path, monkeypatch):
    """A second process that has locked the GPU, as a sweep does."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    command = [sys.executable, "-c", HOLD, GPU.uuid]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def host_bound_answers(batch_size: int) -> tuple[RankAnswer, ...]:
    point = make_point(batch_size=batch_size)
    return make_apart([8.0], 8.0, idle_ms=4.0, point=point).measurements


def test_neighbour_is_told_before_host_bound(command, tmp_path, other_sweep):
    locks, sweep = DeviceLocks(), this_process("run mine-1")
    records = []
    for batch_size in (8, 16):
        before = read_node_use([GPU], locks, sweep)
        running = point_record.RunningAttempt(
            attempt=Attempt(index=0, point=make_point(batch_size=batch_size), number=1),
            devices=(GPU,),
            started_at=START,
            outcome=host_bound_answers(batch_size),
            duration_s=3.5,
            # Only the first point had a neighbour, so host-bound is the more frequent warning.
            others=other_users(before, read_node_use([GPU], locks, sweep), [GPU]),
        )
        records.append(point_record.make_record(running))
        other_sweep.kill()
        other_sweep.wait()
    write_run(tmp_path, "run-a", records)
    told = " ".join(command("report", "run-a", "--full").out.partition("Doubts\n")[2].split())
    first, _, second = told.partition("all 2 points")
    assert first.startswith("batch 8 other work used the same devices: run other-1 of ")
    assert second.startswith("; at the worst (batch 8) the device waits for the host during 50 %")
    # Half of the points had a neighbour, so one sentence stands for all doubts.
    short = " ".join(command("report", "run-a").out.split())
    assert (
        "Doubts Main caveat: Other programs used the same devices during 1 of 2 points; these "
        "times are not reliable. and 1 more doubt: --full"
    ) in short
