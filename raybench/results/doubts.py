"""Derive the doubts about a point from its row and its record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raybench.conversion import MS_PER_S
from raybench.records.doubts import Doubt, DoubtKind, NotMeasured, worst_of_each
from raybench.records.record import Record
from raybench.results.breakdown import HOST_BOUND_SHARE
from raybench.results.metrics import WIDEST_INTERVAL, half_interval, is_imprecise
from raybench.results.point_row import PointRow, is_slowed_by_one_rank, why_no_breakdown
from raybench.stats.outliers import MARK_SHARE, confirmed_excess_ms

if TYPE_CHECKING:
    from raybench.job.model import Measure

# Running at the power limit is normal for a GPU at work.
NORMAL_LIMITS = frozenset({"power_cap", "sync_boost"})
# The mean step may exceed the median by 1 % without a doubt.
_MAX_STALLS = 0.01
# A point that was timed for 95 % of the requested seconds is long enough.
_MIN_TIMED_SHARE = 0.95
# Lateness, and parts that exceed the step, are reported above 2 % of the step.
_REPORTED_SHARE = 0.02
# Kinds that follow from the columns of the mean of all rounds.
DERIVED_FROM_MEAN = frozenset(
    {
        *(DoubtKind.WIDE, DoubtKind.UNSTEADY, DoubtKind.NO_BREAKDOWN, DoubtKind.HOST_BOUND),
        *(DoubtKind.SLOW_RANK, DoubtKind.LATE_IN_TURN, DoubtKind.PARTS_EXCEED),
    }
)
# Kinds that follow from columns. The columns of the added kinds exist for a single round only.
DERIVED_FROM_COLUMNS = DERIVED_FROM_MEAN | {
    *(DoubtKind.STALLS, DoubtKind.ALLOCATOR_RETRIES, DoubtKind.DEVICE_ALLOCS),
}


def doubts_of(row: PointRow, record: Record, measure: Measure) -> tuple[Doubt, ...]:
    """Return the doubts about an attempt that is ok, each kind and subject once.

    Args:
        row: row of the record in `points`, still without doubts.
        measure: what the job asked for.
    """
    doubts = (*record.doubts, *_record_doubts(row, record, measure), *column_doubts(row))
    return worst_of_each(doubts)


def _record_doubts(row: PointRow, record: Record, measure: Measure) -> Iterator[Doubt]:
    """Yield the doubts that need the record or the job, besides the columns of the row."""
    measurements = record.measurements
    # What the workload does not report or do.
    if row.batch_size is not None and measurements[0].items_per_step is None:
        yield Doubt(kind=DoubtKind.NO_THROUGHPUT)
    if (row.not_measured or {}).get("comm_exposed_ms") == NotMeasured.NO_COLLECTIVES:
        yield Doubt(kind=DoubtKind.NO_COLLECTIVES)
    # Whether the point was measured as long as the job asks.
    samples = row.iterations or 0
    requested_samples = measure.fewest_samples * measure.repeats
    if samples < requested_samples:
        yield Doubt(kind=DoubtKind.FEW_SAMPLES, value=samples, limit=requested_samples)
    steps = 0
    for repetition in measurements[0].repetitions:
        steps += len(repetition.timed.step_ns) * repetition.inner_iterations
    # The job asks for seconds of each repeat.
    timed_s = (row.step_ms_mean or 0.0) * steps / (row.repeats or 1) / MS_PER_S
    if measure.is_quick:
        yield Doubt(kind=DoubtKind.QUICK, value=timed_s)
    elif measure.iterations is None and timed_s < _MIN_TIMED_SHARE * measure.seconds:
        yield Doubt(kind=DoubtKind.SHORT, value=timed_s, limit=measure.seconds)
    if row.stable is None and measure.iterations is None:
        yield Doubt(kind=DoubtKind.TOO_FEW_STEPS, value=samples)
    # What the clocks and the datasheet say.
    reasons = row.throttle_reasons or ()
    # Without reasons the throttling is not known to be normal.
    is_normal = bool(reasons) and NORMAL_LIMITS.issuperset(reasons)
    if row.throttled and not is_normal:
        throttled: list[bool] = []
        for measurement in measurements:
            for repetition in measurement.repetitions:
                throttled += repetition.timed.throttled
        share = sum(throttled) / len(throttled)
        yield Doubt(kind=DoubtKind.THROTTLED, value=share, subject=", ".join(reasons))
    if row.mfu_pct is not None and row.mfu_pct > 100:
        yield Doubt(kind=DoubtKind.IMPOSSIBLE, value=row.mfu_pct, limit=100.0, subject="mfu_pct")


def column_doubts(row: PointRow) -> Iterator[Doubt]:
    """Yield the doubts that follow from the columns of an ok row alone: DERIVED_FROM_COLUMNS."""
    half_width = half_interval(row)
    if half_width is not None and is_imprecise(row):
        yield Doubt(kind=DoubtKind.WIDE, value=half_width, limit=WIDEST_INTERVAL)
    mean_ms, median_ms = row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0
    if mean_ms > (1 + _MAX_STALLS) * median_ms and median_ms:
        yield Doubt(kind=DoubtKind.STALLS, value=mean_ms / median_ms - 1, limit=_MAX_STALLS)
    if row.stable is False:
        yield Doubt(kind=DoubtKind.UNSTEADY, value=row.warmup_iterations)
    if row.alloc_retries:
        yield Doubt(kind=DoubtKind.ALLOCATOR_RETRIES, value=row.alloc_retries, limit=0.0)
    elif row.device_allocs:
        yield Doubt(kind=DoubtKind.DEVICE_ALLOCS, value=row.device_allocs, limit=0.0)
    if (doubt := why_no_breakdown(row)) is not None:
        yield doubt
    elif row.step_ms_p50:
        yield from _breakdown_doubts(row, row.step_ms_p50)


def _breakdown_doubts(row: PointRow, step_ms: float) -> Iterator[Doubt]:
    """Yield the doubts that follow from a valid breakdown; their values are shares of the step."""
    if row.host_bound and row.host_gap_ms is not None:
        share = row.host_gap_ms / step_ms
        yield Doubt(kind=DoubtKind.HOST_BOUND, value=share, limit=HOST_BOUND_SHARE)
    if is_slowed_by_one_rank(row):
        # Time of the slowest rank beyond the other ranks.
        excess_ms = confirmed_excess_ms(row.straggler_ms or 0.0, row.unexplained_ms)
        yield Doubt(
            kind=DoubtKind.SLOW_RANK,
            value=excess_ms / step_ms,
            limit=MARK_SHARE,
            subject=f"rank {row.slowest_rank}",
        )
    # What a step loses because different ranks are late in different steps.
    late_ms = row.late_in_turn_ms
    if late_ms is not None and late_ms > _REPORTED_SHARE * step_ms:
        yield Doubt(kind=DoubtKind.LATE_IN_TURN, value=late_ms / step_ms, limit=_REPORTED_SHARE)
    # Unexplained time below 0: the parts add up to more than the step.
    unexplained_ms = row.unexplained_ms or 0.0
    if row.world_size > 1 and unexplained_ms < -_REPORTED_SHARE * step_ms:
        share = -unexplained_ms / step_ms
        yield Doubt(kind=DoubtKind.PARTS_EXCEED, value=share, limit=_REPORTED_SHARE)
