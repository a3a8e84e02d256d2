"""The sampler of a node's devices."""

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from raybench.hardware.devices import Sampler, clocks_within
from tests.unit.fake_nvml import UUID, FakeNvml, fields
from tests.unit.fakes import make_device

ALL = {
    "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1980, 2: 3201}[kind],
    "nvmlDeviceGetPowerUsage": 698_500,
    "nvmlDeviceGetTemperatureV": 61,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=99, memory=40),
    "nvmlDeviceGetMemoryInfo": lambda _, version: SimpleNamespace(used=7 * 2**30),
    "nvmlDeviceGetTotalEccErrors": lambda _, kind, since: 3 if (kind, since) == (1, 0) else 0,
    "nvmlDeviceGetFieldValues": fields(
        NVLINK_THROUGHPUT_DATA_TX=2000, NVLINK_THROUGHPUT_DATA_RX=1000
    ),
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
}


def sampled(devices, count: int = 1):
    """The first `count` samples or more, from a sampler that is then stopped."""
    sampler = Sampler(devices, period_s=0.01)
    sampler.start()
    samples = []
    deadline_s = time.monotonic() + 10
    while len(samples) < count and time.monotonic() < deadline_s:
        time.sleep(0.005)
        samples.extend(sampler.drain())
    sampler.stop()
    return samples


def test_a_sample_holds_what_nvml_said_of_the_device_at_that_time(monkeypatch):
    FakeNvml(**ALL).install(monkeypatch)
    (sample, *_) = sampled([make_device(index=3, uuid=UUID)])
    assert (sample.node_id, sample.index, sample.uuid) == ("a", 3, UUID)
    assert datetime.now(UTC) - sample.time < timedelta(seconds=10)
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (1980, 3201)
    assert (sample.power_w, sample.temperature_c) == (698.5, 61.0)
    assert (sample.gpu_utilization_pct, sample.memory_utilization_pct) == (99.0, 40.0)
    assert (sample.memory_used_bytes, sample.ecc_errors) == (7 * 2**30, 3)
    assert (sample.nvlink_tx_bytes, sample.nvlink_rx_bytes) == (2_048_000, 1_024_000)
    assert sample.throttle_reasons == ("power_cap",)


@pytest.mark.alone
def test_the_clock_is_read_more_often_and_kept_by_the_time_at_which_it_was(monkeypatch):
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
def test_the_clocks_of_a_point_are_those_of_its_timed_blocks(spans_s, found):
    spans_ns = [(round(begin * 1e9), round(end * 1e9)) for begin, end in spans_s]
    assert clocks_within(CLOCKS, spans_ns) == found
    assert clocks_within([], spans_ns) == ()
