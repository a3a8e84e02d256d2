"""The sentence that a report leads with, of every committed run and of runs that lack something."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from builders import make_failed, make_measure, make_measurement, make_point, make_record

import raybench
from raybench.analysis.losses import LOSSES
from raybench.analysis.scaling import best_settings, scaling
from raybench.cli.results import load_summary
from raybench.job.point import Precision, Scalar
from raybench.records import Breakdown, Record
from raybench.report.findings import bests
from raybench.report.headline import headline
from raybench.results import rows
from raybench.results.quality import BREAKDOWN
from raybench.results.schema import TABLES

RESULTS = Path(__file__).parents[3] / "results" / "examples"
CHECKS = {path.name for path in (RESULTS / "health").iterdir()}
# Without health checks, which have a report of their own.
RUNS = sorted({path.name for path in (RESULTS / "points").iterdir()} - CHECKS)
# Each was compared with the tables of its report; without what is said of how sure it is.
LEADS = {
    "environment-20261123-033443-153a": "TORCH_NCCL_BLOCKING_WAIT=1, NCCL_P2P_DISABLE=0 is 1.00 "
    "times as fast as TORCH_NCCL_BLOCKING_WAIT=0 NCCL_P2P_DISABLE=0 (tf32, batch 64), with 100.0% "
    "of the memory",
    "largest_batch-20261123-033543-5585": "the largest batch per device that fits is 139 (bf16, "
    "1 GPU, activation_checkpointing=false) to 192 (bf16, 1 GPU, activation_checkpointing=true)",
    "timing_ways-20261123-033641-43f4": "2 GPUs do 1.90 times the samples/s of 1 GPU, of which "
    "clocks 0.93, 95.0% efficiency (bf16, batch 32, unsteady, throttled); 1 of 2 settings is left "
    "out, known worse than; exposed communication is 60% of the loss",
    "uneven_gpus-20261123-033517-0d90": "shares=by_speed_accumulation is best here, by up to "
    "+42.1% over the best of the others (1 of 2 GPUs at 0.50 of the speed)",
    "accumulation_or_batch-20261123-021553-485e": ""
    "batch_size=4, grad_accumulation=2 is 0.75 times as fast as batch_size=8 "
    "grad_accumulation=1 (bf16, batch 4, host-bound), with 66.3% of the memory",
    "memory_of_a_step-20261123-021554-0e4c": ""
    "bf16 is 1.40 to 2.21 times as fast as tf32, with 77.2% to 100.0% of the memory; "
    "1 of 4 settings is left out, known worse than",
    "collectives-20261121-113112-4db3": "bus bandwidth with 1 GiB on 4 GPUs: "
    "324.9 GB/s (all_gather) to 359.5 GB/s (broadcast); "
    "4 KiB takes 5.572 µs (broadcast) to 13.40 µs (sendrecv)",
    "ddp_scaling-20261121-132844-4b9a": "4 GPUs do 3.48 times the samples/s of 1 GPU at best, "
    "87.0% efficiency (fp32, batch 1,024), and 2.29 times at worst, 57.2% efficiency "
    "(tf32, batch 64); exposed communication is 67% to 78% of the loss; "
    "at most 585,826 samples/s (bf16, batch 1,024, 4 GPUs)",
    "ddp_scaling-20261122-142621-6209": "4 GPUs do 3.47 times the samples/s of 1 GPU at best, "
    "86.7% efficiency (fp32, batch 1,024), and 2.29 times at worst, 57.2% efficiency "
    "(tf32, batch 64); exposed communication is 73% to 78% of the loss; "
    "at most 587,718 samples/s (bf16, batch 1,024, 4 GPUs)",
    "ddp_linear-20261122-231903-de3c": "2 GPUs do 1.47 times the samples/s of 1 GPU, "
    "73.7% efficiency (fp32, batch 64, unsteady, host-bound); "
    "waiting for the host is 41% of the loss; 5 of 6 points are not compared",
    "ddp_by_network-20261122-231944-f1ae": "2 GPUs do 0.067 times the samples/s of 1 GPU, "
    "3.3% efficiency (bf16, batch 1,024); exposed communication is 99% of the loss",
    "ddp_linear-20261120-194439-364b": "4 GPUs do 3.26 times the samples/s of 1 GPU at best, "
    "81.5% efficiency (data=dataloader, num_workers=2, pin_memory=true), and 2.44 times at worst, "
    "61.1% efficiency (data=device, num_workers=0, pin_memory=false); "
    "what the rest is lost to was not measured; "
    "at most 242,424 samples/s (fp32, batch 64, 4 GPUs, data=device, num_workers=0, "
    "pin_memory=false)",
    "decode_variants-20261122-200928-a11a": "at most 2,154 samples/s (bf16, batch 1, 1 GPU, "
    "cast_weights=true, compile=true, preset=124m)",
    "dit_module_vs_pipeline-20261123-021029-9d5b": (
        "2 GPUs do 1.66 times the samples/s of 1 GPU at best, of which clocks 1.06, 82.8% "
        "efficiency (scope=forward, unsteady, throttled), and 1.61 times at worst, of which "
        "clocks 1.04, 80.7% efficiency (scope=double_block, unsteady, throttled); slower compute "
        "is 56% to 63% of the loss; at most 534.9 samples/s (bf16, 2 GPUs, scope=single_block, "
        "throttled, against an unsteady point)"
    ),
    "dit_module_vs_pipeline-20261123-021133-e129": (
        "2 GPUs do 1.57 times the samples/s of 1 GPU at best, of which clocks 1.11, 78.7% "
        "efficiency (scope=loop, unsteady, throttled), and 1.57 times at worst, of which clocks "
        "1.14, 78.7% efficiency (scope=single_block, unsteady, throttled); exposed communication "
        "is 41% to 69% of the loss; at most 707.4 samples/s (bf16, 2 GPUs, scope=single_block, "
        "unsteady, throttled)"
    ),
    "dit_module_vs_pipeline-20261123-092721-a70f": (
        "2 GPUs do 1.66 times the samples/s of 1 GPU at best, of which clocks 1.08, 83.1% "
        "efficiency (scope=loop, unsteady, throttled), and 1.65 times at worst, of which clocks "
        "1.06, 82.6% efficiency (scope=single_block, throttled, against an unsteady point); "
        "slower compute is the largest loss in 1 of 2 settings; at most 538.8 samples/s (bf16, "
        "2 GPUs, scope=single_block, throttled, against an unsteady point)"
    ),
    "dit_module_vs_pipeline-20261123-100520-2205": (
        "2 GPUs do 1.68 times the samples/s of 1 GPU, of which clocks 1.10, 84.0% efficiency "
        "(bf16, unsteady, throttled); slower compute is 51% of the loss"
    ),
    "mixed_precision-20261123-100621-6924": (
        "bf16 is 5.15 to 6.68 times as fast as fp32, with 71.8% to 81.0% of the memory; 1 of 3 "
        "settings is left out, known worse than"
    ),
    "transformer_scaling-20261123-100814-e8ab": (
        "2 GPUs do 1.93 times the samples/s of 1 GPU at best, of which clocks 0.98, 96.5% "
        "efficiency (batch 32, preset=350m, unsteady, throttled), and 1.83 times at worst, "
        "91.7% efficiency (batch 8, preset=350m, unsteady, throttled); slower compute is the "
        "largest loss in 2 of 4 settings; at most 689.1 samples/s (bf16, batch 32, 2 GPUs, "
        "preset=124m, unsteady, throttled)"
    ),
    "uneven_gpus-20261123-101038-7c4b": (
        "shares=by_speed is best here, by up to +33.5% over the best of the others (1 of 2 GPUs "
        "at 0.60 of the speed)"
    ),
    "dit_sequence_parallel-20261123-000216-f4cc": (
        "2 GPUs do 1.65 times the samples/s of 1 GPU at best, of which clocks 1.07, 82.6% "
        "efficiency (compile=false, unsteady, throttled, slowed by one rank), and 1.59 times "
        "at worst, of which clocks 1.10, 79.5% efficiency (compile=true, throttled, against "
        "an unsteady point); slower compute is the largest loss in 3 of 4 settings; at most "
        "12.13 samples/s (bf16, 2 GPUs, compile=true, ring=2, ulysses=1, throttled, against "
        "an unsteady point)"
    ),
    "raw_latency-20261123-000340-2ec6": (
        "cuda_graph=true, compile=true is 1.08 times as fast as cuda_graph=false "
        "compile=false (bf16, batch 1, unsteady, throttled, not alone), with 100.0% of the "
        "memory; 4 of 6 points are not compared"
    ),
    "gemm-20261121-113145-0e78": "at most 793.8 TFLOP/s, 80.2% of the datasheet's peak "
    "(bf16, k=4096, m=4096, n=4096)",
    "gemm-20261122-143010-684e": "at most 671.5 TFLOP/s, 67.9% of the datasheet's peak "
    "(bf16, k=8192, m=8192, n=8192, unsteady, throttled); 797.8 TFLOP/s in its first 30 ms",
    "grad_accumulation-20261120-194523-581f": "4 GPUs do 3.84 times the samples/s of 1 GPU at "
    "best, 96.0% efficiency (grad_accumulation=8), and 3.28 times at worst, 81.9% efficiency "
    "(grad_accumulation=1); what the rest is lost to was not measured; "
    "at most 2,684,785 samples/s (bf16, batch 4,096, 4 GPUs, grad_accumulation=8)",
    "largest_batch-20261121-140535-ca3a": "the largest batch per device that fits is 139 (bf16, "
    "1 GPU, activation_checkpointing=false) to 192 (bf16, 1 GPU, activation_checkpointing=true)",
    "layouts-20261122-235950-1b52": "2 GPUs do 1.91 times the samples/s of 1 GPU at "
    "best, of which clocks 0.98, 95.4% efficiency (activation_checkpointing=none, "
    "throttled, quick), and 1.68 times at"
    " worst, of which clocks 1.04, 84.0% efficiency (activation_checkpointing=full, "
    "throttled, quick); what the rest is lost to was not measured; at most 5.621 "
    "samples/s (bf16, batch 4, 2 GPUs, activation_checkpointing=none, dp_shard=2, "
    "optimizer_dtype=bf16, tp=1, throttled, quick)",
    "layout_losses-20261123-030747-de95": "no speed-up: no ok point with world_size=1 "
    "dp_shard=1 tp=1 cp=1 in this series; at most 8.871 samples/s (bf16, batch 4, 2 GPUs, "
    "throttled, quick)",
    "layout_losses-20261123-033708-1ab3": "at most 8.327 samples/s (bf16, batch 4, 1 GPU, "
    "throttled, quick)",
    "layout_losses-20261123-033730-7081": "no speed-up: no ok point with world_size=1 "
    "dp_shard=1 tp=1 cp=1 in this series; at most 15.73 samples/s (bf16, batch 4, 2 GPUs, "
    "cp=1, tp=1, throttled, quick)",
    "layouts_one-20261123-030647-c252": "at most 4.002 samples/s (float8, batch 3, 1 GPU, "
    "activation_checkpointing=none, attention=auto, grad_accumulation=1, throttled, not alone, "
    "quick)",
    "mixed_precision-20261120-194746-9b7e": "bf16 is 4.19 to 6.83 times as fast as fp32, "
    "with 71.8% to 83.6% of the memory",
    "nccl_algorithms-20261123-000702-fa7f": "bus bandwidth with 64 MiB on 2 GPUs: 112.1 GB/s "
    "(allreduce:tree, LL) to 268.1 GB/s (allreduce:ring, Simple); 32 KiB takes 6.744 µs "
    "(allreduce:ring, LL) to 19.65 µs (allreduce:ring, Simple)",
    "resnet50_amp-20261122-204651-f6b6": "tf32, channels_last=false is 1.48 times as fast as "
    "precision=fp32 channels_last=false (batch 32, unsteady, host-bound), with 95.2% of the "
    "memory; 1 of 2 settings is left out, known worse than",
    "script_smoke-20261122-200803-b6ab": "2 GPUs do 1.94 times the samples/s of 1 GPU, 97.2% "
    "efficiency (fp32, batch 2,048); what the rest is lost to was not measured",
    "sums_by_network-20261122-232000-088b": "bus bandwidth with 256 MiB on 2 GPUs: 4.015 GB/s; "
    "32 KiB takes 79.02 µs",
    "sums_by_network-20261122-232011-3db1": "bus bandwidth with 256 MiB on 2 GPUs: 298.8 GB/s; "
    "32 KiB takes 25.06 µs",
    "transformer_scaling-20261120-194601-5550": "4 GPUs do 3.76 times the samples/s of 1 GPU at "
    "best, 94.1% efficiency (batch 32, preset=350m), and 3.61 times at worst, 90.3% efficiency "
    "(batch 8, preset=350m); what the rest is lost to was not measured; "
    "at most 1,375 samples/s (bf16, batch 32, 4 GPUs, preset=124m)",
    "uneven_gpus-20261123-000526-0147": "shares=by_speed is best in 5 of 5 cases, by up to +44.4% "
    "over the best of the others (1 of 2 GPUs at 0.50 of the speed)",
    "uneven_gpus-20261122-204457-30a8": "shares=by_speed is best in 1 of 4 cases, by up to +13.3% "
    "over the best of the others (1 of 2 GPUs at 0.54 of the speed); 3 cannot be told apart",
    "memory_bandwidth-20261121-113219-de97": "memory bandwidth with 4 GiB on 1 GPU: "
    "4,261 GB/s (scale) to 4,372 GB/s (triad), 88.8% to 91.1% of the datasheet's 4,800 GB/s",
}


@pytest.mark.parametrize("run_id", RUNS)
def test_the_lead_of_a_committed_run_is_what_its_tables_say(run_id: str) -> None:
    told = load_summary(RESULTS, run_id).lead
    assert re.sub(r" ±[\d.]+%", "", told) == LEADS[run_id]


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
        "4 GPUs do 3.20 ±1.4% times the samples/s of 1 GPU, 80.0% efficiency (fp32, batch 64); "
        "what the rest is lost to was not measured"
    )


def test_nothing_is_said_of_a_loss_that_is_none() -> None:
    found = said([ran(1, 8.0), ran(2, 8.02)], {"world_size": 1})
    assert found == (
        "2 GPUs do 2.00 ±1.4% times the samples/s of 1 GPU, 99.8% efficiency (fp32, batch 64)"
    )


def test_without_a_baseline_point_it_says_why_and_what_is_left() -> None:
    assert said([make_failed(make_point()), ran(2, 8.0)], {"world_size": 1}) == (
        "no speed-up: baseline point ran out of memory; "
        "at most 16,000 samples/s (fp32, batch 64, 2 GPUs)"
    )


def test_another_baseline_is_told_as_times_as_fast() -> None:
    records = [ran(1, 8.0), ran(1, 4.0, Precision.BF16), ran(1, 5.0, Precision.TF32)]
    assert said(records, {"precision": "fp32"}) == (
        "bf16 is 2.00 ±1.4% times as fast as fp32 (batch 64), with 100.0% of the memory"
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


def known_to(share: float, record: Record) -> dict[str, object]:
    """The row of a point whose interval is so wide to either side."""
    [row] = table([record]).to_dict("records")
    step_ms = float(row["step_ms_p50"])
    ends = {"step_ms_ci_low": step_ms * (1 - share), "step_ms_ci_high": step_ms * (1 + share)}
    return {str(name): value for name, value in row.items()} | ends


def test_a_wide_interval_is_no_baseline() -> None:
    base: dict[str, Scalar] = {"world_size": 1}
    wide = pd.DataFrame([known_to(0.11, ran(1, 8.0)), known_to(0.01, ran(2, 9.0))])
    found = scaling(wide, base)
    assert found["speed_up"].isna().all()
    assert set(found["why"]) == {"baseline point is known to ±11.0% only, worse than ±10%"}
    enough = wide.assign(step_ms_ci_low=wide["step_ms_p50"] * 0.93)
    assert scaling(enough, base)["speed_up"].notna().all()


def test_a_wide_interval_is_never_the_best_and_the_lead_says_what_it_leaves_out() -> None:
    base: dict[str, Scalar] = {"world_size": 1}
    records = [ran(1, 8.0), ran(2, 4.0), ran(1, 8.0, Precision.BF16), ran(2, 8.0, Precision.BF16)]
    wide = pd.DataFrame(
        [known_to(share, r) for share, r in zip((0, 0.5, 0, 0), records, strict=True)]
    )
    found = scaling(wide, base)
    told = headline(found.to_dict("records"), base, "GPUs")  # type: ignore[arg-type]
    assert told == (
        "2 GPUs do 2.00 ±1.4% times the samples/s of 1 GPU, 100.0% efficiency (bf16, batch 64); "
        "1 of 2 settings is left out, known worse than ±10%"
    )
    pair = found[found["world_size"] == 2]
    assert best_settings(pair).empty


def test_a_most_that_a_wide_interval_exceeds_says_of_which_points_it_is() -> None:
    records = [ran(1, 8.0), ran(2, 4.0), ran(4, 1.0)]
    shares = {1: 0, 2: 0, 4: 0.5}
    found = scaling(
        pd.DataFrame([known_to(shares[r.point.world_size], r) for r in records]), {"world_size": 8}
    )
    told = headline(found.to_dict("records"), {"world_size": 8}, "GPUs")  # type: ignore[arg-type]
    assert "at most 32,000 samples/s of what is known to ±10% (fp32, batch 64, 2 GPUs)" in told


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
        "2 GPUs do 1.80 ±1.4% times the samples/s of 1 GPU, 89.9% efficiency (fp32, batch 64, "
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


def test_a_rate_that_is_known_badly_is_left_out_of_the_most_of_products_and_said_to_be() -> None:
    points = raybench.load(RESULTS, "points", "gemm-20261121-113145-0e78")
    fastest = points.achieved_tflops_per_device.idxmax()
    points.loc[fastest, "step_ms_ci_high"] = 2 * points.step_ms_p50[fastest]
    found = scaling(points, {}).to_dict("records")
    told = headline(found, {}, "GPUs")  # type: ignore[arg-type]
    assert told.startswith("at most ")
    assert not told.startswith("at most 793.8 TFLOP/s")
    assert f"1 of {len(found)} settings is left out, known worse than ±10%" in told
