"""`raybench ab` with real sweeps: a slowdown, a failing point, an interrupt, a killed process."""

import json
import signal
import subprocess

import pytest

from tests.integration.clusters import start_cluster
from tests.integration.sweeps import RAYBENCH, raybench, wait_for

CLASS = """\
import time


class Paced:
    takes_batch_size = False

    def __init__(self, context, *, ms: float = 20.0):
        self.ms = ms

    def step(self):
        time.sleep(self.ms / 1000)
"""
# 50 % longer at one point, and an error at another.
CHANGED = CLASS.replace(
    "        time.sleep(self.ms / 1000)\n",
    """\
        if self.ms == 40:
            raise RuntimeError("no kernel for 40")
        time.sleep(self.ms / 1000 * (1.5 if self.ms == 30 else 1))
""",
)
JOB = """\
version: 1
name: paced
workload: {kind: "paced:Paced"}
matrix: {world_size: [1], ms: [20.0, 30.0, 40.0]}
measure: {warmup: 2, iterations: 20, max_seconds: 10}
"""


@pytest.fixture(scope="module")
def address():
    """A cluster, so that a start need not start Ray."""
    cluster = start_cluster(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "paced.py").write_text(CLASS)
    (folder / "job.yaml").write_text(JOB)
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@localhost")
    for words in (("init", "-q"), ("add", "--all"), (*identity, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def words(address, *more):
    return ["ab", "job.yaml", "--device", "cpu", "--address", address, "--threshold", "10%", *more]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_slowdown_and_failure_of_new_code_are_found(repository, address):
    (repository / "paced.py").write_text(CHANGED)
    done = raybench(*words(address, "--old", "HEAD", "--json"), cwd=repository, timeout_s=800)
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)
    points = {point["settings"]["ms"]: point for point in verdict["points"]}
    assert [points[ms]["verdict"] for ms in ("20.0", "30.0", "40.0")] == [
        "same",
        "slower",
        "not_measured",
    ]
    assert points["30.0"]["low"] < -1 / 3 < points["30.0"]["high"] + 0.02
    assert "no kernel for 40" in points["40.0"]["why"]["text"]
    assert verdict["pairs"] >= 6


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="interrupt"),
        pytest.param(signal.SIGKILL, id="kill"),
    ],
)
def test_gate_goes_on_after_its_process_ended(number, repository, address):
    process = subprocess.Popen(
        [*RAYBENCH, *words(address, "--old", "HEAD", "--new", "HEAD")],
        cwd=repository,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The first start has measured a point, and goes on.
    wait_for(lambda: list(repository.glob("results/ab/*/points/*/[!.]*.parquet")), within_s=120)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; go on with: " in said
    done = raybench("ab", "--resume", "latest", "--max-minutes", "0.01", "--json", cwd=repository)
    assert done.returncode == 5, done.stderr
    # A killed gate leaves its sweep running.
    is_told = "an earlier gate was killed; waiting for its run" in done.stderr
    assert is_told == (number == signal.SIGKILL)
    verdict = json.loads(done.stdout)
    assert (verdict["verdict"], verdict["pairs"], verdict["starts"]) == ("undecided", 1, 2)
    # The run that was cut is one of the two.
    assert len(list(repository.glob("results/ab/*/runs/*"))) == 2
