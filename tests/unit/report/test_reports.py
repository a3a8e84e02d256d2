"""What reports, lists and advice say, and that each format says it safely."""

import json
import re
import shlex
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from builders import (
    findings_of,
    make_apart,
    make_collective,
    make_device,
    make_failed,
    make_finding,
    make_measure,
    make_point,
    make_record,
    make_row,
    make_rows,
    make_run,
    make_samples,
    make_subject,
    make_summary,
    make_sweep,
    report_text,
    tables_of,
    unscaled_point,
    write_run,
)
from commands import EXAMPLES

from raybench.analysis.answer import decide
from raybench.analysis.rows import ScaledRow, point_rows
from raybench.analysis.run_data import RunData, load_run_data
from raybench.health.report import HealthReport
from raybench.job.rounds import WORTHWHILE
from raybench.records.devices import Verdict
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Breakdown, Repetition
from raybench.records.status import RunStatus, Status
from raybench.report import documents, formatting
from raybench.report.documents import format_document, legend_paragraphs
from raybench.report.formatting import cut_end, plain, plain_lines, printable
from raybench.report.point_settings import point_names, setting_columns, settings_words
from raybench.report.run_report import RunReport
from raybench.report.show import PointDetails, PointList, RunList
from raybench.report.words.failures import failure_of_row
from raybench.report.words.run import counts, machine_of_run
from raybench.results.columns import SCHEMA_VERSION
from raybench.results.reader import load_table
from raybench.results.writer import RunStore

MS = 1_000_000
step_ms = partial(formatting.step_in, formatting.MILLISECONDS)


def report_of(records):
    return RunReport(answer=decide(make_summary(records)))


def legend_of(summary):
    """Write what the columns of the points mean."""
    return " ".join(legend_paragraphs(tables_of(summary)))


def test_regions_have_settings_of_their_point():
    points = make_rows(make_sweep()[:4:2])
    regions = pd.DataFrame(
        {"run_id": "r", "point_id": row.point_id, "attempt": 1, "region": name, "region_ms": 1.0}
        for row in points
        for name in ("a", "b")
    ).assign(rank=0, calls=1, share_pct=50.0)
    run = {"run": make_run(), "devices": pd.DataFrame(), "points": points}
    [table] = tables_of(RunData(**run, region_rows=regions), "regions")
    assert [row[-5:-3] for row in table.texts] == [("1", "a"), ("1", "b"), ("2", "a"), ("2", "b")]


def test_exception_is_named_once_after_its_place():
    def told(message, **fields):
        settings = {"status": Status.ERROR, "error_message": message, **fields}
        [said] = report_of([make_failed(**settings)]).failures
        return said.text

    assert told("3", error_type="SystemExit") == "error: SystemExit: 3"
    assert told("bad things", error_type="RuntimeError") == "error: RuntimeError: bad things"
    assert told("", error_type="RuntimeError") == "error: RuntimeError"
    assert told("RuntimeError: no", error_type="RuntimeError") == "error: RuntimeError: no"
    assert told("it is gone", status=Status.LOST, error_type="NodeLost") == (
        "worker lost: it is gone"
    )
    [row] = make_rows([make_failed(status=Status.ERROR, error_type="ValueError", error_rank=0)])
    assert failure_of_row(row) == "rank 0 (alpha, cuda:0): ValueError: CUDA out of memory"
    assert failure_of_row(row, with_place=False) == "ValueError: CUDA out of memory"
    unplaced = replace(row, error_host=None, error_device=None)
    assert failure_of_row(unplaced) == "ValueError: CUDA out of memory"


def test_out_of_memory_names_the_gib_without_advice():
    message = (
        "CUDA out of memory. Tried to allocate 49.12 GiB. GPU 0 has a total capacity of 139.80 GiB "
        "of which 6.82 GiB is free. Including non-PyTorch memory, this process has 132.98 GiB "
        "memory in use. See https://docs.pytorch.org; what should fit: batch_size 128 (104 GiB)"
    )
    [row] = make_rows([make_failed(error_message=message)])
    assert failure_of_row(row, with_place=False) == (
        "the step needed 49.12 GiB more, and 6.82 GiB of 139.80 GiB were free; "
        "what should fit: batch_size 128 (104 GiB)"
    )


