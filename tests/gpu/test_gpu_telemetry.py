"""NVML on a real device: what it answers, what it costs, and that it sees the device work."""

import time

import pytest
import torch

from raybench.hardware.devices import Counters, Sampler, describe_device, energy_j
from raybench.job.point import Precision
from raybench.measure.profiling import tflops_sustained
from raybench.results.metrics import dense_peak_tflops
from raybench.workloads.base import apply_precision

pytestmark = pytest.mark.gpu

BUSY_S = 3.0


@pytest.fixture(scope="module")
def device():
    found = torch.device("cuda", 0)
    torch.cuda.set_device(found)
    torch.zeros(1, device=found)
    return found


@pytest.fixture(scope="module")
def described(device):
    return describe_device(device, device.index or 0, node_id="here", address="127.0.0.1")


def keep_busy(device, seconds):
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(20):
            torch.mm(left, right)
        torch.cuda.synchronize()


def test_the_device_is_described(described):
    assert min(described.sm_clock_max_mhz, described.power_cap_w) > 0
    assert described.power_cap_default_w > 0
    assert 0 < described.temperature_c < 100
    assert described.driver_version
    assert described.pcie_link_max
    assert described.disk_free_bytes > 0
    assert described.other_processes is None or described.other_processes >= 0


def test_readings_are_cheap_and_grow_with_work(device, described):
    counters = Counters(device)
    counters.read()
    started_s = time.perf_counter()
    for _ in range(100):
        before = counters.read()
    cost_ms = (time.perf_counter() - started_s) / 100 * 1e3
    keep_busy(device, BUSY_S)
    after = counters.read()
    used_j, elapsed_s = energy_j([(before, after)]), after.time_s - before.time_s
    grown_s = {
        reason: after.limited_s[reason] - before.limited_s[reason] for reason in after.limited_s
    }
    assert cost_ms < 5.0
    assert 50.0 < used_j / elapsed_s < described.power_cap_w * 1.1
    # In seconds: a counter of another unit would grow a thousand times faster, or not at all.
    assert all(0 <= grown <= elapsed_s * 1.1 for grown in grown_s.values())


def test_samples_and_clocks_see_a_busy_device(device, described):
    sampler = Sampler([described], period_s=0.5)
    sampler.start()
    time.sleep(2.0)
    idle = sampler.drain()
    begin_ns = time.monotonic_ns()
    keep_busy(device, BUSY_S)
    busy = sampler.drain()
    clocks_mhz = sampler.sm_clocks_mhz(described.uuid, [(begin_ns, time.monotonic_ns())])
    sampler.stop()
    assert len(clocks_mhz) > 5 * BUSY_S
    assert all(0 < mhz <= described.sm_clock_max_mhz for mhz in clocks_mhz)
    assert max(sample.gpu_utilization_pct for sample in idle[-1:]) < 50
    assert max(sample.gpu_utilization_pct for sample in busy) > 90
    assert max(s.power_w for s in busy) > max(s.power_w for s in idle[-1:])
    assert all(s.sm_clock_mhz > 0 and s.memory_clock_mhz > 0 for s in busy)
    assert all(s.memory_used_bytes > 2 * 8192**2 * 2 for s in busy)
    assert {s.uuid for s in busy} == {described.uuid}


@pytest.mark.parametrize("mode", list(Precision))
def test_sustained_rate_stays_below_the_datasheet_peak(device, described, mode):
    started_s = time.perf_counter()
    before = torch.cuda.memory_reserved(device)
    reached = tflops_sustained(device, [mode])[mode]
    spent_s = time.perf_counter() - started_s
    peak = dense_peak_tflops(described.name, mode)
    apply_precision(Precision.FP32)
    assert torch.cuda.memory_reserved(device) <= before + 64 * 2**20
    assert spent_s < 2.0
    if peak is not None:
        assert 0.4 * peak < reached <= 1.02 * peak


def test_no_memory_for_the_product_is_no_error(device):
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    held = torch.empty(free_bytes - 200 * 2**20, dtype=torch.uint8, device=device)
    assert tflops_sustained(device, [Precision.FP32]) == {Precision.FP32: None}
    del held
    torch.cuda.empty_cache()
