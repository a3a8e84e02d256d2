"""A device of a quick check, and the process that owns it."""

from __future__ import annotations

from dataclasses import dataclass

from raybench.health.quick.children import Child
from raybench.records.device import Device


@dataclass(slots=True, kw_only=True)
class DeviceSlot:
    """A device of the check, and the process that owns it."""

    index: int
    # Name of the device in findings.
    name: str
    child: Child
    # None until the process owns its device; kept after its end.
    device: Device | None = None
    # Whether the process is fit for tests.
    is_fit: bool = False
    has_restarted: bool = False