def test_single_failed_ranks_are_grouped():
    def failed(ranks):
        devices = tuple(make_device(index, host="vm") for index in range(3))
        records = []
        for number, rank in enumerate(ranks):
            told = {"error_message": "no", "error_rank": rank}
            point = make_point(world_size=3, batch_size=number + 1)
            records.append(make_failed(point, status=Status.ERROR, devices=devices, **told))
        [said] = report_of(records).failures
        return said.where

    assert failed([1]).startswith("At rank 1, ")
    assert failed([0, 1]) == "At one rank each, 0 or 1, on vm."
    assert failed([0, 0, 2, 1]) == "At one rank each, 0, 1 or 2, on vm."


def lost_on(host, batch_size):
    """A point that the loss of rank 1's node ended, as the sweep says it."""
    devices = (make_device(0), make_device(1, host=host, node_id=host))
    return make_failed(
        make_point(world_size=2, batch_size=batch_size),
        status=Status.LOST,
        devices=devices,
        error_type="NodeLost",
        error_message="its node is gone",
        error_rank=1,
    )


def test_same_failures_are_one_line_with_places():
    hosts = [f"{letter}-host" for letter in "abcdef"]
    failed = [lost_on(hosts[n % 6], n + 1) for n in range(500)]
    [said] = report_of(failed).failures
    assert (said.text, said.count) == ("worker lost: its node is gone", 500)
    assert said.where == "At rank 1 on a-host, b-host, c-host, d-host and 2 more."
    text = " ".join(report_text(make_summary(failed)).split())
    assert "500 points worker lost: its node is gone. At rank 1 on a-host, b-host," in text
    markdown = report_text(make_summary(failed), "md")
    assert "500 points: `worker lost: its node is gone. At rank 1" in markdown


def test_lost_nodes_are_named_after_retry():
    again = make_record(lost_on("beta", 64).point, attempt=2)
    summary = make_summary([lost_on("beta", 64), again, lost_on("[b]x\x1b[0m", 8)])
    text = report_text(summary)
    assert "\nnodes lost: beta, [b]x�[0m\n" in text
    assert "\x1b" not in text
    assert r"nodes lost: beta, \[b\]x�\[0m" in report_text(summary, "md")
    assert json.loads(report_text(summary, "json"))["lost_nodes"] == ["beta", "[b]x\x1b[0m"]
    assert "lost" not in report_text(make_summary([make_record()]))


def test_long_texts_and_wide_tables_fit_terminal():
    params = {f"parameter_{number}": "v" * 30 for number in range(12)}
    records = [make_failed(make_point(params=params), error_message="x" * 500)]
    text = report_text(make_summary(records))
    assert max(len(line) for line in text.splitlines()) <= 80
    text = report_text(load_run_data(EXAMPLES, "ddp_linear-20261122-231903-de3c"))
    tables = text.partition("linear: fp32")[2].partition("Doubts")[0]
    assert max(map(len, tables.splitlines())) <= 80


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("workload: {kind: script}  # not precision: bf16", "as the script has it"),
        ("matrix: {precision: bf16}", "bf16"),
        ('matrix: {"precision": bf16}', "bf16"),
        ("workload: {kind: script, args: --precision=bf16}", "as the script has it"),
    ],
)
def test_show_names_only_precision_set_by_job(job, told):
    row = make_row(workload="script", precision="bf16")
    summary = RunData(run=make_run(job_text=job), devices=pd.DataFrame(), points=[row])
    nothing = {"ranks": pd.DataFrame(), "modules": pd.DataFrame(), "traces": []}
    details = PointDetails(row=row, is_precision_unknown=summary.is_precision_unknown, **nothing)
    assert re.search(rf"(?m)^precision +{told}$", format_document(details, "terminal"))


