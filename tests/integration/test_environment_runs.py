"""`raybench health --only environment` as a user types it: real Ray, real gloo."""

import json
import os

import pytest

from tests.integration.sweeps import raybench


def check(output, *options, **variables):
    words = ("health", "--only", "environment", "--device", "cpu", "--address", "local")
    return raybench(*words, "-o", output, *options, env={**os.environ, **variables})


@pytest.mark.long
def test_costly_variable_is_noted_on_sound_cluster(tmp_path):
    done = check(tmp_path, "--json", NCCL_P2P_DISABLE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout)
    found = {finding["test"]: finding for finding in content["findings"]}
    assert found["NCCL_P2P_DISABLE"]["verdict"] == "note"
    assert found["NCCL_P2P_DISABLE"]["command"] == "unset NCCL_P2P_DISABLE"
    assert found["first collective"]["value"] > 0
    assert found["all_reduce"]["value"] > 0
    assert found["transport"]["evidence"] == "gloo lo"
    assert found["load"]["value"] is not None
    assert {finding["stage"] for finding in content["findings"]} == {"environment"}
    assert content["run"]["environment"]["NCCL_P2P_DISABLE"] == "1"


@pytest.mark.long
def test_workers_that_cannot_connect_are_bad_with_reason(tmp_path):
    done = check(tmp_path, GLOO_SOCKET_IFNAME="nowhere0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.splitlines()[1].startswith("Red: first collective")
    assert "nowhere0" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
