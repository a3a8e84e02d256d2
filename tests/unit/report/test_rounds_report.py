"""What reports and plans say of rounds."""

from __future__ import annotations

import pytest
from builders import (
    make_measure,
    make_point,
    make_record,
    make_run,
    make_summary,
    report_text,
)
from click.testing import CliRunner

from raybench.analysis.rows import point_rows
from raybench.cli.sweep import plan_command
from raybench.report.documents import format_document
from raybench.report.run_report import RunReport
from raybench.report.summary import Summary
from raybench.results.reader import load
from raybench.results.writer import RunStore
from raybench.sweep.scheduler import WORTHWHILE


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
    return Summary(
        run=run,
        devices=load(root, "devices", "run-a"),
        points=point_rows(load(root, "points", "run-a")),
    )


def test_a_report_of_one_round_has_no_interval_and_says_what_gives_one_and_its_cost(tmp_path):
    summary = reported(tmp_path, 1)
    text = " ".join(report_text(summary, width=200).split())
    assert "±" not in text
    assert "one start; `--set measure.rounds=3` gives an interval." in text
    assert "Scatter: standard deviation of the samples within one start" in text
    assert summary.more_rounds is not None
    assert summary.more_rounds.rounds == WORTHWHILE
    # Two points of 3.5 s, twice more, and new processes between.
    assert summary.more_rounds.seconds == pytest.approx(2 * (2 * 3.5 + 5), abs=2)
    assert "3 rounds, which give an interval, would take about" in text
    assert "--set measure.rounds=3" in text


def test_intervals_as_wide_as_their_values_are_not_written_as_thousands_of_percent():
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
    assert "±>100%" in text.partition("Next: ")[0]
    assert ">100% or less" not in text


def test_a_control_that_moved_is_a_warning_that_names_the_block(tmp_path):
    [said] = reported(tmp_path, 2, control_ms=12.0).warnings
    assert said.count == 2
    assert "at the end of the block of 2 GPUs the control took" in said.text
    assert "the machine drifts" in said.text


def test_a_plan_says_what_rounds_would_cost_and_counts_those_it_has(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("version: 1\nname: a\nworkload: {kind: mlp}\nmatrix: {batch_size: [1, 2]}\n")
    once = CliRunner().invoke(plan_command, [str(job)]).output
    assert "measure.rounds=3 would take about" in once
    three = CliRunner().invoke(plan_command, [str(job), "--set", "measure.rounds=3"]).output
    assert "would take about" not in three
    assert "3 rounds x 2 points x 1 repeat of 3 to 20 s" in three


def test_show_has_a_line_for_each_round_and_marks_controls(tmp_path):
    from raybench.cli.results import show_command

    reported(tmp_path, 2)
    options = ["run-a", "--results", str(tmp_path)]
    lines = CliRunner().invoke(show_command, options).output.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["1", "1", "1", "2", "2", "2"]
    assert sum(" control " in line for line in lines) == 2
    point = make_point(world_size=2).point_id
    told = CliRunner().invoke(show_command, [options[0], point, *options[1:]]).output
    rounds = [line.split() for line in told.splitlines() if " ok  " in line]
    assert [(line[:2], line[-1]) for line in rounds] == [
        (["1", "1"], "12.01"),
        (["2", "2"], "12.02"),
    ]
    assert told.startswith("Step 12.02 ms over 2 rounds")


def test_a_short_report_of_four_points_fits_40_lines_and_names_what_to_type_next(tmp_path):
    text = format_document(RunReport(summary=reported(tmp_path, 1), is_short=True), "terminal")
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80 or "--resume run-a --set measure.rounds=3" in text
    assert "says what a heading or mark means" in text