def test_cpu_report_names_workers_and_no_memory():
    devices = (make_device(kind="cpu", name="CPU"),)
    record = make_record(devices=devices, of_ranks={"peak_mem_allocated_bytes": None})
    [table] = tables_of(make_summary([record], device_count=0))
    assert table.titles == ("step ms", "scatter", "samples/s", "first ms")
    assert table.kind == "fp32, batch 64 per device, 1 worker"
    assert {len(row) for row in table.texts} == {len(table.titles)}


def test_run_without_ok_points_has_no_findings():
    text = report_text(make_summary([make_failed()]))
    assert "Speed-up" not in text
    assert "median" not in text


def test_narrow_terminal_keeps_numbers_and_run_ids():
    text = report_text(make_summary(make_sweep()), width=40)
    assert "…" not in text
    # Whole figures, or none.
    assert re.search(r"^ +1 +fp32 +8\.\d+ +1\.00$", text, re.MULTILINE)
    run = make_run("ddp_scaling-20260821-101112-abcd")
    assert run.run_id in format_document(RunList(runs=[run], machines={}), "terminal", width=40)


def test_notebook_gets_report_as_text(monkeypatch):
    monkeypatch.setattr("builtins.get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    assert "ok" in report_text(make_summary(make_sweep()))


@pytest.mark.parametrize(
    ("own", "asked", "is_told"),
    [("flash", "auto", True), ("cudnn", "auto", False), ("flash", "flash", False)],
)
def test_other_attention_kernel_is_named(own, asked, is_told):
    ran = []
    for batch_size, kernel, attention in ((32, "cudnn", "auto"), (64, own, asked)):
        params = {"attention": attention, "hidden": 8, "layers": 1}
        point = make_point(batch_size=batch_size, params=params)
        ran.append(make_record(point, of_ranks={"attention_kernels": (kernel,)}))
    found = make_summary(ran, make_run("run-a", baseline={"batch_size": 32, "attention": "auto"}))
    doubts = RunReport(answer=decide(found)).doubts
    told = [one.shortened(150) for one in doubts if "attention" in one.text]
    assert told == is_told * [
        "the kernel of attention was `flash` here and `cudnn` at the baseline point. "
        "The speed-up includes the change of kernel."
    ]


def test_collective_table_has_nccl_choices():
    told = {"message_bytes": 4096, "busbw_factor": 1.0, "items_per_step": None}
    told["nccl_choices"] = ("AllReduce 4096 B: RING LL, 2 channels",)
    record = make_record(make_point(world_size=2), of_ranks=told)
    text = report_text(make_summary([record]), width=200)
    assert "NCCL ran" in text
    assert "  RING LL, 2 channels" in text


def test_a_run_without_points_is_reported():
    summary = make_summary([], device_count=0)
    listed, said = PointList(run_id="r", points=[]), "No point has been finished yet."
    for kind in ("terminal", "md"):
        assert said in report_text(summary, kind)
        assert format_document(listed, kind) == f"{said}\n"
    assert json.loads(report_text(summary, "json"))["points"] == []
    assert machine_of_run(summary) == "private Ray on this host, 4 GPUs"


def test_only_search_has_largest_batch():
    fits = [make_record(make_point(batch_size=size)) for size in (64, 1024, 1472)]
    tried = [*fits, make_failed(make_point(batch_size=1480))]
    [found] = report_of(tried).answer.largest_batches
    assert (found.batch_size, found.ran_out) == (1472, 1480)
    search = load_run_data(EXAMPLES, "largest_batch")
    lead = RunReport(answer=decide(search)).lead
    assert lead.startswith("The largest batch per device that fits is 192 with ")
    # If all batches up to the maximum fit, no largest one is known.
    cut_short = replace(search, points=[row for row in search.points if row.batch_size <= 64])
    lead = RunReport(answer=decide(cut_short)).lead
    assert "plain was the fastest with batch 8, batch 16, batch 32 and batch 64 in this" in lead
    listed = [make_record(make_point(batch_size=64)), make_failed(make_point(batch_size=128))]
    assert not any(report_of(one).answer.largest_batches for one in (listed, listed[1:]))


def test_json_has_null_for_what_json_cannot_say():
    text = documents.format_object(a=float("nan"), b=float("inf"), c=pd.NaT, d=np.array([1, 2]))
    nulls = {"a": None, "b": None, "c": None}
    assert json.loads(text) == {"schema_version": SCHEMA_VERSION, **nulls, "d": [1, 2]}


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (formatting.number, 0, "0"),
        (formatting.number, float("nan"), ""),
        (formatting.number, 123456.7, "123,457"),
        (formatting.number, float("-inf"), "-inf"),
        (formatting.number, 0.0123456, "0.01235"),
        (formatting.number, -3.108e-8, "-3.11e-08"),
        (formatting.number, 0.000956, "0.000956"),
        (formatting.ratio, 3.9, "3.90"),
        (formatting.ratio, 0.0039, "0.0039"),
        (formatting.duration, 0.0116, "11.60 µs"),
        (formatting.duration, 0.1, "0.1000 ms"),
        (formatting.duration, 1234.5, "1,234 ms"),
        (formatting.amount, 999_400, "999,400"),
        (formatting.amount, 999_600_000_000, "1 T"),
        (formatting.size, 1000, "1000 B"),
        (formatting.size, 4096, "4 KiB"),
        (formatting.size, 3 * 2**19, "1.5 MiB"),
        (step_ms, {"step_ms_low": 9.8, "step_ms_high": 10.2}, "10.00 ±2.0%"),
        (step_ms, {"step_ms_low": 9.99, "step_ms_high": 10.01}, "10.00 ±0.10%"),
        (formatting.run_title, make_run("ddp-1", job_name="ddp"), "ddp-1"),
        (formatting.run_title, make_run("x-1", job_name="ddp"), "ddp  x-1"),
    ],
)
def test_values_have_needed_digits(function, value, text):
    if function is step_ms:
        value = ScaledRow(**vars(make_row(step_ms_p50=10.0)), **value)
    assert function(value) == text


