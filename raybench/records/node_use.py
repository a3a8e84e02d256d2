"""Who else uses a node during a check, and why a device's process gave no answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from raybench.records.other_program import OtherProgram

# Another program that runs kernels for less of the time hardly slows the tests.
_ACTIVE_PCT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What other programs did on a device before and after the tests."""

    programs: tuple[OtherProgram, ...] = ()
    # Share of the time in which a kernel ran before the tests, in percent; None if unknown.
    utilization_pct: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether another program ran kernels before the tests."""
        return (self.utilization_pct or 0) >= _ACTIVE_PCT

    @property
    def is_used(self) -> bool:
        """Whether another program may have slowed the tests."""
        return self.is_active or bool(self.programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLoad:
    """Processor time of other programs while the tests ran."""

    # How many cores they kept busy.
    cores: float
    processors: int
    # The busiest programs, with `busy_cores`.
    programs: tuple[OtherProgram, ...] = ()


class TroubleKind(StrEnum):
    """Why a device's process gave no answer."""

    # In a call of the driver, while the processes of other devices have answered.
    STUCK = "stuck"
    # Another process stopped or killed the device's process by a signal.
    STOPPED = "stopped"
    KILLED = "killed"
    LATE = "late"
    CRASHED = "crashed"
    # It could not take the device: a package or the driver fails.
    NO_START = "no start"
    # It could not take the device: the device's memory is full.
    FULL = "full"
