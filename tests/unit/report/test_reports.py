"""The scaling report: what it says, and that each format says it safely."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from builders import (
    make_device,
    make_failed,
    make_measure,
    make_measurement,
    make_point,
    make_record,
    make_run,
    make_samples,
)

from raybench.job.point import Point, Precision
from raybench.records import Breakdown, PeakParts, Record, Status, Traffic
from raybench.report import formatting
from raybench.report.charts.figures import rows_of
from raybench.report.document import Table
from raybench.report.export import as_json
from raybench.report.summary import Summary, group_messages, summarize
from raybench.report.tables import step_meaning
from raybench.report.text import markdown, runs, terminal
from raybench.report.text.points import PointDetails, format_point, format_points
from raybench.report.what_ran import what_ran
from raybench.results import rows
from raybench.results.run import Run, RunStatus
from raybench.results.schema import SCHEMA_VERSION, TABLES, units

MS = 1_000_000
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


def explanation(summary: Summary) -> Sequence[str]:
    return summary.explain(summary.report.tables)


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


def test_the_settings_of_a_point_stand_on_the_first_line_of_its_regions() -> None:
    points = points_of(sweep()[:4:2])
    regions = pd.DataFrame(
        {"point_id": one, "attempt": 1, "region": name, "calls": 1} | {"region_ms": 1.0}
        for one in points["point_id"]
        for name in ("a", "b")
    ).assign(share_pct=50.0)
    [table] = summarize(make_run(), pd.DataFrame(), points, regions=regions).region_tables
    assert [row[-4:-2] for row in table.rows] == [("1", "a"), ("", "b"), ("2", "a"), ("", "b")]


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


def test_shares_that_differ_are_told_with_their_signs() -> None:
    texts = [f"known to ±{share}% only; asks for ±1.0%" for share in ("1.0", "170.2")]
    [said] = group_messages(texts)
    assert said.text == "known to ±1.0% to ±170.2% only; asks for ±1.0%"


def test_an_exception_is_told_with_its_type_after_the_place_and_only_once() -> None:
    def told(message: str, **fields: object) -> str:
        settings = {"status": Status.ERROR, "error_message": message, **fields}
        [said] = report([make_failed(**settings)]).failures
        return said.text

    assert told("3", error_type="SystemExit") == "error: SystemExit: 3"
    assert told("bad things", error_type="RuntimeError") == "error: RuntimeError: bad things"
    assert told("", error_type="RuntimeError") == "error: RuntimeError"
    assert told("RuntimeError: no", error_type="RuntimeError") == "error: RuntimeError: no"
    place = "rank 0 (alpha, cuda:0): "
    assert formatting.failure("error", "ValueError", f"{place}no") == f"{place}ValueError: no"
    assert formatting.failure("lost", "NodeLost", "it is gone") == "it is gone"


def test_points_in_each_of_which_one_rank_failed_are_no_failure_of_all_ranks() -> None:
    def failed(ranks: Sequence[int]) -> str:
        devices = tuple(make_device(index, host="vm") for index in range(3))
        records = [
            make_failed(
                make_point(world_size=3, batch_size=number + 1),
                status=Status.ERROR,
                devices=devices,
                error_message=f"rank {rank} (vm, cuda:{rank}): no",
                error_rank=rank,
            )
            for number, rank in enumerate(ranks)
        ]
        [said] = report(records).failures
        return said.where

    assert failed([1]).startswith("rank 1, ")
    assert failed([0, 1]) == "one rank each, 0 or 1, on vm"
    assert failed([0, 0, 2, 1]) == "one rank each, 0, 1 or 2, on vm"


def test_reasons_that_differ_in_the_units_of_their_figures_are_said_once_too() -> None:
    sizes = ("600.00 MiB", "2.50 GiB", "8 bytes")
    failed = [
        make_failed(make_point(batch_size=n), error_message=f"tried {size}")
        for n, size in enumerate(sizes, start=1)
    ]
    [said] = report(failed).failures
    assert (said.count, said.text) == (3, "out of memory: tried 8 bytes to 2.50 GiB")


def lost_on(host: str, batch_size: int) -> Record:
    """A point that the loss of rank 1's node ended, as the sweep says it."""
    devices = (make_device(0), make_device(1, host=host, node_id=host))
    return make_failed(
        make_point(world_size=2, batch_size=batch_size),
        status=Status.LOST,
        devices=devices,
        error_type="NodeLost",
        error_message=f"rank 1 ({host}, cuda:1): its node is gone",
        error_rank=1,
    )


