"""The scaling report: what it says, and that each format says it safely."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from builders import make_device, make_failed, make_measure, make_point, make_record, make_run

from raybench import rows
from raybench.plan import Precision
from raybench.records import Record, Run, RunStatus, Status
from raybench.report import as_json, markdown, terminal, wording
from raybench.report.summary import Summary, summarize
from raybench.schemas import TABLES, units

EVIL = "[red]boo[/red] | <script>alert(1)</script> `x` \x1b[31m @someone #1\nsecond line"


def points_of(records: Sequence[Record]) -> pd.DataFrame:
    content = [rows.point_row("run-a", record, make_measure()) for record in records]
    return pd.DataFrame(content, columns=[column.name for column in TABLES["points"]])


def report(records: Sequence[Record], run: Run | None = None, device_count: int = 4) -> Summary:
    devices = [rows.device_row("run-a", make_device(index)) for index in range(device_count)]
    return summarize(run or make_run("run-a"), pd.DataFrame(devices), points_of(records))


def sweep(**settings: object) -> list[Record]:
    """Two precisions on 1, 2 and 4 GPUs; the biggest fp32 point is out of memory."""
    records = []
    for size, ms in ((1, 8.0), (2, 10.0), (4, 12.0)):
        for precision in (Precision.BF16, Precision.FP32):
            point = make_point(world_size=size, precision=precision, **settings)
            failed = precision is Precision.FP32 and size == 4
            records.append(make_failed(point) if failed else make_record(point, step_ms=ms))
    return records


def test_the_table_blanks_repeats_and_puts_what_is_compared_last() -> None:
    [table] = report(sweep()).tables
    assert table.columns[: table.settings] == ("precision", "batch", "GPUs")
    assert [row[:3] for row in table.rows] == [
        ("fp32", "64", "1"),
        ("", "", "2"),
        ("", "", "4"),
        ("bf16", "64", "1"),
        ("", "", "2"),
        ("", "", "4"),
    ]


def test_a_compared_parameter_becomes_the_last_column_and_is_no_table_of_its_own() -> None:
    records = [
        make_record(make_point(params={"grad_accumulation": count, "hidden": 8}), step_ms=count)
        for count in (4, 1)
    ]
    [table] = report(records, make_run("run-a", baseline={"grad_accumulation": "1"})).tables
    assert table.columns[: table.settings] == ("precision", "batch", "GPUs", "grad_accumulation")
    assert [row[3] for row in table.rows] == ["1", "4"]
    assert table.params == {}
    assert table.kind == "batch per device"


def test_other_parameters_and_weak_and_strong_are_tables_of_their_own() -> None:
    strong = make_point(scaling="strong", batch_size=32)
    other = make_point(params={"hidden": 1})
    found = report([make_record(), make_record(strong), make_record(other)]).tables
    assert [table.kind for table in found] == [
        "weak scaling, batch per device",
        "strong scaling, global batch",
        "weak scaling, batch per device",
    ]


def test_reasons_that_differ_in_figures_only_are_said_once_with_their_count() -> None:
    failed = [
        make_failed(make_point(world_size=size), error_message=f"tried {size}.5 GiB")
        for size in (1, 2, 12)
    ]
    [said] = report(failed[::-1]).failures
    assert (said.count, said.text) == (3, "out of memory: tried 1.5 to 12.5 GiB")


def test_warnings_of_all_points_are_said_once_with_their_count() -> None:
    records = [make_record(make_point(world_size=n), warnings=("noisy",)) for n in (1, 2)]
    assert [(said.text, said.count) for said in report(records).warnings] == [("noisy", 2)]


def test_the_terminal_report_fits_80_columns_and_says_it_all() -> None:
    text = terminal.format_report(report(sweep(), make_run("run-a", points_total=6)))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "4 x NVIDIA H200 on 1 node" in text
    assert "6 points: 5 ok, 1 failed, 0 skipped\n" in text
    assert re.search(r"4 +12\.\d\d ±0\.\d\d% +21,\d{3} +2\.6\d +66\.\d% +1\.00\n", text)
    assert re.search(r"4 +out of memory\n", text)
    assert "1 x out of memory: rank 0 (alpha, cuda:0): CUDA out of memory" in text
    assert "baseline (world_size=1)" in " ".join(text.split())


def test_long_parameters_and_messages_still_fit_80_columns() -> None:
    params = {f"parameter_{number}": "v" * 30 for number in range(12)}
    records = [make_failed(make_point(params=params), error_message="x" * 500)]
    text = terminal.format_report(report(records))
    assert max(len(line) for line in text.splitlines()) <= 80


def test_on_a_cpu_ranks_are_workers_and_there_is_no_column_for_memory() -> None:
    plain = make_record(devices=(make_device(kind="cpu", name="CPU"),))
    [measurement] = plain.measurements
    without = replace(measurement, peak_mem_allocated_bytes=None)
    [table] = report([replace(plain, measurements=(without,))], device_count=0).tables
    assert table.columns[2:] == ("workers", "step ms", "samples/s", "speed-up", "efficiency")
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_before_any_point_finished_the_devices_tell_what_a_rank_is() -> None:
    devices = pd.DataFrame([rows.device_row("run-a", make_device(kind="cpu", name="CPU"))])
    cancelled = make_failed(status=Status.CANCELLED, devices=())
    [table] = summarize(make_run("run-a"), devices, points_of([cancelled])).tables
    assert "workers" in table.columns


def test_the_report_says_first_how_far_the_speed_up_goes_and_for_which_settings() -> None:
    text = terminal.format_report(report(sweep()))
    title, two, four, blank = text[text.index("Speed-up and") :].splitlines()[:4]
    assert title == "Speed-up and efficiency over world_size=1"
    assert re.fullmatch(r"2 GPUs  1\.6\d, 80\.\d% \((bf16|fp32)\) to 1\.6\d, 80\.\d% \(.*\)", two)
    assert re.fullmatch(r"4 GPUs  2\.6\d, 66\.\d% \(bf16\)", four)
    assert blank == ""
    assert "**Speed-up and efficiency over world\\_size=1**" in markdown.format_report(
        report(sweep())
    )


def test_findings_over_another_baseline_name_what_is_compared() -> None:
    summary = report(sweep(), make_run("run-a", baseline={"precision": "fp32"}))
    [(what, found)] = summary.findings
    assert what == "precision=bf16"
    assert re.fullmatch(r"1\.\d\d \(world_size=\d\) to 1\.\d\d \(world_size=\d\)", found)
    assert "Speed-up over precision=fp32\n" in terminal.format_report(summary)


def test_a_run_without_an_ok_point_has_no_findings_and_explains_no_column() -> None:
    text = terminal.format_report(report([make_failed()]))
    assert "Speed-up" not in text
    assert "median" not in text


def test_a_narrow_terminal_gets_all_figures_and_whole_run_ids() -> None:
    text = terminal.format_report(report(sweep()), width=40)
    assert "…" not in text
    assert re.search(r"^fp32 +64 +1 +8\.\d+ ±0\.\d\d% +[\d,]+ +1\.00 +100\.0%", text, re.MULTILINE)
    run = make_run("ddp_scaling-20260821-101112-abcd")
    assert run.run_id in terminal.format_runs([run], width=40)
    assert "±" in terminal.format_points(points_of(sweep()), width=40)


def test_without_a_baseline_point_the_report_says_why_there_is_no_efficiency() -> None:
    records = [make_record(make_point(world_size=2))]
    text = terminal.format_report(report(records))
    assert "Without speed-up\n1 x no ok point with world_size=1 in this series" in text


def test_a_run_without_points_is_reported() -> None:
    summary = report([], device_count=0)
    assert "No point has been finished yet." in terminal.format_report(summary)
    assert "No point has been finished yet." in markdown.format_report(summary)
    assert json.loads(as_json.format_report(summary))["points"] == []
    assert summary.machine == "private Ray on this host, 4 GPUs"


def test_text_from_results_is_no_markup_in_the_terminal() -> None:
    text = terminal.format_report(report([make_failed(error_message=EVIL)]))
    assert "[red]boo[/red]" in text
    assert "\x1b" not in text
    assert "\n second line" not in text


def test_text_from_results_is_no_markup_in_markdown() -> None:
    run = make_run("run-a", job_name="a|b_*c*<b>")
    text = markdown.format_report(report([make_failed(error_message=EVIL)], run))
    assert "## a\\|b\\_\\*c\\*\\<b\\>" in text
    [line] = [line for line in text.splitlines() if "boo" in line]
    assert line.startswith("* 1 x ``out of memory: [red]boo")
    assert line.endswith("second line``")
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("text", "span"), [("a", "`a`"), ("`a", "`` `a ``"), ("a``b", "```a``b```")]
)
def test_a_code_span_holds_any_backticks(text: str, span: str) -> None:
    assert markdown.code(text) == span


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_head() -> None:
    text = markdown.format_report(report(sweep()))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 6
    assert {line.count("|") for line in lines} == {9}
    assert lines[1] == "| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"


def test_the_json_report_is_one_object_with_the_figures_unrounded() -> None:
    summary = report(sweep())
    content = json.loads(as_json.format_report(summary))
    assert content["schema_version"] == 1
    assert content["run"]["run_id"] == "run-a"
    assert content["run"]["started_at"] == "2026-08-21T10:11:12+00:00"
    points = {(p["precision"], p["world_size"]): p for p in content["points"]}
    assert points["bf16", 4]["efficiency"] == pytest.approx(8 / 12, rel=0.01)
    assert points["bf16", 4]["peak_mem_allocated_bytes"] == 2**30 + 3
    assert isinstance(points["bf16", 4]["peak_mem_allocated_bytes"], int)
    assert points["fp32", 4]["status"] == "oom"
    assert points["fp32", 4]["step_ms_p50"] is None
    assert points["bf16", 1]["params"] == {
        "grad_accumulation": "1",
        "hidden": "4096",
        "layers": "8",
    }


def test_json_has_null_for_what_json_cannot_say() -> None:
    text = as_json.format_object(a=float("nan"), b=float("inf"), c=pd.NaT, d=np.array([1, 2]))
    assert json.loads(text) == {"schema_version": 1, "a": None, "b": None, "c": None, "d": [1, 2]}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (float("nan"), ""),
        (123456.7, "123,457"),
        (12.345, "12.35"),
        (0.0123456, "0.01235"),
        (1e-9, "0.000000"),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert wording.number(value) == text


def test_every_status_has_its_words() -> None:
    assert set(wording.STATUS_WORDS) == {status.value for status in Status}


def test_the_list_of_points_shows_only_the_settings_that_vary() -> None:
    text = terminal.format_points(points_of(sweep()))
    assert text.splitlines()[0].split() == [
        "point",
        "precision",
        "world_size",
        "status",
        "step",
        "ms",
        "samples/s",
    ]
    assert len(text.splitlines()) == 7
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_point_shows_all_it_has_and_no_nulls() -> None:
    [row] = as_json.records(points_of([make_record(warnings=("noisy", "hot"))]))
    ranks = pd.DataFrame(
        {"rank": [0], "iterations": [6], "median_ms": [8.0], "min_ms": [7.5], "max_ms": [9.0]}
    )
    text = terminal.format_point(row, ranks, units("points"))
    assert re.search(r"^warnings +noisy; hot$", text, re.MULTILINE)
    assert re.search(r"^iterations +6$", text, re.MULTILINE)
    assert re.search(r"^peak_mem_allocated_bytes +1\.00 GiB$", text, re.MULTILINE)
    assert "error_message" not in text
    assert re.search(r"^ +0 +6 +8\.000 +7\.500 +9\.000$", text, re.MULTILINE)


def test_a_run_that_is_not_over_tells_what_is_missing() -> None:
    run = make_run("run-a", points_total=10, points_ok=0, finished_at=None)
    text = terminal.format_report(report(sweep(), run))
    assert "unfinished; 10 points: 5 ok, 1 failed, 0 skipped, 4 not run" in " ".join(text.split())


def test_an_interrupted_run_says_so_and_its_cancelled_point_did_not_fail() -> None:
    run = make_run("run-a", points_total=8, status=RunStatus.INTERRUPTED)
    cancelled = make_failed(make_point(world_size=8), status=Status.CANCELLED)
    for text in (
        terminal.format_report(report([*sweep(), cancelled], run)),
        markdown.format_report(report([*sweep(), cancelled], run)),
    ):
        said = " ".join(text.split())
        assert "interrupted after 2 min 5 s; 8 points: 5 ok, 1 failed, 0 skipped, " in said
        assert "1 cancelled, 1 not run" in said


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(9.8, 10.2, "10.00 ±2.0%"), (9.99, 10.01, "10.00 ±0.10%"), (9.0, 90.0, "10.00 ±>100%")],
)
def test_a_step_time_tells_how_well_it_is_known(low: float, high: float, text: str) -> None:
    row = {"step_ms_p50": 10.0, "step_ms_ci_low": low, "step_ms_ci_high": high}
    assert wording.step_ms(row) == text


def test_the_title_does_not_say_the_job_twice() -> None:
    assert wording.title(make_run("ddp-1", job_name="ddp")) == "ddp-1"
    assert wording.title(make_run("x-1", job_name="ddp")) == "ddp  x-1"


@pytest.mark.parametrize(("value", "text"), [(3.9, "3.90"), (0.31, "0.31"), (0.0039, "0.0039")])
def test_a_tiny_speed_up_keeps_two_digits(value: float, text: str) -> None:
    assert wording.ratio(value) == text


def test_the_list_of_runs_fits_80_columns_and_leaves_out_what_a_running_one_does_not_know() -> None:
    long = make_run("a" * 64 + "-20260821-101112-abcd")
    running = make_run("run-b", status=RunStatus.RUNNING, finished_at=None)
    text = terminal.format_runs([long, running])
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.splitlines()[-1].split() == ["run-b", "running", "unfinished"]
