"""What a device says of itself: identity, counters, samples, state and errors; NVML may refuse."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import fields as fields_of
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from raybench.hardware import devices, nvml
from raybench.hardware.devices import (
    Counters,
    DeviceReading,
    FactReader,
    Sampler,
    clocks_within,
    describe_device,
    energy_j,
    is_limited_by_heat,
    kernel_xids,
    throttle_reasons,
    wait_until_unlimited,
)
from raybench.hardware.nccl_library import LoadedNccl
from raybench.records.devices import DeviceFacts, NvLink
from tests.unit.fake_nvml import UUID, FakeNvml, XidEvents, fabric, fields, processes, refusal
from tests.unit.fakes import make_device

CUDA, CPU = torch.device("cuda", 2), torch.device("cpu")
GIB = 2**30
ALL = {
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:1B:00.0"),
    "nvmlSystemGetDriverVersion": "580.95",
    "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1980, 2: 3201}[kind],
    "nvmlDeviceGetMaxClockInfo": 1985,
    "nvmlDeviceGetPowerUsage": 698_500,
    "nvmlDeviceGetEnforcedPowerLimit": 600_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetTemperatureV": 61,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=99, memory=40),
    "nvmlDeviceGetMemoryInfo": lambda _, version: SimpleNamespace(
        total=141 * GIB, reserved=GIB, free=139 * GIB, used=7 * GIB
    ),
    "nvmlDeviceGetTotalEccErrors": lambda _, kind, since: 3 if (kind, since) == (1, 0) else 0,
    "nvmlDeviceGetFieldValues": fields(
        NVLINK_THROUGHPUT_DATA_TX=2000, NVLINK_THROUGHPUT_DATA_RX=1000
    ),
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetMigMode": [0, 1],
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPcieReplayCounter": 12,
    "nvmlDeviceGetMemoryAffinity": [0b10, 0, 0, 0],
    "nvmlDeviceGetComputeRunningProcesses": processes(os.getpid(), 4242),
    "nvmlDeviceGetGraphicsRunningProcesses": processes(4242, 4343),
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetUUID": UUID,
    "nvmlDeviceGetRemappedRows": (3, 1, 1, 0),
    "nvmlDeviceGetRetiredPages": lambda _, cause: [0xA, 0xB] if cause == 1 else [0xC],
    "nvmlDeviceGetRetiredPagesPendingStatus": 0,
    "nvmlDeviceGetNvLinkState": lambda _, link: (1, 1, 0)[link] if link < 3 else refusal(),
    "nvmlDeviceGetNvLinkErrorCounter": lambda _, link, counter: (
        {0: 5, 1: 1, 2: 700}[counter] if link == 1 else 0
    ),
    "nvmlDeviceGetGpuFabricInfoV": fabric(3, health_mask=0b01),
}
# One more behind NVLinks, and one that is not.
OTHERS = {
    "nvmlDeviceGetCount": 3,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetHandleByUUID": lambda uuid: "handle" if uuid == UUID else int(uuid),
    "nvmlDeviceGetUUID": lambda handle: UUID if handle in (0, "handle") else str(handle),
    "nvmlDeviceGetTopologyCommonAncestor": pynvml.NVML_TOPOLOGY_SYSTEM,
    "nvmlDeviceGetP2PStatus": lambda _, other, kind: 0 if (other, kind) == (1, 2) else 5,
}


@pytest.fixture(autouse=True)
def _a_cuda_device(monkeypatch):
    found = SimpleNamespace(
        uuid=UUID.removeprefix("GPU-"), name="NVIDIA H200", total_memory=150 * 10**9
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


def described():
    return describe_device(CUDA, 2, node_id="n", address="10.0.0.1")


def test_nvml_describes_a_gpu(monkeypatch):
    FakeNvml(**ALL | OTHERS).install(monkeypatch)
    device = described()
    assert (device.uuid, device.index, device.name) == (UUID, 2, "NVIDIA H200")
    assert (device.pci_bus_id, device.driver_version) == ("00000000:1B:00.0", "580.95")
    assert (device.sm_clock_mhz, device.sm_clock_max_mhz) == (1980, 1985)
    assert (device.power_cap_w, device.power_cap_default_w) == (600.0, 700.0)
    assert (device.temperature_c, device.throttle_reasons) == (61.0, ("power_cap",))
    assert (device.ecc_errors, device.persistence_mode, device.mig_mode) == (3, True, False)
    assert (device.pcie_link, device.pcie_link_max) == ("gen1 x8", "gen5 x16")
    assert (device.numa_node, device.other_processes) == (1, 2)
    assert device.topology == "NVLink x2, 1:NV, 2:SYS"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert described().topology == "NVLink x2, 0:SYS"
    # Unknown where NVML does not even name this process.
    others = {"nvmlDeviceGetComputeRunningProcesses": processes(7, 8)}
    FakeNvml(**ALL | others).install(monkeypatch)
    assert described().other_processes is None
    for words, node in (([0, 1], 64), ([0b11, 0], None), ([0, 0], None)):
        FakeNvml(**ALL | {"nvmlDeviceGetMemoryAffinity": words}).install(monkeypatch)
        assert described().numa_node == node


def test_device_facts_are_unknown_without_nvml(monkeypatch):
    missing = refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    FakeNvml(nvmlInit=lambda: missing).install(monkeypatch)
    device = described()
    assert (device.memory_bytes, device.throttle_reasons) == (150 * 10**9, ())
    unknown = ("power_cap_default_w", "temperature_c", "ecc_errors", "persistence_mode")
    assert [getattr(device, name) for name in unknown] == [None] * 4
    assert {device.mig_mode, device.pcie_link, device.numa_node, device.other_processes} == {None}
    assert Counters(CUDA).read() is None
    assert Counters(CPU).read() is None


def test_free_disk_and_shared_memory_are_reported():
    device = describe_device(CPU, 3, node_id="n", address="10.0.0.1")
    assert device.index == 3
    assert device.disk_free_bytes > 0
    status = os.statvfs("/dev/shm")
    assert device.shm_free_bytes <= status.f_blocks * status.f_frsize


def test_a_worker_without_nccl_tells_of_none():
    device = describe_device(CPU, 0, node_id="n", address="10.0.0.1")
    assert device.nccl_path is None
    assert "nccl" not in device.versions


def test_the_version_is_that_of_the_loaded_nccl(monkeypatch):
    FakeNvml(**ALL).install(monkeypatch)
    # A torch without a library of NCCL has it in its own.
    assert (described().versions["nccl"], described().nccl_path) == ("2.28.9", None)
    library = LoadedNccl(version="2.30.0", path="/opt/nccl/libnccl.so.2")
    monkeypatch.setattr("raybench.hardware.devices.loaded_nccl", lambda: library)
    assert (described().versions["nccl"], described().nccl_path) == ("2.30.0", library.path)


def reading(time_s: float, energy: float | None = None, **limited_s: float) -> DeviceReading:
    return DeviceReading(time_s=time_s, energy_j=energy, limited_s=limited_s)


def test_a_reading_is_in_joules_and_seconds(monkeypatch):
    FakeNvml(
        nvmlDeviceGetTotalEnergyConsumption=1_234_500,
        nvmlDeviceGetFieldValues=fields(
            CLOCKS_EVENT_REASON_SW_POWER_CAP=2_500_000_000, CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN=0
        ),
    ).install(monkeypatch)
    read = Counters(CUDA).read()
    assert read.energy_j == 1234.5
    assert read.limited_s == {"power_cap": 2.5, "thermal_sw": 0.0}
    assert read.time_s > 0
    cheap = Counters(CUDA).read(with_energy=False)
    assert (cheap.energy_j, cheap.limited_s) == (None, read.limited_s)


def test_an_old_driver_counts_throttling_by_policy(monkeypatch):
    policies = {pynvml.NVML_PERF_POLICY_POWER: 9_000_000_000, pynvml.NVML_PERF_POLICY_THERMAL: 1}

    def status(handle, policy):
        if policy not in policies:
            return refusal()
        return pynvml.c_nvmlViolationTime_t(referenceTime=7, violationTime=policies[policy])

    fake = FakeNvml(nvmlDeviceGetViolationStatus=status).install(monkeypatch)
    assert Counters(CUDA).read().limited_s == {"power_cap": 9.0, "thermal_sw": 1e-9}
    fake.answers["nvmlDeviceGetFieldValues"] = fields(CLOCKS_EVENT_REASON_SW_POWER_CAP=10**9)
    assert Counters(CUDA).read().limited_s == {"power_cap": 1.0, "thermal_sw": 1e-9}


def test_throttling_is_told_above_two_percent():
    before = reading(10.0, power_cap=100.0, thermal_hw=5.0, sync_boost=0.0)
    after = reading(20.0, power_cap=100.3, thermal_hw=5.1, sync_boost=0.0)
    assert throttle_reasons(before, after) == ("power_cap",)
    assert throttle_reasons(reading(0.0), reading(1.0, power_cap=50.0)) == ()
    assert throttle_reasons(None, reading(1.0, power_cap=50.0)) == ()
    assert throttle_reasons(reading(0.0, power_cap=1.0), None) == ()
    # Clocks that an administrator set, and idling, are not counted.
    benign = {"idle", "app_clocks", "display_clocks"}
    assert not benign & {*nvml.LIMITED_NS_FIELDS.values(), *nvml.LIMITED_NS_POLICIES.values()}


def test_energy_is_known_from_two_seconds_on():
    first = (reading(0.0, 100.0), reading(1.5, 1500.0))
    later = (reading(6.5, 9000.0), reading(7.0, 9400.0))
    assert energy_j([first, later]) == 1800.0  # not that of the pause
    assert energy_j([first]) is None
    assert energy_j([first, (reading(6.5), reading(9.5, 9400.0))]) is None
    assert energy_j([(None, None)]) is None


class Limited:
    """Counters of a device whose power cap has acted for `limited_s(now)` at a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limited_s: Callable[[float], float]):
        self.now_s = 100.0
        self._limited_s = limited_s
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(devices, "time", clock)

    def _sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def read(self, *, with_energy: bool = True) -> DeviceReading:
        return reading(self.now_s, power_cap=self._limited_s(self.now_s))

    def waited_s(self, since: DeviceReading | None, **more: float) -> float:
        began_s = self.now_s
        wait_until_unlimited(self, since, **more)
        return self.now_s - began_s


