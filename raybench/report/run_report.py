"""The report of a run: what each format shows of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from raybench.analysis.answer import RunAnswer, as_data
from raybench.analysis.run_data import RunData
from raybench.report import formatting, messages
from raybench.report.documents import Block, Document, Legend, Line, Listing, Table
from raybench.report.formatting import command, counted
from raybench.report.messages import LONG, SHORT, MessageGroup, list_messages
from raybench.report.sections import (
    MOST_ROWS,
    SECTIONS,
    Section,
    answer_table,
    reference_lines,
)
from raybench.report.words import answer as words
from raybench.report.words import run as of_run

_MOST_WARNINGS = 3


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class RunReport(Document):
    """A document (`raybench.report.documents`) of a run. is_short: `blocks` is the short form."""

    answer: RunAnswer
    is_short: bool = False

    @property
    def data(self) -> RunData:
        """Return the data of the run."""
        return self.answer.data

    @property
    def title(self) -> str:
        """Return the run's id, after the job's name if the id does not begin with it."""
        return formatting.title(self.data.run)

    @cached_property
    def lead(self) -> str:
        """Return what the run found, and what is open; no full stop; "" if nothing was measured."""
        return words.lead(self.answer)

    @cached_property
    def failures(self) -> tuple[MessageGroup, ...]:
        """Return how points that are not ok ended, and why: the last attempt in each round."""
        return messages.failures(self.data.attempts)

    @cached_property
    def without_speed_up(self) -> tuple[MessageGroup, ...]:
        """Return the `why` of ok points without speed-up; of baselines only if no other has one."""
        without = [row for row in self.data.rows if row.why is not None]
        others = [row for row in without if not row.is_baseline] or without
        return messages.not_compared(row.why for row in others if row.why is not None)

    @cached_property
    def warnings(self) -> tuple[MessageGroup, ...]:
        """Return what makes numbers doubtful, the most harmful first."""
        return messages.warnings(self.data.doubts, self.data.rows, self.data.ranks)

    @cached_property
    def _sections(self) -> list[tuple[Section, list[Listing | Table]]]:
        """Return the sections that apply, each with its listings and tables."""
        found = ((section, list(section.blocks(self.answer))) for section in SECTIONS)
        return [(section, blocks) for section, blocks in found if blocks]

    @property
    def listings(self) -> list[Listing]:
        """Return the lists of findings that apply."""
        return [one for _, some in self._sections for one in some if isinstance(one, Listing)]

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
            "Failed and skipped points": self.failures,
            "Without speed-up": self.without_speed_up,
            "Warnings": self.warnings,
        }
        return [list_messages(title, groups) for title, groups in found.items() if groups]

    def blocks(self) -> Iterator[Block]:
        """Yield lead, facts, findings, tables, messages; `is_short`: fewer, and a next command."""
        data = self.data
        if self.is_short:
            yield from self._short()
            return
        if self.lead:
            yield Line(text=formatting.sentence(self.lead), tone="strong")
        lost = formatting.some(data.lost_nodes)
        shared = of_run.in_all_points(data)
        head = (
            of_run.machine(data),
            f"{of_run.course(data)}; {of_run.counts(data)}",
            f"nodes lost: {lost}" if lost else "",
            formatting.versions(data.versions),
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
        if more := self.answer.more_rounds:
            yield Line(text=words.more_rounds(more), tone="aside", is_apart=True)

    def _short(self) -> Iterator[Block]:
        """Yield the lead, one table, at most three warnings, and what to type next."""
        data = self.data
        if self.lead:
            yield Line(text=formatting.sentence(self.lead), tone="strong")
        yield Line(text=of_run.machine(data), is_apart=True)
        yield Line(text=f"{of_run.course(data)}; {of_run.counts(data)}")
        for _, text in islice(reference_lines(data), 1):
            yield Line(text=formatting.sentence(text))
        if data.rows:
            table = answer_table(self.answer, MOST_ROWS)
            yield table
            if left_out := len(data.rows) - len(table.rows):
                yield Line(text=f"and {counted(left_out, 'more point')}: --full", tone="aside")
        else:
            yield Line(text="No point has been finished yet.", is_apart=True)
        found = [*self.failures, *self.without_speed_up, *self.warnings]
        for place, group in enumerate(found[:_MOST_WARNINGS]):
            most = LONG if place < len(self.failures) else SHORT
            yield Line(text=f"{group.count} x {group.shortened(most)}", is_apart=place == 0)
        if (more := len(found) - _MOST_WARNINGS) > 0:
            yield Line(text=f"and {more} more: --full")
        first, *others = words.next_command(self.answer.next_command)
        yield Line(text=first, tone="aside", is_apart=True, is_whole=True)
        for text in others:
            yield Line(text=text, tone="aside", is_whole=True)
        text = f"`{command('explain', 'TERM')}` says what a heading or mark means."
        yield Line(text=text, tone="aside")

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        run, machine, lead, answer (`_answer_members`), lost_nodes, points (`ScaledRow`),
        largest_batches, failures, doubts, plus_minus (over which rounds intervals are),
        more_rounds (`MoreRounds` or None), references (`Standing.members`), regions (of the step,
        by point_id).
        """
        data = self.data
        plus_minus = of_run.plus_minus(data)
        of_region = ("region", "calls", "region_ms", "share_pct")
        return {
            "run": data.run,
            "machine": of_run.machine(data),
            "lead": self.lead,
            "answer": self._answer_members(),
            "lost_nodes": data.lost_nodes,
            "points": data.rows,
            "largest_batches": self.answer.largest_batches,
            "failures": self.failures,
            "doubts": self._doubt_members(),
            "plus_minus": plus_minus and f"{plus_minus}.",
            "more_rounds": self.answer.more_rounds,
            "references": [one.members for one in data.standings],
            "regions": {
                point_id: [{name: getattr(one, name) for name in of_region} for one in found]
                for point_id, found in data.regions.items()
            },
        }

    def _doubt_members(self) -> list[dict[str, Any]]:
        """Return each doubt with its worst value, the point that has it, and its words."""
        return [
            {
                **asdict(group.worst),
                "mark": group.worst.kind.mark,
                "harm": group.worst.kind.harm.name.lower(),
                "points": group.count,
                "point_id": group.row.point_id if group.row else None,
                "text": message.text,
            }
            for group, message in zip(self.data.doubts, self.warnings, strict=True)
        ]

    def _answer_members(self) -> dict[str, Any]:
        """Return what was asked, and the answer as data.

        kind: of `raybench.analysis.answer.Found`; found: its numbers, settings and verdicts. cases:
        the points of each case, the best first; value is that of `RunAnswer.ranked_by`.
        """
        answer = self.answer
        cases = []
        for case in answer.cases:
            ranked = []
            for one in case.ranked:
                name = words.candidate_name(answer, one)
                ranked.append({"name": name, **as_data(one)})
            cases.append(
                {
                    "name": words.case_name(answer, case),
                    "settings": case.settings,
                    "verdict": case.verdict,
                    "ranked": ranked,
                }
            )
        open_ = ("uncompared", "single_starts", "impossible", "next_command")
        return {
            **asdict(answer.asked),
            "kind": answer.leading.kind,
            "found": as_data(answer.leading),
            **{name: as_data(getattr(answer, name)) for name in open_},
            "ranked_by": answer.ranked_by.metric,
            "cases": cases,
        }
