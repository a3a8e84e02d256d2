"""nvidia-ml-py with made-up devices, for the processes that are started with this folder first.

The structures, constants and errors are the package's own; every device is known. FAKE_GPUS names
a folder with a file for each GPU of the host: its name is the UUID, and it holds the ids of the
processes on the GPU. A process stays listed for 5 s after its end.

FAKE_CONDITIONS names a file with a JSON object on the condition of all GPUs. Without the file they
are well. `sm_clock_mhz`: 1980 by default. `limited_since_ns`: reason, as NVML's field names it ->
since when it limits the clocks. `silent_until_s`: until when a question for processes is not
answered. Times are those of the monotonic clock.
"""

import importlib.util
import json
import os
import sys
import time
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


_GPUS = os.environ.get("FAKE_GPUS", "")
_LISTED_S = 5.0
# Greater ids are those of another container.
_MOST_PROCESSES = 2**22
_ended_s = {}
# Fields that count for how long clocks were limited.
_COUNTED = {
    number
    for name, number in vars(_real).items()
    if name.startswith("NVML_FI_DEV_CLOCKS_EVENT_REASON_")
}


def _refuse(*arguments, **named):
    """As a driver does that has no answer to a question."""
    raise _real.NVMLError(_real.NVML_ERROR_NOT_SUPPORTED)


def _uuids():
    return sorted(file.name for file in Path(_GPUS).iterdir()) if _GPUS else _refuse()


def _conditions():
    try:
        return json.loads(Path(os.environ["FAKE_CONDITIONS"]).read_text())
    except (KeyError, FileNotFoundError):
        return {}


def _sm_clock_mhz(handle, kind):
    return _conditions().get("sm_clock_mhz", 1980)


def _field_values(handle, fields):
    """Answer for how long each reason has limited the clocks, in ns; know no other field."""
    if "FAKE_CONDITIONS" not in os.environ:
        _refuse()
    since_ns = {
        getattr(_real, f"NVML_FI_DEV_CLOCKS_EVENT_REASON_{reason}"): ns
        for reason, ns in _conditions().get("limited_since_ns", {}).items()
    }
    now_ns = time.monotonic_ns()
    return [
        SimpleNamespace(
            nvmlReturn=_real.NVML_SUCCESS if field in _COUNTED else _real.NVML_ERROR_NOT_SUPPORTED,
            valueType=_real.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
            value=SimpleNamespace(ullVal=now_ns - since_ns.get(field, now_ns)),
        )
        for field in fields
    ]


def _processes(uuid):
    if not _GPUS:
        _refuse()
    time.sleep(max(0.0, _conditions().get("silent_until_s", 0.0) - time.monotonic()))
    listed, now_s = [], time.monotonic()
    for number in map(int, Path(_GPUS, uuid).read_text().split()):
        has_ended = number < _MOST_PROCESSES and not Path(f"/proc/{number}").exists()
        if not has_ended or now_s < _ended_s.setdefault(number, now_s) + _LISTED_S:
            listed.append(SimpleNamespace(pid=number))
    return listed


# Each look at the counter finds three packets more that were sent again.
_replays = iter(range(0, 3000, 3))
_ANSWERS = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
    "nvmlDeviceGetClockInfo": _sm_clock_mhz,
    "nvmlDeviceGetFieldValues": _field_values,
    "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=99, memory=40),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4,
    "nvmlDeviceGetRemappedRows": lambda handle: (1, 0, 0, 0),
    "nvmlDeviceGetNvLinkState": _state_of_link,
    "nvmlDeviceGetPcieReplayCounter": lambda handle: next(_replays),
    "nvmlDeviceGetCount": lambda: len(_uuids()),
    "nvmlDeviceGetHandleByIndex": lambda index: _uuids()[index],
    "nvmlDeviceGetUUID": lambda handle: handle,
    "nvmlDeviceGetComputeRunningProcesses": _processes,
}


for _name in [name for name in dir(_real) if name.startswith("nvml") and name[4].isupper()]:
    if callable(getattr(_real, _name)):
        globals()[_name] = _ANSWERS.get(_name, _refuse)
