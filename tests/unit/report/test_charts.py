"""The main picture of each job, as the page and `--chart` draw it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from builders import make_failed, make_point, make_record, make_run
from test_reports import collective, report, sweep

from raybench.cli.page import format_page
from raybench.cli.results import load_summary
from raybench.report.charts import poster
from raybench.report.charts.figures import main_figure, rows_of, why_none
from raybench.results import reader

RESULTS = Path(__file__).parents[3] / "results" / "examples"
CHECKS = {path.name for path in (RESULTS / "health").iterdir()}
# Without health checks, which have a report of their own.
RUNS = sorted({path.name for path in (RESULTS / "points").iterdir()} - CHECKS)
TITLES = {
    "accumulation_or_batch": "What is gained over batch_size=8 grad_accumulation=1",
    "collectives": "Bus bandwidth and time over the size",
    "ddp_by_network": "Speed-up over the number of GPUs",
    "ddp_linear": "Speed-up over the number of GPUs",
    "ddp_scaling": "Speed-up over the number of GPUs",
    "decode_variants": "Step time",
    "dit_module_vs_pipeline": "Speed-up over the number of GPUs",
    "dit_sequence_parallel": "Speed-up over the number of GPUs",
    "environment": "What is gained over TORCH_NCCL_BLOCKING_WAIT=0 NCCL_P2P_DISABLE=0",
    "gemm": "TFLOP/s against the datasheet",
    "grad_accumulation": "Speed-up over the number of GPUs",
    "largest_batch": "Memory over the batch size",
    "memory_bandwidth": "Memory bandwidth and time over the size",
    "memory_of_a_step": "What is gained over tf32",
    "layout_losses": "Step time",
    "layouts_one": "Throughput over the batch size",
    "layouts": "Speed-up over the number of GPUs",
    "mixed_precision": "What is gained over fp32",
    "nccl_algorithms": "Bus bandwidth and time over the size",
    "raw_latency": "What is gained over cuda_graph=false",
    "raw_latency-20261123-000340-2ec6": "What is gained over cuda_graph=false compile=false",
    "resnet50_amp": "What is gained over precision=fp32 channels_last=false",
    "script_smoke": "Speed-up over the number of GPUs",
    "timing_ways": "Speed-up over the number of GPUs",
    "sums_by_network": "Bus bandwidth and time over the size",
    "transformer_scaling": "Speed-up over the number of GPUs",
    "uneven_gpus": "What is gained over shares=equal",
}
NO_DEVICES = pd.DataFrame()


def svg_of(run_id: str) -> str:
    devices = reader.load(RESULTS, "devices", run_id)
    drawn = poster.picture(load_summary(RESULTS, run_id), devices, "svg")
    assert drawn is not None
    return drawn.decode()


@pytest.mark.parametrize("run_id", RUNS)
def test_every_committed_run_has_the_picture_that_answers_its_question(run_id: str) -> None:
    svg = svg_of(run_id)
    ElementTree.fromstring(svg)
    assert f"{TITLES.get(run_id) or TITLES[run_id.partition('-')[0]]} (" in svg
    assert "NVIDIA H200" in svg
    assert "var(" not in svg
    smallest = min(float(size) for size in re.findall(r'font-size="([\d.]+)(?:px)?"', svg))
    assert smallest >= 12


def test_the_file_holds_the_marks_that_the_page_begins_with() -> None:
    run_id = next(name for name in RUNS if name.startswith("ddp_scaling"))
    page = format_page(RESULTS, load_summary(RESULTS, run_id))
    first = page[page.index('<section id="result"') : page.index('<section id="points"')]
    marks = re.compile(r'<path aria-label="([^"]*)"')
    assert len(marks.findall(first)) == 36
    assert marks.findall(svg_of(run_id)) == marks.findall(first)


def test_the_colours_of_the_file_follow_the_theme_of_its_reader() -> None:
    svg = svg_of(next(name for name in RUNS if name.startswith("gemm")))
    [rules] = re.findall(r"<style>(.*?)</style>", svg)
    assert rules.startswith("@media (prefers-color-scheme: dark)")
    assert '[fill="#0072b2"]{fill:#4aa8e0}' in rules
    assert 'fill="#ffffff"' in svg.partition("</style>")[2]
    # Each colour that is drawn has one for the dark.
    drawn = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', svg.partition("</style>")[2]))
    assert drawn == set(re.findall(r'\[fill="(#[0-9a-f]{6})"\]', rules))


def test_intervals_are_drawn() -> None:
    records = [
        make_record(make_point(world_size=size), step_ms=ms + number, round=number, attempt=number)
        for number in (1, 2, 3)
        for size, ms in ((1, 8.0), (2, 9.0), (4, 9.5))
    ]
    summary = report(records)
    [panel] = main_figure(rows_of(summary), summary, NO_DEVICES).panels  # type: ignore[union-attr]
    [rule] = [one for one in panel.spec["layer"] if one["mark"]["type"] == "rule"]
    assert {value["x"] for value in rule["data"]["values"]} == {2, 4}


def test_the_ideal_is_the_ratio_of_the_ranks_to_those_of_the_baseline() -> None:
    records = [make_record(make_point(world_size=size)) for size in (2, 4, 8)]
    summary = report(records, make_run("run-a", baseline={"world_size": "2"}))
    figure = main_figure(rows_of(summary), summary, NO_DEVICES)
    assert figure is not None
    ideal = figure.panels[0].spec["layer"][0]["data"]["values"]
    assert [(value["x"], value["y"]) for value in ideal] == [(2, 1.0), (4, 2.0), (8, 4.0)]
    assert "over those of the same settings on 2 GPUs" in figure.note


def test_the_axes_hold_every_point_also_one_that_gets_slower() -> None:
    summary = report([make_record(), make_record(make_point(world_size=2), step_ms=80.0)])
    [panel] = main_figure(rows_of(summary), summary, NO_DEVICES).panels  # type: ignore[union-attr]
    y = panel.spec["layer"][0]["encoding"]["y"]
    low, high = y["scale"]["domain"]
    assert low < 0.2
    assert high > 2
    assert y["title"] == "times the samples/s of 1 GPU"


def test_a_lone_size_is_drawn_as_step_times() -> None:
    summary = report([collective("all_reduce", 4096, 1.0)])
    figure = main_figure(rows_of(summary), summary, NO_DEVICES)
    assert figure is not None
    assert figure.title == "Step time"


def test_a_run_in_which_nothing_was_measured_has_no_picture_and_says_why() -> None:
    summary = report([make_failed()])
    assert poster.picture(summary, NO_DEVICES, "svg") is None
    assert why_none(summary) == "no point of this run was measured (out of memory)"
    assert why_none(report([])) == "no point of this run has been finished yet"


def test_texts_of_the_results_are_no_markup_and_there_is_a_png_too() -> None:
    summary = report(sweep(), make_run("run-a", job_name="<b>&job"))
    svg = poster.picture(summary, NO_DEVICES, "svg")
    assert svg is not None
    assert b"&lt;b&gt;&amp;job" in svg
    assert b"<b>" not in svg
    png = poster.picture(summary, NO_DEVICES, "png")
    assert png is not None
    assert png.startswith(b"\x89PNG\r\n")


def test_specifications_are_plain_json() -> None:
    summary = report(sweep())
    figure = main_figure(rows_of(summary), summary, NO_DEVICES)
    assert figure is not None
    for panel in figure.panels:
        json.dumps(panel.spec, allow_nan=False)
