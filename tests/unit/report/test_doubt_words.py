"""Every doubt and every reason has words."""

import pytest
from builders import make_row

from raybench.analysis.rows import ScaledRow
from raybench.records import Status
from raybench.records.doubts import (
    Doubt,
    DoubtKind,
    LossesUnknown,
    NotCompared,
    NotComparedKind,
    NotMeasured,
)
from raybench.report.words.doubts import MARKS, doubt_words, drift_words, short_doubts
from raybench.report.words.reasons import (
    losses_unknown_words,
    not_compared_words,
    not_measured_words,
)

ROW = ScaledRow(
    **vars(
        make_row(
            step_ms_p50=10.0,
            step_ms_mean=10.2,
            local_step_ms=10.5,
            straggler_ms=2.5,
            straggler_device_ms=0.0,
            comm_ms=1.0,
            comm_exposed_ms=0.0,
            world_size=4,
            iterations=2600,
            device_type="cuda",
            device_name="NVIDIA H200",
        )
    ),
    speed_up=16.0,
)


def words(kind, value=None, limit=None, subject="", row=ROW):
    return doubt_words(Doubt(kind=kind, value=value, limit=limit, subject=subject), row)


def is_clause(text):
    """It goes on in a sentence, and lacks nothing that a doubt may lack."""
    return text and not text.endswith(".") and "None" not in text and "\n" not in text


# A drift is one of the run.
@pytest.mark.parametrize("kind", sorted({*DoubtKind} - {DoubtKind.DRIFT}))
def test_each_kind_of_doubt_has_words(kind):
    subject = "mfu_pct" if kind is DoubtKind.IMPOSSIBLE else "rank 1"
    assert is_clause(words(kind, 0.5, 0.1, subject))


def test_each_mark_is_explained():
    assert {kind.mark for kind in DoubtKind} - {""} == set(MARKS)


@pytest.mark.parametrize("figure", ["efficiency", "items", "iterations", "mfu_pct"])
def test_each_impossible_figure_has_its_likeliest_reason(figure):
    assert "; likeliest " in words(DoubtKind.IMPOSSIBLE, 150.0, 100.0, figure)


@pytest.mark.parametrize(
    ("kind", "known", "told"),
    [
        (
            DoubtKind.IMPOSSIBLE,
            (4.0, 1.02, "efficiency"),
            "cannot be: speed-up 16.00 on 4 devices, efficiency 400%; likeliest the baseline was "
            "slowed, or steps are counted that did not run",
        ),
        (
            DoubtKind.IMPOSSIBLE,
            (26.0, 12.0, "iterations"),
            "cannot be: 2,600 iterations of 10 ms take 26 s, and all of it took 12 s; likeliest "
            "iterations are counted that did not run",
        ),
        (
            DoubtKind.SLOW_RANK,
            (0.25, 0.02, "rank 1"),
            "rank 1 is slower: its own step takes 2.5 ms longer than the others' (host), which "
            "costs 1.5 to 2.5 ms of 10 ms",
        ),
        (
            DoubtKind.LATE_IN_TURN,
            (0.05, 0.02),
            "the ranks are late in turn, which costs up to 0.5 ms of 10 ms",
        ),
        (
            DoubtKind.PARTS_EXCEED,
            (0.05, 0.02),
            "the parts exceed the step by 0.5 ms: without communication the step takes 10.5 ms, "
            "with it 10 ms",
        ),
        (
            DoubtKind.NO_BREAKDOWN,
            (1.8, 1.1),
            "no breakdown: the parts come to 18 ms, the step takes 10 ms; the instrumented steps "
            "were slower than the timed ones",
        ),
        (
            DoubtKind.STALLS,
            (0.02, 0.01),
            "some steps are much longer: the mean, which the rates follow, is 2.0% "
            "above the median",
        ),
        (
            DoubtKind.OTHER_GRADIENTS,
            (None, 1e-4),
            "the gradients differ from those of one process over the samples of all ranks by NaN",
        ),
        (DoubtKind.CROWDED, (4, 2, "alpha"), "4 CPU workers share 2 cores of alpha"),
        (
            DoubtKind.THROTTLED,
            (0.25, None, "thermal_sw"),
            "clocks were limited in 25% of the samples: thermal_sw",
        ),
        (
            DoubtKind.UNSTEADY,
            (6,),
            "step time changes its level still after 6 iterations of warm-up",
        ),
        (DoubtKind.WIDE, (0.125, 0.1), "step time is known to ±12.5% only"),
        (DoubtKind.WIDE, (1.5, 0.1), "step time is known to ±>100% only"),
        (DoubtKind.QUICK, (0.048,), "quick: 0.048 s timed"),
        (DoubtKind.SHORT, (0.048, 3.0), "timed for 0.048 s of the requested 3 s"),
        (DoubtKind.FEW_SAMPLES, (6, 50), "6 of 50 iterations timed"),
        (DoubtKind.ROUND_FAILED, (2, None, "lost: rank 1 died"), "round 2 ended lost: rank 1 died"),
    ],
)
def test_words_of_a_doubt(kind, known, told):
    assert words(kind, *known) == told


