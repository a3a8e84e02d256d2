"""Insights as words: the lead of a report, its findings, and its large figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.report import formatting
from raybench.report.blocks import Listing
from raybench.report.insights import Insight, Kind, Value, of_kind
from raybench.report.plain_text import span

_MAX_FIGURES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """A large figure of a page.

    value: the number, with its unit where that is short. counts: what it is a number of. where: the
    settings that it holds for.
    """

    value: str
    counts: str
    where: str = ""


def amount(value: float, unit: str) -> str:
    """Write a value with its unit: `3.47`, `86.7%`, `587,718 samples/s`, `11.60 µs`, `1,472`."""
    match unit:
        case "times":
            return formatting.ratio(value)
        case "share":
            return formatting.percent(value)
        case "ms":
            return formatting.duration(value)
        case "":
            return f"{value:,.0f}"
        case _:
            return f"{formatting.number(value)} {unit}"


def _sure(value: Value) -> str:
    return "" if value.half_width is None else f" {formatting.half_width(value.half_width)}"


def _where(value: Value) -> str:
    """Write ` (fp32, batch 64, unsteady)`; empty where there is nothing to say."""
    words = ", ".join(filter(None, (value.where, *value.doubts)))
    return f" ({words})" if words else ""


def _ends(one: Insight, suffix: str = "") -> str:
    """Write the value of one point with its interval, or the range over several.

    The best of many is best by chance too, so its own interval would promise too much.
    """
    if one.points == 1:
        return f"{amount(one.most.value, one.unit)}{suffix}{_sure(one.most)}{_where(one.most)}"
    return " to ".join(
        f"{amount(value.value, one.unit)}{suffix}{_where(value)}" for value in (one.least, one.most)
    )


def _span(one: Insight, form: str = "") -> str:
    """Write the range without settings, once where both ends read the same."""
    ends = (one.least.value, one.most.value)
    return span(*(f"{end:{form}}" if form else amount(end, one.unit) for end in ends))


def lead(insights: Sequence[Insight], baseline: Mapping[str, Any], ranks: str, why: str) -> str:
    """Return the sentence that a report begins with; empty where nothing was measured.

    why: what is to be said of points that are not compared.
    """
    if largest := of_kind(insights, "largest_batch"):
        ends = [choose(largest, key=lambda one: one.most.value) for choose in (min, max)]
        phrases = dict.fromkeys(_ends(one) for one in ends)
        return f"the largest batch per device that fits is {' to '.join(phrases)}"
    speed_ups = [one for one in of_kind(insights, "speed_up") if one.over == _over(baseline)]
    if speed_ups:
        best = max(speed_ups, key=lambda one: (one.devices, one.most.value))
        is_scaling = best.devices > int(baseline.get("world_size", 0)) > 0
        found = (_scaling if is_scaling else _gain)(best, insights, baseline, ranks)
    else:
        found = _most(insights)
        found, why = (why, found) if why else (found, "")
    return "; ".join(filter(None, (found, why)))


def _over(baseline: Mapping[str, Any]) -> str:
    return formatting.settings(baseline)


def _beside(insights: Iterable[Insight], kind: Kind, best: Insight) -> Insight | None:
    """Return the insight of this kind about what `best` is about."""
    same = (one for one in of_kind(insights, kind) if (one.subject, one.over) == _about(best))
    return next(same, None)


def _about(one: Insight) -> tuple[str, str]:
    return one.subject, one.over


def _scaling(
    best: Insight, insights: Sequence[Insight], baseline: Mapping[str, Any], ranks: str
) -> str:
    """Write `4 GPUs do 3.48 ±0.5% times the samples/s of 1 GPU (fp32), 87.0% efficiency`.

    Then what takes the largest part of the loss, and of several settings the most samples/s.
    """
    base = formatting.ranks_words(int(baseline["world_size"]), ranks)
    is_lone = best.points == 1
    times = amount(best.most.value, best.unit) + _sure(best.most) if is_lone else _ends(best)
    text = f"{best.subject} do {times} times the samples/s of {base}"
    if efficiency := _beside(insights, "efficiency", best):
        text += f", {_span(efficiency)} efficiency"
    phrases = [text + (_where(best.most) if is_lone else "")]
    for loss in of_kind(insights, "main_loss"):
        share = _span(loss, ".0%")
        phrases.append(loss.note or f"{loss.subject} is {share} of the loss")
    if best.points > 1:
        phrases.append(_most(insights))
    return "; ".join(filter(None, phrases))


def _gain(
    best: Insight, insights: Sequence[Insight], baseline: Mapping[str, Any], ranks: str
) -> str:
    """Write `bf16 is 4.19 to 6.83 times as fast as fp32, with 71.8% to 96.3% of the memory`."""
    base = ", ".join(
        formatting.setting_words(name, value, ranks) for name, value in baseline.items()
    )
    value = best.most
    times = amount(value.value, best.unit) + _sure(value)
    if best.points > 1:
        text = f"{best.subject} is {_span(best)} times as fast as {base}"
    elif value.low is not None and value.high is not None and value.low < 1 < value.high:
        between = f"between {amount(value.low, best.unit)} and {amount(value.high, best.unit)}"
        text = (
            f"whether {best.subject} is faster than {base} is not decided: {times} times as fast, "
            f"{between}{_where(value)}"
        )
    else:
        text = f"{best.subject} is {times} times as fast as {base}{_where(value)}"
    memory = _beside(insights, "memory_ratio", best)
    return text + (f", with {_span(memory)} of the memory" if memory else "")


def _most(insights: Sequence[Insight]) -> str:
    """Write the most samples/s, or the bandwidths and latencies, or the most TFLOP/s."""
    for one in of_kind(insights, "throughput"):
        return f"at most {amount(one.most.value, one.unit)}{_where(one.most)}"
    phrases = [f"{one.subject}: {_ends(one)}" for one in of_kind(insights, "bandwidth")[:1]]
    phrases += [f"{_span(one)} {one.subject}" for one in of_kind(insights, "of_datasheet")]
    phrases += [f"{one.subject} takes {_ends(one)}" for one in of_kind(insights, "latency")]
    for one in of_kind(insights, "tflops")[:1]:
        share, _, burst = one.note.partition("; ")
        if "datasheet" not in share:
            share, burst = "", one.note
        reached = ", ".join(filter(None, (amount(one.most.value, one.unit), share)))
        phrases += [f"at most {reached}{_where(one.most)}", *filter(None, [burst])]
    return "; ".join(phrases)


def listings(insights: Sequence[Insight], baseline: Mapping[str, Any]) -> Iterator[Listing]:
    """Yield the findings as listings: the largest batch, gains, losses and the best settings."""
    own = _over(baseline)
    titled = (
        ("Largest batch that fits, per device", _largest_lines(insights)),
        (_title(own), _speed_up_lines(insights, own)),
        (f"Share of the step that is lost, against {own}", _loss_lines(insights)),
        ("Best precision and batch size", best_lines(insights)),
        *(
            (_title(over), _speed_up_lines(insights, over))
            for over in dict.fromkeys(one.over for one in of_kind(insights, "speed_up"))
            if over != own
        ),
    )
    for title, lines in titled:
        if found := list(lines):
            yield Listing(title=title, lines=found)


def _title(over: str) -> str:
    named = " and efficiency" if "world_size=" in over else ""
    return f"Speed-up{named} over {over}"


def _largest_lines(insights: Sequence[Insight]) -> Iterator[tuple[str, str]]:
    for one in of_kind(insights, "largest_batch"):
        yield one.subject, f"{amount(one.most.value, '')}; {one.note}"


def _speed_up_lines(insights: Sequence[Insight], over: str) -> Iterator[tuple[str, str]]:
    names: dict[Kind, str] = {
        "efficiency": "efficiency",
        "serial_fraction": "serial fraction",
        "memory_ratio": "of the memory",
    }
    for one in of_kind(insights, "speed_up"):
        if one.over == over:
            beside = ((_beside(insights, kind, one), name) for kind, name in names.items())
            phrases = [f"{_span(found)} {name}" for found, name in beside if found]
            yield one.subject, "; ".join([_ends(one, "x"), *phrases])


def _loss_lines(insights: Sequence[Insight]) -> Iterator[tuple[str, str]]:
    losses = of_kind(insights, "loss")
    if losses:
        subject = of_kind(insights, "speed_up")
        devices = max(subject, key=lambda one: one.devices).subject if subject else ""
        yield devices, ", ".join(f"{_span(one)} {one.subject}" for one in losses)


def best_lines(insights: Sequence[Insight]) -> Iterator[tuple[str, str]]:
    """Yield (devices, the precision and batch with the most samples/s or samples per joule)."""
    for one in of_kind(insights, "best"):
        doubts = f" ({', '.join(one.most.doubts)})" if one.most.doubts else ""
        text = f"{one.most.where}: {amount(one.most.value, one.unit)}{doubts}"
        yield one.subject, "; ".join(filter(None, (text, one.note)))


def key_figures(
    insights: Sequence[Insight], baseline: Mapping[str, Any], ranks: str
) -> list[KeyFigure]:
    """Return at most four large figures, the answer to the question of the job first."""
    found: list[KeyFigure] = []
    largest = sorted(of_kind(insights, "largest_batch"), key=lambda one: -one.most.value)
    speed_ups = [one for one in of_kind(insights, "speed_up") if one.over == _over(baseline)]
    if largest:
        found += [
            _figure(one, "is the largest batch per device that fits; " + one.note)
            for one in largest[: _MAX_FIGURES - 1]
        ]
    elif speed_ups:
        best = max(speed_ups, key=lambda one: (one.devices, one.most.value))
        found += _comparison_figures(best, insights, baseline, ranks)
    found += [
        KeyFigure(
            value=formatting.number(one.most.value),
            counts="samples/s at most",
            where=one.most.where,
        )
        for one in of_kind(insights, "throughput")
    ]
    if not found:
        found += [
            *(_figure(one, one.subject) for one in _all_reduce_first(insights)),
            *(_figure(one, one.subject) for one in of_kind(insights, "of_datasheet")),
            *(
                _figure(one, f"for {one.subject} at least", one.least)
                for one in of_kind(insights, "latency")
            ),
            *(
                KeyFigure(
                    value=formatting.number(one.most.value),
                    counts="; ".join(filter(None, (f"TFLOP/s in {one.subject} at most", one.note))),
                    where=one.most.where,
                )
                for one in of_kind(insights, "tflops")
            ),
        ]
    return found[:_MAX_FIGURES]


def _figure(one: Insight, counts: str, value: Value | None = None) -> KeyFigure:
    shown = value or one.most
    suffix = "×" if one.unit == "times" else ""
    return KeyFigure(value=amount(shown.value, one.unit) + suffix, counts=counts, where=shown.where)


def _all_reduce_first(insights: Sequence[Insight]) -> list[Insight]:
    found = of_kind(insights, "bandwidth")
    return sorted(found, key=lambda one: not one.subject.startswith("all_reduce"))


def _comparison_figures(
    best: Insight, insights: Sequence[Insight], baseline: Mapping[str, Any], ranks: str
) -> Iterator[KeyFigure]:
    """Yield the largest speed-up, its efficiency and main loss, or the least memory."""
    base = int(baseline.get("world_size", 0))
    sure = _sure(best.most) if best.points == 1 else " at best"
    if best.devices > base > 0:
        whose = formatting.ranks_words(base, ranks)
        ideal = best.devices / base
        counts = f"the samples/s of {whose} on {best.subject}{sure}; {ideal:.4g}× is ideal"
        yield _figure(best, counts)
        if efficiency := _beside(insights, "efficiency", best):
            yield _figure(efficiency, f"scaling efficiency on {best.subject}")
        if losses := [one for one in of_kind(insights, "loss") if one.subject != "unexplained"]:
            worst = max(losses, key=lambda one: one.least.value + one.most.value)
            low, high = (f"{end.value:.0%}" for end in (worst.least, worst.most))
            yield KeyFigure(
                value=high if low == high else f"{low.rstrip('%')}–{high}",
                counts=f"of the step is lost to {worst.subject} on {best.subject}",
            )
        return
    name = formatting.baseline_name(baseline)
    where = ", ".join(filter(None, (best.subject, best.most.where)))
    yield KeyFigure(
        value=f"{formatting.ratio(best.most.value)}×",
        counts=f"the samples/s of {name}{sure}",
        where=where,
    )
    memory = [one for one in of_kind(insights, "memory_ratio") if one.over == best.over]
    if memory:
        least = min(memory, key=lambda one: one.least.value)
        yield KeyFigure(
            value=formatting.percent(least.least.value),
            counts=f"of the memory of {name}",
            where=", ".join(filter(None, (least.subject, least.least.where))),
        )
