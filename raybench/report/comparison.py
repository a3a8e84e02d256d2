"""Two sides of runs that are compared, as a document: verdicts, changes and the table of points."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from raybench.analysis.compare import (
    FASTER,
    LEAST_RUNS,
    SAME,
    SLOWER,
    UNCLEAR,
    Change,
    ComparedPoint,
    Fact,
    NotDecided,
    PointChange,
)
from raybench.analysis.rows import (
    EXECUTION,
    distinguishing_settings,
    setting_of,
    setting_order,
    varying,
)
from raybench.records.status import Status
from raybench.report import formatting
from raybench.report.documents import (
    WIDTH,
    Block,
    Cell,
    ColumnOf,
    Document,
    Legend,
    Line,
    Listing,
    Table,
    Tone,
    column,
    make_table,
)
from raybench.report.formatting import counted
from raybench.report.point_settings import point_names, setting_columns, short_name
from raybench.report.words import compare as words
from raybench.report.words.answer import point_and_round
from raybench.report.words.compare import VERDICT_WORDS, before_and_now, fact_name, not_decided
from raybench.results.tables import Run

# The most important verdict first.
_VERDICT_ORDER = (SLOWER, FASTER, UNCLEAR, SAME)
# Points with the same verdict and change are sorted by these settings.
_SORT_SETTINGS = (*EXECUTION, "world_size", "batch")
# Longest value of an environment variable; JSON has all of it.
_MOST_CHARS = 60
_MOST_ROWS = 60
_MOST_LEFT_OUT = 3
# The short form fits a screen: its lines, its points, and the runs that it names as left out.
_SCREEN_LINES = 24
_MOST_IN_SHORT, _LEAST_IN_SHORT, _MOST_LEFT_OUT_IN_SHORT = 10, 3, 1
# Blank lines, title and heading of the table, and the last line of the short form.
_FIXED_LINES = 7
# Runs a side that find a regression of 5 % on most machines: docs/explanation/statistics.md.
_ENOUGH_RUNS = 3
# The answer names a slowdown that is not excluded if it is larger than this share.
_LARGE_SLOWDOWN = 0.1


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps its rows
class Comparison(Document):
    """The comparison of two sides of runs, as a document."""

    # The runs of each side, at least one, the newest last.
    base: Sequence[Run]
    new: Sequence[Run]
    # The names of both sides that the user gave, and whether both are tags.
    side_names: tuple[str, str]
    are_tags: bool
    # Smaller relative changes are ignored.
    threshold: float
    points: Sequence[ComparedPoint]
    # Differences of the environment, between the newest runs of both sides.
    changes: Sequence[Change]
    # point_id -> parts and clocks of the point that changed, between the newest runs.
    point_changes: Mapping[str, Sequence[PointChange]]
    # Id of a run that has the tag of a side and is not compared -> facts in which it differs.
    left_out: Mapping[str, Sequence[Fact]] = field(default_factory=dict)
    # Values of the newest runs that cannot be true: ("BASE POINT_ID" or "NEW POINT_ID", why).
    impossible: Sequence[tuple[str, str]] = ()
    # The devices of the newest runs; "" if unknown.
    machines: tuple[str, str] = ("", "")
    # `GPUs` or `workers`.
    ranks: str = "ranks"
    # Options that repeat this comparison, without the sides and --full.
    options: Sequence[str] = ()
    # Whether `blocks` yields only what fits a screen.
    is_short: bool = False

    @cached_property
    def rows(self) -> list[ComparedPoint]:
        """Return all points sorted by verdict, slower first, then by the size of the change."""
        return sorted(self.points, key=_sort_key)

    @cached_property
    def compared(self) -> list[ComparedPoint]:
        """Return the points that have a rate on both sides, in the order of `rows`."""
        return [row for row in self.rows if row.verdict is not None]

    @property
    def verdicts(self) -> Counter[str]:
        """Count the verdicts of `compared`."""
        return Counter(row.verdict for row in self.compared if row.verdict)

    @property
    def failing_more_often(self) -> list[ComparedPoint]:
        """Return the points that fail in a larger share of their rounds in NEW than in BASE."""
        return [row for row in self.rows if row.base_runs and row.new_failed > row.base_failed]

    @property
    def is_regression(self) -> bool:
        """Return whether a point is slower, or fails more often, in NEW."""
        return bool(self.verdicts[SLOWER] or self.failing_more_often)

    @property
    def has_one_run(self) -> bool:
        """Return whether no compared point has two ok runs on each side."""
        counts = [min(row.base_runs, row.new_runs) for row in self.compared]
        return bool(counts) and max(counts) < LEAST_RUNS

    def is_blind(self, change: float) -> bool:
        """Return whether a point may be slower by more than a share `change` without a verdict."""
        return any(slowdown > change for slowdown in self._slowdowns_not_excluded())

    def _slowdowns_not_excluded(self) -> list[float]:
        """Return the largest slowdown, as a share, that each unnoticed point may have, or inf."""
        slowdowns = []
        for row in self.rows:
            is_noticed = row.verdict == SLOWER or row.new_failed > row.base_failed
            # A point without an ok run in BASE cannot become slower.
            if row.base_runs and not is_noticed:
                # The lower end of the interval of NEW / BASE.
                slowdowns.append(math.inf if row.ratio_low is None else 1 - row.ratio_low)
        return slowdowns

    @property
    def obstacles(self) -> tuple[NotDecided, ...]:
        """Return the different devices or node counts that make the sides incomparable."""
        reasons = (row.why for row in self.compared)
        return tuple(dict.fromkeys(why for why in reasons if why and why.kind.is_obstacle))

    @property
    def title(self) -> str:
        """Return the question that the comparison answers."""
        return words.QUESTION

    @cached_property
    def answer(self) -> tuple[str, ...]:
        """Return the sentences that answer the question: verdicts and their certainty."""
        sentences = []
        if self.obstacles:
            obstacles = "; ".join(map(not_decided, self.obstacles))
            sentences += [f"Not comparable: {obstacles}.", words.OTHER_MACHINE]
        if not self.compared:
            sentences.append(words.NOT_ON_BOTH_SIDES)
        elif self.has_one_run and not self.obstacles:
            sentences += words.one_run(self._sides_of_one_run())
        if self.failing_more_often:
            sentences.append(words.more_failures(len(self.failing_more_often)))
        if self.compared and not self.has_one_run:
            sentences += self._verdict_sentences()
        elif len(self.compared) > 1 and not self.obstacles:
            sentences.append(words.median_change(self._median_change, self.unit))
        return tuple(filter(None, sentences))

    def _verdict_sentences(self) -> Iterator[str]:
        """Yield how many points have which verdict, and what these runs can detect."""
        rows, verdicts = self.compared, self.verdicts
        has_slower = bool(verdicts[SLOWER])
        # The first point has the most important verdict and the largest change.
        worst, change = rows[0], _relative_change(rows[0])
        if len(rows) == 1:
            yield words.single_point(worst.verdict or UNCLEAR, change, self.unit)
        else:
            first = words.verdict_count(verdicts, len(rows))
            if has_slower:
                first += f" {words.worst_point(self.name(worst), -change, worst.unit)}"
            yield first
            others = words.other_verdicts(verdicts, len(rows))
            yield f"{others} {words.median_change(self._median_change)}".strip()
        # One for each point that is neither slower nor fails more often; inf: too few runs.
        slowdowns = self._slowdowns_not_excluded()
        known = [slowdown for slowdown in slowdowns if slowdown != math.inf]
        largest = max(known, default=0.0)
        if largest > _LARGE_SLOWDOWN:
            yield words.not_excluded(largest, has_slower=has_slower)
        if unknown := len(slowdowns) - len(known):
            yield words.not_judged(unknown)
        # `least_seen` is the smallest slowdown that the runs of a point can show.
        if detectable := [row.least_seen for row in rows if row.least_seen is not None]:
            yield words.detectable(detectable, self.unit)

    @property
    def _median_change(self) -> float:
        """Return the median relative change of the rates; at least one point must be compared."""
        return float(np.median([row.ratio for row in self.compared])) - 1

    def _sides_of_one_run(self) -> list[str]:
        """Return the sides, BASE or NEW, on which no point has two ok runs."""
        runs_of_points = {
            "BASE": [row.base_runs for row in self.compared],
            "NEW": [row.new_runs for row in self.compared],
        }
        return [side for side, runs in runs_of_points.items() if max(runs) < LEAST_RUNS]

    def name(self, row: ComparedPoint) -> str:
        """Return the distinguishing settings of a compared point: `fp32, batch 64, 4 GPUs`."""
        return short_name(row, self._distinguishing, self.ranks) or row.point_id

    @cached_property
    def _distinguishing(self) -> list[str]:
        return distinguishing_settings(self.compared)

    def blocks(self) -> Iterator[Block]:
        """Yield runs, answer, differences, points and failures; fewer of them if `is_short`."""
        # What the words point and round mean.
        terms = Line(text=point_and_round(rows=[]), tone="aside")
        head = [*(Line(text=text) for text in self.runs), terms, *self._head_lines()]
        advice = [Line(text=text) for text in self._advice()]
        if self.is_short:
            yield from self._short_blocks(head, advice)
            return
        yield from head
        yield from advice
        if self.compared:
            # Points with a change are all shown.
            changed = len(self.compared) - self.verdicts[SAME]
            table = self._points_table(max(changed, _MOST_ROWS))
            yield table
            if hidden := len(self.compared) - len(table.rows):
                yield hidden_line(hidden)
        reasons = Counter(not_decided(row.why) for row in self.compared if row.why is not None)
        if reasons and not self.obstacles and not self.has_one_run:
            lines = [(counted(count, "point"), text) for text, count in reasons.items()]
            yield Listing(title="Why points are undecided", lines=lines)
        yield changes_listing("Environment differences", self.changes)
        parts = []
        for row in self.compared:
            changes = self.point_changes.get(row.point_id)
            if changes and abs(_relative_change(row)) > self.threshold:
                parts.append((self.name(row), "; ".join(map(words.point_change, changes))))
        if parts:
            title = "Parts of the step with the largest changes"
            yield Listing(title=title, lines=parts, is_quoted=True)
        if failed := self._failures_listing():
            yield failed
        if self.impossible:
            yield Listing(title="Impossible values", lines=self.impossible, is_quoted=True)
        if len(self.base) > 1 or len(self.new) > 1:
            ids = []
            for side, runs in (("BASE", self.base), ("NEW", self.new)):
                ids.append((side, ", ".join(run.run_id for run in runs)))
            yield Listing(title="Runs", lines=ids, is_quoted=True)
        yield Legend()

    def _short_blocks(self, head: Sequence[Line], advice: Sequence[Line]) -> Iterator[Block]:
        """Yield `head`, failures, the points that changed most, advice and the next command."""
        yield from head
        used_lines = _FIXED_LINES  # blank lines, heading of the table and the last line
        for line in (*head, *advice):
            used_lines += math.ceil(len(line.text) / WIDTH)
        failed = self._failures_listing()
        if failed:
            # Name only three failed points, to leave room for the table.
            failed = Listing(title=failed.title, lines=failed.lines[:3], is_quoted=True)
            yield failed
            # A blank line and the title.
            used_lines += 2 + len(failed.lines)
        if self.compared:
            free_lines = _SCREEN_LINES - used_lines
            yield self._points_table(max(_LEAST_IN_SHORT, min(_MOST_IN_SHORT, free_lines)))
        for index, line in enumerate(advice):
            yield Line(text=line.text, is_apart=index == 0)
        following = formatting.command("compare", *self.side_names, *self.options, "--full")
        if len(f"Next: {following}") > WIDTH:
            following = "repeat this command with --full"
        text = f"Next: {following}"
        yield Line(text=text, tone="aside", is_apart=not advice, is_whole=True)

    @cached_property
    def runs(self) -> tuple[str, ...]:
        """Return a line for the runs of each side, and for the machines of the runs."""
        lines = []
        sides = (("BASE", self.base, self.side_names[0]), ("NEW", self.new, self.side_names[1]))
        for side, runs, name in sides:
            newest = formatting.run_title(runs[-1])
            if len(runs) == 1:
                lines.append(f"{side}: {newest}, {formatting.when(runs[-1].started_at)}")
            else:
                tag = f" with {name}" if self.are_tags else ""
                lines.append(f"{side}: {len(runs)} runs{tag}, the newest is {newest}")
        base, new = self.machines
        texts = [base] if base == new else [f"BASE ran on {base}", f"NEW ran on {new}"]
        return (*lines, *filter(None, texts))

    def _head_lines(self) -> Iterator[Line]:
        """Yield the answer and points that are not compared; if `is_short`, the environment too."""
        tone: Tone = "alarm" if self.obstacles or self.is_regression else "strong"
        for index, text in enumerate(self.answer):
            is_first = index == 0
            yield Line(text=text, tone=tone if is_first else "plain", is_apart=is_first)
        yield from (Line(text=text) for text in self._missing_points())
        if self.is_short:
            yield Line(text=words.environment(self.changes))
            if self.impossible:
                text = words.impossible(*self.impossible[0], len(self.impossible) - 1)
                yield Line(text=text, tone="advice")

    def _failures_listing(self) -> Listing | None:
        """Return the status of points that fail more often in NEW, or have no rate on one side."""
        failing_more_often = self.failing_more_often
        failed = [row for row in self.rows if row in failing_more_often or _has_failed_side(row)]
        if not failed:
            return None
        statuses = []
        for row in failed:
            base, new = _status_words(row.status_base), _status_words(row.status_new)
            statuses.append(f"BASE: {base}; NEW: {new}")
        lines = list(zip(point_names(failed), statuses, strict=True))
        return Listing(title="Failed on one side", lines=lines, is_quoted=True)

    @property
    def unit(self) -> str:
        """Return the unit of the rates of `compared`."""
        return " or ".join(sorted({row.unit for row in self.compared}))

    @cached_property
    def _points_without_side(self) -> dict[str, list[ComparedPoint]]:
        """Return `base` and `new` -> the points that this side lacks."""
        points_without_side: dict[str, list[ComparedPoint]] = {"new": [], "base": []}
        for row in self.rows:
            if side := _missing_side(row):
                points_without_side[side].append(row)
        return points_without_side

    @cached_property
    def _separating_settings(self) -> list[str]:
        """Return the settings whose values differ between points only in BASE and only in NEW."""
        only_base, only_new = self._points_without_side["new"], self._points_without_side["base"]
        if not only_base or not only_new:
            return []
        names = []
        for name in varying([*only_base, *only_new], params_first=True):
            base_values = {str(setting_of(row, name)) for row in only_base}
            if base_values.isdisjoint(str(setting_of(row, name)) for row in only_new):
                names.append(name)
        return names

    def _missing_points(self) -> list[str]:
        """Return sentences on why points are not compared; [] if all points are."""
        counts = words.PointCounts(
            compared=len(self.compared),
            only_base=len(self._points_without_side["new"]),
            only_new=len(self._points_without_side["base"]),
            failed=sum(map(_has_failed_side, self.rows)),
        )
        return words.missing_points(
            counts, list(map(formatting.heading, self._separating_settings))
        )

    def _advice(self) -> Iterator[str]:
        """Yield what decides undecided points, and which runs are left out."""
        if self.verdicts[UNCLEAR] and not self.obstacles:
            # Two more runs a side than now, at least.
            runs = max(_ENOUGH_RUNS, min(len(self.base), len(self.new)) + 2)
            tags = self.side_names if self.are_tags else None
            yield from words.more_runs(runs, tags)
        most_named = _MOST_LEFT_OUT_IN_SHORT if self.is_short else _MOST_LEFT_OUT
        for run_id, facts in list(self.left_out.items())[:most_named]:
            yield words.left_out(run_id, facts)
        more = len(self.left_out) - most_named
        if more > 0:
            verb = "is" if more == 1 else "are"
            yield f"{counted(more, 'more run')} of these tags {verb} left out."

    def _points_table(self, most_rows: int) -> Table:
        """Return the table of the first points of `compared`."""
        rows = self.compared[:most_rows]
        unit = self.unit
        has_intervals = any(row.interval_low is not None for row in rows)

        def verdict_cell(row: ComparedPoint) -> Cell:
            verdict = row.verdict or UNCLEAR
            # A point that is undecided because it lacks runs has no colour.
            has_color = row.why is None or row.interval_low is not None
            tone = _TONES.get(verdict, "plain") if has_color else "plain"
            return Cell(text=VERDICT_WORDS[verdict], tone=tone)

        # A table that is too wide loses the column with the lowest `drop` first.
        columns: list[ColumnOf[ComparedPoint]] = [
            *self._setting_columns(),
            column(f"BASE {unit}", lambda row: formatting.number(row.base), drop=1),
            column("NEW", lambda row: formatting.number(row.new), drop=2),
            column("change", _change_text),
            column("verdict", verdict_cell, is_text=True),
        ]
        if not self.is_short:
            detectable = column("detectable", _detectable_text, meaning=_DETECTABLE_MEANING, drop=0)
            columns.insert(-1, detectable)  # before the verdict
        hidden = len(self.compared) - len(rows)
        which = f", {len(rows)} largest of {len(self.compared)}" if hidden else ""
        interval = ", ± half its 95 % interval between runs" if has_intervals else ""
        kind = f"Change of {unit}{interval}{which}"
        note = _VERDICTS_NOTE.format(f"{100 * self.threshold:g} %")
        return make_table(rows, columns, kind=kind, note=note)

    def _setting_columns(self) -> list[ColumnOf[Any]]:
        """Return the columns of settings that vary or that separate the sides."""
        columns = setting_columns(self.compared, ranks_noun=self.ranks)
        varying_names = varying(self.compared)
        separating = [name for name in self._separating_settings if name not in varying_names]
        return [*columns, *setting_columns(self.compared, separating, self.ranks)]

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object."""
        points = []
        for row in self.points:
            why = None if row.why is None else _members_of_reason(row.why)
            point_changes = [asdict(change) for change in self.point_changes.get(row.point_id, ())]
            points.append({**vars(row), "why": why, "beside": point_changes})
        return {
            "base": [asdict(run) for run in self.base],
            "new": [asdict(run) for run in self.new],
            "question": self.title,
            "answer": list(self.answer),
            "threshold": self.threshold,
            "left_out": [
                {"run_id": run_id, "differs_in": facts} for run_id, facts in self.left_out.items()
            ],
            "comparable": not self.obstacles,
            "obstacles": list(map(_members_of_reason, self.obstacles)),
            "changes": [asdict(change) for change in self.changes],
            "verdicts": dict(self.verdicts),
            "impossible": [{"point": name, "text": text} for name, text in self.impossible],
            "points": points,
        }


