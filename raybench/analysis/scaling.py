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

# Settings that make a series, besides the workload's parameters and the batch that the job fixed.
_SETTINGS = tuple(name for name in SETTINGS if name != "batch")
# Settings that say which devices run a point, and how the devices share its work.
_OF_DEVICES = frozenset({"world_size", "strategy", "devices", *UNEVEN, *DEGREES})
# A larger relative difference between the clocks of two points is not noise.
_LARGEST_DIFFERENCE = 0.01

Derived = dict[str, Any]  # fields of a ScaledRow


def scaling(points: Iterable[PointRow], baseline: Mapping[str, Scalar]) -> list[ScaledRow]:
    """Return one row per point (`mean_of_rounds`) with its speed-up over its baseline point.

    A series is all points that are equal in every setting that the baseline does not name. speed_up
    is None for a point that is not ok or has no throughput; `why` has the reason for ok points.

    * Intervals (`*_low`, `*_high`) are over the rounds of the run. Intervals of speed-up and
      efficiency use the ratios within each round. See `raybench.stats.summary`.
    * efficiency is speed_up / (world_size / world_size of the baseline point). It is known if the
      baseline names world_size, and the two points differ in their devices alone. If devices are
      of several models or emulated, the ideal is the sum of what each device does alone
      (`_OwnSpeeds`); losses and serial_fraction are then unknown.
    * serial_fraction, in strong scaling, is e = (1 / speed_up - 1 / p) / (1 - 1 / p) with p times
      the devices, and e / (b - (b - 1) e) if the baseline has b devices: A. H. Karp, H. P. Flatt,
      "Measuring parallel processor performance", Communications of the ACM 33(5), 1990. It covers
      all losses, not serial code alone.
    * Parts of the step that contradict the step are None; `why_no_breakdown` has the reason.
    * `doubts` is None if the point is not ok, or the stored doubts are unknown and the columns give
      no doubts.

    Args:
        points: all attempts of one run, with controls.
        baseline: settings of the baseline points; empty without a baseline.
    """
    points = list(points)
    trials = Trials(points)
    rows = [_with_own_columns(row, trials, baseline) for row in mean_of_rounds(points)]
    # Sort the points into series.
    series: dict[tuple[Any, ...], list[ScaledRow]] = {}
    for row in rows:
        names = (*_SETTINGS, *filter(None, [batch_column(row)]))
        settings = ((name, str(getattr(row, name))) for name in names if name not in baseline)
        params = sorted((k, v) for k, v in row.params.items() if k not in baseline)
        series.setdefault((*settings, *params), []).append(row)
    # Compare each point with the baseline point of its series.
    speeds = _OwnSpeeds(rows)
    derived: dict[str, Derived] = {}
    ratios = []
    for number, members in enumerate(series.values()):
        base = next((row for row in members if row.is_baseline), None)
        for row in members:
            values: Derived = {"series": number, "why": _why_not(row, members, baseline, speeds)}
            if base is not None and values["why"] is None and _has_throughput(row):
                is_scaling = _differ_in_devices_alone(row, base, baseline)
                values |= _against(row, base, is_scaling, trials, speeds)
            if base is not None and row is not base and "speed_up" in values:
                ratios.append((row, trials.log_ratios(base, row)))
            derived[row.point_id] = values
    # Add the intervals over the rounds. All points together show how far starts lie apart.
    times = [(row, trials.logs(row, lambda attempt: attempt.step_ms_p50)) for row in rows]
    rates = [(row, trials.logs(row, lambda attempt: attempt.throughput)) for row in rows]
    for logs, columns in (
        (times, ("step_ms",)),
        (rates, ("throughput",)),
        (ratios, ("speed_up", "efficiency")),
    ):
        for row, half_width in half_widths(logs):
            values = derived[row.point_id]
            centers = {"step_ms": row.step_ms_p50, "throughput": row.throughput} | values
            for name in columns:
                if (center := centers.get(name)) is not None:
                    values[f"{name}_low"] = center * math.exp(-half_width)
                    values[f"{name}_high"] = center * math.exp(half_width)
    with_derived = []
    for row in rows:
        values = derived[row.point_id]
        # Doubts about the comparison are added to the doubts about the point.
        of_comparison = values.pop("doubts", ())
        doubts = (*(row.doubts or ()), *of_comparison) if of_comparison else row.doubts
        with_derived.append(replace(row, **values, doubts=doubts))
    return with_derived