def test_five_hundred_points_with_one_reason_are_one_line_with_the_places() -> None:
    hosts = [f"{letter}-host" for letter in "abcdef"]
    failed = [lost_on(hosts[n % 6], n + 1) for n in range(500)]
    [said] = report(failed).failures
    assert (said.text, said.count) == ("worker lost: its node is gone", 500)
    assert said.where == "rank 1 on a-host, b-host, c-host, d-host and 2 more"
    text = terminal.format_report(report(failed))
    assert "500 x worker lost: its node is gone (rank 1 on a-host, b-host," in text
    assert "500 x `worker lost: its node is gone (rank 1" in markdown.format_report(report(failed))


def test_the_nodes_that_were_lost_are_named_also_when_the_point_was_tried_again() -> None:
    again = make_record(lost_on("beta", 64).point, attempt=2)
    summary = report([lost_on("beta", 64), again, lost_on("[b]x\x1b[0m", 8)])
    assert summary.lost_nodes == ("beta", "[b]x�[0m")
    assert [said.where for said in summary.failures] == ["rank 1, [b]x�[0m, cuda:1"]
    text = terminal.format_report(summary)
    assert "\nnodes lost: beta, [b]x�[0m\n" in text
    assert "\x1b" not in text
    assert "Nodes lost: `beta, [b]x�[0m`" in markdown.format_report(summary)
    assert json.loads(as_json.format_report(summary))["lost_nodes"] == ["beta", "[b]x�[0m"]
    assert "lost" not in terminal.format_report(report([make_record()]))


def test_many_different_reasons_are_cut_short() -> None:
    failed = [make_failed(make_point(batch_size=n), error_message="x" * n) for n in range(1, 26)]
    for text in (
        terminal.format_report(report(failed)),
        markdown.format_report(report(failed)),
    ):
        assert text.count("1 x ") == 20
        assert "and 5 more" in text
    assert len(json.loads(as_json.format_report(report(failed)))["failures"]) == 25


def test_warnings_of_all_points_are_said_once_with_their_count() -> None:
    records = [make_record(make_point(world_size=n), warnings=("noisy",)) for n in (1, 2)]
    assert [(said.text, said.count) for said in report(records).warnings] == [("noisy", 2)]


def test_the_terminal_report_fits_80_columns_and_says_it_all() -> None:
    text = terminal.format_report(report(sweep(), make_run("run-a", points_total=6)))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "4 x NVIDIA H200 on 1 node" in text
    assert "6 points: 5 ok, 1 failed, 0 skipped\n" in text
    assert re.search(r"4 +12\.\d\d +21,\d{3} +2\.6\d +66\.\d% +1\.00\n", text)
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
    rates = ("scatter", "samples/s", "speed-up", "efficiency")
    assert table.columns[2:] == ("workers", "step ms", *rates, "first ms")
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_before_any_point_finished_the_devices_tell_what_a_rank_is() -> None:
    devices = pd.DataFrame([rows.device_row("run-a", make_device(kind="cpu", name="CPU"))])
    cancelled = make_failed(status=Status.CANCELLED, devices=())
    [table] = summarize(make_run("run-a"), devices, points_of([cancelled])).tables
    assert "workers" in table.columns


def test_the_report_says_first_how_far_the_speed_up_goes_and_for_which_settings() -> None:
    text = terminal.format_report(report(sweep()))
    title, two, four = text[text.index("Speed-up and") :].splitlines()[:3]
    assert title == "Speed-up and efficiency over world_size=1"
    assert re.fullmatch(
        r"2 GPUs  1\.60x, 80\.\d% efficiency \(bf16\) to 1\.60x, 80\.\d% efficiency \(.*\)", two
    )
    assert re.fullmatch(r"4 GPUs  2\.6\dx, 66\.\d% efficiency \(bf16\)", four)
    assert "**Speed-up and efficiency over world\\_size=1**" in markdown.format_report(
        report(sweep())
    )


def test_findings_over_another_baseline_name_what_is_compared() -> None:
    summary = report(sweep(), make_run("run-a", baseline={"precision": "fp32"}))
    [(what, found)] = summary.findings
    assert what == "precision=bf16"
    assert re.fullmatch(
        r"1\.\d\dx \(\d GPUs?\) to 1\.\d\dx \(\d GPUs?\); 100\.0% of the memory",
        found,
    )
    assert "Speed-up over precision=fp32\n" in terminal.format_report(summary)


def test_a_run_without_an_ok_point_has_no_findings_and_explains_no_column() -> None:
    text = terminal.format_report(report([make_failed()]))
    assert "Speed-up" not in text
    assert "median" not in text


def test_a_narrow_terminal_gets_all_figures_and_whole_run_ids() -> None:
    text = terminal.format_report(report(sweep()), width=40)
    assert "…" not in text
    # Whole figures, or none.
    assert re.search(r"^fp32 +64 +1 +8\.\d+ +1\.00$", text, re.MULTILINE)
    run = make_run("ddp_scaling-20260821-101112-abcd")
    assert run.run_id in runs.format_runs([run], {}, width=40)


