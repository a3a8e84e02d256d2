"""NVML without a GPU: pynvml's functions answering from a table, or as NVML refuses.

The library itself is not loaded; the structures and errors are pynvml's own.
"""

from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pynvml

UUID = "GPU-11111111-2222-3333-4444-555555555555"
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
_REAL = frozenset(name for name in dir(pynvml) if name.startswith("nvml") and name[4].isupper())


class FakeNvml:
    """One device. `answers`: function name -> what it returns, or a callable on its arguments.

    What is not listed is refused with NVML_ERROR_NOT_SUPPORTED. `asked` counts the calls.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": self._handle,
            **answers,
        }
        self.asked: list[str] = []

    def install(self, monkeypatch):
        from raybench.hardware import nvml

        monkeypatch.setattr(nvml, "_is_open", cache(nvml._is_open.__wrapped__))
        for name in _REAL:
            if callable(getattr(pynvml, name)):
                monkeypatch.setattr(pynvml, name, self._function(name))
        return self

    def _function(self, name: str) -> Callable[..., Any]:
        def answer(*arguments: Any, **named: Any) -> Any:
            self.asked.append(name)
            if name not in self.answers:
                raise pynvml.NVMLError(NOT_SUPPORTED)
            given = self.answers[name]
            result = given(*arguments, **named) if callable(given) else given
            if isinstance(result, pynvml.NVMLError):
                raise result
            return result

        return answer

    def _handle(self, uuid: str) -> Any:
        return "handle" if uuid == UUID else pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


def refusal(code: int = NOT_SUPPORTED) -> pynvml.NVMLError:
    return pynvml.NVMLError(code)


def fields(**values: int | float) -> Callable[..., Any]:
    """`nvmlDeviceGetFieldValues` of a driver that knows only these; names without NVML_FI_DEV_."""
    known = {getattr(pynvml, f"NVML_FI_DEV_{name}"): value for name, value in values.items()}

    def answer(handle: Any, asked: Iterable[Any]) -> list[Any]:
        return [_field_value(field, known) for field in asked]

    return answer


def _field_value(field: Any, known: dict[int, Any]) -> Any:
    value = pynvml.c_nvmlFieldValue_t()
    value.fieldId = field[0] if isinstance(field, tuple) else field
    if value.fieldId not in known:
        value.nvmlReturn = NOT_SUPPORTED
        return value
    value.nvmlReturn = pynvml.NVML_SUCCESS
    if isinstance(known[value.fieldId], float):
        value.valueType, value.value.dVal = pynvml.NVML_VALUE_TYPE_DOUBLE, known[value.fieldId]
    else:
        value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        value.value.ullVal = known[value.fieldId]
    return value


def fabric(state: int, status: int = 0, health_mask: int = 0) -> Callable[..., Any]:
    """`nvmlDeviceGetGpuFabricInfoV`, which fills the structure that it is given."""

    def answer(handle: Any, pointer: Any) -> int:
        info = pointer._obj
        info.state, info.status, info.healthMask = state, status, health_mask
        return pynvml.NVML_SUCCESS

    return answer


class XidEvents:
    """The event set of a driver: `numbers` are the errors that nobody has waited for yet."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @property
    def answers(self) -> dict[str, Any]:
        made = {"nvmlEventSetCreate": "events", "nvmlDeviceRegisterEvents": None}
        return made | {"nvmlEventSetWait_v2": self._wait}

    def _wait(self, events: Any, timeout_ms: int) -> Any:
        if not self.numbers:
            return pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.numbers.pop(0))


def processes(*pids: int) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=2**20) for pid in pids]
