"""The figures of health checks over time: two checks compared, and the history of all. Pure.

Healthy devices differ more from day to day than between the passes of a check. So a figure is
slower only beyond the limit of its test for other days.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from raybench.analysis.compare import FASTER, SAME, SLOWER, Change
from raybench.health.references import limit_elsewhere
from raybench.health.report import HealthReport
from raybench.health.suite import COMM_TEST, WAIT_TEST, device_kinds, test_named
from raybench.health.verdicts import OTHER_PROGRAMS_TEST
from raybench.records.devices import Finding, Verdict, is_time
from raybench.report import formatting
from raybench.report.comparison import change_percent, changes_listing, hidden_line
from raybench.report.documents import (
    SETTING_CHARS,
    Block,
    Cell,
    ColumnOf,
    Document,
    Line,
    Listing,
    ShownColumn,
    Table,
    Tone,
    make_table,
)
from raybench.report.formatting import counted, number
from raybench.report.history import sparkline
from raybench.report.words import health as words

# The limit of a drift, and of a test that only another version of the suite has.
_USUAL_LIMIT = 1.1
_NOT_FIGURES = (WAIT_TEST, COMM_TEST, OTHER_PROGRAMS_TEST)
_NOT_STAGES = ("facts", "environment")
_ORDER = (SLOWER, FASTER, SAME)
_TONES: Mapping[str, Tone] = {SLOWER: "alarm", FASTER: "good"}
_MOST_SAME, _MOST_IN_HISTORY = 20, 40
_LEGEND = (
    "change: of the figure. slower from: the change of its time that is called slower; healthy "
    "devices differ by less from day to day."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """The values of one test of one subject in two checks or more."""

    # One from each check, oldest first; not 0.
    values: tuple[float, ...]
    # Finding of the last check.
    new: Finding
    # Largest `ratio` of a healthy subject.
    limit: float

    @property
    def base(self) -> float:
        """The median of the earlier values."""
        return median(self.values[:-1])

    @property
    def ratio(self) -> float:
        """Last time over the time of the base; above 1 is slower, for rates too."""
        last = self.values[-1]
        return last / self.base if is_time(self.new.unit) else self.base / last

    @property
    def verdict(self) -> str:
        """SLOWER, FASTER or SAME."""
        if self.ratio > self.limit:
            return SLOWER
        return FASTER if self.ratio * self.limit < 1 else SAME

    @property
    def relative_change(self) -> float:
        """Last value / base - 1; negative for slower rates and for faster times."""
        return self.values[-1] / self.base - 1

    @property
    def members(self) -> dict[str, Any]:
        """The members of the JSON object."""
        return {
            "test": self.new.test,
            "stage": self.new.stage,
            "subject": asdict(self.new.subject),
            "unit": self.new.unit,
            "values": self.values,
            "ratio": self.ratio,
            "limit": self.limit,
            "verdict": self.verdict,
        }


def trace_figures(checks: Iterable[Iterable[Finding]], least: float) -> list[FigureChange]:
    """Return the figures of at least two checks: slower, faster, same; largest changes first.

    Args:
        checks: oldest first.
        least: no limit is below this ratio of times.
    """
    series: dict[object, list[Finding]] = {}
    for findings in checks:
        for finding in findings:
            # A rate of 0 means that the amount of work is unknown.
            is_figure = finding.unit and finding.value and finding.stage not in _NOT_STAGES
            if is_figure and finding.test not in _NOT_FIGURES:
                series.setdefault(_key(finding), []).append(finding)
    changes = []
    for of_subject in series.values():
        last = of_subject[-1]
        values = tuple(finding.value or 0.0 for finding in of_subject)
        if len(values) > 1:
            limit = max(least, _limit(last))
            changes.append(FigureChange(values=values, new=last, limit=limit))
    return sorted(
        changes,
        key=lambda change: (_ORDER.index(change.verdict), -max(change.ratio, 1 / change.ratio)),
    )


def _limit(finding: Finding) -> float:
    """Return the limit of a test for other days; 1.1 if the suite has no such test."""
    # Tests of GPUs and of CPU workers share names; a path between nodes names no device.
    tests = [test_named(finding.test, kind) for kind in device_kinds(finding.subject)]
    return max((limit_elsewhere(test) for test in tests if test), default=_USUAL_LIMIT)


def _key(finding: Finding) -> object:
    """Return the identity of a test and subject in all checks."""
    subject = finding.subject
    # The subjects "all devices" and "all nodes" have the same UUIDs.
    needs_name = subject.kind == "cluster" or not subject.uuids
    return finding.test, subject.kind, subject.uuids, subject.name if needs_name else ""


def _figure_table(changes: Sequence[FigureChange], *columns: ColumnOf[FigureChange]) -> Table:
    """Return a row per figure: test, subject and unit, then the columns, then the verdict."""
    test, subject = (
        ShownColumn(title=title, is_text=True, min_chars=SETTING_CHARS) for title in ("test", "of")
    )
    return make_table(
        changes,
        [
            (test, lambda change: change.new.test),
            (subject, lambda change: change.new.subject.name),
            (ShownColumn(title="unit", is_text=True, drop=1), lambda change: change.new.unit),
            *columns,
            (
                ShownColumn(title="verdict", is_text=True),
                lambda change: Cell(text=change.verdict, tone=_TONES.get(change.verdict, "plain")),
            ),
        ],
    )


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class HealthComparison(Document):
    """The document that compares two health checks."""

    base: HealthReport
    new: HealthReport
    # Figures of tests and subjects in both checks.
    figures: Sequence[FigureChange]
    # Changes of the environment, from `base` to `new`.
    changes: Sequence[Change]

    @cached_property
    def _new_cases(self) -> list[Finding]:
        """The unhealthy findings of `new` whose test and subject are healthy in `base`."""
        healthy = {_key(old) for old in self.base.findings if old.verdict is Verdict.HEALTHY}
        unhealthy = (finding for finding in self.new.findings if finding.verdict.is_unhealthy)
        return [finding for finding in unhealthy if _key(finding) in healthy]

    @property
    def is_regression(self) -> bool:
        """Whether a figure is slower, or a healthy subject has become unhealthy in a test."""
        return bool(self._new_cases) or any(figure.verdict == SLOWER for figure in self.figures)

    @property
    def title(self) -> str:
        """The answer: how many figures are slower, and the median change."""
        if not self.figures:
            return "No figure was read in both checks: other devices, or other stages."
        verdicts = [figure.verdict for figure in self.figures]
        slower, faster = verdicts.count(SLOWER), verdicts.count(FASTER)
        middle = change_percent(median(figure.relative_change for figure in self.figures))
        verb = "are" if slower > 1 else "is"
        also = f", {faster} faster" if faster else ""
        return (
            f"{slower or 'None'} of {len(verdicts)} figures {verb} slower by more than days "
            f"differ{also}; the median changed by {middle}."
        )

    def blocks(self) -> Iterator[Block]:
        """Yield runs, verdicts, new cases, changes of the environment, and figures."""
        sides = (("base", self.base), ("new", self.new))
        lines = [
            (name, f"{formatting.run_title(side.run)}, {formatting.when(side.run.started_at)}")
            for name, side in sides
        ]
        yield Listing(lines=lines, is_quoted=True)
        yield Listing(title="Verdicts", lines=[(name, side.headline) for name, side in sides])
        if new_cases := self._new_cases:
            yield Listing(
                title="No longer healthy",
                lines=[(case.subject.name, words.reason_with_value(case)) for case in new_cases],
            )
        yield changes_listing("What changed around them", self.changes)
        changed = sum(figure.verdict != SAME for figure in self.figures)
        if not self.figures:
            return
        yield _figure_table(
            self.figures[: changed + _MOST_SAME],
            (ShownColumn(title="base"), lambda change: number(change.base, 3)),
            (ShownColumn(title="new"), lambda change: number(change.values[-1], 3)),
            (ShownColumn(title="change"), lambda change: change_percent(change.relative_change)),
            (
                ShownColumn(title="slower from", drop=0),
                lambda change: (
                    f"{change.limit:.0f}x" if change.limit >= 2 else f"{change.limit - 1:+.0%}"
                ),
            ),
        )
        if (hidden := len(self.figures) - changed - _MOST_SAME) > 0:
            yield hidden_line(hidden)
        yield Line(text=_LEGEND, tone="aside", is_apart=True)

    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object."""
        return {
            "base": asdict(self.base.run),
            "new": asdict(self.new.run),
            "headline": self.title,
            "headline_base": self.base.headline,
            "headline_new": self.new.headline,
            "is_regression": self.is_regression,
            "changes": [asdict(change) for change in self.changes],
            "figures": [figure.members for figure in self.figures],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthHistory(Document):
    """The document of the figures of all health checks."""

    figures: Sequence[FigureChange]
    # Run ids of the checks, oldest first.
    run_ids: Sequence[str]

    @property
    def title(self) -> str:
        """The answer: how many figures were slower when they were last tested."""
        slower = sum(figure.verdict == SLOWER for figure in self.figures)
        verdict = (
            f"{slower or 'none'} slower when last tested than before, by more than days differ."
        )
        if not self.figures:
            verdict = "nothing to compare; it takes two checks of the same devices."
        checks = counted(len(self.run_ids), "check")
        return f"{counted(len(self.figures), 'figure')} over {checks}: {verdict}"

    def blocks(self) -> Iterator[Block]:
        """Yield the table of the first 40 figures, and a line that counts the rest, if any."""
        if self.figures:
            yield _figure_table(
                self.figures[:_MOST_IN_HISTORY],
                (ShownColumn(title="checks"), lambda change: str(len(change.values))),
                (ShownColumn(title="last"), lambda change: number(change.values[-1], 3)),
                (
                    ShownColumn(title="change"),
                    lambda change: change_percent(change.relative_change),
                ),
                (
                    ShownColumn(title="by check", is_text=True),
                    lambda change: sparkline(change.values),
                ),
            )
        if (hidden := len(self.figures) - _MOST_IN_HISTORY) > 0:
            yield Line(text=f"{hidden} more have a history; --json has all", is_apart=True)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object."""
        figures = [figure.members for figure in self.figures]
        return {"checks": list(self.run_ids), "figures": figures}
