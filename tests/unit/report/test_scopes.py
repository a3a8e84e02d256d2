"""Tables of scopes and of ranks: a module beside what it is a part of, and ranks that differ."""

from dataclasses import replace

import pandas as pd
import pytest
from builders import (
    make_apart,
    make_failed,
    make_point,
    make_record,
    make_rows,
    make_run,
    make_summary,
    tables_of,
    with_values,
)

from raybench.analysis.answer import decide
from raybench.analysis.run_data import RunData
from raybench.records.measurement import Breakdown
from raybench.report.run_report import RunReport

# Of a step on 1 and on 2 devices, in ms. The first step of all takes 50.
STEPS = {"block": (8.0, 4.4), "loop": (40.0, 32.0)}
# Without communication, and what the device works of that.
LOCAL = {"block": (8.0, 4.0), "loop": (40.0, 30.0)}
DEVICE = {"block": (8.0, 4.0), "loop": (40.0, 20.0)}


def point(scope, world_size, *, is_new=True, **params):
    made = make_point(
        workload="mine:Pipeline", params={"scope": scope, **params}, world_size=world_size,
        batch_size=None, global_batch_size=None, scaling="strong",
    )  # fmt: skip
    step_ms = STEPS[scope][world_size - 1]
    told = {"items_per_step": 1 / world_size, "is_of_new_process": is_new}
    return make_record(made, step_ms=step_ms, count=40, of_ranks=told)


def take_apart(record):
    scope, size = str(record.point.params["scope"]), record.point.world_size
    local_ms, device_ms = LOCAL[scope][size - 1], DEVICE[scope][size - 1]
    breakdown = Breakdown(
        local_ms=((local_ms,) * 3,) * 2, device_ms=device_ms, comm_ms=(local_ms,) * (size - 1)
    )
    measurements = [replace(one, breakdown=breakdown) for one in record.measurements]
    return replace(record, measurements=tuple(measurements))


def pipeline(**params):
    return [point(scope, ranks, **params) for scope in ("loop", "block") for ranks in (1, 2)]


def test_scopes_are_compared_cold_and_warm():
    [table] = tables_of(make_summary(pipeline()), "scopes")
    assert table.title == "mine:Pipeline: blocks, forward pass and whole loop, ms"
    assert table.titles == (
        "GPUs", "scope", "cold", "warm", "cold speed-up", "warm speed-up", "GiB",
    )  # fmt: skip
    cells = [dict(zip(table.titles, row, strict=True)) for row in table.texts]
    assert [(row["scope"], row["GPUs"]) for row in cells] == [
        ("block", "1"), ("block", "2"), ("loop", "1"), ("loop", "2"),
    ]  # fmt: skip
    assert [row["cold"] for row in cells] == ["50.00"] * 4
    assert [round(float(row["warm"]), 1) for row in cells] == [8.0, 4.4, 40.0, 32.0]
    assert [row["cold speed-up"] for row in cells] == ["1.00"] * 4
    assert [row["warm speed-up"] for row in cells] == ["1.00", "1.82", "1.00", "1.25"]
    assert {row["GiB"] for row in cells} == {"1.00"}


@pytest.mark.parametrize("used", [1, 2])
def test_reused_processes_have_no_cold_speed_up(used):
    loop = [point("loop", ranks, is_new=ranks != used) for ranks in (1, 2)]
    found = make_summary([*loop, *pipeline()[2:]])
    [table] = tables_of(found, "scopes")
    cells = [dict(zip(table.titles, row, strict=True)) for row in table.texts]
    assert [row["cold"] for row in cells] == ["50.00"] * 4
    assert cells[-1]["cold speed-up"] == ""
    assert [row["cold speed-up"] for row in cells[:2]] == ["1.00", "1.00"]


def test_scope_losses_have_a_column_per_cause():
    found = make_summary([take_apart(record) for record in pipeline()])
    [table] = tables_of(found, "scopes")
    cells = dict(zip(table.titles, table.texts[-1], strict=True))
    assert (cells["comm %"], cells["host gap %"]) == ("6.3%", "31.2%")


def test_differing_settings_have_a_column_each():
    found = make_summary([*pipeline(compile=True), *pipeline(compile=False)])
    [table] = tables_of(found, "scopes")
    titles = [one.title for one in table.columns if one.is_setting]
    assert titles == ["GPUs", "scope", "compile"]
    assert len(table.rows) == 8


def test_unmeasured_points_and_single_scopes_are_omitted():
    failed = make_failed(pipeline()[0].point)
    [table] = tables_of(make_summary([failed, *pipeline()[1:]]), "scopes")
    assert [row[:2] for row in table.texts] == [("1", "block"), ("2", "block"), ("2", "loop")]
    assert tables_of(make_summary([point("loop", 1), point("loop", 2)]), "scopes") == []


def test_clocks_under_the_power_cap_are_a_doubt():
    capped = make_rows(pipeline()[:2], throttled=True, throttle_reasons=("power_cap",))
    points = with_values(capped, sm_clock_mhz_p50=[1815.0, 1965.0])
    found = RunData(run=make_run("run-a"), devices=pd.DataFrame(), points=points)
    [doubt] = [
        one
        for one in RunReport(answer=decide(found)).doubts
        if one.text == "the SM clock is 1.08 times that of the baseline point"
    ]
    assert doubt.advice.endswith(" the speed-up is up to 8 % too high.")


def ran(*own_ms, batch=64):
    """A step of 25 ms of ranks that take so long for their own, of which the host loses 0.5 ms."""
    point = make_point(world_size=len(own_ms), batch_size=batch)
    return make_apart(own_ms, 25.0, idle_ms=0.5, point=point)


def test_slow_rank_point_shows_parts_of_each_rank():
    [table] = tables_of(make_summary([ran(10.0, 20.0)]), "ranks")
    assert table.kind == "where ranks differ, ms of each rank"
    assert table.titles[-5:] == ("rank", "compute", "host gap", "waits", "unexplained")
    first, second = ("0*", "9.50", "0.500", "10.0", "5.00"), ("1", "19.5", "0.500", "0", "5.00")
    assert [row[-5:] for row in table.texts] == [first, second]
