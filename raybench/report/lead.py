"""The answer of a run in words: the lead of a report, its findings, and its large figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raybench.analysis.losses import CAUSES, LOSSES, has_causes
from raybench.analysis.rows import ScaledRow
from raybench.analysis.settings import varying
from raybench.hardware.peaks import memory_peak_gb_s
from raybench.records.metric import Metric
from raybench.report import formatting
from raybench.report.answers import (
    RATIOS,
    Candidate,
    Case,
    LargestBatch,
    find_metric,
    groups_compared,
    is_time,
    rows_compared,
    size_of,
    with_most_ranks,
)
from raybench.report.blocks import Listing
from raybench.report.marks import marks
from raybench.report.plain_text import span
from raybench.results.metrics.parts import is_slowed_by_one_rank

if TYPE_CHECKING:
    from raybench.report.summary import Summary

_MAX_FIGURES = 4
_MOST_GROUPS = 4
# So many cases have a phrase each in a lead.
_MOST_CASES = 2
# A loss below this share of the step in every point is not worth a line.
_MIN_SHARE = 0.01
# A burst that is faster by less is no other figure.
_MIN_BURST = 1.01
_NOUNS = {
    "step_ms_p50": "step time",
    "step_ms_p99": "99th percentile of the step time",
    "peak_mem_allocated_bytes": "memory",
    "busbw_gb_s": "bus bandwidth",
    "memory_gb_s": "memory bandwidth",
}
_DOUBTS = {
    "u": "unsteady",
    "w": "wide",
    "t": "throttled",
    "c": "sharing cores",
    "n": "not alone",
    "q": "quick",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """A large figure of a page.

    value: the number, with its unit where that is short. counts: what it is a number of. where: the
    settings that it holds for.
    """

    value: str
    counts: str
    where: str = ""


def lead(summary: Summary) -> str:
    """Return the sentence that a report begins with; empty where nothing was measured."""
    if summary.largest_batches:
        return _largest(summary)
    compared = rows_compared(summary.rows) if summary.answer.metric in RATIOS else []
    if compared:
        return _scaling(summary) if is_scaling(summary) else _gains(summary, compared)
    return ranking(summary)


def is_scaling(summary: Summary) -> bool:
    """Whether points are compared with a baseline on fewer devices."""
    base = summary.run.baseline.get("world_size")
    rows = with_most_ranks(summary.rows)
    return base is not None and bool(rows) and rows[0].world_size > int(base)


def _sure(share: float | None) -> str:
    return "" if share is None else f" {formatting.half_width(share)}"


def _in_brackets(*words: str) -> str:
    found = ", ".join(filter(None, words))
    return f" ({found})" if found else ""


def _doubts(row: ScaledRow) -> tuple[str, ...]:
    """Return what makes the numbers of a point doubtful, in words."""
    found = marks(row)
    words = [_DOUBTS[mark] for mark in found if mark in _DOUBTS]
    if row.is_base_unsteady and "u" not in found:
        words.append("against an unsteady point")
    return tuple(words)


def speed_up_half_width(row: ScaledRow) -> float | None:
    """Return half of the interval of a speed-up over it; None where it is not known."""
    if row.speed_up is None or row.speed_up_low is None or row.speed_up_high is None:
        return None
    return (row.speed_up_high - row.speed_up_low) / 2 / row.speed_up


def _times(rows: Sequence[ScaledRow]) -> str:
    """Write the speed-up of one point with its interval, or the range over several.

    The best of many is best by chance too, so its own interval would promise too much.
    """
    if len(rows) == 1:
        return f"{formatting.ratio(rows[0].speed_up)}x{_sure(speed_up_half_width(rows[0]))}"
    found = sorted(row.speed_up or 0.0 for row in rows)
    return span(*(f"{formatting.ratio(value)}x" for value in (found[0], found[-1])))


def _groups(summary: Summary, rows: Sequence[ScaledRow]) -> list[tuple[str, list[ScaledRow]]]:
    """Return points by the first setting, other than sizes, in which they differ; else together."""
    names = [n for n in varying(rows) if n not in ("batch", "world_size", "scaling", "workload")]
    for name in names[:1]:
        groups: dict[str, list[ScaledRow]] = {}
        for row in rows:
            words = formatting.settings_words(row, [name], summary.ranks)
            groups.setdefault(words, []).append(row)
        if len(groups) <= _MOST_GROUPS:
            return list(groups.items())
    return [("", list(rows))]


def _scaling(summary: Summary) -> str:
    """Write `4 GPUs do 2.41x to 2.75x (bf16) the samples/s of 1 GPU, 4x is ideal; ...`."""
    rows, base = with_most_ranks(summary.rows), int(summary.run.baseline["world_size"])
    devices = formatting.ranks_words(rows[0].world_size, summary.ranks)
    ideal = f"{rows[0].world_size / base:.4g}x is ideal"
    if any(len(set(row.models_by_rank or ())) > 1 for row in rows):
        shares = sorted(row.efficiency for row in rows if row.efficiency is not None)
        found = (
            span(*(formatting.percent(share) for share in (shares[0], shares[-1])))
            if shares
            else ""
        )
        ideal = f"{found} of what they do alone" if found else "their ideal is not known"
    phrases = [
        _times(members) + _in_brackets(name, *(_doubts(members[0]) if len(members) == 1 else ()))
        for name, members in _groups(summary, rows)
    ]
    of = formatting.ranks_words(base, summary.ranks)
    text = f"{devices} do {', '.join(phrases)} the {summary.answer.items}/s of {of}; {ideal}"
    return "; ".join(filter(None, (text, _main_loss(rows))))


def _gains(summary: Summary, compared: Sequence[ScaledRow]) -> str:
    """Write `bf16 is 4.19x to 6.83x as fast as fp32, with 71.8% to 96.3% of the memory`."""
    baseline = {k: v for k, v in summary.run.baseline.items() if k != "world_size"}
    of = _words(baseline, summary.ranks) or "the baseline"
    phrases = []
    groups = sorted(
        groups_compared(compared, baseline), key=lambda one: -max(r.speed_up or 0 for r in one[1])
    )
    for settings, rows in groups[:_MOST_GROUPS]:
        name = _words({k: v for k, v in settings.items() if v != baseline.get(k)}, summary.ranks)
        name = name or _words(settings, summary.ranks)
        (low, high), lone = (rows[0].speed_up_low, rows[0].speed_up_high), len(rows) == 1
        if lone and low is not None and high is not None and low < 1 < high:
            between = f"between {formatting.ratio(low)}x and {formatting.ratio(high)}x"
            phrases.append(
                f"whether {name} is faster than {of} is not decided: {_times(rows)} as fast, "
                f"{between}{_in_brackets(*_doubts(rows[0]))}, {_more_rounds(rows)}"
            )
            continue
        text = f"{name} is {_times(rows)} as fast as {of}"
        text += _in_brackets(*_doubts(rows[0])) if lone else ""
        memory = sorted(row.memory_ratio for row in rows if row.memory_ratio is not None)
        if memory and len(groups) == 1:
            of_memory = span(*(formatting.percent(share) for share in (memory[0], memory[-1])))
            text += f", with {of_memory} of the memory"
        phrases.append(text)
    if more := len(groups) - _MOST_GROUPS:
        phrases += [f"{more} others gain less"] if more > 0 else []
    return "; ".join(phrases)


def _words(settings: Mapping[str, Any], ranks: str) -> str:
    return ", ".join(formatting.setting_words(name, v, ranks) for name, v in settings.items())


def _more_rounds(rows: Sequence[ScaledRow]) -> str:
    return f"more rounds would tell: `--set measure.rounds={2 * max(row.rounds for row in rows)}`"


def _main_loss(rows: Sequence[ScaledRow]) -> str:
    """Return which cause takes the largest part of the loss, or why that is not known."""
    losing = [
        row
        for row in rows
        if row.efficiency is not None
        and row.efficiency < 1 - _MIN_SHARE
        # What may be ideal has lost nothing for certain.
        and not (row.efficiency_high is not None and row.efficiency_high >= 1)
    ]
    explained = [row for row in losing if has_causes(row)]
    contradicted = [row for row in losing if row.why_no_breakdown is not None]
    if not losing:
        return ""
    if not explained and contradicted:
        return "what the rest is lost to is not known: the parts of the step exceed it"
    if len(explained) + len(contradicted) < len(losing):
        return "what the rest is lost to was not measured"
    cause, count = Counter(map(_largest_cause, explained)).most_common(1)[0]
    if count < len(losing):
        return f"{CAUSES[cause]} is the largest loss in {count} of {len(losing)} settings"
    shares = sorted(min(1.0, getattr(row, cause) / (1 - (row.efficiency or 0.0))) for row in losing)
    return f"{CAUSES[cause]} is {span(f'{shares[0]:.0%}', f'{shares[-1]:.0%}')} of the loss"


def _largest_cause(row: ScaledRow) -> str:
    """Return the column of the largest loss; one rank is a cause only where it stands out."""
    named = [name for name in LOSSES if name != "lost_wait" or is_slowed_by_one_rank(row)]
    return max(named, key=lambda name: getattr(row, name) or 0.0)


def _largest(summary: Summary) -> str:
    """Write `192 sequences fit per device (activation_checkpointing=true), 139 (...)`."""
    found = sorted(summary.largest_batches, key=lambda one: -one.batch_size)
    names = [n for n in found[0].settings if len({str(one.settings[n]) for one in found}) > 1]
    names = names or list(found[0].settings)
    first, *others = (
        (one, _words({name: one.settings[name] for name in names}, summary.ranks)) for one in found
    )
    text = f"the largest batch per device that fits is {first[0].batch_size:,}"
    text += _in_brackets(first[1])
    return text + "".join(f", {one.batch_size:,} ({words})" for one, words in others[:2])


def answer_metric(summary: Summary) -> Metric | None:
    """Return the metric by which points are ranked; None where none was measured."""
    return find_metric(summary.rows, summary.ranked_by.metric)


def metric_noun(summary: Summary, metric: Metric) -> str:
    """Return what a metric is, in words: `tokens/s`, `step time`."""
    if metric.name == "throughput":
        return f"{summary.answer.items}/s"
    return _NOUNS.get(metric.name, metric.title)


def amount(summary: Summary, metric: Metric, value: float) -> str:
    """Write a value with its unit: `587,718 samples/s`, `11.60 µs`, `1.50 GiB`."""
    if metric.name == "throughput":
        return f"{formatting.number(value)} {summary.answer.items}/s"
    if metric.name.endswith("_ms") or metric.name.startswith("step_ms"):
        return formatting.duration(value)
    text = formatting.metric(metric, value)
    unit = {"gib": "GiB", "share": "", "percent": "", "ratio": "x"}.get(metric.format)
    return f"{text} {metric.unit or metric.title if unit is None else unit}".rstrip()


def ranking(summary: Summary) -> str:
    """Say which points are the best of those that are compared, case by case."""
    metric, cases = answer_metric(summary), summary.cases
    if metric is None or not cases:
        return ""
    contested = [case for case in cases if len(case.ranked) > 1]
    if not contested:
        return _range(summary, metric, cases)
    if len(cases) <= _MOST_CASES:
        return "; ".join(_verdict(summary, metric, case) for case in cases)
    return _winner(summary, metric, contested)


def is_contested(summary: Summary) -> bool:
    """Whether any two points of the run compete with each other."""
    return any(len(case.ranked) > 1 for case in summary.cases)


def _told(summary: Summary, metric: Metric, one: Candidate) -> str:
    """Write a value with its interval and its doubts."""
    doubts = _in_brackets(*_doubts(one.row))
    return f"{amount(summary, metric, one.value)}{_sure(one.half_width)}{doubts}"


def _superlative(summary: Summary, metric: Metric) -> str:
    word = "most" if summary.ranked_by.best == "max" else "least"
    return f"the {word} {metric_noun(summary, metric)}"


def _verdict(summary: Summary, metric: Metric, case: Case) -> str:
    """Write `FSDP 2 has the most tokens/s: 12,300 tokens/s ±1.0%, 1.08x the next (TP 2)`."""
    best, where = case.best, f"{case.name}: " if case.name else ""
    told = _told(summary, metric, best)
    if len(case.ranked) == 1:
        return f"{where}{told}"
    if rivals := case.rivals:
        others = ", ".join(f"{one.name} {_told(summary, metric, one)}" for one in rivals[:2])
        return (
            f"{where}which has {_superlative(summary, metric)} is not decided: {best.name} {told}, "
            f"{others}; {_more_rounds([best.row])}"
        )
    return (
        f"{where}{best.name} has {_superlative(summary, metric)}: {told}, "
        f"{_over_next(summary, metric, case)}"
    )


def _gain(summary: Summary, case: Case) -> float:
    """Return how many times as good the best is as the next."""
    best, following = case.ranked[0].value, case.ranked[1].value
    over, under = (best, following) if summary.ranked_by.best == "max" else (following, best)
    return over / under if under else 1.0


def _over_next(summary: Summary, metric: Metric, case: Case) -> str:
    best, following = case.ranked[:2]
    share = _gain(summary, case) if is_time(metric) else best.value / (following.value or 1.0)
    as_fast = " as fast as" if is_time(metric) else ""
    return f"{formatting.ratio(share)}x{as_fast} the next ({following.name})"


def _winner(summary: Summary, metric: Metric, contested: Sequence[Case]) -> str:
    """Write which setting is the best most often, and where it gains most."""
    decided = [case for case in contested if not case.rivals]
    noun, count = _superlative(summary, metric), len(contested)
    if not decided:
        case = max(contested, key=lambda one: _gain(summary, one))
        told = _verdict(summary, metric, case)
        return f"which has {noun} is not decided in any of {count} cases; {told}"
    wins, is_most = Counter(case.best.name for case in decided), summary.ranked_by.best == "max"
    # Of settings that are the best equally often, the one with the best value.
    values = [case.best.value if is_most else -case.best.value for case in decided]
    ordered = sorted(zip(values, [case.best.name for case in decided], strict=True), reverse=True)
    name = max((name for _, name in ordered), key=lambda name: wins[name])
    won = wins[name]
    most = max(
        (case for case in decided if case.best.name == name),
        key=lambda one: one.best.value if summary.ranked_by.best == "max" else _gain(summary, one),
    )
    open_cases = f"; {count - len(decided)} are not decided" if len(decided) < count else ""
    told = _told(summary, metric, most.best) + _of_datasheet(metric, most.best.row)
    return (
        f"{name} has {noun} in {won} of {count} cases: {told} with {most.name}, "
        f"{_over_next(summary, metric, most)}{open_cases}"
    )


def _largest_messages(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Return the cases of all_reduce, or all where there are none, and of these the largest."""
    sums = [one for one in cases if one.best.row.params.get("operation") == "all_reduce"]
    sums = sums or list(cases)
    most = max(size_of(one.best.row) for one in sums)
    return sums, [one for one in sums if size_of(one.best.row) == most]


