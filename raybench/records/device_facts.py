"""What NVML and the kernel know of a device's state and errors, read before and after a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from raybench.records import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One link of a device: whether it is up, and its errors since the driver was loaded.

    errors: by kind, "crc", "replay", "recovery"; a kind that NVML does not count is left out.
    """

    link: int
    is_active: bool
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The state and the error counters of one device at one moment; unknown facts are None.

    unread: why nothing is known, as where the agent of its node does not answer; else empty.
    memory_total_bytes, memory_free_bytes: without what the driver keeps for itself.
    ecc_errors: uncorrected ones since the driver was loaded.
    remapped_rows_*: of memory, after errors that could be corrected and those that could not.
    is_remap_pending: a row is replaced at the next reset. is_remap_failed: none was left.
    retired_pages: of older GPUs, which have no rows to spare.
    pcie_replays: packets sent again over the link to the host, since the driver was loaded.
    pcie_lanes, pcie_lanes_max: in use, and those that the device has.
    fabric_state: of NVSwitch systems: "not started", "in progress", "completed".
    fabric_faults: what the fabric manager says is wrong, in words.
    kernel_xids: numbers of the errors of the driver that the kernel's log still holds, oldest
    first; None where it may not be read, as by users on most hosts and in most containers.
    new_xids: those that NVML told of since `xids_watched_since`: it knows of none before.
    """

    device: Device
    read_at: datetime
    unread: str = ""
    compute_capability: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    ecc_errors: int | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    is_remap_pending: bool | None = None
    is_remap_failed: bool | None = None
    retired_pages: int | None = None
    is_retirement_pending: bool | None = None
    pcie_replays: int | None = None
    pcie_lanes: int | None = None
    pcie_lanes_max: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    fabric_state: str | None = None
    fabric_faults: tuple[str, ...] = ()
    kernel_xids: tuple[int, ...] | None = None
    new_xids: tuple[int, ...] | None = None
    xids_watched_since: datetime | None = None
    numa_node: int | None = None
