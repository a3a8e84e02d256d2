"""What a run answers, in words: one function for each kind of `raybench.analysis.answer.Found`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raybench.analysis.answer import (
    MOST_GROUPS,
    Gains,
    Insight,
    LargestBatch,
    LargestBatches,
    MainLoss,
    MoreRounds,
    Next,
    NextCommand,
    RunAnswer,
    SpeedUps,
    Uncompared,
    why_not_known,
)
from raybench.analysis.ranking import (
    Candidate,
    Case,
    NothingMeasured,
    Ranking,
    Values,
    Verdict,
    follows_step_time,
    is_speed,
    rounds_to_decide,
    share_of_datasheet,
)
from raybench.analysis.rows import ScaledRow, is_column
from raybench.analysis.scaling import CAUSES
from raybench.records import Metric
from raybench.report import formatting
from raybench.report.formatting import counted, span
from raybench.report.point_settings import short_name
from raybench.report.words import shares
from raybench.report.words.doubts import short_doubts
from raybench.report.words.reasons import losses_unknown_words, not_compared_words

_NOUNS = {
    "step_ms_p50": "step time",
    "step_ms_p99": "99th percentile of the step time",
    "peak_mem_allocated_bytes": "memory",
    "energy_j": "energy",
    "busbw_gb_s": "bus bandwidth",
    "memory_gb_s": "memory bandwidth",
    "wall_unsynced_share": "share of the step that time.time() shows without waiting",
}
_OPTION = re.compile(r"--?[a-z]")
# By the format of a metric, where that says it.
_UNITS = {"gib": "GiB", "share": "", "percent": "", "ratio": "x"}


def lead(answer: RunAnswer) -> str:
    """Return what the run found, and what is open; no full stop; "" if nothing was measured."""
    if answer.shares:
        text = shares.best_shares(answer.shares, answer.data.fleets, answer.data.ranks)
    else:
        parts = (not_compared(answer.uncompared), found(answer))
        text = "; ".join(filter(None, parts))
    if not text:
        return ""
    if ones := answer.single_starts:
        of = "" if ones == len(answer.data.ok_rows) else f"{counted(ones, 'point')} of "
        text += f"; {of}one start"
        if more := answer.more_rounds:
            text += f"; `--set measure.rounds={more.rounds}` gives an interval"
    if count := answer.impossible:
        text += f"; {counted(count, 'point')} with numbers that cannot be: see the warnings"
    return text


def not_compared(uncompared: Uncompared | None) -> str:
    """Return how many points should have been compared and are not, and why; "" for none."""
    if uncompared is None:
        return ""
    reasons, count = uncompared.reasons, uncompared.count
    if count == uncompared.points:
        most = max(reasons, key=lambda why: reasons[why])
        return f"no point has a speed-up: {not_compared_words(most)}"
    are = "is" if count == 1 else "are"
    text = f"{count} of {uncompared.points} points {are} not compared"
    return f"{text}: {not_compared_words(next(iter(reasons)))}" if len(reasons) == 1 else text


def found(answer: RunAnswer) -> str:
    """Return what a run found without its fleets, no full stop; "" if nothing was measured."""
    match answer.found:
        case LargestBatches() as batches:
            return largest_batches(batches, answer.data.ranks)
        case SpeedUps() as speed_ups:
            return scaling(speed_ups, answer)
        case Gains() as found_gains:
            return gains(found_gains, answer.data.ranks)
    return ranking(answer)


def largest_batches(found: LargestBatches, ranks: str) -> str:
    """Write `the largest batch per device that fits is 1,474 (bf16), 740 (fp32)`."""
    first, *others = found.batches
    place = in_brackets(batch_settings(first, found, ranks))
    text = f"the largest batch per device that fits is {first.batch_size:,}{place}"
    told = (f", {o.batch_size:,} ({batch_settings(o, found, ranks)})" for o in others[:2])
    return text + "".join(told)


def batch_settings(one: LargestBatch, found: LargestBatches, ranks: str) -> str:
    """Write the settings that tell a largest batch from the others, or all of a single one."""
    names = found.apart or tuple(one.settings)
    return formatting.words_of_settings({name: one.settings[name] for name in names}, ranks)


def what_fits(one: LargestBatch) -> str:
    """Write `fit per device in 139.12 GiB; 1,480 run out of memory`."""
    peak = one.peak_mem_allocated_bytes
    used = "" if peak is None else f" in {formatting.gib(peak)} GiB"
    return f"fit per device{used}; {one.ran_out:,} run out of memory"


def scaling(found: SpeedUps, answer: RunAnswer) -> str:
    """Write `4 GPUs do 2.41x to 2.75x (bf16) the samples/s of 1 GPU, each ±2.1% or less; ...`."""
    ranks = answer.data.ranks
    phrases = []
    for one in found.series:
        value = _with_interval(one) if len(one.rows) == 1 else speed_up(one)
        where = formatting.words_of_settings(one.settings, ranks)
        phrases.append(value + in_brackets(where, *_doubts(one.rows)))
    devices = formatting.ranks_words(found.world_size, ranks)
    text = f"{devices} do {', '.join(phrases)} {_rate_of_baseline(found, answer)}"
    if (half := found.each_half_width) is not None:
        text += f", {'each ' if half < 1 else ''}{formatting.widest_half_width(half)}"
    ideal = ""
    if found.has_several_models:
        ideal = "their ideal is not known"
        if found.efficiencies:
            ideal = f"{span(*map(formatting.percent, found.efficiencies))} of what they do alone"
    elif found.ideal is not None:
        ideal = f"{found.ideal:.4g}x is ideal"
    lost = main_loss(found.main_loss) if found.main_loss else ""
    return "; ".join(filter(None, (text, ideal, lost)))


def _rate_of_baseline(found: SpeedUps, answer: RunAnswer) -> str:
    of = formatting.words_of_settings(found.baseline, answer.data.ranks)
    return f"the {answer.asked.items}/s of {of}"


def main_loss(loss: MainLoss) -> str:
    """Write which cause takes the largest part of the loss, or why that is not known."""
    if loss.cause is None:
        found = why_not_known(loss.unknown)
        reasons = {losses_unknown_words(why): count for why, count in found.items()}
        told = [f"{reason} ({counted(count, 'point')})" for reason, count in reasons.items()]
        why = ", ".join(reasons if len(reasons) == 1 else told)
        return f"what the rest is lost to {f'is not known: {why}' if why else 'was not measured'}"
    cause = CAUSES[loss.cause]
    if loss.count == loss.losing:
        return f"{cause} is {span(*(f'{share:.0%}' for share in loss.shares))} of the loss"
    certain = "" if loss.losing == loss.points else " that lose for certain"
    points = f"{counted(loss.losing, 'point')}{certain}"
    return f"{cause} is the largest loss in {loss.count} of {points}{_rest_not_known(loss)}"


def _rest_not_known(loss: MainLoss) -> str:
    """Write how many points have unknown causes, and why; "" if none has."""
    reasons: dict[str, int] = {}
    for row in loss.unknown:
        unknown = row.why_no_losses
        why = losses_unknown_words(unknown) if unknown else "it was not measured"
        reasons[why] = reasons.get(why, 0) + 1
    ordered = sorted(reasons, key=lambda why: -reasons[why])
    told = [f"in {reasons[why]} ({why})" for why in ordered]
    return f", not known {' and '.join(told)}" if told else ""


def unknown_losses(rows: Iterable[ScaledRow]) -> list[str]:
    """Return a sentence for each reason of `why_not_known`."""
    return [
        f"What is lost is not known at {counted(count, 'point')}: {losses_unknown_words(why)}."
        for why, count in why_not_known(rows).items()
    ]


def gains(found: Gains, ranks: str) -> str:
    """Write `bf16 is 4.19x to 6.83x as fast as fp32; whether tf32 is faster is not decided`."""
    base = _baseline_words(found, ranks)
    phrases = []
    for one in found.told:
        told, row = _with_interval(one), one.rows[0]
        where = formatting.words_of_settings(one.settings, ranks)
        doubtful = in_brackets(*_doubts(one.rows))
        if one.rounds_to_decide is None:
            phrases.append(f"{where} is {told} as fast as {base}{doubtful}")
            continue
        low, high = row.speed_up_low or math.inf, row.speed_up_high or 0.0
        phrases.append(
            f"whether {where} is faster than {base} is not decided: {told} as fast, between "
            f"{formatting.ratio(low)}x and {formatting.ratio(high)}x{doubtful}, "
            f"{_ask_for_rounds(one.rounds_to_decide)}"
        )
    if (more := len(found.gains) - MOST_GROUPS) > 0:
        phrases.append("1 other gains less" if more == 1 else f"{more} others gain less")
    return "; ".join(phrases)


def _baseline_words(found: Gains, ranks: str) -> str:
    of = {name: value for name, value in found.baseline.items() if name != "world_size"}
    return formatting.words_of_settings(of, ranks) or "the baseline"


def _ask_for_rounds(rounds: int) -> str:
    return f"more rounds would tell: `--set measure.rounds={rounds}`"


def ranking(answer: RunAnswer) -> str:
    """Return the best point of each case; of more than three cases, the setting that wins most.

    If no best is certain, it says so. If no case has two points, the range of values, or up to the
    largest; "" if nothing was measured.
    """
    ranked = answer.ranking
    if isinstance(ranked, NothingMeasured):
        return ""
    words = _RankedWords(answer, ranked)
    if isinstance(ranked, Values):
        return words.values(ranked)
    return words.winner() if ranked.over_cases else "; ".join(map(words.verdict, ranked.cases))


def case_name(answer: RunAnswer, case: Case) -> str:
    """Return the settings that make a case, in words; "" where no setting makes cases."""
    return formatting.words_of_settings(case.settings, answer.data.ranks)


def candidate_name(answer: RunAnswer, one: Candidate) -> str:
    """Return the settings of a point that are compared, in short."""
    return short_name(one.row, answer.compared_settings, answer.data.ranks)


@dataclass(frozen=True, slots=True)
class _RankedWords:
    """The words of one ranking, or of values that do not compete."""

    answer: RunAnswer
    ranked: Ranking | Values

    def values(self, found: Values) -> str:
        """Write the values of points none of which competes with another: up to the largest."""
        metric, most = self.ranked.metric, found.most
        is_of_sizes = len(found.sizes) > 1
        noun = metric_noun(metric, self.answer.asked.items)
        # One of several sizes is named before its value.
        is_named = len(found.figures) > 1 or not is_of_sizes
        told = self._told(most.best) + in_brackets(self._case(most) if is_named else "")
        if len(found.cases) == 1:
            return told + of_datasheet(metric, most.best.row)
        if not found.is_most_best:
            first = f"{self._told(found.least.best)}{in_brackets(self._case(found.least))}"
            return f"{noun} from {first} to {told}"
        among = "all_reduce: " if found.is_all_reduce_of_several else ""
        among += f"with {formatting.size(found.sizes[-1])}, " if is_of_sizes else ""
        is_said = unit_of(metric, self.answer.asked.items) == noun
        upto = f"up to {told}" if is_said else f"{noun} of up to {told}"
        text = f"{among}{upto}{of_datasheet(metric, most.best.row)}"
        if found.smallest_step_ms is not None:
            smallest = formatting.size(found.sizes[0])
            text += f"; {smallest} takes {formatting.duration(found.smallest_step_ms)}"
        return text

    def verdict(self, case: Case) -> str:
        """Write `FSDP 2 has the most tokens/s: 12,300 tokens/s ±1.0%, 1.08x the next (TP 2)`."""
        best, name = case.best, self._case(case)
        where, told = f"{name}: " if name else "", self._told(best)
        if case.verdict is Verdict.ALONE:
            return f"{where}{told}"
        if case.verdict is not Verdict.UNDECIDED:
            wins = f"{self._name(best)} {self._wins(case)}"
            return f"{where}{wins}: {told}, {self._over_next(case)}"
        rivals = case.rivals
        others = ", ".join(f"{self._name(one)} {self._told(one)}" for one in rivals[:2])
        behind = next((one for one in case.ranked[1:] if one not in rivals), None)
        rest = ""
        if behind and best.value:
            bound = "most" if self.ranked.is_most_best else "least"
            share = formatting.ratio(behind.value / best.value)
            rest = f"; all others are at {bound} {share}x that"
        return (
            f"{where}which has {self._superlative()} is not decided: {self._name(best)} {told}, "
            f"{others}{rest}; {_ask_for_rounds(rounds_to_decide(best.row))}"
        )

    def winner(self) -> str:
        """Write which setting is the best most often, and where it gains most."""
        assert isinstance(self.ranked, Ranking)
        assert self.ranked.over_cases
        over = self.ranked.over_cases
        case, noun = over.case, self._superlative()
        if not over.wins:
            told = self.verdict(case)
            return f"which has {noun} is not decided in any of {over.cases} cases; {told}"
        undecided = f"; {counted(over.undecided, 'case')} not decided" if over.undecided else ""
        told = self._told(case.best) + of_datasheet(self.ranked.metric, case.best.row)
        won = self._wins(case, f" in {over.wins} of {over.cases} cases")
        return (
            f"{self._name(case.best)} {won}: {told} with {self._case(case)}, "
            f"{self._over_next(case)}{undecided}"
        )

    def _name(self, one: Candidate) -> str:
        return candidate_name(self.answer, one)

    def _case(self, case: Case) -> str:
        return case_name(self.answer, case)

    def _told(self, one: Candidate) -> str:
        """Write a value with its interval and its doubts, which are about times and rates."""
        half = "" if one.half_width is None else f" {formatting.half_width(one.half_width)}"
        found = () if self.ranked.metric.format == "gib" else short_doubts(one.row)
        value = amount(self.ranked.metric, one.value, self.answer.asked.items)
        return f"{value}{half}{in_brackets(*found)}"

    def _superlative(self) -> str:
        """Write `the most tokens/s`, or `the least memory` where the smallest value is the best."""
        word = "most" if self.ranked.is_most_best else "least"
        return f"the {word} {metric_noun(self.ranked.metric, self.answer.asked.items)}"

    def _wins(self, case: Case, where: str = "") -> str:
        """Write `has the most tokens/s`, or after a single start `was the fastest in this run`."""
        if case.verdict is Verdict.BEST:
            return f"has {self._superlative()}{where}"
        is_fastest = is_speed(self.ranked.metric)
        what = "was the fastest" if is_fastest else f"had {self._superlative()}"
        return f"{what}{where} in this run"

    def _over_next(self, case: Case) -> str:
        """Write `1.08x the next (TP 2)`, of times `1.08x as fast as the next`."""
        best, following = case.ranked[:2]
        name = self._name(following)
        if follows_step_time(self.ranked.metric):
            return f"{formatting.ratio(case.gain)}x as fast as the next ({name})"
        return f"{formatting.ratio(best.value / (following.value or 1.0))}x the next ({name})"


def of_datasheet(metric: Metric, row: ScaledRow) -> str:
    """Write the share of the datasheet's peak, and what a product reached in its first moments."""
    reached = share_of_datasheet(metric, row)
    if reached is None:
        return ""
    if (peak_gb_s := reached.memory_peak_gb_s) is not None:
        return f", {formatting.percent(reached.share)} of the datasheet's {peak_gb_s:,.0f} GB/s"
    burst = reached.burst_tflops
    first = "" if burst is None else f" ({formatting.number(burst)} TFLOP/s in its first 30 ms)"
    share = reached.share
    return first + ("" if share is None else f", {share:.1%} of the datasheet's peak")