@pytest.mark.parametrize(
    ("limited_s", "since_s", "more", "waited_s"),
    [
        pytest.param(lambda now_s: min(now_s, 101.0), 100, {}, 1.3, id="until it acts no more"),
        pytest.param(lambda now_s: now_s, 100, {}, 3.0, id="three seconds at most"),
        pytest.param(lambda now_s: now_s, 100, {"at_most_s": 0.5}, 0.5, id="no longer than asked"),
        pytest.param(lambda now_s: 5.0, 100, {}, 0.3, id="until it surely acts no more"),
        pytest.param(lambda now_s: 5.0, 99, {}, 0.0, id="the device stood idle meanwhile"),
    ],
)
def test_a_device_rests_until_throttling_ends(monkeypatch, limited_s, since_s, more, waited_s):
    limited = Limited(monkeypatch, limited_s)
    since = reading(since_s, power_cap=limited_s(since_s))
    assert limited.waited_s(since, **more) == pytest.approx(waited_s, abs=0.1)
    # Nothing is waited for where no limits are counted.
    monkeypatch.setattr(limited, "read", lambda **_: reading(limited.now_s))
    assert limited.waited_s(None) == limited.waited_s(limited.read()) == 0.0


def test_only_heat_and_faults_hold_clocks_back():
    before = reading(0.0, thermal_sw=5.0, thermal_hw=5.0, power_brake=5.0, power_cap=5.0)
    later_s = {reason: reading(1.0, **{reason: 5.5}) for reason in before.limited_s}
    held = [reason for reason, after in later_s.items() if is_limited_by_heat(before, after)]
    assert held == ["thermal_sw", "thermal_hw", "power_brake"]
    assert not is_limited_by_heat(before, reading(1.0, thermal_sw=5.0))
    assert not is_limited_by_heat(before, None)


