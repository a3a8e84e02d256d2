"""What two health checks say beside each other: what days alone do not explain. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from raybench.analysis.compare import FASTER, SAME, SLOWER
from raybench.analysis.environment_changes import Change
from raybench.health.history import FigureChange
from raybench.health.report import UNHEALTHY, HealthReport, what_of
from raybench.records.health import Finding, Verdict, figure
from raybench.report import formatting
from raybench.report.blocks import SETTING_CHARS, Block, Cell, Column, Line, Listing, Table, Tone
from raybench.report.comparison import changes_listing, hidden_line, percent
from raybench.report.documents import Document

_MOST_SAME = 20
_MANIFOLD = 2.0
_LEGEND = (
    "change: of the figure. slower from: the change of its time that is called slower, as against "
    "a device's own earlier checks (docs/health.md): days differ by less. The passes of a check "
    "share their workers, so they do not tell how days differ."
)


@dataclass(frozen=True, kw_only=True)
class HealthComparison(Document):
    """Two checks: a document (see `raybench.report.documents`).

    figures: what both have read. changes: of the environment.
    """

    base: HealthReport
    new: HealthReport
    figures: Sequence[FigureChange]
    changes: Sequence[Change]

    @cached_property
    def new_cases(self) -> list[Finding]:
        """What was healthy in the base and no longer is."""
        fine = {_key(one) for one in self.base.findings if one.verdict is Verdict.HEALTHY}
        return [one for one in self.new.findings if one.verdict in UNHEALTHY and _key(one) in fine]

    @property
    def is_regression(self) -> bool:
        """Whether a figure is slower, or a subject is no longer healthy."""
        return bool(self.new_cases) or any(one.is_slower for one in self.figures)

    @cached_property
    def headline(self) -> str:
        """The answer in a sentence."""
        if not self.figures:
            return "No figure was read in both checks: other devices, or other stages."
        count = len(self.figures)
        slower = sum(one.is_slower for one in self.figures)
        faster = sum(one.is_faster for one in self.figures)
        middle = percent(median(relative_change(one) for one in self.figures))
        verb = "are" if slower > 1 else "is"
        also = f", {faster} faster" if faster else ""
        return (
            f"{slower or 'None'} of {count} figures {verb} slower by more than days differ{also}; "
            f"the median changed by {middle}."
        )

    @property
    def title(self) -> str:
        """Return the answer in a sentence."""
        return self.headline

    def blocks(self) -> Iterator[Block]:
        """Yield the runs, their verdicts, and the figures of both checks."""
        lines = [
            (name, f"{formatting.title(one.run)}, {formatting.when(one.run.started_at)}")
            for name, one in (("base", self.base), ("new", self.new))
        ]
        yield Listing(lines=lines, is_quoted=True)
        yield Listing(
            title="Verdicts",
            lines=[("base", self.base.headline), ("new", self.new.headline)],
        )
        if self.new_cases:
            yield Listing(
                title="No longer healthy",
                lines=[(one.subject.name, what_of(one)) for one in self.new_cases],
            )
        yield changes_listing("What changed around them", self.changes)
        yield from self._table()

    def _table(self) -> Iterator[Block]:
        ordered = sorted(self.figures, key=urgency)
        changed = [one for one in ordered if word(one) != SAME]
        same = [one for one in ordered if word(one) == SAME]
        shown = [*changed, *same[:_MOST_SAME]]
        if not shown:
            return
        yield Table(
            columns=(
                Column(title="test", is_text=True, min_chars=SETTING_CHARS),
                Column(title="of", is_text=True, min_chars=SETTING_CHARS),
                Column(title="unit", is_text=True, drop=1),
                *(Column(title=title) for title in ("base", "new", "change")),
                Column(title="slower from", drop=0),
                Column(title="verdict", is_text=True),
            ),
            rows=tuple(map(_row, shown)),
        )
        hidden = len(same) - _MOST_SAME
        if hidden > 0:
            yield hidden_line(hidden)
        yield Line(text=_LEGEND, tone="aside", is_apart=True)

    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object."""
        return {
            "base": asdict(self.base.run),
            "new": asdict(self.new.run),
            "headline": self.headline,
            "headline_base": self.base.headline,
            "headline_new": self.new.headline,
            "is_regression": self.is_regression,
            "changes": [asdict(one) for one in self.changes],
            "figures": [
                {
                    "test": one.new.test,
                    "stage": one.new.stage,
                    "subject": asdict(one.new.subject),
                    "unit": one.new.unit,
                    "base": one.base.value,
                    "new": one.new.value,
                    "ratio": one.ratio,
                    "limit": one.limit,
                    "verdict": word(one),
                    "verdict_base": one.base.verdict,
                    "verdict_new": one.new.verdict,
                }
                for one in self.figures
            ],
        }


def word(change: FigureChange) -> str:
    """Say what became of a figure."""
    if change.is_slower:
        return SLOWER
    return FASTER if change.is_faster else SAME


def _key(finding: Finding) -> object:
    return finding.test, finding.subject.kind, finding.subject.uuids or finding.subject.name


def relative_change(change: FigureChange) -> float:
    """Relate the new value to the earlier one, as a share of that."""
    return (change.new.value or 0.0) / (change.base.value or 1.0) - 1


def urgency(change: FigureChange) -> tuple[int, float]:
    """Sort what is slower first, and of that what changed most."""
    place = (SLOWER, FASTER, SAME).index(word(change))
    return place, -max(change.ratio, 1 / change.ratio)


_TONES: dict[str, Tone] = {SLOWER: "alarm", FASTER: "good"}


def _row(change: FigureChange) -> tuple[str | Cell, ...]:
    return (
        change.new.test,
        change.new.subject.name,
        change.new.unit,
        figure(change.base.value or 0.0),
        figure(change.new.value or 0.0),
        percent(relative_change(change)),
        f"{change.limit:.0f}x" if change.limit >= _MANIFOLD else f"+{change.limit - 1:.0%}",
        Cell(text=word(change), tone=_TONES.get(word(change), "plain")),
    )
