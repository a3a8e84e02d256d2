"""Figures out of the committed runs: rows with their intervals, ratios, samples, health, links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

import raybench
from benchmarks.claims.model import Figure
from raybench.analysis.rounds import records
from raybench.analysis.scaling import scaling
from raybench.analysis.settings import setting
from raybench.report import formatting
from raybench.results import reader

RESULTS = Path(__file__).parents[2] / "results" / "examples"
Row = dict[str, Any]
_GIB = 2**30


@cache
def table(name: str, run: str) -> pd.DataFrame:
    return raybench.load(RESULTS, name, run)


@cache
def versions(run: str) -> dict[str, str]:
    """Join the versions of the driver and of the first device's worker."""
    of_driver, of_worker = (table(name, run).versions.iloc[0] or {} for name in ("runs", "devices"))
    driver = table("devices", run).driver_version.iloc[0]
    return {**of_worker, **of_driver, "driver": driver}


@cache
def rows(run: str) -> list[Row]:
    """Read the points of a run, with speed-ups and intervals over its rounds as in its report."""
    baseline = reader.baselines(RESULTS, run).get(run, {})
    return records(scaling(table("points", run), baseline))


def row(run: str, **settings: Any) -> Row:
    """Find the one point that is ok with these settings and parameters of the workload."""
    found = select(run, **settings)
    assert len(found) == 1, f"{run} has {len(found)} points with {settings}"
    return found[0]


def select(run: str, **settings: Any) -> list[Row]:
    return [
        one
        for one in rows(run)
        if one["status"] == "ok"
        and all(_as_text(_setting(one, name)) == _as_text(v) for name, v in settings.items())
    ]


def _setting(one: Row, name: str) -> Any:
    return one["params"][name] if name in one["params"] else setting(one, name)


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def speed_up(run: str, **settings: Any) -> Figure:
    """Over the baseline point of its job."""
    one = row(run, **settings)
    assert one["speed_up"] == one["speed_up"], f"{run} {settings}: {one['why']}"
    return Figure(
        value=one["speed_up"],
        **_ends(one, "speed_up"),
        unit="x",
        runs=(run,),
    )


def step(run: str, **settings: Any) -> Figure:
    """Take the step in ms."""
    one = row(run, **settings)
    ends = _ends(one, "step_ms")
    return Figure(value=one["step_ms_p50"], **ends, unit="ms", runs=(run,))


def rate(run: str, name: str = "throughput", unit: str = "samples/s", **settings: Any) -> Figure:
    """Take a rate, with the interval of its step."""
    one = row(run, **settings)
    return scale(step(run, **settings), lambda _: one[name], unit)


def scale(figure: Figure, change: Callable[[float], float], unit: str) -> Figure:
    """Make another figure that follows from one, with the relative interval of that."""
    value = change(figure.value)
    shares = [end / figure.value for end in figure.ends]
    known = figure.low is not None
    return Figure(
        value=value,
        low=value * shares[0] if known else None,
        high=value * shares[1] if known else None,
        unit=unit,
        runs=figure.runs,
    )


def ratio(one: Figure, other: Figure, unit: str = "x") -> Figure:
    """Divide two figures whose intervals, as far as they are known, do not depend on each other."""
    value = one.value / other.value
    runs = tuple(dict.fromkeys((*one.runs, *other.runs)))
    known = [figure for figure in (one, other) if figure.low is not None]
    if not known:
        return Figure(value=value, unit=unit, runs=runs)
    half = value * math.hypot(*((f.ends[1] - f.ends[0]) / 2 / f.value for f in known))
    return Figure(value=value, low=value - half, high=value + half, unit=unit, runs=runs)


def percent_of(one: Figure, other: Figure) -> Figure:
    """How much less `one` is than `other`, in %."""
    share = ratio(one, other)
    ends = (
        {}
        if share.low is None
        else {"low": 100 * (1 - share.ends[1]), "high": 100 * (1 - share.ends[0])}
    )
    is_exact = one.is_exact and other.is_exact
    return Figure(
        value=100 * (1 - share.value), **ends, unit="%", runs=share.runs, is_exact=is_exact
    )


def percent_more(figure: Figure) -> Figure:
    """Write a ratio as what it is above 1, in %."""
    low, high = figure.ends
    ends = {} if figure.low is None else {"low": 100 * (low - 1), "high": 100 * (high - 1)}
    return Figure(value=100 * (figure.value - 1), **ends, unit="%", runs=figure.runs)


