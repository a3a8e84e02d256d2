"""Every doubt and every reason has words."""

from dataclasses import replace

import pytest
from builders import make_row

from raybench.analysis.doubts import DoubtGroup
from raybench.analysis.rows import ScaledRow
from raybench.records.doubts import (
    Doubt,
    DoubtKind,
    LossesUnknown,
    NotCompared,
    NotComparedKind,
    NotMeasured,
)
from raybench.records.status import Status
from raybench.report.words.doubts import (
    MARKS,
    busy_words,
    doubt_advice,
    doubt_words,
    drift_words,
)
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


def is_sentence(text):
    """It stands alone behind the clause of a doubt."""
    return text[:1].isupper() and text.endswith(".") and "None" not in text


# A drift is one of the run.
@pytest.mark.parametrize("kind", sorted({*DoubtKind} - {DoubtKind.DRIFT}))
def test_each_kind_of_doubt_has_words(kind):
    subject = "mfu_pct" if kind is DoubtKind.IMPOSSIBLE else "rank 1"
    assert is_clause(words(kind, 0.5, 0.1, subject))


def test_each_mark_is_explained():
    assert {kind.mark for kind in DoubtKind} - {""} == set(MARKS)


@pytest.mark.parametrize("figure", ["efficiency", "items", "iterations", "mfu_pct"])
def test_each_impossible_figure_has_its_likeliest_reason(figure):
    doubt = Doubt(kind=DoubtKind.IMPOSSIBLE, value=150.0, limit=100.0, subject=figure)
    assert doubt_words(doubt, ROW).endswith(" cannot be true")
    assert is_sentence(doubt_advice(doubt, ROW))


@pytest.mark.parametrize("kind", sorted({*DoubtKind} - {DoubtKind.IMPOSSIBLE}))
def test_advice_is_a_sentence_or_nothing(kind):
    advice = doubt_advice(Doubt(kind=kind, value=0.5, limit=1.0, subject="rank 1"), ROW)
    assert advice == "" or is_sentence(advice)


@pytest.mark.parametrize(
    ("kind", "known", "told"),
    [
        (
            DoubtKind.IMPOSSIBLE,
            (4.0, 1.02, "efficiency"),
            "an efficiency of 400 % (speed-up 16.00 on 4 devices) cannot be true",
        ),
        (
            DoubtKind.IMPOSSIBLE,
            (26.0, 12.0, "iterations"),
            "2,600 iterations of 10 ms in 12 s cannot be true",
        ),
        (
            DoubtKind.SLOW_RANK,
            (0.25, 0.02, "rank 1"),
            "rank 1 needs 2.5 ms more host time than the other ranks, which costs 1.5 to "
            "2.5 ms of a 10 ms step",
        ),
        (
            DoubtKind.LATE_IN_TURN,
            (0.05, 0.02),
            "different ranks are slow at different times, which costs up to 0.5 ms of a 10 ms step",
        ),
        (
            DoubtKind.PARTS_EXCEED,
            (0.05, 0.02),
            "the step takes 10.5 ms without communication and 10 ms with communication",
        ),
        (
            DoubtKind.NO_BREAKDOWN,
            (1.8, 1.1),
            "the parts add up to 18 ms, but the step takes 10 ms",
        ),
        (
            DoubtKind.STALLS,
            (0.02, 0.01),
            "a few slow steps make the mean step 2.0 % longer than the median step",
        ),
        (
            DoubtKind.OTHER_GRADIENTS,
            (None, 1e-4),
            "the gradients differ by NaN from those of one process",
        ),
        (
            DoubtKind.OTHER_GRADIENTS,
            (0.31, 1e-4),
            "the gradients differ by 31.0 % from those of one process",
        ),
        (DoubtKind.CROWDED, (4, 2, "alpha"), "4 CPU workers share 2 cores of alpha"),
        (DoubtKind.CROWDED, (4, 1, "alpha"), "4 CPU workers share 1 core of alpha"),
        (
            DoubtKind.BUSY_CORES,
            (1.24, 2, "alpha"),
            "other programs used 1.2 of 2 cores of alpha",
        ),
        (
            DoubtKind.THROTTLED,
            (0.25, None, "thermal_sw"),
            "the clock was limited in 25 % of the samples: thermal_sw",
        ),
        (DoubtKind.THROTTLED, (), "the clock was limited: the reason is unknown"),
        (
            DoubtKind.UNSTEADY,
            (6,),
            "the step time was still changing after 6 iterations of warm-up",
        ),
        (
            DoubtKind.TOO_FEW_STEPS,
            (3,),
            "3 steps are too few to tell whether the step time was still changing",
        ),
        (
            DoubtKind.WIDE,
            (0.125, 0.1),
            "the 95 % interval of the step time within one round is ±12.5 %",
        ),
        (DoubtKind.QUICK, (0.048,), "the point was timed for a moment only (0.048 s)"),
        (
            DoubtKind.SHORT,
            (0.048, 3.0),
            "max_seconds ended the timing after 0.048 s of the 3 s that the job asks for",
        ),
        (
            DoubtKind.FEW_SAMPLES,
            (6, 50),
            "only 6 of 50 planned steps fitted into the time limit",
        ),
        (DoubtKind.ROUND_FAILED, (2, None, "lost: rank 1 died"), "round 2 ended lost: rank 1 died"),
    ],
)
def test_words_of_a_doubt(kind, known, told):
    assert words(kind, *known) == told


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (1.08, "The power cap slowed the baseline; the speed-up is up to 8 % too high."),
        (0.93, "The power cap lowered the clock; the speed-up is up to 7 % too low."),
    ],
)
def test_other_clocks_explain_so_much_of_the_speed(ratio, told):
    assert doubt_advice(Doubt(kind=DoubtKind.OTHER_CLOCKS, value=ratio, limit=1.0), ROW) == told
    clause = f"the SM clock is {ratio:.2f} times that of the baseline point"
    assert words(DoubtKind.OTHER_CLOCKS, ratio, 1.0) == clause


