"""What every test on a GPU leaves behind for the next one, and what it finds."""

import gc
import os

import psutil
import pynvml
import pytest
import torch

from raybench.hardware import nvml
from raybench.job.point import Precision
from raybench.workloads.base import apply_precision


@pytest.fixture(autouse=True)
def _nothing_is_left_for_the_next_test():
    environment = dict(os.environ)
    yield
    # A worker in this process sets torchrun's variables, which a later Ray and all its workers
    # would inherit, and excludes what lives from garbage collections.
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    apply_precision(Precision.FP32)
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _who_is_on_the_gpus():
    """Print it before and after: pytest shows it for a test that fails."""
    _print_gpus("before the test")
    yield
    _print_gpus("after the test")


def _print_gpus(when):
    load = f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    # Ray kills workers where 95 % of the memory of the host are in use.
    memory = psutil.virtual_memory()
    places = [f"{place} {psutil.disk_usage(place).free >> 30}" for place in ("/tmp", "/dev/shm")]
    print(
        f"{when}: process {os.getpid()} is pytest, {load}, {memory.percent} % of "
        f"{memory.total >> 30} GiB memory in use, GiB free: {', '.join(places)}"
    )
    for uuid, number in nvml.uuids().items():
        handle = nvml.device(uuid)
        clock = nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
        used = nvml.ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = nvml.memory(handle)
        print(
            f"  GPU {number}: {clock} MHz, {used and used.gpu} % busy, "
            f"{memory and memory.used >> 20} MiB, {nvml.current_throttle_reasons(handle)}"
        )
        for process in sorted(nvml.process_ids(handle)):
            print(f"    process {process}: {_command(process)}")


def _command(process):
    try:
        found = psutil.Process(process)
        return f"{' '.join(found.cmdline())[:100]}, child of {found.ppid()}, {found.status()}"
    except psutil.Error as error:
        return f"gone ({error})"