def test_unfinished_run_says_what_is_missing():
    run = make_run("run-a", points_total=10, points_ok=0, finished_at=None)
    found = make_summary(make_sweep(), run)
    assert counts(found) == "5 of 10 points ok, 1 out of memory, 4 not run"
    facts = " ".join(report_text(found).split())
    assert "unfinished, 5 of 10 points ok, 1 out of memory, 4 not run" in facts
    found = make_summary(make_sweep(), make_run("run-a", points_total=10, points_ok=7))
    assert counts(found).endswith("1 out of memory, 2 ended without rows, 2 not run")


def test_interrupted_run_counts_no_cancelled_failures():
    run = make_run("run-a", points_total=8, status=RunStatus.INTERRUPTED)
    cancelled = make_failed(make_point(world_size=8), status=Status.CANCELLED)
    for kind in ("terminal", "md"):
        said = " ".join(report_text(make_summary([*make_sweep(), cancelled], run), kind).split())
        assert "interrupted after 2 min 5 s, 5 of 8 points ok, 1 out of memory, 1 " in said
        assert "1 cancelled, 1 not run" in said


def test_list_of_runs_fits_terminal():
    long = make_run("a" * 15 + "-20260821-101112-abcd", tags={"driver": "580.159"})
    running = make_run("run-b", status=RunStatus.RUNNING, finished_at=None)
    text = format_document(RunList(runs=[long, running], machines={}), "terminal")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert long.run_id in text
    assert f"{long.started_at:%Y-%m-%d %H:%M}" in text
    assert text.splitlines()[-1].split()[0] == "run-b"


