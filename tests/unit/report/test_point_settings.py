"""Points of several workloads, told from each other in few columns."""

from __future__ import annotations

from builders import make_row

from raybench.report.point_settings import point_names, setting_columns


def row(workload, batch_size=None, **params):
    known = {"point_id": f"{workload}-1", "scaling": "weak", "batch_size": batch_size}
    return make_row(workload=workload, params=params, world_size=2, **known)


def cells_of(rows):
    """The cells of each column of settings, by its title."""
    return {column.title: [cell(row) for row in rows] for column, cell in setting_columns(rows)}


def test_points_of_one_workload_have_a_column_for_each_setting_that_varies():
    rows = [row("mlp", 64, hidden="128"), row("mlp", 128, hidden="256")]
    assert cells_of(rows) == {"hidden": ["128", "256"], "batch_size": ["64", "128"]}


def test_points_of_several_workloads_have_one_column_of_what_is_theirs():
    rows = [
        row("gemm", k="256", direction=""),
        row("gemm", k="512", direction=""),
        row("smoke", rows="64"),
    ]
    assert cells_of(rows) == {
        "workload": ["gemm", "gemm", "smoke"],
        "settings": ["k=256", "k=512", ""],
    }
    assert point_names(rows) == ["gemm k=256", "gemm k=512", "smoke"]


def test_a_point_without_others_is_named_by_its_id():
    assert point_names([row("mlp", 64)]) == ["mlp-1"]