def test_without_a_baseline_point_the_report_says_why_there_is_no_efficiency() -> None:
    records = [make_record(make_point(world_size=2))]
    text = terminal.format_report(report(records))
    assert "Without speed-up\n1 x no ok point with world_size=1 in this series" in text


def test_the_line_of_the_machine_says_which_way_the_bytes_went() -> None:
    ways = ("NET/Socket on eth0 (10.0.0.1)",)
    record = make_record(make_point(world_size=2))
    ranks = tuple(replace(one, transports=ways) for one in record.measurements)
    machine = report([make_record(), replace(record, measurements=ranks)]).machine
    assert machine == f"4 x NVIDIA H200 on 1 node; {ways[0]}"


@pytest.mark.parametrize(
    ("own", "asked", "is_told"),
    [("flash", "auto", True), ("cudnn", "auto", False), ("flash", "flash", False)],
)
def test_a_point_with_another_attention_kernel_than_its_baseline_is_told(
    own: str, asked: str, is_told: bool
) -> None:
    ran = []
    for batch_size, kernel, attention in ((32, "cudnn", "auto"), (64, own, asked)):
        params = {"attention": attention, "hidden": 8, "layers": 1}
        record = make_record(make_point(batch_size=batch_size, params=params))
        ranks = tuple(replace(one, attention_kernels=(kernel,)) for one in record.measurements)
        ran.append(replace(record, measurements=ranks))
    found = report(ran, make_run("run-a", baseline={"batch_size": 32, "attention": "auto"}))
    text = "attention by flash, at the baseline point by cudnn: speed-ups are of the kernels too"
    assert text in {one.text for one in found.warnings} or not is_told
    assert is_told or not any("attention by" in one.text for one in found.warnings)
    said = what_ran(rows_of(found), found.ranks)
    assert ("attention by cudnn" if own == "cudnn" else "attention by cudnn, flash") in said


def test_the_table_of_a_collective_says_what_nccl_ran() -> None:
    told = ("AllReduce 4096 B: RING LL, 2 channels",)
    record = make_record(make_point(world_size=2))
    ranks = tuple(
        replace(one, nccl_choices=told, message_bytes=4096, busbw_factor=1.0, items_per_step=None)
        for one in record.measurements
    )
    text = terminal.format_report(report([replace(record, measurements=ranks)]), width=200)
    assert "NCCL ran" in text
    assert "  RING LL, 2 channels" in text


def test_a_run_without_points_is_reported() -> None:
    summary = report([], device_count=0)
    assert "No point has been finished yet." in terminal.format_report(summary)
    assert "No point has been finished yet." in markdown.format_report(summary)
    assert format_points(points_of([])) == "No point has been finished yet.\n"
    assert json.loads(as_json.format_report(summary))["points"] == []
    assert summary.machine == "private Ray on this host, 4 GPUs"


def test_text_from_results_is_no_markup_in_the_terminal() -> None:
    text = terminal.format_report(report([make_failed(error_message=EVIL)]))
    assert "[red]boo[/red]" in text
    assert "\x1b" not in text
    assert "\n second line" not in text


