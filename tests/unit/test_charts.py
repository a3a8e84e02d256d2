from __future__ import annotations

import json

import pytest
from builders import make_failed, make_point, make_record, make_run
from test_reports import collective, report, sweep

from raybench.errors import UsageError
from raybench.point import Precision
from raybench.report import charts
from raybench.report.bandwidth_chart import bandwidth_chart, has_bandwidths


def many_lines() -> list[object]:
    return [
        make_record(
            make_point(world_size=size, precision=precision, batch_size=batch), step_ms=size
        )
        for size in (1, 2, 4)
        for precision in (Precision.BF16, Precision.FP32)
        for batch in (256, 16, 64)
    ]


def test_few_lines_share_one_panel_and_are_named_in_full() -> None:
    spec = charts.speed_up_chart(report(sweep()))
    assert "facet" not in spec
    assert spec["layer"][1]["encoding"]["color"]["scale"]["domain"] == [
        "fp32, batch 64 per device",
        "bf16, batch 64 per device",
    ]
    values = spec["data"]["values"]
    assert len(values) == 5
    [last] = [v for v in values if v["world_size"] == 4]
    assert last["speed_up"] == pytest.approx(8 / 12 * 4, rel=0.01)


def test_many_lines_are_split_into_panels_in_which_a_colour_is_a_batch() -> None:
    spec = charts.speed_up_chart(report(many_lines()))
    assert spec["facet"]["sort"] == ["fp32", "bf16"]
    color = spec["spec"]["layer"][1]["encoding"]["color"]
    assert color["sort"] == [f"batch {size} per device" for size in (16, 64, 256)]
    assert spec["columns"] == 2
    assert 2 * spec["spec"]["width"] <= 800


def test_parameters_that_vary_are_named() -> None:
    records = [
        make_record(make_point(world_size=size, params={"hidden": hidden}))
        for size in (1, 2)
        for hidden in (8, 16)
    ]
    spec = charts.speed_up_chart(report(records))
    assert spec["layer"][1]["encoding"]["color"]["sort"] == [
        "hidden=8, batch 64 per device",
        "hidden=16, batch 64 per device",
    ]


def test_the_ideal_is_the_ratio_of_the_ranks_to_those_of_the_baseline() -> None:
    records = [make_record(make_point(world_size=size)) for size in (2, 4, 8)]
    spec = charts.speed_up_chart(report(records, make_run("run-a", baseline={"world_size": "2"})))
    ideal = spec["layer"][0]["data"]["values"]
    assert [(v["world_size"], v["speed_up"]) for v in ideal] == [(2, 1.0), (4, 2.0), (8, 4.0)]


def test_the_axes_hold_every_point_also_one_that_gets_slower() -> None:
    records = [make_record(), make_record(make_point(world_size=2), step_ms=80.0)]
    encoding = charts.speed_up_chart(report(records))["layer"][1]["encoding"]
    low, high = encoding["y"]["scale"]["domain"]
    assert low < 0.2
    assert high > 2
    assert 0.125 in encoding["y"]["axis"]["values"]
    assert encoding["y"]["title"] == "speed-up over world_size=1"
    assert encoding["x"]["title"] == "GPUs"


def test_what_is_not_shown_is_told_with_machine_and_run() -> None:
    title = charts.speed_up_chart(report(sweep()))["title"]
    assert title["text"] == "Speed-up of mlp (ddp_scaling)"
    assert title["subtitle"] == [
        "4 x NVIDIA H200 on 1 node; torch 2.11.0; run-a",
        "dashed: ideal; points not shown: 1 out of memory",
    ]


def test_without_a_speed_up_the_user_is_told_why() -> None:
    with pytest.raises(UsageError, match="baseline point ran out of memory"):
        charts.speed_up_chart(report([make_failed(), make_record(make_point(world_size=2))]))
    with pytest.raises(UsageError, match="which the baseline does not name"):
        charts.speed_up_chart(report(sweep(), make_run("run-a", baseline={"precision": "fp32"})))


def test_collectives_are_drawn_as_bandwidth_over_size_with_a_colour_per_operation() -> None:
    records = [
        collective(operation, size, 0.01 + size / 1e9, world_size)
        for operation in ("all_reduce", "all_gather")
        for world_size in (2, 4)
        for size in (2**30, 4096, 2**20)
    ]
    summary = report(records)
    assert has_bandwidths(summary)
    spec = bandwidth_chart(summary)
    assert len(spec["data"]["values"]) == 12
    assert set(spec["encoding"]["color"]["sort"]) == {"all_reduce", "all_gather"}
    assert spec["layer"][0]["encoding"]["strokeDash"]["sort"] == ["4 GPUs", "2 GPUs"]
    svg = charts.render(spec, "svg").decode()
    assert "4 KiB" in svg
    assert "1 MiB" in svg
    assert not has_bandwidths(report(sweep()))


def test_a_single_size_is_no_picture() -> None:
    with pytest.raises(UsageError, match="only one"):
        bandwidth_chart(report([collective("all_reduce", 4096, 1.0)]))


def test_the_picture_is_rendered_as_svg_and_png_with_its_text_escaped() -> None:
    run = make_run("run-a", job_name="<b>&job")
    spec = charts.speed_up_chart(report(many_lines(), run))
    json.dumps(spec, allow_nan=False)
    svg = charts.render(spec, "svg").decode()
    assert svg.startswith("<svg")
    assert "&lt;b&gt;&amp;job" in svg
    assert "<b>" not in svg
    assert charts.render(spec, "png").startswith(b"\x89PNG\r\n")