@pytest.mark.parametrize(
    ("changes", "value", "end"),
    [
        # 999.9 ms, but not as 1e+03 ms.
        ({"step_ms_p50": 11_510.0, "straggler_ms": 999.9}, 999.9 / 11_510, "costs 1 s of 11.5 s"),
        (
            {"step_ms_p50": 1_151_000.0, "straggler_ms": 99_990.0},
            99_990 / 1_151_000,
            "costs 100 s of 1,151 s",
        ),
    ],
)
def test_what_a_slow_rank_costs_is_told_in_seconds(changes, value, end):
    row = make_row(world_size=2, device_type="cuda", **changes)
    assert words(DoubtKind.SLOW_RANK, value, 0.02, "rank 1", row).endswith(end)


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ((), ()),
        ((DoubtKind.WIDE, DoubtKind.UNSTEADY), ("unsteady", "wide")),
        ((DoubtKind.SHARED_NODE, DoubtKind.NOT_ALONE), ("not alone",)),
        ((DoubtKind.BASE_UNSTEADY,), ("against an unsteady point",)),
        ((DoubtKind.BASE_UNSTEADY, DoubtKind.UNSTEADY), ("unsteady",)),
        ((DoubtKind.SLOW_RANK, DoubtKind.NO_THROUGHPUT), ()),
    ],
)
def test_doubts_about_a_number_are_a_word_each(kinds, told):
    row = make_row(doubts=tuple(Doubt(kind=kind) for kind in kinds))
    assert short_doubts(row) == told


@pytest.mark.parametrize(("drift", "change"), [(0.04, "4.0% longer"), (-0.1, "10.0% less")])
def test_words_of_a_drift(drift, change):
    doubt = Doubt(kind=DoubtKind.DRIFT, value=drift, subject="round 1, block 2")
    assert drift_words(doubt, "GPUs") == (
        f"round 1, block 2 GPUs: at the end of the block the control took {change} than at first: "
        "the machine drifts; speed-ups are corrected for it"
    )


@pytest.mark.parametrize("kind", NotComparedKind)
def test_each_reason_for_no_speed_up_has_words(kind):
    subject = Status.OOM if kind is NotComparedKind.BASELINE_NOT_OK else "world_size=1"
    why = NotCompared(kind=kind, subject=subject, value=1900.0, of_baseline=1980.0)
    assert is_clause(not_compared_words(why))


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (
            NotCompared(kind=NotComparedKind.BASELINE_NOT_OK, subject=Status.OOM),
            "the baseline point ran out of memory",
        ),
        (
            NotCompared(kind=NotComparedKind.CLOCKS_DIFFER, value=1900.0, of_baseline=1980.0),
            "the SM clock was 1900 MHz, and 1980 MHz at the baseline point",
        ),
        (
            NotCompared(kind=NotComparedKind.SEVERAL_BASELINES, value=2, subject="a and b"),
            "2 points could be the baseline: a and b",
        ),
    ],
)
def test_words_of_no_speed_up(why, told):
    assert not_compared_words(why) == told


@pytest.mark.parametrize("reason", NotMeasured)
def test_each_reason_for_no_measurement_has_words(reason):
    text = not_measured_words(reason)
    assert text.startswith("none: " if reason.does_not_apply else "unknown: ")
    assert is_clause(text)
    assert is_clause(losses_unknown_words(LossesUnknown(reason=reason)))


def test_losses_of_a_contradicted_baseline_are_told_as_its():
    why = LossesUnknown(reason=NotMeasured.PARTS_EXCEED, is_at_baseline=True)
    told = "at the baseline point, the parts add up to more than the step"
    assert losses_unknown_words(why) == told