def _range(summary: Summary, metric: Metric, cases: Sequence[Case]) -> str:
    """Write the values of points none of which competes with another: up to the largest one.

    Of messages and arrays those of the largest size, of collectives those of all_reduce.
    """
    noun = metric_noun(summary, metric)
    sums, shown = _largest_messages(cases)
    sizes = {size for one in cases if (size := size_of(one.best.row))}
    ordered = sorted(shown, key=lambda case: case.best.value)
    least, most = ordered[0], ordered[-1]
    told = f"{_told(summary, metric, most.best)}{_in_brackets(most.name)}"
    if len(cases) == 1:
        return told + _of_datasheet(metric, most.best.row)
    if summary.ranked_by.best == "max":
        among = "all_reduce: " if len(sums) < len(cases) else ""
        among += f"with {formatting.size(max(sizes))}, " if len(sizes) > 1 else ""
        text = f"{among}{noun} of up to {told}{_of_datasheet(metric, most.best.row)}"
        smallest = [
            one.best.row
            for one in sums
            if size_of(one.best.row) == min(sizes, default=0)
            and one.best.row.world_size == most.best.row.world_size
        ]
        if metric.name == "busbw_gb_s" and len(sizes) > 1 and smallest:
            time_ms = min(row.step_ms_p50 or 0.0 for row in smallest)
            text += f"; {formatting.size(min(sizes))} takes {formatting.duration(time_ms)} or more"
        return text
    first = f"{_told(summary, metric, least.best)}{_in_brackets(least.name)}"
    return f"{noun} from {first} to {told}"


