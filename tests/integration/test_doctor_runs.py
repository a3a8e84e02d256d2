"""`raybench doctor` as a user types it: real Ray, real gloo."""

import json
import os

import pytest

from tests.integration.sweeps import raybench


def doctor(*options, **variables):
    words = ("doctor", "--device", "cpu", "--address", "local", *options)
    return raybench(*words, env={**os.environ, **variables})


def test_crippling_variable_is_found_on_sound_cluster():
    done = doctor("--json", NCCL_P2P_DISABLE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout)
    checks = {check["name"]: check for check in content["checks"]}
    assert checks["NCCL_P2P_DISABLE"]["verdict"] == "warn"
    assert len(checks["NCCL_P2P_DISABLE"]["details"]["devices"]) == len(content["devices"])
    assert checks["first collective"]["details"]["first_collective_s"] > 0
    assert checks["all_reduce"]["details"]["busbw_gb_s"] > 0
    assert checks["transport"]["found"] == "gloo over TCP on lo (127.0.0.1)"
    assert content["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert done.stderr.splitlines()[0] == "connecting to Ray"


@pytest.mark.long
def test_workers_that_cannot_connect_fail_with_reason():
    done = doctor(GLOO_SOCKET_IFNAME="nowhere0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    failed = done.stdout[done.stdout.index("\nfail  collective") :]
    assert "nowhere0" in failed
    assert failed.splitlines()[-1].endswith(" 1 fail")
    assert "Traceback" not in done.stdout + done.stderr
