"""Identity of a worker's device and process: names, versions, settings, links.

A device is named by its UUID: NVML ignores CUDA_VISIBLE_DEVICES and orders devices by PCI bus,
torch's order depends on the environment, and only the UUID is the same for both.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any, Literal

import pynvml
import torch

from raybench.hardware import nvml
from raybench.records import Device
from raybench.records.environment import package_versions, usable_cores, variables_that_matter


def describe_device(device: torch.device, index: int, *, node_id: str, address: str) -> Device:
    """Return identity, versions and settings of the device of this process and of the process.

    What NVML does not tell is None. index: number of the device on its node. node_id, address: of
    the node in Ray.
    """
    facts: dict[str, Any] = {
        "node_id": node_id,
        "host": socket.gethostname(),
        "address": address,
        "index": index,
        "process_id": os.getpid(),
        "cpu_count": usable_cores(),
        "niceness": os.nice(0),
        "omp_num_threads": torch.get_num_threads(),
        "environment": variables_that_matter(),
        "disk_free_bytes": _free_bytes(tempfile.gettempdir()),
        "shm_free_bytes": _free_bytes("/dev/shm"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        uuid = f"GPU-{properties.uuid}"
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return Device(
            kind="cuda",
            uuid=uuid,
            name=properties.name,
            memory_bytes=properties.total_memory,
            versions={**package_versions(), "cuda": str(torch.version.cuda), "nccl": nccl},
            **_nvml_facts(uuid),
            **facts,
        )
    return Device(
        kind="cpu",
        uuid=f"{node_id}/{os.getpid()}",
        name=_cpu_name(),
        versions=package_versions(),
        **facts,
    )


def _nvml_facts(uuid: str) -> dict[str, Any]:
    """Return what NVML knows of the device by field of `Device`; unknown facts are left out."""
    handle = nvml.device(uuid)
    if handle is None:
        return {}
    pci = nvml.ask(pynvml.nvmlDeviceGetPciInfo, handle)
    mig_modes = nvml.ask(pynvml.nvmlDeviceGetMigMode, handle)
    processes = nvml.process_ids(handle)
    sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
    answers = {
        "pci_bus_id": pci.busId if pci else None,
        "driver_version": nvml.ask(pynvml.nvmlSystemGetDriverVersion),
        "sm_clock_mhz": nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, sm),
        "sm_clock_max_mhz": nvml.ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, sm),
        "memory_clock_mhz": nvml.ask(pynvml.nvmlDeviceGetClockInfo, handle, memory),
        "power_cap_w": nvml.watts(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        "power_cap_default_w": nvml.watts(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),
        "topology": nvml.ask(_topology, handle),
        "temperature_c": nvml.temperature_c(handle),
        "throttle_reasons": nvml.throttle_reasons(handle),
        "ecc_errors": nvml.ecc_errors(handle),
        "persistence_mode": nvml.flag(nvml.ask(pynvml.nvmlDeviceGetPersistenceMode, handle)),
        "mig_mode": nvml.flag(mig_modes and mig_modes[0]),
        "pcie_link": _pcie_link(handle, "Curr"),
        "pcie_link_max": _pcie_link(handle, "Max"),
        "numa_node": nvml.numa_node(handle),
        # Unknown where the list lacks this process, which has a context there: then it is not that
        # of the whole host.
        "other_processes": len(processes) - 1 if os.getpid() in processes else None,
    }
    return {name: answer for name, answer in answers.items() if answer is not None}


def _pcie_link(handle: Any, which: Literal["Curr", "Max"]) -> str | None:
    """Return for example "gen5 x16"; None if unknown. An idle link may have stepped down."""
    questions = (f"nvmlDeviceGet{which}PcieLink{what}" for what in ("Generation", "Width"))
    answers = [nvml.ask(getattr(pynvml, question), handle) for question in questions]
    return None if None in answers else "gen{} x{}".format(*answers)


def _topology(handle: Any) -> str:
    """Return how this device reaches the others of its node, as `NVLink x18, 1:PHB, 2:SYS`.

    First the active NVLinks, then by NVML's index of the other device the level that
    `nvidia-smi topo -m` names. Raises NVMLError where NVML does not answer.
    """
    names = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "board",
        pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        pynvml.NVML_TOPOLOGY_NODE: "NODE",
        pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
    links = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        other = pynvml.nvmlDeviceGetHandleByIndex(index)
        if pynvml.nvmlDeviceGetUUID(other) == pynvml.nvmlDeviceGetUUID(handle):
            continue
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, other)
        links.append(f"{index}:{names.get(level, level)}")
    nvlinks = sum(nvml.nvlink_states(handle).values())
    return ", ".join([f"NVLink x{nvlinks}", *links])


def _free_bytes(folder: str) -> int | None:
    """Return the free bytes of the file system of a folder; None where there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _cpu_name() -> str:
    """Return the model of the processor; of an unknown one its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