def test_parts_that_exceed_step_are_blank():
    fits, exceeds = (make_apart([8.0] * n, ms, optimizer_ms=0.5) for n, ms in ((1, 8.0), (4, 4.0)))
    summary = make_summary([fits, exceeds])
    scaling, parts = tables_of(summary)
    assert [row[scaling.titles.index("!")] for row in scaling.texts] == ["", "b"]
    known = dict(zip(parts.titles, parts.texts[1], strict=True))
    assert (known["!"], known["step"]) == ("b", scaling.texts[1][1].split()[0])
    assert [known[name] for name in ("compute", "update")] == [""] * 2
    assert "b = no breakdown" in legend_of(summary)
    doubts = RunReport(answer=decide(summary)).doubts
    [said] = [said for said in doubts if said.text.startswith("the parts add up to ")]
    assert not [said for said in doubts if "idles" in said.text]
    assert (said.count, said.advice) == (1, "The parts are not shown.")


def test_parts_that_are_not_shown_have_no_mark():
    told = {"items_per_step": None, "breakdown": Breakdown(local_ms=((8.0,) * 3, (8.0,) * 3))}
    record = make_record(unscaled_point("gemm", m=64, n=8, k=8), step_ms=4.0, of_ranks=told)
    summary = make_summary([record])
    assert "!" not in tables_of(summary)[0].titles
    assert DoubtKind.NO_BREAKDOWN not in {group.worst.kind for group in summary.doubts}


def test_doubts_about_one_step_time_are_all_told():
    summary = make_summary(make_sweep())
    doubts = (Doubt(kind=DoubtKind.TOO_FEW_STEPS, value=20),)
    steps = {"step_ms_mean": 10.2, "step_ms_p50": 10.0, "iterations": 20}
    interval = {"step_ms_ci_low": 8.0, "step_ms_ci_high": 12.0}
    points = [replace(summary.points[0], doubts=doubts, **steps, **interval)]
    kinds = {group.worst.kind for group in replace(summary, points=points).doubts}
    assert kinds >= {DoubtKind.STALLS, DoubtKind.WIDE, DoubtKind.TOO_FEW_STEPS}


def test_only_used_marks_are_explained():
    slow = make_apart([8.0, 8.0, 8.0, 9.0], 10.0, idle_ms=1.0)
    settled = [
        replace(m, repetitions=(replace(m.repetitions[0], settled=False),))
        for m in slow.measurements
    ]
    summary = make_summary([make_apart([8.0], 8.0), replace(slow, measurements=tuple(settled))])
    table = tables_of(summary)[0]
    place = table.titles.index("!")
    assert [row[place] for row in table.texts] == ["", "uhs"]
    explained = legend_of(summary)
    assert "!: marks: u = unsteady" in explained
    assert "host-bound" in explained
    assert "throttled" not in explained
    assert "!" not in tables_of(make_summary(make_sweep()))[0].columns


def test_point_beside_others_is_marked():
    not_alone = Doubt(kind=DoubtKind.NOT_ALONE, subject="point abc")
    shared = Doubt(kind=DoubtKind.SHARED_NODE, subject="process 7 used GPU 1")
    beside = make_record(make_point(batch_size=1), doubts=(not_alone,))
    failed = make_failed(make_point(batch_size=2), neighbours=("abc",))
    on_node = make_record(make_point(batch_size=3), doubts=(shared,))
    summary = make_summary([beside, failed, on_node, make_record()])
    table = tables_of(summary)[0]
    place = table.titles.index("!")
    assert [row[place] for row in table.texts] == ["n", "", "n", ""]
    assert "!: marks: n = not alone: other work used" in legend_of(summary)


def test_no_throughput_means_no_speed_up():
    records = [make_collective("all_reduce", 2**20, 1.0, world_size) for world_size in (2, 4)]
    failed = make_failed(unscaled_point("collective", 8, operation="all_reduce", size_bytes=2**20))
    summary = make_summary([*records, failed])
    [table] = tables_of(summary)
    assert table.titles == ("GPUs", "step ms", "scatter", "busbw GB/s")
    assert table.texts[-1] == ("8", "out of memory", "", "")
    assert list(findings_of(summary)) == ["Compared with reference values of this device model"]
    assert RunReport(answer=decide(summary)).without_speed_up == ()
    text = report_text(summary)
    assert "peed-up" not in text
    assert "nccl-tests" in text