def metric_noun(metric: Metric, items: str) -> str:
    """Return what a metric is, in words: `tokens/s`, `step time`. items: as of `Answer`."""
    if metric.name == "throughput":
        return f"{items}/s"
    return _NOUNS.get(metric.name, metric.title)


def unit_of(metric: Metric, items: str) -> str:
    """Return what `amount` writes behind a number that is no time; a title says what it is too."""
    if metric.name == "throughput":
        return f"{items}/s"
    named = (metric.unit if is_column(metric) else "") or metric.title
    return _UNITS.get(metric.format, named)


def amount(metric: Metric, value: float, items: str) -> str:
    """Return a value, stored in ms or bytes, with its unit or title: `1.50 GiB`, `3.000 loss`."""
    if metric.unit == "ms":
        return formatting.duration(value)
    return f"{formatting.metric(metric, value)} {unit_of(metric, items)}".rstrip()


def in_brackets(*words: str) -> str:
    """Write ` (a, b)` of the words that are not empty; empty where there are none."""
    shown = ", ".join(filter(None, words))
    return f" ({shown})" if shown else ""


def speed_up(one: Insight) -> str:
    """Write `2.41x to 2.75x`."""
    return span(*(f"{formatting.ratio(value)}x" for value in (one.low, one.high)))


