"""A worker that times kernels only."""

import subprocess
import sys
from dataclasses import replace

from raybench.health.suite import Fleet, probes
from raybench.job.model import Measure, Span
from raybench.records.measurement import Failure, Measurement
from raybench.records.task import RankInfo, Task
from raybench.worker.kernel_worker import KernelWorker

RANK = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)
SETTINGS = Measure(warmup=Span(min=2, max=2), iterations=3, max_seconds=0.1, breakdown=False)
LIGHT = """
import sys
from raybench.worker.kernel_worker import KernelWorker
KernelWorker("cpu", 0)
assert "torch._dynamo" not in sys.modules
"""


def answer_to(worker, name, **params):
    device = worker.identity(node_id="n", address="127.0.0.1")
    by_name = {
        probe.test.name: probe.point for probe in probes(Fleet(devices=(device,)), ["alone"])
    }
    point = replace(by_name[name], params={**by_name[name].params, **params})
    return worker.run(Task(point=point, settings=SETTINGS, precisions=None), RANK, None)


def test_product_is_timed_with_its_operations():
    answer = answer_to(KernelWorker("cpu", 0), "gemm fp32 256")
    assert isinstance(answer, Measurement)
    assert len(answer.step_ns) == 3
    assert answer.flops_per_step == 2.0 * 256**3


def test_worker_goes_on_after_an_error():
    worker = KernelWorker("cpu", 0)
    failed = answer_to(worker, "memory 16 MB", size_bytes=6)
    assert isinstance(failed, Failure)
    assert failed.error_type == "UsageError"
    assert failed.worker_reusable
    assert isinstance(answer_to(worker, "gemm fp32 256"), Measurement)


def test_kernel_worker_does_not_load_the_compiler():
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=200)
