"""What changed between two sides of runs, point by point, and whether that is more than chance.

A side is one run or several of the same thing. A run is one observation of a point: the geometric
mean over its rounds. Rounds of one run share its machine and its moment, so they make that mean
surer and add no observations: T. Kalibera, R. Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013. How far runs of a side lie apart is estimated for each point by `raybench.stats.starts`,
the model that reports use for rounds. Where a side has one run nothing is known of that, so there
is no verdict.

Two figures of each point are tested: the median step, and the rate (samples/s), which follows the
mean step: a stall now and then shows in the mean alone. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.history import THRESHOLD
from raybench.analysis.rounds import (
    ATTEMPT_COLUMNS,
    latest_trials,
    mean_of_rounds,
    records,
    without_controls,
)
from raybench.analysis.settings import EXECUTION
from raybench.analysis.typed_rows import typed_rows
from raybench.job.point import EQUAL
from raybench.records import FAILURES, Status
from raybench.results.point_row import TransitionalMapping
from raybench.stats.starts import Scatter, scatter

# At most this share of comparisons in which nothing changed calls a point slower, and as many call
# one faster (Y. Benjamini, Y. Hochberg, J. R. Stat. Soc. B 57(1), 1995, over all points).
FALSE_VERDICTS = 0.0175
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"
# With fewer runs a side nothing is known of how far runs lie apart.
LEAST_RUNS = 2

SETTINGS = ("workload", "params", "scaling", *EXECUTION, "world_size")
BATCH = ("batch_size", "global_batch_size", "grad_accumulation")
# Sides that differ here are other experiments, not a change of the same one.
_WORLD = {"device_type": "device", "device_name": "device", "node_count": "nodes"}
# The columns of `points` that are tested.
STEP, MEAN = "step_ms_p50", "step_ms_mean"
# What `compare` needs of the table `points`.
POINT_COLUMNS = (*ATTEMPT_COLUMNS, STEP, MEAN, "throughput", *SETTINGS, *BATCH, *_WORLD)
_FLOATS = (
    *(
        "base_failed",
        "new_failed",
        "base_ms",
        "new_ms",
        "base_runs",
        "new_runs",
        "ratio",
        "ratio_low",
        "ratio_high",
    ),
    *("rate_ratio", "rate_ratio_low", "rate_ratio_high", "least_seen", "q_value"),
)
_TEXTS = ("rate_unit", "verdict", "why")
_COLUMNS = {**dict.fromkeys(_FLOATS, "float64"), **dict.fromkeys(_TEXTS, "object")}
# Of the 90 % interval, which lies within the threshold where a point is the same: two one-sided
# tests at 5 % (D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15(6), 1987).
_INTERVAL = 0.9

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ComparedPoint(TransitionalMapping):
    """A point of two sides; what each field is stands in `compare`. None: not known."""

    point_id: str
    workload: str
    params: Mapping[str, str]
    scaling: str | None = None
    precision: str = "fp32"
    cuda_graph: bool = False
    shares: str = EQUAL
    slow_ratio: float = 1.0
    slow_count: int = 1
    slow_by: str = "compute"
    devices: str = "any"
    strategy: str = "pack"
    world_size: int = 1
    batch_size: int | None = None
    global_batch_size: int | None = None
    grad_accumulation: int | None = None
    status_base: Status | None = None
    status_new: Status | None = None
    base_failed: float | None = None
    new_failed: float | None = None
    base_ms: float | None = None
    new_ms: float | None = None
    base_runs: int = 0
    new_runs: int = 0
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    rate_ratio: float | None = None
    rate_ratio_low: float | None = None
    rate_ratio_high: float | None = None
    least_seen: float | None = None
    q_value: float | None = None
    rate_unit: str = "steps/s"
    verdict: str | None = None
    why: str | None = None


def compared_points(found: pd.DataFrame) -> list[ComparedPoint]:
    """Return the rows of what `compare` gives."""
    return typed_rows(found, ComparedPoint)


def compare(
    base: Sequence[pd.DataFrame], new: Sequence[pd.DataFrame], *, threshold: float = THRESHOLD
) -> pd.DataFrame:
    """Compare two sides; one row for each point of either, in the order of `new`, then of `base`.

    base, new: for each run of the side its rows of the table `points`, of which POINT_COLUMNS are
    enough.

    Columns: point_id; the settings; status_base and status_new (the worst over the rounds of the
    runs; null where no run of the side has a row); base_failed and new_failed, the share of rounds
    that failed; base_ms and new_ms, the median step as the mean of the runs; base_runs and
    new_runs, the runs in which the point is ok; ratio = new / base of the median step, with
    ratio_low and ratio_high, its 90 % interval; rate_ratio, rate_ratio_low and rate_ratio_high,
    the same of the rate, so 0.94 means 6 % fewer samples/s; rate_unit, samples/s, or steps/s where
    a step finishes no samples; least_seen, the smallest change of this point alone that would have
    been called; q_value, the smallest level at which `slower` or `faster` holds over all points,
    else null; verdict and why.

    verdict: `slower` (or `faster`) where the step or the rate changed by more than `threshold`
    and q_value is at most FALSE_VERDICTS. `same` where both intervals lie within the threshold.
    `unclear` where neither holds; `why` says what is missing. Null where a side has no time.
    """
    sides = [[_by_id(points) for points in side] for side in (base, new)]
    rows = [_pair(point_id, sides) for point_id in _ids(*sides)]
    compared = [row for row in rows if row["base_runs"] and row["new_runs"]]
    for row in compared:
        row |= {"verdict": UNCLEAR, "why": row["obstacle"] or _too_few(row)}
    _test([row for row in compared if row["why"] is None], threshold)
    names = ["point_id", *SETTINGS, *BATCH, "status_base", "status_new", *_COLUMNS]
    return pd.DataFrame(rows, columns=names).astype(_COLUMNS)


def _by_id(points: pd.DataFrame) -> dict[str, Row]:
    """point_id -> the row of a point, with the statuses of all its rounds."""
    found = {
        str(row["point_id"]): row | {"statuses": []} for row in records(mean_of_rounds(points))
    }
    for row in records(without_controls(latest_trials(points))):
        found[str(row["point_id"])]["statuses"].append(str(row["status"]))
    return found


def _ids(base: Sequence[Mapping[str, Row]], new: Sequence[Mapping[str, Row]]) -> list[str]:
    return list(dict.fromkeys(point_id for run in (*new, *base) for point_id in run))


def _pair(point_id: str, sides: Sequence[Sequence[Mapping[str, Row]]]) -> Row:
    """Make the row of a point, with the logarithms of what is tested, side by side."""
    found = [[run[point_id] for run in side if point_id in run] for side in sides]
    ok = [[row for row in side if row["status"] == Status.OK and row[STEP] > 0] for side in found]
    newest = (found[1] or found[0])[-1]
    row = {
        "point_id": point_id,
        **{name: newest[name] for name in (*SETTINGS, *BATCH)},
        "status_base": _worst(found[0]),
        "status_new": _worst(found[1]),
        **{name: math.nan if kind == "float64" else None for name, kind in _COLUMNS.items()},
        "base_runs": len(ok[0]),
        "new_runs": len(ok[1]),
        "base_failed": _failed(found[0]),
        "new_failed": _failed(found[1]),
        "rate_unit": "samples/s" if newest["throughput"] > 0 else "steps/s",
        "obstacle": _obstacle(ok),
        "sides": ok,
    }
    if all(ok):
        base_ms, new_ms = (math.exp(np.mean(side)) for side in _logs(row, STEP))
        row |= {"base_ms": base_ms, "new_ms": new_ms, "ratio": new_ms / base_ms}
        row["rate_ratio"] = math.exp(-_change(_logs(row, MEAN)))
    return row


def _worst(rows: Sequence[Row]) -> str | None:
    """Return the worst status over all rounds: a failure, else ok where one of them is ok."""
    order = [status.value for status in Status]  # the worst first
    found = [status for row in rows for status in row["statuses"]]
    # A status of a later version is the worst.
    return min(found, key=lambda s: order.index(s) if s in order else -1, default=None)


def _failed(rows: Sequence[Row]) -> float:
    """Return the share of the rounds that failed; NaN without a round."""
    found = [status in FAILURES for row in rows for status in row["statuses"]]
    return sum(found) / len(found) if found else math.nan


def _obstacle(sides: Sequence[Sequence[Row]]) -> str | None:
    """Say why the runs of a point are not of the same experiment; None where they are."""
    rows = [row for side in sides for row in side]
    for column, what in _WORLD.items():
        values = dict.fromkeys(
            "none" if pd.isna(v) else f"{v:g}" if isinstance(v, float) else str(v)
            for v in (row[column] for row in rows)
        )
        if len(values) > 1:
            return f"other {what}: {', then '.join(values)}"
    return None


def _too_few(row: Row) -> str | None:
    side = min(("base", "new"), key=lambda name: row[f"{name}_runs"])
    runs = row[f"{side}_runs"]
    return None if runs >= LEAST_RUNS else f"{runs} run of {side}, and a verdict needs {LEAST_RUNS}"


def _logs(row: Row, column: str) -> list[list[float]]:
    """Take the logarithms of a column in each run of a point, by side; NaN where it is unknown.

    MEAN is the time for a sample, which reports lead with, where steps finish samples.
    """
    return [[_log(one, column) for one in side] for side in row["sides"]]


def _log(row: Row, column: str) -> float:
    if column == MEAN and row["throughput"] > 0:
        return -math.log(row["throughput"])
    return math.log(row[column]) if row[column] > 0 else math.nan


def _change(logs: Sequence[Sequence[float]]) -> float:
    return float(np.mean(logs[1]) - np.mean(logs[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """One figure of a point, held against no change.

    row: of the point. size: the change of the logarithm of its time, which is larger where it is
    slower. share: variance of the change over that of one run. found: how far runs lie apart.
    """

    row: Row
    column: str
    size: float
    share: float
    found: Scatter

    @property
    def change(self) -> float:
        return math.expm1(self.size)

    @property
    def ends(self) -> tuple[float, float]:
        """The interval of the change, relative."""
        half_width = self.found.half_width(self.share, _INTERVAL)
        return math.expm1(self.size - half_width), math.expm1(self.size + half_width)

    def p_value(self, verdict: str) -> float:
        size = self.size if verdict == SLOWER else -self.size
        return self.found.p_value(size, self.share)


def _test(rows: Sequence[Row], threshold: float) -> None:
    """Fill in what is known from all points that have enough runs together."""
    from scipy.stats import false_discovery_control

    tests = [test for column in (STEP, MEAN) for test in _tests(rows, column)]
    if not tests:
        return
    rates = {
        verdict: false_discovery_control([test.p_value(verdict) for test in tests])
        for verdict in (SLOWER, FASTER)
    }
    of_point: dict[str, list[tuple[_Test, Mapping[str, float]]]] = {}
    for place, test in enumerate(tests):
        found = {verdict: float(rates[verdict][place]) for verdict in rates}
        of_point.setdefault(test.row["point_id"], []).append((test, found))
    alone = 1 - 2 * FALSE_VERDICTS / len(tests)
    for members in of_point.values():
        row = members[0][0].row
        for test, _ in members:
            row |= _intervals(test)
        seen = math.expm1(max(t.found.half_width(t.share, alone) for t, _ in members))
        row |= {"least_seen": max(threshold, seen), **_verdict(members, threshold)}


def _tests(rows: Sequence[Row], column: str) -> Iterator[_Test]:
    """Yield the test of each point that has the column in all its runs."""
    known = [row for row in rows if not np.isnan(np.concatenate(_logs(row, column))).any()]
    runs = [
        [(number, one["run_id"]) for number, side in enumerate(row["sides"]) for one in side]
        for row in known
    ]
    starts = list(dict.fromkeys(run for of_point in runs for run in of_point))
    values = np.full((len(known), len(starts)), math.nan)
    for place, (row, of_point) in enumerate(zip(known, runs, strict=True)):
        values[place, [starts.index(run) for run in of_point]] = np.concatenate(_logs(row, column))
    for row, found in zip(known, scatter(values, [number for number, _ in starts]), strict=True):
        if found is not None:
            share = 1 / row["base_runs"] + 1 / row["new_runs"]
            size = _change(_logs(row, column))
            yield _Test(row=row, column=column, size=size, share=share, found=found)


def _intervals(test: _Test) -> Row:
    low, high = test.ends
    if test.column == MEAN:
        return {"rate_ratio_low": 1 / (1 + high), "rate_ratio_high": 1 / (1 + low)}
    return {"ratio_low": 1 + low, "ratio_high": 1 + high}


def _verdict(tests: Sequence[tuple[_Test, Mapping[str, float]]], threshold: float) -> Row:
    """Give the verdict on a point, the rate at which it holds, and what an unclear one lacks.

    tests: of the point, each with its rate of false discoveries by verdict.
    """
    for verdict, sign in ((SLOWER, 1), (FASTER, -1)):
        rates = [rates[verdict] for test, rates in tests if sign * test.change > threshold]
        if rates and min(rates) <= FALSE_VERDICTS:
            return {"verdict": verdict, "q_value": min(rates), "why": None}
    low = min(test.ends[0] for test, _ in tests)
    high = max(test.ends[1] for test, _ in tests)
    if -threshold <= low and high <= threshold:
        return {"verdict": SAME, "why": None}
    if any(abs(test.change) > threshold for test, _ in tests):
        why = "runs of the same thing may differ as much"
    else:
        why = f"known to {low:+.1%} to {high:+.1%} only, which is not within the threshold"
    return {"verdict": UNCLEAR, "why": why}
