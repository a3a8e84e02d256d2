from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from builders import (
    make_device,
    make_failed,
    make_measure,
    make_measurement,
    make_point,
    make_record,
)

from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.scaling import scaling
from raybench.analysis.settings import setting_order
from raybench.analysis.step_times import rank_steps
from raybench.job.point import Precision
from raybench.records import Breakdown, Record, Status
from raybench.results import rows
from raybench.results.schema import TABLES


def frame(records: Iterable[Record], table: str = "points") -> pd.DataFrame:
    """The rows as `raybench.load` gives them."""
    content = [rows.point_row("run-a", record, make_measure()) for record in records]
    return pd.DataFrame(content, columns=[column.name for column in TABLES[table]])


def ran(world_size: int, step_ms: float, **settings: object) -> Record:
    """A point whose steps all take `step_ms`."""
    point = make_point(world_size=world_size, **settings)
    steps = [round(step_ms * 1e6)] * 6
    measurements = tuple(
        make_measurement(rank, [steps], items_per_step=point.batch_size)
        for rank in range(world_size)
    )
    return make_record(point, measurements=measurements)


def test_weak_scaling_compares_equal_batches_per_device() -> None:
    found = scaling(frame([ran(1, 10.0), ran(2, 10.0), ran(4, 16.0)]), {"world_size": 1})
    assert list(found["speed_up"]) == pytest.approx([1.0, 2.0, 2.5])
    assert list(found["efficiency"]) == pytest.approx([1.0, 1.0, 0.625])
    assert list(found["is_baseline"]) == [True, False, False]
    assert list(found["series"]) == [0, 0, 0]


