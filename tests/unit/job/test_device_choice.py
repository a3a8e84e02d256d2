"""Which devices points may use: an axis, or one choice for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.errors import JobError
from raybench.job.device_choice import choose, devices_needed
from raybench.job.model import Job, load_job
from raybench.job.plan import make_plan

MODELS = ["NVIDIA H200", "NVIDIA A100", "NVIDIA H200"]


def job(folder: Path, matrix: str, more: str = "") -> Job:
    path = folder / "job.yaml"
    head = "version: 1\nname: job\nworkload: {kind: mlp}\n"
    path.write_text(f"{head}matrix: {{batch_size: 64, {matrix}}}\n{more}")
    return load_job(path)


def test_devices_are_chosen_by_a_part_of_their_models_name_or_by_number() -> None:
    assert choose("any", MODELS) == [0, 1, 2]
    assert choose("h200", MODELS) == [0, 2]
    assert choose("2/1", MODELS) == [2, 1]
    assert choose("1/7", MODELS) == [1]
    assert choose("B200", MODELS) == []


def test_a_choice_by_number_needs_a_cluster_that_has_them() -> None:
    assert devices_needed("1/7", 2) == 8
    assert devices_needed("H200", 2) == 2


def test_devices_can_be_an_axis(tmp_path: Path) -> None:
    points = make_plan(job(tmp_path, "world_size: [1, 2], devices: [H200, A100, any]")).points
    assert [point.devices for point in points] == ["H200", "A100", "any"] * 2
    assert len({point.point_id for point in points}) == 6


def test_a_choice_for_all_points_holds_where_devices_is_no_axis(tmp_path: Path) -> None:
    chosen = "placement: {devices: A100}\n"
    (point,) = make_plan(job(tmp_path, "world_size: 1", chosen)).points
    assert point.devices == "A100"
    (point,) = make_plan(job(tmp_path, "world_size: 1, devices: H200", chosen)).points
    assert point.devices == "H200"


def test_points_and_jobs_without_a_choice_are_what_they_were(tmp_path: Path) -> None:
    plain = job(tmp_path, "world_size: 1")
    given = job(tmp_path, "world_size: 1", "placement: {devices: any}\n")
    other = job(tmp_path, "world_size: 1", "placement: {devices: A100}\n")
    assert plain.meaning_sha256 == given.meaning_sha256 != other.meaning_sha256
    (point,) = make_plan(given).points
    assert point.point_id == make_plan(plain).points[0].point_id
    assert "devices" not in point.options


@pytest.mark.parametrize(
    ("matrix", "more", "rule"),
    [
        ("devices: 0/0", "", "must be any, a model as in H200, or different numbers as in 0/2"),
        ("devices: ' '", "", "must be any, a model as in H200"),
        ("world_size: 2", "placement: {devices: ''}\n", "placement.devices: must be any, a model"),
        ("world_size: 4, devices: 0/2", "", "devices: 0/2 are 2, world_size is 4"),
    ],
)
def test_a_choice_that_nothing_can_meet_is_told_before_anything_runs(
    matrix: str, more: str, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError) as caught:
        make_plan(job(tmp_path, matrix, more))
    assert rule in str(caught.value)
