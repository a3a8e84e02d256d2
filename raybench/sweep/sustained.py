"""What the devices of a run sustain in matrix products: found out once for each, then remembered.

It is a property of the device and not of its worker: new workers, as of each round, would find the
same, at 0.4 s for each precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raybench.job.point import Precision
from raybench.records import Device, Measurement, Record
from raybench.records.device_list import device_name


class SustainedRates:
    """The rates that measurements came with, by device and precision."""

    def __init__(self) -> None:
        self._tflops: dict[tuple[str, Precision], float | None] = {}

    def are_known(self, devices: Sequence[Device], precision: Precision) -> bool:
        """Whether none of these devices has to be asked."""
        return all((device_name(device), precision) in self._tflops for device in devices)

    def complete(self, record: Record) -> Record:
        """Learn what a record tells, and add what its workers were not asked for."""
        known = [
            self._complete(measurement, device, record.point.precision)
            for measurement, device in zip(record.measurements, record.devices, strict=False)
        ]
        return replace(record, measurements=tuple(known)) if known else record

    def _complete(
        self, measurement: Measurement, device: Device, precision: Precision
    ) -> Measurement:
        key = device_name(device), precision
        if measurement.gemm_tflops is not None or key not in self._tflops:
            self._tflops[key] = measurement.gemm_tflops
        return replace(measurement, gemm_tflops=self._tflops[key])
