"""Who else uses a GPU: locks by its UUID, and the processes that NVML names."""

import os
import signal
import socket
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
from raybench.cluster.ray_cluster.start import connect_ray
from raybench.hardware import nvml
from tests.gpu.gpus import needs_two
from tests.integration.sweeps import raybench, sweep_command, table, write_text

pytestmark = pytest.mark.gpu

HOLD_MEMORY = """
import os, sys, time
# With a context on this GPU alone.
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
import torch
kept = torch.zeros(2**20, device="cuda")
torch.cuda.synchronize()
print("there", flush=True)
time.sleep(60)
"""
JOB = """\
workload: {kind: mlp, hidden: 256, layers: 2}
matrix: {world_size: [1], batch_size: [8, 16]}
measure: {warmup: 5, iterations: 20, max_seconds: 2, breakdown: false}
"""
_IS_THERE_S = 30.0


def test_other_sweeps_and_processes_on_gpus_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    terms = ReservationTerms(holder=this_process("run mine"), shared=True)
    cluster = RayCluster(connect_ray("local", "cuda", wanted=1), terms=terms)
    try:
        cluster.start(1, "pack")
        [device] = cluster.devices
        assert device.uuid in DeviceLocks().other_users([device.uuid]).others
        assert cluster.watch_other_users([0])().on_devices == ()
        other = DeviceLocks()
        other.lock([device.uuid], this_process("run other"), shared=True)
        # Its parent ends at once, so that it is no child of this sweep.
        spawn = (
            "import subprocess as s, sys; command = [sys.executable, '-c', sys.argv[1], '0']\n"
            "print(s.Popen(command, stdout=s.DEVNULL).pid)"
        )
        command = [sys.executable, "-c", spawn, HOLD_MEMORY]
        stranger = int(subprocess.check_output(command, text=True))
        deadline_s = time.monotonic() + _IS_THERE_S
        told = cluster.watch_other_users([0])().on_devices
        while not any("on cuda:" in one for one in told) and time.monotonic() < deadline_s:
            time.sleep(0.5)
            told = cluster.watch_other_users([0])().on_devices
        assert any(one.startswith("run other of ") for one in told)
        assert any("on cuda:0 of " in one for one in told), told
        os.kill(stranger, signal.SIGKILL)
        other.close()
    finally:
        cluster.close()


@needs_two
def test_a_process_on_another_gpu_shares_the_node(tmp_path):
    write_text(tmp_path, JOB)
    command = [sys.executable, "-c", HOLD_MEMORY, "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout.readline() == "there\n"
            # As nvidia-smi counts: CUDA may see some of the GPUs only.
            [number] = [
                number
                for uuid, number in nvml.uuids().items()
                if stranger.pid in nvml.compute_process_ids(nvml.device(uuid))
            ]
            done = raybench(*sweep_command(tmp_path, "--device", "cuda")[3:])
        finally:
            stranger.kill()
    assert done.returncode == 0, done.stderr
    named = f"process {stranger.pid} ("
    for point in table(tmp_path).to_dict("records"):
        print(point["neighbours"], point["node_neighbours"], point["doubts"])
        [told] = [one for one in point["node_neighbours"] if one.startswith(named)]
        assert told.endswith(f" used GPU {number} of {socket.gethostname()}")
        assert told in [d["subject"] for d in point["doubts"] if d["kind"] == "shared_node"]
        assert not any(named in one for one in point["neighbours"])
