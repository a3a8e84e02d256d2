from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from builders import START, make_device, make_failed, make_point, make_record, make_run
from test_reports import collective, report

from raybench.analysis.step_times import rank_by_iteration, step_times
from raybench.point import Precision
from raybench.report import html_batch, html_parts, html_rates, html_scaling, html_steps
from raybench.report.html_figure import Figure
from raybench.report.html_page import PageData, format_page, rows_of
from raybench.report.html_steps import PointSteps
from raybench.report.html_telemetry import telemetry_figure
from raybench.report.summary import Summary

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\u202e</svg></style>'


class Elements(HTMLParser):
    """The names and attributes of all elements, and the texts of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, str] = {}
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.raw[self._inside] = data


def samples(ranks: int, iterations: int = 30, slow_rank: int | None = None) -> pd.DataFrame:
    rng = np.random.default_rng(7)
    times = 8e6 * (1 + 0.001 * rng.standard_normal((ranks, iterations)))
    if slow_rank is not None:
        times[slow_rank] *= 1.2
    return pd.DataFrame(
        {
            "repeat": 0,
            "rank": np.repeat(np.arange(ranks), iterations),
            "iteration": np.tile(np.arange(iterations), ranks),
            "is_warmup": False,
            "step_ns": times.ravel().astype(int),
        }
    )


def page_data(summary: Summary) -> PageData:
    steps = []
    for row in html_steps.spread_points(rows_of(summary)):
        found = samples(int(row["world_size"]))
        by_rank = rank_by_iteration(found, 20) if row["world_size"] > 1 else None
        steps.append(PointSteps(row=row, times_ms=step_times(found), by_rank=by_rank))
    devices = pd.DataFrame([device_row(rank) for rank in range(4)])
    return PageData(summary=summary, devices=devices, telemetry=telemetry(), steps=steps)


def device_row(rank: int) -> dict[str, Any]:
    device = make_device(rank)
    names = ("host", "index", "uuid", "name", "memory_bytes", "driver_version")
    return {name: getattr(device, name) for name in names}


def telemetry(devices: int = 2) -> pd.DataFrame:
    times = pd.date_range(START, periods=50, freq="s")
    return pd.DataFrame(
        {
            "node_id": "node-a",
            "index": np.tile(np.arange(devices), 50),
            "time": np.repeat(times, devices),
            "sm_clock_mhz": 1980,
            "power_w": 500.0,
            "temperature_c": 50.0,
            "gpu_utilization_pct": np.nan,
        }
    )


def sweep() -> list[Any]:
    records = [
        make_record(
            make_point(world_size=size, precision=precision, batch_size=batch), step_ms=size + 7.0
        )
        for size in (1, 2, 4)
        for precision in (Precision.FP32, Precision.BF16)
        for batch in (64, 128, 256)
    ]
    return [*records, make_failed(make_point(world_size=4, batch_size=1024))]


def values(spec: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = spec["data"]["values"]
    return found


def known(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def test_the_policy_allows_the_one_style_and_the_one_script_by_their_hashes_alone() -> None:
    elements = Elements(format_page(page_data(report(sweep()))))
    [policy] = [
        a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    for name in ("script", "style"):
        digest = hashlib.sha256(elements.raw[name].encode()).digest()
        assert f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_nothing_in_the_page_points_outside_or_has_a_style_or_a_handler_of_its_own() -> None:
    page = format_page(page_data(report(sweep())))
    for tag, attributes in Elements(page).found:
        assert tag not in ("link", "img", "iframe", "base", "object", "form"), tag
        for name, value in attributes.items():
            assert name != "style", tag
            assert not name.startswith("on"), tag
            if name in ("href", "src", "xlink:href"):
                assert (value or "").startswith("#"), value
    assert "url(" not in page
    assert "eval(" not in page


def test_hostile_names_are_text_wherever_they_stand() -> None:
    records = [
        make_record(
            make_point(
                workload=HOSTILE,
                world_size=size,
                params={HOSTILE: value, "n": HOSTILE},
                batch_size=batch,
            ),
            devices=(make_device(name=HOSTILE),),
        )
        for size in (1, 2)
        for value in (HOSTILE, "b")
        for batch in (1, 2)
    ]
    failed = make_failed(make_point(workload=HOSTILE), error_message=HOSTILE)
    run = make_run(
        "run-a",
        job_name=HOSTILE,
        job_text=HOSTILE,
        argv=(HOSTILE,),
        cluster=HOSTILE,
        environment={HOSTILE: HOSTILE},
        tags={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
    )
    page = format_page(page_data(report([*records, failed], run)))
    elements = Elements(page)
    assert [tag for tag, _ in elements.found].count("script") == 1
    assert [tag for tag, _ in elements.found].count("style") == 1
    assert not [tag for tag, _ in elements.found if tag == "img"]
    assert not [a for _, a in elements.found if any(name.startswith("on") for name in a)]
    assert "\u202e" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_figure_without_data_is_left_out() -> None:
    page = format_page(page_data(report([collective("all_reduce", 4096, 1.0)])))
    ids = [a["id"] for tag, a in Elements(page).found if tag == "section"]
    assert "speed-up" not in ids
    assert "busbw" not in ids
    assert ids[0] == "findings"
    assert ids[-1] == "environment"


def test_a_run_without_any_point_is_a_page_too() -> None:
    empty = PageData(
        summary=report([make_failed()]),
        devices=pd.DataFrame([device_row(0)]),
        telemetry=telemetry().iloc[:0],
        steps=[],
    )
    assert "out of memory" in format_page(empty)


def test_the_sections_come_in_the_order_of_the_question() -> None:
    page = format_page(page_data(report(sweep())))
    ids = [a["id"] for tag, a in Elements(page).found if tag == "section"]
    wanted = ["findings", "speed-up", "efficiency", "throughput", "memory", "spread", "ranks"]
    assert [name for name in ids if name in wanted] == wanted
    assert page.count("<details>") >= len(ids) - 2


def test_speed_up_is_drawn_per_precision_with_a_line_per_batch_and_the_ideal() -> None:
    summary = report(sweep())
    figure = known(html_scaling.speed_up_figure(rows_of(summary), summary))
    assert [panel.title for panel in figure.panels] == ["fp32", "bf16"]
    spec = figure.panels[0].spec
    assert spec["layer"][0]["data"]["values"] == [{"x": s, "y": s} for s in (1, 2, 4)]
    [last] = [v for v in values(spec) if v["x"] == 4 and v["line"] == "batch 64"]
    assert last["y"] == pytest.approx(8 / 11 * 4, rel=0.01)
    assert "fp32, batch 64, 4 GPUs\nspeed-up 2.9" in last["tip"]
    assert [entry.label for entry in figure.legend] == [
        "batch 64",
        "batch 128",
        "batch 256",
        "ideal",
    ]
    assert len(figure.rows) == 18


def test_a_batch_that_ran_out_of_memory_is_marked_where_it_would_have_been() -> None:
    summary = report(sweep())
    devices = pd.DataFrame([device_row(0)])
    figure = known(html_batch.memory_figure(rows_of(summary), summary, devices))
    assert "out of memory" in [entry.label for entry in figure.legend]
    layers = [layer for panel in figure.panels for layer in panel.spec["layer"]]
    [cross] = [layer for layer in layers if layer["mark"].get("shape")]
    [mark] = cross["data"]["values"]
    assert mark["x"] == 1024
    assert mark["tip"].endswith("out of memory")
    capacities = [one["data"]["values"][0]["y"] for one in layers if one["mark"]["type"] == "rule"]
    assert capacities == pytest.approx([150e9 / 2**30] * len(figure.panels))


def test_the_parts_of_a_step_follow_each_other_as_shares() -> None:
    summary = report(sweep())
    rows = [{**row, "compute_ms": 4.0, "wait_ms": 2.0} for row in rows_of(summary)]
    rows = [row for row in rows if row["status"] == "ok"]
    figure = known(html_parts.parts_figure(rows, summary))
    first, second = values(figure.panels[0].spec)[:2]
    assert first["low"] == 0.0
    assert second["low"] == first["high"] == pytest.approx(4 / 8, rel=0.01)
    assert [entry.label for entry in figure.legend] == ["compute", "waiting for a rank"]
    assert html_parts.parts_figure(rows_of(summary), summary) is None


def test_bandwidth_is_drawn_over_the_size_with_both_axes_logarithmic() -> None:
    records = [
        collective(operation, size, 0.01 + size / 1e9, 4)
        for operation in ("all_reduce", "all_gather")
        for size in (2**30, 4096, 2**20)
    ]
    summary = report(records)
    [figure] = html_rates.rate_figures(rows_of(summary), summary)
    encoding = figure.panels[0].spec["layer"][-1]["encoding"]
    assert encoding["x"]["scale"]["type"] == encoding["y"]["scale"]["type"] == "log"
    assert "'4096': '4 KiB'" in encoding["x"]["axis"]["labelExpr"]
    assert [entry.label for entry in figure.legend] == ["all_gather", "all_reduce"]


def test_the_spread_is_told_against_the_median_of_each_point() -> None:
    summary = report(sweep())
    data = page_data(summary)
    figure = known(html_steps.spread_figure(data.steps, rows_of(summary), summary))
    for panel in figure.panels:
        for value in values(panel.spec):
            assert value["p5"] < value["p25"] < value["p50"] == 0.0 < value["p75"] < value["p95"]


def test_a_slow_rank_is_a_line_of_its_own_in_the_heat_map() -> None:
    summary = report(sweep())
    [row] = [r for r in rows_of(summary) if r["world_size"] == 4][:1]
    by_rank = rank_by_iteration(samples(4, slow_rank=2), 10)
    steps = [PointSteps(row=row, times_ms=np.array([8.0]), by_rank=by_rank)]
    figure = known(html_steps.heat_figure(steps, summary))
    spec = figure.panels[0].spec
    assert len(values(spec)) == 4 * 10
    slow = {value["rank"] for value in values(spec) if value["ratio"] > 0.1}
    assert slow == {2}
    assert [line[1] for line in figure.rows] == ["0", "1", "2", "3"]


def test_a_single_slow_step_stays_visible_where_columns_stand_for_many() -> None:
    found = samples(2, iterations=1000)
    found.loc[(found["rank"] == 1) & (found["iteration"] == 777), "step_ns"] = 16_000_000
    by_rank = rank_by_iteration(found, 20)
    assert by_rank.shape == (2, 20)
    assert by_rank.loc[1].max() == 16.0
    assert by_rank.loc[0].max() < 8.1


def test_step_times_are_those_of_the_slowest_rank_without_warm_up() -> None:
    found = samples(2, iterations=3)
    found["step_ns"] = [5_000_000, 1_000_000, 1_000_000, 9_000_000, 2_000_000, 3_000_000]
    found.loc[found["iteration"] == 0, "is_warmup"] = True
    assert step_times(found).tolist() == [2.0, 3.0]


def test_the_time_between_a_stop_and_its_resumption_is_left_out_of_the_telemetry() -> None:
    before, after = telemetry(), telemetry()
    after["time"] += pd.Timedelta(hours=2)
    figure = known(telemetry_figure(pd.concat([before, after]), START))
    assert figure.note.endswith("began, without 1 h 59 min 11 s in which nothing was sampled.")
    values = figure.panels[0].spec["data"]["values"]
    assert max(value["x"] for value in values) < 100
    # No line is drawn across the gap.
    assert {value["part"] for value in values} == {0, 1}
    assert figure.panels[0].spec["layer"][0]["encoding"]["detail"]["field"] == "part"


def test_telemetry_without_a_value_is_left_out_and_many_devices_are_told_in_short() -> None:
    figure = known(telemetry_figure(telemetry(), START))
    assert [panel.title for panel in figure.panels] == [
        "SM clock, MHz",
        "Power, W",
        "Temperature, °C",
    ]
    assert [entry.label for entry in figure.legend] == ["GPU 0", "GPU 1"]
    many = known(telemetry_figure(telemetry(devices=16), START))
    assert [entry.label for entry in many.legend] == ["least of 16", "median", "most of 16"]
    assert len(many.rows) == 16
    assert telemetry_figure(telemetry().iloc[:1], START) is None


def test_specifications_are_plain_json() -> None:
    summary = report(sweep())
    figure = known(html_batch.throughput_figure(rows_of(summary), summary))
    for panel in figure.panels:
        json.dumps(panel.spec, allow_nan=False)


def test_what_is_drawn_of_a_big_run_is_bounded_and_the_table_has_all() -> None:
    records = [
        make_record(make_point(world_size=size, params={"hidden": hidden}, batch_size=batch))
        for size in (1, 2)
        for hidden in range(20)
        for batch in range(1, 10)
    ]
    summary = report(records)
    figure = known(html_scaling.speed_up_figure(rows_of(summary), summary))
    assert len(figure.panels) == 8
    told = "The first 8 of 20 charts and 7 of 9 lines of a chart are drawn; the table has all."
    assert told in figure.note
    assert len(figure.rows) == 360


def test_the_page_holds_no_build_paths_and_its_files_are_part_of_the_package() -> None:
    folder = Path(html_batch.__file__).parent
    assert (folder / "page.css").is_file()
    assert (folder / "page.js").is_file()
    assert not re.search(r"https?://(?!www\.w3\.org)", format_page(page_data(report(sweep()))))