def test_no_text_from_results_controls_the_terminal_whatever_its_column() -> None:
    """Names, parameters and paths in somebody's results are as untrusted as messages."""
    evil = "x\x1b[31m\x9b1m\u202e"

    def spoilt(value: object) -> object:
        if isinstance(value, dict):
            return {key + evil: spoilt(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoilt(item) for item in value]
        return value + evil if isinstance(value, str) else value

    points = points_of([*sweep(), lost_on("beta", 8), make_record(neighbours=("a",))])
    for name in set(points) - {"status", "scaling", "precision"}:
        points[name] = points[name].map(spoilt)
    device = {name: spoilt(value) for name, value in rows.device_row("r", make_device()).items()}
    run = make_run(
        job_name=evil, cluster=evil, versions={evil: evil}, baseline={"world_size": 1, evil: evil}
    )
    region = {"point_id": points["point_id"].iloc[0], "attempt": 1, "region": evil, "calls": 1}
    regions = pd.DataFrame([region | {"region_ms": 1.0, "share_pct": 50.0}])
    summary = summarize(run, pd.DataFrame([device]), points, regions=regions)
    assert summary.region_tables
    content = as_json.records(points)
    details = PointDetails(
        row=content[-2],
        ranks=pd.DataFrame(),
        modules=pd.DataFrame(),
        regions=regions,
        states=pd.DataFrame(),
        traces=[evil],
        attempts=content[-2:],
    )
    texts = (
        terminal.format_report(summary),
        markdown.format_report(summary),
        as_json.format_report(summary),
        as_json.format_point(details),
        format_point(details, units("points")),
        format_points(points),
        runs.format_runs([replace(run, run_id=evil)], {}),
    )
    for text in texts:
        assert all(line.isprintable() for line in text.split("\n"))


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
    assert {line.count("|") for line in lines} == {11}
    assert lines[1] == "| :--- |" + " ---: |" * 9


def test_the_json_report_is_one_object_with_the_figures_unrounded() -> None:
    summary = report(sweep())
    content = json.loads(as_json.format_report(summary))
    assert content["schema_version"] == SCHEMA_VERSION
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
    nulls = {"a": None, "b": None, "c": None}
    assert json.loads(text) == {"schema_version": SCHEMA_VERSION, **nulls, "d": [1, 2]}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (float("nan"), ""),
        (123456.7, "123,457"),
        (12.345, "12.35"),
        (0.0123456, "0.01235"),
        (1e-9, "1.00e-09"),
        (-3.108e-8, "-3.11e-08"),
        (0.000956, "0.000956"),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert formatting.number(value) == text


def test_every_status_has_its_words() -> None:
    assert set(formatting.STATUS_WORDS) == {status.value for status in Status}


def test_the_list_of_points_shows_only_the_settings_that_vary() -> None:
    text = format_points(points_of(sweep()))
    assert text.splitlines()[0].split() == [
        "point",
        "precision",
        "world_size",
        "status",
        "step",
        "ms",
        "samples/s",
        "p99",
        "ms",
    ]
    assert len(text.splitlines()) == 7
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_point_shows_all_it_has_and_no_nulls() -> None:
    [row] = as_json.records(points_of([make_record(warnings=("noisy", "hot"))]))
    ranks = pd.DataFrame(
        {"rank": [0], "iterations": [6], "median_ms": [8.0], "min_ms": [7.5], "max_ms": [9.0]}
    ).assign(data_ms=math.nan)
    details = PointDetails(
        row=row, ranks=ranks, modules=pd.DataFrame(), states=pd.DataFrame(), traces=()
    )
    text = format_point(details, units("points"))
    assert "data ms" not in text
    waiting = format_point(replace(details, ranks=ranks.assign(data_ms=0.25)), units("points"))
    assert re.search(r"^ +0 +6 +8\.000 +7\.500 +9\.000 +0\.2500$", waiting, re.MULTILINE)
    assert re.search(r"^warnings +noisy; hot$", text, re.MULTILINE)
    assert re.search(r"^iterations +6$", text, re.MULTILINE)
    assert re.search(r"^peak_mem_allocated_bytes +1 GiB$", text, re.MULTILINE)
    assert "error_message" not in text
    assert re.search(r"^ +0 +6 +8\.000 +7\.500 +9\.000$", text, re.MULTILINE)


def shown(*attempts: Record) -> str:
    content = as_json.records(points_of(attempts))
    details = PointDetails(
        row=content[-1],
        ranks=pd.DataFrame(),
        modules=pd.DataFrame(),
        states=pd.DataFrame(),
        traces=(),
        attempts=content,
    )
    return format_point(details, units("points"))


def test_a_failed_point_shows_the_end_of_its_detail_and_where_it_failed() -> None:
    detail = "\n".join(f"    line {n} {EVIL.splitlines()[0]}" for n in range(40))
    text = shown(make_failed(error_rank=0, error_detail=detail))
    assert re.search(r"^error_host +alpha$", text, re.MULTILINE)
    assert re.search(r"^error_device +cuda:0$", text, re.MULTILINE)
    assert "error_detail, the last 15 of 40 lines\n    line 25 [red]boo[/red]" in text
    assert "line 24" not in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_all_attempts_at_a_point_are_shown_in_order_with_their_times() -> None:
    lost = make_failed(status=Status.LOST, error_message="the node is gone")
    text = shown(lost, make_record(attempt=2, duration_s=1.25))
    _, head, first, second = text[text.index("Attempts") :].splitlines()[:4]
    assert head.split() == ["attempt", "status", "started,", "UTC", "took", "s", "reason"]
    assert re.fullmatch(r"1 +worker lost +2026-08-21 10:11:12 +3\.50 +the node is gone", first)
    assert re.fullmatch(r"2 +ok +2026-08-21 10:11:12 +1\.25", second)
    assert "Attempts" not in shown(lost)


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
    [(9.8, 10.2, "10.00 ±2.0%"), (9.99, 10.01, "10.00 ±0.10%"), (9.0, 43.0, "10.00 ±170.0%")],
)
def test_a_step_time_tells_how_well_it_is_known(low: float, high: float, text: str) -> None:
    row = {"step_ms_p50": 10.0, "step_ms_low": low, "step_ms_high": high}
    assert formatting.step_ms(row) == text


def test_the_title_does_not_say_the_job_twice() -> None:
    assert formatting.title(make_run("ddp-1", job_name="ddp")) == "ddp-1"
    assert formatting.title(make_run("x-1", job_name="ddp")) == "ddp  x-1"