def memory(run: str, column: str = "peak_mem_allocated_bytes", **settings: Any) -> Figure:
    """In GiB. The allocator counts: there is no interval."""
    value = float(row(run, **settings)[column]) / _GIB
    return Figure(value=value, unit="GiB", runs=(run,), is_exact=True)


def cell(run: str, column: str, unit: str = "", **settings: Any) -> Figure:
    """Take a column that has no interval of its own."""
    value = float(row(run, **settings)[column])
    return Figure(value=value, unit=unit, runs=(run,))


def own_metric(run: str, name: str, **settings: Any) -> Figure:
    """Take a metric that the workload declares."""
    value = float(row(run, **settings)["workload_metrics"][name])
    return Figure(value=value, unit="", runs=(run,))


def count(value: float, *runs: str, unit: str = "", text: str = "") -> Figure:
    """Make a figure of what was counted, not timed."""
    return Figure(value=float(value), runs=runs, unit=unit, is_exact=True, text=text)


def health(run: str, test: str) -> list[Figure]:
    """Read a test of a health check, a figure for each device, pair or node."""
    found = table("health", run)
    found = found[(found.test == test) & found.value.notna() & (found.kind != "cluster")]
    assert len(found), f"{run} has no test {test!r}"
    return [
        Figure(value=one.value, unit=one.unit, runs=(run,), is_exact=True)
        for one in found.itertuples()
    ]


def spread(figures: Sequence[Figure]) -> Figure:
    """Join figures to one from the least to the most, to be judged by its ends."""
    values = [figure.value for figure in figures]
    low, high = min(values), max(values)
    unit = figures[0].unit
    ends = dict.fromkeys(_short(value) for value in (low, high))
    text = f"{' to '.join(ends)} {unit}".rstrip()
    runs = tuple(dict.fromkeys(run for figure in figures for run in figure.runs))
    return Figure(value=sum(values) / len(values), low=low, high=high, runs=runs, text=text)


def _short(value: float) -> str:
    return formatting.number(value, 3)


def _ends(one: Row, name: str) -> dict[str, float | None]:
    low, high = one[f"{name}_low"], one[f"{name}_high"]
    known = low is not None and low == low
    return {"low": float(low) if known else None, "high": float(high) if known else None}


def samples(run: str, **settings: Any) -> pd.DataFrame:
    """Read the samples of the last attempt at a point."""
    one, found = row(run, **settings), table("samples", run)
    return found[(found.point_id == one["point_id"]) & (found.attempt == one["attempt"])]


def host_time(run: str, **settings: Any) -> Figure:
    """Divide rank 0's host time of a timed step, which is not waited for, by the step."""
    found = samples(run, **settings)
    timed = found[~found.is_warmup & (found["rank"] == 0)]
    share = timed.host_ns.median() / timed.step_ns.median()
    return Figure(value=float(share), unit="x", runs=(run,))


def wall_clock(run: str, name: str, **settings: Any) -> Figure:
    """Divide what rank 0's time.time() says of a step, unsynced or synced, by the step."""
    one, timed = row(run, **settings), step(run, **settings)
    said_ms = Figure(value=float(one[f"wall_{name}_ms_by_rank"][0]), unit="ms", runs=(run,))
    return ratio(said_ms, timed)


def first_steps(run: str, steps: int, *, is_warm: bool, **settings: Any) -> Figure:
    """Divide the mean of the first steps, of the warm-up or after it, by the step."""
    found = samples(run, **settings)
    chosen = found[(found.is_warmup != is_warm) & (found.iteration < steps) & (found.repeat == 0)]
    slowest = chosen.groupby("iteration").step_ns.max()
    assert len(slowest) == steps, f"{run} {settings}: {len(slowest)} steps"
    return Figure(
        value=float(slowest.mean() / 1e6 / row(run, **settings)["step_ms_p50"]),
        unit="x",
        runs=(run,),
    )


def rank_spread(run: str, *, is_first: bool = False, **settings: Any) -> Figure:
    """Tell by how much ranks differ in the host's time of a step, or of the first one, in ms."""
    found = samples(run, **settings)
    is_chosen = found.is_warmup & (found.iteration == 0) if is_first else ~found.is_warmup
    means = found[is_chosen].groupby("rank").host_ns.mean() / 1e6
    return Figure(value=float(means.max() - means.min()), unit="ms", runs=(run,))