def test_strong_scaling_compares_equal_global_batches() -> None:
    records = [
        ran(size, ms, scaling="strong", batch_size=64 // size, global_batch_size=64)
        for size, ms in ((1, 8.0), (2, 5.0), (4, 4.0))
    ]
    found = scaling(frame(records), {"world_size": 1})
    assert list(found["speed_up"]) == pytest.approx([1.0, 1.6, 2.0])
    assert list(found["efficiency"]) == pytest.approx([1.0, 0.8, 0.5])
    assert set(found["batch"]) == {64}


def test_weak_and_strong_points_are_never_compared() -> None:
    strong = ran(2, 5.0, scaling="strong", batch_size=64, global_batch_size=64)
    found = scaling(frame([ran(1, 10.0), strong]), {"world_size": 1})
    assert found["series"].nunique() == 2
    assert found["why"].iloc[1] == "no ok point with world_size=1 in this series"


@pytest.mark.parametrize(
    "other",
    [
        {"precision": Precision.BF16},
        {"batch_size": 128},
        {"workload": "linear"},
        {"params": {"grad_accumulation": 1, "hidden": 1, "layers": 8}},
    ],
)
def test_a_point_that_differs_in_any_other_setting_is_another_series(
    other: dict[str, object],
) -> None:
    found = scaling(frame([ran(1, 10.0), ran(2, 10.0, **other)]), {"world_size": 1})
    assert list(found["series"]) == [0, 1]
    assert found["speed_up"].isna().tolist() == [False, True]


def test_the_speed_up_of_a_parameter_has_no_efficiency() -> None:
    records = [
        ran(2, ms, params={"grad_accumulation": count}) for count, ms in ((1, 10.0), (4, 30.0))
    ]
    found = scaling(frame(records), {"grad_accumulation": "1"})
    assert found["speed_up"].iloc[1] == pytest.approx(1 / 3)
    assert found["efficiency"].isna().all()


def test_a_baseline_number_is_found_however_it_is_written() -> None:
    records = [ran(1, 1.0, params={"lr": 0.5}), ran(1, 2.0, params={"lr": 2.0})]
    assert list(scaling(frame(records), {"lr": 2})["is_baseline"]) == [False, True]
    assert list(scaling(frame(records), {"lr": "2.00"})["is_baseline"]) == [False, True]
    flags = [ran(1, 1.0, params={"compile": True}), ran(1, 2.0, params={"compile": False})]
    assert list(scaling(frame(flags), {"compile": True})["is_baseline"]) == [True, False]


def test_a_baseline_that_failed_gives_no_efficiency_and_says_so() -> None:
    found = scaling(frame([make_failed(), ran(2, 10.0)]), {"world_size": 1})
    assert found["speed_up"].isna().all()
    assert pd.isna(found["why"].iloc[0])
    assert found["why"].iloc[1] == "baseline point ran out of memory"


def test_a_baseline_on_another_device_gives_no_efficiency() -> None:
    other = make_record(devices=(make_device(name="NVIDIA A100"),))
    found = scaling(frame([other, ran(2, 10.0)]), {"world_size": 1})
    assert found["why"].iloc[1] == "baseline point ran on another device: NVIDIA A100"
    assert found["efficiency"].isna().iloc[1]


def test_without_a_baseline_nothing_is_compared() -> None:
    found = scaling(frame([ran(1, 10.0)]), {})
    assert found["why"].tolist() == ["the job names no baseline"]
    assert not found["is_baseline"].any()


@pytest.mark.parametrize("stored", [list, np.array], ids=["list", "array"])
def test_a_workload_that_does_not_say_what_it_finishes_is_the_reason_for_no_speed_up(
    stored: Callable[[list[str]], object],
) -> None:
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
    points = frame(silent)
    points["warnings"] = points["warnings"].map(stored)
    told = "no throughput: the workload does not set items_per_step"
    assert list(scaling(points, {"world_size": 1})["why"]) == [told, told]
    assert list(scaling(points, {})["why"]) == [None, None]
    collective = make_point(batch_size=None, global_batch_size=None, scaling=None)
    (row,) = frame([replace(silent[0], point=collective)]).to_dict("records")
    assert told not in row["warnings"]


def test_ranks_without_collectives_are_told_why_there_are_no_parts() -> None:
    told = "no collective of torch.distributed was seen in a step"
    unknown = Breakdown(methods={"comm_exposed_ms": f"unknown: {told}"})
    record = ran(2, 10.0)
    measured = tuple(replace(m, breakdown=unknown) for m in record.measurements)
    (row,) = frame([replace(record, measurements=measured)]).to_dict("records")
    assert f"no breakdown on several ranks: {told}" in row["warnings"]
    (row,) = frame([record]).to_dict("records")
    assert not any(told in warning for warning in row["warnings"])


def test_points_without_samples_are_not_compared_and_need_no_reason() -> None:
    nothing = {"batch_size": None, "global_batch_size": None, "scaling": None}
    points = [make_point(world_size=size, **nothing) for size in (1, 2)]
    ranks = (make_measurement(0, [[1_000_000] * 6], items_per_step=None),)
    found = scaling(frame(make_record(p, measurements=ranks) for p in points), {"world_size": 1})
    assert found["speed_up"].isna().all()
    assert found["why"].isna().all()
    assert list(found["batch"]) == [None, None]


def test_a_cuda_graph_makes_a_series_unless_it_is_what_is_compared() -> None:
    replayed, plain = ran(1, 5.0, cuda_graph=True), ran(1, 10.0, cuda_graph=False)
    assert scaling(frame([plain, replayed]), {"world_size": 1})["series"].nunique() == 2
    found = scaling(frame([plain, replayed]), {"cuda_graph": False})
    assert list(found["speed_up"]) == pytest.approx([1.0, 2.0])


def test_failed_and_skipped_points_stay_with_their_reason() -> None:
    skipped = make_failed(
        make_point(world_size=8), status=Status.SKIPPED, devices=(), error_message="too big"
    )
    found = scaling(frame([ran(1, 10.0), skipped]), {"world_size": 1})
    assert found["status"].tolist() == ["ok", "skipped"]
    assert found["error_message"].iloc[1] == "too big"
    assert found["series"].tolist() == [0, 0]


def test_the_latest_attempt_at_a_point_counts_in_the_place_of_the_first() -> None:
    retried = make_record(step_ms=5.0, attempt=2)
    points = frame([retried, ran(2, 10.0), make_failed()])
    latest = mean_of_rounds(points)
    assert latest["attempt"].tolist() == [2, 1]
    assert scaling(points, {"world_size": 1})["speed_up"].notna().all()


def test_the_frame_it_is_given_stays_as_it_was_and_an_empty_one_is_fine() -> None:
    points = frame([ran(1, 10.0), ran(2, 10.0)])
    before = points.copy(deep=True)
    scaling(points, {"world_size": 1})
    pd.testing.assert_frame_equal(points, before)
    empty = scaling(frame([]), {"world_size": 1})
    assert empty.empty
    assert empty["efficiency"].dtype == "float64"


def test_settings_sort_by_size_then_precision_then_name() -> None:
    mixed = ["bf16", "16", 4, "fp32", "adam", "8", "tf32"]
    assert sorted(mixed, key=setting_order) == [4, "8", "16", "fp32", "tf32", "bf16", "adam"]


def test_ranks_are_summarised_without_their_warm_up() -> None:
    record = make_record(
        make_point(world_size=2),
        measurements=(
            make_measurement(0, [[1_000_000, 3_000_000, 2_000_000]]),
            make_measurement(1, [[4_000_000] * 3]),
        ),
    )
    found = rank_steps(pd.DataFrame(rows.sample_columns("run-a", record)))
    assert found.pop("data_ms").isna().all()
    assert found.to_dict("list") == {
        "rank": [0, 1],
        "iterations": [3, 3],
        "median_ms": [2.0, 4.0],
        "min_ms": [1.0, 4.0],
        "max_ms": [3.0, 4.0],
    }


def test_a_training_point_without_its_batch_has_none() -> None:
    points = frame([ran(1, 10.0)]).assign(batch_size=None)
    assert scaling(points, {"world_size": 1})["batch"].tolist() == [None]


def test_points_under_the_power_cap_at_equal_clocks_are_compared() -> None:
    points = frame([ran(1, 10.0), ran(2, 12.5)]).assign(
        throttled=True, sm_clock_mhz_p50=[1755.0, 1740.0]
    )
    points["throttle_reasons"] = [["power_cap"], ["power_cap"]]
    found = scaling(points, {"world_size": 1})
    assert list(found["speed_up"]) == pytest.approx([1.0, 1.6])
    assert found["why"].isna().all()


@pytest.mark.parametrize(
    ("reasons", "clocks", "is_compared"),
    [
        ((["power_cap"], ["power_cap"]), (1815.0, 1965.0), True),
        ((["power_cap"], []), (1830.0, 1980.0), True),
        (([], ["power_cap"]), (1980.0, 1830.0), True),
        # The lower clocks have no known reason.
        (([], ["power_cap"]), (1830.0, 1980.0), False),
    ],
)
def test_clocks_that_a_power_cap_holds_apart_are_part_of_the_speed_up(
    reasons: tuple[list[str], ...], clocks: tuple[float, float], is_compared: bool
) -> None:
    points = frame([ran(1, 10.0), ran(2, 12.5)]).assign(sm_clock_mhz_p50=clocks)
    points["throttled"] = [bool(one) for one in reasons]
    points["throttle_reasons"] = list(reasons)
    found = scaling(points, {"world_size": 1})
    assert found["speed_up"].notna().iloc[1] == is_compared
    assert found["why"].isna().iloc[1] == is_compared
    ratio = found["clock_ratio"]
    assert pd.isna(ratio.iloc[0])
    assert ratio.iloc[1] == pytest.approx(clocks[1] / clocks[0]) if is_compared else True


def test_without_known_clocks_the_power_cap_alone_refuses_nothing() -> None:
    points = frame([ran(1, 10.0), ran(2, 12.5)]).assign(throttled=[True, False])
    points["throttle_reasons"] = [["power_cap"], []]
    assert scaling(points, {"world_size": 1})["speed_up"].notna().all()


def test_points_whose_clocks_differ_by_more_than_a_percent_are_not_compared() -> None:
    points = frame([ran(1, 10.0), ran(2, 12.5)]).assign(sm_clock_mhz_p50=[1980.0, 1900.0])
    found = scaling(points, {"world_size": 1})
    assert found["why"].iloc[1] == "SM clocks differ: 1900 MHz, and 1980 MHz at the baseline point"
    assert found["speed_up"].isna().iloc[1]


@pytest.mark.parametrize(
    ("place", "where"), [(0, "the baseline point"), (1, "this point")], ids=["baseline", "point"]
)
@pytest.mark.parametrize("reason", ["thermal_sw", "thermal_hw", "power_brake"])
def test_heat_and_faults_refuse_the_ratio_at_either_point(
    place: int, where: str, reason: str
) -> None:
    points = frame([ran(1, 10.0), ran(2, 12.5)])
    points["throttled"] = [number == place for number in range(2)]
    points["throttle_reasons"] = [
        ["power_cap", reason] if number == place else [] for number in range(2)
    ]
    why = scaling(points, {"world_size": 1})["why"].iloc[1]
    assert why == f"clocks were limited at {where} ({reason})"


def test_two_points_that_match_the_baseline_are_told_and_nothing_is_compared() -> None:
    records = [ran(1, ms, params={"rate": rate}) for rate, ms in (("1", 8.0), ("1.0", 9.0))]
    other = ran(1, 4.0, params={"rate": "2"})
    found = scaling(frame([*records, other]), {"rate": "1"})
    first, second = found["point_id"].iloc[:2]
    why = f"2 points match the baseline of this series: {first} and {second}"
    assert found["why"].tolist() == [why] * 3
    assert found["speed_up"].isna().all()


def test_a_throughput_of_zero_is_compared_with_nothing() -> None:
    points = frame([ran(1, 10.0), ran(2, 10.0)])
    at_base = scaling(points.assign(throughput=[0.0, 12_800.0]), {"world_size": 1})
    assert at_base["why"].iloc[1] == "baseline point has no throughput"
    at_point = scaling(points.assign(throughput=[6_400.0, 0.0]), {"world_size": 1})
    assert at_point["speed_up"].isna().tolist() == [False, True]


def test_the_serial_fraction_is_of_one_device_where_the_baseline_has_several() -> None:
    serial = 0.02
    records = [
        ran(
            size,
            8.0 * (serial + (1 - serial) / size),
            scaling="strong",
            batch_size=64 // size,
            global_batch_size=64,
        )
        for size in (2, 4, 8)
    ]
    found = scaling(frame(records), {"world_size": 2})
    assert list(found["serial_fraction"].iloc[1:]) == pytest.approx([serial] * 2, rel=1e-4)