def _of_datasheet(metric: Metric, row: ScaledRow) -> str:
    """Write the share of the datasheet's peak, and what a product reached in its first moments."""
    peak_gb_s = memory_peak_gb_s(str(row.device_name))
    if metric.name == "memory_gb_s" and peak_gb_s is not None:
        share = formatting.percent((row.memory_gb_s or 0.0) / peak_gb_s)
        return f", {share} of the datasheet's {peak_gb_s:,.0f} GB/s"
    if metric.name != "achieved_tflops_per_device":
        return ""
    burst, of_peak = row.burst_tflops_per_device, row.mfu_pct
    peak = "" if of_peak is None else f", {of_peak:.1f}% of the datasheet's peak"
    is_faster = burst is not None and burst >= _MIN_BURST * (row.achieved_tflops_per_device or 0)
    first = f" ({formatting.number(burst)} TFLOP/s in its first 30 ms)" if is_faster else ""
    return first + peak


def listings(summary: Summary) -> Iterator[Listing]:
    """Yield the findings: the largest batches, each case, speed-ups and losses."""
    if summary.largest_batches:
        lines = [
            (_words(one.settings, summary.ranks), f"{one.batch_size:,}; {_memory(one)}")
            for one in summary.largest_batches
        ]
        yield Listing(title="Largest batch that fits, per device", lines=lines)
    metric = answer_metric(summary)
    contested = [case for case in summary.cases if len(case.ranked) > 1]
    if metric is not None and len(contested) > 1:
        lines = [
            (case.name, _verdict(summary, metric, replace(case, name=""))) for case in contested
        ]
        yield Listing(title=f"Best by {metric_noun(summary, metric)}", lines=lines)
    baseline, compared = summary.run.baseline, rows_compared(summary.rows)
    over = formatting.settings(baseline)
    if compared:
        lines = [
            (_words(settings, summary.ranks), _times(rows))
            for settings, rows in groups_compared(compared, baseline)
        ]
        yield Listing(title=f"Speed-up over {over}", lines=lines)
    if is_scaling(summary):
        rows = with_most_ranks(summary.rows)
        causes = [
            f"{span(*(formatting.percent(share) for share in ends))} {CAUSES[name]}"
            for name in LOSSES
            if any(map(has_causes, rows)) and (ends := _ends(rows, name)) is not None
        ]
        devices = formatting.ranks_words(rows[0].world_size, summary.ranks)
        if causes:
            title = f"Share of the step that is lost, against {over}"
            yield Listing(title=title, lines=[(devices, ", ".join(causes))])


