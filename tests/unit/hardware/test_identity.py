"""What a worker says of its device: from NVML, which may refuse, and from datasheets."""

import os
from types import SimpleNamespace

import pynvml
import pytest
import torch

from raybench.hardware import nvml
from raybench.hardware.devices import describe_device
from raybench.hardware.peaks import dense_peak_tflops
from raybench.job.point import Precision
from tests.unit.fake_nvml import NO_PERMISSION, UUID, FakeNvml, fields, processes, refusal

ALL = {
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:1B:00.0"),
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


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, NO_PERMISSION])
def test_a_refused_question_has_no_answer(monkeypatch, code):
    FakeNvml(nvmlDeviceGetPowerUsage=lambda _: refusal(code)).install(monkeypatch)
    assert nvml.ask(pynvml.nvmlDeviceGetPowerUsage, "handle") is None
    assert nvml.watts(pynvml.nvmlDeviceGetPowerUsage, "handle") is None


def test_fields_that_the_driver_does_not_know_are_left_out(monkeypatch):
    known = fields(POWER_INSTANT=700, NVLINK_THROUGHPUT_DATA_TX=12.5)
    FakeNvml(nvmlDeviceGetFieldValues=known).install(monkeypatch)
    power = pynvml.NVML_FI_DEV_POWER_INSTANT
    sent = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 3)
    unknown = pynvml.NVML_FI_DEV_C2C_LINK_COUNT
    assert nvml.field_values("handle", (unknown, power, sent)) == {power: 700, sent: 12.5}


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0, ()),
        (0x1, ("idle",)),
        (0x4 | 0x40, ("power_cap", "thermal_hw")),
        (0x2 | 0x8 | 0x20 | 0x80, ("app_clocks", "hw_slowdown", "thermal_sw", "power_brake")),
        (0x4 | 0x4000, ("power_cap", "0x4000")),
    ],
)
def test_throttle_reasons_have_names_and_a_new_one_its_bit(monkeypatch, bits, reasons):
    FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=bits).install(monkeypatch)
    assert nvml.throttle_reasons("handle") == reasons


def test_an_old_driver_tells_reasons_and_temperature_under_their_old_names(monkeypatch):
    FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=0x4, nvmlDeviceGetTemperature=41).install(
        monkeypatch
    )
    assert nvml.throttle_reasons("handle") == ("power_cap",)
    assert nvml.temperature_c("handle") == 41.0


OTHER = UUID.replace("1", "9")


@pytest.mark.parametrize(
    ("visible", "index", "uuid"),
    [
        (None, 1, OTHER),
        ("", 1, OTHER),
        ("1,0", 0, OTHER),
        (f"{UUID},{OTHER}", 1, OTHER),
        ("GPU-11", 0, None),  # a prefix is no name
        ("7", 0, None),
    ],
)
def test_the_uuid_of_a_device_is_that_of_its_place_in_cudas_list(monkeypatch, visible, index, uuid):
    by_index = {0: UUID, 1: OTHER}
    FakeNvml(
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid if uuid in (UUID, OTHER) else refusal(),
        nvmlDeviceGetHandleByIndex=lambda index: by_index.get(index, refusal()),
        nvmlDeviceGetUUID=lambda handle: handle,
    ).install(monkeypatch)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.uuid_of(index) == uuid


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "bf16"),
    [
        ("NVIDIA H200", 67.0, 494.5, 989.5),
        ("NVIDIA H100 80GB HBM3", 66.9, 494.7, 989.4),
        ("A100-SXM4-40GB", 19.5, 156.0, 312.0),  # as drivers before 460 call it
        ("NVIDIA B200", None, 1125.0, 2250.0),
        ("AMD Instinct MI355X", 157.3, None, 2516.6),
        ("Tesla V100-SXM2-16GB", 15.7, None, None),
        # A name that is only similar may be another card, or a slice of one.
        ("NVIDIA H100", None, None, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("Intel(R) Xeon(R)", None, None, None),
    ],
)
def test_each_form_factor_has_its_own_dense_peaks_and_an_unknown_device_none(
    name, fp32, tf32, bf16
):
    asked = [dense_peak_tflops(name, p) for p in (Precision.FP32, Precision.TF32, Precision.BF16)]
    assert asked == [fp32, tf32, bf16]
    assert dense_peak_tflops("NVIDIA H100 PCIe", Precision.FLOAT8) == 1513.0
