"""nvidia-ml-py with one made-up device, for the processes that are started with this folder first.

The structures, constants and errors are the package's own; every device is known.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

_HERE = str(Path(__file__).parent)
_spec = importlib.machinery.PathFinder.find_spec(
    "pynvml", [path for path in sys.path if path != _HERE]
)
_real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_real)
globals().update(vars(_real))


def nvmlInit():
    pass


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid


def nvmlDeviceGetClockInfo(handle, kind):
    return 1980


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=99, memory=40)


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return 0x4


def nvmlDeviceGetRemappedRows(handle):
    return (1, 0, 0, 0)


def nvmlDeviceGetNvLinkState(handle, link):
    if link >= 4:
        raise _real.NVMLError(_real.NVML_ERROR_INVALID_ARGUMENT)
    return 1


# Each look at the counter finds three packets more that were sent again.
_replays = iter(range(0, 3000, 3))


def nvmlDeviceGetPcieReplayCounter(handle):
    return next(_replays)


def _refuse(*arguments, **named):
    """As a driver does that has no answer to a question."""
    raise _real.NVMLError(_real.NVML_ERROR_NOT_SUPPORTED)


for _name in [name for name in dir(_real) if name.startswith("nvml") and name[4].isupper()]:
    if globals()[_name] is getattr(_real, _name) and callable(getattr(_real, _name)):
        globals()[_name] = _refuse
