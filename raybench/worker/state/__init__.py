"""The state of a worker's process that a workload can change, and how it is put back.

What is not seen: values that a workload changed in modules of others, but for their functions and
classes; functions in modules that were loaded during the point, unless it is the workload's own
that stands there; memory that was taken from the device beside torch's allocator; sockets; files.
"""

from __future__ import annotations

import gc
import random

import numpy as np
import torch

from raybench.worker.state.leftovers import Descriptors, ProcessSnapshot, count_names
from raybench.worker.state.loaded_functions import LoadedFunctions
from raybench.worker.state.process_settings import Setting, python_settings, system_settings
from raybench.worker.state.torch_settings import (
    DeviceMemory,
    device_settings,
    forget_compiled_code,
    inherit_onednn_precision,
    torch_settings,
)


class ProcessState:
    """Python, torch and the device as they were when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._settings: tuple[Setting, ...] = (
            *python_settings(),
            *system_settings(),
            *torch_settings(),
            *device_settings(device),
        )
        self._before = [setting.read() for setting in self._settings]
        self._memory = DeviceMemory(device)
        self._processes = ProcessSnapshot()
        self._descriptors = Descriptors()
        self._functions = LoadedFunctions()

    def begin(self) -> None:
        """Note which threads, child processes and functions there are before a workload starts."""
        self._processes = ProcessSnapshot()
        self._functions.learn()

    def restore(self) -> tuple[str, ...]:
        """Put everything back; what could not be is named, a noun phrase each.

        A few milliseconds where nothing was changed.
        """
        self._write_back()
        inherit_onednn_precision()
        forget_compiled_code()
        gc.collect()
        self._memory.release()
        # Once more: what the collector ended may have put settings back that were not ours.
        changed = self._write_back()
        left = (*self._processes.leaked(), *self._descriptors.count_open())
        return (*changed, *left, *self._memory.still_held())

    def functions_replaced(self, package: str) -> tuple[str, ...]:
        """Functions of others that a workload of this package has replaced, as a noun phrase.

        About 10 ms: there are many of them.
        """
        names = self._functions.replaced(package)
        return (count_names(names, "replaced function", "replaced functions"),) if names else ()

    def holds_device_memory(self) -> bool:
        """Whether memory of the device is still in use after what is free was given back."""
        self._memory.release()
        return bool(self._memory.still_held())

    def _write_back(self) -> list[str]:
        """Put back the settings that have changed; those that stay changed, a noun phrase each.

        Only those: writing some of them costs time, or warns.
        """
        return [
            f"a changed {setting.name}"
            for setting, before in zip(self._settings, self._before, strict=True)
            if setting.read() != before and not _restore(setting, before)
        ]


def _restore(setting: Setting, before: object) -> bool:
    if setting.write is None:
        return False
    try:
        setting.write(before)
    except (OSError, RuntimeError, TypeError, ValueError):
        return False  # whatever forbids it: the caller has it told
    return bool(setting.read() == before)


def seed_all(seed: int) -> None:
    """Start the global random generators of Python, numpy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
