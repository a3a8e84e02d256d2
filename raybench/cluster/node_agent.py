"""What one node can do beside its workers: sample, lock, look around, and read what they wrote.

It imports no torch, and has no CUDA context. How it is reached, and what ends a worker, is its
launcher's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raybench.cluster.bystanders import Look
from raybench.cluster.device_locks import Claim, DeviceLocks, Holder
from raybench.cluster.node_processes import Output
from raybench.records import Device, DeviceSample, SpanNs
from raybench.records.device_facts import DeviceFacts


class NodeAgent(ABC):
    """A process on a node, which lives as long as its workers may."""

    def __init__(self) -> None:
        from raybench.hardware.telemetry import memory_in_use_bytes

        # Before the first worker of this run: what other processes have.
        self._used_before_bytes = memory_in_use_bytes()
        self._samplers: list[Any] = []
        self._locks = DeviceLocks()
        self._facts: Any = None

    @property
    @abstractmethod
    def logs(self) -> Path:
        """The folder with what the workers of this node write."""

    @abstractmethod
    def kill(self, process_ids: Sequence[int]) -> None:
        """SIGKILL those that still are its workers."""

    def sample(self, devices: Sequence[Device]) -> None:
        """Begin to sample these devices, which are not sampled yet."""
        from raybench.hardware.telemetry import Sampler

        self._samplers.append(Sampler(devices))
        self._samplers[-1].start()

    def claim(self, names: Sequence[str], holder: Holder, shared: bool) -> Claim:
        """Hold these devices of this host until this process ends."""
        return self._locks.claim(names, holder, shared=shared)

    def release(self) -> None:
        """Let go of all devices that are held."""
        self._locks.close()

    def look(self, devices: Sequence[Device], holder: Holder) -> Look:
        """Who else is there now."""
        from raybench.cluster.bystanders import look

        return look(devices, self._locks, holder)

    def drain(self) -> tuple[DeviceSample, ...]:
        """Take the samples since the last call."""
        return tuple(sample for sampler in self._samplers for sample in sampler.drain())

    def device_facts(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """Read these devices of this node, whose errors are watched from the first call on."""
        if self._facts is None:
            from raybench.hardware.device_facts import FactReader

            self._facts = FactReader()
        return tuple(self._facts.read(devices))

    def sm_clocks_mhz(self, spans_ns: Mapping[str, Sequence[SpanNs]]) -> dict[str, tuple[int, ...]]:
        """By device: its SM clock in these spans of time, as the sampler that has it read it."""
        read = {
            uuid: [sampler.sm_clocks_mhz(uuid, spans) for sampler in self._samplers]
            for uuid, spans in spans_ns.items()
        }
        return {uuid: max(clocks, key=len, default=()) for uuid, clocks in read.items()}

    def log_tail(self, process_id: int) -> str:
        """Return the last lines that the worker of this process wrote."""
        from raybench.cluster.node_processes import log_tail

        return log_tail(self.logs, process_id)

    def new_outputs(self, read_to: Mapping[int, Mapping[str, int]]) -> dict[int, Output]:
        """By process id: what each of these workers wrote since."""
        from raybench.cluster.node_processes import new_output

        return {process: new_output(self.logs, process, ends) for process, ends in read_to.items()}

    def memory_growth_bytes(self, uuids: Sequence[str]) -> dict[str, int]:
        """By device: what is in use now beyond what was before the first worker."""
        from raybench.hardware.telemetry import memory_in_use_bytes

        now = memory_in_use_bytes()
        before = self._used_before_bytes
        return {uuid: now[uuid] - before.get(uuid, 0) for uuid in uuids if uuid in now}
