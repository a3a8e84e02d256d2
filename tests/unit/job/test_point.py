"""The settings that points have whatever their workload: declared once, known everywhere."""

from dataclasses import fields
from typing import Any

import pytest
from builders import make_measure, make_point, make_record

from raybench.job import registry
from raybench.job.point import EXECUTION, OPTIONAL, RUN_SETTINGS, Precision, SlowBy
from raybench.results.point_row import point_row
from raybench.results.tables import TABLES
from raybench.workloads.base import Context

# Values that are not the defaults.
OTHER: dict[str, Any] = {
    "precision": Precision.BF16,
    "cuda_graph": True,
    "shares": "by_speed",
    "slow_ratio": 0.5,
    "slow_count": 2,
    "slow_by": SlowBy.SMS,
    "devices": "H200",
    "strategy": "rail",
}


def test_run_settings_are_checked_by_what_is_declared_at_the_fields_of_a_point():
    settings = registry.settings(registry.load("mlp"))
    assert list(RUN_SETTINGS) == list(settings)[: len(RUN_SETTINGS)]
    for name, declared in RUN_SETTINGS.items():
        assert settings[name].description == declared.about.text
        assert settings[name].default == declared.default
    assert settings["precision"].type == "'fp32' | 'tf32' | 'fp16' | 'bf16' | 'float8'"
    assert settings["cuda_graph"].type == "boolean"
    assert settings["batch_size"].type == "integer >= 1"


@pytest.mark.parametrize("name", EXECUTION)
def test_how_steps_are_executed_is_told_to_workloads_ids_filters_and_tables(name):
    point = make_point(**{name: OTHER[name]})
    assert name in {field.name for field in fields(Context)}
    assert point.execution[name] == OTHER[name]
    assert point.settings[name] == OTHER[name]
    assert point.point_id != make_point().point_id
    assert name in {column.name for column in TABLES["points"]}
    row = point_row("run", make_record(point), make_measure())
    assert getattr(row, name) == OTHER[name]


def test_an_option_is_named_only_where_it_differs_from_its_default():
    assert make_point().options == {}
    for name in OPTIONAL:
        assert make_point(**{name: OTHER[name]}).options == {name: OTHER[name]}
