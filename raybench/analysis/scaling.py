"""Speed-up and scaling efficiency of points against the baseline point of their series.

Also which precision and batch size get the most out of the devices. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.losses import LOSSES, shares_of_loss
from raybench.analysis.own_speeds import OwnSpeeds, differ, models_of
from raybench.analysis.rounds import Trials, mean_of_rounds, records
from raybench.analysis.settings import OPTIONAL, SETTINGS, batch_column, number_of, setting
from raybench.analysis.typed_rows import typed_rows
from raybench.job.point import Scalar, setting_text
from raybench.records import Status
from raybench.results.metrics import DERIVED
from raybench.results.point_row import PointRow, TransitionalMapping
from raybench.results.quality import (
    BREAKDOWN,
    NO_ITEMS,
    why_no_breakdown,
)
from raybench.stats.starts import scatter

Row = Mapping[str, Any]

# Settings that make a series besides the workload's parameters; the batch of the scaling kind
# joins them. In weak scaling the global batch follows from the others, in strong the local one.
_SETTINGS = tuple(name for name in SETTINGS if name != "batch")
_DERIVED = {
    "batch": "object",
    "rounds": "int64",
    "step_ms_low": "float64",
    "step_ms_high": "float64",
    "series": "int64",
    "is_baseline": "bool",
    "speed_up": "float64",
    "speed_up_low": "float64",
    "speed_up_high": "float64",
    "efficiency": "float64",
    "efficiency_low": "float64",
    "efficiency_high": "float64",
    "clock_ratio": "float64",
    **dict.fromkeys(LOSSES, "float64"),
    "serial_fraction": "float64",
    "memory_ratio": "float64",
    "samples_per_joule": "float64",
    "why": "object",
    "is_base_unsteady": "bool",
    "why_no_breakdown": "object",
} | {metric.name: "float64" for metric in DERIVED}
_UNKNOWN = dict.fromkeys(name for name, kind in _DERIVED.items() if kind == "float64")


@dataclass(frozen=True, kw_only=True)
class ScaledRow(PointRow):
    """A point with what `scaling` derives; what each is, and when it is None, stands there."""

    batch: int | None = None
    rounds: int = 0
    step_ms_low: float | None = None
    step_ms_high: float | None = None
    series: int = 0
    is_baseline: bool = False
    speed_up: float | None = None
    speed_up_low: float | None = None
    speed_up_high: float | None = None
    efficiency: float | None = None
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    clock_ratio: float | None = None
    lost_comm: float | None = None
    lost_compute: float | None = None
    lost_wait: float | None = None
    lost_data: float | None = None
    lost_host: float | None = None
    lost_unexplained: float | None = None
    serial_fraction: float | None = None
    memory_ratio: float | None = None
    samples_per_joule: float | None = None
    why: str | None = None
    is_base_unsteady: bool = False
    why_no_breakdown: str | None = None
    scatter: float | None = None


def scaled_rows(scaled: pd.DataFrame) -> list[ScaledRow]:
    """Return the rows of what `scaling` gives."""
    return typed_rows(scaled, ScaledRow)


def scaling(points: pd.DataFrame, baseline: Mapping[str, Scalar]) -> pd.DataFrame:
    """Each point, as `mean_of_rounds` has it, with its speed-up against its series' baseline point.

    points: rows of the table `points`, as `raybench.load` gives them (params are dicts).
    baseline: settings of the baseline points; a series is all points that are equal in every
    other setting (weak: batch_size, strong: global_batch_size; weak and strong apart).

    Columns besides those of `points`, null where they are not known:

    * batch: of the scaling kind; None where the workload takes none.
    * rounds: how many are ok.
    * step_ms_low, step_ms_high: the 95 % interval of the step time over the rounds of this run,
      see `raybench.stats.starts`. Null where the point has one round.
    * scatter: standard deviation of the samples of one start over their mean.
    * series: counts from 0. is_baseline.
    * speed_up: throughput / that of the baseline point; of several rounds the geometric mean of
      the ratios within each.
    * efficiency: speed_up / (world_size / that of the baseline point), where the baseline names
      world_size. Where devices differ: over what each of them does alone, added up, see
      `raybench.analysis.own_speeds`; losses and serial fraction are not known then.
    * clock_ratio: SM clocks over those of the baseline point, where a power cap makes them differ
      by more than 1 %: at most so much of the speed-up is the clocks'.
    * *_low, *_high: their 95 % intervals, by the ratios within each round. Null as above.
    * lost_*: what of the step is lost against efficiency 1, and to what, see `shares_of_loss`.
    * serial_fraction: in strong scaling, e = (1 / speed_up - 1 / p) / (1 - 1 / p) with p times the
      devices, and e / (b - (b - 1) e) where the baseline has b of them: A. H. Karp, H. P. Flatt,
      "Measuring parallel processor performance", Communications of the ACM 33(5), 1990. It holds
      all that is lost, not serial code alone.
    * memory_ratio: peak_mem_allocated_bytes / that of the baseline point.
    * samples_per_joule: of all devices, in the timed iterations: samples/s per watt.
    * is_base_unsteady: whether the baseline point of a speed-up did not settle, or drifted.
    * why: the reason for which an ok point with a throughput has no speed-up.
    * why_no_breakdown: the reason for which the parts of the step, and what follows from them, are
      null here though `points` has them.
    """
    latest, trials = mean_of_rounds(points), Trials(points)
    rows = records(latest)
    series: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        row["rounds"] = len(trials.rounds(row))
        row |= _UNKNOWN | {"batch": _batch(row), "samples_per_joule": _samples_per_joule(row)}
        row["scatter"] = _scatter(row)
        row |= _check_breakdown(row)
        row["is_baseline"] = bool(baseline) and all(
            _is_same(setting(row, name), value) for name, value in baseline.items()
        )
        series.setdefault(_series_key(row, baseline), []).append(row)
    own = OwnSpeeds(rows)
    for number, members in enumerate(series.values()):
        _compare(number, members, baseline, trials, own)
    _add_intervals(rows, series.values(), trials)
    return _frame(rows, [*latest.columns, *_DERIVED])


def _batch(row: Row) -> int | None:
    column = batch_column(row)
    return None if column is None or pd.isna(row[column]) else int(row[column])


def _scatter(row: Row) -> float | None:
    mean_ms, sd_ms = row["step_ms_mean"], row["step_ms_std"]
    return None if pd.isna(mean_ms) or pd.isna(sd_ms) or not mean_ms else sd_ms / mean_ms


def _check_breakdown(row: Row) -> dict[str, Any]:
    """Make the columns of the breakdown, null where it contradicts the step, and the reason."""
    reason = why_no_breakdown(row)
    blanked = dict.fromkeys((*BREAKDOWN, "host_bound")) if reason else {}
    return {**blanked, "why_no_breakdown": reason}


def _series_key(row: Row, baseline: Mapping[str, Scalar]) -> tuple[Any, ...]:
    names = ("run_id", *_SETTINGS, *filter(None, [batch_column(row)]))
    settings = tuple((name, str(row[name])) for name in names if name not in baseline)
    params = tuple(sorted((k, v) for k, v in row["params"].items() if k not in baseline))
    return (*settings, *params)


def _compare(
    number: int,
    members: Sequence[dict[str, Any]],
    baseline: Mapping[str, Scalar],
    trials: Trials,
    own: OwnSpeeds,
) -> None:
    """Fill in the derived columns of one series, but for the intervals."""
    base = _base(members)
    tied = list(dict.fromkeys(row["point_id"] for row in members if row["is_baseline"]))
    for row in members:
        why = _why_not(row, base, baseline, own)
        if why is None and len(tied) > 1 and _has_throughput(row):
            why = f"{len(tied)} points match the baseline of this series: {' and '.join(tied)}"
        row |= {"series": number, "why": why, "is_base_unsteady": False}
        if why is not None or base is None or not _has_throughput(row):
            continue
        ratios = trials.log_ratios(base, row)
        if not ratios:
            row["why"] = "baseline point was not ok in any round of this point"
            continue
        row["speed_up"] = math.exp(sum(ratios.values()) / len(ratios))
        row["memory_ratio"] = _memory_ratio(row, base)
        row["clock_ratio"] = _clock_ratio(row, base)
        row["is_base_unsteady"] = not pd.isna(base["stable"]) and not base["stable"]
        if "world_size" in baseline:
            row |= _scale_differing(row, base, own) if differ(row, base) else _scale(row, base)


def _scale_differing(row: Row, base: Row, own: OwnSpeeds) -> dict[str, Any]:
    """Compute the efficiency of devices that are not alike; where one's speed is unknown, none."""
    ideal, of_base = own.together(row), own.together(base)
    return {"efficiency": row["speed_up"] * of_base / ideal if ideal and of_base else None}


