"""Intervals that hold over starts: from rounds, from other runs, or as documented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from builders import make_measure, make_point, make_record
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.analysis.rounds import Trials, latest_trials, mean_of_rounds
from raybench.analysis.scaling import scaling
from raybench.analysis.start_noise import (
    DOCUMENTED,
    ROUNDS,
    RUNS,
    TIGHT_KIND,
    StartNoise,
    pool,
    prior_of,
)
from raybench.job.point import Precision
from raybench.results import rows
from raybench.stats.summary import student_t

BASELINE = {"world_size": 1}
ONE, TWO, FOUR = (make_point(world_size=n) for n in (1, 2, 4))


def frame(*records: Any) -> pd.DataFrame:
    return pd.DataFrame([rows.point_row("run-a", record, make_measure()) for record in records])


def in_rounds(*times_ms: Sequence[float], control: Sequence[float] = ()) -> pd.DataFrame:
    """A run of one, two and four devices: times_ms has a tuple of a step time each per round.

    control: the step time of the control at the end of the block of four, per round.
    """
    ran = [
        make_record(point, step_ms=ms, round=number, attempt=number)
        for number, of_round in enumerate(times_ms, 1)
        for point, ms in zip((ONE, TWO, FOUR), of_round, strict=True)
    ]
    controls = [
        make_record(ONE, step_ms=ms, round=number, attempt=10 + number, control_of=4)
        for number, ms in enumerate(control, 1)
    ]
    return frame(*ran, *controls)


def of_size(found: pd.DataFrame, world_size: int) -> dict[str, Any]:
    return dict(found.set_index("world_size").loc[world_size])


def test_a_speed_up_is_the_mean_of_the_ratios_within_each_round() -> None:
    # The whole second round is 20 % slower: the ratios are the same, and so sure.
    found = scaling(in_rounds((10.0, 12.5, 20.0), (12.0, 15.0, 24.0)), BASELINE)
    two = of_size(found, 2)
    assert two["speed_up"] == pytest.approx(1.6, rel=1e-3)
    assert two["speed_up_high"] / two["speed_up"] < 1.002
    assert two["step_ms_p50"] == pytest.approx(math.sqrt(12.5 * 15.0), rel=1e-3)
    # The step time itself scatters by 20 %, with so few degrees of freedom.
    assert two["step_ms_high"] > 15.0
    assert (two["rounds"], two["starts_from"]) == (2, ROUNDS)


@settings(max_examples=25, deadline=None)
@given(
    noise=st.lists(st.tuples(*[st.floats(-0.02, 0.02)] * 3), min_size=2, max_size=5, unique=True)
)
def test_the_interval_is_students_with_the_spread_pooled_over_the_points(
    noise: list[tuple[float, float, float]],
) -> None:
    times = [
        [ms * math.exp(e) for ms, e in zip((10.0, 12.0, 15.0), errors, strict=True)]
        for errors in noise
    ]
    found = scaling(in_rounds(*times), BASELINE)
    logs = np.log(np.array(times))
    ratios = logs[:, :1] - logs[:, 1:]
    count = len(noise)
    sd = math.sqrt(ratios.var(axis=0, ddof=1).mean())
    half = student_t(2 * (count - 1)) * sd / math.sqrt(count)
    for column, world_size in enumerate((2, 4)):
        row = of_size(found, world_size)
        seen = math.log(row["speed_up_high"] / row["speed_up"])
        assert math.log(row["speed_up"]) == pytest.approx(
            ratios[:, column].mean() + math.log(world_size), abs=2e-3
        )
        # Never narrower than what the samples leave open, which is next to nothing here.
        assert seen >= half * 0.97 - 1e-6
        assert seen <= max(half * 1.03, 2e-3)


def test_points_of_another_kind_scatter_by_themselves() -> None:
    wild = [
        make_record(
            make_point(world_size=n, precision=Precision.FP16), step_ms=ms, round=r, attempt=r
        )
        for r, of_round in enumerate(((8.0, 9.0), (8.0, 9.9)), 1)
        for n, ms in zip((1, 2), of_round, strict=True)
    ]
    calm = in_rounds((10.0, 12.0, 15.0), (10.0, 12.0, 15.0))
    found = scaling(pd.concat([calm, frame(*wild)], ignore_index=True), BASELINE)
    half = (found["speed_up_high"] / found["speed_up"] - 1).groupby(found["precision"]).max()
    assert half["fp32"] < 0.005
    assert half["fp16"] > 0.2


def test_with_one_round_the_documented_noise_of_starts_is_added_to_that_of_the_samples() -> None:
    row = of_size(scaling(in_rounds((10.0, 12.0, 15.0)), BASELINE), 2)
    known = prior_of(TIGHT_KIND)
    assert row["starts_from"] == DOCUMENTED
    assert math.log(row["step_ms_high"] / row["step_ms_p50"]) == pytest.approx(
        student_t(known.degrees) * known.sd, rel=0.01
    )
    assert math.log(row["speed_up_high"] / row["speed_up"]) == pytest.approx(
        math.sqrt(2) * student_t(known.degrees) * known.sd, rel=0.01
    )


def test_other_runs_tell_the_noise_of_one_round_better_than_what_is_documented() -> None:
    seen = StartNoise(sd=0.02, degrees=30.0, source=RUNS)
    row = of_size(scaling(in_rounds((10.0, 12.0, 15.0)), BASELINE, {TIGHT_KIND: seen}), 2)
    assert row["starts_from"] == RUNS
    assert row["step_ms_high"] / row["step_ms_p50"] == pytest.approx(1.0417, rel=1e-3)


def test_an_interval_is_never_narrower_than_the_samples_leave_it() -> None:
    noise = StartNoise(sd=0.0, degrees=4.0, source=ROUNDS)
    assert noise.reach(0.01, 3) == 0.01
    noise = StartNoise(sd=0.01, degrees=4.0, source=DOCUMENTED)
    assert noise.reach(0.03) == pytest.approx(math.hypot(0.03, student_t(4) * 0.01))


def test_rounds_with_one_start_each_tell_nothing_of_scatter() -> None:
    assert pool([[1.0], [2.0]]) is None
    assert pool([[1.0, 1.2], [2.0, 2.0], []]).degrees == 2  # type: ignore[union-attr]


def test_ratios_are_taken_against_the_mean_of_the_baseline_and_its_control() -> None:
    # The machine becomes 4 % slower until the control; the point of four devices stands between.
    points = in_rounds((10.0, 12.0, 10.2), (10.0, 12.0, 10.2), control=(10.4, 10.4))
    four = of_size(scaling(points, BASELINE), 4)
    assert four["speed_up"] == pytest.approx(4 * math.sqrt(10.0 * 10.4) / 10.2, rel=1e-3)
    assert of_size(scaling(points, BASELINE), 2)["speed_up"] == pytest.approx(2 * 10 / 12, rel=1e-3)
    found = list(Trials(points).drifts())
    assert [(number, block) for number, block, _ in found] == [(1, 4), (2, 4)]
    assert found[0][2] == pytest.approx(0.04, abs=1e-3)
    assert not list(Trials(in_rounds((10.0, 12.0, 10.2), control=(10.05,))).drifts())


def test_a_control_is_no_point_of_the_report() -> None:
    points = in_rounds((10.0, 12.0, 15.0), control=(10.0,))
    assert len(latest_trials(points)) == 4
    assert scaling(points, BASELINE)["world_size"].tolist() == [1, 2, 4]


def test_a_point_that_failed_in_one_round_is_the_mean_of_the_others_and_says_so() -> None:
    points = in_rounds((10.0, 12.0, 15.0), (10.2, 12.2, 15.2), (10.1, 12.1, 15.1))
    lost = (points["world_size"] == 2) & (points["round"] == 2)
    points.loc[lost, ["status", "error_message", "throughput"]] = ["lost", "rank 1 died", None]
    two = of_size(scaling(points, BASELINE), 2)
    assert two["status"] == "ok"
    assert two["rounds"] == 2
    assert two["step_ms_p50"] == pytest.approx(math.sqrt(12.0 * 12.1), rel=1e-3)
    assert two["warnings"][-1] == "round 2 ended lost: rank 1 died"
    assert two["speed_up"] == pytest.approx(2 * math.sqrt(10 * 10.1 / 12 / 12.1), rel=1e-3)


def test_a_baseline_that_was_never_ok_beside_a_point_is_the_reason_for_no_speed_up() -> None:
    points = in_rounds((10.0, 12.0, 15.0), (10.2, 12.2, 15.2))
    gone = (points["world_size"] == 1) & (points["round"] == 2)
    gone |= (points["world_size"] == 2) & (points["round"] == 1)
    points.loc[gone, "status"] = "lost"
    two = of_size(scaling(points, BASELINE), 2)
    assert pd.isna(two["speed_up"])
    assert two["why"] == "baseline point was not ok in any round of this point"


def test_doubts_of_one_round_stay_and_samples_count_together() -> None:
    points = in_rounds((10.0, 12.0, 15.0), (10.2, 12.2, 15.2))
    points.loc[points["round"] == 2, ["stable", "throttled"]] = [False, True]
    points.loc[points["round"] == 1, ["stable", "throttled"]] = [True, False]
    merged = mean_of_rounds(points)
    assert merged["stable"].all()
    assert merged["throttled"].all()
    assert merged["iterations"].tolist() == [2 * n for n in points["iterations"][:3]]
    rate = merged["throughput"] * merged["step_ms_p50"]
    assert rate.tolist() == pytest.approx([8000.0 * n * 8 for n in (1, 2, 4)], rel=0.5)


def test_what_the_first_process_of_a_host_loads_is_in_no_cold_step_of_several_rounds() -> None:
    points = in_rounds(*[(10.0, 12.0, 15.0)] * 3)
    points["first_step_ms"] = 700.0
    is_first = (points["world_size"] == 1) & (points["round"] == 1)
    points.loc[is_first, "first_step_ms"] = 1400.0
    points.loc[points["round"] == 3, "first_step_ms"] = 720.0
    assert mean_of_rounds(points)["first_step_ms"].tolist() == [720.0, 700.0, 700.0]