@pytest.mark.parametrize(
    ("kind", "known", "told"),
    [
        (DoubtKind.BUSY_CORES, (1.24, 2.0, "alpha"), "Other programs used up to 1.2 of 2 cores"),
        (DoubtKind.NOT_ALONE, (None, None, "run b"), "Other programs used the same devices"),
    ],
)
def test_busy_machine_doubts_become_one_sentence(kind, known, told):
    value, limit, subject = known
    worst = Doubt(kind=kind, value=value, limit=limit, subject=subject)
    group = DoubtGroup(count=8, worst=worst, row=ROW)
    assert busy_words(group, 12) == (f"{told} during 8 of 12 points; these times are not reliable.")


@pytest.mark.parametrize(
    ("changes", "value", "end"),
    [
        # 999.9 ms, but not as 1e+03 ms.
        (
            {"step_ms_p50": 11_510.0, "straggler_ms": 999.9},
            999.9 / 11_510,
            "costs 1 s of a 11.5 s step",
        ),
        (
            {"step_ms_p50": 1_151_000.0, "straggler_ms": 99_990.0},
            99_990 / 1_151_000,
            "costs 100 s of a 1,151 s step",
        ),
    ],
)
def test_slow_rank_cost_is_given_in_seconds(changes, value, end):
    row = make_row(world_size=2, device_type="cuda", **changes)
    assert words(DoubtKind.SLOW_RANK, value, 0.02, "rank 1", row).endswith(end)


@pytest.mark.parametrize(("drift", "change"), [(0.04, "4.0 % slower"), (-0.1, "10.0 % faster")])
def test_words_of_a_drift(drift, change):
    doubt = Doubt(kind=DoubtKind.DRIFT, value=drift, subject="round 1 with 2")
    told = f"the machine became {change} while the points of round 1 with 2 GPUs ran"
    assert drift_words(doubt, "GPUs") == told
    assert doubt_advice(doubt, None) == "Step times are not corrected."


@pytest.mark.parametrize("kind", [DoubtKind.SHORT, DoubtKind.FEW_SAMPLES, DoubtKind.TOO_FEW_STEPS])
def test_ended_script_gets_no_time_advice(kind):
    doubt = Doubt(kind=kind, value=3.0, limit=50.0)
    assert "Raise measure." in doubt_advice(doubt, ROW)
    ended = Doubt(kind=DoubtKind.SCRIPT_ENDED, value=20.0)
    row = replace(ROW, workload="script", doubts=(doubt, ended))
    assert doubt_advice(doubt, row) == ""
    assert "limit" not in doubt_words(doubt, row)
    assert "max_seconds" not in doubt_words(doubt, row)
    assert doubt_advice(ended, row) == "Let the script make more steps."


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


def test_unknown_losses_name_the_contradicted_baseline():
    why = LossesUnknown(reason=NotMeasured.PARTS_EXCEED, is_at_baseline=True)
    told = "at the baseline point, the parts add up to more than the step"
    assert losses_unknown_words(why) == told
