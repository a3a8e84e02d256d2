"""The sentence that a report leads with: what the run found, in short.

Pure, over the rows of `raybench.analysis.scaling`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raybench.analysis.losses import LOSSES
from raybench.analysis.settings import OPTIONAL, setting, setting_order, varying
from raybench.hardware.peaks import memory_peak_gb_s
from raybench.report import formatting, plain_text
from raybench.report.findings import (
    CAUSES,
    LargestBatch,
    batch_label,
    clocks,
    has_causes,
    memory_range,
    plus_minus,
    rows_compared,
    with_most_ranks,
)
from raybench.report.plain_text import span
from raybench.report.tables import marks
from raybench.results.metrics.parts import is_slowed_by_one_rank

Row = Any

SIZE = "size_bytes"
# A burst that is faster by less is no other figure.
_UNSURE = 0.01
# What is lost of a step that is hardly worth a sentence.
_LEAST_LOSS = 0.01
_DOUBTS = {
    "u": "unsteady",
    "w": "wide",
    "h": "host-bound",
    "t": "throttled",
    "s": "slowed by one rank",
    "c": "sharing cores",
    "n": "not alone",
    "q": "quick",
    "b": "without a breakdown",
}


def headline(
    rows: Sequence[Row],
    baseline: Mapping[str, Any],
    ranks: str,
    largest: Sequence[LargestBatch] = (),
) -> str:
    """One sentence; empty where nothing was measured."""
    measured = [row for row in rows if row["status"] == "ok"]
    compared = rows_compared(rows)
    if largest:
        return _largest(largest, ranks)
    if compared:
        if "world_size" in baseline:
            text = _scaling(compared, baseline, ranks, measured)
        else:
            text = _against(compared, baseline, ranks)
        return "; ".join(filter(None, (text, _refusal(rows))))
    most = _most_samples(measured, ranks) or _rates(measured, ranks)
    return "; ".join(filter(None, (_why_not(rows, baseline), most)))


def _scaling(
    compared: Sequence[Row], baseline: Mapping[str, Any], ranks: str, measured: Sequence[Row]
) -> str:
    """Say `4 GPUs do 3.48 ±0.5% times the samples/s of 1 GPU, 87.0% efficiency (fp32)`.

    Of several settings the range of their speed-ups, without an interval: the best of many is
    best by chance too, so its own interval would promise too much. Then what most is lost to, and
    the most samples/s.
    """
    rows = with_most_ranks(compared)
    names = varying(rows, baseline) or ("precision", "batch")
    worst, best = (choose(rows, key=lambda row: row["speed_up"]) for choose in (min, max))
    whose = f"the samples/s of {formatting.ranks_words(int(baseline['world_size']), ranks)}"
    text = f"{formatting.ranks_words(best['world_size'], ranks)} do "
    if len(rows) == 1:
        times = f"{formatting.ratio(best['speed_up'])}{unsure(best)}"
        efficiency = formatting.percent(best["efficiency"])
        text += f"{times} times {whose}{clocks(best)}, {efficiency} efficiency"
        text += f" ({_where(best, names)})"
        return "; ".join(filter(None, (text, _loss(rows))))
    each = " to ".join(
        f"{formatting.ratio(row['speed_up'])}{clocks(row)} ({_where(row, names)})"
        for row in (worst, best)
    )
    text += f"{each} times {whose}"
    shares = span(*(formatting.percent(row["efficiency"]) for row in (worst, best)))
    text += f", {shares} efficiency"
    return "; ".join(filter(None, (text, _loss(rows), _most_samples(measured, ranks))))


def unsure(row: Row) -> str:
    """How unsure a speed-up is, if that is known."""
    sure = plus_minus(row)
    return "" if sure is None else f" {formatting.half_width(sure)}"


def _where(row: Row, names: Sequence[str], ranks: str = "") -> str:
    """Name the settings of a point, and what makes its number doubtful."""
    found = marks(row)
    doubts = [_DOUBTS[mark] for mark in found]
    if row["is_base_unsteady"] and "u" not in found:
        doubts.append("against an unsteady point")
    return ", ".join(filter(None, (formatting.settings_words(row, names, ranks), *doubts)))


def _loss(rows: Sequence[Row]) -> str:
    """Say what takes the largest part of the loss."""
    losing = [
        row
        for row in rows
        if row["efficiency"] is not None
        and row["efficiency"] < 1 - _LEAST_LOSS
        # What may be ideal has lost nothing for certain.
        and not (formatting.has_value(row["efficiency_high"]) and row["efficiency_high"] >= 1)
    ]
    if not losing:
        return ""
    explained = [row for row in losing if has_causes(row)]
    contradicted = [row for row in losing if formatting.has_value(row["why_no_breakdown"])]
    if not explained and contradicted:
        return "what the rest is lost to is not known: the parts of the step exceed it"
    if len(explained) + len(contradicted) < len(losing):
        return "what the rest is lost to was not measured"
    causes = []
    for row in explained:
        # One rank is a cause only where it stands out.
        named = [name for name in LOSSES if name != "lost_wait" or is_slowed_by_one_rank(row)]
        lost = {name: row[name] if formatting.has_value(row[name]) else 0.0 for name in named}
        causes.append(max(lost, key=lambda name: lost[name]))
    cause, count = Counter(causes).most_common(1)[0]
    if count < len(losing):
        return f"{CAUSES[cause]} is the largest loss in {count} of {len(losing)} settings"
    shares = [min(1.0, row[cause] / (1 - row["efficiency"])) for row in losing]
    return f"{CAUSES[cause]} is {span(f'{min(shares):.0%}', f'{max(shares):.0%}')} of the loss"


def _refusal(rows: Sequence[Row]) -> str:
    """How many points would have been compared, and why they are not."""
    others = [row for row in rows if row["status"] == "ok" and not row["is_baseline"]]
    reasons = [plain_text.plain(row["why"]) for row in others if formatting.has_value(row["why"])]
    if not reasons:
        return ""
    are = "is" if len(reasons) == 1 else "are"
    text = f"{len(reasons)} of {len(others)} points {are} not compared"
    return f"{text}: {reasons[0]}" if len(set(reasons)) == 1 else text


def _against(compared: Sequence[Row], baseline: Mapping[str, Any], ranks: str) -> str:
    """`bf16 is 4.19 to 6.83 times as fast as fp32, with 71.8% to 96.3% of the memory`."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in compared:
        groups.setdefault(tuple(str(setting(row, name)) for name in baseline), []).append(row)
    rows = max(groups.values(), key=lambda group: max(row["speed_up"] for row in group))
    ends = [choose(row["speed_up"] for row in rows) for choose in (min, max)]
    times = span(*map(formatting.ratio, ends)) + (unsure(rows[0]) if len(rows) == 1 else "")
    names = varying(rows, baseline) if len(rows) > 1 else ("precision", "batch")
    names = [name for name in names if name not in baseline]
    where = f" ({_where(rows[0], names)})" if len(rows) == 1 else ""
    return (
        f"{formatting.settings_words(rows[0], tuple(baseline), ranks)} is {times} times as fast as "
        f"{formatting.baseline_name(baseline)}{where}" + memory_range(rows).replace("; ", ", with ")
    )


