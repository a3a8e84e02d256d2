"""Which points can be shared out unevenly: what a job file is refused for, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.errors import JobError
from raybench.job.model import load_job
from raybench.job.plan import make_plan

HEAD = "version: 1\nname: job\n"


def plan(folder: Path, matrix: str, workload: str = "{kind: mlp}") -> list[str]:
    """The shares of the points of a job."""
    path = folder / "job.yaml"
    text = f"workload: {workload}\nmatrix: {{world_size: 2, {matrix}}}\nbaseline: {{}}\n"
    path.write_text(HEAD + text)
    return [point.shares for point in make_plan(load_job(path)).points]


def test_shares_are_words_or_samples_of_each_rank(tmp_path: Path) -> None:
    words = ["equal", "fast", "by_speed", "by_speed_accumulation", "96/32"]
    assert plan(tmp_path, f"batch_size: 64, shares: [{', '.join(words)}]") == words


@pytest.mark.parametrize(
    ("matrix", "rule"),
    [
        (
            "batch_size: 64, shares: by_sped",
            "matrix.shares[0]: must be one of equal, fast, by_speed, by_speed_accumulation, or "
            "samples of each rank, as in 96/32, given 'by_sped'",
        ),
        ("batch_size: 64, shares: 96/16/16", "96/16/16 are 3, world_size is 2"),
        ("batch_size: 64, shares: 96/16", "96/16 are 112 samples together, a step has 128"),
        ("batch_size: 64, shares: by_speed, cuda_graph: true", "cuda_graph: true does not go with"),
        (
            "batch_size: 64, shares: fast, slow_ratio: 0.5, slow_count: 2",
            "shares: fast leaves no device when slow_count 2 are all",
        ),
        ("batch_size: 64, slow_ratio: 0", "must be greater than 0"),
        ("batch_size: 64, slow_ratio: 1.5", "must be less than or equal to 1"),
        ("batch_size: 64, slow_by: clocks", "must be 'compute' or 'sms'"),
    ],
)
def test_what_cannot_be_shared_out_so_is_told_before_anything_runs(
    matrix: str, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError) as caught:
        plan(tmp_path, matrix)
    assert rule in str(caught.value)


def test_explicit_shares_are_whole_passes(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="97/159 cannot be divided by grad_accumulation"):
        plan(tmp_path, "batch_size: 64, shares: 97/159", "{kind: mlp, grad_accumulation: 2}")


def test_a_workload_that_does_not_weigh_its_loss_has_no_shares(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"context\.loss_weight \(weighs_loss = True\); leave shar"):
        plan(tmp_path, "shares: by_speed", "{kind: gemm}")
