"""A health check, and the figures of several, as documents (see `raybench.report.documents`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raybench.health.comparison import relative_change, urgency, word
from raybench.health.export import members
from raybench.health.history import FigureTrend
from raybench.health.report import HealthReport
from raybench.health.tables import blocks
from raybench.records.health import figure
from raybench.report import formatting
from raybench.report.blocks import SETTING_CHARS, Block, Column, ColumnOf, Line, Tone, make_table
from raybench.report.comparison import percent
from raybench.report.documents import Document
from raybench.report.history import sparkline
from raybench.report.plain_text import counted

_MOST_FIGURES = 40
_TONES: Mapping[int, Tone] = {0: "good", 1: "alarm", 3: "advice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthDocument(Document):
    """The document of a health check."""

    report: HealthReport

    @property
    def title(self) -> str:
        """Return the verdict in a sentence."""
        return self.report.headline

    @property
    def tone(self) -> Tone:
        """Return the colour of the verdict."""
        return _TONES[self.report.exit_code]

    def blocks(self) -> Iterator[Block]:
        """Yield each case and the tables."""
        report = self.report
        yield Line(text=report.machine)
        yield Line(text=f"{formatting.course(report.run)}; run {report.run.run_id}")
        yield from blocks(report)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object; see `raybench.health.export.members`."""
        return members(self.report)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthHistory(Document):
    """The document of how figures went over several checks."""

    trends: Sequence[FigureTrend]
    run_ids: Sequence[str]

    @property
    def title(self) -> str:
        """Return how many figures are slower in the last check, in a sentence."""
        slower = sum(one.last.is_slower for one in self.trends)
        verdict = (
            f"{slower or 'none'} slower in the last one than before, by more than days differ."
        )
        if not self.trends:
            verdict = "nothing to compare; it takes two checks of the same devices."
        return (
            f"{counted(len(self.trends), 'figure')} over {counted(len(self.run_ids), 'check')}: "
            f"{verdict}"
        )

    def blocks(self) -> Iterator[Block]:
        """Yield the table of the figures, those that are slower first."""
        ordered = sorted(self.trends, key=lambda one: urgency(one.last))

        def text(title: str) -> Column:
            return Column(title=title, is_text=True, min_chars=SETTING_CHARS)

        columns: list[ColumnOf[FigureTrend]] = [
            (text("test"), lambda one: one.last.new.test),
            (text("of"), lambda one: one.last.new.subject.name),
            (Column(title="unit", is_text=True), lambda one: one.last.new.unit),
            (Column(title="checks"), lambda one: str(len(one.values))),
            (Column(title="last"), lambda one: figure(one.values[-1])),
            (Column(title="change"), lambda one: percent(relative_change(one.last))),
            (Column(title="by check", is_text=True), lambda one: sparkline(one.values)),
            (Column(title="verdict", is_text=True), lambda one: word(one.last)),
        ]
        if ordered:
            yield make_table(ordered[:_MOST_FIGURES], columns)
        if (hidden := len(ordered) - _MOST_FIGURES) > 0:
            yield Line(text=f"{hidden} more have a history; --json has all", is_apart=True)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object: checks (run ids) and figures."""
        figures = [
            {
                "test": one.last.new.test,
                "subject": asdict(one.last.new.subject),
                "unit": one.last.new.unit,
                "values": one.values,
                "ratio": one.last.ratio,
                "limit": one.last.limit,
                "verdict": word(one.last),
            }
            for one in self.trends
        ]
        return {"checks": list(self.run_ids), "figures": figures}
