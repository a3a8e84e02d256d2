from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from builders import (
    make_failed,
    make_measurement,
    make_point,
    make_record,
    make_steady,
    points_table,
)

from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.scaling import scaling
from raybench.analysis.settings import setting_order
from raybench.job.point import Precision
from raybench.records import Breakdown


def test_weak_scaling_compares_equal_batches_per_device():
    found = scaling(
        points_table([make_steady(1, 10.0), make_steady(2, 10.0), make_steady(4, 16.0)]),
        {"world_size": 1},
    )
    assert list(found["speed_up"]) == pytest.approx([1.0, 2.0, 2.5])
    assert list(found["efficiency"]) == pytest.approx([1.0, 1.0, 0.625])
    assert list(found["is_baseline"]) == [True, False, False]
    assert list(found["series"]) == [0, 0, 0]


def test_strong_scaling_compares_equal_global_batches():
    records = [
        make_steady(size, ms, scaling="strong", batch_size=64 // size, global_batch_size=64)
        for size, ms in ((1, 8.0), (2, 5.0), (4, 4.0))
    ]
    found = scaling(points_table(records), {"world_size": 1})
    assert list(found["speed_up"]) == pytest.approx([1.0, 1.6, 2.0])
    assert list(found["efficiency"]) == pytest.approx([1.0, 0.8, 0.5])
    assert set(found["batch"]) == {64}


def test_weak_and_strong_points_are_never_compared():
    strong = make_steady(2, 5.0, scaling="strong", batch_size=64, global_batch_size=64)
    found = scaling(points_table([make_steady(1, 10.0), strong]), {"world_size": 1})
    assert found["series"].nunique() == 2
    assert found["why"].iloc[1] == "no ok point with world_size=1 in this series"


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
def test_a_point_that_differs_in_any_other_setting_is_another_series(other):
    found = scaling(
        points_table([make_steady(1, 10.0), make_steady(2, 10.0, **other)]), {"world_size": 1}
    )
    assert list(found["series"]) == [0, 1]
    assert found["speed_up"].isna().tolist() == [False, True]


def test_the_speed_up_of_a_parameter_has_no_efficiency():
    records = [
        make_steady(2, ms, params={"grad_accumulation": count})
        for count, ms in ((1, 10.0), (4, 30.0))
    ]
    found = scaling(points_table(records), {"grad_accumulation": "1"})
    assert found["speed_up"].iloc[1] == pytest.approx(1 / 3)
    assert found["efficiency"].isna().all()


def test_a_baseline_number_is_found_however_it_is_written():
    records = [make_steady(1, 1.0, params={"lr": 0.5}), make_steady(1, 2.0, params={"lr": 2.0})]
    assert list(scaling(points_table(records), {"lr": 2})["is_baseline"]) == [False, True]
    assert list(scaling(points_table(records), {"lr": "2.00"})["is_baseline"]) == [False, True]
    flags = [
        make_steady(1, 1.0, params={"compile": True}),
        make_steady(1, 2.0, params={"compile": False}),
    ]
    assert list(scaling(points_table(flags), {"compile": True})["is_baseline"]) == [True, False]


def test_a_baseline_that_failed_gives_no_efficiency_and_says_so():
    found = scaling(points_table([make_failed(), make_steady(2, 10.0)]), {"world_size": 1})
    assert found["speed_up"].isna().all()
    assert pd.isna(found["why"].iloc[0])
    assert found["why"].iloc[1] == "baseline point ran out of memory"


def test_without_a_baseline_nothing_is_compared():
    found = scaling(points_table([make_steady(1, 10.0)]), {})
    assert found["why"].tolist() == ["the job names no baseline"]
    assert not found["is_baseline"].any()


@pytest.mark.parametrize("stored", [list, np.array], ids=["list", "array"])
def test_a_workload_that_does_not_say_what_it_finishes_is_the_reason_for_no_speed_up(stored):
    silent = [
        make_record(
            make_point(world_size=size),
            measurements=tuple(
                make_measurement(rank, [[1_000_000] * 6], items_per_step=None)
                for rank in range(size)
            ),
        )
        for size in (1, 2)
    ]
    points = points_table(silent)
    points["warnings"] = points["warnings"].map(stored)
    told = "no throughput: the workload does not set items_per_step"
    assert list(scaling(points, {"world_size": 1})["why"]) == [told, told]
    assert list(scaling(points, {})["why"]) == [None, None]
    collective = make_point(batch_size=None, global_batch_size=None, scaling=None)
    (row,) = points_table([replace(silent[0], point=collective)]).to_dict("records")
    assert told not in row["warnings"]


def test_ranks_without_collectives_are_told_why_there_are_no_parts():
    told = "no collective of torch.distributed was seen in a step"
    unknown = Breakdown(methods={"comm_exposed_ms": f"unknown: {told}"})
    record = make_steady(2, 10.0)
    measured = tuple(replace(m, breakdown=unknown) for m in record.measurements)
    (row,) = points_table([replace(record, measurements=measured)]).to_dict("records")
    assert f"no breakdown on several ranks: {told}" in row["warnings"]
    (row,) = points_table([record]).to_dict("records")
    assert not any(told in warning for warning in row["warnings"])


def test_points_without_samples_are_not_compared_and_need_no_reason():
    nothing = {"batch_size": None, "global_batch_size": None, "scaling": None}
    points = [make_point(world_size=size, **nothing) for size in (1, 2)]
    ranks = (make_measurement(0, [[1_000_000] * 6], items_per_step=None),)
    found = scaling(
        points_table(make_record(p, measurements=ranks) for p in points), {"world_size": 1}
    )
    assert found["speed_up"].isna().all()
    assert found["why"].isna().all()
    assert list(found["batch"]) == [None, None]


def test_the_latest_attempt_at_a_point_counts_in_the_place_of_the_first():
    retried = make_record(step_ms=5.0, attempt=2)
    points = points_table([retried, make_steady(2, 10.0), make_failed()])
    latest = mean_of_rounds(points)
    assert latest["attempt"].tolist() == [2, 1]
    assert scaling(points, {"world_size": 1})["speed_up"].notna().all()


def test_the_frame_it_is_given_stays_as_it_was_and_an_empty_one_is_fine():
    points = points_table([make_steady(1, 10.0), make_steady(2, 10.0)])
    before = points.copy(deep=True)
    scaling(points, {"world_size": 1})
    pd.testing.assert_frame_equal(points, before)
    empty = scaling(points_table([]), {"world_size": 1})
    assert empty.empty
    assert empty["efficiency"].dtype == "float64"


def test_settings_sort_by_size_then_precision_then_name():
    mixed = ["bf16", "16", 4, "fp32", "adam", "8", "tf32"]
    assert sorted(mixed, key=setting_order) == [4, "8", "16", "fp32", "tf32", "bf16", "adam"]


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
def test_clocks_that_a_power_cap_holds_apart_are_part_of_the_speed_up(reasons, clocks, ratio):
    found = _capped(reasons, clocks)
    assert list(found["speed_up"]) == pytest.approx([1.0, 1.6])
    assert found["why"].isna().all()
    told = found["clock_ratio"]
    assert pd.isna(told.iloc[0])
    assert pd.isna(told.iloc[1]) if ratio is None else told.iloc[1] == pytest.approx(ratio)


def test_lower_clocks_without_a_known_reason_refuse_the_speed_up():
    found = _capped(([], ["power_cap"]), (1830.0, 1980.0))
    assert found["speed_up"].isna().iloc[1]
    assert found["why"].notna().iloc[1]


def _capped(reasons, clocks):
    points = points_table([make_steady(1, 10.0), make_steady(2, 12.5)]).assign(
        sm_clock_mhz_p50=clocks
    )
    points["throttled"] = [bool(one) for one in reasons]
    points["throttle_reasons"] = list(reasons)
    return scaling(points, {"world_size": 1})


def test_points_whose_clocks_differ_by_more_than_a_percent_are_not_compared():
    points = points_table([make_steady(1, 10.0), make_steady(2, 12.5)]).assign(
        sm_clock_mhz_p50=[1980.0, 1900.0]
    )
    found = scaling(points, {"world_size": 1})
    assert found["why"].iloc[1] == "SM clocks differ: 1900 MHz, and 1980 MHz at the baseline point"
    assert found["speed_up"].isna().iloc[1]


@pytest.mark.parametrize(
    ("place", "where"), [(0, "the baseline point"), (1, "this point")], ids=["baseline", "point"]
)
@pytest.mark.parametrize("reason", ["thermal_sw", "thermal_hw", "power_brake"])
def test_heat_and_faults_refuse_the_ratio_at_either_point(place, where, reason):
    points = points_table([make_steady(1, 10.0), make_steady(2, 12.5)])
    points["throttled"] = [number == place for number in range(2)]
    points["throttle_reasons"] = [
        ["power_cap", reason] if number == place else [] for number in range(2)
    ]
    why = scaling(points, {"world_size": 1})["why"].iloc[1]
    assert why == f"clocks were limited at {where} ({reason})"


def test_two_points_that_match_the_baseline_are_told_and_nothing_is_compared():
    records = [make_steady(1, ms, params={"rate": rate}) for rate, ms in (("1", 8.0), ("1.0", 9.0))]
    other = make_steady(1, 4.0, params={"rate": "2"})
    found = scaling(points_table([*records, other]), {"rate": "1"})
    first, second = found["point_id"].iloc[:2]
    why = f"2 points match the baseline of this series: {first} and {second}"
    assert found["why"].tolist() == [why] * 3
    assert found["speed_up"].isna().all()


def test_a_throughput_of_zero_is_compared_with_nothing():
    points = points_table([make_steady(1, 10.0), make_steady(2, 10.0)])
    at_base = scaling(points.assign(throughput=[0.0, 12_800.0]), {"world_size": 1})
    assert at_base["why"].iloc[1] == "baseline point has no throughput"
    at_point = scaling(points.assign(throughput=[6_400.0, 0.0]), {"world_size": 1})
    assert at_point["speed_up"].isna().tolist() == [False, True]


def test_the_serial_fraction_is_of_one_device_where_the_baseline_has_several():
    serial = 0.02
    records = [
        make_steady(
            size,
            8.0 * (serial + (1 - serial) / size),
            scaling="strong",
            batch_size=64 // size,
            global_batch_size=64,
        )
        for size in (2, 4, 8)
    ]
    found = scaling(points_table(records), {"world_size": 2})
    assert list(found["serial_fraction"].iloc[1:]) == pytest.approx([serial] * 2, rel=1e-4)
