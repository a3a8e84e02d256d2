"""Single questions to NVML, which may refuse."""

import pynvml
import pytest

from raybench.hardware import nvml
from tests.unit.fake_nvml import NO_PERMISSION, UUID, FakeNvml, fields, refusal


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, NO_PERMISSION])
def test_a_refused_question_has_no_answer(monkeypatch, code):
    FakeNvml(nvmlDeviceGetPowerUsage=lambda _: refusal(code)).install(monkeypatch)
    assert nvml.ask(pynvml.nvmlDeviceGetPowerUsage, "handle") is None
    assert nvml.watts(pynvml.nvmlDeviceGetPowerUsage, "handle") is None


def test_fields_unknown_to_the_driver_are_omitted(monkeypatch):
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
def test_an_unknown_throttle_reason_shows_its_bit(monkeypatch, bits, reasons):
    FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=bits).install(monkeypatch)
    assert nvml.current_throttle_reasons("handle") == reasons


def test_an_old_driver_uses_the_old_calls(monkeypatch):
    FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=0x4, nvmlDeviceGetTemperature=41).install(
        monkeypatch
    )
    assert nvml.current_throttle_reasons("handle") == ("power_cap",)
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
def test_uuid_of_follows_cuda_visible_devices(monkeypatch, visible, index, uuid):
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
