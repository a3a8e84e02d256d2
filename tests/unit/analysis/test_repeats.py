"""Which runs are compared, which tell of noise, and how sure a difference of means is."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
from builders import START

from raybench.analysis.compare import MeanChange, mean_change
from raybench.analysis.repeats import MOST_REPEATS, Known, Sides, Start, sides
from raybench.analysis.start_noise import StartNoise, node_noise

ROW = {
    **{"precision": "bf16", "host_bound": False, "device_type": "cuda"},
    **{"step_ms_ci_low": 7.99, "step_ms_ci_high": 8.01},
}
QUIET = StartNoise(sd=0.003, degrees=30, source="runs")


def start(night: int, time_ms: float = 8.0, node: str = "here") -> Start:
    at = START + timedelta(days=night)
    return Start(run_id=f"night{night}", node=node, started_at=at, time_ms=time_ms, row=ROW)


def nights(runs: list[Start]) -> list[str]:
    return [run.run_id.removeprefix("night") for run in runs]


def sorted_runs(times_ms: list[float], base: int, new: int) -> Sides:
    runs = [start(night, time_ms) for night, time_ms in enumerate(times_ms)]
    others = [run for place, run in enumerate(runs) if place not in (base, new)]
    known = [Known(own=runs[place], alike=others) for place in (base, new)]
    return sides(*known, is_one_world=True, threshold=0.015)


def test_runs_of_a_level_are_repeats_of_the_run_in_it() -> None:
    found = sorted_runs([8.0, 8.01, 9.0, 9.01, 8.99], 0, 4)
    assert (nights(found.base), sorted(nights(found.new))) == (["0", "1"], ["2", "3", "4"])
    assert (found.is_step, found.looks, found.others) == (True, 4, [])


def test_without_a_step_only_runs_beyond_the_two_are_their_repeats() -> None:
    found = sorted_runs([8.0, 8.01, 8.0, 8.01, 8.0, 8.01], 1, 3)
    assert (sorted(nights(found.base)), sorted(nights(found.new))) == (["0", "1"], ["3", "4", "5"])
    assert [nights(group) for group in found.others] == [["2"]]
    assert (found.is_step, found.looks) == (False, 1)


def test_the_newer_run_may_be_the_base() -> None:
    found = sorted_runs([8.0, 8.01, 8.0, 8.01], 2, 1)
    assert (sorted(nights(found.base)), sorted(nights(found.new))) == (["2", "3"], ["0", "1"])


def test_a_slowdown_that_went_away_is_noise_of_neither() -> None:
    found = sorted_runs([8.0, 8.01, 12.0, 12.01, 8.0, 8.01], 1, 5)
    assert (nights(found.base), nights(found.new)) == (["1", "0"], ["5", "4"])
    assert [nights(group) for group in found.others] == [["2", "3"]]
    assert not found.is_step


def test_of_very_many_repeats_the_nearest_are_taken() -> None:
    found = sorted_runs([8.0 + 0.01 * (night % 2) for night in range(30)], 28, 29)
    assert len(found.base) == MOST_REPEATS
    assert nights(found.base) == [str(night) for night in range(28, 28 - MOST_REPEATS, -1)]


def test_named_runs_are_the_side_whatever_they_measured() -> None:
    named = [start(1, 12.0), start(2, 8.0)]
    base = Known(own=start(0), named=named, alike=[start(4)])
    new = Known(own=start(3), named=[named[1]])
    found = sides(base, new, is_one_world=True, threshold=0.015)
    assert (nights(found.base), nights(found.new)) == (["0", "1"], ["3"])


def change(base: list[Start], new: list[Start]) -> MeanChange:
    of_nodes = StartNoise(sd=0.01, degrees=30, source="runs")
    return mean_change(Sides(base=base, new=new), QUIET, of_nodes, 0.0)


def test_devices_that_both_sides_used_alike_cancel_out() -> None:
    here = change([start(0), start(1)], [start(2), start(3)])
    mixed = change([start(0), start(1, node="b")], [start(2, node="b"), start(3)])
    assert here.noise_sd == mixed.noise_sd == pytest.approx(QUIET.sd)
    apart = change([start(0), start(1)], [start(2, node="b"), start(3, node="b")])
    assert apart.noise_sd == pytest.approx(np.hypot(QUIET.sd, np.sqrt(2) * 0.01))


def test_more_runs_on_one_node_do_not_tell_another_node_better() -> None:
    one, many = (
        change([start(0)], [start(k, node="b") for k in range(1, 1 + count)]) for count in (1, 50)
    )
    assert many.noise_sd > np.sqrt(2) * 0.01
    assert one.noise_sd == pytest.approx(np.sqrt(2) * np.hypot(QUIET.sd, 0.01))


def test_the_noise_of_nodes_is_what_the_noise_of_starts_leaves() -> None:
    rng = np.random.default_rng(3)
    levels = np.exp(0.02 * rng.standard_normal(60))
    groups = [
        {
            str(k): list(8 * level * np.exp(0.003 * rng.standard_normal(3)))
            for k, level in enumerate(levels)
        }
    ]
    assert node_noise(groups, QUIET, 0.0).sd == pytest.approx(0.02, rel=0.2)
    alike = [{str(k): list(8 * np.exp(0.003 * rng.standard_normal(3))) for k in range(60)}]
    assert node_noise(alike, QUIET, 0.0).sd < 0.003


@pytest.mark.parametrize(("noise", "samples"), [(0.004, 0.0), (0.004, 0.004), (0.001, 0.01)])
def test_interval_and_least_change_have_the_chance_that_they_claim(
    noise: float, samples: float
) -> None:
    rng = np.random.default_rng(5)
    drawn = noise * rng.standard_t(3, 200_000) + samples * rng.standard_normal(200_000)
    known = MeanChange(size=0.01, noise_sd=noise, degrees=3, sample_sd=samples)
    half = np.log(known.interval[1]) - 0.01
    assert np.mean(np.abs(drawn) > half) == pytest.approx(0.1, abs=0.004)
    assert np.mean(np.abs(drawn) > np.log1p(known.least_seen(0.02))) == pytest.approx(
        0.02, abs=0.002
    )
    assert known.p_value == pytest.approx(np.mean(np.abs(drawn) >= 0.01), abs=0.004)
