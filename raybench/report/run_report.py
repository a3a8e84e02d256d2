"""The report of a run: what each format shows of its summary, in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from raybench.analysis.references import impossible_among
from raybench.report import formatting
from raybench.report.blocks import (
    HOW_TO_ADD_ROUNDS,
    Block,
    Legend,
    Line,
    Listing,
    Table,
)
from raybench.report.documents import Document
from raybench.report.formatting import counted
from raybench.report.lead import Insight, insights, listings
from raybench.report.lead import lead as lead_of
from raybench.report.messages import list_messages
from raybench.report.sections import (
    MOST_ROWS,
    SECTIONS,
    Section,
    answer_table,
    reference_lines,
)
from raybench.report.summary import RATIOS, Summary
from raybench.sweep import command
from raybench.sweep.scheduler import WORTHWHILE

_MOST_WARNINGS = 3
_MOST_FIGURES = 4
_COMMAND_CHARS = 74
# Options of `sweep` that say where results go; a command that goes on with a run has its own.
_ABOUT_RESULTS = ("-o", "--output", "--resume")
_WARNING_CHARS = 150
_ONE_START = f"one start; `--set measure.rounds={WORTHWHILE}` gives an interval"


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class RunReport(Document):
    """A document (see `raybench.report.documents`) of one run."""

    summary: Summary
    is_short: bool = False

    @property
    def title(self) -> str:
        """Return the run's id, after the job's name where that is another."""
        return formatting.title(self.summary.run)

    @cached_property
    def lead(self) -> str:
        """Return what the run found in a sentence without full stop; empty where nothing ran."""
        summary = self.summary
        leads = (section.lead(summary) for section in SECTIONS if section.lead)
        text = next(filter(None, leads), "") or "; ".join(
            filter(None, (self._why_not_compared(), lead_of(summary)))
        )
        # What is not decided asks for rounds itself.
        if text and not summary.largest_batches and "measure.rounds" not in text:
            ones = sum(row.status == "ok" and row.rounds == 1 for row in summary.rows)
            if summary.has_one_start:
                text += f"; {_ONE_START}"
            elif ones and "±" not in text:
                text += f"; {counted(ones, 'point')} of {_ONE_START}"
        count = sum(bool(impossible_among(row.warnings)) for row in summary.rows)
        if text and count:
            text += f"; {counted(count, 'point')} with numbers that cannot be: see the warnings"
        return text

    def _why_not_compared(self) -> str:
        """Return how many points should have been compared and are not, and why."""
        rows = self.summary.rows
        others = [row for row in rows if row.status == "ok" and not row.is_baseline]
        reasons = Counter(row.why for row in others if row.why is not None)
        is_asked = self.summary.answer.metric in RATIOS and not self.summary.largest_batches
        if not reasons or not self.summary.run.baseline or not is_asked:
            return ""
        count = sum(reasons.values())
        if count == len(others):
            return f"no point has a speed-up: {reasons.most_common(1)[0][0]}"
        are = "is" if count == 1 else "are"
        text = f"{count} of {len(others)} points {are} not compared"
        return f"{text}: {next(iter(reasons))}" if len(reasons) == 1 else text

    @cached_property
    def sections(self) -> list[tuple[Section, list[Listing | Table]]]:
        """Return the sections that apply, each with its listings and tables."""
        found = ((section, list(section.blocks(self.summary))) for section in SECTIONS)
        return [(section, blocks) for section, blocks in found if blocks]

    @property
    def listings(self) -> list[Listing]:
        """Return the findings, those of sections that answer the question first."""
        own = list(listings(self.summary))
        first, after = (
            [
                block
                for section, blocks in self.sections
                for block in blocks
                if isinstance(block, Listing) and bool(section.lead) == is_first
            ]
            for is_first in (True, False)
        )
        return [*first, *own, *after]

    @property
    def tables(self) -> list[tuple[Section, list[Table]]]:
        """Return the sections that have tables, with these."""
        tables = (
            (section, [block for block in blocks if isinstance(block, Table)])
            for section, blocks in self.sections
        )
        return [(section, found) for section, found in tables if found]

    @property
    def messages(self) -> list[Listing]:
        """Return what went wrong, is missing or is doubtful."""
        found = {
            "Failed and skipped points": self.summary.failures,
            "Without speed-up": self.summary.without_speed_up,
            "Warnings": self.summary.warnings,
        }
        return [list_messages(title, groups) for title, groups in found.items() if groups]

    @property
    def key_figures(self) -> list[Insight]:
        """Return at most four insights, which a page shows as large figures."""
        return insights(self.summary)[:_MOST_FIGURES]

    def blocks(self) -> Iterator[Block]:
        """Yield what follows the title in a text."""
        summary = self.summary
        if self.is_short:
            yield from self._short()
            return
        if self.lead:
            yield Line(text=formatting.sentence(self.lead), tone="strong")
        lost, shared = (
            formatting.some(summary.lost_nodes),
            "; ".join(filter(None, (summary.alike, formatting.settings(summary.shared)))),
        )
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
            text = f"{summary.more_rounds.sentence}: {HOW_TO_ADD_ROUNDS}"
            yield Line(text=text, tone="aside", is_apart=True)

    def _short(self) -> Iterator[Block]:
        """Yield the lead, one table, at most three warnings, and what to type next."""
        summary = self.summary
        if self.lead:
            yield Line(text=formatting.sentence(self.lead), tone="strong")
        yield Line(text=summary.machine, is_apart=True)
        yield Line(text=f"{summary.course}; {summary.counts}")
        for _, text in islice(reference_lines(summary), 1):
            yield Line(text=formatting.sentence(text.removesuffix(".")))
        if summary.rows:
            table = answer_table(summary, MOST_ROWS)
            yield table
            if left_out := len(summary.rows) - len(table.rows):
                yield Line(text=f"and {counted(left_out, 'more point')}: --full", tone="aside")
        else:
            yield Line(text="No point has been finished yet.", is_apart=True)
        found = [*summary.failures, *summary.without_speed_up, *summary.warnings]
        for place, group in enumerate(found[:_MOST_WARNINGS]):
            text = f"{group.count} x {group.shortened(_WARNING_CHARS)}"
            yield Line(text=text, is_apart=place == 0)
        if (more := len(found) - _MOST_WARNINGS) > 0:
            yield Line(text=f"and {more} more: --full")
        first, *others = _folded(self._next_command())
        yield Line(text=f"Next: {first}", tone="aside", is_apart=True, is_whole=True)
        for text in others:
            yield Line(text=text, tone="aside", is_whole=True, is_indented=True)
        yield Line(
            text=f"`{command('explain', 'TERM')}` says what a heading or mark means.", tone="aside"
        )

    def _next_command(self) -> str:
        """Return the command that brings most: an interval where there is none, else all of it."""
        run, more = self.summary.run, self.summary.more_rounds
        words, of_script = list(run.argv[1:]), []
        if "--" in words:
            end = words.index("--")
            words, of_script = words[:end], words[end:]
        is_usual = self.summary.folder == Path("results")
        if more is None or words[:1] != ["sweep"]:
            place = [] if is_usual else ["--results", str(self.summary.folder)]
            return command("report", run.run_id, "--full", *place)
        # A resumed run takes its `--set` from its tables.
        kept = [
            word
            for before, word in zip(["", *words], words, strict=False)
            if not {before, word} & {*_ABOUT_RESULTS, "--set"}
        ]
        place = [] if is_usual else ["-o", str(self.summary.folder)]
        rounds = ["--set", f"measure.rounds={more.rounds}"]
        return command(*kept, "--resume", run.run_id, *place, *rounds, *of_script)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        run, machine, lead, answer (what was asked, and the points case by case, the best
        first), lost_nodes, points (all columns and those of
        `raybench.analysis.scaling`), largest_batches, failures, warnings, plus_minus (what
        intervals hold over), more_rounds (what they would cost and give), references (figures
        beside them), regions (of the step, by point).
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
            "warnings": summary.warnings,
            "plus_minus": summary.plus_minus,
            "more_rounds": summary.more_rounds,
            "references": [one.members for one in summary.standings],
            "regions": {
                point_id: [{name: getattr(one, name) for name in of_region} for one in found]
                for point_id, found in summary.regions.items()
            },
        }


def _folded(text: str) -> list[str]:
    """Return a command in one line, or a line for each option where it is long; a shell joins them.

    A line before another one ends in a backslash.
    """
    if len(text) <= _COMMAND_CHARS:
        return [text]
    first, *options = re.split(r" (?=--?[a-z])", text)
    lines = [first, *(f"    {option}" for option in options)]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]
