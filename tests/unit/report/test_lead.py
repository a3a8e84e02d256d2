"""The sentence that a report leads with."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import pytest
from builders import (
    column,
    make_apart,
    make_failed,
    make_point,
    make_rows,
    make_run,
    make_steady,
    make_summary,
    scaling_rows,
    with_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.analysis.losses import LOSSES
from raybench.job.point import Precision
from raybench.report.lead import amount, answer_metric, lead
from raybench.report.run_report import RunReport
from raybench.report.summary import Summary
from raybench.results.metrics.parts import BREAKDOWN

ON_ONE = {"world_size": 1}
OVER_FP32 = {"precision": "fp32"}
ASKED = "answer: {metric: %s, over: [%s]}\nworkload: {kind: mlp}\n"


def said(records, baseline, job_text="", **changes):
    """The lead of a run of these records; changes: of columns, a value for each point."""
    rows = with_values(make_rows(records), **changes)
    run = make_run("run-a", baseline=baseline, job_text=job_text)
    return lead(Summary(run=run, devices=pd.DataFrame(), points=rows))


def ran(world_size, step_ms, precision=Precision.FP32):
    return make_steady(world_size, step_ms, precision=precision)


def test_one_series_is_told_without_best_and_worst():
    assert said([ran(1, 8.0), ran(2, 9.0), ran(4, 10.0)], ON_ONE) == (
        "4 GPUs do 3.20x the samples/s of 1 GPU; 4x is ideal; what the rest is lost to was not "
        "measured"
    )


def test_nothing_is_said_of_a_loss_that_is_none():
    found = said([ran(1, 8.0), ran(2, 8.02)], ON_ONE)
    assert found == "2 GPUs do 2.00x the samples/s of 1 GPU; 2x is ideal"


def test_without_a_baseline_point_it_says_why_and_what_is_left():
    summary = make_summary([make_failed(make_point()), ran(2, 8.0)])
    assert RunReport(summary=summary).lead.startswith(
        "no point has a speed-up: baseline point ran out of memory; 16,000 samples/s"
    )


@pytest.mark.parametrize(
    ("stable", "doubt"), [([False, True], "against an unsteady point"), ([False] * 2, "unsteady")]
)
def test_a_speed_up_over_an_unsteady_baseline_stands_and_is_said_to_be_one(stable, doubt):
    told = said([ran(1, 8.0), ran(2, 9.0)], ON_ONE, stable=stable)
    assert told.startswith(f"2 GPUs do 1.78x ({doubt}) the samples/s of 1 GPU")


def test_what_has_the_most_samples_is_told_with_the_next():
    job = ASKED % ("throughput", "precision")
    told = said([ran(1, 8.0), ran(1, 4.0, Precision.BF16)], {}, job)
    assert told == "bf16 has the most rows/s: 16,000 rows/s, 2.00x the next (fp32)"


def test_parts_that_exceed_the_step_feed_neither_a_share_nor_a_sentence():
    records = [
        make_apart([8.0] * 1, 8.0, optimizer_ms=0.5),
        make_apart([18.0] * 2, 8.9, optimizer_ms=0.5),
    ]
    found = scaling_rows(records, ON_ONE)
    assert [one is None for one in column(found, "why_no_breakdown")] == [True, False]
    assert found[1].why_no_breakdown == (
        "no breakdown: the parts come to 18 ms, the step takes 8.9 ms; the instrumented steps "
        "were slower than the timed ones"
    )
    assert found[0].compute_ms == pytest.approx(7.5)
    assert {getattr(found[1], name) for name in (*BREAKDOWN, "host_bound", *LOSSES)} == {None}
    assert said(records, ON_ONE).endswith(
        "what the rest is lost to is not known: the parts of the step exceed it"
    )


def test_a_baseline_whose_parts_exceed_its_step_explains_no_loss():
    found = scaling_rows(
        [
            make_apart([18.0] * 1, 8.0, optimizer_ms=0.5),
            make_apart([8.9] * 2, 8.9, optimizer_ms=0.5),
        ],
        ON_ONE,
    )
    assert found[1].compute_ms == pytest.approx(8.4)
    assert {getattr(found[1], name) for name in LOSSES} == {None}


def test_samples_per_joule_are_those_of_all_timed_steps():
    rows = make_rows([ran(1, 8.0), ran(1, 4.0, Precision.BF16)], energy_j=12.0)
    found = Summary(run=make_run("run-a"), devices=pd.DataFrame(), points=rows).rows
    # Six steps of 64 samples.
    assert column(found, "samples_per_joule") == pytest.approx([32.0, 32.0])


@st.composite
def results(draw):
    """A run of points in up to four rounds: some fail, some are equal, noisy or doubtful."""
    records = []
    rounds = draw(st.integers(1, 4))
    sizes = draw(st.sampled_from([(1,), (1, 2), (1, 2, 4)]))
    precisions = draw(st.sampled_from([("fp32",), ("fp32", "bf16"), ("fp32", "tf32", "bf16")]))
    batches = draw(st.sampled_from([(64,), (64, 256, 1024)]))
    for world_size in sizes:
        for precision in precisions:
            for batch in batches:
                point = make_point(
                    world_size=world_size, precision=Precision(precision), batch_size=batch
                )
                step_ms = draw(st.sampled_from([1.0, 4.0, 4.0, 4.02, 9.0, 30.0]))
                noise = draw(st.sampled_from([0.0, 0.001, 0.3]))
                if draw(st.integers(0, 5)) == 0:
                    records.append(make_failed(point))
                    continue
                for number in range(1, rounds + 1):
                    at_ms = step_ms * (1 + noise * (number - 1))
                    one = make_steady(
                        world_size, at_ms, precision=Precision(precision), batch_size=batch
                    )
                    records.append(replace(one, round=number, attempt=number))
    stable = [draw(st.booleans()) for _ in records]
    baseline = draw(
        st.sampled_from([{}, ON_ONE, OVER_FP32, {"world_size": 1, "precision": "fp32"}])
    )
    metric = draw(st.sampled_from(["speed_up", "throughput", "step_ms_p50"]))
    over = draw(st.sampled_from(["precision", "precision, batch_size", "world_size"]))
    return records, stable, baseline, ASKED % (metric, over)


@settings(max_examples=80, deadline=None)
@given(results())
def test_no_lead_contradicts_the_table(given_results):
    records, stable, baseline, job = given_results
    rows = with_values(make_rows(records), stable=stable)
    summary = Summary(
        run=make_run("run-a", baseline=baseline, job_text=job), devices=pd.DataFrame(), points=rows
    )
    told, ok = lead(summary), [row for row in summary.rows if row.status == "ok"]
    assert bool(told) == bool(ok)
    # A value stands in it, and its own interval where it names one point of several rounds.
    assert not ok or re.search(r"\d", told)
    for case in summary.cases:
        values = [one.value for one in case.ranked]
        is_most = summary.ranked_by.best == "max"
        assert case.best.value == (max if is_most else min)(values)
    if claimed := re.search(r"(?:^|; |: )((?!which)[^;:]*) has the (?:most|least) ", told):
        # Whoever is said to be the best is beaten by nobody in the case that is named.
        metric = answer_metric(summary)
        bests = [one.best for one in summary.cases if not one.rivals]
        said_of = [one for one in bests if one.name == claimed[1]]
        assert any(amount(summary, metric, one.value) in told for one in said_of)
    counts = {row.world_size for row in ok}
    if len(counts) < 2:
        assert "ideal" not in told
    for count, base in re.findall(r"(\d) GPUs? do .* of (\d) GPU", told):
        assert int(count) > int(base)
    for least, most in re.findall(r"([\d.]+)x to ([\d.]+)x", told):
        assert float(least) <= float(most)
        assert float(most) <= max(row.speed_up or 0.0 for row in ok) + 0.01
