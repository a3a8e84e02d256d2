"""Speed-up and efficiency of points over the baseline point of their series, and lost shares.

First speed-ups, then the ideal of devices of several models, then the shares of the step that are
lost against perfect scaling, and last the table `summary`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raybench.analysis.rounds import Trials, mean_of_rounds
from raybench.analysis.rows import (
    DEGREES,
    EXECUTION,
    OPTIONAL,
    SETTINGS,
    ScaledRow,
    batch_column,
    number_of,
    point_rows,
    setting_of,
)
from raybench.conversion import MS_PER_S
from raybench.errors import ResultsError
from raybench.job.point import RUN_SETTINGS, UNEVEN, Scalar, setting_text
from raybench.records.doubts import (
    Doubt,
    DoubtKind,
    LossesUnknown,
    NotCompared,
    NotComparedKind,
    NotMeasured,
    worst_of_each,
)
from raybench.records.status import Status
from raybench.results import reader
from raybench.results.breakdown import BREAKDOWN
from raybench.results.doubts import DERIVED_FROM_MEAN, NORMAL_LIMITS, column_doubts
from raybench.results.point_row import PointRow, step_of_parts, why_no_breakdown
from raybench.results.tables import Run, SummaryRow
from raybench.stats.outliers import slowest_and_other
from raybench.stats.summary import scatter

if TYPE_CHECKING:
    from raybench.results.writer import RunStore

# Settings that define a series, besides the workload's parameters and the batch that the job sets.
_SERIES_SETTINGS = tuple(name for name in SETTINGS if name != "batch")
# Settings that say which devices run a point, and how the devices share its work.
_DEVICE_SETTINGS = frozenset({"world_size", "strategy", "devices", *UNEVEN, *DEGREES})
# Clocks of two points that differ by at most 1 % count as equal.
_EQUAL_CLOCKS = 0.01

# Fields of a ScaledRow by name.
Derived = dict[str, Any]


def scaling(points: Iterable[PointRow], baseline: Mapping[str, Scalar]) -> list[ScaledRow]:
    """Return one row per point (`mean_of_rounds`) with its speed-up over its baseline point.

    A series is all points that are equal in every setting that the baseline does not name. speed_up
    is None for a point that is not ok or has no throughput; `why` has the reason for ok points.

    * `efficiency`: speed-up / ratio of world sizes. It is known if the baseline names world_size,
      and the two points differ in their devices alone. If devices are of several models or
      emulated, the ideal speed-up is the sum of what each device does alone.
    * `*_low`, `*_high`: intervals over the rounds of the run.
    * Parts of the step are None if they contradict the step; `why_no_breakdown` has the reason.
    * `doubts`: None if the point is not ok, or if its doubts are unknown.

    Args:
        points: all attempts of one run, with controls.
        baseline: settings of the baseline points; empty without a baseline.
    """
    points = list(points)
    trials = Trials(points)
    rows = [_without_comparison(row, trials, baseline) for row in mean_of_rounds(points)]
    # Sort the points into series.
    series: dict[tuple[Any, ...], list[ScaledRow]] = {}
    for row in rows:
        names = list(_SERIES_SETTINGS)
        if batch_name := batch_column(row):
            names.append(batch_name)
        settings = ((name, str(getattr(row, name))) for name in names if name not in baseline)
        params = sorted((name, text) for name, text in row.params.items() if name not in baseline)
        series.setdefault((*settings, *params), []).append(row)
    # Compare each point with the baseline point of its series.
    speeds = _SingleDeviceSpeeds(rows)
    fields_by_point: dict[str, Derived] = {}
    # Rows with their logarithms of ratios by round.
    log_ratios = []
    for number, series_rows in enumerate(series.values()):
        base = next((row for row in series_rows if row.is_baseline), None)
        for row in series_rows:
            why = _why_not_compared(row, series_rows, baseline, speeds)
            fields: Derived = {"series": number, "why": why}
            if base is not None and why is None and _has_throughput(row):
                differ_in_devices_alone = _differ_in_devices_alone(row, base, baseline)
                fields |= _compare(row, base, differ_in_devices_alone, trials, speeds)
            # The ratio of the baseline point to itself is exact, so it needs no interval.
            if base is not None and row is not base and "speed_up" in fields:
                log_ratios.append((row, trials.log_ratios(base, row)))
            fields_by_point[row.point_id] = fields
    # Add the intervals over the rounds. The rounds of all points together show the scatter.
    log_times = [(row, trials.logs(row, lambda attempt: attempt.step_ms_p50)) for row in rows]
    log_rates = [(row, trials.logs(row, lambda attempt: attempt.throughput)) for row in rows]
    for logs, columns in (
        (log_times, ("step_ms",)),
        (log_rates, ("throughput",)),
        (log_ratios, ("speed_up", "efficiency")),
    ):
        for row, log_half_width in half_widths(logs):
            fields = fields_by_point[row.point_id]
            centers = {"step_ms": row.step_ms_p50, "throughput": row.throughput} | fields
            for name in columns:
                if (center := centers.get(name)) is not None:
                    fields[f"{name}_low"] = center * math.exp(-log_half_width)
                    fields[f"{name}_high"] = center * math.exp(log_half_width)
    scaled_rows = []
    for row in rows:
        fields = fields_by_point[row.point_id]
        doubts = row.doubts
        if comparison_doubts := fields.pop("doubts", ()):
            doubts = (*(row.doubts or ()), *comparison_doubts)
        scaled_rows.append(replace(row, **fields, doubts=doubts))
    return scaled_rows


def _without_comparison(row: PointRow, trials: Trials, baseline: Mapping[str, Scalar]) -> ScaledRow:
    """Return a point with the derived columns that need no other point."""
    breakdown_doubt = why_no_breakdown(row)
    batch_name = batch_column(row)
    mean_ms, sd_ms = row.step_ms_mean, row.step_ms_std
    is_ok = row.status is Status.OK
    ok_rounds = trials.rounds(row).values() if is_ok else ()
    values = {**vars(row), "doubts": _known_doubts(row) if is_ok else None}
    if breakdown_doubt:
        # Parts that contradict the step are not shown.
        values |= dict.fromkeys((*BREAKDOWN, "host_bound"))
    is_baseline = bool(baseline) and all(
        _is_same(setting_of(row, name), value) for name, value in baseline.items()
    )
    return ScaledRow(
        **values,
        batch=getattr(row, batch_name) if batch_name else None,
        rounds=len(trials.rounds(row)),
        is_baseline=is_baseline,
        samples_per_joule=samples_per_joule(ok_rounds),
        scatter=None if not mean_ms or sd_ms is None else sd_ms / mean_ms,
        why_no_breakdown=breakdown_doubt,
    )


def _known_doubts(row: PointRow) -> tuple[Doubt, ...] | None:
    """Return stored doubts and doubts that follow from columns; None if both are unknown."""
    # Stored doubts of some kinds describe single rounds, so derive them again from the columns of
    # the mean over the rounds.
    stored = (doubt for doubt in row.doubts or () if doubt.kind not in DERIVED_FROM_MEAN)
    doubts = worst_of_each((*stored, *column_doubts(row)))
    return doubts if doubts or row.doubts is not None else None


def samples_per_joule(rounds: Iterable[PointRow]) -> float | None:
    """Return the samples of all rounds / the energy of their steps; None if unknown."""
    all_samples, all_energy_j = 0.0, 0.0
    for row in rounds:
        steps = (row.iterations or 0) * (row.inner_iterations or 0)
        samples = (row.throughput or 0.0) * (row.step_ms_mean or 0.0) / MS_PER_S * steps
        if not samples or not row.energy_j:
            return None
        all_samples += samples
        all_energy_j += row.energy_j
    return all_samples / all_energy_j if all_energy_j else None


def _compare(
    row: ScaledRow,
    base: ScaledRow,
    differ_in_devices_alone: bool,
    trials: Trials,
    speeds: _SingleDeviceSpeeds,
) -> Derived:
    """Return the columns that follow from the comparison with the baseline point."""
    log_ratios = trials.log_ratios(base, row)
    if not log_ratios:
        return {"why": NotCompared(kind=NotComparedKind.NO_COMMON_ROUND)}
    speed_up = math.exp(sum(log_ratios.values()) / len(log_ratios))
    peak, base_peak = row.peak_mem_allocated_bytes, base.peak_mem_allocated_bytes
    values: Derived = {
        "speed_up": speed_up,
        "memory_ratio": None if peak is None or not base_peak else peak / base_peak,
        "clock_ratio": _clock_ratio(row, base),
        "doubts": tuple(_comparison_doubts(row, base)),
    }
    # Otherwise the speed-up has no ideal.
    if not differ_in_devices_alone:
        return values
    has_uneven_devices = row.slow_ratio < 1 or len({*_models_of(row), *_models_of(base)}) > 1
    if has_uneven_devices:
        # The ideal is the sum of what each device does alone.
        ideal, base_ideal = speeds.sum_of_devices(row), speeds.sum_of_devices(base)
        if ideal and base_ideal:
            values["efficiency"] = speed_up * base_ideal / ideal
        return values
    ideal_speed_up = row.world_size / base.world_size
    efficiency = speed_up / ideal_speed_up
    if row.scaling == "strong" and ideal_speed_up > 1:
        values["serial_fraction"] = _serial_fraction(speed_up, ideal_speed_up, base.world_size)
    values["why_no_losses"] = _why_no_losses(row, base)
    if not (row.why_no_breakdown or base.why_no_breakdown):
        values |= shares_of_loss(row, base, efficiency)
    return values | {"efficiency": efficiency}


def _serial_fraction(speed_up: float, ideal_speed_up: float, base_world_size: int) -> float | None:
    """Return the serial share of the step on one device; None if no share explains the step."""
    # The serial share of the baseline's step, by Amdahl's law: A. H. Karp, H. P. Flatt, "Measuring
    # parallel processor performance", Communications of the ACM 33(5), 1990.
    share_of_base = (1 / speed_up - 1 / ideal_speed_up) / (1 - 1 / ideal_speed_up)
    # For b devices and the share f of one device, share_of_base = f / (f + (1 - f) / b). Solve for
    # f.
    divisor = base_world_size - (base_world_size - 1) * share_of_base
    return share_of_base / divisor if divisor > 0 else None


def _comparison_doubts(row: ScaledRow, base: ScaledRow) -> Iterator[Doubt]:
    """Yield the doubts about the comparison of a point with its baseline point."""
    if base.stable is False:
        yield Doubt(kind=DoubtKind.BASE_UNSTEADY, value=base.warmup_iterations)
    if (ratio := _clock_ratio(row, base)) is not None:
        yield Doubt(kind=DoubtKind.OTHER_CLOCKS, value=ratio, limit=1.0)
    kernels, base_kernels = row.attention_kernels, base.attention_kernels
    # Other kernels are expected if the job asks for them.
    is_requested = row.params.get("attention") != base.params.get("attention")
    if kernels and base_kernels and kernels != base_kernels and not is_requested:
        names, base_names = ", ".join(kernels), ", ".join(base_kernels)
        subject = f"`{names}` here and `{base_names}` at the baseline point"
        yield Doubt(kind=DoubtKind.OTHER_KERNELS, subject=subject)


def _why_no_losses(row: ScaledRow, base: ScaledRow) -> LossesUnknown | None:
    """Return why the losses of a point are unknown; None if both points have a breakdown."""
    if row.is_baseline:
        return None
    for point in (row, base):
        if point.why_no_breakdown:
            return LossesUnknown(reason=NotMeasured.PARTS_EXCEED, is_at_baseline=point is base)
    for point in (row, base):
        if (reason := _why_part_not_measured(point)) is not None:
            return LossesUnknown(reason=reason, is_at_baseline=point is base)
    return None


def _why_part_not_measured(row: ScaledRow) -> NotMeasured | None:
    """Return why a part of the step that losses need was not measured; None if all parts were."""
    needed_parts = ("compute_ms",) if row.world_size == 1 else ("compute_ms", "comm_exposed_ms")
    for name in needed_parts:
        reason = (row.not_measured or {}).get(name)
        if getattr(row, name) is None and reason is not None:
            return reason
    return None


def _differ_in_devices_alone(
    row: ScaledRow, base: ScaledRow, baseline: Mapping[str, Scalar]
) -> bool:
    """Return whether two points differ in devices alone, and the baseline names world_size."""
    if "world_size" not in baseline:
        return False
    # The job sets one kind of batch. The other kind follows from the number of devices.
    derived_batch = {"batch_size", "global_batch_size"} - {batch_column(row)}
    for name in baseline:
        is_of_devices = name in _DEVICE_SETTINGS or name in derived_batch
        if not is_of_devices and not _is_same(setting_of(row, name), setting_of(base, name)):
            return False
    return True


def half_widths(
    logs_of_rows: Sequence[tuple[ScaledRow, Mapping[int, float]]],
) -> Iterator[tuple[ScaledRow, float]]:
    """Yield each row with at least two rounds, and half the width of the interval of its mean.

    The intervals are 95 % intervals of logarithms.

    Args:
        logs_of_rows: each row with the logarithm of its value by round.
    """
    # Number the rounds: they are the columns of the matrix [points, rounds].
    columns: dict[int, int] = {}
    for _, logs in logs_of_rows:
        for round_number in logs:
            columns.setdefault(round_number, len(columns))
    values = np.full((len(logs_of_rows), len(columns)), math.nan)
    for point, (_, logs) in enumerate(logs_of_rows):
        for round_number, log in logs.items():
            values[point, columns[round_number]] = log
    scatters = scatter(values) if logs_of_rows else []
    for (row, logs), point_scatter in zip(logs_of_rows, scatters, strict=True):
        # None: the point has a single round.
        if point_scatter is not None:
            yield row, point_scatter.half_width(1 / len(logs))


def _why_not_compared(
    row: ScaledRow,
    series_rows: Sequence[ScaledRow],
    baseline: Mapping[str, Scalar],
    speeds: _SingleDeviceSpeeds,
) -> NotCompared | None:
    """Return why an ok point cannot be compared with the baseline point of its series."""
    if not _has_throughput(row):
        # Without this doubt, the point is not ok, or its workload needs no throughput.
        kinds = {doubt.kind for doubt in row.doubts or ()}
        if baseline and DoubtKind.NO_THROUGHPUT in kinds:
            return NotCompared(kind=NotComparedKind.NO_THROUGHPUT)
        return None
    if not baseline:
        return NotCompared(kind=NotComparedKind.NO_BASELINE)
    base = next((other for other in series_rows if other.is_baseline), None)
    if base is None:
        settings = " ".join(f"{name}={setting_text(value)}" for name, value in baseline.items())
        return NotCompared(kind=NotComparedKind.NO_BASELINE_POINT, subject=settings)
    if base.status is not Status.OK:
        return NotCompared(kind=NotComparedKind.BASELINE_NOT_OK, subject=base.status)
    if base.device_name != row.device_name:
        differ_in_devices_alone = _differ_in_devices_alone(row, base, baseline)
        # Devices of several models are comparable if each model was measured alone.
        has_ideal = (
            differ_in_devices_alone
            and _has_throughput(base)
            and speeds.sum_of_devices(row) is not None
        )
        if not has_ideal and len(set(_models_of(row))) < 2:
            subject = base.device_name or ""
            return NotCompared(kind=NotComparedKind.OTHER_DEVICE, subject=subject)
        if not has_ideal:
            missing = " and ".join(speeds.missing_models(row)) or base.device_name or ""
            return NotCompared(kind=NotComparedKind.NOT_MEASURED_ALONE, subject=missing)
    if not _has_throughput(base):
        return NotCompared(kind=NotComparedKind.BASELINE_WITHOUT_THROUGHPUT)
    if why := _why_clocks_differ(row, base):
        return why
    bases = list(dict.fromkeys(other.point_id for other in series_rows if other.is_baseline))
    if len(bases) > 1:
        return NotCompared(
            kind=NotComparedKind.SEVERAL_BASELINES, value=len(bases), subject=" and ".join(bases)
        )
    return None


def _has_throughput(row: PointRow) -> bool:
    """Return whether a point is ok and has a throughput."""
    return row.status is Status.OK and bool(row.throughput)


def _is_same(stored: Any, expected: Scalar) -> bool:
    """Return whether two settings are equal as text or as numbers, because tables hold text."""
    if stored is None:
        return False
    if setting_text(stored) == setting_text(expected):
        return True
    number = number_of(stored)
    return number is not None and number == number_of(expected)


def _why_clocks_differ(row: PointRow, base: PointRow) -> NotCompared | None:
    """Return why clocks forbid a comparison with the baseline; None if they do not."""
    for point, kind in (
        (base, NotComparedKind.BASELINE_CLOCKS_LIMITED),
        (row, NotComparedKind.CLOCKS_LIMITED),
    ):
        reasons = [reason for reason in _throttle_reasons(point) if reason not in NORMAL_LIMITS]
        if reasons:
            return NotCompared(kind=kind, subject=", ".join(reasons))
    ratio = _clock_ratio(row, base)
    if ratio is None:
        return None
    # A power cap is normal: a device with less work draws less power and clocks higher.
    slower = row if ratio < 1 else base
    if "power_cap" in _throttle_reasons(slower):
        return None
    return NotCompared(
        kind=NotComparedKind.CLOCKS_DIFFER,
        value=row.sm_clock_mhz_p50,
        of_baseline=base.sm_clock_mhz_p50,
    )


def _clock_ratio(row: PointRow, base: PointRow) -> float | None:
    """Return the ratio of the SM clocks of two points; None if unknown or within 1 % of 1."""
    mhz, base_mhz = row.sm_clock_mhz_p50, base.sm_clock_mhz_p50
    # Clocks of different models are not comparable.
    if row.device_name != base.device_name or not mhz or not base_mhz:
        return None
    ratio = mhz / base_mhz
    return None if abs(math.log(ratio)) <= _EQUAL_CLOCKS else ratio


def _throttle_reasons(row: PointRow) -> Sequence[str]:
    """Return the reasons why the clocks of a point were limited; empty if they were not."""
    return (row.throttle_reasons or ("unknown",)) if row.throttled else ()


# Settings of EXECUTION that say neither which devices work, nor how they share the work.
_EXECUTION_WITHOUT_DEVICES = tuple(name for name in EXECUTION if name not in ("devices", *UNEVEN))


def _models_of(row: PointRow) -> Sequence[str]:
    """Return the device model of each rank; empty if unknown."""
    if row.models_by_rank:
        return row.models_by_rank
    return (row.device_name,) * row.world_size if row.device_name else ()


def probe_speeds(row: PointRow) -> list[float]:
    """Return the samples/s of each device alone with an equal share of the batch, in rank order.

    Uses the probes of an uneven step; empty without probes.
    """
    if not row.global_batch_size or not row.fixed_ms_by_rank or not row.speed_by_rank:
        return []
    equal_share = max(1, round(row.global_batch_size / row.world_size))
    speeds = []
    for fixed_ms, items_per_s in zip(row.fixed_ms_by_rank, row.speed_by_rank, strict=True):
        step_s = fixed_ms / MS_PER_S + equal_share / items_per_s
        speeds.append(equal_share / step_s)
    return speeds


class _SingleDeviceSpeeds:
    """Samples/s of a single device of each model, from the points of a run with one device."""

    def __init__(self, rows: Iterable[PointRow]) -> None:
        # Key: settings, and then the device model.
        self._samples_per_s: dict[tuple[object, ...], dict[str, float]] = {}
        for row in rows:
            # A `slow_ratio` below 1 emulates a slower device.
            is_single = row.world_size == 1 and row.slow_ratio == 1 and row.status is Status.OK
            if is_single and row.throughput and len(_models_of(row)) == 1:
                speeds = self._samples_per_s.setdefault(_settings_without_devices(row), {})
                speeds.setdefault(_models_of(row)[0], row.throughput)

    def sum_of_devices(self, row: PointRow) -> float | None:
        """Return the sum of samples/s of the devices, each measured alone; None if unknown."""
        if row.world_size == 1:
            return row.throughput
        speeds = self._samples_per_s.get(_settings_without_devices(row), {})
        models = _models_of(row)
        if models and not self.missing_models(row):
            return sum(speeds[model] for model in models)
        # The probes of an uneven step measure each device alone, too.
        return sum(probe_speeds(row)) or None

    def missing_models(self, row: PointRow) -> Sequence[str]:
        """Return the device models of a point that were not measured alone."""
        speeds = self._samples_per_s.get(_settings_without_devices(row), {})
        # An emulated slow device is slower than a device of its model.
        if row.slow_ratio != 1:
            speeds = {}
        return [model for model in dict.fromkeys(_models_of(row)) if model not in speeds]


def _settings_without_devices(row: PointRow) -> tuple[object, ...]:
    """Return the settings that do not depend on the devices of a point."""
    names = ["workload", "scaling", *_EXECUTION_WITHOUT_DEVICES]
    if batch := batch_column(row):
        names.append(batch)
    return (*(str(setting_of(row, name)) for name in names), *sorted(row.params.items()))


# Shares of a step that are lost, by cause; their sum is 1 - efficiency.
LOSSES = (
    *("lost_comm", "lost_compute", "lost_wait", "lost_data", "lost_host"),
    "lost_unexplained",
)
# The losses that have a cause: all but the last.
_LOSSES_WITH_CAUSE = LOSSES[:-1]


def has_causes(row: object) -> bool:
    """Return whether a row has a loss with a known cause."""
    return any(getattr(row, name, None) is not None for name in _LOSSES_WITH_CAUSE)


def shares_of_loss(row: PointRow, base: PointRow, efficiency: float) -> dict[str, float | None]:
    """Return the shares of the step that are lost, by cause; their sum is 1 - efficiency.

    The loss of a part is its time minus the time that perfect scaling would give it. A negative
    loss is time gained.

    * lost_comm: exposed communication.
    * lost_wait: the excess of the slowest rank over another rank.
    * lost_compute: work of the device of that other rank.
    * lost_data: the next batch is late; on a GPU only while the device is idle.
    * lost_host: the device is idle because the host is late for other reasons.
    * lost_unexplained: the rest, such as `unexplained_ms` and stalls.

    A loss is None if its part was not measured. The result is empty without step times.

    Args:
        row: a point that has a throughput and a valid breakdown (`why_no_breakdown`).
        base: the baseline point; the same holds for it.
        efficiency: efficiency of `row`.
    """
    step_ms, base_step_ms = _mean_or_median_ms(row), _mean_or_median_ms(base)
    if not step_ms or not base_step_ms:
        return {}
    # Work per step and rank / the same of the baseline point; about 1 in weak scaling.
    work_ratio = efficiency * step_ms / base_step_ms
    parts, base_parts = _scaled_parts_ms(row), _scaled_parts_ms(base)
    losses_ms: dict[str, float | None] = {}
    for cause, part_ms in parts.items():
        base_part_ms = base_parts[cause]
        losses_ms[cause] = None
        if part_ms is not None and base_part_ms is not None:
            losses_ms[cause] = part_ms - work_ratio * base_part_ms
    if row.device_type != "cpu":
        # Late data costs only while the device is idle. The host causes all other idle time.
        data_ms, idle_ms = losses_ms["lost_data"], losses_ms["lost_host"]
        idle_for_data_ms = None
        if data_ms is not None and idle_ms is not None:
            idle_for_data_ms = min(max(0.0, data_ms), max(0.0, idle_ms))
        losses_ms["lost_data"] = idle_for_data_ms
        losses_ms["lost_host"] = None if idle_ms is None else idle_ms - (idle_for_data_ms or 0.0)
    shares: dict[str, float | None] = {}
    for cause, loss_ms in losses_ms.items():
        shares[cause] = None if loss_ms is None else loss_ms / step_ms
    explained = sum(share for share in shares.values() if share is not None)
    return {**shares, "lost_unexplained": 1 - efficiency - explained}


def _scaled_parts_ms(row: PointRow) -> dict[str, float | None]:
    """Return the part of the step for each cause of a loss, scaled to the step of all rounds."""
    round_step_ms = step_of_parts(row)
    if not round_step_ms or not row.step_ms_p50:
        return dict.fromkeys(_LOSSES_WITH_CAUSE)
    # The parts were measured in one round. Other rounds are assumed to have the same shares.
    factor = row.step_ms_p50 / round_step_ms
    round_mean_ms = (_mean_or_median_ms(row) or 0.0) / factor
    parts = _parts_ms(row, round_mean_ms)
    return {cause: None if ms is None else factor * ms for cause, ms in parts.items()}


def _parts_ms(row: PointRow, mean_ms: float) -> dict[str, float | None]:
    """Return cause of a loss -> its part of the step in a round whose mean step is `mean_ms`."""
    parts: dict[str, float | None] = dict.fromkeys(_LOSSES_WITH_CAUSE)
    local_ms, data_ms, host_gap_ms = row.local_step_ms, row.data_ms, row.host_gap_ms
    parts["lost_data"] = data_ms
    if local_ms is None:
        return parts
    # `local_ms` is the longest step without communication. Take the wait from its rank, which is
    # the slowest, and the other parts from a typical rank.
    is_alone = row.world_size == 1
    excess_ms = 0.0 if is_alone else row.straggler_ms
    typical_ms = local_ms - (excess_ms or 0.0)
    device_by_rank, local_by_rank = row.device_ms_by_rank or (), row.local_step_ms_by_rank or ()
    # The device time of the slowest rank, unless the times of all ranks are known.
    device_ms = None if host_gap_ms is None else local_ms - host_gap_ms
    if len(device_by_rank) == 1:
        device_ms = device_by_rank[0]
    elif device_by_rank and len(device_by_rank) == len(local_by_rank):
        _, typical_rank = slowest_and_other(local_by_rank)
        device_ms = device_by_rank[typical_rank]
    if is_alone and device_ms is not None:
        # A single rank has no communication, so its local step is at most the mean step.
        typical_ms = min(typical_ms, max(mean_ms, device_ms))
    if row.device_type == "cpu":
        parts["lost_compute"] = typical_ms - (data_ms or 0.0)
    elif device_ms is not None:
        parts["lost_compute"], parts["lost_host"] = device_ms, typical_ms - device_ms
    parts["lost_comm"] = 0.0 if is_alone else row.comm_exposed_ms
    parts["lost_wait"] = excess_ms
    return parts


def _mean_or_median_ms(row: PointRow) -> float | None:
    """Return the mean step in ms; the median step without local steps."""
    return row.step_ms_mean if row.local_step_ms_by_rank else row.step_ms_p50


# Columns of `summary` that have another name in `points`.
_POINTS_NAMES = {
    "step_ms": "step_ms_p50",
    "throughput_items_per_s": "throughput",
    "data_wait_ms": "data_ms",
    "device_idle_ms": "host_gap_ms",
    "peak_memory_bytes": "peak_mem_allocated_bytes",
    "bus_gb_s": "busbw_gb_s",
}
# Columns of `summary` that are not copied from `points`.
_COMPUTED = ("job_name", "params_json", "metrics_json", "doubts")


def write_summary(store: RunStore, run: Run) -> None:
    """Write the table `summary` of a run, except for a health check or damaged points.

    Raises:
        ResultsError: the folder is gone or cannot be written.
    """
    if run.is_health_check:
        return
    try:
        points = point_rows(reader.load_table(store.root, "points", run.run_id))
    except ResultsError:
        # The report names the damaged file.
        return
    store.write_summary(summary_rows(run, points))


def summary_rows(run: Run, points: Iterable[PointRow]) -> list[SummaryRow]:
    """Return a row for each point of a run, with the mean of its rounds.

    params_json has typed parameters, and settings of OPTIONAL that are not at their default.

    Args:
        points: all attempts of the run.
    """
    summary = []
    for row in scaling(points, run.baseline):
        params = {name: typed_value(text) for name, text in row.params.items()}
        for name in OPTIONAL:
            value = getattr(row, name)
            if value != RUN_SETTINGS[name].default:
                params[name] = value
        copied = {}
        for name in SummaryRow.__dataclass_fields__:
            if name not in _COMPUTED:
                copied[name] = getattr(row, _POINTS_NAMES.get(name, name))
        doubt_kinds = dict.fromkeys(doubt.kind.value for doubt in row.doubts or ())
        summary.append(
            SummaryRow(
                job_name=run.job_name,
                params_json=json.dumps(params),
                metrics_json=json.dumps(dict(row.workload_metrics or {})),
                doubts=None if row.doubts is None else tuple(doubt_kinds),
                **copied,
            )
        )
    return summary


def typed_value(text: str) -> bool | int | float | str:
    """Return the bool or finite number that a text is in JSON, or else the text."""
    try:
        value = json.loads(text)
        is_number = isinstance(value, bool | int | float) and math.isfinite(value)
    except (ValueError, OverflowError, RecursionError):
        return text
    return value if is_number else text