def _with_own_columns(row: PointRow, trials: Trials, baseline: Mapping[str, Scalar]) -> ScaledRow:
    """Return a point with the derived columns that need no other point."""
    reason = why_no_breakdown(row)
    column = batch_column(row)
    mean_ms, sd_ms = row.step_ms_mean, row.step_ms_std
    # The wall time of the first rank belongs to the round whose step was broken down.
    wall_ms = next(iter(row.wall_unsynced_ms_by_rank or ()), None)
    step_ms = step_of_parts(row)
    is_ok = row.status is Status.OK
    ok_rounds = trials.rounds(row).values() if is_ok else ()
    values = {**vars(row), "doubts": _known_doubts(row) if is_ok else None}
    if reason:
        # Parts that contradict the step are not shown.
        values |= dict.fromkeys((*BREAKDOWN, "host_bound"))
    return ScaledRow(
        **values,
        batch=getattr(row, column) if column else None,
        rounds=len(trials.rounds(row)),
        is_baseline=bool(baseline)
        and all(_is_same(setting_of(row, name), value) for name, value in baseline.items()),
        samples_per_joule=samples_per_joule(ok_rounds),
        wall_unsynced_share=wall_ms / step_ms if wall_ms and step_ms else None,
        scatter=None if not mean_ms or sd_ms is None else sd_ms / mean_ms,
        why_no_breakdown=reason,
    )


def _known_doubts(row: PointRow) -> tuple[Doubt, ...] | None:
    """Return stored doubts and doubts that follow from columns; None if both are unknown."""
    # Stored doubts of these kinds describe single rounds, so derive them again from the columns of
    # the mean over the rounds.
    stored = (doubt for doubt in row.doubts or () if doubt.kind not in DERIVED_FROM_MEAN)
    doubts = worst_of_each((*stored, *column_doubts(row)))
    return doubts if doubts or row.doubts is not None else None


def samples_per_joule(rounds: Iterable[PointRow]) -> float | None:
    """Return the samples of all rounds divided by the energy of their steps; None if unknown."""
    samples, used_j = 0.0, 0.0
    for row in rounds:
        steps = (row.iterations or 0) * (row.inner_iterations or 0)
        of_round = (row.throughput or 0.0) * (row.step_ms_mean or 0.0) / MS_PER_S * steps
        if not of_round or not row.energy_j:
            return None
        samples, used_j = samples + of_round, used_j + row.energy_j
    return samples / used_j if used_j else None


def _against(
    row: ScaledRow, base: ScaledRow, is_scaling: bool, trials: Trials, speeds: _OwnSpeeds
) -> Derived:
    """Return the columns that follow from the comparison with the baseline point.

    Args:
        is_scaling: whether the points differ in devices alone, so that the speed-up has an ideal.
    """
    ratios = trials.log_ratios(base, row)
    if not ratios:
        return {"why": NotCompared(kind=NotComparedKind.NO_COMMON_ROUND)}
    speed_up = math.exp(sum(ratios.values()) / len(ratios))
    peak, base_peak = row.peak_mem_allocated_bytes, base.peak_mem_allocated_bytes
    values: Derived = {
        "speed_up": speed_up,
        "memory_ratio": None if peak is None or not base_peak else peak / base_peak,
        "clock_ratio": _clock_ratio(row, base),
        "doubts": tuple(_doubts_beside(row, base)),
    }
    if not is_scaling:
        return values
    has_uneven_devices = row.slow_ratio < 1 or len({*_models_of(row), *_models_of(base)}) > 1
    if has_uneven_devices:
        # The ideal is the sum of what each device does alone.
        ideal, base_ideal = speeds.together(row), speeds.together(base)
        if ideal and base_ideal:
            values["efficiency"] = speed_up * base_ideal / ideal
        return values
    devices = row.world_size / base.world_size
    efficiency = speed_up / devices
    if row.scaling == "strong" and devices > 1:
        # Karp and Flatt give e, the serial share of the time of the baseline with its b devices.
        # Amdahl's law gives e = f / (f + (1 - f) / b) for the serial share f of the time of one
        # device. Solve for f. A point that is much slower than the baseline has no solution.
        serial = (1 / speed_up - 1 / devices) / (1 - 1 / devices)
        divisor = base.world_size - (base.world_size - 1) * serial
        values["serial_fraction"] = serial / divisor if divisor > 0 else None
    values["why_no_losses"] = _why_no_losses(row, base)
    if not (row.why_no_breakdown or base.why_no_breakdown):
        values |= shares_of_loss(row, base, efficiency)
    return values | {"efficiency": efficiency}


