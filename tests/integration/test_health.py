"""`raybench health` on real Ray and gloo, with faults that are injected for real."""

import getpass
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from raybench import load
from raybench.health.verdicts import OTHER_PROGRAMS_TEST
from tests.integration.health_runs import BETWEEN, CHECK, ill
from tests.integration.namespaces import needs_hosts, needs_tc, ray_hosts, slow_path
from tests.integration.sweeps import table, wait_for_rows

pytestmark = pytest.mark.long

ALL = ["alone", "pairs", "together", "smoke", "straggler"]
SOME = (
    "gemm fp32 512,same bits fp32 256,send 4 MiB,send latency 8 B,all_reduce 32 KiB,"
    "smoke 784-256-10,step compute"
)


@contextmanager
def check_of(output, stages, **environment):
    """A check that runs, and is ended whatever becomes of the test."""
    with subprocess.Popen(
        [*CHECK, str(output), *stages],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as check:
        try:
            yield check
        finally:
            check.terminate()


def end_of(check):
    said, complaint = check.communicate(timeout=280.0)
    assert check.returncode == 0, complaint
    return json.loads(said)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A check of a few tests of each stage."""
    output = tmp_path_factory.mktemp("health") / "results"
    with check_of(output, ALL, HEALTH_TESTS=SOME) as check:
        return end_of(check), output


def test_flipped_bit_is_reported_with_its_worker(tmp_path):
    # Of one test alone: before another class workers would get new processes.
    with check_of(tmp_path, ["alone"], FLIP_BITS="1", HEALTH_TESTS="same bits fp32 256") as check:
        found = end_of(check)
    named = ill(found).items()
    wrong = {name for name, of in named for one in of if "wrong bits" in one["reason"]}
    assert [name[-8:] for name in wrong] == ["worker 1"]
    assert 1 not in found["healthy"]
    # The same product is wrong in all passes: this drains the node.
    [node] = found["nodes"]
    drained = [(one["kind"], one["device"][-8:], one["test"]) for one in node["drain"]]
    assert node["state"] == "drain"
    assert drained == [("failed twice", "worker 1", "same bits fp32 256")]


def test_busy_neighbour_is_named_with_its_user(tmp_path):
    hog = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(hog) as first, subprocess.Popen(hog) as second:
        try:
            with check_of(tmp_path, ["alone"], HEALTH_TESTS="gemm fp32 512") as check:
                found = end_of(check)
        finally:
            first.kill()
            second.kill()
    [busy] = [one for one in found["findings"] if one["test"] == OTHER_PROGRAMS_TEST]
    assert busy["action"] == "wait"
    for process in (first, second):
        assert f"(process {process.pid} of {getpass.getuser()}, since 20" in busy["evidence"]
    assert f"{first.pid}" in busy["command"]


def test_check_samples_are_stored_like_any_run(checked):
    found, output = checked
    points, runs = load(output, "points"), load(output, "runs")
    assert list(runs["job_name"]) == ["health"]
    assert runs["points_total"].item() == points["point_id"].nunique()
    assert set(points["status"]) == {"ok"}
    assert set(points["round"]) >= {1, 2, 3}
    samples = load(output, "samples")
    assert set(samples["point_id"]) == set(points["point_id"])
    assert len(load(output, "health")) == len(found["findings"])


def test_every_stage_and_pair_direction_is_judged(checked):
    found, output = checked
    assert {one["stage"] for one in found["findings"]} == set(ALL)
    assert not [one for one in found["findings"] if one["verdict"] == "untested"]
    health = load(output, "health")
    sends = health[health["test"] == "send 4 MiB"]
    assert sends["subject"].nunique() == len(sends) == 2
    assert (sends["value"] > 0).all()


@pytest.mark.parametrize(
    ("harm", "reason"), [(signal.SIGSTOP, "timed out"), (signal.SIGKILL, "worker lost")]
)
def test_check_names_frozen_or_killed_worker_and_continues(harm, reason, tmp_path):
    output = tmp_path / "results"
    with check_of(output, ["alone", "pairs"]) as check:
        wait_for_rows(check, tmp_path, 1)
        os.kill(int(table(tmp_path, "devices")["process_id"][1]), harm)
        found = end_of(check)
    every = [one for findings in ill(found).values() for one in findings]
    told = [one for one in every if one["reason"].startswith(reason)]
    assert [one["subject"]["name"][-8:] for one in told] == ["worker 1"]
    read = {one["test"] for one in found["findings"] if one["value"] is not None}
    assert {one["test"] for one in found["findings"]} - read <= {told[0]["test"], "expected values"}
    # Software may have killed or stopped it: that drains no node.
    assert [node["state"] for node in found["nodes"]] == ["suspect"]


@needs_hosts
@needs_tc
def test_slow_link_is_reported_as_a_pair(tmp_path):
    output = tmp_path / "results"
    with ray_hosts(3, cpus=1) as (head, *others):
        slow_path(*others, rate="200mbit")
        address = {"HEALTH_ADDRESS": f"{head.address}:6379", "HEALTH_TESTS": BETWEEN}
        done = head.run([*CHECK, output, "pairs"], timeout_s=270, **address)
    assert done.returncode == 0, done.stderr
    named = ill(json.loads(done.stdout))
    assert named
    assert {finding["subject"]["kind"] for one in named.values() for finding in one} == {"pair"}
    for name in named:
        assert all(host.name in name for host in others), named
        assert head.name not in name
    evidence = {finding["evidence"] for one in named.values() for finding in one}
    ends = " and ".join(f"net0 of {host.name}" for host in others)
    assert any(ends in text for text in evidence), evidence
