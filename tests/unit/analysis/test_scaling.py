"""Points against their baseline: speed-ups, and what is lost of the step."""

from dataclasses import replace

import pytest
from builders import (
    column,
    make_device,
    make_failed,
    make_measurement,
    make_point,
    make_record,
    make_row,
    make_rows,
    make_steady,
    with_values,
)
from hypothesis import given
from hypothesis import strategies as st

from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.rows import METRICS_BY_NAME, setting_order, value_of, varying
from raybench.analysis.scaling import LOSSES, scaling, shares_of_loss
from raybench.job.point import Precision
from raybench.records.doubts import (
    Doubt,
    DoubtKind,
    NotCompared,
    NotComparedKind,
    NotMeasured,
)
from raybench.records.measurement import Breakdown
from raybench.records.status import Status
from raybench.results.breakdown import split_rest


def test_weak_scaling_compares_equal_batches_per_device():
    records = [make_steady(1, 10.0), make_steady(2, 10.0), make_steady(4, 16.0)]
    found = scaling(make_rows(records), {"world_size": 1})
    assert column(found, "speed_up") == pytest.approx([1.0, 2.0, 2.5])
    assert column(found, "efficiency") == pytest.approx([1.0, 1.0, 0.625])
    assert column(found, "is_baseline") == [True, False, False]
    assert column(found, "series") == [0, 0, 0]