@pytest.mark.parametrize(("value", "text"), [(3.9, "3.90"), (0.31, "0.31"), (0.0039, "0.0039")])
def test_a_tiny_speed_up_keeps_two_digits(value: float, text: str) -> None:
    assert formatting.ratio(value) == text


def test_the_list_of_runs_fits_80_columns_and_leaves_out_what_a_running_one_does_not_know() -> None:
    long = make_run("a" * 64 + "-20260821-101112-abcd")
    running = make_run("run-b", status=RunStatus.RUNNING, finished_at=None)
    text = runs.format_runs([long, running], {})
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.splitlines()[-1].split() == ["run-b", "running", "unfinished"]


def broken_down(
    size: int, step_ms: float, *, slow_rank: int | None = None, idle_ms: float = 0.1
) -> Record:
    """A point of 8 ms of its own; the device of a slow rank works 1 ms longer."""
    point = make_point(world_size=size)
    ranks = tuple(
        make_measurement(
            rank,
            [[round(step_ms * 1e6)] * 6],
            breakdown=Breakdown(
                local_ms=((9.0 if rank == slow_rank else 8.0,) * 3,) * 2,
                device_ms=(9.0 if rank == slow_rank else 8.0) - idle_ms,
                optimizer_ms=0.5,
                comm_ms=(1.5,) * size,
                hooked_ms=(step_ms,) * 3 if size > 1 else (),
                tail_ms=(0.5 if slow_rank in (None, rank) else 1.5,) * 3 if size > 1 else (),
            ),
        )
        for rank in range(size)
    )
    return make_record(point, measurements=ranks)


def test_where_the_step_goes_is_a_table_of_its_own_without_the_parts_that_nobody_knows() -> None:
    scaling, parts = report([broken_down(1, 8.0), broken_down(4, 10.0)]).tables
    assert "comm" not in scaling.columns
    assert parts.kind == "where the step goes, ms"
    assert parts.columns[3:] == ("step", "compute", "optim", "idle", "comm", "late")
    assert [row[3:] for row in parts.rows] == [
        ("8.000", "7.40", "0.500", "0.100", "", ""),
        ("10.00", "7.40", "0.500", "0.100", "2.00", "0"),
    ]


def test_parts_that_exceed_the_step_are_left_blank_with_the_reason() -> None:
    fits, exceeds = broken_down(1, 8.0), broken_down(4, 4.0)
    summary = report([fits, exceeds])
    scaling, parts = summary.tables
    assert [row[scaling.columns.index("!")] for row in scaling.rows] == ["", "b"]
    known = dict(zip(parts.columns, parts.rows[1], strict=True))
    assert (known["!"], known["step"]) == ("b", scaling.rows[1][3].split()[0])
    assert [known[name] for name in ("compute", "optim", "idle")] == [""] * 3
    assert "b no breakdown, the parts exceed the step" in explanation(summary)[-1]
    assert summary.losses == ()
    [said] = [said for said in summary.warnings if said.text.startswith("no breakdown")]
    assert not [said for said in summary.warnings if "host-bound" in said.text]
    assert said.count == 1


def test_a_report_says_of_which_step_its_rates_are_as_its_schema_had_them() -> None:
    assert "Rates follow the mean" in explanation(report(sweep()))[0]
    older = points_of(sweep()).assign(quick=None)
    before = explanation(summarize(make_run("run-a"), pd.DataFrame([]), older))[0]
    assert "the slowest rank's time of each iteration" in before
    assert "Rates follow the mean" not in before


def test_a_page_says_of_which_ranks_the_step_is_as_its_schema_had_it() -> None:
    assert "of ranks in lockstep their median" in step_meaning(by_mean=True)
    assert "of the slowest rank's time" in step_meaning(by_mean=False)


def test_without_parts_nothing_is_said_of_instrumented_steps() -> None:
    measurement = make_measurement(0, [[8_000_000] * 6], flops_per_step=1e9)
    summary = report([make_record(make_point(), measurements=(measurement,))])
    assert summary.tables[1].columns[3:] == ("step", "MFU", "TFLOP/s")
    assert any("TFLOP/s: of one device." in paragraph for paragraph in explanation(summary))
    assert not any("instrumented" in paragraph for paragraph in explanation(summary))


def test_what_the_steps_lose_is_told_for_the_most_ranks_and_the_slow_rank_is_named() -> None:
    summary = report([broken_down(1, 8.0), broken_down(2, 9.0), broken_down(4, 10.0, slow_rank=3)])
    [(what, lost)] = summary.losses
    assert what == "4 GPUs"
    assert lost == "10.0% exposed communication, 10.0% waiting for rank 3"
    text = terminal.format_report(summary)
    assert "Share of the step that is lost, against world_size=1\n4 GPUs  10.0% exposed" in text
    assert "1 x rank 3 is slower: its own step takes 1 ms longer than the others' (device)," in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_part_that_grew_by_less_than_a_hundredth_is_not_worth_a_line() -> None:
    assert report([broken_down(1, 8.0), broken_down(4, 8.05)]).losses == ()
    assert report(sweep()).losses == ()


