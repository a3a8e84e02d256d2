"""Who else uses a GPU: locks by its UUID, and the processes that NVML names."""

import subprocess
import sys
import time

import pytest

from raybench.cluster.device_reservation import (
    FOLDER_VARIABLE,
    DeviceLocks,
    ReservationTerms,
    this_process,
)
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.start import connect

pytestmark = pytest.mark.gpu

HOLD_MEMORY = """
import time, torch
kept = torch.zeros(2**20, device="cuda:0")
torch.cuda.synchronize()
time.sleep(60)
"""
_IS_THERE_S = 30.0


def test_another_sweep_and_another_process_on_the_gpu_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    terms = ReservationTerms(holder=this_process("run mine"), shared=True)
    cluster = RayCluster(connect("local", "cuda", wanted=1), terms=terms)
    try:
        cluster.start(1, "pack")
        [device] = cluster.devices
        assert device.uuid in DeviceLocks().other_users([device.uuid]).others
        assert cluster.watch_other_users([0])() == ()
        other = DeviceLocks()
        other.lock([device.uuid], this_process("run other"), shared=True)
        # Its parent ends at once, so that it is no child of this sweep.
        spawn = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
        subprocess.run([sys.executable, "-c", spawn, HOLD_MEMORY], check=True)
        deadline_s = time.monotonic() + _IS_THERE_S
        told = cluster.watch_other_users([0])()
        while not any("on cuda:" in one for one in told) and time.monotonic() < deadline_s:
            time.sleep(0.5)
            told = cluster.watch_other_users([0])()
        assert any(one.startswith("run other of ") for one in told)
        assert any("on cuda:0 of " in one for one in told), told
        other.close()
    finally:
        cluster.close()