def test_a_sample_holds_the_values_of_nvml(monkeypatch):
    FakeNvml(**ALL).install(monkeypatch)
    sampler, samples = Sampler([make_device(index=3, uuid=UUID)], period_s=0.01), ()
    sampler.start()
    deadline_s = time.monotonic() + 10
    while not samples and time.monotonic() < deadline_s:
        time.sleep(0.005)
        samples = sampler.drain()
    sampler.stop()
    sample = samples[0]
    assert (sample.node_id, sample.index, sample.uuid) == ("a", 3, UUID)
    assert datetime.now(UTC) - sample.time < timedelta(seconds=10)
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (1980, 3201)
    assert (sample.power_w, sample.temperature_c) == (698.5, 61.0)
    assert (sample.gpu_utilization_pct, sample.memory_utilization_pct) == (99.0, 40.0)
    assert (sample.memory_used_bytes, sample.ecc_errors) == (7 * 2**30, 3)
    assert (sample.nvlink_tx_bytes, sample.nvlink_rx_bytes) == (2_048_000, 1_024_000)
    assert sample.throttle_reasons == ("power_cap",)


@pytest.mark.alone
def test_clocks_are_selected_by_their_time_of_reading(monkeypatch):
    read_mhz = iter(range(1000, 9000))
    FakeNvml(nvmlDeviceGetClockInfo=lambda *_: next(read_mhz)).install(monkeypatch)
    sampler = Sampler([make_device(uuid=UUID)], period_s=60.0)
    sampler.start()
    begin_ns = time.monotonic_ns()
    time.sleep(0.6)
    end_ns = time.monotonic_ns()
    time.sleep(0.3)
    sampler.stop()
    found = sampler.sm_clocks_mhz(UUID, [(begin_ns, end_ns)])
    assert len(found) >= 3
    assert found == tuple(range(1000, 1000 + len(found)))
    assert len(sampler.sm_clocks_mhz(UUID, [(begin_ns, time.monotonic_ns())])) > len(found)
    assert sampler.sm_clocks_mhz("GPU-other", [(begin_ns, end_ns)]) == ()
    assert sampler.drain() == ()


