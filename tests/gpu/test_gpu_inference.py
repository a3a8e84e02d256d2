"""Models that only run, on a CUDA device: `pytest -m gpu tests/gpu`."""

import pytest
import torch

from raybench.job.model import Measure
from raybench.job.point import USUAL_PRECISIONS, Precision
from raybench.measure.phases import measure
from raybench.workloads.transformer import Transformer
from tests.gpu.gpus import make_context

pytestmark = pytest.mark.gpu

SETTINGS = Measure(warmup=15, iterations=30, breakdown=False)


@pytest.mark.parametrize("mode", [Precision.FP32, Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_decoding_agrees_with_a_whole_pass(mode, cuda_graph):
    context = make_context(mode, batch_size=2, cuda_graph=cuda_graph)
    tokens = torch.randint(50_304, (2, 33), generator=context.generator(), device=context.device)
    seen = {}

    class Watched(Transformer):
        def check(self):
            with self.inference():
                seen["whole"] = self.model(tokens)[:, -1:].float()
                seen["step"] = seen["answer"].float()

        def run_forward(self, forward):
            # In a graph the answer is where the captured pass has put it.
            super().run_forward(lambda: seen.update(answer=forward()))

    def build():
        return Watched(context, seq_len=32, mode="inference", phase="decode")

    done = measure(build, context, SETTINGS)
    error = (seen["step"] - seen["whole"]).abs().max() / seen["whole"].abs().max()
    assert error < (1e-4 if mode is Precision.FP32 else 0.05)
    assert done.memory_bytes is not None


@pytest.mark.parametrize("mode", USUAL_PRECISIONS)
def test_a_residual_network_runs_in_every_precision(mode):
    pytest.importorskip("torchvision")
    from raybench.workloads.networks import ResNet

    context = make_context(mode)
    for channels_last in (False, True):
        network = ResNet(context, mode="inference", channels_last=channels_last)
        network.step()
        torch.cuda.synchronize()
        assert network.output_error < {Precision.FP32: 1e-4, Precision.TF32: 0.05}.get(mode, 0.3)
        if mode is not Precision.FP32:
            assert network.output_error > 1e-6
        network.close()
    trained = ResNet(context, mode="train")
    trained.step()
    torch.cuda.synchronize()