def _ends(rows: Sequence[ScaledRow], name: str) -> tuple[float, float] | None:
    """Return the least and the most of a loss; None where no point loses 1 % or more to it."""
    found = sorted(value for row in rows if (value := getattr(row, name)) is not None)
    is_small = not found or max(abs(found[0]), abs(found[-1])) < _MIN_SHARE
    return None if is_small else (found[0], found[-1])


def key_figures(summary: Summary) -> list[KeyFigure]:
    """Return at most four large figures, those of the lead."""
    if summary.largest_batches:
        found = list(_largest_figures(summary))
    elif summary.answer.metric in RATIOS and rows_compared(summary.rows):
        found = list(_speed_up_figures(summary))
    else:
        found = list(_ranked_figures(summary))
    return found[:_MAX_FIGURES]


def _largest_figures(summary: Summary) -> Iterator[KeyFigure]:
    for one in sorted(summary.largest_batches, key=lambda one: -one.batch_size):
        memory = "" if one.peak_mem_allocated_bytes is None else "; " + _memory(one)
        counts = f"is the largest batch per device that fits{memory}"
        where = _words(one.settings, summary.ranks)
        yield KeyFigure(value=f"{one.batch_size:,}", counts=counts, where=where)


def _memory(one: LargestBatch) -> str:
    peak = one.peak_mem_allocated_bytes
    used = "" if peak is None else f"{formatting.gib(peak)} GiB; "
    return f"{used}{one.ran_out:,} runs out of memory"


