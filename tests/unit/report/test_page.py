from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from builders import START, make_device, make_failed, make_point, make_record, make_run
from test_reports import collective, report

from raybench.analysis.step_times import rank_by_iteration, step_times
from raybench.job.point import Precision
from raybench.report.charts import bars, gains, rates, scaling, svg
from raybench.report.charts import batch as html_batch
from raybench.report.charts import parts as html_parts
from raybench.report.charts import steps as html_steps
from raybench.report.charts.figure import Figure
from raybench.report.charts.figures import main_figure, rows_laid_over, rows_of
from raybench.report.charts.steps import PointSteps
from raybench.report.charts.telemetry import telemetry_figure
from raybench.report.html import points
from raybench.report.html.page import PageData, format_page
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
        steps.append(PointSteps(row=row, times_ms=[step_times(found)], by_rank=by_rank))
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


@pytest.fixture(scope="module")
def page() -> str:
    """Of the sweep. A page takes a second."""
    return format_page(page_data(report(sweep())))


def values(spec: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = spec["data"]["values"]
    return found


def known(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def test_the_policy_allows_the_one_style_and_the_one_script_by_their_hashes_alone(
    page: str,
) -> None:
    elements = Elements(page)
    [policy] = [
        a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    for name in ("script", "style"):
        digest = hashlib.sha256(elements.raw[name].encode()).digest()
        assert f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_nothing_in_the_page_points_outside_or_has_a_style_or_a_handler_of_its_own(
    page: str,
) -> None:
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
    assert "speed-up" not in page
    assert "busbw" not in ids
    assert ids[0] == "result"
    assert ids[-1] == "environment"


def test_a_run_without_any_point_is_a_page_too() -> None:
    empty = PageData(
        summary=report([make_failed()]),
        devices=pd.DataFrame([device_row(0)]),
        telemetry=telemetry().iloc[:0],
        steps=[],
    )
    assert "out of memory" in format_page(empty)


def test_the_answer_and_its_picture_come_first_then_the_points_then_the_rest(page: str) -> None:
    places = [page.index(text) for text in ('id="result"', 'class="lead"', 'class="figures"')]
    places += [page.index(text) for text in ('id="speed-up"', "<svg", 'id="points"')]
    assert places == sorted(places)
    ids = [a["id"] for tag, a in Elements(page).found if tag == "section"]
    wanted = ["result", "points", "findings", "efficiency", "throughput", "memory", "spread"]
    assert [name for name in ids if name in wanted] == wanted
    # The table of the points is open.
    assert page.index('<table id="all"') < page.index("<details")


def test_the_points_have_ids_values_to_sort_by_and_marks_that_say_what_they_mean() -> None:
    summary = report(sweep())
    rows = [{**row, "throttled": row["world_size"] == 1} for row in rows_of(summary)]
    table = points.point_table(rows, summary)
    titles = [column.title for column in table.columns]
    assert titles[:4] == ["point", "precision", "batch", "GPUs"]
    assert [column.is_setting for column in table.columns[:5]] == [False, True, True, True, False]
    assert {row[0].text for row in table.rows} == set(summary.scaling["point_id"])
    step, mark = titles.index("step"), titles.index("!")
    assert [row[step].value for row in table.rows if row[step].text.endswith("ms")]
    [out] = [row for row in table.rows if row[step].text == "out of memory"]
    assert out[step].value == ""
    held = [row[mark] for row in table.rows if "t" in row[mark].text]
    assert len(held) == 6
    assert all("clocks were limited" in cell.hint for cell in held)
    assert "t" in [name for name, _ in table.meanings]


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_page_says_that_it_explains_marks_where_a_point_has_one(is_quick: bool) -> None:
    found = report([make_record(make_point())])
    found = replace(found, scaling=found.scaling.assign(quick=is_quick))
    title = f"What the columns{' and marks' if is_quick else ''} mean"
    assert title in format_page(page_data(found))


def test_a_switch_is_written_as_in_a_job_file_wherever_it_is_compared() -> None:
    records = [
        make_record(make_point(cuda_graph=is_on, params={"layers": "8", "compile": "true"}))
        for is_on in (False, True)
    ]
    summary = report(records, make_run("run-a", baseline={"cuda_graph": False}))
    assert [label for label, _ in summary.findings] == ["cuda_graph=true"]


def test_bars_over_settings_of_many_words_have_each_setting_in_a_line_of_its_own() -> None:
    records = [
        make_record(make_point(cuda_graph=is_on, params={"long_parameter": value}))
        for is_on, value in ((False, "no"), (True, "no"), (True, "yes"))
    ]
    baseline = {"cuda_graph": False, "long_parameter": "no"}
    summary = report(records, make_run("run-a", baseline=baseline))
    figure = known(gains.gains_figure(rows_of(summary), summary))
    drawn = svg.draw(figure.panels[0].spec, "gains")
    assert ">long_parameter=no<" in drawn
    assert ">long_parameter=yes<" in drawn


def test_power_over_time_is_drawn_from_zero() -> None:
    table = telemetry().assign(power_w=np.linspace(0.0, 700.0, 100))
    panel = known(telemetry_figure(table, START)).panels[1]
    drawn = svg.draw(panel.spec, "power")
    assert ">0<" in drawn
    assert not re.search(">[-\N{MINUS SIGN}][0-9]+<", drawn)


def test_names_of_bars_that_have_no_room_stand_over_the_panels_instead() -> None:
    records = [
        make_record(make_point(batch_size=64, params={"hidden": hidden, "optimizer": optimizer}))
        for optimizer in ("adam_with_a_name", "sgd_with_another_name")
        for hidden in (1024, 2048, 4096)
    ]
    summary = report(records)
    panels = known(bars.times_figure(rows_of(summary), summary)).panels
    assert [panel.title for panel in panels] == [
        "optimizer=adam_with_a_name",
        "optimizer=sgd_with_another_name",
    ]
    names = [panel.spec["layer"][0]["encoding"]["y"]["sort"] for panel in panels]
    assert names == [["hidden=1024", "hidden=2048", "hidden=4096"]] * 2


def test_the_page_is_as_unsure_of_a_step_as_the_report() -> None:
    point = make_point(world_size=1, batch_size=1024)
    records = [make_record(point, step_ms=8.0 + n, round=n, attempt=n) for n in (1, 2, 3)]
    summary = report(records)
    (row,) = rows_of(summary)
    table = points.point_table([row], summary)
    titles = [column.title for column in table.columns]
    of_starts = (row["step_ms_high"] - row["step_ms_low"]) / 2 / row["step_ms_p50"]
    assert of_starts > 0.1
    assert table.rows[0][titles.index("±")].value == f"{of_starts:.4g}"
    assert summary.plus_minus in dict(table.meanings)["±"]


def test_a_run_is_laid_over_another_in_charts_and_table() -> None:
    summary = report(sweep())
    slower = [
        make_record(make_point(world_size=size, precision=Precision.FP32), step_ms=2 * (size + 7.0))
        for size in (1, 2)
    ]
    other = report(slower, make_run("run-b"))
    rows = rows_laid_over(summary, other)
    figure = known(scaling.speed_up_figure(rows, summary))
    assert "the other run" in [entry.label for entry in figure.legend]
    spec = figure.panels[0].spec
    laid_under = [value for value in values(spec) if value["other"]]
    assert [value["x"] for value in laid_under] == [1, 2]
    assert all("of the other run" in value["tip"] for value in laid_under)
    filters = [layer["transform"][0]["filter"] for layer in spec["layer"] if "transform" in layer]
    assert filters == ["datum.other", "datum.other", "!datum.other", "!datum.other"]
    table = points.point_table(rows, summary, "run-b")
    assert len(table.rows) == 19
    change = [column.title for column in table.columns].index("change")
    changes = [row[change].text.split()[0] for row in table.rows if row[change].text]
    assert changes == ["-50.0%", "-50.0%"]
    page = format_page(
        PageData(
            summary=summary,
            devices=pd.DataFrame([device_row(0)]),
            telemetry=telemetry(),
            steps=[],
            against=other,
        )
    )
    assert "Laid over run <code>run-b</code>" in page
    assert "Its points are hollow" in page
    assert "change" in [name for name, _ in table.meanings]


def test_speed_up_is_drawn_per_precision_with_a_line_per_batch_and_the_ideal() -> None:
    summary = report(sweep())
    figure = known(scaling.speed_up_figure(rows_of(summary), summary))
    assert [panel.title for panel in figure.panels] == ["fp32", "bf16"]
    spec = figure.panels[0].spec
    assert spec["layer"][0]["data"]["values"] == [{"x": s, "y": s} for s in (1, 2, 4)]
    [last] = [v for v in values(spec) if v["x"] == 4 and v["line"] == "batch 64"]
    assert last["y"] == pytest.approx(8 / 11 * 4, rel=0.01)
    assert re.match(r"fp32, batch 64, 4 GPUs\npoint \w+\nspeed-up 2\.9", last["tip"])
    assert [entry.label for entry in figure.legend] == [
        "batch 64",
        "batch 128",
        "batch 256",
        "ideal",
    ]
    # The best and the worst are written beside their points.
    [numbers] = [one for one in spec["layer"] if one["mark"]["type"] == "text"]
    assert {value["number"] for value in numbers["data"]["values"]} == {last["number"]}


def test_a_series_that_is_not_drawn_is_explained_where_it_is_missing() -> None:
    records = [
        make_record(make_point(world_size=size, batch_size=batch))
        for size in (1, 2)
        for batch in (64, 128)
        for _ in range(1)
        if (size, batch) != (1, 128)
    ]
    summary = report([*records, make_failed(make_point(world_size=4, batch_size=64))])
    [panel] = known(scaling.speed_up_figure(rows_of(summary), summary)).panels
    assert panel.missing == (
        "Not drawn: batch 64, 4 GPUs: out of memory; batch 128: "
        "no ok point with world_size=1 in this series."
    )
    page = format_page(page_data(summary))
    assert panel.missing in html.unescape(page)


def test_an_interval_that_is_too_long_to_be_drawn_ends_in_an_arrow() -> None:
    summary = report(sweep())
    rows = [
        {**row, "speed_up_low": row["speed_up"] / 9, "speed_up_high": row["speed_up"] * 1.1}
        for row in rows_of(summary)
    ]
    figure = known(scaling.speed_up_figure(rows, summary))
    layers = figure.panels[0].spec["layer"]
    [rule] = [one for one in layers if one["mark"]["type"] == "rule"]
    bottom = rule["encoding"]["y"]["scale"]["domain"][0]
    assert all(value["low"] > bottom for value in rule["data"]["values"])
    arrows = [one for one in layers if one["mark"].get("shape") == "triangle-down"]
    assert len(arrows[0]["data"]["values"]) == len(rule["data"]["values"])


def test_a_precision_is_drawn_against_fp32_with_its_memory() -> None:
    records = [
        make_record(make_point(precision=precision, batch_size=batch), step_ms=step_ms)
        for precision, step_ms in ((Precision.FP32, 8.0), (Precision.BF16, 2.0))
        for batch in (64, 128)
    ]
    summary = report(records, make_run("run-a", baseline={"precision": "fp32"}))
    figure = known(main_figure(rows_of(summary), summary, pd.DataFrame()))
    assert [panel.title for panel in figure.panels] == ["Speed-up over fp32", "Memory, of fp32"]
    assert [value["y"] for value in values(figure.panels[0].spec)] == pytest.approx([4.0, 4.0])
    assert [entry.label for entry in figure.legend] == ["batch 64", "batch 128", "fp32"]
    assert gains.gains_figure(rows_of(report(sweep())), report(sweep())) is None


def test_products_are_drawn_against_the_peak_of_their_precision() -> None:
    summary = report([make_record(make_point(params={"m": "64", "n": "32", "k": "16"}))])
    rows = [
        {**row, "throughput": float("nan"), "achieved_tflops_per_device": 50.0, "mfu_pct": 25.0}
        for row in rows_of(summary)
    ]
    [panel] = known(bars.products_figure(rows, summary)).panels
    [value] = values(panel.spec)
    assert value["bar"] == "64 × 32 × 16"
    assert value["short"] == "50.00 · 25%"
    [peak] = [one for one in panel.spec["layer"] if one["mark"]["type"] == "rule"]
    assert peak["data"]["values"] == [{"x": pytest.approx(200.0)}]


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
    assert cross["encoding"]["color"]["field"] == "line"
    capacities = [one["data"]["values"][0]["y"] for one in layers if one["mark"]["type"] == "rule"]
    assert capacities == pytest.approx([150e9 / 2**30] * len(figure.panels))


def test_the_parts_of_a_step_follow_each_other_as_shares() -> None:
    summary = report(sweep())
    known_parts = {"compute_ms": 4.0, "comm_exposed_ms": 2.0}
    rows = [{**row, **known_parts} for row in rows_of(summary) if row["status"] == "ok"]
    figure = known(html_parts.parts_figure(rows, summary))
    first, second = values(figure.panels[0].spec)[:2]
    assert first["low"] == 0.0
    assert second["low"] == first["high"] == pytest.approx(4 / 8, rel=0.01)
    assert [entry.label for entry in figure.legend] == ["compute", "exposed communication"]
    assert html_parts.parts_figure(rows_of(summary), summary) is None


def test_what_a_slow_rank_takes_longer_is_a_part_of_its_own_and_less_than_nothing_is_no_bar() -> (
    None
):
    summary = report(sweep())
    slow = {
        "slowest_rank": 1,
        "straggler_ms": 2.0,
        "straggler_error_ms": 0.1,
        "straggler_device_ms": 1.5,
    }
    parts = {"compute_ms": 5.0, "host_gap_ms": 1.0, "comm_exposed_ms": -0.2}
    rows = [{**row, **parts, **slow} for row in rows_of(summary) if row["status"] == "ok"]
    figure = known(html_parts.parts_figure(rows[:1], summary))
    tips = [value["tip"].partition("\n")[2] for value in values(figure.panels[0].spec)]
    bars = [tip.partition(",")[0] for tip in tips]
    assert bars == [
        "compute: 3.500 ms",
        "waiting for the host: 0.5000 ms",
        "one rank slower: 2.000 ms",
    ]
    table = figure.table
    assert table is not None
    assert "-0.2" in table.rows[0][table.columns.index("exposed communication ms")]


def test_parts_that_exceed_their_step_are_not_drawn_and_that_is_said() -> None:
    summary = report(sweep())
    rows = [{**row, "compute_ms": 4.0} for row in rows_of(summary)]
    blank = {"compute_ms": float("nan"), "why_no_breakdown": "no breakdown: ..."}
    figure = known(html_parts.parts_figure([{**rows[0], **blank}, *rows[1:]], summary))
    assert "1 point is not drawn: their parts exceed the step by more than 10 %" in figure.note
    drawn = [value for panel in figure.panels for value in values(panel.spec)]
    assert (
        len({value["tip"] for value in drawn}) == len([r for r in rows if r["status"] == "ok"]) - 1
    )
    table = figure.table
    assert table is not None
    assert rows[0]["point_id"] not in [line[0] for line in table.rows]


def test_bandwidth_and_time_are_drawn_over_the_size_with_all_axes_logarithmic() -> None:
    records = [
        collective(operation, size, 0.01 + size / 1e9, 4)
        for operation in ("all_reduce", "all_gather")
        for size in (2**30, 4096, 2**20)
    ]
    summary = report(records)
    [figure] = rates.rate_figures(rows_of(summary), summary)
    assert [panel.title for panel in figure.panels] == ["Bus bandwidth", "Time of a step"]
    for panel in figure.panels:
        encoding = panel.spec["layer"][-1]["encoding"]
        assert encoding["x"]["scale"]["type"] == encoding["y"]["scale"]["type"] == "log"
        assert "'4096': '4 KiB'" in encoding["x"]["axis"]["labelExpr"]
    times = {value["x"]: value["y"] for value in values(figure.panels[1].spec)}
    assert times[4096] == pytest.approx(10.0, rel=0.01)
    assert [entry.label for entry in figure.legend] == ["all_gather", "all_reduce"]


def test_memory_faster_than_its_datasheet_is_told_to_be_the_cache() -> None:
    records = [collective("copy", size, 0.01 + size / 1e9, 1) for size in (2**20, 2**30)]
    summary = report(records)
    rows = [
        {**row, "busbw_gb_s": float("nan"), "memory_gb_s": rate, "device_name": "NVIDIA H200"}
        for row, rate in zip(rows_of(summary), (6000.0, 4000.0), strict=True)
    ]
    [figure] = rates.rate_figures(rows, summary)
    assert "What lies above the datasheet's line (1 MiB) cannot come from the memory" in figure.note
    assert figure.legend[-1].label == "datasheet, 4,800 GB/s"
    [line] = [one for one in figure.panels[0].spec["layer"] if one["mark"]["type"] == "rule"]
    assert line["data"]["values"] == [{"y": 4800.0}]


def test_the_spread_is_told_against_the_median_of_each_point() -> None:
    summary = report(sweep())
    data = page_data(summary)
    figure = known(html_steps.spread_figure(data.steps, rows_of(summary), summary))
    for panel in figure.panels:
        for value in values(panel.spec):
            assert value["p5"] < value["p25"] < value["p50"] == 0.0 < value["p75"] < value["p95"]


def test_no_spread_is_cut_and_each_chart_has_its_own_scale() -> None:
    summary = report(sweep())
    data = page_data(summary)
    wild = [
        PointSteps(
            row=one.row,
            times_ms=[
                times_ms * (1 + 3.0 * (np.arange(times_ms.size) % 5 == 0))
                if one.row["precision"] == "bf16"
                else times_ms
                for times_ms in one.times_ms
            ],
            by_rank=None,
        )
        for one in data.steps
    ]
    figure = known(html_steps.spread_figure(wild, rows_of(summary), summary))
    domains = {}
    for panel in figure.panels:
        domain = panel.spec["layer"][0]["encoding"]["x"]["scale"]["domain"]
        assert domain[0] < min(value["p5"] for value in values(panel.spec))
        assert domain[1] > max(value["p95"] for value in values(panel.spec))
        domains[panel.title] = domain
    assert domains["bf16"][1] > 2 > 0.02 > domains["fp32"][1]


def test_a_slow_rank_is_a_line_of_its_own_in_the_heat_map() -> None:
    summary = report(sweep())
    [row] = [r for r in rows_of(summary) if r["world_size"] == 4][:1]
    by_rank = rank_by_iteration(samples(4, slow_rank=2), 10)
    steps = [PointSteps(row=row, times_ms=[np.array([8.0])], by_rank=by_rank)]
    figure = known(html_steps.heat_figure(steps, summary))
    spec = figure.panels[0].spec
    assert len(values(spec)) == 4 * 10
    slow = {value["rank"] for value in values(spec) if value["ratio"] > 0.1}
    assert slow == {2}
    assert figure.table is not None
    assert [line[1] for line in figure.table.rows] == ["0", "1", "2", "3"]


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


def test_step_times_of_ranks_in_lockstep_are_their_medians() -> None:
    found = samples(2, iterations=2)
    found["step_ns"] = [10_000_000, 10_040_000, 10_040_000, 10_000_000]
    assert step_times(found).tolist() == [10.02, 10.02]
    assert len(step_times(found.iloc[:0])) == 0


def test_the_time_between_a_stop_and_its_resumption_is_left_out_of_the_telemetry() -> None:
    before, after = telemetry(), telemetry()
    after["time"] += pd.Timedelta(hours=2)
    figure = known(telemetry_figure(pd.concat([before, after]), START))
    assert figure.note.endswith("began, without 1 h 59 min 11 s in which nothing was sampled.")
    values = figure.panels[0].spec["data"]["values"]
    assert max(value["x"] for value in values) < 100
    # No line is drawn across the gap.
    assert {value["part"] for value in values} == {0, 1}
    [line] = [one for one in figure.panels[0].spec["layer"] if one["mark"]["type"] == "line"]
    assert line["encoding"]["detail"]["field"] == "part"


def test_the_points_are_bands_over_the_telemetry_and_those_throttled_stand_out() -> None:
    summary = report(sweep())
    rows = [
        {
            **row,
            "started_at": pd.Timestamp(START) + pd.Timedelta(seconds=10 + 2 * place),
            "duration_s": 2.0,
            "throttled": place == 3,
        }
        for place, row in enumerate(rows_of(summary))
    ]
    figure = known(telemetry_figure(telemetry(), START, rows))
    labels = [entry.label for entry in figure.legend]
    assert labels[-2:] == ["points, every second one shaded", "a point that was throttled"]
    spec = figure.panels[0].spec
    bands = spec["layer"][0]["data"]["values"]
    assert {"low": 16.0, "high": 18.0, "fill": "var(--held)"} in bands
    assert len(bands) == 11
    [told] = [one for one in spec["layer"] if one["mark"].get("fill") == "transparent"]
    [at] = [strip for strip in told["data"]["values"] if strip["low"] <= 17 < strip["high"]]
    assert f"point {rows[3]['point_id']}" in at["tip"]


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
    assert many.table is not None
    assert len(many.table.rows) == 16
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
    figure = known(scaling.speed_up_figure(rows_of(summary), summary))
    assert len(figure.panels) == 8
    told = "The first 8 of 20 charts and 7 of 9 lines of a chart are drawn; the table of the points"
    assert told in figure.note
    assert len(points.point_table(rows_of(summary), summary).rows) == 360


def test_the_page_holds_no_build_paths_and_its_files_are_part_of_the_package(page: str) -> None:
    folder = Path(points.__file__).parent
    assert (folder / "page.css").is_file()
    assert (folder / "page.js").is_file()
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
