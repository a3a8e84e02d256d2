"""The report of a run: what each format shows of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from raybench.analysis.answer import Gains, Next, RunAnswer, SpeedUps, as_data
from raybench.analysis.doubts import busy_group
from raybench.analysis.run_data import RunData
from raybench.records.doubts import DoubtKind, Harm
from raybench.report import formatting, messages
from raybench.report.answer_table import AnswerTable, answer_table, half_widths_of_answer
from raybench.report.documents import Block, Document, Legend, Line, Listing, Table
from raybench.report.formatting import command, counted
from raybench.report.messages import LONG, SHORT, MessageGroup, list_messages
from raybench.report.sections import SECTIONS, Section
from raybench.report.words import answer as words
from raybench.report.words import run as run_words
from raybench.report.words.doubts import busy_words
from raybench.results.tables import RegionRow

# Failures and doubts on the first screen.
_MOST_MESSAGES = 3
_NO_DOUBTS = "No doubts."
# Precedes the first doubt, which can change the answer most.
_MAIN_CAVEAT = "Main caveat"
_ABOUT_FULL = "`--full` shows all points and what each column means."


@dataclass(frozen=True, slots=True, kw_only=True)
class Caveats:
    """The failures and doubts of a run that its first screen shows."""

    # The heading, or a sentence if there are no messages; "" if nothing was measured.
    title: str
    # (points, message); points is "" if the message names the points.
    messages: tuple[tuple[str, str], ...]
    # Number of failures and doubts that the first screen does not show.
    left_out: int


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class RunReport(Document):
    """The report of a run."""

    answer: RunAnswer
    # Whether `blocks` yields only the first screen.
    is_short: bool = False

    @property
    def data(self) -> RunData:
        """Return the data of the run."""
        return self.answer.data

    @property
    def title(self) -> str:
        """Return the question that the run answers."""
        return words.question_of_run(self.answer)

    @cached_property
    def lead(self) -> str:
        """Return the answer of the run and its certainty; "" if nothing was measured."""
        certainty = f"Certainty: {self._certainty}" if self._certainty else ""
        return " ".join(filter(None, (words.lead(self.answer), certainty)))

    @cached_property
    def failures(self) -> tuple[MessageGroup, ...]:
        """Return how points that are not ok ended, and why."""
        return messages.failures(
            self.data.attempts, self.data.ranks, is_batch_search=self.data.is_batch_search
        )

    @cached_property
    def without_speed_up(self) -> tuple[MessageGroup, ...]:
        """Return why points lack a speed-up; baselines are left out if other points lack one."""
        # `why` says why a point has no speed-up.
        without = [row for row in self.data.rows if row.why is not None]
        without_and_not_baseline = [row for row in without if not row.is_baseline]
        rows = without_and_not_baseline or without
        reasons = (row.why for row in rows if row.why is not None)
        return messages.not_compared(reasons, len(self.data.rows))

    @cached_property
    def doubts(self) -> tuple[MessageGroup, ...]:
        """Return the doubts about numbers of the run, the most harmful first."""
        return messages.doubts(self.answer.doubts, self.data.rows, self.data.ranks)

    @cached_property
    def _sections(self) -> list[tuple[Section, list[Listing | Table]]]:
        """Return the sections that apply, each with its listings and tables."""
        sections = []
        for section in SECTIONS:
            if blocks := list(section.blocks(self.answer)):
                sections.append((section, blocks))
        return sections

    @property
    def listings(self) -> list[Listing]:
        """Return the listings of all sections."""
        blocks = chain.from_iterable(blocks for _, blocks in self._sections)
        return [block for block in blocks if isinstance(block, Listing)]

    @property
    def tables(self) -> list[tuple[Section, list[Table]]]:
        """Return the sections that have tables, each with its tables."""
        sections = []
        for section, blocks in self._sections:
            if tables := [block for block in blocks if isinstance(block, Table)]:
                sections.append((section, tables))
        return sections

    @property
    def messages(self) -> list[Listing]:
        """Return lists of failed and skipped points, missing speed-ups, and doubts."""
        groups_of_title = {
            "Failed and skipped points": self.failures,
            "Points whose speed-up is unknown": self.without_speed_up,
            "Doubts": self.doubts,
        }
        return [list_messages(title, groups) for title, groups in groups_of_title.items() if groups]

    def blocks(self) -> Iterator[Block]:
        """Yield the first screen, or the full report: answer, facts, tables and messages."""
        data = self.data
        yield Line(text=run_words.facts_of_first_screen(data))
        if data.rows:
            yield Line(text=words.point_and_round(data.ok_rows), tone="aside")
        yield from self._answer_blocks()
        if self.is_short:
            yield from self._caveat_blocks()
            yield from self._next_lines()
            return
        lost = formatting.some(data.lost_nodes)
        shared = run_words.in_all_points(data)
        texts = (
            f"Run {formatting.run_title(data.run)}, {run_words.course_of_run(data)}",
            run_words.machine_of_run(data),
            f"nodes lost: {lost}" if lost else "",
            formatting.versions(data.versions),
            f"in all points: {shared}" if shared else "",
            f"measured {run_words.CPU_SECTION}" if data.run.cpu_section else "",
        )
        for index, text in enumerate(filter(None, texts)):
            yield Line(text=text, is_apart=index == 0)
        yield from self.listings
        for _, tables in self.tables:
            yield from tables
        yield Legend()
        yield from self.messages
        if data.ok_rows and not self.doubts:
            yield Line(text=_NO_DOUBTS, is_apart=True)
        if more := self.answer.more_rounds:
            yield Line(text=words.more_rounds(more), tone="aside", is_apart=True)
        text = f"`{command('explain', 'TERM')}` says what a heading or mark means."
        yield Line(text=text, tone="aside", is_apart=True)

    @cached_property
    def answer_table(self) -> AnswerTable | None:
        """Return the values of the answer as a table; None for fewer than two values."""
        return answer_table(self.answer)

    @property
    def headline(self) -> str:
        """Return the values of the answer in one sentence, or why there are none."""
        return words.headline(self.answer) or "No point has been finished yet."

    @cached_property
    def _certainty(self) -> str:
        return words.certainty(self.answer, half_widths_of_answer(self.answer))

    @property
    def findings(self) -> list[str]:
        """Return sentences below the values: legend, conclusions, and certainty."""
        sentences = [*self._legend_of_answer(), *words.findings(self.answer)]
        if self._certainty:
            sentences.append(f"Certainty: {self._certainty}")
        return sentences

    def _legend_of_answer(self) -> Iterator[str]:
        """Yield the meanings of marks and labels in the table of the answer."""
        table = self.answer_table
        # A row named `plain` has all these switches off.
        if table and table.plain:
            yield words.plain_meaning(table.plain)
        if table and table.has_wide:
            rounds = [row.rounds for row in self.data.ok_rows]
            is_ratio = isinstance(self.answer.leading, SpeedUps | Gains)
            yield words.wide_meaning(DoubtKind.WIDE.mark, rounds, is_ratio=is_ratio)

    def _answer_blocks(self) -> Iterator[Block]:
        """Yield the values of the answer, as a table or a sentence, and the findings."""
        table = self.answer_table
        if table is None:
            yield Line(text=self.headline, is_apart=True, tone="strong")
        else:
            yield table.table
            if table.left_out:
                text = f"and {counted(table.left_out, 'more point')}: --full"
                yield Line(text=text, tone="aside")
        for sentence in self.findings:
            yield Line(text=sentence)

    @cached_property
    def caveats(self) -> Caveats:
        """Return the failures, then the doubts about the answer, that the first screen shows."""
        data = self.data
        # In a search, running out of memory is the result.
        failures = [
            failure for failure in self.failures if not (failure.is_oom and data.is_batch_search)
        ]
        shown = []  # (points, message)
        for failure in failures:
            shown.append((failure.who, failure.shortened(SHORT if failure.is_oom else LONG)))
        busy_doubt = busy_group(data.doubts, len(data.ok_rows))
        if busy_doubt and not self.answer.concerns(busy_doubt.worst.kind):
            busy_doubt = None
        # On a busy machine one sentence replaces all doubts, except those of wrong numbers.
        shown += self._doubts_about_answer(only_wrong=busy_doubt is not None)
        if busy_doubt:
            sentence = busy_words(busy_doubt, len(data.ok_rows))
            shown = [*shown[: _MOST_MESSAGES - 1], ("", sentence)]
        shown = shown[:_MOST_MESSAGES]
        first_doubt = len(failures)
        if len(shown) > first_doubt:
            who, text = shown[first_doubt]
            shown[first_doubt] = (f"{_MAIN_CAVEAT}: {who}" if who else _MAIN_CAVEAT, text)
        left_out = len(failures) + len(self.doubts) - len(shown)
        if shown:
            title = "Failures and doubts" if failures else "Doubts"
        else:
            title = self._title_without_messages()
        return Caveats(title=title, messages=tuple(shown), left_out=left_out)

    def _doubts_about_answer(self, *, only_wrong: bool) -> Iterator[tuple[str, str]]:
        """Yield (points, message) of doubts about the answer, or only those of wrong numbers."""
        for group, message in zip(self.answer.doubts, self.doubts, strict=True):
            is_wrong = group.worst.kind.harm is Harm.WRONG
            if self.answer.concerns(group.worst.kind) and (is_wrong or not only_wrong):
                yield message.who, message.shortened(SHORT)

    def _title_without_messages(self) -> str:
        """Return the title of `caveats` without messages; "" if nothing was measured."""
        # Doubts without a message concern another quantity than the answer.
        if count := len(self.doubts):
            concern = "doubt concerns" if count == 1 else "doubts concern"
            what = "the speed" if self.answer.is_of_memory else "speed-ups"
            return f"{count} {concern} {what}, not this answer: --full"
        return _NO_DOUBTS if self.data.ok_rows else ""

    def _caveat_blocks(self) -> Iterator[Block]:
        """Yield the failures and doubts of the first screen, or a sentence if there are none."""
        caveats = self.caveats
        if not caveats.messages:
            # The title is the sentence; it is empty if nothing was measured.
            if caveats.title:
                yield Line(text=caveats.title)
            return
        yield Line(text=caveats.title, tone="strong", is_apart=True)
        for points, text in caveats.messages:
            yield Line(text=f"{points}: {text}" if points else text)
        if caveats.left_out > 0:
            yield Line(text=f"and {counted(caveats.left_out, 'more doubt')}: --full", tone="aside")

    def _next_lines(self) -> Iterator[Block]:
        """Yield the next command, and what the full report shows."""
        following = self.answer.next_command
        first, *others = words.next_command(following)
        yield Line(text=first, tone="aside", is_apart=True, is_whole=True)
        for text in others:
            yield Line(text=text, tone="aside", is_whole=True)
        if following.kind is not Next.FULL_REPORT:
            yield Line(text=_ABOUT_FULL, tone="aside")

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object."""
        data = self.data
        plus_minus = run_words.plus_minus(data)
        regions: dict[str, list[dict[str, Any]]] = {}
        for point_id, regions_of_point in data.regions.items():
            regions[point_id] = list(map(_region_members, regions_of_point))
        return {
            "run": data.run,
            "machine": run_words.machine_of_run(data),
            "question": self.title,
            "lead": self.lead,
            "answer": self._answer_members(),
            "lost_nodes": data.lost_nodes,
            "points": data.rows,
            "largest_batches": self.answer.largest_batches,
            "failures": self.failures,
            "doubts": self._doubt_members(),
            "plus_minus": f"{plus_minus}." if plus_minus else "",
            "more_rounds": self.answer.more_rounds,
            "references": [standing.members for standing in data.standings],
            "regions": regions,
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
                "text": message.shortened(LONG),
            }
            for group, message in zip(self.answer.doubts, self.doubts, strict=True)
        ]

    def _answer_members(self) -> dict[str, Any]:
        """Return the question, and the answer as data; the best point of a case comes first."""
        answer = self.answer
        cases = []
        for case in answer.cases:
            ranked = []
            for candidate in case.ranked:
                name = words.candidate_name(answer, candidate)
                ranked.append({"name": name, **as_data(candidate)})
            cases.append(
                {
                    "name": words.case_name(answer, case),
                    "settings": case.settings,
                    "verdict": case.verdict,
                    "ranked": ranked,
                }
            )
        other_members = ("uncompared", "single_starts", "impossible", "next_command")
        return {
            **asdict(answer.asked),
            "kind": answer.leading.kind,
            "found": as_data(answer.leading),
            **{name: as_data(getattr(answer, name)) for name in other_members},
            "ranked_by": answer.ranked_by.metric,
            "cases": cases,
        }


def _region_members(row: RegionRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("region", "calls", "region_ms", "share_pct")}