def _speed_up_figures(summary: Summary) -> Iterator[KeyFigure]:
    """Yield the largest speed-up of each group, the one that is largest first."""
    baseline, items = summary.run.baseline, summary.answer.items
    rows = with_most_ranks(summary.rows) if is_scaling(summary) else rows_compared(summary.rows)
    names = varying(rows) or ["precision"]
    bests = [
        max(members, key=lambda row: row.speed_up or 0.0) for _, members in _groups(summary, rows)
    ]
    for row in sorted(bests, key=lambda row: -(row.speed_up or 0.0)):
        if is_scaling(summary):
            of = formatting.ranks_words(int(baseline["world_size"]), summary.ranks)
            on = f" on {formatting.ranks_words(row.world_size, summary.ranks)}"
        else:
            of, on = formatting.baseline_name(baseline), ""
        best = " at best" if len(rows) > len(bests) else ""
        yield KeyFigure(
            value=f"{formatting.ratio(row.speed_up)}×",
            counts=f"the {items}/s of {of}{on}{_sure(speed_up_half_width(row))}{best}",
            where=formatting.settings_words(row, names, summary.ranks),
        )


def _ranked_figures(summary: Summary) -> Iterator[KeyFigure]:
    """Yield the points of the one case, or the best of the cases, those with most first."""
    metric, cases = answer_metric(summary), summary.cases
    if metric is None:
        return
    is_most, lone = summary.ranked_by.best == "max", len(cases) == 1
    cases = cases if is_contested(summary) else _largest_messages(cases)[1]
    places = [(cases[0], one) for one in cases[0].ranked] if lone else [(c, c.best) for c in cases]
    for case, one in sorted(places, key=lambda place: place[1].value, reverse=is_most):
        value, noun = amount(summary, metric, one.value), metric_noun(summary, metric)
        counts = "" if value.endswith(noun) else noun
        yield KeyFigure(
            value=value,
            counts=f"{counts}{_sure(one.half_width)}".strip(),
            where=", ".join(filter(None, (one.name, case.name))),
        )