def test_marks_say_what_is_doubtful_and_only_those_that_are_set_are_explained() -> None:
    slow = broken_down(4, 10.0, slow_rank=3, idle_ms=1.0)
    settled = [
        replace(m, repetitions=(replace(m.repetitions[0], settled=False),))
        for m in slow.measurements
    ]
    summary = report([broken_down(1, 8.0), replace(slow, measurements=tuple(settled))])
    table = summary.tables[0]
    place = table.columns.index("!")
    assert [row[place] for row in table.rows] == ["", "uhs"]
    explained = explanation(summary)[-1]
    assert explained.startswith("!: u unsteady")
    assert "host-bound" in explained
    assert "throttled" not in explained
    assert "!" not in report(sweep()).tables[0].columns


def test_a_point_that_was_not_alone_on_its_nodes_is_marked() -> None:
    beside = make_record(make_point(batch_size=1), neighbours=("abc",))
    failed = make_failed(make_point(batch_size=2), neighbours=("abc",))
    summary = report([beside, failed, make_record()])
    table = summary.tables[0]
    place = table.columns.index("!")
    assert [row[place] for row in table.rows] == ["n", "", ""]
    explained = "!: n not alone, something else used its devices or nodes at the same time."
    assert explanation(summary)[-1] == explained


def test_a_throttled_point_is_marked_and_tells_its_reasons() -> None:
    plain = make_record()
    [measurement] = plain.measurements
    [repetition] = measurement.repetitions
    timed = replace(repetition.timed, throttled=(True,) * 3 + (False,) * 3)
    hot = replace(
        measurement,
        repetitions=(replace(repetition, timed=timed),),
        throttle_reasons=("sw_power_cap",),
    )
    summary = report([replace(plain, measurements=(hot,))])
    assert "t" in summary.tables[0].rows[0]
    [said] = summary.warnings
    assert said.text == "clocks were limited in 50% of the samples: sw_power_cap"


def test_a_wide_table_of_parts_does_without_its_optional_columns_in_a_terminal() -> None:
    row = ("fp32", "65536", "1") + ("12.34",) * 6
    columns = ("precision", "batch", "workers", *(f"part {n}" for n in range(4)), "GEMM", "TFLOP/s")
    table = Table(
        workload="mlp",
        params={},
        kind="parts",
        columns=columns,
        settings=3,
        rows=(row,),
        optional=("TFLOP/s", "GEMM"),
    )
    summary = replace(report(sweep()), tables=(table,))
    wide, narrow, narrowest = (terminal.format_report(summary, width=n) for n in (80, 68, 61))
    heads = [
        next(line for line in text.splitlines() if line.startswith("precision "))
        for text in (wide, narrow, narrowest)
    ]
    assert [head.split()[-2:] for head in heads] == [
        ["GEMM", "TFLOP/s"],
        ["3", "GEMM"],
        ["part", "3"],
    ]
    assert "Left out" not in wide
    assert "Left out to fit 68 columns: TFLOP/s. A wider terminal" in narrow
    assert "Left out to fit 61 columns: GEMM, TFLOP/s. A wider terminal" in narrowest
    # The legend explains what is shown.
    assert "TFLOP/s: of one device" in wide
    assert "TFLOP/s: of one device" not in narrow
    assert "TFLOP/s" in markdown.format_report(summary)


def test_a_wide_terminal_shows_the_parts_beside_the_points_and_their_ids() -> None:
    records = [broken_down(1, 8.0), broken_down(4, 10.0)]
    lines = terminal.format_report(report(records), width=200).splitlines()
    [head] = [number for number, text in enumerate(lines) if text.startswith("precision ")]
    assert lines[head - 1] == "mlp: weak scaling, batch per device; where the step goes, ms"
    # fmt: off
    assert lines[head].split() == [
        "precision", "batch", "GPUs", "step", "ms", "scatter", "samples/s", "speed-up",
        "efficiency", "GiB", "first", "ms", "compute", "optim", "idle", "comm", "late", "p99", "ms",
        "point",
    ]
    # fmt: on
    assert lines[head + 1].endswith(records[0].point.point_id)
    # A text is no wider for it.
    assert max(len(text) for text in lines[head + 3 :]) <= 100


def test_the_points_of_a_run_tell_why_they_failed_where_there_is_room() -> None:
    points = points_of([make_record(), make_failed(make_point(world_size=2))])
    narrow, wide = (format_points(points, width=width).splitlines() for width in (60, 200))
    assert "reason" not in narrow[0]
    assert wide[0].split()[-4:] == ["p99", "ms", "GiB", "reason"]
    assert "CUDA out of memory" in wide[2]
    assert max(map(len, narrow)) <= 60


