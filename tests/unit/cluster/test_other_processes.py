"""Who else used the devices of a point, from what its nodes saw before it and after it."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from fakes import make_device

from raybench.cluster.device_reservation import DeviceLocks, Holder, this_process
from raybench.cluster.other_processes import CpuTime, NodeUse, other_users, read_node_use

RUN = Holder(sweep="s", what="run a-1", user="bob", host="alpha", process_id=7, since="")
CPU_WORKER = make_device(kind="cpu", uuid="a/1", cpu_count=2)


def seen(before, after, *devices):
    return list(other_users(before, after, devices or [CPU_WORKER]))


def on_cpus(time_s, busy_s, **own):
    """own: what the process of this number, which began at 1, has used."""
    numbered = {(int(name.removeprefix("p")), 1.0): spent for name, spent in own.items()}
    return NodeUse(time_s=time_s, busy_s=busy_s, own=numbered, processors=2)


def spent(own_s, children_s=0.0):
    return CpuTime(own_s=own_s, children_s=children_s)


def test_what_the_own_processes_use_is_no_use_by_others():
    before, after = on_cpus(0.0, 100.0, p1=spent(5.0)), on_cpus(10.0, 110.0, p1=spent(15.0))
    assert seen(before, after) == []


def test_others_are_told_beyond_a_twentieth_of_the_workers_processors():
    before = on_cpus(0.0, 100.0, p1=spent(5.0))
    assert seen(before, on_cpus(10.0, 110.4, p1=spent(15.0))) == []
    assert seen(before, on_cpus(10.0, 115.0, p1=spent(15.0))) == [
        "other processes kept 0.5 of 2 processors busy on host-a"
    ]


def test_a_process_that_is_new_or_has_a_reused_number_counts_from_its_start():
    before = on_cpus(0.0, 100.0, p1=spent(5.0), p2=spent(50.0))
    after = on_cpus(10.0, 110.0, p1=spent(9.0), p3=spent(3.0))
    own = {**after.own, (2, 2.0): spent(3.0)}
    assert seen(before, replace(after, own=own)) == []


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_child_that_ends_does_not_count_for_what_it_did_before(is_waited_for):
    before = on_cpus(0.0, 100.0, p1=spent(1.0), p2=spent(50.0))
    after = on_cpus(10.0, 105.0, p1=spent(1.0, 50.0 if is_waited_for else 0.0))
    assert seen(before, after) == ["other processes kept 0.5 of 2 processors busy on host-a"]


def test_sweeps_and_processes_that_came_or_went_are_told_once():
    gpu = make_device()
    before = NodeUse(time_s=0.0, holders=(RUN,), processes={gpu.uuid: ("process 4 (python)",)})
    after, nothing = replace(before, time_s=1.0), NodeUse(time_s=0.5)
    told = ["run a-1 of bob (process 7 on alpha)", "process 4 (python) on cuda:0 of host-a"]
    assert seen(before, after, gpu) == told
    assert seen(before, nothing, gpu) == told
    assert seen(nothing, after, gpu) == told
    assert seen(nothing, nothing, gpu) == []


def test_a_look_counts_strangers_alone(monkeypatch):
    """A child spins as long as a process that nobody here has started."""
    spin = "import time; end = time.time() + 2\nwhile time.time() < end: pass"
    locks, holder = DeviceLocks(), this_process("run mine")
    own = subprocess.Popen([sys.executable, "-c", spin])
    # Its parent ends at once, and it belongs to nobody here any more.
    command = ["sh", "-c", f"'{sys.executable}' -c '{spin}' >/dev/null & echo $!"]
    stranger = int(subprocess.check_output(command))
    time.sleep(0.3)
    look = read_node_use([CPU_WORKER], locks, holder)
    counted = {number for number, _ in look.own}
    assert {own.pid, os.getpid()} <= counted
    assert stranger not in counted
    assert psutil.pid_exists(stranger)
    assert look.busy_s > 0
    own.wait()