def _with_interval(one: Insight) -> str:
    """Write `2.41x ±1.2%`, of a range `2.41x to 2.75x ±1.2% or less`."""
    return f"{speed_up(one)} {_interval(one.half_width, len(one.rows))}".rstrip()


def _interval(half_width: float | None, count: int) -> str:
    if half_width is None:
        return ""
    write = formatting.widest_half_width if count > 1 else formatting.half_width
    return write(half_width)


def _doubts(rows: Sequence[ScaledRow]) -> tuple[str, ...]:
    """Return `short_doubts` of a point; of several what all have, as ("all quick",)."""
    if len(rows) == 1:
        return short_doubts(rows[0])
    of_all = [short_doubts(row) for row in rows]
    return tuple(f"all {one}" for one in of_all[0] if all(one in some for some in of_all))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """A number that a run found, in words: with its unit, its noun, its settings, its interval."""

    value: str
    what: str = ""
    where: str = ""
    sure: str = ""


def key_figures(answer: RunAnswer) -> list[KeyFigure]:
    """Return the numbers that answer a run's question; [] if nothing was measured.

    Largest batches, the largest first; else speed-ups (of scaling on the most devices); else, the
    best first, the points of the only case, or the best of each case in which points compete; else
    of each case with the largest message or array, of all_reduce if it ran.
    """
    ranks = answer.data.ranks
    match answer.found:
        case LargestBatches() as found:
            return [
                KeyFigure(
                    value=f"{one.batch_size:,}",
                    what=what_fits(one),
                    where=batch_settings(one, found, ranks),
                )
                for one in found.batches
            ]
        case SpeedUps() as found:
            devices = formatting.ranks_words(found.world_size, ranks)
            what = f"{_rate_of_baseline(found, answer)} on {devices}"
            return [_of_speed_up(one, what, ranks) for one in found.series]
        case Gains() as found:
            what = f"as fast as {_baseline_words(found, ranks)}"
            return [_of_speed_up(one, what, ranks) for one in found.gains]
        case Ranking() | Values() as found:
            return [_of_candidate(answer, found.metric, *place) for place in found.figures]
    return []