CLOCKS = [(0, 345), (10**9, 1980), (2 * 10**9, 1965), (3 * 10**9, 1950)]


@pytest.mark.parametrize(
    ("spans_s", "found"),
    [
        ([(0.5, 2.5)], (1980, 1965)),
        ([(0.5, 1.5), (2.5, 3.0)], (1980, 1950)),
        ([(1.02, 1.03)], (1980,)),  # too short to have one: that which is nearest
        ([(0.2, 0.25), (1.95, 1.96)], (1965,)),
        ([(1.4, 1.5)], ()),  # none is near
        ([], ()),
    ],
)
def test_clocks_of_a_point_come_from_timed_blocks(spans_s, found):
    spans_ns = [(round(begin * 1e9), round(end * 1e9)) for begin, end in spans_s]
    assert clocks_within(CLOCKS, spans_ns) == found
    assert clocks_within([], spans_ns) == ()


NO_LOG = Path("/no/such/log")
LOG = """\
6,1,100,-;usb 1-1: new device
4,2,200,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python, Ch 00000008, intr 00000000
4,3,300,-;NVRM: Xid (PCI:0000:9d:00): 79, pid='<unknown>', GPU has fallen off the bus.
4,4,400,-;NVRM: Xid (PCI:0000:1b:00): 48, pid=7, name=python, DBE (double bit error)
4,5,500,-;NVRM: GPU at PCI:0000:1b:00: Xid is no error here
"""


def read(log: Path = NO_LOG) -> DeviceFacts:
    (facts,) = FactReader(log).read([make_device(uuid=UUID)])
    return facts


def test_nvml_reads_the_health_facts_of_a_gpu(monkeypatch):
    FakeNvml(**ALL, **XidEvents().answers).install(monkeypatch)
    facts = read()
    assert (facts.unread, facts.memory_free_bytes) == ("", 139 * GIB)
    assert (facts.remapped_rows, facts.is_remap_pending, facts.is_remap_failed) == (4, True, False)
    assert (facts.retired_pages, facts.is_retirement_pending, facts.ecc_errors) == (3, False, 3)
    assert (facts.pcie_replays, facts.pcie_lanes, facts.pcie_lanes_max) == (12, 8, 16)
    none = {"crc": 0, "replay": 0, "recovery": 0}
    assert facts.nvlinks == (
        NvLink(link=0, is_active=True, errors=none),
        NvLink(link=1, is_active=True, errors={"crc": 700, "replay": 5, "recovery": 1}),
        NvLink(link=2, is_active=False, errors=none),
    )
    assert (facts.fabric_state, facts.fabric_faults) == ("completed", ("degraded bandwidth",))
    assert (facts.kernel_xids, facts.new_xids) == (None, ())


