"""The figures of health checks over time: two checks compared, and the history of all. Pure.

The passes of a check run in the same workers, so their spread does not include what differs from
day to day. A figure is slower only beyond the limit that its test has for earlier checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from raybench.analysis.compare import FASTER, SAME, SLOWER
from raybench.analysis.environment_changes import Change
from raybench.health.expected import limit_elsewhere
from raybench.health.report import UNHEALTHY, HealthReport, reason_with_value
from raybench.health.suite import COMM_TEST, SUITE, WAIT_TEST
from raybench.health.verdicts import OTHER_PROGRAMS_TEST
from raybench.records.health import Finding, Verdict, figure, is_time
from raybench.report import formatting
from raybench.report.blocks import (
    SETTING_CHARS,
    Block,
    Cell,
    Column,
    ColumnOf,
    Line,
    Listing,
    Table,
    Tone,
    make_table,
)
from raybench.report.comparison import changes_listing, hidden_line, percent
from raybench.report.documents import Document
from raybench.report.history import sparkline
from raybench.report.plain_text import counted

# The limit of a test that only another version of the suite has.
_USUAL_LIMIT = 1.1
_NOT_FIGURES = (WAIT_TEST, COMM_TEST, OTHER_PROGRAMS_TEST)
_ORDER = (SLOWER, FASTER, SAME)
_TONES: Mapping[str, Tone] = {SLOWER: "alarm", FASTER: "good"}
_MOST_SAME, _MOST_IN_HISTORY = 20, 40
# From this limit on it is written as a multiple, not as a percentage.
_LEAST_MULTIPLE = 2.0
_LEGEND = (
    "change: of the figure. slower from: the change of its time that is called slower, as against "
    "a device's own earlier checks: days differ by less. The passes of a check "
    "share their workers, so they do not tell how days differ."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """The values of one test of one subject in two checks or more.

    values: of all checks, the oldest first. base: the finding of the last check but one, with the
    median of all earlier values. new: the finding of the last check.
    ratio: the time of `new` over that of `base`, above 1 is slower. limit: the largest ratio that
    healthy devices reach from one day to another.
    """

    values: tuple[float, ...]
    base: Finding
    new: Finding
    ratio: float
    limit: float

    @property
    def verdict(self) -> str:
        """Return "slower" or "faster" where the change is beyond the limit, else "same"."""
        if self.ratio > self.limit:
            return SLOWER
        return FASTER if self.ratio * self.limit < 1 else SAME

    @property
    def relative_change(self) -> float:
        """Return the change of the value as a share of the earlier one, for rates and for times."""
        return (self.new.value or 0.0) / (self.base.value or 1.0) - 1


def trace_figures(
    checks: Iterable[Iterable[Finding]], kinds: Iterable[str], least: float
) -> tuple[FigureChange, ...]:
    """Return the figures that at least two of the checks have, in the order of their tests.

    checks: their findings, the oldest check first. kinds: of the devices, "cuda" or "cpu".
    least: the smallest limit, as a ratio.
    """
    checked = set(kinds)
    limits = {
        name: limit_elsewhere(test)
        for kind, tests in SUITE.items()
        if kind in checked
        for test in tests
        for name in (test.name, test.between_nodes.name)
    }
    series: dict[object, list[Finding]] = {}
    for findings in checks:
        for one in findings:
            # A rate is zero only where the amount of work is not known.
            is_figure = one.unit and one.value and one.stage != "facts"
            if is_figure and one.test not in _NOT_FIGURES:
                series.setdefault(_key(one), []).append(one)
    changes = []
    for *earlier, new in series.values():
        if not earlier:
            continue
        *values, now = (one.value or 0.0 for one in (*earlier, new))
        before = median(values)
        time, time_before = (now, before) if is_time(new.unit) else (before, now)
        changes.append(
            FigureChange(
                values=(*values, now),
                base=replace(earlier[-1], value=before),
                new=new,
                ratio=time / time_before,
                limit=max(least, limits.get(new.test, _USUAL_LIMIT)),
            )
        )
    return tuple(changes)


def _key(finding: Finding) -> object:
    """Return what findings of the same test and subject have in common in all checks."""
    return finding.test, finding.subject.kind, finding.subject.uuids or finding.subject.name


def _urgency(change: FigureChange) -> tuple[int, float]:
    """Return a sort key: slower, faster, same; the largest change of each first."""
    return _ORDER.index(change.verdict), -max(change.ratio, 1 / change.ratio)


def _figure_table(
    changes: Sequence[FigureChange], columns: Iterable[ColumnOf[FigureChange]]
) -> Table:
    """Return a row per figure: test, subject and unit, then the columns, then the verdict."""
    return make_table(
        changes,
        [
            (
                Column(title="test", is_text=True, min_chars=SETTING_CHARS),
                lambda change: change.new.test,
            ),
            (
                Column(title="of", is_text=True, min_chars=SETTING_CHARS),
                lambda change: change.new.subject.name,
            ),
            (Column(title="unit", is_text=True, drop=1), lambda change: change.new.unit),
            *columns,
            (
                Column(title="verdict", is_text=True),
                lambda change: Cell(text=change.verdict, tone=_TONES.get(change.verdict, "plain")),
            ),
        ],
    )


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class HealthComparison(Document):
    """The document of two health checks.

    figures: those that both have. changes: of the environment, from `base` to `new`.
    """

    base: HealthReport
    new: HealthReport
    figures: Sequence[FigureChange]
    changes: Sequence[Change]

    @cached_property
    def new_cases(self) -> list[Finding]:
        """Return the unhealthy findings of the new check that were healthy in the base."""
        fine = {_key(one) for one in self.base.findings if one.verdict is Verdict.HEALTHY}
        return [one for one in self.new.findings if one.verdict in UNHEALTHY and _key(one) in fine]

    @property
    def is_regression(self) -> bool:
        """Return whether a figure is slower, or a subject is no longer healthy."""
        return bool(self.new_cases) or any(one.verdict == SLOWER for one in self.figures)

    @property
    def title(self) -> str:
        """Return how many figures are slower and how much the median changed, in a sentence."""
        if not self.figures:
            return "No figure was read in both checks: other devices, or other stages."
        verdicts = [one.verdict for one in self.figures]
        slower, faster = verdicts.count(SLOWER), verdicts.count(FASTER)
        middle = percent(median(one.relative_change for one in self.figures))
        verb = "are" if slower > 1 else "is"
        also = f", {faster} faster" if faster else ""
        return (
            f"{slower or 'None'} of {len(verdicts)} figures {verb} slower by more than days "
            f"differ{also}; the median changed by {middle}."
        )

    def blocks(self) -> Iterator[Block]:
        """Yield the runs, their verdicts, what changed around them, and the table of figures."""
        sides = (("base", self.base), ("new", self.new))
        lines = [
            (name, f"{formatting.title(side.run)}, {formatting.when(side.run.started_at)}")
            for name, side in sides
        ]
        yield Listing(lines=lines, is_quoted=True)
        yield Listing(title="Verdicts", lines=[(name, side.headline) for name, side in sides])
        if self.new_cases:
            yield Listing(
                title="No longer healthy",
                lines=[(one.subject.name, reason_with_value(one)) for one in self.new_cases],
            )
        yield changes_listing("What changed around them", self.changes)
        # Sorted by verdict, those that are the same come last.
        changed = sum(one.verdict != SAME for one in self.figures)
        shown = sorted(self.figures, key=_urgency)[: changed + _MOST_SAME]
        if not shown:
            return
        columns: list[ColumnOf[FigureChange]] = [
            (Column(title="base"), lambda change: figure(change.base.value or 0.0)),
            (Column(title="new"), lambda change: figure(change.new.value or 0.0)),
            (Column(title="change"), lambda change: percent(change.relative_change)),
            (
                Column(title="slower from", drop=0),
                lambda change: (
                    f"{change.limit:.0f}x"
                    if change.limit >= _LEAST_MULTIPLE
                    else f"+{change.limit - 1:.0%}"
                ),
            ),
        ]
        yield _figure_table(shown, columns)
        if hidden := len(self.figures) - len(shown):
            yield hidden_line(hidden)
        yield Line(text=_LEGEND, tone="aside", is_apart=True)

    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object.

        base, new (runs), headline, headline_base, headline_new, is_regression, changes (of the
        environment), figures (base and new in `unit`, ratio and limit of times).
        """
        return {
            "base": asdict(self.base.run),
            "new": asdict(self.new.run),
            "headline": self.title,
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
                    "verdict": one.verdict,
                    "verdict_base": one.base.verdict,
                    "verdict_new": one.new.verdict,
                }
                for one in self.figures
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthHistory(Document):
    """The document of the figures of all health checks. run_ids: of the checks, oldest first."""

    figures: Sequence[FigureChange]
    run_ids: Sequence[str]

    @property
    def title(self) -> str:
        """Return how many figures are slower in the last check, in a sentence."""
        slower = sum(one.verdict == SLOWER for one in self.figures)
        verdict = (
            f"{slower or 'none'} slower in the last one than before, by more than days differ."
        )
        if not self.figures:
            verdict = "nothing to compare; it takes two checks of the same devices."
        return (
            f"{counted(len(self.figures), 'figure')} over {counted(len(self.run_ids), 'check')}: "
            f"{verdict}"
        )

    def blocks(self) -> Iterator[Block]:
        """Yield the table of the first 40 figures, the slower ones first."""
        columns: list[ColumnOf[FigureChange]] = [
            (Column(title="checks"), lambda change: str(len(change.values))),
            (Column(title="last"), lambda change: figure(change.values[-1])),
            (Column(title="change"), lambda change: percent(change.relative_change)),
            (Column(title="by check", is_text=True), lambda change: sparkline(change.values)),
        ]
        if self.figures:
            shown = sorted(self.figures, key=_urgency)[:_MOST_IN_HISTORY]
            yield _figure_table(shown, columns)
        if (hidden := len(self.figures) - _MOST_IN_HISTORY) > 0:
            yield Line(text=f"{hidden} more have a history; --json has all", is_apart=True)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object: checks (run ids) and figures."""
        figures = [
            {
                "test": one.new.test,
                "subject": asdict(one.new.subject),
                "unit": one.new.unit,
                "values": one.values,
                "ratio": one.ratio,
                "limit": one.limit,
                "verdict": one.verdict,
            }
            for one in self.figures
        ]
        return {"checks": list(self.run_ids), "figures": figures}
