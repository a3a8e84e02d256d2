"""Dense peak rates of devices and of their memory on their datasheets, which peaks.yaml lists."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

from ruamel.yaml import YAML


def dense_peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the datasheet's peak rate in TFLOP/s, without sparsity.

    None for a device or a precision that is not in the table.
    device_name: as `torch.cuda.get_device_name` gives it. precision: as in job files.
    """
    return _datasheet(device_name)[0].get(precision)


def memory_peak_gb_s(device_name: str) -> float | None:
    """Return the datasheet's bandwidth of the device's memory in GB/s; None if unknown.

    device_name: as `torch.cuda.get_device_name` gives it.
    """
    return _datasheet(device_name)[1]


def _datasheet(device_name: str) -> tuple[Mapping[str, float], float | None]:
    """Return TFLOP/s by precision and GB/s of the memory; ({}, None) for an unknown device."""
    # Drivers before 460 or so leave out the maker.
    return _datasheets().get(device_name.removeprefix("NVIDIA "), ({}, None))


@cache
def _datasheets() -> Mapping[str, tuple[Mapping[str, float], float | None]]:
    """Return by name TFLOP/s of each precision, and GB/s of the memory; the file is read once."""
    text = resources.files("raybench.hardware").joinpath("peaks.yaml").read_text("utf-8")
    return {
        name: (row["tflops"], gb_s)
        for row in YAML(typ="safe", pure=True).load(text)
        for name, gb_s in row["memory_gb_s"].items()
    }