def test_each_unsupported_question_costs_only_its_own_answer(monkeypatch):
    answers = {**ALL, **XidEvents().answers}
    with monkeypatch.context() as patched:
        FakeNvml(**answers).install(patched)
        whole = read()
    for name in answers:
        left = {key: value for key, value in answers.items() if key != name}
        with monkeypatch.context() as patched:
            FakeNvml(**left).install(patched)
            partly = read()
        differing = [
            field.name
            for field in fields_of(DeviceFacts)
            if getattr(partly, field.name) != getattr(whole, field.name)
            and field.name not in ("read_s", "xids_watched_since_s")
        ]
        assert len(differing) <= 4, (name, differing)


def test_an_unknown_gpu_is_reported_as_unread(monkeypatch):
    FakeNvml(**ALL).install(monkeypatch)
    reader = FactReader(NO_LOG)
    other, cpu = reader.read([make_device(uuid="GPU-0"), make_device(kind="cpu", uuid="a/1")])
    assert other.unread == "NVML does not answer"
    assert (cpu.unread, cpu.new_xids) == ("", None)


def test_newer_drivers_count_link_errors_by_field(monkeypatch):
    counted = fields(NVLINK_ERROR_DL_REPLAY=4, NVLINK_ERROR_DL_RECOVERY=0)
    answers = ALL | {"nvmlDeviceGetNvLinkErrorCounter": lambda *_: refusal()}
    answers["nvmlDeviceGetFieldValues"] = counted
    FakeNvml(**answers).install(monkeypatch)
    assert {tuple(link.errors.items()) for link in read().nvlinks or ()} == {
        (("replay", 4), ("recovery", 0))
    }


def test_xid_errors_accumulate_from_the_first_reading(monkeypatch):
    events = XidEvents()
    fake = FakeNvml(**ALL, **events.answers).install(monkeypatch)
    reader, devices = FactReader(NO_LOG), [make_device(uuid=UUID)]
    (before,) = reader.read(devices)
    events.numbers += [31, 79]
    (after,) = reader.read(devices)
    (later,) = reader.read(devices)
    assert [before.new_xids, after.new_xids, later.new_xids] == [(), (31, 79), (31, 79)]
    assert before.xids_watched_since_s == after.xids_watched_since_s == before.read_s
    assert fake.asked.count("nvmlDeviceRegisterEvents") == 1


def test_the_kernel_log_lists_xids_of_each_device(monkeypatch, tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(LOG)
    assert kernel_xids(log) == {(0, 0x1B, 0): [31, 48], (0, 0x9D, 0): [79]}
    FakeNvml(**ALL).install(monkeypatch)
    assert read(log).kernel_xids == (31, 48)
    log.write_text(re.sub("Xid.*", "", LOG))
    assert read(log).kernel_xids == ()
    # Unknown, and not empty.
    assert kernel_xids(NO_LOG) is None
    assert kernel_xids(tmp_path) is None


@pytest.mark.parametrize(
    ("told", "faults"),
    [
        ({"health_mask": 0}, ()),
        ({"health_mask": 1 << 8}, ()),
        ({"health_mask": 5 << 8}, ("an incorrect configuration",)),
        ({"status": pynvml.NVML_ERROR_UNKNOWN}, ("error 999 of the fabric manager",)),
    ],
    ids=["not told", "right", "too few NVLinks", "not joined"],
)
def test_a_misconfigured_fabric_is_a_fault(monkeypatch, told, faults):
    FakeNvml(**ALL | {"nvmlDeviceGetGpuFabricInfoV": fabric(3, **told)}).install(monkeypatch)
    assert read().fabric_faults == faults