def _members_of_reason(why: NotDecided) -> dict[str, Any]:
    return {**asdict(why), "text": not_decided(why)}


_DETECTABLE_MEANING = "the slowdown of this point alone that such runs find in 95 % of cases"
_VERDICTS_NOTE = (
    "For each side, the mean of its runs is compared. samples/s are computed from the mean step; "
    "a workload without samples is compared by steps/s. Slower and faster: the change is larger "
    "than {0}, and chance alone is an unlikely cause. If nothing changed, in about 2 of 100 "
    "such comparisons of all points, some point would be called slower by mistake, and in about 2 "
    "some point would be called faster. "
    "Same: the change lies within ±{0}, at 95 % certainty. Undecided: none of these is certain."
)


def changes_listing(title: str, changes: Sequence[Change]) -> Listing:
    """Return a listing of changes, with values of at most 60 characters."""
    lines = [(fact_name(change.fact), before_and_now(change, _MOST_CHARS)) for change in changes]
    return Listing(title=title, lines=lines, is_quoted=True, otherwise=words.SAME_AROUND)


def _sort_key(row: ComparedPoint) -> tuple[Any, ...]:
    """Return the sort key of points: verdict, largest change first, settings."""
    # Points without a verdict come last.
    verdict_place, minus_size = len(_VERDICT_ORDER), 0.0
    if row.verdict in _VERDICT_ORDER:
        verdict_place = _VERDICT_ORDER.index(row.verdict)
        # Points that are the same are sorted only by their settings.
        if row.verdict != SAME:
            minus_size = -abs(_relative_change(row))
    settings = [setting_order(setting_of(row, name)) for name in _SORT_SETTINGS]
    return (verdict_place, minus_size, *settings)


