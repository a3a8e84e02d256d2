"""The main picture of each job, as the page and `--chart` draw it."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from builders import (
    make_failed,
    make_point,
    make_record,
    make_run,
    make_summary,
    make_sweep,
)

from raybench.cli.results import load_summary
from raybench.report.charts import poster
from raybench.report.charts.figures import main_figure, rows_of, why_none
from raybench.report.run_report import RunReport
from raybench.results import reader

RESULTS = Path(__file__).parents[3] / "results" / "examples"
# Title of the picture, and the large figures, of the newest run of a job.
ANSWERS = {
    "collectives": ("Bus bandwidth and time", ["353.7 GB/s", "359.5 GB/s", "5.572 µs"]),
    "gemm": ("TFLOP/s against the datasheet", ["793.8", "763.2", "400.7", "52.05"]),
    "largest_batch": ("Memory over the batch size", ["192", "139", "385.2"]),
    "memory_bandwidth": ("Memory bandwidth and time", ["4,372 GB/s", "91.1%", "3.172 µs"]),
    "mixed_precision": ("What is gained over fp32", ["6.68×", "71.8%", "369.7"]),
}
NO_DEVICES = pd.DataFrame()


def svg_of(job):
    summary = load_summary(RESULTS, job)
    drawn = poster.picture(summary, reader.load(RESULTS, "devices", summary.run.run_id), "svg")
    assert drawn is not None
    return drawn.decode()


@pytest.mark.parametrize("job", ANSWERS)
def test_a_run_has_the_picture_and_the_figures_that_answer_the_question_of_its_job(job):
    title, figures = ANSWERS[job]
    summary, svg = load_summary(RESULTS, job), svg_of(job)
    assert [one.value for one in RunReport(summary=summary).key_figures] == figures
    assert title in svg
    assert "var(" not in svg
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)(?:px)?"', svg)) >= 12


def test_the_colours_of_the_file_follow_the_theme_of_its_reader():
    svg = svg_of("collectives")
    [rules] = re.findall(r"<style>(.*?)</style>", svg)
    assert rules.startswith("@media (prefers-color-scheme: dark)")
    assert '[fill="#0072b2"]{fill:#4aa8e0}' in rules
    assert 'fill="#ffffff"' in svg.partition("</style>")[2]
    # Each colour that is drawn has one for the dark.
    drawn = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', svg.partition("</style>")[2]))
    assert drawn == set(re.findall(r'\[fill="(#[0-9a-f]{6})"\]', rules))


def test_intervals_are_drawn():
    records = [
        make_record(make_point(world_size=size), step_ms=ms + number, round=number, attempt=number)
        for number in (1, 2, 3)
        for size, ms in ((1, 8.0), (2, 9.0), (4, 9.5))
    ]
    summary = make_summary(records)
    [panel] = main_figure(rows_of(summary), summary, NO_DEVICES).panels  # type: ignore[union-attr]
    [rule] = [one for one in panel.spec["layer"] if one["mark"]["type"] == "rule"]
    assert {value["x"] for value in rule["data"]["values"]} == {2, 4}


def test_the_ideal_is_the_ratio_of_the_ranks_to_those_of_the_baseline():
    records = [make_record(make_point(world_size=size)) for size in (2, 4, 8)]
    summary = make_summary(records, make_run("run-a", baseline={"world_size": "2"}))
    figure = main_figure(rows_of(summary), summary, NO_DEVICES)
    assert figure is not None
    ideal = figure.panels[0].spec["layer"][0]["data"]["values"]
    assert [(value["x"], value["y"]) for value in ideal] == [(2, 1.0), (4, 2.0), (8, 4.0)]
    assert "over those of the same settings on 2 GPUs" in figure.note


def test_the_axes_hold_every_point_also_one_that_gets_slower():
    summary = make_summary([make_record(), make_record(make_point(world_size=2), step_ms=80.0)])
    [panel] = main_figure(rows_of(summary), summary, NO_DEVICES).panels  # type: ignore[union-attr]
    y = panel.spec["layer"][0]["encoding"]["y"]
    low, high = y["scale"]["domain"]
    assert low < 0.2
    assert high > 2
    assert y["title"] == "times the samples/s of 1 GPU"


def test_a_run_in_which_nothing_was_measured_has_no_picture_and_says_why():
    summary = make_summary([make_failed()])
    assert poster.picture(summary, NO_DEVICES, "svg") is None
    assert why_none(summary) == "no point of this run was measured (out of memory)"
    assert why_none(make_summary([])) == "no point of this run has been finished yet"


def test_texts_of_the_results_are_no_markup_and_there_is_a_png_too():
    summary = make_summary(make_sweep(), make_run("run-a", job_name="<b>&job"))
    svg = poster.picture(summary, NO_DEVICES, "svg")
    assert svg is not None
    assert b"&lt;b&gt;&amp;job" in svg
    assert b"<b>" not in svg
    png = poster.picture(summary, NO_DEVICES, "png")
    assert png is not None
    assert png.startswith(b"\x89PNG\r\n")
