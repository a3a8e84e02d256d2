"""Doubts that only a real GPU causes: its allocator runs out or asks the driver, other kernels."""

import json

import pytest

from tests.gpu.gpus import GPU
from tests.integration.sweeps import raybench, sweep_command, table, write_text

pytestmark = GPU

CLASS = """\
import torch

GIB = 2**30


class Allocating:
    flops_per_step = 1

    def __init__(self, context, *, fault: str) -> None:
        self.items_per_step = context.batch_size
        self._device, self._fault, self._sizes = context.device, fault, [GIB]
        if fault == "allocator_retries":
            # Room for either of two blocks, not for one beside the other.
            self._sizes = [2 * GIB, 3 * GIB]
            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            self._held = self._allocate(free_bytes - 4 * GIB)

    def step(self) -> None:
        for size in self._sizes:
            # The allocator keeps the first block, until the second one does not fit.
            self._allocate(size).zero_()
        if self._fault != "none":
            torch.cuda.empty_cache()

    def _allocate(self, size):
        return torch.empty(size, dtype=torch.uint8, device=self._device)
"""
ALLOCATING = """\
workload: {kind: 'allocating:Allocating'}
matrix: {fault: [none, device_allocs, allocator_retries], batch_size: 1}
measure: {warmup: 3, iterations: 20, max_seconds: 5, breakdown: false}
"""
# No kernel of flash or cuDNN computes in fp32.
ATTENTION = """\
workload: {kind: transformer, preset: tiny, seq_len: 256}
matrix: {precision: [bf16, fp32], batch_size: 2}
baseline: {precision: bf16}
measure: {warmup: 5, iterations: 20, max_seconds: 5}
"""


def sweep(folder, job):
    """Sweep a job on a GPU; return its points and the doubts of its report."""
    write_text(folder, job)
    done = raybench(*sweep_command(folder, "--device", "cuda")[3:], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report = raybench("report", "latest", "--results", folder / "results", "--format", "json")
    return table(folder).to_dict("records"), json.loads(report.stdout)["doubts"]


@pytest.fixture(scope="module")
def allocated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doubts")
    (folder / "allocating.py").write_text(CLASS)
    return sweep(folder, ALLOCATING)


@pytest.mark.parametrize("kind", ["device_allocs", "allocator_retries"])
def test_a_step_that_waits_for_memory_is_told(allocated, kind):
    points, doubts = allocated
    [doubt] = [one for one in doubts if one["kind"] == kind]
    [faulty] = [one for one in points if dict(one["params"])["fault"] == kind]
    assert doubt["point_id"] == faulty["point_id"]
    assert (doubt["harm"], doubt["mark"], doubt["points"]) == ("slowed", "", 1)
    assert (doubt["subject"], doubt["limit"]) == ("", 0)
    # One in each timed step, and in the few steps before them.
    steps = faulty["iterations"] * faulty["inner_iterations"]
    assert steps <= doubt["value"] <= 2 * steps
    [healthy] = [one for one in points if dict(one["params"])["fault"] == "none"]
    assert (healthy["alloc_retries"], healthy["device_allocs"]) == (0, 0)


def test_a_different_attention_kernel_than_baseline_is_reported(tmp_path):
    points, doubts = sweep(tmp_path, ATTENTION)
    kernels = {one["precision"]: ", ".join(one["attention_kernels"]) for one in points}
    print(kernels)
    [doubt] = [one for one in doubts if one["kind"] == "other_kernels"]
    subject = f"`{kernels['fp32']}` here and `{kernels['bf16']}` at the baseline point"
    assert doubt["subject"] == subject
    assert kernels["bf16"] != kernels["fp32"]
    assert (doubt["harm"], doubt["mark"], doubt["points"]) == ("disturbed", "", 1)
    assert (doubt["value"], doubt["limit"]) == (None, None)
    [other] = [one for one in points if one["precision"] == "fp32"]
    assert doubt["point_id"] == other["point_id"]