def _of_speed_up(one: Insight, what: str, ranks: str) -> KeyFigure:
    where = formatting.words_of_settings(one.settings, ranks)
    sure = _interval(one.half_width, len(one.rows))
    return KeyFigure(value=speed_up(one), what=what, where=where, sure=sure)


def _of_candidate(answer: RunAnswer, metric: Metric, case: Case, one: Candidate) -> KeyFigure:
    items = answer.asked.items
    noun = metric_noun(metric, items)
    is_said = metric.unit != "ms" and unit_of(metric, items) == noun
    places = (candidate_name(answer, one), case_name(answer, case))
    return KeyFigure(
        value=amount(metric, one.value, items),
        what="" if is_said else noun,
        where=", ".join(filter(None, places)),
        sure=_interval(one.half_width, 1),
    )


def more_rounds(more: MoreRounds) -> str:
    """Return one sentence with a command, whose JOB and RUN are placeholders; no full stop."""
    time = formatting.long_time(more.seconds)
    told = f"{more.rounds} rounds, which give an interval, would take about {time} more"
    return f"{told}: sweep JOB --resume RUN --set measure.rounds={more.rounds}"


def next_command(found: NextCommand) -> list[str]:
    """Return `Next: ` and the command in lines, which a shell joins.

    A command that is too long has a line for each option.
    """
    label = "Next, after mending what failed: " if found.kind is Next.RETRY else "Next: "
    whole = label + formatting.command(*found.words)
    if len(whole) <= 80:
        return [whole]
    groups: list[list[str]] = [[]]
    for word in found.words:
        if _OPTION.match(word):
            groups.append([])
        groups[-1].append(word)
    first, *others = groups
    lines = [
        label + formatting.command(*first),
        *(f"    {formatting.quoted(*one)}" for one in others),
    ]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]