def _scale(row: Row, base: Row) -> dict[str, Any]:
    """Compute what a speed-up over the number of devices comes to."""
    devices = row["world_size"] / base["world_size"]
    speed_up = row["speed_up"]
    efficiency = speed_up / devices
    is_serial = row["scaling"] == "strong" and devices > 1
    return {
        "efficiency": efficiency,
        **_shares_of_loss(row, base, efficiency),
        "serial_fraction": _serial_fraction(row, base) if is_serial else None,
    }


def _serial_fraction(row: Row, base: Row) -> float | None:
    """Of the work on one device, also where the baseline point has several.

    Karp and Flatt's is the share of the baseline's time; Amdahl's law takes it from there to one
    device: e = f / (f + (1 - f) / b) for b devices, solved for f.
    """
    devices = row["world_size"] / base["world_size"]
    of_base = (1 / row["speed_up"] - 1 / devices) / (1 - 1 / devices)
    several = base["world_size"]
    share = several - (several - 1) * of_base
    # Slower than the baseline by so much that Amdahl's law has no such share.
    return float(of_base / share) if share > 0 else None


def _shares_of_loss(row: Row, base: Row, efficiency: float) -> Mapping[str, float | None]:
    """None of them known where one of the two breakdowns contradicts its step."""
    is_contradicted = row["why_no_breakdown"] or base["why_no_breakdown"]
    return dict.fromkeys(LOSSES) if is_contradicted else shares_of_loss(row, base, efficiency)


