"""Samples of a node's devices while points run: once a second; clocks ten times.

A process of its own samples them: in a worker a thread would compete with the steps for the
interpreter.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pynvml

from raybench.hardware import nvml
from raybench.records import Device, DeviceSample, SpanNs

# When the SM clock was read, by the host's monotonic clock in ns, and the clock in MHz.
ClockReading = tuple[int, int]

_NS_PER_S = 1e9
_BYTES_PER_KIB = 1024
# A reading of the clock takes some 30 us.
_CLOCK_PERIOD_S = 0.1
# Half an hour of readings.
_MOST_CLOCKS = 18_000
# NVML's scope for the sum over all links.
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_TX = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
_NVLINK_RX = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)


class Sampler:
    """Samples devices of this node in a thread; devices that NVML does not know are left out.

    period_s: between two samples. The SM clock is read each 0.1 s, or each period if that is
    shorter.
    """

    def __init__(self, devices: Sequence[Device], period_s: float = 1.0) -> None:
        asked = [(device, nvml.device(device.uuid)) for device in devices]
        self._devices = [(device, handle) for device, handle in asked if handle is not None]
        self._period_s = period_s
        self._samples: deque[DeviceSample] = deque()
        self._clocks: dict[str, deque[ClockReading]] = {
            device.uuid: deque(maxlen=_MOST_CLOCKS) for device, _ in self._devices
        }
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Start the thread, if there are devices."""
        if self._devices:
            self._thread.start()

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return the samples since the last call, oldest first, and drop them."""
        return tuple(self._samples.popleft() for _ in range(len(self._samples)))

    def sm_clocks_mhz(self, uuid: str, spans_ns: Sequence[SpanNs]) -> tuple[int, ...]:
        """Return `clocks_within` of the readings of a device's SM clock."""
        return clocks_within(list(self._clocks.get(uuid, ())), spans_ns)

    def stop(self) -> None:
        """Stop the thread and wait for its end; its samples can still be drained."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        due_s = time.monotonic() + self._period_s
        while not self._stopped.wait(min(_CLOCK_PERIOD_S, self._period_s)):
            for device, handle in self._devices:
                clock = nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
                if clock is not None:
                    self._clocks[device.uuid].append((time.monotonic_ns(), clock))
            if time.monotonic() >= due_s:
                due_s += self._period_s
                self._samples.extend(_sample(device, handle) for device, handle in self._devices)


def clocks_within(clocks: Sequence[ClockReading], spans_ns: Sequence[SpanNs]) -> tuple[int, ...]:
    """Return the readings in these spans of time; in MHz, oldest first.

    Where all spans are so short that they contain none, the reading that is nearest to the last
    span, if it is at most 0.1 s away: the device did the same work just before and afterwards. Else
    empty.
    """
    within = [mhz for at_ns, mhz in clocks if any(begin <= at_ns <= end for begin, end in spans_ns)]
    if within or not spans_ns:
        return tuple(within)
    begin_ns, end_ns = spans_ns[-1]
    near = [(max(begin_ns - at_ns, at_ns - end_ns), mhz) for at_ns, mhz in clocks]
    away_ns, mhz = min(near, default=(math.inf, 0))
    return (mhz,) if away_ns <= _CLOCK_PERIOD_S * _NS_PER_S else ()


def memory_in_use_bytes() -> dict[str, int]:
    """Return the memory in use on each GPU of this node, by UUID; empty without NVML."""
    read = [
        (nvml.ask(pynvml.nvmlDeviceGetUUID, handle), nvml.memory(handle))
        for handle in nvml.devices()
    ]
    return {uuid: memory.used for uuid, memory in read if uuid is not None and memory is not None}


def _sample(device: Device, handle: Any) -> DeviceSample:
    """Return one sample of a device, from about ten cheap calls.

    Left out, because they are slow or hold up other processes' work: PCIe throughput (NVML
    measures it while it blocks), running processes, fans.
    """
    use = nvml.ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = nvml.memory(handle)
    traffic = nvml.field_values(handle, (_NVLINK_TX, _NVLINK_RX))
    return DeviceSample(
        node_id=device.node_id,
        index=device.index,
        uuid=device.uuid,
        time=datetime.now(UTC),
        sm_clock_mhz=nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        power_w=nvml.watts(pynvml.nvmlDeviceGetPowerUsage, handle),
        temperature_c=nvml.temperature_c(handle),
        gpu_utilization_pct=None if use is None else float(use.gpu),
        memory_utilization_pct=None if use is None else float(use.memory),
        memory_used_bytes=None if memory is None else memory.used,
        ecc_errors=nvml.ecc_errors(handle),
        nvlink_tx_bytes=_bytes(traffic.get(_NVLINK_TX)),
        nvlink_rx_bytes=_bytes(traffic.get(_NVLINK_RX)),
        throttle_reasons=nvml.throttle_reasons(handle),
    )


def _bytes(kib: float | None) -> int | None:
    return None if kib is None else int(kib) * _BYTES_PER_KIB