def change_percent(relative: float | None) -> str:
    """Return a relative change as `+2.13%` or `+12.3%`; "" for None."""
    if relative is None:
        return ""
    # With one digit, 9.95 % is written as 10.0 %.
    digits = 1 if abs(relative) >= 0.0995 else 2
    return f"{relative:+.{digits}%}"


_TONES: dict[str, Tone] = {SLOWER: "alarm", FASTER: "good", UNCLEAR: "advice"}


def _relative_change(row: ComparedPoint) -> float:
    """Return the relative change of the rate, below 0 for a slowdown; 0 if unknown."""
    return 0.0 if row.ratio is None else row.ratio - 1


def _change_text(row: ComparedPoint) -> str:
    """Return the change of the rate and half its 95 % interval, as `+2.1% ±0.4%`."""
    if row.interval_low is None or row.interval_high is None:
        return change_percent(_relative_change(row))
    half = formatting.half_width((row.interval_high - row.interval_low) / 2)
    return f"{change_percent(_relative_change(row))} {half}"


def _detectable_text(row: ComparedPoint) -> str:
    return formatting.percent(row.least_seen)


def _status_words(status: Status | None) -> str:
    return "not measured" if status is None else status.label


def _missing_side(row: ComparedPoint) -> str:
    """Return the side that lacks the point, `base` or `new`; "" if both have it."""
    if row.status_base is None:
        return "base"
    return "new" if row.status_new is None else ""


def _has_failed_side(row: ComparedPoint) -> bool:
    """Return whether both sides have the point, but a side measured no rate."""
    return row.verdict is None and not _missing_side(row)


def hidden_line(hidden: int) -> Line:
    """Return the line that counts unchanged points which are not shown."""
    return Line(text=f"and {hidden} more that are the same; `--format json` has all")