def _memory_ratio(row: Row, base: Row) -> float | None:
    taken, of_base = (r["peak_mem_allocated_bytes"] for r in (row, base))
    return None if pd.isna(taken) or pd.isna(of_base) or not of_base else taken / of_base


def _base(members: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return next((row for row in members if row["is_baseline"]), None)


def _add_intervals(
    rows: Iterable[dict[str, Any]], series: Iterable[Sequence[dict[str, Any]]], trials: Trials
) -> None:
    """Fill in the intervals over rounds of step times, speed-ups and efficiencies."""
    times = [(row, _log_times(row, trials)) for row in rows if row["status"] == "ok"]
    for row, half_width in _half_widths(times):
        low, high = math.exp(-half_width), math.exp(half_width)
        row |= {"step_ms_low": row["step_ms_p50"] * low, "step_ms_high": row["step_ms_p50"] * high}
    ratios = [
        (row, trials.log_ratios(base, row))
        for members in series
        if (base := _base(members)) is not None
        for row in members
        if row["speed_up"] is not None and row is not base
    ]
    for row, half_width in _half_widths(ratios):
        low, high = math.exp(-half_width), math.exp(half_width)
        for name in ("speed_up", "efficiency"):
            if row[name] is not None:
                row |= {f"{name}_low": row[name] * low, f"{name}_high": row[name] * high}


def _log_times(row: Row, trials: Trials) -> dict[int, float]:
    """Round -> logarithm of the step time."""
    return {
        number: math.log(one["step_ms_p50"])
        for number, one in trials.rounds(row).items()
        if one["step_ms_p50"] > 0
    }


def _half_widths(
    measured: Sequence[tuple[dict[str, Any], Mapping[int, float]]],
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield each row that has two rounds or more, and half of the 95 % interval of its mean.

    measured: each row with its logarithms by round. A run tells nothing of rounds of another.
    """
    for run_id in dict.fromkeys(row["run_id"] for row, _ in measured):
        of_run = [one for one in measured if one[0]["run_id"] == run_id]
        rounds = list(dict.fromkeys(number for _, logs in of_run for number in logs))
        values = np.array([[logs.get(n, math.nan) for n in rounds] for _, logs in of_run])
        for (row, logs), found in zip(of_run, scatter(values), strict=True):
            if found is not None:
                yield row, found.half_width(1 / len(logs))


def _samples_per_joule(row: Row) -> float | None:
    names = ("throughput", "step_ms_mean", "inner_iterations", "energy_j")
    if row["status"] != "ok" or any(pd.isna(row[name]) for name in names):
        return None
    samples_per_step = row["throughput"] * row["step_ms_mean"] / 1000
    steps = row["iterations"] * row["inner_iterations"]
    return float(samples_per_step * steps / row["energy_j"]) if row["energy_j"] > 0 else None


_CLAUSES = {status.value: status.clause for status in Status}


def _why_not(
    row: Row, base: Row | None, baseline: Mapping[str, Scalar], own: OwnSpeeds
) -> str | None:
    """Why an ok point cannot be compared; None when it can, or when there is nothing to compare."""
    if not _has_throughput(row):
        return NO_ITEMS if baseline and _is_warned_of(row, NO_ITEMS) else None
    if not baseline:
        return "the job names no baseline"
    if base is None:
        settings = " ".join(f"{name}={setting_text(value)}" for name, value in baseline.items())
        return f"no ok point with {settings} in this series"
    if base["status"] != "ok":
        status = base["status"]
        return f"baseline point {_CLAUSES.get(status, f'ended {status}')}"
    if base["device_name"] != row["device_name"]:
        can_be_weighed = "world_size" in baseline and _has_throughput(base)
        if not can_be_weighed or own.together(row) is None:
            return _why_other_device(row, base, own)
    if not _has_throughput(base):
        return "baseline point has no throughput"
    return why_not_comparable(row, base)


def _why_other_device(row: Row, base: Row, own: OwnSpeeds) -> str:
    if len(set(models_of(row))) < 2:
        return f"baseline point ran on another device: {base['device_name']}"
    missing = " and ".join(own.missing(row)) or str(base["device_name"])
    return (
        f"its devices differ, and what {missing} does alone was not measured: "
        "add points of world_size 1 with each of the devices"
    )


def _is_warned_of(row: Row, warning: str) -> bool:
    return isinstance(row["warnings"], Collection) and warning in list(row["warnings"])


def _has_throughput(row: Row) -> bool:
    """Whether there is a throughput: a step that finishes nothing is compared with nothing."""
    return bool(row["status"] == "ok" and not pd.isna(row["throughput"]) and row["throughput"] > 0)


def _is_same(found: Any, wanted: Scalar) -> bool:
    """Equal as text or as numbers: the tables hold parameters as text."""
    if found is None or found != found:
        return False
    if setting_text(found) == setting_text(wanted):
        return True
    number = number_of(found)
    return number is not None and number == number_of(wanted)


def _frame(rows: list[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Make a frame whose columns and types do not depend on there being rows."""
    return pd.DataFrame(rows, columns=list(columns)).astype(_DERIVED).copy()


# A GPU at work runs at its power limit: that is its speed, as long as both points had it.
_NORMAL = frozenset({"power_cap", "sync_boost"})
# More than this between the clocks of two points is a difference of the machine's own doing.
_LARGEST_DIFFERENCE = 0.01


def why_not_comparable(row: Row, base: Row) -> str | None:
    """Why the ratio of a point and its baseline point is none; the same rule for both. Pure.

    Heat and faults are no state to be compared; other limits are, where the two median SM clocks
    differ by 1 % at most, or the power cap holds the lower ones: a device that draws less, as one
    that does a smaller share of the work, is faster by that. What is not known is no reason.
    """
    for one, name in ((base, "the baseline point"), (row, "this point")):
        reasons = [reason for reason in _reasons(one) if reason not in _NORMAL]
        if reasons:
            return f"clocks were limited at {name} ({', '.join(reasons)})"
    if (ratio := _clock_ratio(row, base)) is None:
        return None
    if "power_cap" in _reasons(row if ratio < 1 else base):
        return None
    mhz, base_mhz = (_mhz(one) for one in (row, base))
    return f"SM clocks differ: {mhz:.0f} MHz, and {base_mhz:.0f} MHz at the baseline point"


def _clock_ratio(row: Row, base: Row) -> float | None:
    """None where they are not known, or the same but for 1 %, or those of different models."""
    if row["device_name"] != base["device_name"]:
        return None
    mhz, base_mhz = (_mhz(one) for one in (row, base))
    if not mhz or not base_mhz or abs(math.log(mhz / base_mhz)) <= _LARGEST_DIFFERENCE:
        return None
    return mhz / base_mhz


def _reasons(row: Row) -> list[str]:
    if pd.isna(row["throttled"]) or not row["throttled"]:
        return []
    reasons = row["throttle_reasons"]
    return ["reason unknown"] if reasons is None or not len(reasons) else list(reasons)


def _mhz(row: Row) -> float | None:
    mhz = row["sm_clock_mhz_p50"]
    return None if pd.isna(mhz) else float(mhz)


_GROUP = ("run_id", "workload", "scaling", *OPTIONAL, "world_size")
# What is sought, and the larger the better.
_SOUGHT = ("throughput", "samples_per_joule")


@dataclass(frozen=True, kw_only=True)
class BestSettings(TransitionalMapping):
    """The best point of some that differ in precision and batch, as `best_settings` finds it."""

    run_id: str
    workload: str
    scaling: str | None
    cuda_graph: bool
    shares: str
    slow_ratio: float
    slow_count: int
    slow_by: str
    devices: str
    strategy: str
    world_size: int
    params: Mapping[str, str]
    by: str
    point_id: str
    precision: str
    batch: int | None
    value: float
    rival_point_id: str | None = None


def best_settings(scaled: pd.DataFrame) -> list[BestSettings]:
    """Per workload, its parameters and number of devices, the best precision and batch size.

    scaled: what `raybench.analysis.scaling.scaling` gives. None is best where there are not two to
    choose from.

    by: throughput in samples/s, or samples_per_joule, where energy is known of two points. batch:
    of the scaling kind. rival_point_id: the next best of those whose step time's interval leaves
    open which is better (throughput only).
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in scaled_rows(scaled):
        if row["status"] == "ok":
            key = (*(str(row[name]) for name in _GROUP), *sorted(row["params"].items()))
            groups.setdefault(key, []).append(row)
    found = [_best(rows, by) for rows in groups.values() for by in _SOUGHT]
    return [BestSettings(**one) for one in found if one is not None]


def _best(rows: Sequence[Row], by: str) -> dict[str, Any] | None:
    known = sorted((r for r in rows if not pd.isna(r[by])), key=lambda r: r[by], reverse=True)
    if len(known) < 2:
        return None
    first, *others = known
    rivals = (other for other in others if _slowest(first) < _fastest(other))
    rival = next(rivals, None) if by == "throughput" else None
    return {
        **{name: first[name] for name in (*_GROUP, "params", "point_id", "precision", "batch")},
        "by": by,
        "value": first[by],
        "rival_point_id": None if rival is None else rival["point_id"],
    }


def _slowest(row: Row) -> float:
    """Compute the throughput at the upper end of the step time's interval, if it has one."""
    return _at(row, "step_ms_high")


def _fastest(row: Row) -> float:
    return _at(row, "step_ms_low")


def _at(row: Row, end: str) -> float:
    step_ms = row["step_ms_p50"]
    return float(row["throughput"] * step_ms / (step_ms if pd.isna(row[end]) else row[end]))