def test_product_has_sustained_and_burst_rate():
    warm, timed = make_samples([50 * MS, *[MS] * 40]), make_samples([2 * MS] * 6)
    told = {"items_per_step": None, "flops_per_step": 4e11, "gemm_tflops": 250.0}
    told["repetitions"] = (Repetition(warmup=warm, timed=timed, settled=True),)
    devices = (make_device(name="Unheard of"),)
    record = make_record(unscaled_point("gemm", m=64, n=8, k=8), devices=devices, of_ranks=told)
    summary = make_summary([record])
    [table] = tables_of(summary)
    assert table.titles == ("step ms", "scatter", "TFLOP/s", "burst", "%GEMM")
    assert table.texts[0][2:] == ("200.0", "400.0", "80.0%")
    assert RunReport(answer=decide(summary)).lead.startswith(
        "The rate is 200.0 TFLOP/s. The step takes 2.000 ms."
    )
    assert "burst: TFLOP/s in the first 30 ms" in legend_of(summary)


BAD = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("function", "given", "shown"),
    [
        (printable, "größer µs", "größer µs"),
        (printable, "\x1b[31mred\x1b[0m", f"{BAD}[31mred{BAD}[0m"),
        (printable, "left\N{RIGHT-TO-LEFT OVERRIDE}right", f"left{BAD}right"),
        # One line, whatever breaks it, and lines that keep what they are indented by.
        (plain, "one\n  two\r\n\tthree\N{LINE SEPARATOR}four", "one two three four"),
        (plain, 1.5, "1.5"),
        (plain_lines, "def f():\n\treturn  1\x07\n", ["def f():", f"        return  1{BAD}"]),
        (partial(cut_end, most=6), "abcdef", "abcdef"),
        (partial(cut_end, most=6), "abcdefg", "abcde…"),
        # A code span of Markdown holds any backticks.
        (documents.code, "", "`  `"),
        (documents.code, "`a", "`` `a ``"),
        (documents.code, "a``b", "```a``b```"),
    ],
)
def test_text_is_escaped_for_its_format(function, given, shown):
    assert function(given) == shown


def setting_row(workload, batch_size=None, **params):
    known = {"point_id": f"{workload}-1", "scaling": "weak", "batch_size": batch_size}
    return make_row(workload=workload, params=params, world_size=2, **known)


def cells_of(rows):
    """The cells of each column of settings, by its title."""
    return {column.title: [cell(row) for row in rows] for column, cell in setting_columns(rows)}


def test_varying_settings_of_workload_have_columns():
    rows = [setting_row("mlp", 64, hidden="128"), setting_row("mlp", 128, hidden="256")]
    assert cells_of(rows) == {"hidden": ["128", "256"], "batch_size": ["64", "128"]}


def test_several_workloads_share_column_of_settings():
    rows = [setting_row("gemm", k=k, direction="") for k in ("256", "512")]
    rows.append(setting_row("smoke", rows="64"))
    expected = {"workload": ["gemm", "gemm", "smoke"], "settings": ["k=256", "k=512", ""]}
    assert cells_of(rows) == expected
    assert point_names(rows) == ["gemm k=256", "gemm k=512", "smoke"]
    assert settings_words(rows[2], ["workload", "k", "batch_size"], "GPUs") == "smoke"
    assert point_names([setting_row("mlp", 64)]) == ["mlp-1"]


def gains(report):
    """The lines of a report on what other shares would gain."""
    title = "What other shares of the work would gain"
    return [line for listing in report.listings if listing.title == title for line in listing.lines]


