"""`raybench health --quick` as users call it, on CPU workers, with faults injected for real."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

PLUG = Path(__file__).with_name("quick_faults")
LONGEST_S = 30.0
QUICK = [sys.executable, "-m", "raybench", "health", "--quick", "--json"]
WORKER = "raybench.health.quick.device_process"


@contextmanager
def running(*options, **environment):
    """A quick check that runs, and is ended whatever becomes of the test."""
    path = os.pathsep.join([str(PLUG), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [*QUICK, *options],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as check:
        try:
            yield check
        finally:
            check.kill()


def end_of(check):
    """Exit code and report of a check that is over in time."""
    said, complaint = check.communicate(timeout=60)
    assert said, complaint
    report = json.loads(said)
    print(complaint, json.dumps({**report, "findings": len(report["findings"])}, indent=1))
    assert report["seconds"] < LONGEST_S
    return check.returncode, report


def quick_check(*options, **environment):
    began_s = time.monotonic()
    with running(*options, **environment) as check:
        ended = end_of(check)
    assert time.monotonic() - began_s < LONGEST_S + 1.0
    return ended


def workers_of(check, count=1):
    """The processes of devices, as soon as there are so many."""
    while True:
        children = psutil.Process(check.pid).children()
        workers = [child for child in children if WORKER in child.cmdline()]
        if len(workers) >= count:
            return workers
        time.sleep(0.02)


def wait_for_line(check, words):
    """Wait until the progress on stderr has these words."""
    for line in check.stderr:
        if words in line:
            return
    raise AssertionError(f"no {words!r}")


def kinds(reasons):
    return {one["kind"] for one in reasons}


@pytest.mark.alone
def test_quick_check_judges_all_devices():
    code, report = quick_check(NCCL_DEBUG="INFO")
    assert report["drain"] == []
    environment = {one["test"]: one for one in report["findings"] if one["stage"] == "environment"}
    assert environment["/dev/shm"]["value"] > 0
    assert environment["NCCL_DEBUG"]["verdict"] == "note"
    assert report["state"] in ("healthy", "untested")
    assert code == {"healthy": 0, "untested": 3}[report["state"]]
    measured = {one["test"] for one in report["findings"] if one["value"] is not None}
    wanted = {"gemm fp32 512", "memory 16 MB", "same bits fp32 256"}
    if len(report["devices"]) > 1:
        wanted.add("all_reduce 1 MiB")
    assert wanted <= measured


@pytest.mark.alone
@pytest.mark.long
def test_stopped_worker_leaves_the_node_untested():
    began_s = time.monotonic()
    with running() as check:
        workers_of(check)[0].send_signal(signal.SIGSTOP)
        code, report = end_of(check)
    assert time.monotonic() - began_s < LONGEST_S + 1.0
    assert (code, report["state"], report["drain"]) == (3, "untested", [])
    assert "disturbed" in kinds(report["untested"])


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("line", ["starting", "memory 16 MB"])
def test_killed_worker_is_replaced_and_tested(line):
    with running() as check:
        wait_for_line(check, line)
        workers_of(check)[-1].kill()
        code, report = end_of(check)
    assert report["drain"] == []
    assert code in (0, 3)
    [process] = [one for one in report["findings"] if one["test"] == "process"]
    # Without time for a new process, the node is untested.
    if process["verdict"] == "note" and len(report["devices"]) > 1:
        measured = {one["test"] for one in report["findings"] if one["value"] is not None}
        assert "all_reduce 1 MiB" in measured


@pytest.mark.alone
@pytest.mark.long
def test_hanging_nvidia_smi_delays_nothing(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    _, report = quick_check(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert report["drain"] == []
    assert any(one["value"] is not None for one in report["findings"])


@pytest.mark.alone
def test_wrong_bits_drain_the_node():
    code, report = quick_check(QUICK_FAULT="wrong_bits", QUICK_FAULT_DEVICE="1")
    assert (code, report["state"]) == (1, "drain")
    [reason] = report["drain"]
    assert reason["kind"] == "failed twice"
    assert reason["test"] == "same bits fp32 256"
    assert reason["device"].endswith("worker 1")


@pytest.mark.alone
@pytest.mark.long
def test_worker_beside_a_cpu_hog_never_drains():
    spin = "import os\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as hog:
        try:
            _, report = quick_check()
        finally:
            hog.kill()
    assert report["drain"] == []
    [noted] = [one for one in report["findings"] if one["test"] == "other programs"]
    assert f"process {hog.pid}" in noted["reason"]


@pytest.mark.alone
def test_missing_torch_is_a_broken_installation():
    code, report = quick_check(QUICK_FAULT="import_error")
    assert (code, report["state"], report["drain"]) == (3, "untested", [])
    assert kinds(report["untested"]) == {"broken installation"}
    assert "torch" in report["untested"][0]["detail"]


@pytest.mark.alone
def test_progress_appears_within_two_seconds():
    began_s = time.monotonic()
    with running() as check:
        assert check.stderr.readline()
        assert time.monotonic() - began_s < 2.0


def test_interrupted_check_leaves_no_process():
    with running() as check:
        workers = workers_of(check)
        check.send_signal(signal.SIGINT)
        check.communicate(timeout=10)
    # Python ends itself by the signal if it came in the middle of some imports.
    assert check.returncode in (130, -signal.SIGINT)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


def test_killed_check_leaves_no_process():
    with running() as check:
        workers = workers_of(check)
        check.kill()
        check.communicate(timeout=10)
    _, alive = psutil.wait_procs(workers, timeout=15)
    assert not alive
