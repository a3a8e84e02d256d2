"""One device and the worker that owns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from raybench.records.metrics import Column

DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device and the worker that owns it; unknown values are None."""

    kind: Annotated[DeviceKind, Column("", "cuda or cpu")]
    node_id: Annotated[str, Column("", "node")]
    host: Annotated[str, Column("", "host name")]
    address: Annotated[str, Column("", "IP address")]
    interface: Annotated[str | None, Column("", "network interface of the address")] = None
    # Ray's label of the node; empty if the node has no label.
    rack: Annotated[str, Column("", "of the node, by its label; empty: none")] = ""
    # torch's index with CUDA_DEVICE_ORDER=PCI_BUS_ID; for a CPU worker its number on the node.
    index: Annotated[int, Column("", "on its node, in PCI order")]
    # UUID of a GPU; "node/process id" for a CPU worker.
    uuid: Annotated[str, Column("", "identity")]
    name: Annotated[str, Column("", "model")]
    pci_bus_id: Annotated[str | None, Column("", "PCI id")] = None
    driver_version: Annotated[str | None, Column("", "driver")] = None
    memory_bytes: Annotated[int | None, Column("bytes", "total")] = None
    sm_clock_mhz: Annotated[int | None, Column("MHz", "SM clock at the start")] = None
    sm_clock_max_mhz: Annotated[int | None, Column("MHz", "highest SM clock")] = None
    memory_clock_mhz: Annotated[int | None, Column("MHz", "memory clock at the start")] = None
    power_cap_w: Annotated[float | None, Column("W", "power limit")] = None
    power_cap_default_w: Annotated[float | None, Column("W", "as delivered")] = None
    topology: Annotated[str | None, Column("", "links to the other devices")] = None
    temperature_c: Annotated[float | None, Column("degC", "GPU temperature at the start")] = None
    # Empty if no clock is limited, or if unknown.
    throttle_reasons: Annotated[
        tuple[str, ...], Column("", "why clocks are limited at the start")
    ] = ()
    ecc_errors: Annotated[int | None, Column("", "uncorrected, since the driver was loaded")] = None
    persistence_mode: Annotated[bool | None, Column("", "driver stays loaded")] = None
    mig_mode: Annotated[bool | None, Column("", "GPU is partitioned")] = None
    ecc_mode: Annotated[bool | None, Column("", "memory corrects errors")] = None
    # Such as "gen5 x16".
    pcie_link: Annotated[str | None, Column("", "PCIe link at the start")] = None
    pcie_link_max: Annotated[str | None, Column("", "widest PCIe link")] = None
    numa_node: Annotated[int | None, Column("", "nearest")] = None
    # Processes that had memory on this device before the first worker of this run.
    other_processes: Annotated[int | None, Column("", "using the device before")] = None
    # Free space in the folder for temporary files.
    disk_free_bytes: Annotated[int | None, Column("bytes", "temporary files")] = None
    shm_free_bytes: Annotated[int | None, Column("bytes", "/dev/shm")] = None
    process_id: Annotated[int, Column("", "of the worker")]
    cpu_count: Annotated[int, Column("", "cores that the worker may keep busy")]
    niceness: Annotated[int, Column("", "of the worker")]
    omp_num_threads: Annotated[int, Column("", "of the worker")]
    versions: Annotated[Mapping[str, str], Column("", "software of the worker")] = field(
        default_factory=dict
    )
    nccl_path: Annotated[str | None, Column("", "file of the NCCL that the worker loaded")] = None
    libraries: Annotated[
        Mapping[str, str], Column("", "files of the CUDA libraries that the worker loaded")
    ] = field(default_factory=dict)
    environment: Annotated[Mapping[str, str], Column("", "variables of the worker")] = field(
        default_factory=dict
    )

    @property
    def lasting_name(self) -> str:
        """Name that is the same in all runs: UUID of a GPU, HOST:INDEX of a CPU worker."""
        return self.uuid if self.kind == "cuda" else f"{self.host}:{self.index}"
