"""What a device sustains in matrix products, on a device whose power limit the test plays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from raybench.job.point import Precision
from raybench.measure.flops import tflops_sustained

PRODUCT_TFLOP = 2.0 * 8192**3 / 1e12


class Limited:
    """Products take 1 ms each until the power limit acts, 0.15 s after the first, then 2 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.products = 0.0, 0
        monkeypatch.setattr(torch, "mm", self._product)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: self._event())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(
            torch, "Generator", lambda _: SimpleNamespace(manual_seed=lambda seed: None)
        )
        for name in ("randn", "empty"):
            monkeypatch.setattr(torch, name, lambda *_, **__: None)

    def _product(self, left: None, right: None, out: None) -> None:
        self.products += 1
        self.now_ms += 1.0 if self.now_ms < 150 else 2.0

    def _event(self) -> SimpleNamespace:
        event = SimpleNamespace(at_ms=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_ms", self.now_ms)
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event


def test_a_product_is_as_fast_as_under_the_power_limit_not_as_in_its_first_moments(monkeypatch):
    limited = Limited(monkeypatch)
    found = tflops_sustained(torch.device("cuda", 0), [Precision.BF16])
    assert found == {Precision.BF16: pytest.approx(PRODUCT_TFLOP / 2e-3)}
    assert limited.now_ms > 400


def test_a_cpu_and_a_device_without_room_for_the_matrices_have_no_rate(monkeypatch):
    limited = Limited(monkeypatch)
    assert tflops_sustained(torch.device("cpu"), list(Precision)) == dict.fromkeys(Precision)
    assert limited.products == 0

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "randn", full)
    assert tflops_sustained(torch.device("cuda", 0), [Precision.FP32]) == {Precision.FP32: None}
