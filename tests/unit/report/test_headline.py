"""The sentence that a report leads with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import (
    column,
    make_apart,
    make_failed,
    make_point,
    make_rows,
    make_steady,
    make_summary,
    scaling_rows,
    with_values,
)

from raybench.analysis.losses import LOSSES
from raybench.analysis.scaling import best_settings, scaling
from raybench.job.point import Precision
from raybench.report import insight_text
from raybench.report.insights import find_insights
from raybench.report.run_report import RunReport
from raybench.results.metrics.parts import BREAKDOWN


def frame(records, baseline, **columns):
    return scaling(make_rows(records, **columns), baseline)


def headline(rows, baseline, ranks="GPUs", why=""):
    return insight_text.lead(find_insights(rows, baseline, ranks), baseline, ranks, why)


def bests(rows):
    found = find_insights(rows, {}, "GPUs", best=best_settings(rows))
    return list(insight_text.best_lines(found))


def said(records, baseline, why=""):
    return headline(scaling_rows(records, baseline), baseline, why=why)


def ran(world_size, step_ms, precision=Precision.FP32):
    return make_steady(world_size, step_ms, precision=precision)


def test_one_series_is_told_without_best_and_worst():
    assert said([ran(1, 8.0), ran(2, 9.0), ran(4, 10.0)], {"world_size": 1}) == (
        "4 GPUs do 3.20 times the samples/s of 1 GPU, 80.0% efficiency (fp32, batch 64); "
        "what the rest is lost to was not measured"
    )


def test_nothing_is_said_of_a_loss_that_is_none():
    found = said([ran(1, 8.0), ran(2, 8.02)], {"world_size": 1})
    assert found == (
        "2 GPUs do 2.00 times the samples/s of 1 GPU, 99.8% efficiency (fp32, batch 64)"
    )


def test_without_a_baseline_point_it_says_why_and_what_is_left():
    summary = make_summary([make_failed(make_point()), ran(2, 8.0)])
    assert RunReport(summary=summary).lead.startswith(
        "no point has a speed-up: baseline point ran out of memory; "
        "at most 16,000 samples/s (fp32, batch 64, 2 GPUs)"
    )


def test_a_speed_up_over_an_unsteady_baseline_stands_and_is_said_to_be_one():
    points = make_rows([ran(1, 8.0), ran(2, 9.0)])
    found = scaling(with_values(points, stable=[False, True]), {"world_size": 1})
    assert None not in column(found, "speed_up")
    told = headline(found, {"world_size": 1}, "GPUs")
    assert "(fp32, batch 64, against an unsteady point)" in told
    both = scaling(with_values(points, stable=[False] * 2), {"world_size": 1})
    told = headline(both, {"world_size": 1}, "GPUs")
    assert "(fp32, batch 64, unsteady)" in told


def test_a_baseline_that_is_known_badly_still_gives_a_value():
    wide = make_rows(
        [ran(1, 8.0), ran(2, 9.0)], step_ms_ci_low=1.0, step_ms_ci_high=20.0, iterations=20
    )
    told = headline(scaling(wide, {"world_size": 1}), {"world_size": 1}, "GPUs")
    assert told.startswith(
        "2 GPUs do 1.78 times the samples/s of 1 GPU, 88.9% efficiency (fp32, batch 64, wide)"
    )


def test_the_best_settings_name_a_rival_that_cannot_be_told_apart():
    found = frame([ran(1, 8.0), ran(1, 4.0, Precision.BF16), ran(2, 8.0)], {"world_size": 1})
    [best] = best_settings(found)
    assert (best.row.precision, best.row.batch, best.row.world_size) == ("bf16", 64, 1)
    assert (best.value, best.rival) == (16_000, None)
    close = frame([ran(1, 4.1), ran(1, 4.0, Precision.BF16)], {"world_size": 1})
    close = [
        replace(row, step_ms_low=row.step_ms_p50 * 0.95, step_ms_high=row.step_ms_p50 * 1.05)
        for row in close
    ]
    told = bests(close)
    assert told == [("1 GPU", "bf16, batch 64: 16,000 samples/s; fp32, batch 64 may be as good")]
    told = bests([replace(row, stable=False) for row in close])
    assert told[0][1].startswith("bf16, batch 64: 16,000 samples/s (unsteady); fp32")


def test_parts_that_exceed_the_step_feed_neither_a_share_nor_a_sentence():
    base: dict[str, object] = {"world_size": 1}
    found = frame(
        [
            make_apart([8.0] * 1, 8.0, optimizer_ms=0.5),
            make_apart([18.0] * 2, 8.9, optimizer_ms=0.5),
        ],
        base,
    )
    assert [one is None for one in column(found, "why_no_breakdown")] == [True, False]
    assert found[1].why_no_breakdown == (
        "no breakdown: the parts come to 18 ms, the step takes 8.9 ms; the instrumented steps "
        "were slower than the timed ones"
    )
    assert found[0].compute_ms == pytest.approx(7.5)
    assert {getattr(found[1], name) for name in (*BREAKDOWN, "host_bound", *LOSSES)} == {None}
    assert headline(found, base, "GPUs") == (
        "2 GPUs do 1.80 times the samples/s of 1 GPU, 89.9% efficiency (fp32, batch 64, "
        "without a breakdown); what the rest is lost to is not known: the parts of the step "
        "exceed it"
    )


def test_a_baseline_whose_parts_exceed_its_step_explains_no_loss():
    found = frame(
        [
            make_apart([18.0] * 1, 8.0, optimizer_ms=0.5),
            make_apart([8.9] * 2, 8.9, optimizer_ms=0.5),
        ],
        {"world_size": 1},
    )
    assert found[1].compute_ms == pytest.approx(8.4)
    assert {getattr(found[1], name) for name in LOSSES} == {None}


def test_samples_per_joule_are_those_of_all_timed_steps():
    found = frame([ran(1, 8.0), ran(1, 4.0, Precision.BF16)], {"world_size": 1}, energy_j=12.0)
    # Six steps of 64 samples.
    assert column(found, "samples_per_joule") == pytest.approx([32.0, 32.0])
    assert {best.by for best in best_settings(found)} == {"throughput", "samples_per_joule"}