def _why_not(rows: Sequence[Row], baseline: Mapping[str, Any]) -> str:
    """Why nothing is compared, where something was to be."""
    others = [r for r in rows if r["status"] == "ok" and not r["is_baseline"]]
    reasons = Counter(
        plain_text.plain(row["why"]) for row in others if formatting.has_value(row["why"])
    )
    if not baseline or not reasons:
        return ""
    return f"no speed-up: {reasons.most_common(1)[0][0]}"


def most_samples(measured: Sequence[Row]) -> tuple[Row, list[str]] | None:
    """Find the point with the most samples/s, and the settings that name it."""
    known = [row for row in measured if formatting.has_value(row["throughput"])]
    if not known:
        return None
    names = ["precision", "batch", "world_size"]
    names += varying(known, ("workload", *names))
    return max(known, key=lambda row: row["throughput"]), names


def _most_samples(measured: Sequence[Row], ranks: str) -> str:
    """`at most 585,826 samples/s (bf16, batch 1024, 4 GPUs)`."""
    if (found := most_samples(measured)) is None:
        return ""
    row, names = found
    return f"at most {formatting.number(row['throughput'])} samples/s ({_where(row, names, ranks)})"


def bandwidths(measured: Sequence[Row]) -> tuple[list[Row], str, str] | None:
    """Find the points that have a bandwidth, its column and its name."""
    for name, what in (("busbw_gb_s", "bus bandwidth"), ("memory_gb_s", "memory bandwidth")):
        if known := [row for row in measured if formatting.has_value(row[name])]:
            return known, name, what
    return None


def size_of(row: Row) -> int:
    """Read the bytes of a message or an array; 0 where the workload has none."""
    text = str(row["params"].get(SIZE, ""))
    return int(text) if text.isdecimal() else 0


def datasheet_gb_s(rows: Sequence[Row]) -> float | None:
    """Look up what the datasheet gives for the memory of the device that all rows ran on."""
    peaks = {memory_peak_gb_s(str(row["device_name"])) for row in rows}
    return peaks.pop() if len(peaks) == 1 else None


