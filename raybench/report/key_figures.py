"""The two to four large figures of a report, each with what it counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raybench.analysis.losses import LOSSES
from raybench.analysis.settings import OPTIONAL, setting_order, varying
from raybench.report import formatting, plain_text
from raybench.report.findings import CAUSES, batch_label, rows_compared, with_most_ranks
from raybench.report.headline import (
    bandwidths,
    datasheet_gb_s,
    most_samples,
    size_of,
    unsure,
)
from raybench.report.summary import Summary

Row = Any

_REACHED = "achieved_tflops_per_device"
_MOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """A large figure.

    value: the number, with its unit where that is short. counts: what it is a number of. where: the
    settings that it holds for.
    """

    value: str
    counts: str
    where: str = ""


def key_figures(summary: Summary, rows: Sequence[Row]) -> list[KeyFigure]:
    """At most four, the answer to the job's question first; rows of the scaling frame."""
    measured = [row for row in rows if row["status"] == "ok"]
    compared = rows_compared(measured)
    found: list[KeyFigure] = []
    if summary.largest_batches:
        found += _largest(summary)
    elif compared and "world_size" in summary.run.baseline:
        found += _scaling(summary, measured)
    elif compared:
        found += _gains(summary, compared)
    found += _throughput(measured, summary.ranks)
    if not found:
        rates = bandwidths(measured)
        found = (
            _bandwidths(*rates, summary.ranks) if rates else _operations(measured, summary.ranks)
        )
    return found[:_MOST]


def _scaling(summary: Summary, measured: Sequence[Row]) -> list[KeyFigure]:
    rows = with_most_ranks(measured)
    best = max(rows, key=lambda row: row["speed_up"])
    base = int(summary.run.baseline["world_size"])
    names = varying(rows, summary.run.baseline) or ("precision", "batch")
    sure = unsure(best) if len(rows) == 1 else " at best"
    count = formatting.ranks_words(best["world_size"], summary.ranks)
    ideal = best["world_size"] / base
    where = formatting.settings_words(best, names, summary.ranks)
    found = [
        KeyFigure(
            value=f"{formatting.ratio(best['speed_up'])}×",
            counts=f"the samples/s of {formatting.ranks_words(base, summary.ranks)} on {count}"
            f"{sure}; {ideal:.4g}× is ideal",
            where=where,
        ),
        KeyFigure(
            value=formatting.percent(best["efficiency"]),
            counts=f"scaling efficiency on {count}",
            where=where,
        ),
    ]
    return found + _loss(rows, count)


def _loss(rows: Sequence[Row], count: str) -> list[KeyFigure]:
    """Find the cause that takes most, over the points on the most ranks."""
    totals = {
        name: [float(row[name]) for row in rows if formatting.has_value(row[name])]
        for name in LOSSES[:-1]
    }
    known = {name: shares for name, shares in totals.items() if shares}
    if not known:
        return []
    cause, shares = max(known.items(), key=lambda one: sum(one[1]) / len(one[1]))
    if max(shares) < 0.01:
        return []
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    span = high if low == high else f"{low.rstrip('%')}–{high}"
    return [KeyFigure(value=span, counts=f"of the step is lost to {CAUSES[cause]} on {count}")]


def _gains(summary: Summary, compared: Sequence[Row]) -> list[KeyFigure]:
    baseline = summary.run.baseline
    names = [*baseline, *varying(compared, tuple(baseline))]
    best = max(compared, key=lambda row: row["speed_up"])
    sure = unsure(best) if len(compared) == 1 else " at best"
    of = formatting.baseline_name(baseline)
    found = [
        KeyFigure(
            value=f"{formatting.ratio(best['speed_up'])}×",
            counts=f"the samples/s of {of}{sure}",
            where=formatting.settings_words(best, names, summary.ranks),
        )
    ]
    lightest = [row for row in compared if formatting.has_value(row["memory_ratio"])]
    if lightest:
        least = min(lightest, key=lambda row: row["memory_ratio"])
        found.append(
            KeyFigure(
                value=formatting.percent(least["memory_ratio"]),
                counts=f"of the memory of {of}",
                where=formatting.settings_words(least, names, summary.ranks),
            )
        )
    return found