def _doubts_beside(row: ScaledRow, base: ScaledRow) -> Iterator[Doubt]:
    """Yield the doubts about the comparison of a point with its baseline point."""
    if base.stable is False:
        yield Doubt(kind=DoubtKind.BASE_UNSTEADY, value=base.warmup_iterations)
    if (ratio := _clock_ratio(row, base)) is not None:
        yield Doubt(kind=DoubtKind.OTHER_CLOCKS, value=ratio, limit=1.0)
    kernels, base_kernels = row.attention_kernels, base.attention_kernels
    is_asked = row.params.get("attention") != base.params.get("attention")
    if kernels and base_kernels and kernels != base_kernels and not is_asked:
        here, there = ", ".join(kernels), ", ".join(base_kernels)
        subject = f"`{here}` here and `{there}` at the baseline point"
        yield Doubt(kind=DoubtKind.OTHER_KERNELS, subject=subject)


def _why_no_losses(row: ScaledRow, base: ScaledRow) -> LossesUnknown | None:
    """Return why the losses of a point are unknown; None if both points have a breakdown."""
    if row.is_baseline:
        return None
    for point in (row, base):
        if point.why_no_breakdown:
            return LossesUnknown(reason=NotMeasured.PARTS_EXCEED, is_at_baseline=point is base)
    for point in (row, base):
        if (reason := _why_not_taken_apart(point)) is not None:
            return LossesUnknown(reason=reason, is_at_baseline=point is base)
    return None


def _why_not_taken_apart(row: ScaledRow) -> NotMeasured | None:
    """Return why a part of the step that losses need was not measured."""
    needed = ("compute_ms",) if row.world_size == 1 else ("compute_ms", "comm_exposed_ms")
    for name in needed:
        reason = (row.not_measured or {}).get(name)
        if getattr(row, name) is None and reason is not None:
            return reason
    return None


def _differ_in_devices_alone(
    row: ScaledRow, base: ScaledRow, baseline: Mapping[str, Scalar]
) -> bool:
    """Return whether two points differ in devices alone, and the baseline names world_size."""
    # The job fixes one kind of batch. The other kind follows from the number of devices.
    following = {"batch_size", "global_batch_size"} - {batch_column(row)}
    others = [name for name in baseline if name not in _OF_DEVICES and name not in following]
    return "world_size" in baseline and all(
        _is_same(setting_of(row, name), setting_of(base, name)) for name in others
    )


def half_widths(
    measured: Sequence[tuple[ScaledRow, Mapping[int, float]]],
) -> Iterator[tuple[ScaledRow, float]]:
    """Yield each row with at least two rounds, and half of the 95 % interval of its mean.

    Args:
        measured: each row with round -> logarithm of its value. The half width is a logarithm too.
    """
    columns: dict[int, int] = {}
    for _, logs in measured:
        for number in logs:
            columns.setdefault(number, len(columns))
    values = np.full((len(measured), len(columns)), math.nan)
    for index, (_, logs) in enumerate(measured):
        for number, log in logs.items():
            values[index, columns[number]] = log
    scatters = scatter(values) if measured else []
    for (row, logs), of_row in zip(measured, scatters, strict=True):
        if of_row is not None:
            yield row, of_row.half_width(1 / len(logs))


