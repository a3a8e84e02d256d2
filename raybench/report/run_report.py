"""The report of a run: what it found in a sentence and in figures, and what each format shows."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from raybench.analysis.references import has_impossible
from raybench.analysis.rows import ScaledRow, setting, setting_order, varying
from raybench.analysis.scaling import CAUSES, LOSSES, has_causes
from raybench.records import Metric
from raybench.report import formatting
from raybench.report.documents import (
    Block,
    Document,
    Legend,
    Line,
    Listing,
    Table,
)
from raybench.report.formatting import command, counted, span
from raybench.report.messages import LONG, SHORT, list_messages
from raybench.report.point_settings import settings_words
from raybench.report.sections import (
    MOST_ROWS,
    SECTIONS,
    Section,
    answer_table,
    lead_of_fleets,
    reference_lines,
)
from raybench.report.summary import (
    RATIOS,
    Candidate,
    Case,
    Summary,
    amount,
    answer_metric,
    follows_step_time,
    is_speed,
    metric_noun,
    size_of,
    why_not_known,
    with_most_ranks,
)
from raybench.report.words.doubts import short_doubts
from raybench.report.words.reasons import losses_unknown_words, not_compared_words
from raybench.results.metrics import memory_peak_gb_s
from raybench.results.tables import is_slowed_by_one_rank
from raybench.sweep.scheduler import WORTHWHILE

_MOST_WARNINGS = 3
_MOST_GROUPS = 4
# A loss below this share of the step in every point is not worth a line.
_MIN_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class RunReport(Document):
    """A document (`raybench.report.documents`) of a run. is_short: `blocks` is the short form."""

    summary: Summary
    is_short: bool = False

    @property
    def title(self) -> str:
        """Return the run's id, after the job's name if the id does not begin with it."""
        return formatting.title(self.summary.run)

    @cached_property
    def lead(self) -> str:
        """Return what the run found, and what is open; no full stop; "" if nothing was measured."""
        summary = self.summary
        text = lead_of_fleets(summary.fleets, summary.ranks) or "; ".join(
            filter(None, (self._why_not_compared(), lead(summary)))
        )
        # What is not decided asks for rounds itself.
        if text and not summary.largest_batches and "measure.rounds" not in text:
            ok = [row for row in summary.rows if row.status == "ok"]
            ones = sum(row.rounds == 1 for row in ok)
            if ones == len(ok) or (ones and "±" not in text):
                of = "" if ones == len(ok) else f"{counted(ones, 'point')} of "
                text += f"; {of}one start"
                if summary.more_rounds:
                    text += f"; `--set measure.rounds={WORTHWHILE}` gives an interval"
        count = sum(map(has_impossible, summary.rows))
        if text and count:
            text += f"; {counted(count, 'point')} with numbers that cannot be: see the warnings"
        return text

    def _why_not_compared(self) -> str:
        """Return how many points should have been compared and are not, and why."""
        summary = self.summary
        if summary.answer.metric not in RATIOS or summary.largest_batches:
            return ""
        others = [row for row in summary.rows if row.status == "ok" and not row.is_baseline]
        reasons = Counter(row.why for row in others if row.why is not None)
        if not reasons or not summary.run.baseline:
            return ""
        if (count := reasons.total()) == len(others):
            why = not_compared_words(reasons.most_common(1)[0][0])
            return f"no point has a speed-up: {why}"
        text = f"{count} of {len(others)} points {'is' if count == 1 else 'are'} not compared"
        return f"{text}: {not_compared_words(next(iter(reasons)))}" if len(reasons) == 1 else text

    @cached_property
    def _sections(self) -> list[tuple[Section, list[Listing | Table]]]:
        """Return the sections that apply, each with its listings and tables."""
        found = ((section, list(section.blocks(self.summary))) for section in SECTIONS)
        return [(section, blocks) for section, blocks in found if blocks]

    @property
    def listings(self) -> list[Listing]:
        """Return the lists of findings that apply; the one on slow devices, if any, is first."""
        found = [one for _, blocks in self._sections for one in blocks if isinstance(one, Listing)]
        first = found[: bool(self.summary.fleets)]
        return [*first, *_listings(self.summary), *found[len(first) :]]

    @property
    def tables(self) -> list[tuple[Section, list[Table]]]:
        """Return the sections that have tables, each with its tables."""
        return [
            (section, found)
            for section, blocks in self._sections
            if (found := [block for block in blocks if isinstance(block, Table)])
        ]

    @property
    def messages(self) -> list[Listing]:
        """Return lists of failed and skipped points, missing speed-ups, warnings; no empty ones."""
        found = {
            "Failed and skipped points": self.summary.failures,
            "Without speed-up": self.summary.without_speed_up,
            "Warnings": self.summary.warnings,
        }
        return [list_messages(title, groups) for title, groups in found.items() if groups]

    def blocks(self) -> Iterator[Block]:
        """Yield lead, facts, findings, tables, messages; `is_short`: fewer, and a next command."""
        summary = self.summary
        if self.is_short:
            yield from self._short()
            return
        if self.lead:
            yield Line(text=formatting.sentence(self.lead), tone="strong")
        lost = formatting.some(summary.lost_nodes)
        shared = "; ".join(filter(None, (summary.alike, formatting.settings(summary.shared))))
        head = (
            summary.machine,
            f"{summary.course}; {summary.counts}",
            f"nodes lost: {lost}" if lost else "",
            formatting.versions(summary.versions),
            f"in all points: {shared}" if shared else "",
        )
        for place, text in enumerate(filter(None, head)):
            yield Line(text=text, is_apart=bool(self.lead) and place == 0)
        yield from self.listings
        tables = [table for _, tables in self.tables for table in tables]
        yield from tables
        if not tables:
            yield Line(text="No point has been finished yet.", is_apart=True)
        yield Legend()
        yield from self.messages
        if summary.more_rounds:
            yield Line(text=summary.more_rounds.sentence, tone="aside", is_apart=True)

    def _short(self) -> Iterator[Block]:
        """Yield the lead, one table, at most three warnings, and what to type next."""
        summary = self.summary
        if self.lead:
            yield Line(text=formatting.sentence(self.lead), tone="strong")
        yield Line(text=summary.machine, is_apart=True)
        yield Line(text=f"{summary.course}; {summary.counts}")
        for _, text in islice(reference_lines(summary), 1):
            yield Line(text=formatting.sentence(text))
        if summary.rows:
            table = answer_table(summary, MOST_ROWS)
            yield table
            if left_out := len(summary.rows) - len(table.rows):
                yield Line(text=f"and {counted(left_out, 'more point')}: --full", tone="aside")
        else:
            yield Line(text="No point has been finished yet.", is_apart=True)
        found = [*summary.failures, *summary.without_speed_up, *summary.warnings]
        for place, group in enumerate(found[:_MOST_WARNINGS]):
            most = LONG if place < len(summary.failures) else SHORT
            yield Line(text=f"{group.count} x {group.shortened(most)}", is_apart=place == 0)
        if (more := len(found) - _MOST_WARNINGS) > 0:
            yield Line(text=f"and {more} more: --full")
        text = self._next()
        if len(text) > 80:  # a line for each option, which a shell joins
            text = re.sub(r" (?=--?[a-z])", r" \\\n    ", text)
        first, *others = text.split("\n")
        yield Line(text=first, tone="aside", is_apart=True, is_whole=True)
        for text in others:
            yield Line(text=text, tone="aside", is_whole=True)
        text = f"`{command('explain', 'TERM')}` says what a heading or mark means."
        yield Line(text=text, tone="aside")

    def _next(self) -> str:
        """Return `Next: ` and the command that brings most.

        Failed points come first, then what was not run, then an interval, then the full report.
        """
        run, more = self.summary.run, self.summary.more_rounds
        is_failed = self.summary.may_retry_failed
        is_open = is_failed or self.summary.is_cut_short
        words = list(run.argv[1:])
        end = words.index("--") if "--" in words else len(words)
        words, of_script = words[:end], words[end:]
        is_usual = self.summary.folder == Path("results")
        if not (more or is_open) or words[:1] != ["sweep"]:
            place = [] if is_usual else ["--results", str(self.summary.folder)]
            return f"Next: {command('report', run.run_id, '--full', *place)}"
        # Results are where the run is, which takes its `--set` from its tables.
        own, pairs = {"-o", "--output", "--resume", "--set"}, zip(["", *words], words, strict=False)
        kept = [one for last, one in pairs if not {last, one[:2], one.partition("=")[0]} & own]
        place = [] if is_usual else ["-o", str(self.summary.folder)]
        how = ["--retry-failed"] if is_failed else []
        if more and not is_open:
            how = ["--set", f"measure.rounds={more.rounds}"]
        when = ", after mending what failed" if is_failed else ""
        text = command(*kept, "--resume", run.run_id, *place, *how, *of_script)
        return f"Next{when}: {text}"

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        run, machine, lead, answer (what was asked, and the points of each case, the best first:
        value is that of `Summary.ranked_by`), lost_nodes, points (`ScaledRow`), largest_batches,
        failures, doubts, plus_minus (over which rounds intervals are), more_rounds (`MoreRounds`
        or None), references (`Standing.members`), regions (of the step, by point_id).
        """
        summary = self.summary
        of_region = ("region", "calls", "region_ms", "share_pct")
        return {
            "run": summary.run,
            "machine": summary.machine,
            "lead": self.lead,
            "answer": {
                **asdict(summary.answer),
                "cases": [
                    {
                        "name": case.name,
                        "ranked": [
                            {**{n: getattr(one, n) for n in names}, "point_id": one.row.point_id}
                            for one in case.ranked
                        ],
                    }
                    for case in summary.cases
                    for names in [("name", "value", "low", "high")]
                ],
            },
            "lost_nodes": summary.lost_nodes,
            "points": summary.rows,
            "largest_batches": summary.largest_batches,
            "failures": summary.failures,
            "doubts": [
                {
                    **asdict(group.worst),
                    "mark": group.worst.kind.mark,
                    "harm": group.worst.kind.harm.name.lower(),
                    "points": group.count,
                    "point_id": group.row.point_id if group.row else None,
                    "text": message.text,
                }
                for group, message in zip(summary.doubts, summary.warnings, strict=True)
            ],
            "plus_minus": summary.plus_minus,
            "more_rounds": summary.more_rounds,
            "references": [one.members for one in summary.standings],
            "regions": {
                point_id: [{name: getattr(one, name) for name in of_region} for one in found]
                for point_id, found in summary.regions.items()
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """A number that a run found, or the range of it over several points.

    value: with its unit, if any. what: its noun; "" where the unit says it. where: the
    settings that it holds for. half_width: of its 95 % interval, over the value; of a range the
    widest, None if any is not known. rows: the points; () for a largest batch.
    """

    value: str
    what: str = ""
    where: str = ""
    half_width: float | None = None
    rows: tuple[ScaledRow, ...] = ()

    @property
    def sure(self) -> str:
        """Return `±1.2%`, for a range `±1.2% or less`; empty where it is not known."""
        if self.half_width is None:
            return ""
        write = formatting.widest_half_width if len(self.rows) > 1 else formatting.half_width
        return write(self.half_width)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return `short_doubts` of its point; of several what all have, as ("all quick",)."""
        if len(self.rows) == 1:
            return short_doubts(self.rows[0])
        shared = short_doubts(self.rows[0]) if self.rows else ()
        return tuple(f"all {o}" for o in shared if all(o in short_doubts(r) for r in self.rows))


def insights(summary: Summary) -> list[Insight]:
    """Return the numbers that answer a run's question; [] if nothing was measured.

    Largest batches, the largest first; else speed-ups, as a range for each combination of values of
    the baseline's settings, the largest first (of scaling: on the most devices, for each value of
    one setting, in the order of points; of more than four one range); else, the best first, the
    points of the only case, or the best of each case in which points compete; else of each case
    with the largest message or array, of all_reduce if it ran.
    """
    if summary.largest_batches:
        return _largest_batches(summary)
    if not summary.compared:
        return _ranked(summary)
    return _speed_ups(summary) if _is_scaling(summary) else _gains(summary)


def lead(summary: Summary) -> str:
    """Return what a run found without its `fleets`, no full stop; "" if nothing was measured."""
    if not summary.largest_batches and not summary.compared:
        return ranking(summary)
    found = insights(summary)
    if summary.largest_batches:
        first, *others = found
        text = f"the largest batch per device that fits is {first.value}{_in_brackets(first.where)}"
        return text + "".join(f", {one.value} ({one.where})" for one in others[:2])
    return _scaling_lead(summary, found) if _is_scaling(summary) else _gains_lead(found)


def _is_scaling(summary: Summary) -> bool:
    """Return whether points are compared with a baseline on fewer devices."""
    base = summary.run.baseline.get("world_size")
    rows = with_most_ranks(summary.rows)
    return base is not None and bool(rows) and rows[0].world_size > int(base)


def _in_brackets(*words: str) -> str:
    """Write ` (a, b)` of the words that are not empty; empty where there are none."""
    found = ", ".join(filter(None, words))
    return f" ({found})" if found else ""


def _words(settings: Mapping[str, Any], ranks: str) -> str:
    """Write settings for a sentence: `bf16, batch 64, 4 GPUs`."""
    return ", ".join(formatting.setting_words(name, v, ranks) for name, v in settings.items())


def speed_up_half_width(row: ScaledRow) -> float | None:
    """Return half of the 95 % interval of a speed-up over the speed-up; None if not known."""
    return formatting.relative_half_width(row.speed_up_low, row.speed_up, row.speed_up_high)


def _speed_up(rows: Sequence[ScaledRow], what: str, where: str) -> Insight:
    """Return the speed-up of one point, or the range over several.

    The best of many is best by chance too, so its own interval would promise too much.
    """
    values = sorted(row.speed_up or 0.0 for row in rows)
    halves = [speed_up_half_width(row) for row in rows]
    return Insight(
        value=span(*(f"{formatting.ratio(value)}x" for value in (values[0], values[-1]))),
        what=what,
        where=where,
        half_width=None if None in halves else max(half or 0.0 for half in halves),
        rows=tuple(rows),
    )


def _speed_ups(summary: Summary) -> list[Insight]:
    """Return the speed-ups on the most devices, by the first setting in which points differ."""
    rows, baseline = with_most_ranks(summary.rows), summary.run.baseline
    devices = formatting.ranks_words(rows[0].world_size, summary.ranks)
    what = f"the {summary.answer.items}/s of {_words(baseline, summary.ranks)} on {devices}"
    sizes = ("batch", "world_size", "scaling", "workload")
    for name in [name for name in varying(rows) if name not in sizes][:1]:
        groups: dict[str, list[ScaledRow]] = {}
        for row in rows:
            groups.setdefault(settings_words(row, [name], summary.ranks), []).append(row)
        if len(groups) <= _MOST_GROUPS:
            return [_speed_up(members, what, where) for where, members in groups.items()]
    return [_speed_up(rows, what, "")]


def _scaling_lead(summary: Summary, found: Sequence[Insight]) -> str:
    """Write `4 GPUs do 2.41x to 2.75x (bf16) the samples/s of 1 GPU, each ±2.1% or less; ...`."""
    rows, baseline = with_most_ranks(summary.rows), summary.run.baseline
    devices = formatting.ranks_words(rows[0].world_size, summary.ranks)
    phrases = [
        (f"{one.value} {one.sure}".rstrip() if len(one.rows) == 1 else one.value)
        + _in_brackets(one.where, *one.doubts)
        for one in found
    ]
    what = found[0].what.removesuffix(f" on {devices}")
    text = f"{devices} do {', '.join(phrases)} {what}"
    halves = [one.half_width for one in found if one.half_width is not None]
    if len(halves) == len(found) < len(rows):
        each = "each " if max(halves) < 1 else ""
        text += f", {each}{formatting.widest_half_width(max(halves))}"
    ideal = ""
    if any(len(set(row.models_by_rank or ())) > 1 for row in rows):
        shares = sorted(row.efficiency for row in rows if row.efficiency is not None)
        ends = [formatting.percent(share) for share in shares[:: len(shares) - 1 or 1]]
        ideal = f"{span(*ends)} of what they do alone" if ends else "their ideal is not known"
    elif all(row.efficiency is not None for row in rows):
        ideal = f"{rows[0].world_size / int(baseline['world_size']):.4g}x is ideal"
    return "; ".join(filter(None, (text, ideal, _main_loss(rows) if ideal else "")))


def _gains(summary: Summary) -> list[Insight]:
    """Return the speed-ups over the baseline by the settings that it names, the largest first."""
    baseline = summary.run.baseline
    of = _words({k: v for k, v in baseline.items() if k != "world_size"}, summary.ranks)
    groups: dict[tuple[Any, ...], list[ScaledRow]] = {}
    for row in summary.compared:
        groups.setdefault(tuple(setting(row, name) for name in baseline), []).append(row)
    found = []
    for values in sorted(groups, key=lambda values: [setting_order(one) for one in values]):
        settings = dict(zip(baseline, values, strict=True))
        changed = {k: v for k, v in settings.items() if str(v) != str(baseline.get(k))}
        where = _words(changed or settings, summary.ranks)
        found.append(_speed_up(groups[values], f"as fast as {of or 'the baseline'}", where))
    return sorted(found, key=lambda one: -max(row.speed_up or 0.0 for row in one.rows))


def _gains_lead(found: Sequence[Insight]) -> str:
    """Write `bf16 is 4.19x to 6.83x as fast as fp32; whether tf32 is faster is not decided`."""
    phrases = []
    for one in found[:_MOST_GROUPS]:
        told, row = f"{one.value} {one.sure}".rstrip(), one.rows[0]
        low, high = row.speed_up_low or math.inf, row.speed_up_high or 0.0
        if len(one.rows) == 1 and low < 1 < high:
            phrases.append(
                f"whether {one.where} is faster than {one.what.removeprefix('as fast as ')} is not "
                f"decided: {told} as fast, between {formatting.ratio(low)}x and "
                f"{formatting.ratio(high)}x{_in_brackets(*one.doubts)}, {_more_rounds(row)}"
            )
        else:
            phrases.append(f"{one.where} is {told} {one.what}{_in_brackets(*one.doubts)}")
    if (more := len(found) - _MOST_GROUPS) > 0:
        phrases.append("1 other gains less" if more == 1 else f"{more} others gain less")
    return "; ".join(phrases)


def _more_rounds(row: ScaledRow) -> str:
    """Write how many rounds to ask for; as many as the report's next command where these help."""
    rounds = WORTHWHILE if row.rounds < WORTHWHILE else 2 * row.rounds
    return f"more rounds would tell: `--set measure.rounds={rounds}`"


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
    if not losing:
        return ""
    explained = [row for row in losing if has_causes(row)]
    if not explained:
        reasons = why_not_known(losing)
        told = [f"{reason} ({counted(count, 'point')})" for reason, count in reasons.items()]
        why = ", ".join(reasons if len(reasons) == 1 else told)
        return f"what the rest is lost to {f'is not known: {why}' if why else 'was not measured'}"
    causes: Counter[str] = Counter()
    for row in explained:
        # One rank is a cause only where it stands out.
        named = [name for name in LOSSES if name != "lost_wait" or is_slowed_by_one_rank(row)]
        causes[max(named, key=lambda name: getattr(row, name) or 0.0)] += 1
    cause, count = causes.most_common(1)[0]
    if count < len(losing):
        certain = "" if len(losing) == len(rows) else " that lose for certain"
        points = f"{counted(len(losing), 'point')}{certain}"
        return (
            f"{CAUSES[cause]} is the largest loss in {count} of {points}{_rest_not_known(losing)}"
        )
    shares = sorted(min(1.0, getattr(row, cause) / (1 - (row.efficiency or 0.0))) for row in losing)
    return f"{CAUSES[cause]} is {span(f'{shares[0]:.0%}', f'{shares[-1]:.0%}')} of the loss"


def _rest_not_known(losing: Sequence[ScaledRow]) -> str:
    """Write how many points have unknown causes, and why; "" if none has."""
    unknown = [row for row in losing if not has_causes(row)]
    reasons = Counter(
        losses_unknown_words(row.why_no_losses) if row.why_no_losses else "it was not measured"
        for row in unknown
    )
    told = [f"in {count} ({reason})" for reason, count in reasons.most_common()]
    return f", not known {' and '.join(told)}" if told else ""


def _largest_batches(summary: Summary) -> list[Insight]:
    """Return the largest batch of each series, the largest first."""
    batches = sorted(summary.largest_batches, key=lambda one: -one.batch_size)
    names = [n for n in batches[0].settings if len({str(one.settings[n]) for one in batches}) > 1]
    found = []
    for one in batches:
        peak = one.peak_mem_allocated_bytes
        used = "" if peak is None else f" in {formatting.gib(peak)} GiB"
        what = f"fit per device{used}; {one.ran_out:,} run out of memory"
        where = _words({n: one.settings[n] for n in names or one.settings}, summary.ranks)
        found.append(Insight(value=f"{one.batch_size:,}", what=what, where=where))
    return found


def _ranked(summary: Summary) -> list[Insight]:
    """Return the points of the one case, or the best of each case, the best value first."""
    metric, cases = answer_metric(summary), summary.cases
    if metric is None:
        return []
    if len(cases) > 1:
        cases = summary.contested or _largest_messages(cases)[1]
        places = [(case, case.best) for case in cases]
    else:
        places = [(case, one) for case in cases for one in case.ranked]
    places.sort(key=lambda place: place[1].value, reverse=summary.ranked_by.best == "max")
    noun, found = metric_noun(summary, metric), []
    for case, one in places:
        value = amount(summary, metric, one.value)
        found.append(
            Insight(
                value=value,
                what="" if value.endswith(noun) else noun,
                where=", ".join(filter(None, (one.name, case.name))),
                half_width=one.half_width,
                rows=(one.row,),
            )
        )
    return found


def ranking(summary: Summary) -> str:
    """Return, by `Summary.ranked_by`, the best point of each case in words.

    Of more than three cases, the setting that wins most. If no best is certain, it says so. If no
    case has two points, the range of values, or up to the largest; "" if nothing was measured.
    """
    metric, cases = answer_metric(summary), summary.cases
    if metric is None or not cases:
        return ""
    if not summary.contested:
        return _range(summary, metric, cases)
    if len(cases) > 3:
        return _winner(summary, metric, summary.contested)
    return "; ".join(_verdict(summary, metric, case) for case in cases)


def _told(summary: Summary, metric: Metric, one: Candidate) -> str:
    """Write a value with its interval and its doubts, which are about times and rates."""
    half = "" if one.half_width is None else f" {formatting.half_width(one.half_width)}"
    found = () if metric.format == "gib" else short_doubts(one.row)
    return f"{amount(summary, metric, one.value)}{half}{_in_brackets(*found)}"


def _superlative(summary: Summary, metric: Metric) -> str:
    """Write `the most tokens/s`, or `the least memory` where the smallest value is the best."""
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
        behind = next((one for one in case.ranked[1:] if one not in rivals), None)
        rest = ""
        if behind and best.value:
            bound = "most" if summary.ranked_by.best == "max" else "least"
            share = formatting.ratio(behind.value / best.value)
            rest = f"; all others are at {bound} {share}x that"
        return (
            f"{where}which has {_superlative(summary, metric)} is not decided: {best.name} {told}, "
            f"{others}{rest}; {_more_rounds(best.row)}"
        )
    wins = f"{best.name} {_wins(summary, metric, case)}"
    return f"{where}{wins}: {told}, {_over_next(summary, metric, case)}"


def _wins(summary: Summary, metric: Metric, case: Case, where: str = "") -> str:
    """Write `has the most tokens/s`, or after a single start `was the fastest in this run`."""
    if case.best.is_sure:
        return f"has {_superlative(summary, metric)}{where}"
    what = "was the fastest" if is_speed(metric) else f"had {_superlative(summary, metric)}"
    return f"{what}{where} in this run"


def _gain(summary: Summary, case: Case) -> float:
    """Return how many times as good the best is as the next; two points or more."""
    best, following = case.ranked[0].value, case.ranked[1].value
    over, under = (best, following) if summary.ranked_by.best == "max" else (following, best)
    return over / under if under else 1.0


def _over_next(summary: Summary, metric: Metric, case: Case) -> str:
    """Write `1.08x the next (TP 2)`, of times `1.08x as fast as the next`; two points or more."""
    best, following = case.ranked[:2]
    if follows_step_time(metric):
        return f"{formatting.ratio(_gain(summary, case))}x as fast as the next ({following.name})"
    return f"{formatting.ratio(best.value / (following.value or 1.0))}x the next ({following.name})"


def _winner(summary: Summary, metric: Metric, contested: Sequence[Case]) -> str:
    """Write which setting is the best most often, and where it gains most."""
    # Without a case of several rounds, say which points were the fastest in this run.
    sure = [case for case in contested if case.best.is_sure] or contested
    decided = [case for case in sure if not case.rivals]
    noun, count = _superlative(summary, metric), len(contested)
    if not decided:
        case = max(contested, key=lambda one: _gain(summary, one))
        told = _verdict(summary, metric, case)
        return f"which has {noun} is not decided in any of {count} cases; {told}"
    is_most = summary.ranked_by.best == "max"
    wins = Counter(case.best.name for case in decided)
    # Of settings that are the best equally often, the one with the best value.
    most = max(
        decided,
        key=lambda one: (wins[one.best.name], one.best.value if is_most else _gain(summary, one)),
    )
    undecided = counted(count - len(decided), "case")
    open_cases = f"; {undecided} not decided" if len(decided) < count else ""
    told = _told(summary, metric, most.best) + _of_datasheet(metric, most.best.row)
    won = _wins(summary, metric, most, f" in {wins[most.best.name]} of {count} cases")
    return (
        f"{most.best.name} {won}: {told} with {most.name}, "
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
    least, *_, most = sorted([*shown, shown[0]], key=lambda case: case.best.value)
    # One of several sizes is named before its value.
    place = "" if len(shown) == 1 and len(sizes) > 1 else most.name
    told = f"{_told(summary, metric, most.best)}{_in_brackets(place)}"
    if len(cases) == 1:
        return told + _of_datasheet(metric, most.best.row)
    if summary.ranked_by.best == "min":
        first = f"{_told(summary, metric, least.best)}{_in_brackets(least.name)}"
        return f"{noun} from {first} to {told}"
    among = "all_reduce: " if len(sums) < len(cases) else ""
    among += f"with {formatting.size(max(sizes))}, " if len(sizes) > 1 else ""
    upto = f"up to {told}" if noun in told else f"{noun} of up to {told}"
    text = f"{among}{upto}{_of_datasheet(metric, most.best.row)}"
    if metric.name == "busbw_gb_s" and len(sizes) > 1:
        rows = [one.best.row for one in sums if size_of(one.best.row) == min(sizes)]
        alike = [row for row in rows if row.world_size == most.best.row.world_size]
        if step_ms := min((row.step_ms_p50 or 0.0 for row in alike), default=0.0):
            text += f"; {formatting.size(min(sizes))} takes {formatting.duration(step_ms)}"
    return text


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
    is_faster = burst is not None and burst >= 1.01 * (row.achieved_tflops_per_device or 0)
    first = f" ({formatting.number(burst)} TFLOP/s in its first 30 ms)" if is_faster else ""
    return first + peak


def _listings(summary: Summary) -> Iterator[Listing]:
    """Yield what the lead has no room for: the largest batches, and what steps lose to what."""
    if summary.largest_batches:
        lines = [(one.where, f"{one.value} {one.what}") for one in insights(summary)]
        yield Listing(title="Largest batches", lines=lines)
    rows = with_most_ranks(summary.rows)
    if not _is_scaling(summary):
        return
    causes = []
    # Without a breakdown all of a loss is unexplained, which says nothing.
    for name in LOSSES if any(map(has_causes, rows)) else ():
        lost = sorted(value for row in rows if (value := getattr(row, name)) is not None)
        if lost and max(abs(lost[0]), abs(lost[-1])) >= _MIN_SHARE:
            causes.append(f"{span(*map(formatting.percent, (lost[0], lost[-1])))} {CAUSES[name]}")
    devices = formatting.ranks_words(rows[0].world_size, summary.ranks)
    lines = [(devices, ", ".join(causes))] if causes else []
    unknown = [row for row in rows if not has_causes(row)]
    for reason, count in why_not_known(unknown).items():
        which = f"{count} of {counted(len(rows), 'point')}"
        lines.append((which, f"not known: {reason}"))
    if lines:
        over = formatting.settings(summary.run.baseline)
        title = f"Share of the step that is lost, against {over}"
        yield Listing(title=title, lines=lines)
