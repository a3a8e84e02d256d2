"""The sentences that a report leads with."""

import itertools
import re

import pandas as pd
import pytest
from builders import (
    make_apart,
    make_failed,
    make_point,
    make_row,
    make_rows,
    make_run,
    make_steady,
    make_summary,
    scaling_rows,
    with_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.analysis.answer import decide
from raybench.analysis.rows import distinguishing_settings, setting_of, value_of
from raybench.analysis.run_data import RunData
from raybench.analysis.scaling import LOSSES
from raybench.job.point import Precision
from raybench.records.doubts import DoubtKind
from raybench.records.status import Status
from raybench.report import formatting
from raybench.report.point_settings import short_name
from raybench.report.run_report import RunReport
from raybench.report.words.answer import lead
from raybench.results.breakdown import BREAKDOWN
from raybench.results.point_row import PointRow

ON_ONE = {"world_size": 1}
OVER_FP32 = {"precision": "fp32"}
ASKED = "answer: {metric: %s, over: [%s]}\nworkload: {kind: mlp}\n"


def said(records, baseline, job_text="", **changes):
    """The lead of a run of these records; changes: of columns, a value for each point."""
    rows = with_values(make_rows(records), **changes)
    run = make_run("run-a", baseline=baseline, job_text=job_text)
    return lead(decide(RunData(run=run, devices=pd.DataFrame(), points=rows)))


def ran(world_size, step_ms, precision=Precision.FP32):
    return make_steady(world_size, step_ms, precision=precision)


def test_one_series_is_told_without_best_and_worst():
    assert said([ran(1, 8.0), ran(2, 9.0), ran(4, 10.0)], ON_ONE) == (
        "4 GPUs reach 3.20 times the samples/s of 1 GPU (ideal 4.00). "
        "The reason why scaling is not ideal was not measured."
    )


def test_negligible_loss_is_not_mentioned():
    told = said([ran(1, 8.0), ran(2, 8.02)], ON_ONE)
    assert told == "2 GPUs reach 2.00 times the samples/s of 1 GPU (ideal 2.00)."


def test_lead_explains_a_missing_baseline_point():
    summary = make_summary([make_failed(make_point()), ran(2, 8.0)])
    report = RunReport(answer=decide(summary))
    assert report.lead.startswith(
        "The throughput is 16,000 samples/s. The step takes 8.000 ms. "
        "No point has a speed-up: the baseline point ran out of memory."
    )
    assert [one.text for one in report.without_speed_up] == ["the baseline point ran out of memory"]


def test_unsteady_baseline_does_not_change_the_lead():
    known = [ran(1, 8.0), ran(2, 9.0)]
    told = said(known, ON_ONE, stable=[False, True])
    assert told == said(known, ON_ONE)
    assert told.startswith("2 GPUs reach 1.78 times the samples/s of 1 GPU")


def test_several_batches_have_one_range_of_gains():
    points = itertools.product((64, 256), (Precision.FP32, Precision.BF16))
    records = [
        make_steady(1, step_ms, batch_size=batch, precision=precision)
        for (batch, precision), step_ms in zip(points, (8.0, 4.0, 8.0, 2.0), strict=True)
    ]
    told = said(records, OVER_FP32)
    assert told == "bf16 is 2.00 to 4.00 times as fast as fp32."


def test_the_fastest_is_told_with_the_next():
    for asked in ("throughput", "device_name"):  # no rank is by a text
        told = said([ran(1, 8.0), ran(1, 4.0, Precision.BF16)], {}, ASKED % (asked, "precision"))
        assert told == (
            "The throughput reaches 16,000 rows/s with bf16. bf16 was the fastest in this run. "
            "bf16 is 2.00 times as fast as fp32."
        )


def test_points_of_equal_rates_are_not_decided():
    job = ASKED % ("throughput", "precision")
    records = [ran(1, 8.0), ran(1, 8.0, Precision.BF16), ran(1, 16.0, Precision.FP16)]
    assert said(records, {}, job) == (
        "The throughput reaches 8,000 rows/s with fp32. "
        "There is no clear winner: fp32 has the best value, but bf16 may be equal. "
        "More rounds may decide: `--set measure.rounds=3`."
    )
    tied = [*records[:2], ran(1, 8.0, Precision.FP16)]
    assert "winner: fp32 has the best value, but 2 other points may be equal." in said(
        tied, {}, job
    )
    # The report asks for rounds once.
    summary = make_summary(records, make_run("run-a", job_text=job))
    assert RunReport(answer=decide(summary)).lead.count("measure.rounds") == 1
    below_0 = [{"gain": -2.0}, {"gain": -2.001}]
    told = said(records[:2], {}, ASKED % ("gain", "precision"), workload_metrics=below_0)
    assert "fp32 and bf16 differ by less than 0.5 %." in told


def test_step_time_doubts_do_not_concern_memory():
    # Memory does not scatter: so small a gap is one.
    bytes_of = {"peak_mem_allocated_bytes": [2.2 * 2**30, 2 * 2**30], "stable": [False, False]}
    records = [ran(1, 8.0), ran(1, 4.0, Precision.BF16)]
    told = said(records, {}, ASKED % ("peak_mem_allocated_bytes", "precision"), **bytes_of)
    assert told == (
        "The memory goes down to 2.00 GiB with bf16. bf16 needs the least memory. "
        "bf16 needs 9 % less memory than fp32."
    )
    energy = said(records, {}, ASKED % ("energy_j", "precision"), energy_j=[9, 3])
    assert (
        "bf16 needs the least energy in this run. bf16 needs 67 % less energy than fp32." in energy
    )


@pytest.mark.parametrize(
    ("best", "told"),
    [
        (
            "min",
            "bf16 has the lowest gain in this run. The value of bf16 is 50 % lower than that of",
        ),
        ("max", "fp32 has the highest gain in this run. The value of fp32 is 100 % higher than"),
    ],
)
def test_other_metrics_are_told_high_or_low(best, told):
    job = f"answer: {{metric: gain, over: [precision], best: {best}}}\nworkload: {{kind: mlp}}\n"
    records = [ran(1, 8.0), ran(1, 8.0, Precision.BF16)]
    assert told in said(records, {}, job, workload_metrics=[{"gain": 3.0}, {"gain": 1.5}])


@pytest.mark.parametrize(
    ("best", "told"),
    [
        (
            "min",
            "bf16 has the lowest gain in this run. "
            "The value of bf16 is 100 % lower than that of fp32.",
        ),
        # No share says how far a value is above 0.
        ("max", "fp32 has the highest gain in this run."),
    ],
)
def test_a_value_of_0_is_no_tie(best, told):
    job = f"answer: {{metric: gain, over: [precision], best: {best}}}\nworkload: {{kind: mlp}}\n"
    records = [ran(1, 8.0), ran(1, 8.0, Precision.BF16)]
    text = said(records, {}, job, workload_metrics=[{"gain": 5.0}, {"gain": 0.0}])
    assert text.endswith(told)
    assert "differ by less than" not in text


def test_the_fastest_beside_a_rate_of_0():
    records = [ran(1, 8.0), ran(1, 8.0, Precision.BF16)]
    text = said(records, {}, ASKED % ("busbw_gb_s", "precision"), busbw_gb_s=[5.0, 0.0])
    assert text.endswith("fp32 was the fastest in this run.")


def test_accumulated_batches_compete_only_if_job_asks():
    records = [
        make_steady(1, step_ms, batch_size=batch, params={"grad_accumulation": 8 // batch})
        for batch, step_ms in ((8, 8.0), (1, 16.0))
    ]
    both = said(records, {}, ASKED % ("throughput", "batch_size, grad_accumulation"))
    assert "batch 8, grad_accumulation=1 was the fastest in this run." in both
    one = said(records, {}, ASKED % ("throughput", "precision"))
    assert one.startswith("The throughput reaches 1,000 rows/s with batch 8")
    assert "fastest" not in one


@pytest.mark.parametrize(
    ("own_ms", "step_ms", "exceeds"),
    [((8.0, 18.0), (8.0, 8.9), [False, True]), ((18.0, 8.9), (8.0, 8.9), [True, False])],
    ids=["of the point", "of its baseline"],
)
def test_parts_that_exceed_the_step_are_not_used(own_ms, step_ms, exceeds):
    records = [
        make_apart([own] * ranks, step, optimizer_ms=0.5)
        for ranks, own, step in zip((1, 2), own_ms, step_ms, strict=True)
    ]
    found = scaling_rows(records, ON_ONE)
    assert [one.why_no_breakdown is not None for one in found] == exceeds
    wrong, right = sorted(found, key=lambda one: one.why_no_breakdown is None)
    doubt = wrong.why_no_breakdown
    assert (doubt.kind, doubt.limit) == (DoubtKind.NO_BREAKDOWN, 1.1)
    assert doubt.value == pytest.approx(18 / wrong.step_ms_p50)
    assert {getattr(wrong, name) for name in (*BREAKDOWN, "host_bound")} == {None}
    assert right.compute_ms == pytest.approx(right.step_ms_p50 - 0.5)
    assert {getattr(found[1], name) for name in LOSSES} == {None}
    told = "The reason why scaling is not ideal is unknown: the parts add up to more than the step."
    assert (told in said(records, ON_ONE)) == exceeds[1]


# By workload: the settings of its points with their values.
TRAINED = {"world_size": (1, 2, 4), "precision": ("fp32", "tf32", "bf16"), "batch_size": (64, 256)}
SIZES = {"size_bytes": ("8", "1024")}
SHARES = {"shares": ("equal", "fast", "by_speed")}
AXES = {
    "mlp": TRAINED,
    "linear": TRAINED | {"data": ("device", "dataloader")},
    "resnet50": TRAINED | {"mode": ("train", "inference")},
    "uneven": {"slow_ratio": (0.5, 0.9), "world_size": (2,)} | SHARES,
    "transformer": {"dp_shard": "12", "tp": "12", "world_size": (1, 2), "batch_size": (8,)},
    "script": {"world_size": (1, 2), "batch_size": (64,)},
    "dit": {"ulysses": ("1", "2"), "ring": ("1", "2"), "compile": ("false", "true")},
    "latency": {"phase": ("decode", "prefill"), "cuda_graph": (True, False)},
    "gemm": {"precision": ("fp32", "bf16"), "m": ("8", "64")},
    "memory": {"operation": ("triad", "copy")} | SIZES,
    "collective": {"operation": ("all_reduce", "broadcast"), "world_size": (2, 4)} | SIZES,
    "pairs": {"turn": ("1", "2"), "both_ways": ("false", "true")},
    "launch": {"world_size": (1, 2)},
}
# The column of the rate of those that have another one than samples/s, or none.
RATES = {
    "gemm": "achieved_tflops_per_device",
    "memory": "memory_gb_s",
    **dict.fromkeys(("collective", "pairs"), "busbw_gb_s"),
    **dict.fromkeys(("latency", "launch")),
}


@st.composite
def runs(draw):
    """A run of a workload in up to three rounds, of which points fail, tie, are noisy or doubtful.

    Its job asks nothing, so that the workload says what is answered, or for one of a few metrics.
    """
    kind = draw(st.sampled_from(sorted(AXES)))
    rate, axes = RATES.get(kind, "throughput"), AXES[kind]
    baseline = {name: axes[name][0] for name in draw(st.sets(st.sampled_from(sorted(axes))))}
    workload = {"uneven": "mlp", "latency": "transformer"}.get(kind, kind)
    rounds = draw(st.integers(1, 3))
    columns = PointRow.__dataclass_fields__
    rows = []
    for place, values in enumerate(itertools.product(*axes.values())):
        chosen = dict(zip(axes, values, strict=True))
        known = {name: value for name, value in chosen.items() if name in columns}
        params = {name: value for name, value in chosen.items() if name not in columns}
        if "batch_size" in known or kind == "uneven":
            batch, ranks = known.get("batch_size", 64), known.get("world_size", 1)
            known |= {"scaling": "weak", "batch_size": batch, "global_batch_size": batch * ranks}
        step_ms = draw(st.sampled_from([1.0, 4.0, 4.0, 4.02, 9.0, 30.0]))
        noise = draw(st.sampled_from([0.0, 0.001, 0.3]))
        ended = draw(st.sampled_from([Status.OK] * 5 + [Status.OOM]))
        doubt = draw(st.sampled_from([{}, {}, {"stable": False}, {"quick": True}]))
        for number in range(1, rounds + 1):
            at_ms = step_ms * (1 + noise * (number - 1))
            value = 1000 * known.get("batch_size", 64) * known.get("world_size", 1) / at_ms
            measured = {"step_ms_p50": at_ms, "step_ms_mean": at_ms} | (
                {rate: value} if rate else {}
            )
            rows.append(
                make_row(
                    point_id=f"p{place}", round=number, attempt=number, workload=workload,
                    params=params, status=ended, **known, **doubt,
                    **(measured if ended is Status.OK else {}),
                )
            )  # fmt: skip
    metric = draw(st.sampled_from([None, None, "speed_up", "throughput", "step_ms_p50"]))
    answer = f"answer: {{metric: {metric}}}\n" if metric else ""
    job = f"version: 1\n{answer}workload: {{kind: {workload}}}\n"
    return RunData(
        run=make_run("run-a", baseline=baseline, job_text=job), devices=pd.DataFrame(), points=rows
    )


def groups(answer):
    """The values of the points of each case, with their names: what a reader sees in the table."""
    summary, metric, cases, known = answer.data, answer.metric, answer.case_settings, {}
    compared = [n for n in distinguishing_settings(summary.rows) if n not in cases]
    for row in summary.rows:
        if row.status == "ok" and value_of(row, metric) is not None:
            key = tuple(str(setting_of(row, name)) for name in cases)
            name = short_name(row, compared, summary.ranks)
            known.setdefault(key, []).append((value_of(row, metric), name))
    return list(known.values())


CLAIM = re.compile(
    r"(?:^|(?<=\. ))(.+?) (?:is|was) the fastest"
    r"(?: in (\d+) of (\d+) cases| with (.+?))?(?: in this run)?\. "
    r"\1 is ([\d.,]+)(?: to ([\d.,]+))? times"
)


@settings(max_examples=120, deadline=None)
@given(runs())
def test_no_lead_contradicts_the_table(summary):
    answer = decide(summary)
    told, ok = RunReport(answer=answer).lead, [r for r in summary.rows if r.status == "ok"]
    assert bool(told) == bool(summary.rows)
    assert not ok or re.search(r"\d", told)
    for name, won, count, places, least, most in CLAIM.findall(told):
        best = max if answer.ranked_by.best == "max" else min
        contested = [group for group in groups(answer) if len(group) > 1]
        # Nobody is said to be the best where another one is as good.
        alone = [group for group in contested if [v for v, _ in group].count(best(group)[0]) == 1]
        ahead = [group for group in alone if best(group)[1] == name]
        gains = []
        for group in ahead:
            first, second = sorted((value for value, _ in group), reverse=best is max)[:2]
            ratio = first / second
            gains.append(formatting.ratio(1 / ratio if best is min else ratio))
        assert {least, most or least} <= {*gains}
        assert float(least) <= float(most or least)
        named = len(re.split(r", | and ", places))
        assert int(won or named) <= len(ahead)
        assert not count or int(count) == len(contested)
    shares = (
        r"shares=(\w+) (?:is|was) the fastest(?: in (\d+) of \d+ cases)?(?: in this run)?\. With "
    )
    if best_shares := re.search(shares, told):
        bests = [max(f.scenarios.values(), key=lambda one: one.throughput) for f in summary.fleets]
        won = [one for one in bests if one.shares == best_shares[1]]
        assert len(won) >= int(best_shares[2] or 1)
    if len({row.world_size for row in ok}) < 2:
        assert "ideal" not in told
    for devices, base in re.findall(r"(\d) GPUs? reach(?:es)? .* of (\d) GPU", told):
        assert int(devices) > int(base)
    for least, most in re.findall(r"([\d.]+) to ([\d.]+) times(?! as fast as the second)", told):
        assert float(least) <= float(most) <= max(row.speed_up or 0.0 for row in ok) + 0.01


def test_claims_are_found_in_a_lead():
    told = "It reaches 2.5 GB/s. tp=2, size=1.5 was the fastest in 2 of 3 cases in this run. "
    [claim] = CLAIM.findall(f"{told}tp=2, size=1.5 is 1.30 times as fast as the second fastest.")
    assert claim == ("tp=2, size=1.5", "2", "3", "", "1.30", "")
    told = "tp=2 is the fastest with 1 GPU, 2 GPUs and 4 GPUs. tp=2 is 1.30 to 2.00 times as fast"
    assert CLAIM.findall(told) == [("tp=2", "", "", "1 GPU, 2 GPUs and 4 GPUs", "1.30", "2.00")]