def _throughput(measured: Sequence[Row], ranks: str) -> list[KeyFigure]:
    if (found := most_samples(measured)) is None:
        return []
    most, names = found
    return [
        KeyFigure(
            value=formatting.number(most["throughput"]),
            counts="samples/s at most",
            where=formatting.settings_words(most, names, ranks),
        )
    ]


def _largest(summary: Summary) -> list[KeyFigure]:
    return [
        KeyFigure(
            value=f"{one.batch_size:,}",
            counts="is the largest batch per device that fits"
            + (
                f", in {formatting.gib(one.peak_mem_allocated_bytes)} GiB"
                if one.peak_mem_allocated_bytes is not None
                else ""
            ),
            where=batch_label(one.settings, summary.ranks),
        )
        for one in sorted(summary.largest_batches, key=lambda one: -one.batch_size)[: _MOST - 1]
    ]


def _bandwidths(rows: Sequence[Row], name: str, what: str, ranks: str) -> list[KeyFigure]:
    largest, smallest = (choose(map(size_of, rows)) for choose in (max, min))
    long = [row for row in rows if size_of(row) == largest]
    short = [row for row in rows if size_of(row) == smallest]
    most = max(long, key=lambda row: row[name])
    quickest = min(short, key=lambda row: row["step_ms_p50"])
    names = varying(rows, (*OPTIONAL, "size_bytes"))
    found = [
        KeyFigure(
            value=f"{formatting.number(most[name])} GB/s",
            counts=f"{what} at most with {formatting.size(largest)}",
            where=formatting.settings_words(most, names, ranks),
        )
    ]
    peak = datasheet_gb_s(rows) if name == "memory_gb_s" else None
    if peak:
        found.append(
            KeyFigure(
                value=formatting.percent(most[name] / peak),
                counts=f"of the datasheet's {peak:,.0f} GB/s",
                where=formatting.settings_words(most, names, ranks),
            )
        )
    sums = [r for r in long if r["params"].get("operation") == "all_reduce" and r is not most]
    if sums:
        wide = max(sums, key=lambda row: row["world_size"])
        found.append(
            KeyFigure(
                value=f"{formatting.number(wide[name])} GB/s",
                counts=f"{what} with {formatting.size(largest)}",
                where=formatting.settings_words(wide, names, ranks),
            )
        )
    found.append(
        KeyFigure(
            value=formatting.duration(quickest["step_ms_p50"]),
            counts=f"for {formatting.size(smallest)} at least",
            where=formatting.settings_words(quickest, names, ranks),
        )
    )
    return found


def _peak_tflops(row: Row) -> float | None:
    known = formatting.has_value(row["mfu_pct"]) and row["mfu_pct"]
    return float(row[_REACHED] / (row["mfu_pct"] / 100)) if known else None


def _operations(measured: Sequence[Row], ranks: str) -> list[KeyFigure]:
    """Find the most of each precision, the fastest first."""
    known = [row for row in measured if formatting.has_value(row[_REACHED])]
    best: dict[str, Row] = {}
    for row in sorted(known, key=lambda row: setting_order(row["precision"])):
        if row["precision"] not in best or row[_REACHED] > best[row["precision"]][_REACHED]:
            best[row["precision"]] = row
    ordered = sorted(best.values(), key=lambda row: -row[_REACHED])
    return [
        KeyFigure(
            value=formatting.number(row[_REACHED]),
            counts=f"TFLOP/s in {plain_text.plain(row['precision'])} at most"
            + (
                f", {row[_REACHED] / peak:.1%} of the datasheet"
                if (peak := _peak_tflops(row))
                else ""
            ),
            where=formatting.settings_words(row, varying(known, ("precision",)), ranks),
        )
        for row in ordered
    ]