def test_the_head_of_a_setting_is_folded_between_its_words() -> None:
    params = ({"activation_checkpointing": on} for on in (False, True))
    records = [make_record(make_point(params=one)) for one in params]
    run = make_run("run-a", baseline={"activation_checkpointing": "false"})
    text = terminal.format_report(report(records, run), width=70)
    head = text[text.rindex("\n", 0, text.rindex("precision  batch")) :].splitlines()[1]
    assert head.split()[:4] == ["precision", "batch", "GPUs", "checkpointing"]
    assert re.search(r"^ +activation_$", text, re.MULTILINE)


def test_no_table_explains_a_column_twice() -> None:
    records = [collective("all_reduce", size, ms) for size, ms in ((4096, 0.01), (2**30, 4.0))]
    for summary in (report(records), report([broken_down(1, 8.0), broken_down(4, 10.0)])):
        for width in (60, 80, 200):
            text = " ".join(terminal.format_report(summary, width=width).split())
            for word in ("Step: ", "MFU: ", "TFLOP/s: ", "Algbw, busbw: "):
                assert text.count(word) <= 1


def collective(operation: str, size_bytes: int, step_ms: float, world_size: int = 4) -> Record:
    point = unscaled("collective", world_size, operation=operation, size_bytes=size_bytes)
    ranks = tuple(
        make_measurement(
            rank,
            [[round(step_ms * 1e6)] * 6],
            items_per_step=None,
            message_bytes=size_bytes,
            busbw_factor=1.5,
        )
        for rank in range(world_size)
    )
    return make_record(point, measurements=ranks)


def unscaled(workload: str, world_size: int = 1, **params: object) -> Point:
    """A point of a workload that takes no batch size."""
    nothing = {"batch_size": None, "global_batch_size": None, "scaling": None}
    return make_point(workload=workload, params=params, world_size=world_size, **nothing)


def test_collectives_are_a_table_per_operation_read_down_the_message_size() -> None:
    records = [
        collective(operation, size, ms)
        for operation in ("all_reduce", "all_gather")
        for size, ms in ((2**30, 4.5), (4096, 0.0116))
    ]
    first, second = report(records).tables
    assert (first.params, second.params) == (
        {"operation": "all_reduce"},
        {"operation": "all_gather"},
    )
    assert first.kind == "fp32, 4 GPUs"
    assert first.columns == ("size", "step µs", "scatter", "algbw GB/s", "busbw GB/s")
    assert first.rows == (
        ("4 KiB", "11.60", "0.0%", "0.3531", "0.5297"),
        ("1 GiB", "4,500", "0.0%", "238.6", "357.9"),
    )


def test_without_throughput_there_is_no_speed_up_and_no_remark_about_it() -> None:
    records = [collective("all_reduce", 2**20, 1.0, world_size) for world_size in (2, 4)]
    failed = make_failed(unscaled("collective", 8, operation="all_reduce", size_bytes=2**20))
    summary = report([*records, failed])
    [table] = summary.tables
    assert table.columns == ("GPUs", "step ms", "scatter", "algbw GB/s", "busbw GB/s")
    assert table.rows[-1] == ("8", "out of memory", "", "", "")
    assert (summary.findings, summary.losses, summary.without_speed_up) == ((), (), ())
    text = terminal.format_report(summary)
    assert "peed-up" not in text
    assert "nccl-tests" in text


def test_matrix_products_show_their_shape_and_rate() -> None:
    records = [
        make_record(
            unscaled("gemm", m=m, n=8, k=8),
            measurements=(
                make_measurement(
                    0, [[MS] * 6], items_per_step=None, flops_per_step=4e11, gemm_tflops=800.0
                ),
            ),
            devices=(make_device(name="Unheard of"),),
        )
        for m in (1024, 64)
    ]
    [table] = report(records).tables
    assert table.columns == ("m", "step ms", "scatter", "TFLOP/s", "%GEMM")
    assert table.rows[0] == ("64", "1.000", "0.0%", "400.0", "50.0%")
    assert table.kind == "fp32, 1 GPU"


def test_a_product_is_told_as_it_lasts_and_as_it_was_in_its_first_moments() -> None:
    measured = make_measurement(
        0, [[2 * MS] * 6], items_per_step=None, flops_per_step=4e11, gemm_tflops=250.0
    )
    warm = make_samples([50 * MS, *[MS] * 40])
    [repetition] = measured.repetitions
    measured = replace(measured, repetitions=(replace(repetition, warmup=warm),))
    record = make_record(
        unscaled("gemm", m=64, n=8, k=8),
        measurements=(measured,),
        devices=(make_device(name="Unheard of"),),
    )
    summary = report([record])
    [table] = summary.tables
    assert table.columns == ("step ms", "scatter", "TFLOP/s", "burst", "%GEMM")
    assert table.rows[0][2:] == ("200.0", "400.0", "80.0%")
    assert summary.lead.startswith("at most 200.0 TFLOP/s; 400.0 TFLOP/s in its first 30 ms; ")
    assert any("Burst: TFLOP/s in the first 30 ms" in told for told in explanation(summary))


