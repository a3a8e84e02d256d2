"""The sentence that a report leads with."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import pytest
from builders import make_failed, make_measure, make_measurement, make_point, make_record

from raybench.analysis.losses import LOSSES
from raybench.analysis.rounds import records
from raybench.analysis.scaling import best_settings, scaling
from raybench.job.point import Precision
from raybench.records import Breakdown, Record
from raybench.report.findings import bests
from raybench.report.headline import headline
from raybench.results import rows
from raybench.results.quality import BREAKDOWN
from raybench.results.schema import TABLES


def point_rows(records: list[Record], baseline: dict[str, object]) -> list[dict[str, object]]:
    return frame(records, baseline).to_dict("records")  # type: ignore[return-value]


def frame(records: list[Record], baseline: dict[str, object], **columns: object) -> pd.DataFrame:
    return scaling(table(records, **columns), baseline)  # type: ignore[arg-type]


def table(records: list[Record], **columns: object) -> pd.DataFrame:
    content = [rows.point_row("run-a", r, make_measure()) | columns for r in records]
    return pd.DataFrame(content, columns=[column.name for column in TABLES["points"]])


def said(records: list[Record], baseline: dict[str, object]) -> str:
    return headline(point_rows(records, baseline), baseline, "GPUs")


def ran(world_size: int, step_ms: float, precision: Precision = Precision.FP32) -> Record:
    point = make_point(world_size=world_size, precision=precision)
    ranks = tuple(
        make_measurement(rank, [[round(step_ms * 1e6)] * 6], items_per_step=64)
        for rank in range(world_size)
    )
    return make_record(point, measurements=ranks)


def test_one_series_is_told_without_best_and_worst() -> None:
    assert said([ran(1, 8.0), ran(2, 9.0), ran(4, 10.0)], {"world_size": 1}) == (
        "4 GPUs do 3.20 times the samples/s of 1 GPU, 80.0% efficiency (fp32, batch 64); "
        "what the rest is lost to was not measured"
    )


def test_nothing_is_said_of_a_loss_that_is_none() -> None:
    found = said([ran(1, 8.0), ran(2, 8.02)], {"world_size": 1})
    assert found == (
        "2 GPUs do 2.00 times the samples/s of 1 GPU, 99.8% efficiency (fp32, batch 64)"
    )


def test_without_a_baseline_point_it_says_why_and_what_is_left() -> None:
    assert said([make_failed(make_point()), ran(2, 8.0)], {"world_size": 1}) == (
        "no speed-up: baseline point ran out of memory; "
        "at most 16,000 samples/s (fp32, batch 64, 2 GPUs)"
    )


def test_another_baseline_is_told_as_times_as_fast() -> None:
    records = [ran(1, 8.0), ran(1, 4.0, Precision.BF16), ran(1, 5.0, Precision.TF32)]
    assert said(records, {"precision": "fp32"}) == (
        "bf16 is 2.00 times as fast as fp32 (batch 64), with 100.0% of the memory"
    )


def test_a_run_without_an_ok_point_leads_with_nothing() -> None:
    assert said([make_failed()], {"world_size": 1}) == ""
    assert said([], {}) == ""


def test_a_throttled_baseline_gives_no_figure_and_says_why() -> None:
    found = frame([ran(1, 8.0), ran(2, 9.0)], {"world_size": 1}, throttled=True)
    assert found["speed_up"].isna().all()
    assert found["lost_unexplained"].isna().all()
    assert set(found["why"]) == {"clocks were limited at the baseline point (reason unknown)"}


def test_a_speed_up_over_an_unsteady_baseline_stands_and_is_said_to_be_one() -> None:
    points = table([ran(1, 8.0), ran(2, 9.0)])
    found = scaling(points.assign(stable=[False, True]), {"world_size": 1})
    assert found["speed_up"].notna().all()
    told = headline(found.to_dict("records"), {"world_size": 1}, "GPUs")  # type: ignore[arg-type]
    assert "(fp32, batch 64, against an unsteady point)" in told
    both = scaling(points.assign(stable=False), {"world_size": 1})
    told = headline(both.to_dict("records"), {"world_size": 1}, "GPUs")  # type: ignore[arg-type]
    assert "(fp32, batch 64, unsteady)" in told


def in_rounds(count: int, *records: Record) -> list[Record]:
    """Each record in so many rounds, of which each is 1 % slower than the one before."""
    return [
        replace(
            record,
            round=number,
            attempt=number,
            measurements=tuple(
                make_measurement(
                    rank,
                    [[round(one.repetitions[0].timed.step_ns[0] * 1.01**number)] * 6],
                    items_per_step=64,
                )
                for rank, one in enumerate(record.measurements)
            ),
        )
        for number in range(1, count + 1)
        for record in records
    ]


def test_one_series_in_several_rounds_has_an_interval() -> None:
    told = said(in_rounds(3, ran(1, 8.0), ran(2, 9.0)), {"world_size": 1})
    assert re.match(r"2 GPUs do 1\.78 ±0\.\d\d% times the samples/s of 1 GPU, 88\.9%", told)


def test_the_range_over_settings_has_no_interval() -> None:
    records = [
        ran(n, ms * n**0.5, p)
        for p, ms in ((Precision.FP32, 8.0), (Precision.BF16, 4.0))
        for n in (1, 2)
    ]
    told = said(in_rounds(3, *records, ran(4, 9.0), ran(4, 4.4, Precision.BF16)), {"world_size": 1})
    assert told.startswith(
        "4 GPUs do 3.56 (fp32) to 3.64 (bf16) times the samples/s of 1 GPU, 88.9% to 90.9%"
    )
    assert "±" not in told


def test_a_baseline_that_is_known_badly_still_gives_a_value() -> None:
    wide = table([ran(1, 8.0), ran(2, 9.0)]).assign(
        step_ms_ci_low=1.0, step_ms_ci_high=20.0, iterations=20
    )
    told = headline(records(scaling(wide, {"world_size": 1})), {"world_size": 1}, "GPUs")
    assert told.startswith(
        "2 GPUs do 1.78 times the samples/s of 1 GPU, 88.9% efficiency (fp32, batch 64, wide)"
    )


def test_the_serial_fraction_is_of_strong_scaling_alone() -> None:
    points = [
        make_point(scaling="strong", world_size=n, batch_size=64 // n, global_batch_size=64)
        for n in (1, 4)
    ]
    records = [
        make_record(
            point,
            measurements=tuple(
                make_measurement(r, [[ms * 1_000_000] * 6], items_per_step=point.batch_size)
                for r in range(point.world_size)
            ),
        )
        for point, ms in zip(points, (8, 4), strict=True)
    ]
    # Speed-up 2 on 4 devices: (1/2 - 1/4) / (1 - 1/4).
    assert frame(records, {"world_size": 1})["serial_fraction"].iloc[1] == pytest.approx(1 / 3)
    weak = frame([ran(1, 8.0), ran(4, 10.0)], {"world_size": 1})
    assert weak["serial_fraction"].isna().all()


def test_the_best_settings_name_a_rival_that_cannot_be_told_apart() -> None:
    found = frame([ran(1, 8.0), ran(1, 4.0, Precision.BF16), ran(2, 8.0)], {"world_size": 1})
    [best] = best_settings(found).to_dict("records")
    assert (best["precision"], best["batch"], best["world_size"]) == ("bf16", 64, 1)
    assert (best["value"], best["rival_point_id"]) == (16_000, None)
    close = frame([ran(1, 4.1), ran(1, 4.0, Precision.BF16)], {"world_size": 1})
    close["step_ms_low"] = close["step_ms_p50"] * 0.95
    close["step_ms_high"] = close["step_ms_p50"] * 1.05
    [best] = best_settings(close).to_dict("records")
    told = bests([best], close.to_dict("records"), "GPUs")  # type: ignore[arg-type]
    assert told == (("1 GPU", "bf16, batch 64: 16,000 samples/s; fp32, batch 64 may be as good"),)
    [best] = best_settings(close.assign(stable=False)).to_dict("records")
    told = bests([best], close.assign(stable=False).to_dict("records"), "GPUs")  # type: ignore[arg-type]
    assert told[0][1].startswith("bf16, batch 64: 16,000 samples/s (unsteady); fp32")


def broken_down(world_size: int, step_ms: float, compute_ms: float) -> Record:
    """A point whose local step took `compute_ms`."""
    record = ran(world_size, step_ms)
    steps = (compute_ms,) * 3
    parts = Breakdown(local_ms=(steps, steps), device_ms=compute_ms, optimizer_ms=0.5)
    ranks = tuple(replace(m, breakdown=parts) for m in record.measurements)
    return replace(record, measurements=ranks)


def test_parts_that_exceed_the_step_feed_neither_a_share_nor_a_sentence() -> None:
    base: dict[str, object] = {"world_size": 1}
    found = frame([broken_down(1, 8.0, 8.0), broken_down(2, 8.9, 18.0)], base)
    assert found["why_no_breakdown"].isna().tolist() == [True, False]
    assert found["why_no_breakdown"].iloc[1] == (
        "no breakdown: the parts come to 18 ms, the step takes 8.9 ms; the instrumented steps "
        "were slower than the timed ones"
    )
    assert found["compute_ms"].tolist()[0] == pytest.approx(7.5)
    point = found.iloc[1]
    assert all(pd.isna(point[name]) for name in (*BREAKDOWN, "host_bound", *LOSSES))
    assert headline(found.to_dict("records"), base, "GPUs") == (  # type: ignore[arg-type]
        "2 GPUs do 1.80 times the samples/s of 1 GPU, 89.9% efficiency (fp32, batch 64, "
        "without a breakdown); what the rest is lost to is not known: the parts of the step "
        "exceed it"
    )


def test_a_baseline_whose_parts_exceed_its_step_explains_no_loss() -> None:
    found = frame([broken_down(1, 8.0, 18.0), broken_down(2, 8.9, 8.9)], {"world_size": 1})
    point = found.iloc[1]
    assert point["compute_ms"] == pytest.approx(8.4)
    assert all(pd.isna(point[name]) for name in LOSSES)


def test_samples_per_joule_are_those_of_all_timed_steps() -> None:
    found = frame([ran(1, 8.0), ran(1, 4.0, Precision.BF16)], {"world_size": 1}, energy_j=12.0)
    # Six steps of 64 samples.
    assert found["samples_per_joule"].tolist() == pytest.approx([32.0, 32.0])
    assert set(best_settings(found)["by"]) == {"throughput", "samples_per_joule"}