def _why_not(
    row: ScaledRow,
    members: Sequence[ScaledRow],
    baseline: Mapping[str, Scalar],
    speeds: _OwnSpeeds,
) -> NotCompared | None:
    """Return why an ok point cannot be compared; `members` are all points of its series."""
    if not _has_throughput(row):
        is_doubted = any(doubt.kind is DoubtKind.NO_THROUGHPUT for doubt in row.doubts or ())
        return NotCompared(kind=NotComparedKind.NO_THROUGHPUT) if baseline and is_doubted else None
    if not baseline:
        return NotCompared(kind=NotComparedKind.NO_BASELINE)
    base = next((member for member in members if member.is_baseline), None)
    if base is None:
        settings = " ".join(f"{name}={setting_text(value)}" for name, value in baseline.items())
        return NotCompared(kind=NotComparedKind.NO_BASELINE_POINT, subject=settings)
    if base.status is not Status.OK:
        return NotCompared(kind=NotComparedKind.BASELINE_NOT_OK, subject=base.status)
    if base.device_name != row.device_name:
        is_scaling = _differ_in_devices_alone(row, base, baseline)
        # Devices of several models are comparable if each model was measured alone.
        can_be_weighed = is_scaling and _has_throughput(base)
        if not can_be_weighed or speeds.together(row) is None:
            if len(set(_models_of(row))) < 2:
                subject = base.device_name or ""
                return NotCompared(kind=NotComparedKind.OTHER_DEVICE, subject=subject)
            missing = " and ".join(speeds.missing(row)) or base.device_name or ""
            return NotCompared(kind=NotComparedKind.NOT_MEASURED_ALONE, subject=missing)
    if not _has_throughput(base):
        return NotCompared(kind=NotComparedKind.BASELINE_WITHOUT_THROUGHPUT)
    if why := _why_not_comparable(row, base):
        return why
    bases = list(dict.fromkeys(member.point_id for member in members if member.is_baseline))
    if len(bases) > 1:
        return NotCompared(
            kind=NotComparedKind.SEVERAL_BASELINES, value=len(bases), subject=" and ".join(bases)
        )
    return None


def _has_throughput(row: PointRow) -> bool:
    return row.status is Status.OK and bool(row.throughput)


def _is_same(stored: Any, wanted: Scalar) -> bool:
    """Return whether two settings are equal as text or as numbers: tables hold text."""
    if stored is None:
        return False
    if setting_text(stored) == setting_text(wanted):
        return True
    number = number_of(stored)
    return number is not None and number == number_of(wanted)


def _why_not_comparable(row: PointRow, base: PointRow) -> NotCompared | None:
    """Return why clocks forbid a comparison with the baseline.

    A power cap is no obstacle: a device with less work draws less power and clocks higher.
    """
    for point, kind in (
        (base, NotComparedKind.BASELINE_CLOCKS_LIMITED),
        (row, NotComparedKind.CLOCKS_LIMITED),
    ):
        reasons = [reason for reason in _reasons(point) if reason not in NORMAL_LIMITS]
        if reasons:
            return NotCompared(kind=kind, subject=", ".join(reasons))
    ratio = _clock_ratio(row, base)
    if ratio is None or "power_cap" in _reasons(row if ratio < 1 else base):
        return None
    return NotCompared(
        kind=NotComparedKind.CLOCKS_DIFFER,
        value=row.sm_clock_mhz_p50,
        of_baseline=base.sm_clock_mhz_p50,
    )


def _clock_ratio(row: PointRow, base: PointRow) -> float | None:
    """Return the ratio of the SM clocks of two points.

    None if the ratio is unknown or near 1, or if the points ran on different models.
    """
    mhz, base_mhz = row.sm_clock_mhz_p50, base.sm_clock_mhz_p50
    if row.device_name != base.device_name or not mhz or not base_mhz:
        return None
    return None if abs(math.log(mhz / base_mhz)) <= _LARGEST_DIFFERENCE else mhz / base_mhz


def _reasons(row: PointRow) -> Sequence[str]:
    """Return the reasons why the clocks of a point were limited; empty if they were not."""
    return (row.throttle_reasons or ("unknown",)) if row.throttled else ()


# Settings of EXECUTION that do not say which devices work, nor how they share the work.
_ALIKE = tuple(name for name in EXECUTION if name not in ("devices", *UNEVEN))


def _models_of(row: PointRow) -> Sequence[str]:
    """Return the device model of each rank; empty if unknown."""
    same = (row.device_name,) * row.world_size if row.device_name else ()
    return row.models_by_rank or same


def probe_speeds(row: PointRow) -> list[float]:
    """Return the samples/s of each device alone with an equal share of the batch, in rank order.

    Computed from the probes of an uneven step; empty without probes.
    """
    if not row.global_batch_size or not row.fixed_ms_by_rank or not row.speed_by_rank:
        return []
    equal = max(1, round(row.global_batch_size / row.world_size))
    return [
        equal / (fixed / MS_PER_S + equal / rate)
        for fixed, rate in zip(row.fixed_ms_by_rank, row.speed_by_rank, strict=True)
    ]


