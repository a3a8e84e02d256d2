"""Whether this machine has GPUs that CUDA can use; loads neither torch nor Ray.

A machine with a broken driver must not pass for a machine without GPUs: its job would quietly run
on CPU workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import pynvml

from raybench.errors import InstallationError

# Values of CUDA_VISIBLE_DEVICES with which a user hides all GPUs.
_ALL_HIDDEN = ("", "-1", "NoDevFiles")
# The first call into the driver loads it, which takes seconds without persistence mode.
CUDA_TIMEOUT_S = 60.0
# Prints the number of GPUs, or the reason why CUDA has none. It runs in a child process, because a
# broken driver may hang or crash, and because CUDA does not survive a fork.
_ASK_CUDA = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    raise SystemExit(str(error))
count, name = ctypes.c_int(), ctypes.c_char_p()
if code := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    cuda.cuGetErrorName(code, ctypes.byref(name))
    raise SystemExit((name.value or b"error %d" % code).decode())
raise SystemExit(None if count.value else "CUDA lists no GPU")
"""


@cache
def count_gpus(devices: Path = Path("/dev")) -> int:
    """Return how many GPUs NVML lists, once CUDA and torch can use GPUs here.

    The result is 0 if CUDA_VISIBLE_DEVICES hides all GPUs, and otherwise ignores the variable.

    Args:
        devices: folder of the device files, for tests.

    Raises:
        InstallationError: the machine has a GPU, and NVML, CUDA or torch cannot use it.
    """
    count = _count_by_nvml(devices)
    if not count:
        return 0
    if reason := why_cuda_fails([sys.executable, "-P", "-c", _ASK_CUDA]):
        raise _unusable(f"NVML lists {count} GPU{'s' * (count > 1)} here, but CUDA fails: {reason}")
    _check_torch()
    return count


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """Return how many GPUs CUDA should list in this environment, without asking CUDA.

    Args:
        devices: folder of the device files, for tests.

    Raises:
        InstallationError: the machine has a GPU, and NVML or torch cannot use it.
    """
    count = _count_by_nvml(devices)
    if count:
        _check_torch()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(listed.split(",")) if count and listed else count


def _count_by_nvml(devices: Path) -> int:
    """Return the number of GPUs; 0 if CUDA_VISIBLE_DEVICES hides them all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in _ALL_HIDDEN:
        return 0
    files = sorted(devices.glob("nvidia[0-9]*"))
    count, reason = _ask_nvml()
    if files and not count:
        raise _unusable(f"this machine has {files[0]}, but NVML fails: {reason}")
    return count


def _check_torch() -> None:
    """Raise InstallationError if torch cannot use GPUs."""
    if _torch_version().endswith("+cpu"):
        raise InstallationError(
            f"this machine has a GPU, and torch {_torch_version()} is a build for CPUs alone; "
            "install a build with CUDA, or use --device cpu"
        )


def _unusable(what: str) -> InstallationError:
    return InstallationError(f"{what}; repair the driver (nvidia-smi), or use --device cpu")


def _ask_nvml() -> tuple[int, str]:
    """Return the number of GPUs, and the reason to give if the number is 0."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return 0, str(error)
    return count, "it lists no GPU"


def why_cuda_fails(command: Sequence[str]) -> str:
    """Return why a process that asks CUDA for its GPUs fails; "" if CUDA has a GPU.

    Args:
        command: writes the reason to stderr and exits with 1 if CUDA has no GPU.
    """
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=CUDA_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"it does not answer within {CUDA_TIMEOUT_S:.0f} s"
    if child.returncode < 0:
        return f"its driver ends the process with signal {-child.returncode}"
    if child.returncode == 0:
        return ""
    lines = child.stderr.strip().splitlines()
    return lines[-1] if lines else "it gives no reason"


def _torch_version() -> str:
    """Return the version of torch without importing it; "" if it is not installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
