"""What a worker says of its device, with what NVML knows and without."""

import os
from types import SimpleNamespace

import pynvml
import pytest
import torch

from raybench.hardware.identity import describe_device
from tests.unit.fake_nvml import UUID, FakeNvml, processes, refusal

ALL = {
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:1B:00.0"),
    "nvmlSystemGetDriverVersion": "580.95",
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetEnforcedPowerLimit": 600_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetTemperatureV": 33,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetMigMode": [0, 1],
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetMemoryAffinity": [0b10, 0, 0, 0],
    "nvmlDeviceGetComputeRunningProcesses": processes(os.getpid(), 4242),
    "nvmlDeviceGetGraphicsRunningProcesses": processes(4242, 4343),
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetUUID": UUID,
    "nvmlDeviceGetNvLinkState": lambda _, link: 1 if link < 4 else refusal(),
}


@pytest.fixture(autouse=True)
def _a_cuda_device(monkeypatch):
    found = SimpleNamespace(
        uuid=UUID.removeprefix("GPU-"), name="NVIDIA H200", total_memory=150 * 10**9
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


def described():
    return describe_device(torch.device("cuda", 2), 2, node_id="n", address="10.0.0.1")


def test_a_gpu_is_described_with_all_that_nvml_knows(monkeypatch):
    FakeNvml(**ALL).install(monkeypatch)
    device = described()
    assert (device.uuid, device.index, device.name) == (UUID, 2, "NVIDIA H200")
    assert (device.pci_bus_id, device.driver_version) == ("00000000:1B:00.0", "580.95")
    assert (device.sm_clock_mhz, device.sm_clock_max_mhz) == (345, 1980)
    assert (device.power_cap_w, device.power_cap_default_w) == (600.0, 700.0)
    assert (device.temperature_c, device.throttle_reasons) == (33.0, ("idle",))
    assert (device.ecc_errors, device.persistence_mode, device.mig_mode) == (0, True, False)
    assert (device.pcie_link, device.pcie_link_max) == ("gen1 x16", "gen5 x16")
    assert (device.numa_node, device.other_processes) == (1, 2)
    assert device.topology == "NVLink x4"
    # Unknown where NVML does not even name this process.
    others = {"nvmlDeviceGetComputeRunningProcesses": processes(7, 8)}
    FakeNvml(**ALL | others).install(monkeypatch)
    assert described().other_processes is None


def test_without_nvml_the_facts_of_the_device_are_unknown(monkeypatch):
    missing = refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    FakeNvml(nvmlInit=lambda: missing).install(monkeypatch)
    device = described()
    assert device.memory_bytes == 150 * 10**9
    assert device.throttle_reasons == ()
    unknown = ("power_cap_default_w", "temperature_c", "ecc_errors", "persistence_mode")
    assert [getattr(device, name) for name in unknown] == [None] * 4
    assert (device.mig_mode, device.pcie_link, device.numa_node) == (None, None, None)
    assert device.other_processes is None


@pytest.mark.parametrize(("words", "node"), [([0, 1], 64), ([0b11, 0], None), ([0, 0], None)])
def test_the_numa_node_is_told_where_one_is_nearest(monkeypatch, words, node):
    FakeNvml(**{**ALL, "nvmlDeviceGetMemoryAffinity": words}).install(monkeypatch)
    assert described().numa_node == node


def test_free_space_is_that_of_the_disk_and_of_shared_memory():
    device = describe_device(torch.device("cpu"), 3, node_id="n", address="10.0.0.1")
    assert device.index == 3
    assert device.disk_free_bytes > 0
    status = os.statvfs("/dev/shm")
    assert device.shm_free_bytes <= status.f_blocks * status.f_frsize
