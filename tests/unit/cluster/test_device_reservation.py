"""How a sweep takes devices from others, what the locks hold, and who else used the devices.

The locks are tried with real processes, real files, and files that mean harm.
"""

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import psutil
import pytest
from fake_nvml import FakeNvml, processes
from fakes import make_device

from raybench.cluster.device_reservation import (
    CPU,
    FOLDER_VARIABLE,
    CpuTime,
    DeviceLocks,
    DeviceReservation,
    Holder,
    LockResult,
    NodeUse,
    ReservationTerms,
    other_users,
    read_node_use,
    this_process,
)
from raybench.errors import DevicesInUseError
from raybench.records.record import HostLoad

HOLD = """
import sys, time
from raybench.cluster.device_reservation import DeviceLocks, this_process
locks = DeviceLocks()
result = locks.lock(sys.argv[2:], this_process(sys.argv[1]), shared=True)
print(result.problem or "held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr("raybench.cluster.timeouts.ASK_OTHER_SWEEPS_EVERY_S", 0.01)
    return tmp_path / "locks"


@pytest.fixture
def other():
    """Another sweep, which has the processors and one GPU."""
    command = [sys.executable, "-c", HOLD, "run other-1", CPU, "GPU-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def me(what="run mine-1"):
    return this_process(what)


def locked(locks, holder=None, *, shared=False):
    """What is said of the others where the processors are locked."""
    found = locks.lock([CPU], holder or me(), shared=shared)
    assert not found.problem
    return [one.what for one in found.others.get(CPU, ())]


def test_a_device_of_another_sweep_is_refused(other):
    locks = DeviceLocks()
    result = locks.lock(["GPU-0", "GPU-1"], me(), shared=False)
    [holder] = result.others.pop("GPU-1")
    assert not result.others
    assert (holder.what, holder.process_id) == ("run other-1", other.pid)
    assert "run other-1 of" in str(holder)
    assert f"(process {other.pid} on " in str(holder)
    assert not DeviceLocks().lock(["GPU-0"], me(), shared=False).others


def test_locks_of_a_killed_sweep_are_released(other, folder):
    [holder] = DeviceLocks().other_users([CPU]).others[CPU]
    assert not holder.has_ended
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert holder.has_ended
    locks = DeviceLocks()
    assert not locks.lock([CPU, "GPU-1"], me(), shared=False).others
    assert len(list(folder.iterdir())) == 2
    locks.close()
    assert not list(folder.iterdir())


def test_a_shared_lock_outlasts_an_exclusive_lock():
    alone, shared = DeviceLocks(), DeviceLocks()
    mine = me("run a")
    assert locked(alone, mine) == []
    assert locked(shared, me("run b"), shared=True) == ["run a"]
    assert [one.what for one in alone.other_users([CPU], mine.sweep).others[CPU]] == ["run b"]
    alone.close()
    assert locked(DeviceLocks(), me("run c")) == ["run b"]
    shared.close()
    assert not DeviceLocks().other_users([CPU]).others


def test_nodes_of_one_sweep_share_a_host():
    first, second, mine = DeviceLocks(), DeviceLocks(), me()
    for locks in (first, second, first):
        assert locked(locks, mine) == []
    first.close()
    assert locked(DeviceLocks())
    second.close()
    assert not DeviceLocks().other_users([CPU]).others


def test_one_of_several_simultaneous_sweeps_gets_the_device():
    start, took = threading.Barrier(8), []

    def lock():
        locks, mine = DeviceLocks(), me()
        start.wait()
        if not locked(locks, mine):
            took.append(locks)

    threads = [threading.Thread(target=lock) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 1


# Drops its rights after the imports, for which it may need those of who runs the tests.
STRANGER = HOLD.replace(
    "locks =", "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\nlocks =", 1
)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_two_users_share_a_device_through_readonly_files(monkeypatch):
    with TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        folder = Path(place, "locks")
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        locks = DeviceLocks()
        assert locked(locks, shared=True) == []
        assert folder.stat().st_mode & 0o7777 == 0o1777
        command = [sys.executable, "-c", STRANGER, "run other-1", CPU]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "held\n"
            assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
            found = locks.other_users([CPU]).others[CPU]
            assert ("run other-1", process.pid) in {(one.what, one.process_id) for one in found}
            process.kill()
        locks.close()


@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "pipe"])
def test_planted_files_lock_nothing_and_are_not_followed(kind, folder, tmp_path):
    folder.mkdir()
    victim, place = tmp_path / "victim", folder / f"{CPU}.planted"
    victim.write_text("precious")
    make = {"link": place.symlink_to, "hard link": place.hardlink_to}
    make.get(kind, lambda _: place.mkdir() if kind == "folder" else os.mkfifo(place))(victim)
    assert locked(DeviceLocks()) == []
    assert victim.read_text() == "precious"


def test_a_symlink_as_lock_folder_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    result = DeviceLocks().lock([CPU], me(), shared=False)
    assert str(folder) in result.problem
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_full_disk_leaves_no_file_open(folder, monkeypatch):
    monkeypatch.setattr("os.fchmod", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    before = psutil.Process().num_fds()
    assert "No space left" in DeviceLocks().lock([CPU], me(), shared=False).problem
    assert (psutil.Process().num_fds(), [*folder.iterdir()]) == (before, [])


STRANGE = [b"", b"\xff\xfe", b"[1]", b"9" * 5000, b"[" * 2048, b'{"process_id": 1e400, "what": 3}']


@pytest.mark.parametrize("content", STRANGE)
def test_what_a_file_says_is_not_believed(folder, content):
    locks = DeviceLocks()
    locks.lock([CPU], me(), shared=False)
    [file] = folder.iterdir()
    file.write_bytes(content)
    [holder] = DeviceLocks().other_users([CPU]).others[CPU]
    assert str(holder) == "unknown of unknown (process 0 on unknown)"
    assert not holder.has_ended
    locks.close()


def test_untrusted_lock_text_is_printed_on_one_line():
    locks = DeviceLocks()
    evil = replace(me(), what="run \x1b[31m\n\u202e" + "x" * 500, process_id=2**40)
    locks.lock([CPU], evil, shared=False)
    [holder] = DeviceLocks().other_users([CPU]).others[CPU]
    assert str(holder).isprintable()
    assert len(str(holder)) < 500
    assert holder.process_id == 0
    locks.close()


OTHER = Holder(
    sweep="s", what="run a-1", user="bob", host="alpha", process_id=7, since="2026-11-22 04:00 UTC"
)


class FakeNodes:
    """Nodes on which others have devices, for as many calls as there are answers."""

    def __init__(self, *answers, problem=""):
        self._answers = itertools.chain(answers, itertools.repeat({}))
        self._problem = problem
        self.shared = []
        self.released = 0

    def lock(self, devices, holder, *, shared):
        self.shared.append(shared)
        return [(devices[0], LockResult(others=next(self._answers), problem=self._problem))]

    def unlock(self, devices):
        self.released += 1


def reservation(nodes, log=print, **terms):
    """A reservation on these terms."""
    mine = ReservationTerms(holder=this_process("run mine-1"), **terms)
    return DeviceReservation(nodes, mine, log)


def cpus(count=2):
    return [make_device(index=n, kind="cpu", uuid=f"a/{n}") for n in range(count)]


def test_the_refusal_names_the_other_sweep_and_options():
    nodes = FakeNodes({CPU: (OTHER,)})
    with pytest.raises(DevicesInUseError) as refused:
        reservation(nodes).reserve(cpus())
    who, ways_out = str(refused.value).split("; ")
    used = "host-a are used by run a-1 of bob (process 7 on alpha) since "
    assert who.endswith(used + OTHER.since)
    assert "--wait SECONDS" in ways_out
    assert "--shared" in ways_out
    assert "CUDA_VISIBLE_DEVICES" not in ways_out
    assert refused.value.exit_code == 3
    assert (nodes.shared, nodes.released) == ([False], 1)


def test_waiting_for_devices_is_announced_once():
    nodes, said = FakeNodes(*[{CPU: (OTHER,)}] * 3), list[str]()
    reservation(nodes, said.append, wait_s=60.0).reserve(cpus())
    assert len(nodes.shared) == 4
    [line] = said
    assert line.startswith("waiting: the processors of host-a are used by run a-1")


def test_an_ending_sweep_is_waited_for_by_default():
    gone = replace(OTHER, host=socket.gethostname(), process_id=2**22 - 1)
    said = []
    reservation(FakeNodes({CPU: (gone,)}), said.append).reserve(cpus())
    assert said[0].endswith(", and ends")


def test_sharing_sweeps_are_allowed_and_named():
    nodes, said = FakeNodes({CPU: (OTHER,)}), list[str]()
    held = reservation(nodes, said.append, shared=True)
    held.reserve(cpus())
    assert (nodes.shared, nodes.released) == ([True], 0)
    assert said[0].startswith("not alone: the processors of host-a are used by run a-1")
    assert held.other_sweeps == ("run a-1 of bob (process 7 on alpha)",)


def test_a_late_worker_does_not_wait_for_devices():
    nodes = FakeNodes({CPU: (OTHER,)})
    assert "are used by run a-1" in reservation(nodes, wait_s=60.0).try_reserve(*cpus(1))
    assert reservation(nodes).try_reserve(*cpus(1)) == ""


class ThisHost:
    """The device locks of this process, as the agent of a node has them."""

    def __init__(self):
        self._locks = DeviceLocks()

    def lock(self, devices, holder, *, shared):
        names = [device.uuid for device in devices]
        return [(devices[0], self._locks.lock(names, holder, shared=shared))]

    def unlock(self, devices):
        self._locks.close()


@pytest.mark.usefixtures("other")
def test_refusing_a_late_device_keeps_the_others():
    mine = reservation(ThisHost())
    first, late = (make_device(index=n, uuid=f"GPU-{n}") for n in range(2))
    mine.reserve([first])
    assert "cuda:1 of" in mine.try_reserve(late)
    # As a third sweep sees it.
    assert [*DeviceLocks().lock(["GPU-0"], me("run third-1"), shared=False).others] == ["GPU-0"]


def test_missing_locks_are_reported_once():
    said = []
    held = reservation(FakeNodes(problem="/tmp/x: Permission denied"), said.append)
    held.reserve(cpus())
    held.reserve(cpus())
    [line] = said
    assert "/tmp/x: Permission denied" in line


RUN = Holder(sweep="s", what="run a-1", user="bob", host="alpha", process_id=7, since="")
CPU_WORKER = make_device(kind="cpu", uuid="a/1", cpu_count=2)


HALF_A_CORE = HostLoad(host="host-a", busy_cores=0.5, cores=2)


def seen(before, after, *devices):
    found = other_users(before, after, devices or [CPU_WORKER])
    return [*found.on_devices, *found.loads]


def on_cpus(time_s, busy_s, **own):
    """own: what the process of this number, which began at 1, has used."""
    numbered = {(int(name.removeprefix("p")), 1.0): spent for name, spent in own.items()}
    return NodeUse(time_s=time_s, busy_s=busy_s, own_times=numbered, processors=2)


def spent(own_s, children_s=0.0):
    return CpuTime(own_s=own_s, children_s=children_s)


def test_small_cpu_use_of_other_programs_is_ignored():
    before = on_cpus(0.0, 100.0, p1=spent(5.0))
    assert seen(before, on_cpus(10.0, 110.4, p1=spent(15.0))) == []
    assert seen(before, on_cpus(10.0, 115.0, p1=spent(15.0))) == [HALF_A_CORE]


def test_new_or_reused_process_ids_count_from_start():
    before = on_cpus(0.0, 100.0, p1=spent(5.0), p2=spent(50.0))
    after = on_cpus(10.0, 110.0, p1=spent(9.0), p3=spent(3.0))
    own = {**after.own_times, (2, 2.0): spent(3.0)}
    assert seen(before, replace(after, own_times=own)) == []


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_an_ended_child_does_not_distort_cpu_use(is_waited_for):
    before = on_cpus(0.0, 100.0, p1=spent(1.0), p2=spent(50.0))
    after = on_cpus(10.0, 105.0, p1=spent(1.0, 50.0 if is_waited_for else 0.0))
    assert seen(before, after) == [HALF_A_CORE]


def test_other_sweeps_and_processes_are_listed_once():
    gpu = make_device()
    before = NodeUse(time_s=0.0, holders=(RUN,), processes={gpu.uuid: ("process 4 (python)",)})
    after, nothing = replace(before, time_s=1.0), NodeUse(time_s=0.5)
    told = ["run a-1 of bob (process 7 on alpha)", "process 4 (python) on cuda:0 of host-a"]
    assert seen(before, after, gpu) == told
    assert seen(before, nothing, gpu) == told
    assert seen(nothing, after, gpu) == told
    assert seen(nothing, nothing, gpu) == []


def on_gpus(monkeypatch, *lists):
    """A host with so many GPUs, each with a list of the ids of its processes."""
    FakeNvml(
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetCount=len(lists),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: processes(*lists[handle]),
    ).install(monkeypatch)


def beside_gpu_0(locks, *ended, busy=()):
    """Who is beside this process, which works on GPU 0."""
    device = make_device(uuid="GPU-0", process_id=os.getpid())
    use = read_node_use([device], locks, me(), ended, busy)
    found = other_users(use, use, [device])
    return list(found.on_devices), list(found.on_nodes)


NOBODY = 2**22 + 1


def test_holders_of_other_devices_are_beside_the_node(other, monkeypatch):
    on_gpus(monkeypatch, [os.getpid()], [other.pid], [NOBODY])
    holder = f"run other-1 of {me().user} (process {other.pid} on {socket.gethostname()})"
    assert beside_gpu_0(DeviceLocks()) == (
        [],
        [
            f"{holder} used GPU 1 of host-a",
            f"{holder} used the processors of host-a",
            f"process {NOBODY} (of another container) used GPU 2 of host-a",
        ],
    )


def test_ended_processes_of_this_sweep_are_no_neighbours(monkeypatch):
    on_gpus(monkeypatch, [os.getpid(), NOBODY], [NOBODY])
    named = f"process {NOBODY} (of another container)"
    on_device, on_node = beside_gpu_0(DeviceLocks())
    assert on_device == [f"{named} on cuda:0 of host-a"]
    assert f"{named} used GPU 1 of host-a" in on_node
    on_device, on_node = beside_gpu_0(DeviceLocks(), NOBODY)
    assert not any(named in one for one in (*on_device, *on_node))


def test_another_point_tells_who_is_on_its_gpu(monkeypatch):
    on_gpus(monkeypatch, [os.getpid()], [NOBODY], [NOBODY])
    _, on_node = beside_gpu_0(DeviceLocks(), busy={"GPU-0", "GPU-1"})
    assert on_node == [f"process {NOBODY} (of another container) used GPU 2 of host-a"]


def test_process_ids_of_the_host_name_nobody(monkeypatch):
    on_gpus(monkeypatch, [NOBODY], [NOBODY + 1])
    assert beside_gpu_0(DeviceLocks()) == ([], [])


def test_a_planted_lock_file_names_nobody(folder, monkeypatch):
    on_gpus(monkeypatch, [NOBODY])
    locks = DeviceLocks()
    locks.lock(["GPU-1"], me("run other-1"), shared=True)
    for file in list(folder.iterdir()):
        file.rename(folder / "evil\x1b[31m.x")
    assert beside_gpu_0(DeviceLocks()) == ([], [])


def test_a_look_counts_strangers_alone(tmp_path):
    """A child spins as long as a process that nobody here has started."""
    spin = "import time; end = time.time() + 2\nwhile time.time() < end: pass"
    locks, holder = DeviceLocks(), this_process("run mine")
    own = subprocess.Popen([sys.executable, "-c", spin])
    # Its parent ends at once, and it belongs to nobody here any more.
    command = ["sh", "-c", f"'{sys.executable}' -c '{spin}' >/dev/null & echo $!"]
    stranger = int(subprocess.check_output(command))
    for name in ("raylet", "ray::DashboardAgent"):  # of another Ray
        (tmp_path / name).symlink_to("/bin/sh")
    command[2] = f"PATH={tmp_path} ray::DashboardAgent -c '/bin/sleep 2; :' &"
    command[2] += f"'{sys.executable}' -c '{spin}' default_worker.py & wait"
    ray = subprocess.Popen(command, executable=tmp_path / "raylet")
    time.sleep(0.3)
    look = read_node_use([CPU_WORKER], locks, holder)
    counted = {number for number, _ in look.own_times}
    assert len(counted & {one.pid for one in psutil.Process(ray.pid).children()}) == 1, "the agent"
    assert {own.pid, os.getpid()} <= counted
    assert psutil.Process(stranger).pid not in counted
    assert look.busy_s > 0
    own.wait(), ray.wait()
