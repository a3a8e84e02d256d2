"""Energy and throttling between two readings of the device's counters."""

from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest
import torch

from raybench.hardware import devices, nvml
from raybench.hardware.devices import (
    Counters,
    Reading,
    energy_j,
    is_held_back,
    throttle_reasons,
    wait_until_unlimited,
)
from tests.unit.fake_nvml import UUID, FakeNvml, fields, refusal

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _a_cuda_device(monkeypatch):
    found = SimpleNamespace(uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def reading(time_s: float, energy: float | None = None, **limited_s: float) -> Reading:
    return Reading(time_s=time_s, energy_j=energy, limited_s=limited_s)


def test_without_nvml_there_are_no_counters(monkeypatch):
    assert Counters(torch.device("cpu")).read() is None
    missing = refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    FakeNvml(nvmlInit=lambda: missing).install(monkeypatch)
    assert Counters(CUDA).read() is None


def test_a_reading_is_in_joules_and_seconds(monkeypatch):
    FakeNvml(
        nvmlDeviceGetTotalEnergyConsumption=1_234_500,
        nvmlDeviceGetFieldValues=fields(
            CLOCKS_EVENT_REASON_SW_POWER_CAP=2_500_000_000,
            CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN=0,
        ),
    ).install(monkeypatch)
    read = Counters(CUDA).read()
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
    assert Counters(CUDA).read().limited_s == {"power_cap": 9.0, "thermal_sw": 1e-9}
    fake.answers["nvmlDeviceGetFieldValues"] = fields(CLOCKS_EVENT_REASON_SW_POWER_CAP=10**9)
    assert Counters(CUDA).read().limited_s == {"power_cap": 1.0, "thermal_sw": 1e-9}


def test_a_limit_that_both_readings_know_counts_as_throttling_above_two_percent_of_the_time():
    before = reading(10.0, power_cap=100.0, thermal_hw=5.0, sync_boost=0.0)
    after = reading(20.0, power_cap=100.3, thermal_hw=5.1, sync_boost=0.0)
    assert throttle_reasons(before, after) == ("power_cap",)
    assert throttle_reasons(reading(0.0), reading(1.0, power_cap=50.0)) == ()
    assert throttle_reasons(None, reading(1.0, power_cap=50.0)) == ()
    assert throttle_reasons(reading(0.0, power_cap=1.0), None) == ()
    # Clocks that an administrator set, and idling, are not counted.
    benign = {"idle", "app_clocks", "display_clocks"}
    assert not benign & {*nvml.LIMITED_NS_FIELDS.values(), *nvml.LIMITED_NS_POLICIES.values()}


def test_energy_is_told_from_two_seconds_on():
    assert energy_j(reading(0.0, 100.0), reading(2.0, 1500.0)) == 1400.0
    assert energy_j(reading(0.0, 100.0), reading(1.9, 1500.0)) is None
    assert energy_j(reading(0.0), reading(5.0, 1500.0)) is None
    assert energy_j(None, None) is None


class Limited:
    """Counters of a device whose power cap has acted for `limited_s(now)` at a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limited_s: Callable[[float], float]):
        self.now_s = 100.0
        self._limited_s = limited_s
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(devices, "time", clock)

    def _sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def read(self) -> Reading:
        return reading(self.now_s, power_cap=self._limited_s(self.now_s))

    def waited_s(self, since: Reading | None, **more: float) -> float:
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
def test_what_follows_a_limit_waits(monkeypatch, limited_s, since_s, more, waited_s):
    limited = Limited(monkeypatch, limited_s)
    since = reading(since_s, power_cap=limited_s(since_s))
    assert limited.waited_s(since, **more) == pytest.approx(waited_s, abs=0.1)


def test_where_no_limits_are_counted_nothing_is_waited_for(monkeypatch):
    limited = Limited(monkeypatch, lambda now_s: now_s)
    monkeypatch.setattr(limited, "read", lambda: reading(limited.now_s))
    assert limited.waited_s(None) == 0.0
    assert limited.waited_s(limited.read()) == 0.0


@pytest.mark.parametrize(
    ("reason", "is_so"),
    [("thermal_sw", True), ("thermal_hw", True), ("power_brake", True), ("power_cap", False)],
)
def test_clocks_are_held_back_by_heat_or_a_fault_and_not_by_the_power_cap(reason, is_so):
    before = reading(0.0, **{reason: 5.0})
    assert is_held_back(before, reading(1.0, **{reason: 5.5})) is is_so
    assert not is_held_back(before, reading(1.0, **{reason: 5.0}))
    assert not is_held_back(before, None)
