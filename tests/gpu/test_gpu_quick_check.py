"""`raybench health --quick` on real GPUs, as users call it, with injected faults."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.quick_faults import bandwidth_hog, few_sms, neighbour, spoken, wrong_bits
from tests.gpu.gpus import GPU, needs_two

pytestmark = GPU

LONGEST_S = 30.0
QUICK = [sys.executable, "-m", "raybench", "health", "--quick", "--json", "--device", "cuda"]
FULL = """
import torch
free, _ = torch.cuda.mem_get_info(0)
kept = torch.empty(free - 2**28, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("busy", flush=True)
import time; time.sleep(120)
"""


def quick_check(environment=None):
    began_s = time.monotonic()
    done = subprocess.run(
        QUICK, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=60
    )
    took_s = time.monotonic() - began_s
    print(done.stderr, done.stdout[-3000:])
    assert took_s < LONGEST_S
    return done.returncode, json.loads(done.stdout)


def last_gpu():
    import torch

    return torch.cuda.device_count() - 1


def test_healthy_gpus_pass_quickly():
    code, report = quick_check()
    assert report["drain"] == []
    assert (code, report["state"]) == (0, "healthy")
    tests = {one["test"] for one in report["findings"] if one["value"] is not None}
    assert {"gemm bf16 8192", "memory 1000 MB", "same bits fp32 2048", "h2d alone"} <= tests


@pytest.mark.parametrize("fault", [neighbour, bandwidth_hog])
def test_quick_check_never_drains_busy_gpus(fault):
    with fault(last_gpu()) as injected:
        code, report = quick_check()
    assert (code, report["state"], report["drain"]) == (3, "untested", []), spoken(report)
    assert "busy" in {one["kind"] for one in report["untested"]}, spoken(report)
    assert any(injected.named[0] in text for text in spoken(report))


@needs_two
@pytest.mark.parametrize("fault", [wrong_bits, few_sms])
def test_quick_check_names_the_faulty_gpu(fault):
    with fault(last_gpu()) as injected:
        code, report = quick_check(injected.environment)
    assert code == 1
    assert {one["device"].rpartition("GPU ")[2] for one in report["drain"]} == {str(last_gpu())}


def test_quick_check_reports_a_full_gpu_as_busy():
    with subprocess.Popen(
        [sys.executable, "-c", FULL], stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout.readline() == "busy\n"
            code, report = quick_check()
        finally:
            program.kill()
    assert (code, report["drain"]) == (3, [])
    assert "busy" in {one["kind"] for one in report["untested"]}


def test_quick_check_ends_with_a_stopped_process():
    with subprocess.Popen(QUICK, stdout=subprocess.PIPE, text=True) as command:
        began_s, stopped = time.monotonic(), None
        while stopped is None and time.monotonic() < began_s + 10.0:
            for child in psutil.Process(command.pid).children():
                if "raybench.health.quick.device_process" in child.cmdline():
                    stopped = child
            time.sleep(0.05)
        stopped.send_signal(signal.SIGSTOP)
        said, _ = command.communicate(timeout=60)
    assert time.monotonic() - began_s < LONGEST_S
    report = json.loads(said)
    assert report["drain"] == []
    assert report["state"] == "untested"
