"""The figures of health checks over time: two checks compared, and the history of all. Pure.

The passes of a check run in the same workers, so their spread does not include what differs from
day to day. A figure is slower only beyond the limit that its test has for earlier checks.
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
    """The values of one test of one subject in two checks or more.

    values: of the checks that have it, the oldest first; none is 0. new: finding of the last one.
    limit: how many times its earlier time a healthy subject takes at most on another day.
    """

    values: tuple[float, ...]
    new: Finding
    limit: float

    @property
    def base(self) -> float:
        """Return the median of all values but the last one."""
        return median(self.values[:-1])

    @property
    def ratio(self) -> float:
        """Return last time / time of the base; above 1 is slower, for rates too."""
        last = self.values[-1]
        return last / self.base if is_time(self.new.unit) else self.base / last

    @property
    def verdict(self) -> str:
        """Return "slower" or "faster" if `ratio` or its inverse is above `limit`, else "same"."""
        if self.ratio > self.limit:
            return SLOWER
        return FASTER if self.ratio * self.limit < 1 else SAME

    @property
    def relative_change(self) -> float:
        """Return last value / base - 1: below 0 a rate is slower, and a time is faster."""
        return self.values[-1] / self.base - 1

    @property
    def members(self) -> dict[str, Any]:
        """Return the members of its JSON object; ratio and limit compare times, not rates.

        test, stage, subject (kind, name, model, uuids), unit, values, ratio, limit, verdict.
        """
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
    """Return the figures, healthy or not, that at least two of the checks have.

    A subject is the same by its UUIDs; a cluster, or one without these, also by its name. Without
    facts, the environment, values of 0 or None, findings without a unit, waiting and communication
    in a step, and other programs. Sorted: slower, faster, same; in each the largest change first.
    checks: oldest first. least: no limit is below this ratio of times.
    """
    series: dict[object, list[Finding]] = {}
    for findings in checks:
        for one in findings:
            # A rate is zero only where the amount of work is not known.
            is_figure = one.unit and one.value and one.stage not in _NOT_STAGES
            if is_figure and one.test not in _NOT_FIGURES:
                series.setdefault(_key(one), []).append(one)
    changes = [
        FigureChange(
            values=tuple(one.value or 0.0 for one in found),
            new=found[-1],
            limit=max(least, _limit(found[-1])),
        )
        for found in series.values()
        if len(found) > 1
    ]
    return sorted(
        changes, key=lambda one: (_ORDER.index(one.verdict), -max(one.ratio, 1 / one.ratio))
    )


def _limit(finding: Finding) -> float:
    """Return `limit_elsewhere` of the test of a finding; 1.1 where the suite has no such test."""
    # Tests of GPUs and of CPU workers share names; a path of nodes may be of either.
    tests = [test_named(finding.test, kind) for kind in device_kinds(finding.subject)]
    return max((limit_elsewhere(test) for test in tests if test), default=_USUAL_LIMIT)


def _key(finding: Finding) -> object:
    """Return a key that the findings of one test and subject have in all checks."""
    subject = finding.subject
    # All devices together and all nodes, each slow alike, have the same UUIDs.
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
    """The document of two health checks.

    figures: those that both have, as of `trace_figures`. changes: of the environment, from `base`
    to `new`.
    """

    base: HealthReport
    new: HealthReport
    figures: Sequence[FigureChange]
    changes: Sequence[Change]

    @cached_property
    def _new_cases(self) -> list[Finding]:
        """Return the unhealthy findings of `new` whose test and subject are healthy in `base`."""
        fine = {_key(one) for one in self.base.findings if one.verdict is Verdict.HEALTHY}
        return [one for one in self.new.findings if one.verdict.is_unhealthy and _key(one) in fine]

    @property
    def is_regression(self) -> bool:
        """Return whether a figure is slower, or a test finds a healthy subject unhealthy now.

        Healthy in `base`, then bad, suspect or untested; unknown or missing in either is no case.
        """
        return bool(self._new_cases) or any(one.verdict == SLOWER for one in self.figures)

    @property
    def title(self) -> str:
        """Return how many figures are slower and the median change, or that none is in both."""
        if not self.figures:
            return "No figure was read in both checks: other devices, or other stages."
        verdicts = [one.verdict for one in self.figures]
        slower, faster = verdicts.count(SLOWER), verdicts.count(FASTER)
        middle = change_percent(median(one.relative_change for one in self.figures))
        verb = "are" if slower > 1 else "is"
        also = f", {faster} faster" if faster else ""
        return (
            f"{slower or 'None'} of {len(verdicts)} figures {verb} slower by more than days "
            f"differ{also}; the median changed by {middle}."
        )

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks: runs, verdicts, any new cases, changes around them, any figures.

        Their table has all that changed and 20 of the others; a line counts the rest.
        """
        sides = (("base", self.base), ("new", self.new))
        lines = [
            (name, f"{formatting.run_title(side.run)}, {formatting.when(side.run.started_at)}")
            for name, side in sides
        ]
        yield Listing(lines=lines, is_quoted=True)
        yield Listing(title="Verdicts", lines=[(name, side.headline) for name, side in sides])
        if self._new_cases:
            yield Listing(
                title="No longer healthy",
                lines=[(one.subject.name, words.reason_with_value(one)) for one in self._new_cases],
            )
        yield changes_listing("What changed around them", self.changes)
        changed = sum(one.verdict != SAME for one in self.figures)
        if not self.figures:
            return
        yield _figure_table(
            self.figures[: changed + _MOST_SAME],
            (ShownColumn(title="base"), lambda change: number(change.base, 3)),
            (ShownColumn(title="new"), lambda change: number(change.values[-1], 3)),
            (ShownColumn(title="change"), lambda change: change_percent(change.relative_change)),
            (
                ShownColumn(title="slower from", drop=0),
                lambda one: f"{one.limit:.0f}x" if one.limit >= 2 else f"{one.limit - 1:+.0%}",
            ),
        )
        if (hidden := len(self.figures) - changed - _MOST_SAME) > 0:
            yield hidden_line(hidden)
        yield Line(text=_LEGEND, tone="aside", is_apart=True)

    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object.

        base, new (runs), headline, headline_base, headline_new, is_regression, changes (of the
        environment), figures (`FigureChange.members`).
        """
        return {
            "base": asdict(self.base.run),
            "new": asdict(self.new.run),
            "headline": self.title,
            "headline_base": self.base.headline,
            "headline_new": self.new.headline,
            "is_regression": self.is_regression,
            "changes": [asdict(one) for one in self.changes],
            "figures": [one.members for one in self.figures],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthHistory(Document):
    """The document of the figures of all health checks, as of `trace_figures`.

    run_ids: of the checks, the oldest first.
    """

    figures: Sequence[FigureChange]
    run_ids: Sequence[str]

    @property
    def title(self) -> str:
        """Return how many figures there are, and how many are slower when last tested."""
        slower = sum(one.verdict == SLOWER for one in self.figures)
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
        """Return the members of JSON: checks (run ids), figures (`FigureChange.members`)."""
        return {"checks": list(self.run_ids), "figures": [one.members for one in self.figures]}
