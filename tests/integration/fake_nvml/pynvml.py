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


def _state_of_link(handle, link):
    if link >= 4:
        raise _real.NVMLError(_real.NVML_ERROR_INVALID_ARGUMENT)
    return 1


# Each look at the counter finds three packets more that were sent again.
_replays = iter(range(0, 3000, 3))
_ANSWERS = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
    "nvmlDeviceGetClockInfo": lambda handle, kind: 1980,
    "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=99, memory=40),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4,
    "nvmlDeviceGetRemappedRows": lambda handle: (1, 0, 0, 0),
    "nvmlDeviceGetNvLinkState": _state_of_link,
    "nvmlDeviceGetPcieReplayCounter": lambda handle: next(_replays),
}


def _refuse(*arguments, **named):
    """As a driver does that has no answer to a question."""
    raise _real.NVMLError(_real.NVML_ERROR_NOT_SUPPORTED)


for _name in [name for name in dir(_real) if name.startswith("nvml") and name[4].isupper()]:
    if callable(getattr(_real, _name)):
        globals()[_name] = _ANSWERS.get(_name, _refuse)