def test_slow_rank_gets_an_estimate_of_shares():
    record = make_apart([10.0, 10.0, 10.0, 20.0], 21.0)
    summary = make_summary([record])
    unknown = [replace(row, local_step_ms_by_rank=None) for row in summary.points]
    assert gains(RunReport(answer=decide(replace(summary, points=unknown)))) == []
    [(name, text)] = gains(RunReport(answer=decide(summary)))
    # Relative to a fast device's step, a step takes 4 / 3.5 by speed and 4 / 3 on fast devices.
    assert text == (
        "Rank 3 of 4 GPUs is slow; at most, shares=by_speed +69.0% and shares=fast +46.5% "
        "samples/s are gained compared with equal shares (an estimate; "
        "jobs/uneven_gpus.yaml measures it)"
    )
    assert name == f"point {record.point.point_id}"


def test_equal_ranks_get_no_estimate_of_shares():
    assert gains(report_of([make_apart([10.0, 10.0], 11.0)])) == []


def test_bad_device_gets_advice():
    subjects = [make_subject(rank) for rank in range(4)]
    findings = [make_finding(subject, verdict=Verdict.HEALTHY) for subject in subjects[:3]]
    slow = make_finding(subjects[3], verdict=Verdict.BAD, stage="alone", ratio=2.0)
    report = HealthReport(
        run=make_run(),
        machine="",
        devices=[make_device(rank) for rank in range(4)],
        findings=[*findings, slow],
    )
    (advice,) = report.advice
    assert advice.about == "devices"
    assert advice.text.startswith(f"leave {subjects[3].name} out until it is repaired; ")
    assert "at most, shares=by_speed +75.0% and shares=fast +50.0% samples/s" in advice.text


def reported(root, rounds, control_ms=10.0):
    """A run of 1 and 2 GPUs in so many rounds, each with a control after the points."""
    run = make_run("run-a", baseline={"world_size": 1}, points_total=2)
    store = RunStore.create(root, run, make_measure())
    for number in range(1, rounds + 1):
        for index, world_size in enumerate((1, 2)):
            ms = 10.0 + world_size + number / 100
            point = make_point(world_size=world_size)
            record = make_record(point, step_ms=ms, round=number, attempt=number, count=40)
            store.write_records([(10 * number + index, record)])
        if rounds > 1:
            control = make_record(
                make_point(), step_ms=control_ms, round=number, attempt=9 + number, control_of=2
            )
            store.write_records([(10 * number + 9, control)])
    store.write_devices(control.devices if rounds > 1 else record.devices)
    devices, points = (load_table(root, table, "run-a") for table in ("devices", "points"))
    return RunData(run=run, devices=devices, points=point_rows(points))


def test_single_round_says_cost_of_intervals(tmp_path):
    summary = reported(tmp_path, 1)
    text = " ".join(report_text(summary, width=200).split())
    assert "±" not in text
    assert "Certainty: Not known, because one round gives no 95 % interval over the rounds." in text
    more = decide(summary).more_rounds
    assert more.rounds == WORTHWHILE
    # Two points of 3.5 s, twice more, and new processes between.
    assert more.seconds == pytest.approx(2 * (2 * 3.5 + 5), abs=2)
    assert "2 more rounds (3 in all) give 95 % intervals over the rounds, in about" in text
    assert "--set measure.rounds=3" in text


def test_very_wide_intervals_are_capped():
    records = [
        make_record(
            make_point(world_size=size, batch_size=batch),
            step_ms=ms * number**2,
            round=number,
            attempt=number,
            count=40,
        )
        for number in (1, 2)
        for size, ms in ((1, 10.0), (2, 11.0 * number))
        for batch in (64, 256)
    ]
    text = " ".join(report_text(make_summary(records), width=200).split())
    assert "±>100%" in text
    assert "speed-up is uncertain by more than ±100 %" in text


