"""The watcher of a worker, with a shell or a Python in the part of the worker."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from raybench.cluster import reaper

# What a worker of Ray is to its raylet: a child that leads a group of its own.
RAYLET = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], process_group=0).wait()
"""
WORKER = """
    import multiprocessing, os, subprocess, time
    from raybench.cluster import reaper
    reaper.reap_orphans_of_worker()
    {starts}
    print("started", os.getpid(), flush=True)
    time.sleep(60)
"""

# A second where a core is free; what is left alone sleeps for 60 s.
SOON_S = 10.0

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux 5.3")


@pytest.fixture
def mark(monkeypatch):
    value = f"test-{time.monotonic_ns()}"
    monkeypatch.setenv(reaper.MARK, value)
    return value


@contextmanager
def raylet_and_worker(starts):
    """Process ids of a worker and of what stands for its raylet."""
    worker = textwrap.dedent(WORKER).format(starts=starts)
    command = [sys.executable, "-c", textwrap.dedent(RAYLET), worker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as raylet:
        word, pid = raylet.stdout.readline().split()
        assert word == "started"
        try:
            yield raylet.pid, int(pid)
        finally:
            raylet.kill()


def is_alive(pid):
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def living(holds):
    """The processes of which it holds, as far as they may be looked at."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if holds(process) and is_alive(process.pid):
                found.add(process.pid)
    return found


def marked(mark):
    return living(lambda process: mark in process.environ().values()) - {os.getpid()}


def watchers(mark):
    """The watchers that were started for workers with this mark."""
    return [*living(lambda process: mark in process.cmdline())]


def seconds_until(holds, within_s):
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < within_s
        time.sleep(0.02)
    return time.monotonic() - started_s


ORPHANS = {
    "a child": 'subprocess.Popen(["sleep", "60"])',
    "a child in a session of its own": 'subprocess.Popen(["sleep", "60"], start_new_session=True)',
    "a grandchild whose parent has gone": 'subprocess.run(["sh", "-c", "sleep 60 &"])',
    "a daemon": 'subprocess.run(["sh", "-c", "setsid sleep 60 &"])',
    "a fork": "os.fork() or time.sleep(60)",
    "a fork in a session of its own": "os.fork() or (os.setsid(), time.sleep(60))",
    "one without the mark": 'subprocess.Popen(["sleep", "60"], env={})',
}


def test_all_descendants_of_a_killed_worker_end(mark):
    other = {**os.environ, reaper.MARK: f"{mark}-other"}
    with subprocess.Popen(["sleep", "60"], env=other, start_new_session=True) as neighbour:
        with raylet_and_worker("; ".join(ORPHANS.values())) as (_, worker):
            # What bears the mark or is of the worker's group, and what these have started.
            known = marked(mark) | living(lambda process: os.getpgid(process.pid) == worker)
            children = {child.pid for pid in known for child in psutil.Process(pid).children(True)}
            left = (known | children) - {worker}
            assert len(left) >= len(ORPHANS)
            assert len(watchers(mark)) == 1
            os.kill(worker, signal.SIGKILL)
            seconds_until(lambda: not any(map(is_alive, left)), within_s=SOON_S)
            seconds_until(lambda: not watchers(mark), within_s=SOON_S)
        assert neighbour.poll() is None
        neighbour.kill()


@pytest.mark.long
def test_a_hanging_worker_ends_after_its_raylet(mark):
    with raylet_and_worker(ORPHANS["a daemon"]) as (raylet, worker):
        os.kill(raylet, signal.SIGKILL)
        took_s = seconds_until(lambda: not is_alive(worker), within_s=20)
        assert took_s > 3, "a worker that ends by itself must have time to do so"
        seconds_until(lambda: not marked(mark), within_s=SOON_S)


def test_the_watcher_is_detached_and_small(mark):
    with raylet_and_worker("pass") as (raylet, worker):
        (watcher,) = watchers(mark)
        process = psutil.Process(watcher)
        # It looks around now and then.
        seconds_until(lambda: process.status() == psutil.STATUS_SLEEPING, within_s=SOON_S)
        assert process.ppid() not in (raylet, worker)
        assert os.getpgid(watcher) != worker
        assert not Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        resident = Path(f"/proc/{watcher}/statm").read_text().split()[1]
        assert int(resident) * os.sysconf("SC_PAGE_SIZE") < 12 * 2**20
        assert Path(f"/proc/{watcher}/fd/2").readlink() == Path(os.devnull)


@pytest.mark.parametrize("is_kept", [False, pytest.param(True, marks=pytest.mark.long)])
def test_children_and_folder_do_not_outlive_the_driver(is_kept, tmp_path):
    driver = """
        import os, subprocess, sys, time
        from raybench.cluster import reaper
        with reaper.reap_orphans_of_children(sys.argv[1]):
            print(os.environ[reaper.MARK], flush=True)
            subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
        assert reaper.MARK not in os.environ
        later = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
        print(later.pid, flush=True)
        time.sleep(60)
    """
    folder = tmp_path / "folder"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "one").touch()
    if is_kept:
        (folder / reaper.KEPT).touch()
    command = [sys.executable, "-c", textwrap.dedent(driver), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        mark, later = process.stdout.readline().strip(), int(process.stdout.readline())
        # The kernel shows the environment of a program a little after its start.
        seconds_until(lambda: len(marked(mark)) == 1, within_s=SOON_S)
        assert folder.exists()
        process.kill()
        assert seconds_until(lambda: not marked(mark), within_s=20) > 3
        assert is_alive(later), "what else the driver started is no business of ours"
        os.kill(later, signal.SIGKILL)
        seconds_until(lambda: not watchers(mark), within_s=SOON_S)
    assert (folder / "logs" / "one").exists() == is_kept


def test_workers_of_a_dead_raylet_end_with_driver(tmp_path):
    driver = """
        import subprocess, sys, time
        from raybench.cluster import reaper
        with reaper.reap_orphans_of_children():
            # A raylet; what it starts has another mark.
            subprocess.Popen(["sh", "-c", f"{reaper.MARK}=other sleep 60 & echo $$ $!; wait"])
            time.sleep(0.5)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(driver)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        raylet, worker = map(int, process.stdout.readline().split())
        time.sleep(1.0)
        for each in (raylet, process.pid):
            os.kill(each, signal.SIGKILL)
    assert is_alive(worker)
    seconds_until(lambda: not is_alive(worker), within_s=20)


def test_a_driver_goes_on_without_its_watcher():
    child = subprocess.Popen(["sleep", "60"])
    try:
        with reaper.reap_orphans_of_children():
            mark = os.environ[reaper.MARK]
            [watcher] = watchers(mark)
            os.kill(watcher, signal.SIGKILL)
            seconds_until(lambda: watchers(mark) == [], within_s=SOON_S)
    finally:
        child.kill()
        child.wait()
    assert os.environ.get(reaper.MARK) != mark