def _rates(measured: Sequence[Row], ranks: str) -> str:
    """Say the bandwidths of the largest messages, or the most operations per second."""
    if (found := bandwidths(measured)) is not None:
        return _bandwidth(*found, ranks)
    known = [row for row in measured if formatting.has_value(row["achieved_tflops_per_device"])]
    return _operations(known) if known else ""


def _bandwidth(rows: Sequence[Row], name: str, what: str, ranks: str) -> str:
    """`bus bandwidth with 1 GiB on 4 GPUs: 324.9 GB/s (all_gather) to 356.7 GB/s (sendrecv)`."""
    most = max(row["world_size"] for row in rows)
    sizes = [key for key in rows[0]["params"] if key.endswith("_bytes")]
    chosen = [row for row in rows if row["world_size"] == most]
    for size in sizes:
        largest = max(setting_order(setting(row, size)) for row in chosen)
        chosen = [row for row in chosen if setting_order(setting(row, size)) == largest]
    having = "".join(
        f" with {formatting.setting(size, setting(chosen[0], size))}" for size in sizes
    )
    on = formatting.settings_words(chosen[0], ("world_size",), ranks)
    text = f"{what}{having} on {on}: {_from_to(chosen, name, 'GB/s')}"
    return text + (_of_datasheet(chosen) if name == "memory_gb_s" else _latency(rows, most))


def _from_to(rows: Sequence[Row], name: str, unit: str) -> str:
    """`324.9 GB/s (all_gather) to 356.7 GB/s (sendrecv)`."""
    names = varying(rows, ("world_size", *OPTIONAL))
    ends = [choose(rows, key=lambda row: row[name]) for choose in (min, max)]
    phrases = [
        (
            formatting.duration(row[name])
            if unit == "ms"
            else f"{formatting.number(row[name])} {unit}"
        )
        + (
            f" ({', '.join(formatting.setting(n, setting(row, n)) for n in names)})"
            if names
            else ""
        )
        for row in ends
    ]
    return phrases[0] if len(rows) == 1 else " to ".join(phrases)


def _of_datasheet(rows: Sequence[Row]) -> str:
    """How much of what the device's memory can do."""
    if (peak := datasheet_gb_s(rows)) is None:
        return ""
    shares = [
        formatting.percent(choose(r["memory_gb_s"] for r in rows) / peak) for choose in (min, max)
    ]
    return f", {span(*shares)} of the datasheet's {peak:,.0f} GB/s"


def _latency(rows: Sequence[Row], most: int) -> str:
    """Say the times of the smallest messages."""
    sized = [row for row in rows if row["world_size"] == most and size_of(row)]
    sizes = {size_of(row) for row in sized}
    if len(sizes) < 2:
        return ""
    chosen = [row for row in sized if size_of(row) == min(sizes)]
    return f"; {formatting.size(min(sizes))} takes {_from_to(chosen, 'step_ms_p50', 'ms')}"


def _operations(rows: Sequence[Row]) -> str:
    """`at most 793.8 TFLOP/s, 80.2% of the datasheet's peak (bf16, k=4096, m=4096, n=4096)`."""
    best = max(rows, key=lambda row: row["achieved_tflops_per_device"])
    share = (
        formatting.percent(best["mfu_pct"] / 100) if formatting.has_value(best["mfu_pct"]) else ""
    )
    of_peak = f", {share} of the datasheet's peak" if share else ""
    where = _where(best, varying(rows))
    return (
        f"at most {formatting.number(best['achieved_tflops_per_device'])} TFLOP/s{of_peak}"
        + (f" ({where})" if where else "")
        + _burst(best)
    )


def _burst(row: Row) -> str:
    """Say what a short measurement would have told, where that is more."""
    burst, sustained = row["burst_tflops_per_device"], row["achieved_tflops_per_device"]
    if not formatting.has_value(burst) or burst < (1 + _UNSURE) * sustained:
        return ""
    return f"; {formatting.number(burst)} TFLOP/s in its first 30 ms"


def _largest(found: Sequence[LargestBatch], ranks: str) -> str:
    """Say `the largest batch that fits is 192 per device (bf16, 1 GPU)`."""
    ends = [choose(found, key=lambda one: one.batch_size) for choose in (min, max)]
    phrases = [f"{one.batch_size:,} ({batch_label(one.settings, ranks)})" for one in ends]
    return "the largest batch per device that fits is " + (
        phrases[0] if len(found) == 1 else " to ".join(phrases)
    )
