"""What a check says of one node: what a scheduler needs, and all findings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from raybench.records.detection import DetectionLimit
from raybench.records.device import DeviceKind
from raybench.records.devices import Finding


class NodeState(StrEnum):
    """Whether a node may run jobs; the worst state first."""

    # A device must not be used. Only this state drains a node.
    DRAIN = "drain"
    # Something was slow or wrong, but not surely.
    SUSPECT = "suspect"
    # The node is busy, or its installation is broken.
    UNTESTED = "untested"
    HEALTHY = "healthy"


class DrainKind(StrEnum):
    """Why a node is drained."""

    FAILED_TWICE = "failed twice"
    # The process of the device hangs in a call of the driver, and the others finished.
    STUCK = "stuck"
    DRIVER_ERROR = "driver error"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReason:
    """Why one device of a node must not be used."""

    kind: DrainKind
    # Name of the device, as in its findings.
    device: str
    # Name of the test or fact.
    test: str


class UntestedKind(StrEnum):
    """Why a node was not tested."""

    # Other programs use its devices or its CPU cores.
    BUSY = "busy"
    # A package cannot be imported, the driver cannot be loaded, or versions differ.
    BROKEN_INSTALLATION = "broken installation"
    # No cluster answers, or it does not give the devices that were asked for.
    NO_DEVICES = "no devices"
    # Heat or the power supply limits the clocks of a device.
    LIMITED_CLOCKS = "limited clocks"
    # The deadline passed, or the check was interrupted, before the tests were done.
    OUT_OF_TIME = "out of time"
    # A test ended without a result on all devices, or because of another device.
    NO_RESULT = "no result"
    # A process of the check was killed or stopped from outside.
    DISTURBED = "disturbed"
    # The tests ran, and there is nothing to compare their speed with.
    NO_COMPARISON = "no comparison"


@dataclass(frozen=True, slots=True, kw_only=True)
class UntestedReason:
    """Why a node was not tested, or not in full."""

    kind: UntestedKind
    # Such as the error message, or the other program.
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a check says of one node."""

    host: str
    state: NodeState
    # ISO 8601, with the time zone.
    began: str
    seconds: float
    raybench_version: str
    # Names of the devices that were checked.
    devices: tuple[str, ...]
    # None: no device was checked.
    device_kind: DeviceKind | None = None
    drain: tuple[DrainReason, ...] = ()
    untested: tuple[UntestedReason, ...] = ()
    findings: tuple[Finding, ...] = ()
    # What such a check finds; None if it was disturbed, or not simulated.
    detection: DetectionLimit | None = None
