"""Doubts that GPUs cause, on made-up ones: throttling, other clocks, a slow driver; and drift."""

import json
import os
from pathlib import Path

import pytest

from tests.integration.sweeps import cpu_sweep, raybench, table, write_text

pytestmark = pytest.mark.long

FAKE_NVML = Path(__file__).parent / "fake_nvml"
CLASS = """\
import json
import os
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention


class OnGpu:
    def __init__(self, context, *, fault: str) -> None:
        self.items_per_step = context.batch_size
        # More than any device computes in the 4 ms of a step.
        self.flops_per_step = 1e15 if fault == "impossible" else 1
        self._fault, self._has_begun = fault, False
        self._tokens = torch.ones(1, 1, 8, 8)

    def step(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            now_ns = time.monotonic_ns()
            if self._fault == "throttled":
                self._set(limited_since_ns={"SW_THERM_SLOWDOWN": now_ns})
            elif self._fault == "other_clocks":
                self._set(sm_clock_mhz=990, limited_since_ns={"SW_POWER_CAP": now_ns})
        time.sleep(0.004)
        # On a CPU no fused kernel of torch has dropout.
        dropout = 0.5 if self._fault == "other_kernels" else 0.0
        scaled_dot_product_attention(self._tokens, self._tokens, self._tokens, dropout_p=dropout)

    def close(self) -> None:
        if self._fault == "unknown_users":
            self._set(silent_until_s=time.monotonic() + 4)
        else:
            self._set()

    def _set(self, **conditions) -> None:
        file = Path(os.environ["FAKE_CONDITIONS"])
        written = file.with_suffix(".new")
        written.write_text(json.dumps(conditions))
        written.rename(file)
"""
JOB = """\
workload: {kind: 'on_gpu:OnGpu'}
matrix:
  fault: [none, throttled, other_clocks, other_kernels, impossible, unknown_users]
  batch_size: 2
baseline: {fault: none}
measure: {warmup: 3, seconds: 0.5, max_seconds: 2}
"""
# Kind -> subject, least and greatest value, harm, mark.
EXPECTED = {
    "throttled": ("thermal_sw", 1, 1, "disturbed", "t"),
    "other_clocks": ("", 0.5, 0.5, "disturbed", ""),
    "other_kernels": ("`math` here and `flash` at the baseline point", None, None, "disturbed", ""),
    # 1e15 operations in 4 ms or more.
    "impossible": ("achieved_tflops_per_device", 6.7e4, 2.5e5, "wrong", ""),
    "unknown_users": (os.uname().nodename, None, None, "disturbed", ""),
}
DRIFTING = """\
import time
from pathlib import Path


class Slowing:
    flops_per_step = 1

    def __init__(self, context) -> None:
        self.items_per_step = context.batch_size
        builds = Path(__file__).with_name("builds")
        with builds.open("a") as file:
            file.write("x")
        self._wait_s = 0.01 * 1.5 ** builds.stat().st_size

    def step(self) -> None:
        time.sleep(self._wait_s)
"""


def report(folder):
    done = raybench("report", "latest", "--results", folder / "results", "--format", "json")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doubts")
    (folder / "on_gpu.py").write_text(CLASS)
    gpus = folder / "gpus"
    gpus.mkdir()
    (gpus / "GPU-00000000").touch()
    write_text(folder, JOB)
    made_up = {
        "FAKE_GPUS": str(gpus),
        "FAKE_GPU_NAME": "NVIDIA H200",
        "FAKE_CONDITIONS": str(folder / "conditions.json"),
        "PYTHONPATH": str(FAKE_NVML),
    }
    done = cpu_sweep(folder, cwd=folder, env={**os.environ, **made_up})
    assert done.returncode == 0, done.stdout + done.stderr
    return table(folder), report(folder)


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_fault_of_a_gpu_becomes_its_doubt(swept, kind):
    subject, least, most, harm, mark = EXPECTED[kind]
    points, reported = swept
    found = {(doubt["kind"], doubt["subject"]): doubt for doubt in reported["doubts"]}
    assert (kind, subject) in found, found
    doubt = found[kind, subject]
    assert (doubt["harm"], doubt["mark"], doubt["points"]) == (harm, mark, 1)
    if least is None:
        assert doubt["value"] is None
    else:
        assert least <= doubt["value"] <= most
    [faulty] = [one for one in points.to_dict("records") if dict(one["params"])["fault"] == kind]
    assert doubt["point_id"] == faulty["point_id"]


def test_a_step_that_gets_slower_is_a_drift(tmp_path):
    (tmp_path / "slowing.py").write_text(DRIFTING)
    write_text(
        tmp_path,
        "workload: {kind: 'slowing:Slowing'}\n"
        "matrix: {batch_size: 2}\n"
        "measure: {warmup: 3, seconds: 0.5, max_seconds: 2, rounds: 2, breakdown: false}\n",
    )
    done = cpu_sweep(tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [doubt] = [one for one in report(tmp_path)["doubts"] if one["kind"] == "drift"]
    assert 0.4 < doubt["value"] < 0.6
    assert doubt["subject"] in ("round 1 with 1", "round 2 with 1")
    assert (doubt["harm"], doubt["mark"], doubt["points"]) == ("disturbed", "", 2)
    assert doubt["point_id"] is None
