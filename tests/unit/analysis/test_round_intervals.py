"""Rounds of a run: their mean, what differs between them, and the intervals that they give."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from builders import column, make_apart, make_measurement, make_point, make_record, make_rows

from raybench.analysis.rounds import Trials, latest_trials, mean_of_rounds, ranks_of_step
from raybench.analysis.scaling import scaling
from raybench.records.doubts import Doubt, DoubtKind, NotCompared, NotComparedKind
from raybench.records.status import Status
from raybench.stats.summary import scatter

BASELINE = {"world_size": 1}
ONE, TWO, FOUR = (make_point(world_size=n) for n in (1, 2, 4))


def in_rounds(*times_ms, control=()):
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
    return make_rows([*ran, *controls])


def of_size(found, world_size):
    return next(row for row in found if row.world_size == world_size)


def test_speed_up_is_the_mean_of_round_ratios():
    # The whole second round is 20 % slower: the ratios are the same, and so sure.
    found = scaling(in_rounds((10.0, 12.5, 20.0), (12.0, 15.0, 24.0)), BASELINE)
    two = of_size(found, 2)
    assert two.speed_up == pytest.approx(1.6, rel=1e-3)
    assert two.speed_up_high / two.speed_up < 1.002
    assert two.step_ms_p50 == pytest.approx(math.sqrt(12.5 * 15.0), rel=1e-3)
    # The step time itself scatters by 20 %, with so few degrees of freedom.
    assert two.step_ms_high > 15.0
    assert two.rounds == 2


def test_own_rates_have_the_mean_of_the_throughput():
    rows = make_rows(
        [make_record(ONE, step_ms=ms, round=n, attempt=n) for n, ms in ((1, 8), (2, 32))]
    )
    rows = [replace(row, workload_metrics={"tokens": 3 * row.throughput}) for row in rows]
    [mean] = mean_of_rounds(rows)
    assert mean.workload_metrics["tokens"] == pytest.approx(3 * mean.throughput)


def test_interval_uses_only_rounds_of_this_run():
    noise = 0.01 * np.random.default_rng(2).standard_normal((3, 3))
    times = np.array([10.0, 12.0, 15.0]) * np.exp(noise)
    found = scaling(in_rounds(*map(tuple, times)), BASELINE)
    # The builder adds a little noise, the same in each round.
    scale = np.array(column(found, "step_ms_p50")) / np.exp(np.log(times).mean(axis=0))
    logs = np.log(times.T * scale[:, np.newaxis])
    for place, (world_size, expected) in enumerate(zip((1, 2, 4), scatter(logs), strict=True)):
        row = of_size(found, world_size)
        assert expected is not None
        seen = math.log(row.step_ms_high / row.step_ms_p50)
        assert seen == pytest.approx(expected.half_width(1 / 3), rel=0.05), place


def test_with_one_round_nothing_has_an_interval():
    found = scaling(in_rounds((10.0, 12.0, 15.0)), BASELINE)
    assert None not in column(found, "speed_up")
    ends = [name for name in vars(found[0]) if name.endswith(("_low", "_high"))]
    assert {getattr(row, name) for row in found for name in ends if "_ci_" not in name} == {None}


def test_speed_up_interval_uses_means_instead_of_medians():
    # One step in six of the second device takes 1, 2 or 3 times as long, by round: the median
    # does not change, the samples/s do.
    records = []
    for number, point in itertools.product((1, 2, 3), (ONE, TWO)):
        timed = [steps(number if point is TWO else 1)]
        ranks = [make_measurement(r, timed, items_per_step=64) for r in range(point.world_size)]
        told = {"round": number, "attempt": number, "measurements": tuple(ranks)}
        records.append(make_record(point, **told))
    two = of_size(scaling(make_rows(records), BASELINE), 2)
    assert two.step_ms_high / two.step_ms_p50 < 1.001
    assert two.speed_up_high / two.speed_up > 1.2


def steps(times):
    return [10_000_000] * 5 + [10_000_000 * times]


def test_controls_that_moved_are_told():
    points = in_rounds((10.0, 12.0, 10.2), (10.0, 12.0, 10.2), control=(10.4, 10.4))
    found = list(Trials(points).drifts())
    assert [(number, block) for number, block, _ in found] == [(1, 4), (2, 4)]
    assert found[0][2] == pytest.approx(0.04, abs=1e-3)
    assert not list(Trials(in_rounds((10.0, 12.0, 10.2), control=(10.05,))).drifts())


def test_a_control_is_no_point_of_the_report():
    points = in_rounds((10.0, 12.0, 15.0), control=(10.0,))
    assert len(latest_trials(points)) == 4
    assert column(scaling(points, BASELINE), "world_size") == [1, 2, 4]


def test_failed_round_is_skipped_with_a_doubt():
    points = in_rounds((10.0, 12.0, 15.0), (10.2, 12.2, 15.2), (10.1, 12.1, 15.1))
    lost = {"status": Status.LOST, "error_message": "rank 1 died", "throughput": None}
    points = [
        replace(row, **lost) if (row.world_size, row.round) == (2, 2) else row for row in points
    ]
    two = of_size(scaling(points, BASELINE), 2)
    assert two.status == "ok"
    assert two.rounds == 2
    assert two.step_ms_p50 == pytest.approx(math.sqrt(12.0 * 12.1), rel=1e-3)
    failed = Doubt(kind=DoubtKind.ROUND_FAILED, value=2, subject="lost: rank 1 died")
    assert failed in two.doubts
    assert two.speed_up == pytest.approx(2 * math.sqrt(10 * 10.1 / 12 / 12.1), rel=1e-3)


def test_failed_round_without_number_is_round_one():
    points = in_rounds((10.0, 12.0, 15.0), (10.2, 12.2, 15.2))
    failed = {"status": Status.ERROR, "error_message": "no", "throughput": None, "round": None}
    rows = [replace(r, **failed) if (r.world_size, r.round) == (2, 1) else r for r in points]
    (doubt,) = (
        doubt
        for doubt in of_size(scaling(rows, BASELINE), 2).doubts
        if doubt.kind is DoubtKind.ROUND_FAILED
    )
    assert doubt.value == 1


def test_speed_up_needs_a_common_round_with_baseline():
    points = in_rounds((10.0, 12.0, 15.0), (10.2, 12.2, 15.2))
    points = [
        replace(row, status=Status.LOST) if (row.world_size, row.round) in ((1, 2), (2, 1)) else row
        for row in points
    ]
    two = of_size(scaling(points, BASELINE), 2)
    assert two.speed_up is None
    assert two.why == NotCompared(kind=NotComparedKind.NO_COMMON_ROUND)


def test_merged_rounds_keep_throttling_and_add_iterations():
    points = in_rounds((10.0, 12.0, 15.0), (10.2, 12.2, 15.2))
    points = [replace(row, stable=row.round == 1, throttled=row.round == 2) for row in points]
    merged = mean_of_rounds(points)
    assert all(column(merged, "stable"))
    assert all(column(merged, "throttled"))
    assert column(merged, "iterations") == [2 * row.iterations for row in points[:3]]
    rates = [row.throughput * row.step_ms_p50 for row in merged]
    assert rates == pytest.approx([8000.0 * n * 8 for n in (1, 2, 4)], rel=0.5)


def test_cold_step_is_the_median_of_rounds():
    points = in_rounds(*[(10.0, 12.0, 15.0)] * 3)
    of_rounds = {1: 700.0, 2: 700.0, 3: 720.0}
    points = [replace(row, first_step_ms=of_rounds[row.round]) for row in points]
    points[0] = replace(points[0], first_step_ms=1400.0)
    assert column(mean_of_rounds(points), "first_step_ms") == [720.0, 700.0, 700.0]


def test_slowest_rank_is_kept_without_later_breakdowns():
    first = make_apart([8.0, 8.0, 10.0, 8.0], 10.5, point=FOUR)
    later = [make_record(FOUR, step_ms=10.5, round=n, attempt=n) for n in (2, 3)]
    rows = make_rows([replace(first, round=1, attempt=1), *later])
    assert column(rows, "slowest_rank") == [2, None, None]
    assert mean_of_rounds(rows)[0].slowest_rank == 2


def test_ranks_come_from_the_round_with_breakdown():
    first = make_apart([8.0, 7.0], 10.0, point=TWO)
    rows = make_rows([replace(first, round=n, attempt=n) for n in (1, 2)])
    rows[0] = replace(rows[0], share_by_rank=(40, 24, 0), world_size=3)
    rows[1] = replace(rows[1], share_by_rank=(36, 20, 8), world_size=3)
    rows[1] = replace(rows[1], local_step_ms_by_rank=None, device_ms_by_rank=None)
    [merged] = mean_of_rounds(rows)
    assert [one.rank for one in ranks_of_step(merged)] == [0, 1]


def test_rounds_on_several_models_are_not_compared():
    rows = in_rounds((10.0, 12.0, 15.0), (10.2, 12.2, 15.2))
    for place, row in enumerate(rows):
        model = "H100" if (row.world_size, row.round) == (1, 1) else "H200"
        models = (model,) * row.world_size
        rows[place] = replace(row, device_name=model, models_by_rank=models)
    found = of_size(scaling(rows, BASELINE), 2)
    assert found.speed_up is None
    assert found.why.kind is NotComparedKind.OTHER_DEVICE
    assert found.why.subject.startswith("H100 and ")


def test_steps_count_inner_iterations_of_each_round():
    rows = in_rounds((10.0, 12.0, 15.0), (10.0, 12.0, 15.0))
    rows = [
        replace(row, inner_iterations=row.round, energy_j=1.0, new_processes=row.round == 1)
        for row in rows
    ]
    one = scaling(rows, BASELINE)[0]
    assert (one.inner_iterations, one.new_processes) == (None, False)
    steps = rows[0].iterations * (1 + 2)
    per_step = rows[0].throughput * rows[0].step_ms_mean / 1e3
    assert one.samples_per_joule == pytest.approx(steps * per_step / 2, rel=1e-6)