@pytest.mark.parametrize(
    ("words", "is_ok"),
    [("--output=out --set=a.b=1 --resume=old", True), ("-oout --set a.b=1 --resume old", False)],
)
def test_next_command_replaces_given_options(tmp_path, words, is_ok):
    summary = reported(tmp_path, 1)
    argv = ("raybench", "sweep", "job.yaml", *words.split(), "--device", "cpu")
    status = RunStatus.OK if is_ok else RunStatus.INTERRUPTED
    run = replace(summary.run, argv=argv, status=status)
    text = format_document(
        RunReport(answer=decide(replace(summary, run=run)), is_short=True), "terminal"
    )
    # The job of a run that goes on may have three rounds.
    assert ("measure.rounds" in text) is is_ok
    next_words = " ".join(text.partition("\nNext")[2].partition(":")[2].split())
    assert "sweep job.yaml --device cpu --resume run-a" in next_words.replace("\\ ", "")
    assert "old" not in next_words
    assert "out" not in next_words.replace(tmp_path.name, "")


@pytest.mark.parametrize(
    ("status", "run_status", "expected"),
    [
        (Status.ERROR, RunStatus.FAILED, "--resume run-a --retry-failed"),
        (Status.TIMEOUT, RunStatus.INTERRUPTED, "--resume run-a --retry-failed"),
        (Status.LOST, RunStatus.FAILED, "--resume run-a"),
        (Status.CANCELLED, RunStatus.INTERRUPTED, "--resume run-a"),
        (Status.OOM, RunStatus.FAILED, "--resume run-a --set measure.rounds=3"),
    ],
)
def test_the_next_command_follows_how_points_ended(tmp_path, command, status, run_status, expected):
    failed = make_failed(make_point(world_size=2), status=status)
    write_run(tmp_path, "run-a", [make_record(), failed], [make_device()], status=run_status)
    told = command("report", "run-a").out.partition("Next")[2].partition("`")[0]
    words = shlex.split(told.partition(":")[2].replace("\\\n", " "))
    assert " ".join(words) == f"raybench sweep job.yaml --resume run-a -o {tmp_path}" + (
        expected.removeprefix("--resume run-a")
    )
    assert ("after you fix the error" in told) is ("--retry-failed" in expected)


def test_report_keeps_cure_of_failure(tmp_path, command):
    cure = "; in the checkout of raybench: pip install -e '.[vision]'"
    reason = "torchvision cannot be imported " + "(and why) " * 30 + cure
    failed = make_failed(make_point(world_size=2), status=Status.ERROR, error_message=reason)
    write_run(tmp_path, "run-a", [make_record(), failed], [make_device()])
    for words in (["report"], ["report", "--full"], ["report", "--format", "md"], ["show"]):
        told = " ".join(command(words[0], "run-a", *words[1:]).out.split())
        assert "pip install -e" in told, words


def test_drifting_control_is_doubt(tmp_path):
    [said] = RunReport(answer=decide(reported(tmp_path, 2, control_ms=12.0))).doubts
    assert (said.who, said.count) == ("2 repeated baseline measurements", 2)
    told = r"the machine became [\d.]+ % slower while the points of round \d with 2 GPUs ran"
    assert re.fullmatch(told, said.text)
    assert said.advice.startswith("Speed-ups between numbers of GPUs are corrected")


def test_plan_says_cost_of_rounds(tmp_path, command):
    job = tmp_path / "job.yaml"
    job.write_text("version: 1\nname: a\nworkload: {kind: mlp}\nmatrix: {batch_size: [1, 2]}\n")
    once = command("plan", job, results=None).out
    assert "measure.rounds=3 would take about" in once
    three = command("plan", job, "--set", "measure.rounds=3", results=None).out
    assert "would take about" not in three
    assert "3 rounds x 2 points x 1 repeat of 4 to 20 s" in three


def test_show_has_line_for_each_round(tmp_path, command):
    reported(tmp_path, 2)
    told = command("show", "run-a", make_point(world_size=2).point_id).out
    rounds = [line.split() for line in told.splitlines() if " ok  " in line]
    expected = [(["1", "1"], "12.01"), (["2", "2"], "12.02")]
    assert [(line[:2], line[-1]) for line in rounds] == expected
    assert told.startswith("The step took 12.02 ms over 2 rounds")
