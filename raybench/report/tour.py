"""A tour of several questions: what runs of the jobs that come with raybench found here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from raybench.report.blocks import Block, Line
from raybench.report.formatting import sentence
from raybench.report.run_report import RunReport
from raybench.report.summary import Summary
from raybench.sweep.messages import command

NOTE = (
    "Short looks at small models, cut to the machine: what they say of it is measured, and no more "
    "than that."
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A run that answers a question.

    template: the job's name. results: the folder of the run. devices: the table of the run.
    """

    question: str
    template: str
    results: Path
    summary: Summary
    devices: pd.DataFrame

    @cached_property
    def report(self) -> RunReport:
        """Return the report of the run."""
        return RunReport(summary=self.summary)

    @property
    def lead(self) -> str:
        """Return what the run found, in a sentence."""
        return sentence(self.report.lead or "no point was measured")

    @property
    def commands(self) -> list[tuple[str, str]]:
        """What to type next, and what it does."""
        is_usual = self.results == Path("results")
        place = () if is_usual else ("--results", str(self.results))
        return [
            ("all of it", command("report", self.summary.run.run_id, *place)),
            ("the job, to change it", command("init", "--template", self.template)),
        ]


def tour_blocks(answers: Sequence[Answer]) -> Iterator[Block]:
    """List what a terminal shows of a tour: each question and its answer."""
    for answer in answers:
        yield Line(text=answer.question, tone="strong", is_apart=True)
        yield Line(text=answer.lead)
        for what, typed in answer.commands:
            yield Line(text=f"{what}: {typed}", tone="aside", is_whole=True)
    yield Line(text=NOTE, tone="aside", is_apart=True)
