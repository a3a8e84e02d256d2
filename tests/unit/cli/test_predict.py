"""`raybench predict`, and the script that checks its intervals."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from builders import make_apart, make_device, make_point, make_record, make_steady, write_run
from commands import EXAMPLES, REPOSITORY

RUN = "ddp_scaling-20261122-142621-6209"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((RUN, "--world-size", "4"), "must be more than the 4 that"),
        ((RUN, "--world-size", "8,64"), "64 devices need several nodes; predictions end at"),
        ((RUN, "--world-size", "8,x"), "must be numbers from 2"),
    ],
)
def test_impossible_prediction_is_refused_in_one_line(command, arguments, why):
    assert why in command("predict", *arguments, results=EXAMPLES).refusal


@pytest.fixture
def two_nodes(tmp_path):
    """A run on 1, 2 and 3 devices of two nodes with four each, and on 8 devices of both."""
    devices = [make_device(rank, node_id=f"node-{rank // 4}") for rank in range(8)]
    records = [make_steady(1, 8.0), make_apart([8.0, 8.0], 9.0), make_apart([8.0] * 3, 9.3)]
    records.append(replace(make_apart([8.0] * 8, 14.0), devices=tuple(devices)))
    write_run(tmp_path, "run-a", records, devices)


@pytest.mark.usefixtures("two_nodes")
def test_a_run_over_nodes_predicts_within_a_node(command):
    found = json.loads(command("predict", "--world-size", "4", "--format", "json").out)
    [prediction] = found["predictions"]
    assert prediction["measured_world_size"] == 3
    assert prediction["step_ms_low"] < 9.5 < prediction["step_ms_high"]
    assert "end at the 4 devices of a node" in command("predict", "--world-size", "16").refusal


def test_steps_without_interval_are_not_predicted(tmp_path, command):
    records = [make_record(make_point(world_size=size), count=5) for size in (1, 2)]
    write_run(tmp_path, "run-a", records, [make_device(rank) for rank in range(4)])
    refusal = command("predict", "--world-size", "4").refusal
    assert "±10 % (1: too few samples, 2: too few samples)" in refusal


@pytest.mark.long
def test_the_accuracy_script_writes_its_figures(tmp_path):
    output = tmp_path / "prediction.json"
    script = [sys.executable, "-m", "benchmarks.prediction_accuracy", "-o", str(output)]
    subprocess.run(script, cwd=REPOSITORY, check=True)
    found = json.loads(output.read_text())["held_out"]
    assert found["all"]["points"] == len(found["points"]) > 20
    assert found["bound by GPUs"]["held"] > 0.9


@pytest.mark.usefixtures("two_nodes")
def test_the_printed_share_is_that_of_the_script(command):
    points = json.loads((REPOSITORY / "docs/benchmarks/prediction.json").read_text())
    is_held = [point["is_held"] for point in points["held_out"]["points"]]
    told = f"on 4 H200s of one node: {sum(is_held)} of {len(is_held)} measured step times lay in"
    assert told in " ".join(command("predict", "--world-size", "4").out.split())
