"""The settings that points have whatever their workload: declared once, known everywhere."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from builders import make_measure, make_point, make_record

from raybench.job import registry
from raybench.job.point import EXECUTION, OPTIONAL, RUN_SETTINGS, Point, Precision, SlowBy
from raybench.results.rows import point_row
from raybench.results.schema import TABLES
from raybench.workloads.base import Context

OTHER_VALUE: dict[str, Any] = {
    "precision": Precision.BF16,
    "cuda_graph": True,
    "shares": "by_speed",
    "slow_ratio": 0.5,
    "slow_count": 2,
    "slow_by": SlowBy.SMS,
    "devices": "H200",
    "strategy": "rail",
}


def other(name: str) -> Any:
    """A value that is not the default of the setting."""
    return OTHER_VALUE[name]


def test_run_settings_are_checked_by_what_is_declared_at_the_fields_of_a_point() -> None:
    settings = registry.settings(registry.load("mlp"))
    assert list(RUN_SETTINGS) == list(settings)[: len(RUN_SETTINGS)]
    for name, declared in RUN_SETTINGS.items():
        assert settings[name].description == declared.about.text
        assert settings[name].default == declared.default
    assert settings["precision"].type == "'fp32' | 'tf32' | 'fp16' | 'bf16' | 'float8'"
    assert settings["cuda_graph"].type == "boolean"
    assert settings["batch_size"].type == "integer >= 1"


@pytest.mark.parametrize("name", EXECUTION)
def test_how_steps_are_executed_is_told_to_workloads_ids_filters_and_tables(name: str) -> None:
    point = make_point(**{name: other(name)})
    assert name in {field.name for field in fields(Context)}
    assert point.execution[name] == other(name)
    assert point.settings[name] == other(name)
    assert point.point_id != make_point().point_id
    assert name in {column.name for column in TABLES["points"]}
    assert point_row("run", make_record(point), make_measure())[name] == other(name)


def test_an_option_is_named_only_where_it_differs_from_its_default() -> None:
    assert make_point().options == {}
    for name in OPTIONAL:
        assert make_point(**{name: other(name)}).options == {name: other(name)}


def test_a_table_of_before_a_setting_came_has_its_default() -> None:
    graph, precision = RUN_SETTINGS["cuda_graph"], RUN_SETTINGS["precision"]
    assert [graph.restore(stored) for stored in (None, float("nan"), True)] == [False, False, True]
    assert precision.restore("bf16") is Precision.BF16


def test_a_point_has_no_setting_that_is_not_told() -> None:
    told = {*RUN_SETTINGS, "workload", "params", "scaling", "env"}
    assert {field.name for field in fields(Point)} == told
