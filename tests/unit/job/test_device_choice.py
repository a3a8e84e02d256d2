"""Which devices points may use: an axis, or one choice for all."""

from __future__ import annotations

import pytest

from jobs import MLP, load, plan, problems_of
from raybench.job.point import choose_devices

MODELS = ["NVIDIA H200", "NVIDIA A100", "NVIDIA H200"]
A100 = "placement: {devices: A100}\n"


def job(matrix: str, more: str = "") -> str:
    return f"{MLP}matrix: {{batch_size: 64, {matrix}}}\n{more}"


def test_devices_are_chosen_by_a_part_of_their_models_name_or_by_number():
    assert choose_devices("any", MODELS) == [0, 1, 2]
    assert choose_devices("h200", MODELS) == [0, 2]
    assert choose_devices("2/1", MODELS) == [2, 1]
    assert choose_devices("1/7", MODELS) == [1]
    assert choose_devices("B200", MODELS) == []
    # A choice by number needs a cluster that has them.
    points = plan(job("world_size: 2, devices: [1/7, H200]")).points
    assert [point.devices_needed for point in points] == [8, 2]


def test_devices_are_an_axis_or_the_choice_of_the_placement():
    points = plan(job("world_size: [1, 2], devices: [H200, A100, any]")).points
    assert [point.devices for point in points] == ["H200", "A100", "any"] * 2
    assert len({point.point_id for point in points}) == 6
    assert plan(job("world_size: 1", A100)).points[0].devices == "A100"
    assert plan(job("world_size: 1, devices: H200", A100)).points[0].devices == "H200"


def test_any_device_is_the_choice_of_a_job_without_one():
    plain = job("world_size: 1")
    given = job("world_size: 1", "placement: {devices: any}\n")
    assert load(plain).meaning_sha256 == load(given).meaning_sha256
    assert load(plain).meaning_sha256 != load(job("world_size: 1", A100)).meaning_sha256
    (point,) = plan(given).points
    assert point.point_id == plan(plain).points[0].point_id
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
def test_a_choice_that_nothing_can_meet_is_told_before_anything_runs(matrix, more, rule):
    assert rule in problems_of(job(matrix, more))[0]
