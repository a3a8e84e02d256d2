"""A machine without GPUs, one with GPUs, and one whose driver fails."""

import sys

import pynvml
import pytest
from commands import refusal_of
from fake_nvml import FakeNvml, refusal

from raybench.errors import InstallationError
from raybench.hardware import gpu_presence
from raybench.hardware.gpu_presence import count_gpus, visible_gpus, why_cuda_fails


@pytest.fixture(autouse=True)
def _visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_presence.metadata, "version", lambda name: "2.13.0")
    count_gpus.cache_clear()
    yield
    count_gpus.cache_clear()


@pytest.fixture
def gpu(tmp_path):
    """A folder of device files with one of a GPU."""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia0").touch()
    return tmp_path


@pytest.fixture
def cuda(monkeypatch):
    """Set why CUDA fails."""
    return lambda reason: monkeypatch.setattr(gpu_presence, "why_cuda_fails", lambda _: reason)


def nvml(monkeypatch, count):
    FakeNvml(nvmlDeviceGetCount=count).install(monkeypatch)


def test_machine_without_device_files_has_no_gpu(tmp_path, monkeypatch):
    FakeNvml(nvmlInit=refusal(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)).install(monkeypatch)
    (tmp_path / "nvidiactl").touch()
    assert count_gpus(tmp_path) == 0


def test_gpus_are_counted(gpu, monkeypatch, cuda):
    nvml(monkeypatch, 8)
    cuda("")
    assert count_gpus(gpu) == 8


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_do_not_count(gpu, monkeypatch, hidden):
    nvml(monkeypatch, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert count_gpus(gpu) == 0


def test_gpu_without_nvml_is_an_error(gpu, monkeypatch):
    FakeNvml(nvmlInit=refusal(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)).install(monkeypatch)
    told = refusal_of(InstallationError, count_gpus, gpu)
    assert told.startswith(f"this machine has {gpu}/nvidia0, but NVML fails: Driver Not Loaded; ")
    assert told.endswith("or use --device cpu")


def test_gpu_missing_from_nvml_is_an_error(gpu, monkeypatch):
    nvml(monkeypatch, 0)
    assert "but NVML fails: it lists no GPU; " in refusal_of(InstallationError, count_gpus, gpu)


def test_gpu_without_cuda_is_an_error(gpu, monkeypatch, cuda):
    nvml(monkeypatch, 2)
    cuda("CUDA_ERROR_SYSTEM_NOT_READY")
    told = refusal_of(InstallationError, count_gpus, gpu)
    assert told.startswith("NVML lists 2 GPUs here, but CUDA fails: CUDA_ERROR_SYSTEM_NOT_READY; ")


def test_cpu_torch_beside_a_gpu_is_an_error(gpu, monkeypatch, cuda):
    nvml(monkeypatch, 1)
    cuda("")
    monkeypatch.setattr(gpu_presence.metadata, "version", lambda name: "2.13.0+cpu")
    told = refusal_of(InstallationError, count_gpus, gpu)
    assert told.startswith("this machine has a GPU, and torch 2.13.0+cpu is a build for CPUs alone")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pass", ""),
        ("raise SystemExit('first\\nCUDA_ERROR_NO_DEVICE')", "CUDA_ERROR_NO_DEVICE"),
        ("raise SystemExit(1)", "it gives no reason"),
        ("import os; os.kill(os.getpid(), 11)", "its driver ends the process with signal 11"),
    ],
)
def test_reason_of_cuda_is_its_last_line(program, reason):
    assert why_cuda_fails([sys.executable, "-c", program]) == reason


def test_cuda_that_does_not_answer_is_a_reason(monkeypatch):
    monkeypatch.setattr(gpu_presence, "CUDA_TIMEOUT_S", 0.2)
    told = why_cuda_fails([sys.executable, "-c", "import time; time.sleep(60)"])
    assert told.startswith("it does not answer within ")


def test_visible_gpus_are_counted_without_cuda(gpu, monkeypatch):
    monkeypatch.setattr(gpu_presence, "why_cuda_fails", lambda _: pytest.fail("asked CUDA"))
    nvml(monkeypatch, 8)
    assert visible_gpus(gpu) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert visible_gpus(gpu) == 2
