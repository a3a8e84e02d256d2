"""Which points can be shared out unevenly: what a job file is refused for, and how it is told."""

from __future__ import annotations

import pytest

from jobs import HEAD, plan, problems_of


def job(matrix: str, workload: str = "{kind: mlp}") -> str:
    text = f"workload: {workload}\nmatrix: {{world_size: 2, {matrix}}}\nbaseline: {{}}\n"
    return HEAD + text


def test_shares_are_words_or_samples_of_each_rank():
    words = ["equal", "fast", "by_speed", "by_speed_accumulation", "96/32"]
    points = plan(job(f"batch_size: 64, shares: [{', '.join(words)}]")).points
    assert [point.shares for point in points] == words


@pytest.mark.parametrize(
    ("matrix", "rule"),
    [
        ("shares: by_sped", "matrix.shares[0]: must be one of equal, fast, by_speed"),
        ("shares: 96/16/16", "96/16/16 are 3, world_size is 2"),
        ("shares: 96/16", "96/16 are 112 samples together, a step has 128"),
        ("shares: by_speed, cuda_graph: true", "cuda_graph: true does not go with"),
        ("shares: fast, slow_ratio: 0.5, slow_count: 2", "leaves no device when slow_count 2"),
        ("slow_ratio: 0", "must be greater than 0"),
        ("slow_ratio: 1.5", "must be less than or equal to 1"),
        ("slow_by: clocks", "must be 'compute' or 'sms'"),
    ],
)
def test_what_cannot_be_shared_out_so_is_told_before_anything_runs(matrix, rule):
    assert rule in problems_of(job(f"batch_size: 64, {matrix}"))[0]


def test_explicit_shares_are_whole_passes():
    text = job("batch_size: 64, shares: 97/159", "{kind: mlp, grad_accumulation: 2}")
    assert "97/159 cannot be divided by grad_accumulation" in problems_of(text)[0]


def test_a_workload_that_does_not_weigh_its_loss_has_no_shares():
    told = problems_of(job("shares: by_speed", "{kind: gemm}"))[0]
    assert "context.loss_weight (weighs_loss = True); leave shar" in told