class _OwnSpeeds:
    """Samples/s of a single device of each model, by the ok points of a run with one device."""

    def __init__(self, rows: Iterable[PointRow]) -> None:
        # Settings -> model -> samples/s.
        self._alone: dict[tuple[object, ...], dict[str, float]] = {}
        for row in rows:
            is_plain = row.world_size == 1 and row.slow_ratio == 1 and row.status is Status.OK
            if is_plain and row.throughput and len(_models_of(row)) == 1:
                by_model = self._alone.setdefault(_key(row), {})
                by_model.setdefault(_models_of(row)[0], row.throughput)

    def together(self, row: PointRow) -> float | None:
        """Return the sum of samples/s of a point's devices, each measured alone."""
        if row.world_size == 1:
            return row.throughput
        alone = self._alone.get(_key(row), {})
        models = _models_of(row)
        if models and not self.missing(row):
            return sum(alone[model] for model in models)
        return sum(probe_speeds(row)) or None

    def missing(self, row: PointRow) -> Sequence[str]:
        """Return the device models of a point that were not measured alone.

        Emulated slow devices count as not measured.
        """
        alone = self._alone.get(_key(row), {}) if row.slow_ratio == 1 else {}
        return [model for model in dict.fromkeys(_models_of(row)) if model not in alone]


def _key(row: PointRow) -> tuple[object, ...]:
    """Return the settings in which a point and the point of a single device must agree."""
    names = ("workload", "scaling", *_ALIKE, batch_column(row) or "status")
    return (*(str(setting_of(row, name)) for name in names), *sorted(row.params.items()))


# Shares of a step that are lost, by cause; their sum is 1 - efficiency.
LOSSES = (
    *("lost_comm", "lost_compute", "lost_wait", "lost_data", "lost_host"),
    "lost_unexplained",
)


def has_causes(row: object) -> bool:
    """Return whether a row has a loss with a known cause."""
    return any(getattr(row, name, None) is not None for name in LOSSES[:-1])


def shares_of_loss(row: PointRow, base: PointRow, efficiency: float) -> dict[str, float | None]:
    """Return the shares of the step that are lost, by cause; their sum is 1 - efficiency.

    The loss of a part is its time minus the time that perfect scaling would give it. That is its
    time in the baseline point, times the ratio of work per step and rank (about 1 in weak scaling).
    A negative loss is time gained.

    * lost_comm: exposed communication (`comm_exposed_ms`).
    * lost_wait: the slowest rank's own step, beyond the other ranks.
    * lost_compute: the device's own work on the other ranks, with the optimizer; with DDP also its
      work around the gradients.
    * lost_data: the next batch is late; on a GPU only while the device is idle.
    * lost_host: the device is idle because the host is late for other reasons.
    * lost_unexplained: the rest, such as `unexplained_ms` and stalls.

    The parts were measured in the first round; other rounds are assumed to have the same shares. A
    loss is None if its part was not measured. The result is empty without step times.

    Args:
        row: a point that has a throughput, and for which `why_no_breakdown` returns None.
        base: the baseline point, as `row`.
        efficiency: efficiency of `row`.
    """
    step_ms, base_ms = _pace_ms(row), _pace_ms(base)
    if not step_ms or not base_ms:
        return {}
    work = efficiency * step_ms / base_ms
    parts, base_parts = _parts_of_rounds(row), _parts_of_rounds(base)
    losses_ms: dict[str, float | None] = {}
    for name, ms in parts.items():
        base_part_ms = base_parts[name]
        losses_ms[name] = None
        if ms is not None and base_part_ms is not None:
            losses_ms[name] = ms - work * base_part_ms
    if row.device_type != "cpu":
        # Late data costs only while the device is idle. The host causes all other idle time.
        data_ms, idle_ms = losses_ms["lost_data"], losses_ms["lost_host"]
        waited_ms = None
        if data_ms is not None and idle_ms is not None:
            waited_ms = min(max(0.0, data_ms), max(0.0, idle_ms))
        losses_ms["lost_data"] = waited_ms
        losses_ms["lost_host"] = None if idle_ms is None else idle_ms - (waited_ms or 0.0)
    shares = {name: None if ms is None else ms / step_ms for name, ms in losses_ms.items()}
    explained = sum(share for share in shares.values() if share is not None)
    return {**shares, "lost_unexplained": 1 - efficiency - explained}