def test_strong_scaling_compares_equal_global_batches():
    records = [
        make_steady(size, ms, scaling="strong", batch_size=64 // size, global_batch_size=64)
        for size, ms in ((1, 8.0), (2, 5.0), (4, 4.0))
    ]
    found = scaling(make_rows(records), {"world_size": 1})
    assert column(found, "speed_up") == pytest.approx([1.0, 1.6, 2.0])
    assert column(found, "efficiency") == pytest.approx([1.0, 0.8, 0.5])
    assert set(column(found, "batch")) == {64}


def test_weak_and_strong_points_are_never_compared():
    strong = make_steady(2, 5.0, scaling="strong", batch_size=64, global_batch_size=64)
    found = scaling(make_rows([make_steady(1, 10.0), strong]), {"world_size": 1})
    assert len(set(column(found, "series"))) == 2
    why = NotCompared(kind=NotComparedKind.NO_BASELINE_POINT, subject="world_size=1")
    assert found[1].why == why


@pytest.mark.parametrize(
    "other",
    [
        {"precision": Precision.BF16},
        {"batch_size": 128},
        {"workload": "linear"},
        {"cuda_graph": True},
        {"params": {"grad_accumulation": 1, "hidden": 1, "layers": 8}},
    ],
)
def test_points_with_other_settings_form_another_series(other):
    rows = make_rows([make_steady(1, 10.0), make_steady(2, 10.0, **other)])
    found = scaling(rows, {"world_size": 1})
    assert column(found, "series") == [0, 1]
    assert [one is None for one in column(found, "speed_up")] == [False, True]


def test_parameter_named_like_a_column_has_no_efficiency():
    records = [make_steady(2, 10.0 * n, params={"repeats": n}) for n in (1, 3)]
    found = scaling(make_rows(records), {"repeats": "1"})
    assert varying(found) == ["repeats"]
    assert found[1].speed_up == pytest.approx(1 / 3)
    assert set(column(found, "efficiency")) == {None}


def test_baseline_matches_any_notation_of_a_number():
    records = [make_steady(1, 1.0, params={"lr": 0.5}), make_steady(1, 2.0, params={"lr": 2.0})]
    assert column(scaling(make_rows(records), {"lr": 2}), "is_baseline") == [False, True]
    assert column(scaling(make_rows(records), {"lr": "2.00"}), "is_baseline") == [False, True]
    assert column(scaling(make_rows(records), {"lr": 10**400}), "is_baseline") == [False, False]
    flags = [make_steady(1, 1.0, params={"compile": flag}) for flag in (True, False)]
    assert column(scaling(make_rows(flags), {"compile": True}), "is_baseline") == [True, False]


ELSEWHERE = replace(make_steady(1, 10.0), devices=(make_device(name="NVIDIA A100"),))


@pytest.mark.parametrize(
    ("first", "baseline", "why"),
    [
        (make_failed(), {"world_size": 1}, (NotComparedKind.BASELINE_NOT_OK, Status.OOM)),
        (ELSEWHERE, {"world_size": 1}, (NotComparedKind.OTHER_DEVICE, "NVIDIA A100")),
        (make_steady(1, 10.0), {}, (NotComparedKind.NO_BASELINE, "")),
    ],
)
def test_missing_speed_up_has_a_reason(first, baseline, why):
    found = scaling(make_rows([first, make_steady(2, 10.0)]), baseline)
    assert value_of(make_row(), METRICS_BY_NAME["speed_up"]) is None
    kind, subject = why
    told = NotCompared(kind=kind, subject=subject)
    assert (found[1].speed_up, found[1].efficiency, found[1].why) == (None, None, told)
    assert found[0].why == (None if baseline else told)
    assert column(found, "is_baseline") == [bool(baseline), False]


def test_unknown_item_count_prevents_a_speed_up():
    sizes = [make_point(world_size=size) for size in (1, 2)]
    silent = [make_record(point, of_ranks={"items_per_step": None}) for point in sizes]
    points = make_rows(silent)
    told = Doubt(kind=DoubtKind.NO_THROUGHPUT)
    assert all(told in row.doubts for row in points)
    why = NotCompared(kind=NotComparedKind.NO_THROUGHPUT)
    assert column(scaling(points, {"world_size": 1}), "why") == [why, why]
    assert column(scaling(points, {}), "why") == [None, None]
    collective = make_point(batch_size=None, global_batch_size=None, scaling=None)
    (row,) = make_rows([replace(silent[0], point=collective)])
    assert told not in row.doubts


def test_ranks_without_collectives_get_a_doubt():
    told = Doubt(kind=DoubtKind.NO_COLLECTIVES)
    unknown = Breakdown(not_measured={"comm_exposed_ms": NotMeasured.NO_COLLECTIVES})
    point = make_point(world_size=2)
    (row,) = make_rows([make_record(point, of_ranks={"breakdown": unknown})])
    assert told in row.doubts
    (row,) = make_rows([make_record(point)])
    assert told not in row.doubts


def test_points_without_samples_are_silently_not_compared():
    nothing = {"batch_size": None, "global_batch_size": None, "scaling": None}
    points = [make_point(world_size=size, **nothing) for size in (1, 2)]
    ranks = (make_measurement(0, [[1_000_000] * 6], items_per_step=None),)
    rows = make_rows(make_record(p, measurements=ranks) for p in points)
    found = scaling(rows, {"world_size": 1})
    assert set(column(found, "speed_up")) == {None}
    assert set(column(found, "why")) == {None}
    assert column(found, "batch") == [None, None]


def test_latest_attempt_replaces_the_first():
    retried = make_record(step_ms=5.0, attempt=2)
    points = make_rows([retried, make_steady(2, 10.0), make_failed()])
    latest = mean_of_rounds(points)
    assert column(latest, "attempt") == [2, 1]
    assert None not in column(scaling(points, {"world_size": 1}), "speed_up")


def test_settings_sort_by_size_then_precision_then_name():
    in_order = [4, "8", "16", "fp32", "tf32", "bf16", "adam", "nan"]
    assert sorted(reversed(in_order), key=setting_order) == in_order


@pytest.mark.parametrize(
    ("reasons", "clocks", "ratio"),
    [
        ((["power_cap"], ["power_cap"]), (1815.0, 1965.0), 1965 / 1815),
        ((["power_cap"], []), (1830.0, 1980.0), 1980 / 1830),
        (([], ["power_cap"]), (1980.0, 1830.0), 1830 / 1980),
        # Equal within one percent, or not known.
        ((["power_cap"], ["power_cap"]), (1755.0, 1740.0), None),
        ((["power_cap"], []), (None, None), None),
    ],
)
def test_power_capped_clocks_do_not_prevent_speed_up(reasons, clocks, ratio):
    found = _capped(reasons, clocks)
    assert column(found, "speed_up") == pytest.approx([1.0, 1.6])
    assert set(column(found, "why")) == {None}
    assert column(found, "clock_ratio") == [None, ratio and pytest.approx(ratio)]


def _capped(reasons, clocks):
    points = with_values(
        make_rows([make_steady(1, 10.0), make_steady(2, 12.5)]),
        sm_clock_mhz_p50=clocks,
        throttled=list(map(bool, reasons)),
        throttle_reasons=reasons,
    )
    return scaling(points, {"world_size": 1})


@pytest.mark.parametrize(
    ("reasons", "clocks"), [(([], []), (1980.0, 1900.0)), (([], ["power_cap"]), (1830.0, 1980.0))]
)
def test_unexplained_clock_difference_prevents_comparison(reasons, clocks):
    found = _capped(reasons, clocks)
    at_base, at_point = clocks
    why = NotCompared(kind=NotComparedKind.CLOCKS_DIFFER, value=at_point, of_baseline=at_base)
    assert (found[1].speed_up, found[1].why) == (None, why)


@pytest.mark.parametrize(
    ("place", "kind"),
    [(0, NotComparedKind.BASELINE_CLOCKS_LIMITED), (1, NotComparedKind.CLOCKS_LIMITED)],
    ids=["baseline", "point"],
)
@pytest.mark.parametrize("reason", ["thermal_sw", "thermal_hw", "power_brake"])
def test_heat_or_fault_at_either_point_prevents_comparison(place, kind, reason):
    reasons = [("power_cap", reason) if number == place else () for number in range(2)]
    found = _capped(reasons, (None, None))
    assert found[1].why == NotCompared(kind=kind, subject=reason)


def test_two_matching_baselines_prevent_any_comparison():
    records = [make_steady(1, ms, params={"rate": rate}) for rate, ms in (("1", 8.0), ("1.0", 9.0))]
    other = make_steady(1, 4.0, params={"rate": "2"})
    found = scaling(make_rows([*records, other]), {"rate": "1"})
    first, second = column(found, "point_id")[:2]
    kind = NotComparedKind.SEVERAL_BASELINES
    why = NotCompared(kind=kind, subject=f"{first} and {second}", value=2)
    assert column(found, "why") == [why] * 3
    assert set(column(found, "speed_up")) == {None}


def test_a_throughput_of_zero_is_compared_with_nothing():
    points = make_rows([make_steady(1, 10.0), make_steady(2, 10.0)])
    at_base = scaling(with_values(points, throughput=[0.0, 12_800.0]), {"world_size": 1})
    why = NotCompared(kind=NotComparedKind.BASELINE_WITHOUT_THROUGHPUT)
    assert at_base[1].why == why
    at_point = scaling(with_values(points, throughput=[6_400.0, 0.0]), {"world_size": 1})
    assert [one is None for one in column(at_point, "speed_up")] == [False, True]


def test_serial_fraction_refers_to_a_single_device():
    serial = 0.02
    strong, records = {"scaling": "strong", "global_batch_size": 64}, []
    for size in (2, 4, 8):
        step_ms = 8.0 * (serial + (1 - serial) / size)
        records.append(make_steady(size, step_ms, batch_size=64 // size, **strong))
    found = scaling(make_rows(records), {"world_size": 2})
    assert list(column(found, "serial_fraction")[1:]) == pytest.approx([serial] * 2, rel=1e-4)


def row(step_ms, *local_ms, comm_ms=100.0, **parts):
    """A point on GPUs of which each rank's own step is known, and takes its device all the time."""
    slowest = max(local_ms, default=None)
    exposed_ms, _ = split_rest(
        step_ms - max(local_ms),
        comm_ms,
        has_peers=len(local_ms) > 1,
        is_counted="comm_calls" in parts,
    )
    several = {
        "straggler_ms": sorted(local_ms)[-1] - sorted(local_ms)[(len(local_ms) - 2) // 2],
        "comm_exposed_ms": exposed_ms,
    }
    known = {"world_size": len(local_ms), "device_type": "cuda"}
    known |= {"step_ms_p50": step_ms, "step_ms_mean": step_ms, "local_step_ms": slowest}
    known |= {"local_step_ms_by_rank": local_ms, "device_ms_by_rank": local_ms}
    return make_row(**known | (several if len(local_ms) > 1 else {}) | parts)


def lost(point, base, work=1.0):
    """work: share of the baseline's step in perfect scaling."""
    name = "step_ms_mean" if point.local_step_ms_by_rank else "step_ms_p50"
    efficiency = work * getattr(base, name) / getattr(point, name)
    shares = shares_of_loss(point, base, efficiency)
    assert tuple(shares) == LOSSES
    known = [share for share in shares.values() if share is not None]
    assert sum(known) == pytest.approx(1 - efficiency)
    return {name.removeprefix("lost_"): share for name, share in shares.items()}


CPU = {"device_type": "cpu", "device_ms_by_rank": None}
LOST = {
    "what the step takes beyond the ranks' own is communication": (
        (row(10.0, 8.4, 8.4), row(8.0, 8.0)),
        {"comm": 0.16, "compute": 0.04, "wait": 0.0, "unexplained": 0.0, "data": None},
    ),
    "a slow rank costs what its own step is longer and is no slower compute": (
        (row(12.0, 8.4, 11.4, 8.4, 8.4), row(8.0, 8.0)),
        {"wait": 3.0 / 12, "compute": 0.4 / 12, "comm": 0.6 / 12, "unexplained": 0.0},
    ),
    "a slow host is no slower host of the others": (
        (row(10.0, 8.0, 9.5, device_ms_by_rank=[7.9, 7.9]), row(8.0, 8.0, device_ms_by_rank=[7.9])),
        {"wait": 0.15, "host": 0.0, "compute": 0.0},
    ),
    "more than was timed of communication is unexplained": (
        (row(10.0, 8.0, 8.0, comm_ms=0.5), row(8.0, 8.0)),
        {"comm": 0.05, "unexplained": 0.15},
    ),
    "ranks that are late in turn are no communication": (
        (row(10.0, 8.0, 8.0, comm_ms=0.5, late_in_turn_ms=1.0), row(8.0, 8.0)),
        {"comm": 0.05, "unexplained": 0.15},
    ),
    "communication that was not timed is unexplained": (
        (row(10.0, 8.0, 8.0, comm_ms=None), row(8.0, 8.0)),
        {"comm": None, "unexplained": 0.2},
    ),
    "communication whose calls were counted is what local copies do not take": (
        (row(10.0, 8.0, 8.0, comm_ms=None, comm_calls={"all_to_all": 4}), row(8.0, 8.0)),
        {"comm": 0.2, "unexplained": 0.0},
    ),
    "a step shorter than its ranks' own is unexplained": (
        (row(9.0, 9.5, 9.5), row(8.0, 8.0)),
        {"comm": 0.0, "unexplained": -0.5 / 9},
    ),
    "a baseline that is not the sum of its parts is unexplained": (
        (row(10.0, 8.4, 8.4), row(8.0, 8.4)),
        {"comm": 0.16, "compute": 0.0, "unexplained": 0.04},
    ),
    # Taken apart, its steps were 0.6 ms longer than they were when they were timed.
    "a baseline does not idle longer than its timed step leaves": (
        (row(10.0, 8.4, 8.4, device_ms_by_rank=[7.9, 7.9]), row(8.0, 8.6, device_ms_by_rank=[7.9])),
        {"compute": 0.0, "host": 0.04, "unexplained": 0.0},
    ),
    "stalls that are too rare for the median are unexplained": (
        (row(10.0, 8.4, 8.4, step_ms_mean=10.5), row(8.0, 8.0)),
        {"comm": 1.6 / 10.5, "compute": 0.4 / 10.5, "unexplained": 0.5 / 10.5},
    ),
    "a late batch costs a GPU nothing while it is busy": (
        (row(9.0, 9.0, 9.0, data_ms=1.0), row(8.0, 8.0, data_ms=0.0)),
        {"data": 0.0},
    ),
    "a late batch costs a GPU what it idles": (
        (
            row(10.0, 10.0, 10.0, data_ms=0.5, device_ms_by_rank=[8.5, 8.5]),
            row(8.0, 8.0, data_ms=0.0),
        ),
        {"data": 0.05, "host": 0.1},
    ),
    "a batch that comes sooner gains a GPU nothing": (
        (
            row(10.0, 10.0, 10.0, data_ms=0.0, device_ms_by_rank=[8.5, 8.5]),
            row(8.0, 8.0, data_ms=1.0),
        ),
        {"data": 0.0, "host": 0.15},
    ),
    "on a CPU all waiting for data is lost": (
        (row(10.0, 9.0, 9.0, data_ms=1.5, **CPU), row(8.0, 8.0, data_ms=0.5, **CPU)),
        {"data": 0.1, "compute": 0.0, "host": None},
    ),
    "in strong scaling work that does not shrink is lost": (
        (row(6.0, 6.0, 6.0), row(10.0, 10.0), 0.5),
        {"compute": 1 / 6, "unexplained": 0.0},
    ),
    "a baseline of several ranks keeps its own communication and slow rank": (
        (row(10.0, 8.5, 7.5, 7.5, 7.5), row(9.0, 8.0, 7.5)),
        {"comm": 0.05, "wait": 0.05, "compute": 0.0},
    ),
}


@pytest.mark.parametrize(("points", "expected"), LOST.values(), ids=LOST)
def test_a_loss_has_its_causes(points, expected):
    found = lost(*points)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)


def test_without_a_breakdown_all_is_unexplained():
    bare = {"device_type": "cuda", "step_ms_mean": 99.0}
    four, one = (make_row(world_size=n, step_ms_p50=ms, **bare) for n, ms in ((4, 10.0), (1, 8.0)))
    found = lost(four, one)
    assert found.pop("unexplained") == pytest.approx(0.2)
    assert set(found.values()) == {None}


MS = st.floats(0.1, 1000.0)


@given(
    st.lists(MS, min_size=2, max_size=8),
    st.lists(MS, min_size=1, max_size=4),
    *(MS,) * 4,
    st.floats(0.1, 1.0),
)
def test_loss_shares_follow_the_step_time_identity(
    local, base_local, step_ms, base_ms, comm_ms, idle, work
):
    """1 - efficiency = X/S + E/S + (M - w M_base)/S - w (X_base + E_base)/S, for any figures."""
    point = row(step_ms, *local, comm_ms=comm_ms, device_ms_by_rank=[ms - idle for ms in local])
    base = row(base_ms, *base_local)
    found = lost(point, base, work)
    explained = min(max(0.0, step_ms - max(local)), comm_ms)
    beyond = (step_ms - max(local)) - explained
    of_base = base_ms - max(base_local)
    if len(base_local) > 1:
        of_base -= min(max(0.0, of_base), 100.0)
    assert found["unexplained"] * step_ms == pytest.approx(beyond - work * of_base, abs=1e-6)
