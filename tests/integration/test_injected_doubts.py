"""Doubts that a class of the user's causes, which come out with kind, value, harm and mark."""

import json

import pytest

from raybench.records.doubts import DoubtKind
from tests.integration.sweeps import cpu_sweep, raybench, table, write_text

pytestmark = pytest.mark.long

CLASS = """\
import math
import random
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist

COMMUNICATES = ("slow_rank", "late_in_turn", "parts_exceed", "impossible")


class Doubtful:
    flops_per_step = 1

    def __init__(self, context, *, fault: str) -> None:
        self.items_per_step = None if fault == "no_throughput" else context.batch_size
        self._fault, self._rank, self._steps, self._is_slower = fault, context.rank, 0, False
        self._world_size = context.world_size
        self._noise = random.Random(1)
        self._value = torch.ones(8)
        if fault == "not_compared_gradients":
            self.gradient_error = None
        if fault == "round_failed":
            marker = Path(__file__).with_name("first_round_is_over")
            if marker.exists():
                raise ValueError("no second round")
            marker.touch()

    def step(self) -> None:
        self._steps += 1
        wait_ms = 4.0
        if self._fault == "stalls" and self._steps % 10 == 0:
            wait_ms = 40.0
        elif self._fault == "unsteady":
            wait_ms += 0.5 * self._steps
        elif self._fault == "wide":
            wait_ms = 4.0 * math.exp(2 * self._noise.gauss(0, 1))
        elif self._fault == "slow_rank" and self._rank == 1:
            wait_ms = 96.0
        elif self._fault == "late_in_turn" and self._steps % 3 == self._rank:
            wait_ms = 24.0
        elif self._fault == "parts_exceed":
            wait_ms = 258.0 if self._is_slower else 240.0
        elif self._fault == "impossible":
            wait_ms = 48.0 if self._world_size == 1 else 16.0
        elif self._fault == "no_breakdown" and self._is_slower:
            wait_ms = 12.0
        elif self._fault == "short":
            wait_ms = 45.0
        time.sleep(wait_ms / 1000)
        if self._fault in COMMUNICATES and self._world_size > 1:
            dist.all_reduce(self._value)
        if self._fault == "other_precision":
            torch.backends.cuda.matmul.fp32_precision = "tf32"

    def gradient_error(self) -> float:
        self._is_slower = True
        if self._fault == "check_failed":
            raise ValueError("not today")
        return 0.5 if self._fault == "other_gradients" else 0.0

    def close(self) -> None:
        if self._fault == "left_behind":
            subprocess.Popen(["sleep", "60"])
"""
JOB = """\
workload: {kind: 'doubtful:Doubtful'}
zip:
  - fault: [stalls, unsteady, wide, no_throughput, not_compared_gradients, other_gradients,
      check_failed, no_breakdown, other_precision, left_behind, emulated_precision,
      impossible, no_collectives, slow_rank, late_in_turn, parts_exceed, impossible]
    precision: [fp32, fp32, fp32, fp32, fp32, fp32, fp32, fp32, fp32, fp32, tf32, fp32, fp32, fp32,
      fp32, fp32, fp32]
    world_size: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
matrix: {batch_size: 2}
measure: {warmup: 3, seconds: 0.6, max_seconds: 2, check_gradients: true}
"""
# Kind -> subject, least and greatest value.
EXPECTED = {
    "stalls": ("", 0.3, 2.0),
    "unsteady": ("", 3, 2000),
    "wide": ("", 0.1, 20),
    "no_throughput": ("", None, None),
    "not_compared_gradients": ("Doubtful", None, None),
    "other_gradients": ("", 0.5, 0.5),
    "check_failed": ("gradient_error: ValueError: not today", None, None),
    "no_breakdown": ("", 1.8, 4),
    "other_precision": ("mixed", None, None),
    "left_behind": ("1 child process (sleep)", None, None),
    "emulated_precision": ("a CPU", None, None),
    "no_collectives": ("", None, None),
    "slow_rank": ("rank 1", 0.5, 1.0),
    "late_in_turn": ("", 0.2, 1.0),
    "parts_exceed": ("", 0.02, 0.1),
}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doubts")
    (folder / "doubtful.py").write_text(CLASS)
    write_text(folder, JOB)
    done = cpu_sweep(folder, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report = raybench("report", "latest", "--results", folder / "results", "--format", "json")
    return table(folder), json.loads(report.stdout)["doubts"]


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_fault_becomes_its_doubt(swept, kind):
    subject, least, most = EXPECTED[kind]
    points, _ = swept
    [doubts] = [
        row["doubts"] for _, row in points.iterrows() if kind in dict(row["params"])["fault"]
    ]
    found = {doubt["kind"]: doubt for doubt in doubts}
    assert kind in found, found
    assert found[kind]["subject"] == subject
    if least is None:
        assert found[kind]["value"] is None
    else:
        assert least <= found[kind]["value"] <= most


def test_each_kind_is_reported_with_mark_and_harm(swept):
    _, groups = swept
    assert {group["kind"] for group in groups} >= {
        *("stalls", "other_gradients", "check_failed", "slow_rank", "left_behind"),
        *("late_in_turn", "parts_exceed"),
    }
    for group in groups:
        kind = DoubtKind(group["kind"])
        assert (group["mark"], group["harm"]) == (kind.mark, kind.harm.name.lower())
    harms = [DoubtKind(group["kind"]).harm for group in groups]
    assert harms == sorted(harms)


def test_a_slowed_baseline_makes_a_speed_up_impossible(swept):
    _, groups = swept
    [doubt] = [group for group in groups if group["kind"] == "impossible"]
    assert (doubt["subject"], doubt["limit"], doubt["points"]) == ("efficiency", 1.02, 1)
    # A step of 48 ms on one rank takes 16 ms on two.
    assert 2 < doubt["value"] < 3.1
    assert (doubt["harm"], doubt["mark"]) == ("wrong", "")


def test_short_time_and_failed_round_are_doubts(tmp_path):
    (tmp_path / "doubtful.py").write_text(CLASS)
    write_text(
        tmp_path,
        "workload: {kind: 'doubtful:Doubtful'}\n"
        "matrix: {batch_size: 2, fault: [short, round_failed]}\n"
        "measure: {warmup: 3, seconds: 1, max_seconds: 1.2, rounds: 2, breakdown: false}\n",
    )
    done = cpu_sweep(tmp_path, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = raybench("report", "latest", "--results", tmp_path / "results", "--format", "json")
    found = {group["kind"]: group for group in json.loads(report.stdout)["doubts"]}
    assert (found["short"]["limit"], found["short"]["value"] < 0.95) == (1.0, True)
    assert found["round_failed"]["value"] == 2
    assert "no second round" in found["round_failed"]["subject"]
