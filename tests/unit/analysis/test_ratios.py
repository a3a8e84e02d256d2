from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from builders import make_measure, make_point, make_record

from raybench.analysis.scaling import scaling
from raybench.analysis.start_noise import prior_noise, ratio_range
from raybench.results import rows
from raybench.stats import summary as stats


def row_of(series: list[float]) -> dict[str, float]:
    """The columns of a point that `ratio_range` looks at."""
    summary = stats.summarize([series])
    interval = stats.median_interval([series])
    return {
        "step_ms_p50": summary.p50,
        "step_ms_ci_low": interval.low,
        "step_ms_ci_high": interval.high,
    }


def noisy(rng: np.random.Generator, middle: float, phi: float) -> list[float]:
    """AR(1) noise of 1 %."""
    noise = rng.standard_normal(54 + 50) * np.sqrt(1 - phi**2)
    for place in range(1, len(noise)):
        noise[place] += phi * noise[place - 1]
    return [float(value) for value in middle * (1 + 0.01 * noise[50:])]


@pytest.mark.parametrize("phi", [0.0, 0.5])
def test_the_interval_of_a_ratio_holds_the_truth_about_as_often_as_it_says(phi: float) -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(150):
        base, point = row_of(noisy(rng, 8.0, phi)), row_of(noisy(rng, 10.0, phi))
        low, high = ratio_range(base, point)
        measured = base["step_ms_p50"] / point["step_ms_p50"]
        held += measured * low <= 0.8 <= measured * high
    assert held / 150 >= 0.9


def test_a_ratio_is_as_unsure_as_both_points_together() -> None:
    sure = {"step_ms_ci_low": 8.0, "step_ms_p50": 8.0, "step_ms_ci_high": 8.0}
    unsure = {"step_ms_ci_low": 4.0, "step_ms_p50": 8.0, "step_ms_ci_high": 16.0}
    assert ratio_range(sure, unsure) == pytest.approx((0.5, 2.0))
    assert ratio_range(unsure, sure) == pytest.approx((0.5, 2.0))
    assert ratio_range(unsure, unsure) == pytest.approx((2 ** -(2**0.5), 2 ** (2**0.5)))


def test_without_an_interval_of_each_there_is_none_of_the_ratio() -> None:
    known = {"step_ms_ci_low": 7.0, "step_ms_p50": 8.0, "step_ms_ci_high": 9.0}
    assert ratio_range(known, known | {"step_ms_ci_low": float("nan")}) is None


def test_speed_up_and_efficiency_get_the_interval_and_the_baseline_is_one() -> None:
    records = [make_record(make_point(world_size=n), step_ms=8.0 + n, count=40) for n in (1, 2)]
    points = pd.DataFrame([rows.point_row("run-a", record, make_measure()) for record in records])
    found = scaling(points, {"world_size": 1})
    base, point = found.to_dict("records")
    assert (base["speed_up_low"], base["speed_up_high"]) == (1.0, 1.0)
    assert point["speed_up_low"] < point["speed_up"] < point["speed_up_high"]
    assert point["efficiency_low"] == pytest.approx(point["speed_up_low"] / 2)
    starts = prior_noise([base, point]).reach(0.0) * 2**0.5
    assert math.log(point["speed_up_high"] / point["speed_up"]) == pytest.approx(starts, rel=0.01)


def test_an_interval_that_reaches_zero_gives_none_of_the_ratio() -> None:
    known = {"step_ms_ci_low": 7.0, "step_ms_p50": 8.0, "step_ms_ci_high": 9.0}
    assert ratio_range(known, known | {"step_ms_ci_low": 0.0}) is None
