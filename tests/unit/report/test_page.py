from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pandas as pd
from builders import (
    START,
    make_collective,
    make_device,
    make_failed,
    make_point,
    make_record,
    make_run,
    make_summary,
    make_sweep,
)

from raybench.analysis.step_times import rank_by_iteration, step_times
from raybench.job.point import Precision
from raybench.report.charts import parts as html_parts
from raybench.report.charts import rates, scaling
from raybench.report.charts import steps as html_steps
from raybench.report.charts.figures import rows_laid_over, rows_of
from raybench.report.charts.steps import PointSteps
from raybench.report.charts.telemetry import telemetry_figure
from raybench.report.html import points
from raybench.report.html.page import PageData, format_page

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


def samples(ranks, iterations=30, slow_rank=None):
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


def page_data(summary):
    steps = []
    for row in html_steps.spread_points(rows_of(summary)):
        found = samples(int(row["world_size"]))
        by_rank = rank_by_iteration(found, 20) if row["world_size"] > 1 else None
        steps.append(PointSteps(row=row, times_ms=[step_times(found)], by_rank=by_rank))
    devices = pd.DataFrame([device_row(rank) for rank in range(4)])
    return PageData(summary=summary, devices=devices, telemetry=telemetry(), steps=steps)


def device_row(rank):
    device = make_device(rank)
    names = ("host", "index", "uuid", "name", "memory_bytes", "driver_version")
    return {name: getattr(device, name) for name in names}


def telemetry(devices=2):
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


def values(spec):
    found: Sequence[Mapping[str, Any]] = spec["data"]["values"]
    return found


def known(figure):
    assert figure is not None
    return figure


def test_a_page_has_hostile_names_as_text_and_needs_and_runs_nothing_but_itself():
    records = [
        make_record(
            make_point(workload=HOSTILE, world_size=size, params={HOSTILE: value}),
            devices=(make_device(name=HOSTILE),),
        )
        for size in (1, 2)
        for value in (HOSTILE, "b")
    ]
    failed = make_failed(make_point(workload=HOSTILE), error_message=HOSTILE)
    texts = dict.fromkeys(("job_name", "job_text", "cluster"), HOSTILE)
    pairs = {name: {HOSTILE: HOSTILE} for name in ("environment", "tags", "versions")}
    run = make_run("run-a", argv=(HOSTILE,), **texts, **pairs)
    page = format_page(page_data(make_summary([*records, failed], run)))
    assert "\u202e" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "url(" not in page
    assert "eval(" not in page
    elements = Elements(page)
    tags = [tag for tag, _ in elements.found]
    assert (tags.count("script"), tags.count("style")) == (1, 1)
    assert not {"link", "img", "iframe", "base", "object", "form"} & {*tags}
    for _, attributes in elements.found:
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        links = [attributes.get(name) or "#" for name in ("href", "src", "xlink:href")]
        assert all(link.startswith("#") for link in links)
    [policy] = [a["content"] for _, a in elements.found if "Content-Security-Policy" in a.values()]
    assert policy is not None
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.raw[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_a_run_without_any_point_is_a_page_too():
    empty = PageData(
        summary=make_summary([make_failed()]),
        devices=pd.DataFrame([device_row(0)]),
        telemetry=telemetry().iloc[:0],
        steps=[],
    )
    assert "out of memory" in format_page(empty)


def test_a_run_is_laid_over_another_in_charts_and_table():
    summary = make_summary(make_sweep())
    slower = [
        make_record(make_point(world_size=size, precision=Precision.FP32), step_ms=step_ms)
        for size, step_ms in ((1, 16.0), (2, 20.0))
    ]
    other = make_summary(slower, make_run("run-b"))
    rows = rows_laid_over(summary, other)
    figure = known(scaling.speed_up_figure(rows, summary))
    assert "the other run" in [entry.label for entry in figure.legend]
    laid_under = [value for value in values(figure.panels[0].spec) if value["other"]]
    assert [value["x"] for value in laid_under] == [1, 2]
    assert all("of the other run" in value["tip"] for value in laid_under)
    table = points.point_table(rows, summary, "run-b")
    assert len(table.rows) == 6
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
    assert "change" in table.titles


def test_a_series_that_is_not_drawn_is_explained_where_it_is_missing():
    records = [
        make_record(make_point(world_size=size, batch_size=batch))
        for size in (1, 2)
        for batch in (64, 128)
        for _ in range(1)
        if (size, batch) != (1, 128)
    ]
    summary = make_summary([*records, make_failed(make_point(world_size=4, batch_size=64))])
    [panel] = known(scaling.speed_up_figure(rows_of(summary), summary)).panels
    assert panel.missing == (
        "Not drawn: batch 64, 4 GPUs: out of memory; batch 128: "
        "no ok point with world_size=1 in this series."
    )
    page = format_page(page_data(summary))
    assert panel.missing in html.unescape(page)


def test_what_a_slow_rank_takes_longer_is_a_part_of_its_own_and_less_than_nothing_is_no_bar():
    summary = make_summary(make_sweep())
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


def test_parts_that_exceed_their_step_are_not_drawn_and_that_is_said():
    summary = make_summary(make_sweep())
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


def test_memory_faster_than_its_datasheet_is_told_to_be_the_cache():
    records = [make_collective("copy", size, 0.01 + size / 1e9, 1) for size in (2**20, 2**30)]
    summary = make_summary(records)
    rows = [
        {**row, "busbw_gb_s": float("nan"), "memory_gb_s": rate, "device_name": "NVIDIA H200"}
        for row, rate in zip(rows_of(summary), (6000.0, 4000.0), strict=True)
    ]
    [figure] = rates.rate_figures(rows, summary)
    assert "What lies above the datasheet's line (1 MiB) cannot come from the memory" in figure.note
    assert figure.legend[-1].label == "datasheet, 4,800 GB/s"
    [line] = [one for one in figure.panels[0].spec["layer"] if one["mark"]["type"] == "rule"]
    assert line["data"]["values"] == [{"y": 4800.0}]


def test_a_single_slow_step_stays_visible_where_columns_stand_for_many():
    found = samples(2, iterations=1000)
    found.loc[(found["rank"] == 1) & (found["iteration"] == 777), "step_ns"] = 16_000_000
    by_rank = rank_by_iteration(found, 20)
    assert by_rank.shape == (2, 20)
    assert by_rank.loc[1].max() == 16.0
    assert by_rank.loc[0].max() < 8.1


def test_the_time_between_a_stop_and_its_resumption_is_left_out_of_the_telemetry():
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


def test_what_is_drawn_of_a_big_run_is_bounded_and_the_table_has_all():
    records = [
        make_record(make_point(world_size=size, params={"hidden": hidden}, batch_size=batch))
        for size in (1, 2)
        for hidden in range(20)
        for batch in range(1, 10)
    ]
    summary = make_summary(records)
    figure = known(scaling.speed_up_figure(rows_of(summary), summary))
    assert len(figure.panels) == 8
    told = "The first 8 of 20 charts and 7 of 9 lines of a chart are drawn; the table of the points"
    assert told in figure.note
    assert len(points.point_table(rows_of(summary), summary).rows) == 360
