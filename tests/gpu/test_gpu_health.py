"""A health check on two GPUs or more, with faults that are injected for real."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from raybench import load
from tests.gpu.gpus import TWO_GPUS
from tests.integration.health_runs import CHECK, ill

pytestmark = TWO_GPUS

REPOSITORY = Path(__file__).parents[2]
# Few, so that a check takes little more than the start of its workers.
GEMM = "gemm bf16 8192"
MEMORY = "memory 500 MB"
FEW = [GEMM, MEMORY, "same bits bf16 2048", "h2d alone", "send 256 MiB", "all_reduce 1 GiB"]
HOG = """
import sys, torch
device = torch.device("cuda", int(sys.argv[1]))
left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
product = left @ right
torch.cuda.synchronize(device)
print("busy", flush=True)
while True:
    for _ in range(20):
        torch.matmul(left, right, out=product)
    torch.cuda.synchronize(device)
"""


def check(output, stages, tests, **environment):
    own = {"HEALTH_DEVICE": "cuda", "HEALTH_TESTS": ",".join(tests)}
    done = subprocess.run(
        [*CHECK, str(output / "results"), *stages],
        cwd=REPOSITORY,
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return json.loads(done.stdout)


def name_of_last(found):
    last = found["devices"][-1]
    return f"{last['host']} GPU {last['index']}"


@contextmanager
def hog(index):
    """Another program that multiplies on one GPU without a pause."""
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(index)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "busy\n"
            yield process.pid
        finally:
            process.kill()


def test_healthy_gpus_are_healthy(tmp_path):
    found = check(tmp_path, ["alone", "host-links", "pairs", "together"], FEW)
    assert not ill(found, "untested")
    assert len(found["healthy"]) == len(found["devices"])


def test_environment_of_gpus_is_read_once(tmp_path):
    found = check(tmp_path, ["environment"], ["first collective", "transport"])
    told = {one["test"]: one for one in found["findings"]}
    assert told["transport"]["evidence"]
    assert told["first collective"]["value"] > 0
    assert told["all_reduce"]["value"] > 1
    assert told["clocks"]["value"] > 1000
    assert "nccl" in told["versions"]["evidence"]
    assert "libnccl" in told["libraries"]["evidence"] or not told["libraries"]["value"]
    points = load(tmp_path / "results", "points")
    assert len(points) == 2


def test_disabled_peer_access_spoils_the_environment(tmp_path):
    found = check(
        tmp_path, ["environment"], ["first collective", "transport"], NCCL_P2P_DISABLE="1"
    )
    told = {one["test"]: one for one in found["findings"]}
    assert told["transport"]["verdict"] == "note"
    assert "SHM" in told["transport"]["reason"]
    # A machine without NVLink may need the variable.
    links = told["NVLink"]["value"]
    assert told["NCCL_P2P_DISABLE"]["verdict"] == ("bad" if links else "note")


def test_a_gpu_busy_with_another_program_is_named(tmp_path):
    with hog(1) as process_id:
        found = check(tmp_path, ["alone"], [GEMM, MEMORY])
    [busy] = [one for one in found["devices"] if one["index"] == 1]
    named = ill(found, "untested")
    assert list(named) == [f"{busy['host']} GPU 1"], named
    [worst, *_] = [one for one in named[f"{busy['host']} GPU 1"] if one["test"] == GEMM]
    assert worst["verdict"] == "bad"
    assert worst["action"] == "wait"
    assert f"(process {process_id} of " in worst["evidence"]
    assert f"-p {process_id}" in worst["command"]
    assert 1 not in found["healthy"]


@pytest.mark.parametrize(("sms", "least", "most"), [(99, 1.1, 1.5), (66, 1.4, 2), (33, 2, 4)])
def test_a_worker_with_few_multiprocessors_is_named(sms, least, most, tmp_path):
    found = check(tmp_path, ["alone"], [GEMM], FEW_SMS=str(sms))
    if "H200" not in found["devices"][0]["name"]:
        pytest.skip("what so few multiprocessors do is known of an H200")
    named = ill(found, "untested")
    assert list(named) == [name_of_last(found)], named
    [finding] = named[name_of_last(found)]
    assert least < finding["ratio"] < most, finding
    assert finding["verdict"] == ("bad" if finding["ratio"] > 1.5 else "suspect")


def test_disabled_peer_to_peer_is_named_as_cause(tmp_path):
    found = check(tmp_path, ["pairs", "together"], FEW, NCCL_P2P_DISABLE="1")
    if "H200" not in found["devices"][0]["name"]:
        pytest.skip("what all_reduce reaches is known of H200s")
    slow = [one for findings in ill(found, "untested").values() for one in findings]
    assert slow
    assert not [one for one in slow if one["subject"]["kind"] == "device"]
    assert any("NCCL_P2P_DISABLE" in one["command"] for one in slow)
