"""Energy and throttling between two readings of the device's counters."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest
import torch

from raybench.measure import counters, nvml
from raybench.measure.counters import Reading, energy_j, open_counters, throttle_reasons
from tests.unit.fake_nvml import UUID, FakeNvml, fields, refusal

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _a_cuda_device(monkeypatch):
    found = SimpleNamespace(uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    yield
    nvml._is_open.cache_clear()


def reading(time_s: float, energy: float | None = None, **limited_s: float) -> Reading:
    return Reading(time_s=time_s, energy_j=energy, limited_s=limited_s)


def test_a_cpu_has_no_counters():
    assert open_counters(torch.device("cpu")).read() is None


def test_without_nvml_there_are_no_counters(monkeypatch):
    missing = refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    FakeNvml(nvmlInit=lambda: missing).install(monkeypatch)
    assert open_counters(CUDA).read() is None


def test_a_reading_is_in_joules_and_seconds(monkeypatch):
    FakeNvml(
        nvmlDeviceGetTotalEnergyConsumption=1_234_500,
        nvmlDeviceGetFieldValues=fields(
            CLOCKS_EVENT_REASON_SW_POWER_CAP=2_500_000_000,
            CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN=0,
        ),
    ).install(monkeypatch)
    read = open_counters(CUDA).read()
    assert read.energy_j == 1234.5
    assert read.limited_s == {"power_cap": 2.5, "thermal_sw": 0.0}
    assert read.time_s > 0


def test_an_old_driver_counts_by_policy_and_the_fields_win_where_both_are(monkeypatch):
    policies = {pynvml.NVML_PERF_POLICY_POWER: 9_000_000_000, pynvml.NVML_PERF_POLICY_THERMAL: 1}

    def status(handle, policy):
        if policy not in policies:
            return refusal()
        return pynvml.c_nvmlViolationTime_t(referenceTime=7, violationTime=policies[policy])

    fake = FakeNvml(nvmlDeviceGetViolationStatus=status).install(monkeypatch)
    assert open_counters(CUDA).read().limited_s == {"power_cap": 9.0, "thermal_sw": 1e-9}
    fake.answers["nvmlDeviceGetFieldValues"] = fields(CLOCKS_EVENT_REASON_SW_POWER_CAP=10**9)
    assert open_counters(CUDA).read().limited_s == {"power_cap": 1.0, "thermal_sw": 1e-9}


def test_a_device_that_answers_nothing_still_gives_a_reading(monkeypatch):
    FakeNvml().install(monkeypatch)
    read = open_counters(CUDA).read()
    assert (read.energy_j, dict(read.limited_s)) == (None, {})


def test_a_lost_device_costs_the_facts_and_not_the_point(monkeypatch):
    fake = FakeNvml(nvmlDeviceGetTotalEnergyConsumption=5).install(monkeypatch)
    opened = open_counters(CUDA)
    lost = refusal(pynvml.NVML_ERROR_GPU_IS_LOST)
    fake.answers = dict.fromkeys(fake.answers, lambda *_: lost)
    assert opened.read().energy_j is None


def test_a_limit_counts_as_throttling_above_two_percent_of_the_time():
    before = reading(10.0, power_cap=100.0, thermal_hw=5.0, sync_boost=0.0)
    after = reading(20.0, power_cap=100.3, thermal_hw=5.1, sync_boost=0.0)
    assert throttle_reasons(before, after) == ("power_cap",)


def test_a_reason_known_in_one_reading_only_is_not_known_between_them():
    assert throttle_reasons(reading(0.0), reading(1.0, power_cap=50.0)) == ()
    assert throttle_reasons(None, reading(1.0, power_cap=50.0)) == ()
    assert throttle_reasons(reading(0.0, power_cap=1.0), None) == ()


def test_clocks_set_by_an_administrator_and_idling_are_no_throttling():
    benign = {"idle", "app_clocks", "display_clocks"}
    assert not benign & {*nvml.LIMITED_NS_FIELDS.values(), *nvml.LIMITED_NS_POLICIES.values()}


def test_energy_is_told_from_two_seconds_on():
    assert energy_j(reading(0.0, 100.0), reading(2.0, 1500.0)) == 1400.0
    assert energy_j(reading(0.0, 100.0), reading(1.9, 1500.0)) is None
    assert energy_j(reading(0.0), reading(5.0, 1500.0)) is None
    assert energy_j(None, None) is None


def test_the_counters_read_only_what_does_not_block_other_processes(monkeypatch):
    fake = FakeNvml().install(monkeypatch)
    counters.open_counters(CUDA).read()
    slow = ("PcieThroughput", "RunningProcesses", "FanSpeed")
    assert not [name for name in fake.asked if any(word in name for word in slow)]
