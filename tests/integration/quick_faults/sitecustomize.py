"""Faults in one device's process of a quick check, for commands started with this folder first.

QUICK_FAULT: "wrong_bits" flips a bit of every product of `same_bits`; "few_sms" multiplies on
QUICK_FAULT_SMS multiprocessors; "slow" sleeps in each product; "slow_once" does so in the first
task alone; "exit" and "segfault" end the process in its first product, also the next process of the
device; "import_error" lets torch be missing. QUICK_FAULT_DEVICE: the number of the device; without
it all devices have the fault.
"""

import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

_FAULT = os.environ.get("QUICK_FAULT", "")
_SLOW_S = 0.05


def _is_faulty_process():
    """Whether this is the process of the device with the fault."""
    words = sys.orig_argv
    if "raybench.health.quick.device_process" not in words:
        return False
    index = words[words.index("raybench.health.quick.device_process") + 2]
    return index == os.environ.get("QUICK_FAULT_DEVICE", index)


class _Hook(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch" and _FAULT == "import_error":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        if name != "raybench.workloads.kernels":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            _patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


def _patch(module):
    for workload in (module.Gemm, module.SameBits):
        workload.step = _faulty(workload.step, workload is module.SameBits)


def _faulty(step, is_same_bits):
    """Return a step with the fault."""
    began = []

    def flipped(self):
        import torch

        step(self)
        if is_same_bits:
            self.product.view(torch.int32)[3, 4] ^= 1

    def confined(self):
        import torch

        stream = _confined_stream(torch.cuda.current_device())
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step(self)
        current.wait_stream(stream)

    def slow(self):
        step(self)
        time.sleep(_SLOW_S)

    def slow_once(self):
        began.append(self)
        step(self)
        if began[0] is self:
            time.sleep(_SLOW_S)

    def ended(self):
        os._exit(3)

    def crashed(self):
        import ctypes

        ctypes.string_at(0)

    faults = {
        "wrong_bits": flipped,
        "few_sms": confined,
        "slow": slow,
        "slow_once": slow_once,
        "exit": ended,
        "segfault": crashed,
    }
    return faults.get(_FAULT, step)


_streams = {}


def _confined_stream(index):
    if index not in _streams:
        sys.path.append(str(Path(__file__).parents[3]))
        from tests.integration.confined_stream import make_confined_stream

        _streams[index] = make_confined_stream(index, int(os.environ["QUICK_FAULT_SMS"]))
    return _streams[index]


if _FAULT and _is_faulty_process():
    sys.meta_path.insert(0, _Hook())
