"""Regions of a step on a GPU: `pytest -m gpu tests/gpu`."""

import pytest
import torch
from torch import nn

from raybench.job.model import Measure
from raybench.measure.phases import measure
from raybench.records.doubts import NotMeasured
from raybench.workloads.base import Workload
from tests.gpu.gpus import make_context

pytestmark = pytest.mark.gpu

SETTINGS = Measure(warmup=5, iterations=20)
CYCLES = 10_000_000


class Spinning(Workload):
    """The device spins for one part and three times as long for another; the host goes on."""

    def __init__(self, context):
        self.context = context

    def step(self):
        with self.context.region("both"):
            with self.context.region("short"):
                torch.cuda._sleep(CYCLES)
            for _ in range(3):
                with self.context.region("long"):
                    torch.cuda._sleep(CYCLES)


class InBackward(Spinning):
    """Regions that autograd's own thread enters."""

    def __init__(self, context):
        super().__init__(context)
        self._model = nn.Linear(4096, 4096, device=context.device)
        self._rows = torch.randn(4096, 4096, device=context.device)

    def step(self):
        context = self.context

        class Timed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, rows):  # type: ignore[no-untyped-def]
                return rows.clone()

            @staticmethod
            def backward(ctx, gradient):  # type: ignore[no-untyped-def]
                with context.region("in backward"):
                    torch.cuda._sleep(CYCLES)
                return gradient

        with context.region("backward"):
            Timed.apply(self._model(self._rows)).sum().backward()  # type: ignore[no-untyped-call]


def test_regions_are_timed_on_the_device():
    context = make_context()
    breakdown = measure(lambda: Spinning(context), context, SETTINGS).breakdown
    found = {region.name: region for region in breakdown.regions}
    assert list(found) == ["both", "short", "long"]
    assert found["long"].calls == 3
    assert found["long"].ms == pytest.approx(3 * found["short"].ms, rel=0.1)
    assert found["both"].ms == pytest.approx(found["short"].ms + found["long"].ms, rel=0.05)
    assert found["both"].share == pytest.approx(1.0, abs=0.05)
    assert "CUDA events" in breakdown.methods["regions"]


def test_backward_regions_are_timed_on_their_own_stream():
    context = make_context()
    breakdown = measure(lambda: InBackward(context), context, SETTINGS).breakdown
    found = {region.name: region.ms for region in breakdown.regions}
    assert 0 < found["in backward"] < found["backward"]


def test_a_captured_step_reports_why_regions_are_missing():
    context = make_context(cuda_graph=True)
    breakdown = measure(lambda: Spinning(context), context, SETTINGS).breakdown
    assert breakdown.regions == ()
    assert breakdown.not_measured["regions"] is NotMeasured.CUDA_GRAPH