def _parts_of_rounds(row: PointRow) -> dict[str, float | None]:
    """Return `_parts` of the round with a breakdown, scaled to the median step of all rounds."""
    round_step_ms = step_of_parts(row)
    if not round_step_ms or not row.step_ms_p50:
        return dict.fromkeys(LOSSES[:-1])
    factor = row.step_ms_p50 / round_step_ms
    parts = _parts(row, (_pace_ms(row) or 0.0) / factor)
    return {name: None if ms is None else factor * ms for name, ms in parts.items()}


def _parts(row: PointRow, pace_ms: float) -> dict[str, float | None]:
    """Return cause of a loss -> part of the step in ms.

    lost_wait is the slowest rank's excess over another rank. lost_compute, lost_data and lost_host
    are parts of that other rank. Without a breakdown, only lost_data is known.

    Args:
        pace_ms: mean step in the round of the parts.
    """
    parts: dict[str, float | None] = dict.fromkeys(LOSSES[:-1])
    local_ms, data_ms, gap_ms = row.local_step_ms, row.data_ms, row.host_gap_ms
    parts["lost_data"] = data_ms
    if local_ms is None:
        return parts
    is_alone = row.world_size == 1
    excess_ms = 0.0 if is_alone else row.straggler_ms
    own_ms = local_ms - (excess_ms or 0.0)
    # Time of work on the device of the other rank.
    by_rank, local_by_rank = row.device_ms_by_rank or (), row.local_step_ms_by_rank or ()
    if len(by_rank) == 1:
        device_ms: float | None = by_rank[0]
    elif by_rank and len(by_rank) == len(local_by_rank):
        device_ms = by_rank[slowest_and_other(local_by_rank)[1]]
    else:
        device_ms = None if gap_ms is None else local_ms - gap_ms
    if is_alone and device_ms is not None:
        # A single rank waits for nobody, so its own step is at most the mean step.
        own_ms = min(own_ms, max(pace_ms, device_ms))
    if row.device_type == "cpu":
        parts["lost_compute"] = own_ms - (data_ms or 0.0)
    elif device_ms is not None:
        parts["lost_compute"], parts["lost_host"] = device_ms, own_ms - device_ms
    comm_ms = 0.0 if is_alone else row.comm_exposed_ms
    return {**parts, "lost_comm": comm_ms, "lost_wait": excess_ms}


def _pace_ms(row: PointRow) -> float | None:
    """Return the mean step in ms; the median step without local steps."""
    return row.step_ms_mean if row.local_step_ms_by_rank else row.step_ms_p50


# Columns of `summary` with another name in `points`, and columns that `points` lacks.
_SOURCES = {
    "step_ms": "step_ms_p50",
    "throughput_items_per_s": "throughput",
    "data_wait_ms": "data_ms",
    "device_idle_ms": "host_gap_ms",
    "peak_memory_bytes": "peak_mem_allocated_bytes",
    "bus_gb_s": "busbw_gb_s",
}
_MADE = ("job_name", "params_json", "metrics_json", "doubts")


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
        return  # the report names the damaged file
    store.write_summary(summary_rows(run, points))


def summary_rows(run: Run, points: Iterable[PointRow]) -> list[SummaryRow]:
    """Return a row for each point of a run.

    params_json has typed parameters, and settings of OPTIONAL that are not at their default.

    Args:
        run: the run.
        points: its rows in `points`, all attempts.
    """
    summary = []
    for row in scaling(points, run.baseline):
        settings = {name: getattr(row, name) for name in OPTIONAL}
        changed = {n: value for n, value in settings.items() if value != RUN_SETTINGS[n].default}
        typed = {name: typed_value(text) for name, text in row.params.items()}
        copied = {
            name: getattr(row, _SOURCES.get(name, name))
            for name in SummaryRow.__dataclass_fields__
            if name not in _MADE
        }
        kinds = dict.fromkeys(doubt.kind.value for doubt in row.doubts or ())
        summary.append(
            SummaryRow(
                job_name=run.job_name,
                params_json=json.dumps(typed | changed),
                metrics_json=json.dumps(dict(row.workload_metrics or {})),
                doubts=None if row.doubts is None else tuple(kinds),
                **copied,
            )
        )
    return summary


def typed_value(text: str) -> bool | int | float | str:
    """Return the bool or finite number that a text is in JSON, else the text."""
    try:
        value = json.loads(text)
        is_number = isinstance(value, bool | int | float) and math.isfinite(value)
    except (ValueError, OverflowError, RecursionError):
        return text
    return value if is_number else text