def test_a_cuda_graph_is_a_column_where_it_varies_and_told_once_where_it_does_not() -> None:
    replayed, plain = (make_record(make_point(cuda_graph=graph)) for graph in (True, False))
    [table] = report([replayed, plain]).tables
    assert table.columns[:4] == ("precision", "cuda_graph", "batch", "GPUs")
    assert {row[1] for row in table.rows} == {"true", "false"}
    assert table.columns[1] in table.texts
    summary = report([replayed])
    assert "cuda_graph" not in summary.tables[0].columns
    assert summary.shared["cuda_graph"] == "true"
    assert "cuda_graph" not in report([plain]).shared


def test_a_run_of_the_first_schema_is_reported_as_it_was() -> None:
    points = points_of(sweep())
    added = ("cuda_graph", "stable", "throttled", "host_bound", "wait_ms", "methods")
    added += ("first_step_ms", "compiled_step_ms")
    for column in added:
        points[column] = None
    summary = summarize(make_run("run-a"), pd.DataFrame(), points)
    [table] = summary.tables
    shown = ("step ms", "scatter", "samples/s", "speed-up", "efficiency", "GiB")
    assert table.columns[3:] == shown
    assert summary.warnings == report(sweep()).warnings


@pytest.mark.parametrize(
    ("time_ms", "text"), [(0.0116, "11.60 µs"), (0.1, "0.1000 ms"), (1234.5, "1,234 ms")]
)
def test_a_short_time_is_told_in_microseconds(time_ms: float, text: str) -> None:
    assert formatting.duration(time_ms) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1000, "1000 B"), (4096, "4 KiB"), (3 * 2**19, "1.5 MiB"), (2**40, "1 TiB")],
)
def test_sizes_are_told_in_binary_units(count: int, text: str) -> None:
    assert formatting.size(count) == text


@pytest.mark.parametrize(("value", "text"), [(0.094, "0.094"), (12.34, "12.3"), (0.0, "0")])
def test_parts_of_a_step_have_three_digits(value: float, text: str) -> None:
    assert formatting.part_ms(value) == text


def test_parts_of_a_very_short_step_have_three_digits_too() -> None:
    assert formatting.part_ms(0.001785, step_ms=0.002) == "0.00178"
    assert formatting.part_ms(0.001785, step_ms=2.0) == "0.002"


def test_the_rank_that_a_warning_names_is_no_figure() -> None:
    warnings = [f"rank {rank} is slower: it takes {rank}5 ms" for rank in (1, 12, 12)]
    records = [
        make_record(make_point(batch_size=n + 1), warnings=(text,))
        for n, text in enumerate(warnings)
    ]
    assert [(said.text, said.count) for said in report(records).warnings] == [
        ("rank 1 is slower: it takes 15 ms", 1),
        ("rank 12 is slower: it takes 125 ms", 2),
    ]


def test_memory_and_what_a_step_sends_are_tables_where_they_are_known() -> None:
    plain = broken_down(2, 10.0)
    peak = PeakParts(
        parameters_bytes=2**30,
        gradients_bytes=2**29,
        optimizer_bytes=2**31,
        activations_bytes=2**32,
        other_bytes=0,
    )
    sent = tuple(
        Traffic(kind=kind, ranks=2, calls=calls, message_bytes=2**20, bus_bytes=2.0**20)
        for kind, calls in (("all_gather", 4), ("reduce_scatter", 2))
    )
    measurements = tuple(
        replace(m, breakdown=replace(m.breakdown, peak=peak, traffic=sent))
        for m in plain.measurements
    )
    estimated = replace(plain, measurements=measurements, mem_estimate_bytes=3 * 2**29)
    summary = report([estimated])
    kinds = [table.kind for table in summary.tables]
    assert kinds[-2:] == ["memory at its peak, GiB", "communication in a step"]
    memory, traffic = summary.tables[-2:]
    assert memory.columns[-2:] == ("GiB", "estimate")
    parts_peak_estimate = ("1.00", "0.50", "2.00", "4.00", "0.00", "1.00", "1.50")
    assert memory.rows[0][memory.settings :] == parts_peak_estimate
    assert [row[traffic.settings :] for row in traffic.rows] == [
        ("all_gather", "4", "1 MiB"),
        ("reduce_scatter", "2", "1 MiB"),
    ]
    for text in (terminal.format_report(summary), markdown.format_report(summary)):
        assert "reduce" in text
        assert "Communication in a step: counted" in " ".join(text.split())
    assert len(report([plain]).tables) == len(summary.tables) - 2
