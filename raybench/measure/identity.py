"""What a worker can say of its device and its process: identity, versions, settings.

A device is named by its UUID: NVML ignores CUDA_VISIBLE_DEVICES and orders devices by PCI bus,
torch's order depends on the environment, and only the UUID is the same for both.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import torch

from raybench.environment import measured_variables, package_versions
from raybench.records import Device


def describe_device(device: torch.device, *, node_id: str, address: str) -> Device:
    """Everything known of the device that this process is to use."""
    facts: dict[str, Any] = {
        "node_id": node_id,
        "host": socket.gethostname(),
        "address": address,
        "index": device.index or 0,
        "process_id": os.getpid(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
        "omp_num_threads": torch.get_num_threads(),
        "environment": measured_variables(),
    }
    if device.type == "cuda":
        return Device(kind="cuda", versions=_cuda_versions(), **_cuda_facts(device), **facts)
    return Device(
        kind="cpu",
        uuid=f"{node_id}/{os.getpid()}",
        name=_cpu_name(),
        versions=package_versions(),
        **facts,
    )


def _cuda_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    return {
        "uuid": uuid,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        **_nvml_facts(uuid),
    }


def _cuda_versions() -> dict[str, str]:
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return {**package_versions(), "cuda": str(torch.version.cuda), "nccl": nccl}


def _nvml_facts(uuid: str) -> dict[str, Any]:
    """Clocks, power cap and bus as NVML gives them; what it does not support is left out."""
    with _nvml() as there:
        if not there:
            return {}
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:
            return {}
        sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
        questions = {
            "pci_bus_id": lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId,
            "driver_version": pynvml.nvmlSystemGetDriverVersion,
            "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, sm),
            "sm_clock_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, sm),
            "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, memory),
            "power_cap_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            "topology": lambda: _topology(handle),
        }
        answers = {name: _ask(question) for name, question in questions.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


@contextmanager
def _nvml() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _ask(question: Any) -> Any:
    try:
        answer = question()
    except pynvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


def _topology(handle: Any) -> str:
    """How this device reaches the others of its node, as `nvidia-smi topo -m` names it."""
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
    nvlinks = _active_nvlinks(handle)
    return ", ".join([f"NVLink x{nvlinks}", *links])


def _active_nvlinks(handle: Any) -> int:
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError:
            break
    return active


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
