"""The answer as a small table: its layout, its heading, and what it leaves out."""

import itertools
import re

import pytest
from builders import (
    make_failed,
    make_point,
    make_record,
    make_run,
    make_steady,
    make_summary,
)
from commands import EXAMPLES

from raybench.analysis.answer import decide
from raybench.analysis.rows import setting_order
from raybench.analysis.run_data import load_run_data
from raybench.job.point import Precision
from raybench.report.answer_table import MOST_ROWS, answer_table
from raybench.report.run_report import RunReport

BY_PRECISION = "answer: {metric: throughput, over: [precision]}\nworkload: {kind: mlp}\n"
ON_ONE = {"world_size": 1}


def table_of(records, baseline=None, job_text=""):
    run = make_run("run-a", baseline=baseline or {}, job_text=job_text)
    return answer_table(decide(make_summary(records, run)))


def in_rounds(counts, **settings):
    """Points of 1 and 2 GPUs; counts: the rounds of each, which differ by 1 %."""
    return [
        make_record(
            make_point(world_size=size, **settings),
            step_ms=10.0 * (1 + number / 100 * size),
            round=number,
            attempt=number,
            count=40,
        )
        for size, count in zip((1, 2), counts, strict=True)
        for number in range(1, count + 1)
    ]


def crossed(batches, precisions):
    return [
        make_steady(size, step_ms, batch_size=batch, precision=precision)
        for batch, precision in itertools.product(batches, precisions)
        for size, step_ms in ((1, 8.0), (2, 10.0 + batch / 64))
    ]


def test_one_axis_is_a_list_sorted_by_value():
    records = [
        make_steady(1, step_ms, precision=precision)
        for precision, step_ms in (
            (Precision.FP32, 8.0),
            (Precision.BF16, 2.0),
            (Precision.TF32, 4.0),
        )
    ]
    found = table_of(records, job_text=BY_PRECISION)
    assert found.table.titles == ("", "rows/s", "step ms")
    assert [row[0] for row in found.table.texts] == ["bf16", "tf32", "fp32"]
    assert [row[1] for row in found.table.texts] == ["32,000", "16,000", "8,000"]
    assert found.left_out == 0


def test_list_of_repeated_rounds_has_intervals():
    found = table_of(in_rounds((3, 3)), ON_ONE)
    assert found.table.titles == ("", "speed-up", "±", "step ms", "samples/s")
    by_name = {row[0]: row[2] for row in found.table.texts}
    assert by_name["2 GPUs"].startswith("±")
    assert by_name["1 GPU"] == ""


def test_two_axes_form_a_sorted_table():
    found = table_of(crossed((1024, 64, 256), (Precision.BF16, Precision.FP32)), ON_ONE)
    assert found.table.titles == ("", "batch 64", "batch 256", "batch 1,024")
    assert [row[0] for row in found.table.texts] == ["fp32", "bf16"]
    assert found.table.texts[0][1:] == ("1.45", "1.14", "0.62")


def test_ragged_settings_are_a_list():
    records = [
        make_steady(1, 8.0, batch_size=2**place, precision=precision)
        for place, precision in enumerate(itertools.islice(itertools.cycle(Precision), 6))
    ]
    found = table_of(records, job_text=BY_PRECISION)
    assert found.table.titles == ("", "rows/s", "step ms")
    assert len(found.table.texts) == 6


def test_one_missing_point_leaves_an_empty_cell():
    records = crossed((64, 256), (Precision.FP32, Precision.BF16))
    found = table_of(records[:-1], ON_ONE)
    assert found.table.titles == ("", "batch 64", "batch 256")
    assert found.table.texts[1][2] == ""


def test_more_rows_than_fit_are_counted():
    records = [make_steady(1, 8.0 + n, params={"hidden": n + 1}) for n in range(MOST_ROWS + 3)]
    run = make_run("run-a", job_text=BY_PRECISION.replace("precision", "hidden"))
    answer = decide(make_summary(records, run))
    found = answer_table(answer)
    assert (len(found.table.texts), found.left_out) == (MOST_ROWS, 3)
    # The best values stay.
    assert found.table.texts[0][0] == "hidden=1"
    lines = [getattr(one, "text", "") for one in RunReport(answer=answer, is_short=True).blocks()]
    assert "and 3 more points: --full" in lines


def test_fewer_than_two_values_are_no_table():
    assert table_of([make_steady(1, 8.0)]) is None
    assert table_of([make_failed()], ON_ONE) is None
    assert table_of([]) is None


def certainty_of(records, baseline=None, **run):
    summary = make_summary(records, make_run("run-a", baseline=baseline or {}, **run))
    return RunReport(answer=decide(summary)).findings[-1]


@pytest.mark.parametrize(
    ("counts", "certainty"),
    [
        (
            (3, 3),
            r"(The|Each) speed-up is known to ±[\d.]+ %( or better)? "
            r"\(95 % interval over 3 rounds(; widest at .+)?\)\.",
        ),
        ((1, 1), r"Not known, because one round gives no 95 % interval over the rounds\."),
        ((3, 1), r"1 of 2 points has one round, and so no 95 % interval\."),
    ],
)
def test_certainty_of_speed_ups_is_a_sentence(counts, certainty):
    # Two points have more than one line, so that the answer is a table.
    assert table_of(in_rounds(counts), ON_ONE).table.kind == (
        "Speed-up from 1 GPU to 2 GPUs (ideal 2.00)"
    )
    told = certainty_of(in_rounds(counts), ON_ONE)
    assert re.fullmatch(f"Certainty: {certainty}", told)


def test_points_without_intervals_are_counted():
    records = [*in_rounds((3, 3)), *in_rounds((1, 1), batch_size=256)]
    told = certainty_of(records, ON_ONE)
    assert told == "Certainty: 2 of 4 points have one round, and so no 95 % interval."


def test_one_round_does_not_show_differences_of_memory():
    job = BY_PRECISION.replace("throughput", "peak_mem_allocated_bytes")
    records = [make_steady(1, 8.0), make_steady(1, 4.0, precision=Precision.BF16)]
    assert table_of(records, job_text=job).table.kind == "Memory, GiB"
    told = certainty_of(records, job_text=job)
    assert told == (
        "Certainty: Not known, because one round does not show how memory differs over the rounds."
    )


def test_wide_values_have_their_mark():
    answer = decide(load_run_data(EXAMPLES, "timing_ways-20261130-015653-cf43"))
    table = answer_table(answer)
    assert table.table.texts[1][1:] == ("109.9%", "30.2%")
    assert RunReport(answer=answer).findings[0] == (
        "w = wide: the 95 % interval of the step time within one round exceeds ±10 %."
    )


def test_presets_of_models_are_ordered_by_size():
    ordered = ["1.3b", "6.7b", "13b", "175b", "1t"]
    assert sorted(reversed(ordered), key=setting_order) == ordered
    assert sorted(["175b", "700m", "2k"], key=setting_order) == ["2k", "700m", "175b"]
    # A text that only ends like a size is no size.
    assert sorted(["club", "175b", "a1b"], key=setting_order) == ["a1b", "club", "175b"]
