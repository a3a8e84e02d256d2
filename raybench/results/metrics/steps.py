"""How long a step takes, over its samples and builds of the workload, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from raybench.job.point import SCRIPT
from raybench.records import Measurement, Record
from raybench.records.metric import Column
from raybench.stats import summary as stats

if TYPE_CHECKING:
    from raybench.job.model import Measure

NS_PER_MS = 1e6
# A step time that is known worse than this, to either side, is no measure for others.
WIDEST_INTERVAL = 0.10
_ENOUGH_SAMPLES = 10
# The mean step may be so much longer than the median one without a warning.
_RARE_STALLS = 0.01
# A time budget is taken for reached from this share of it on.
_NEARLY = 0.95


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """How long steps take, and over how many of them that is."""

    repeats: Annotated[int | None, Column("", "builds of the workload")] = None
    warmup_iterations: Annotated[int | None, Column("", "done")] = None
    iterations: Annotated[int | None, Column("", "timed samples")] = None
    inner_iterations: Annotated[int | None, Column("", "steps per timed sample")] = None
    step_ms_mean: Annotated[float | None, Column("ms", "whole time over its steps")] = None
    step_ms_p50: Annotated[float | None, Column("ms", "median step time")] = None
    step_ms_p90: Annotated[float | None, Column("ms", "90th percentile")] = None
    step_ms_p95: Annotated[float | None, Column("ms", "95th percentile")] = None
    step_ms_p99: Annotated[
        float | None,
        Column("ms", "the 99th percentile of the iterations", heading="p99", format="time"),
    ] = None
    step_ms_min: Annotated[float | None, Column("ms", "minimum")] = None
    step_ms_max: Annotated[float | None, Column("ms", "maximum")] = None
    step_ms_std: Annotated[float | None, Column("ms", "standard deviation")] = None
    step_ms_ci_low: Annotated[
        float | None, Column("ms", "95 % interval of the median, low end")
    ] = None
    step_ms_ci_high: Annotated[
        float | None, Column("ms", "95 % interval of the median, high end")
    ] = None
    skew_ms_p50: Annotated[float | None, Column("ms", "slowest less fastest rank, median")] = None
    stable: Annotated[bool | None, Column("", "the level stays; null: too few steps")] = None
    first_step_ms: Annotated[
        float | None,
        Column(
            "ms",
            "first step after the build, slowest rank",
            heading="first",
            meaning="the first step after the workload was built, on the slowest rank",
            format="time",
        ),
    ] = None
    compiled_step_ms: Annotated[
        float | None,
        Column(
            "ms",
            "first step after torch.compile, slowest rank",
            heading="compiled",
            meaning="the first step after the last compiling one, on the slowest rank",
            format="time",
        ),
    ] = None
    new_processes: Annotated[
        bool | None, Column("", "they had run no point before: a first step is cold")
    ] = None
    data_ms: Annotated[
        float | None,
        Column("ms", "the host waits for the next batch", heading="data", format="part"),
    ] = None


def step_columns(record: Record) -> StepColumns:
    """Compute the columns from the timed samples of the ranks that work.

    Raises ValueError where ranks differ in their sample counts: our bug, never the user's.
    """
    measurements = record.measurements
    first = measurements[0].repetitions
    repeats = [
        [
            float(ns) / NS_PER_MS
            for ns in stats.step_series([m.repetitions[at].timed.step_ns for m in measurements])
        ]
        for at in range(len(first))
    ]
    ranks = [[ns / NS_PER_MS for ns in m.step_ns] for m in measurements]
    summary = stats.summarize([ms for repeat in repeats for ms in repeat])
    interval = stats.median_interval(repeats)
    settled = [repetition.settled for m in measurements for repetition in m.repetitions]
    # A script's first step is part of its set-up.
    is_cold_known = record.point.workload != SCRIPT
    return StepColumns(
        repeats=len(repeats),
        warmup_iterations=sum(len(repetition.warmup.step_ns) for repetition in first),
        iterations=sum(map(len, repeats)),
        inner_iterations=max(repetition.inner_iterations for repetition in first),
        step_ms_mean=mean_step_ms(record),
        step_ms_p50=summary.p50,
        step_ms_p90=summary.p90,
        step_ms_p95=summary.p95,
        step_ms_p99=summary.p99,
        step_ms_min=summary.min,
        step_ms_max=summary.max,
        step_ms_std=summary.std,
        step_ms_ci_low=interval.low if interval else None,
        step_ms_ci_high=interval.high if interval else None,
        skew_ms_p50=stats.median_skew(ranks) if len(ranks) > 1 else None,
        stable=False if False in settled else None if None in settled else True,
        first_step_ms=_first_step_ms(measurements) if is_cold_known else None,
        compiled_step_ms=_compiled_step_ms(measurements) if is_cold_known else None,
        new_processes=_are_new(measurements) if is_cold_known else None,
        data_ms=data_wait_ms(measurements),
    )


def typical_step_ms(record: Record) -> float:
    """Return the median step of a point that was measured, in ms."""
    return stats.step_time([m.step_ns for m in record.measurements]) / NS_PER_MS


def mean_step_ms(record: Record) -> float:
    """Return the time of the timed phase over its steps, in ms, on the rank that took longest.

    Rates such as samples/s follow this mean.
    """
    return max(fmean(m.step_ns) for m in record.measurements) / NS_PER_MS


def data_wait_ms(measurements: Sequence[Measurement]) -> float | None:
    """Return the median over iterations of the longest wait for data of a rank, in ms.

    None where no rank timed such waits.
    """
    waits_ns = [
        [ns for samples in timed for ns in samples.part_ns.get("data", (0,) * len(samples.step_ns))]
        for measurement in measurements
        if (timed := [repetition.timed for repetition in measurement.repetitions])
        and any("data" in samples.part_ns for samples in timed)
    ]
    return stats.summarize(stats.per_iteration_max(waits_ns)).p50 / NS_PER_MS if waits_ns else None


def _first_step_ms(measurements: Sequence[Measurement]) -> float | None:
    """Return the first step after the first build, in ms, on the rank where it took longest."""
    first_ns = [ns for m in measurements for ns in m.repetitions[0].warmup.step_ns[:1]]
    return max(first_ns) / NS_PER_MS if first_ns else None


def _compiled_step_ms(measurements: Sequence[Measurement]) -> float | None:
    """Return the first warm-up step that compiled nothing, in ms; None where no step compiled."""
    builds = [m.repetitions[0] for m in measurements if m.repetitions[0].compiling_steps]
    after_ns = [ns for b in builds for ns in b.warmup.step_ns[b.compiling_steps :][:1]]
    return max(after_ns) / NS_PER_MS if after_ns else None


def _are_new(measurements: Sequence[Measurement]) -> bool | None:
    """Return whether all processes were new; None where a rank does not tell."""
    news = [measurement.is_of_new_process for measurement in measurements]
    return None if None in news else all(news)


def half_interval(row: StepColumns) -> float | None:
    """Return half of the 95 % interval of the step time, over the step time; None: not known."""
    step_ms, low, high = row.step_ms_p50, row.step_ms_ci_low, row.step_ms_ci_high
    return None if not step_ms or low is None or high is None else (high - low) / 2 / step_ms


def is_imprecise(row: StepColumns) -> bool:
    """Return whether the step time is known too badly to be compared, or to be called the best.

    False with fewer than ten samples: these have a wide interval though nothing is wrong.
    """
    half_width = half_interval(row)
    is_enough = row.iterations is None or row.iterations >= _ENOUGH_SAMPLES
    return is_enough and half_width is not None and half_width > WIDEST_INTERVAL


def shortfall_warnings(row: StepColumns, measure: Measure) -> Iterator[str]:
    """Yield what the job asked for and the measurement did not reach."""
    samples, wanted = row.iterations or 0, measure.iterations.min * measure.repeats
    if samples < wanted:
        yield f"time budget: {samples} of {wanted} iterations"
    steps = samples * (row.inner_iterations or 1)
    # Of a repeat.
    timed_s = (row.step_ms_mean or 0.0) * steps / (row.repeats or 1) / 1000
    if measure.is_quick:
        yield f"quick: {timed_s:.2g} s timed"
    elif not measure.iterations.is_fixed and timed_s < _NEARLY * measure.min_seconds:
        yield f"time budget: {timed_s:.2g} s of {measure.min_seconds:g} s timed"
    half_width = half_interval(row)
    if half_width is not None and half_width > measure.target_ci:
        yield (
            f"step time is known to ±{half_width:.1%} only; "
            f"the job asks for ±{measure.target_ci:.1%}"
        )


def unsteady_warnings(row: StepColumns, record: Record, measure: Measure) -> Iterator[str]:
    """Yield that some steps are much longer than most, or that the step time changes its level."""
    mean_ms, median_ms = row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0
    if mean_ms > (1 + _RARE_STALLS) * median_ms:
        yield (
            f"some steps are much longer: the mean of {mean_ms:.4g} ms, which the rates follow, "
            f"is {mean_ms / median_ms - 1:.1%} above the median"
        )
    if row.stable is False:
        warmups = [len(r.warmup.step_ns) for m in record.measurements for r in m.repetitions]
        yield f"step time changes its level still after {max(warmups)} iterations of warm-up"
    elif row.stable is None and not measure.iterations.is_fixed:
        yield "too few steps to tell whether their time is steady"
