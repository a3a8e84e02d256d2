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

_ORDER = (SLOWER, FASTER, UNCLEAR, SAME)
_NAMES = (*EXECUTION, "world_size")
# A variable may hold a long list; JSON has all of it.
_MOST_CHARS = 60
_MOST_ROWS = 60
_MOST_LEFT_OUT = 3
# The short form has so many lines, points, and other entries of each kind.
_SCREEN = 24
_MOST_IN_SHORT, _LEAST_IN_SHORT, _MOST_OTHERS_IN_SHORT = 10, 3, 1
# Runs a side with which a regression of 5 % is found on most machines:
# docs/explanation/statistics.md.
_ENOUGH_RUNS = 3
# A slowdown of so much that is not excluded is named in the answer.
_BLIND = 0.1


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps its rows
class Comparison(Document):
    """Two sides, compared: a document (see `raybench.report.documents`)."""

    # The runs of each side, one or more, the newest last.
    base: Sequence[Run]
    new: Sequence[Run]
    # How the user named each side, and whether both names were tags.
    words: tuple[str, str]
    are_tags: bool
    # As `raybench.analysis.compare.compare` takes and returns them.
    threshold: float
    points: Sequence[ComparedPoint]
    # Differences of the environment, from the newest of `base` to the newest of `new`.
    changes: Sequence[Change]
    # point_id -> what else changed there, between the same two runs.
    beside: Mapping[str, Sequence[PointChange]]
    # Id of a run with the tag of a side that differs by more than its start -> what differs.
    left_out: Mapping[str, Sequence[Fact]] = field(default_factory=dict)
    # Figures of the two newest runs that cannot be true: ("BASE POINT_ID" or "NEW POINT_ID", why).
    impossible: Sequence[tuple[str, str]] = ()
    # The devices of the two newest runs; empty if unknown.
    machines: tuple[str, str] = ("", "")
    # What a rank is called in the plural: `GPUs` or `workers`.
    ranks: str = "ranks"
    # Options other than the sides and --full that repeat this comparison.
    options: Sequence[str] = ()
    # Whether `blocks` fits a screen.
    is_short: bool = False

    @cached_property
    def rows(self) -> list[ComparedPoint]:
        """Return points: slower, faster, unclear (largest changes first), same, no verdict."""
        return sorted(self.points, key=_urgency)

    @cached_property
    def compared(self) -> list[ComparedPoint]:
        """Return the points that have a rate on both sides, in the order of `rows`."""
        return [row for row in self.rows if row.verdict is not None]

    @property
    def verdicts(self) -> Counter[str]:
        """Count the verdicts of `compared`."""
        return Counter(row.verdict for row in self.compared if row.verdict)

    @property
    def broken(self) -> list[ComparedPoint]:
        """Return the points of both sides that fail in a larger share of the rounds of NEW."""
        return [row for row in self.rows if row.base_runs and row.new_failed > row.base_failed]

    @property
    def is_regression(self) -> bool:
        """Return whether a point is slower, or fails more often, in NEW."""
        return bool(self.verdicts[SLOWER] or self.broken)

    @property
    def has_one_run(self) -> bool:
        """Return whether no compared point has two ok runs on each side."""
        counts = [min(row.base_runs, row.new_runs) for row in self.compared]
        return bool(counts) and max(counts) < LEAST_RUNS

    def is_blind(self, change: float) -> bool:
        """Return whether any point may be slower by more than `change` (0.1: 10 %) unnoticed.

        A point without an interval may be slower by any amount. Points that are called slower, are
        `broken` or are only in NEW are left out.
        """
        return any(share > change for share in self._unseen())

    def _unseen(self) -> list[float]:
        """Return by which share each point may be slower unnoticed; inf without an interval."""
        return [
            math.inf if row.ratio_low is None else 1 - row.ratio_low
            for row in self.rows
            if row.base_runs and row.verdict != SLOWER and row.new_failed <= row.base_failed
        ]

    @property
    def obstacles(self) -> tuple[NotDecided, ...]:
        """Return how devices or node counts differ, each difference once."""
        reasons = (row.why for row in self.compared)
        return tuple(dict.fromkeys(why for why in reasons if why and why.kind.is_obstacle))

    @property
    def title(self) -> str:
        """Return the question."""
        return words.QUESTION

    @cached_property
    def answer(self) -> tuple[str, ...]:
        """Return the sentences that answer the question: verdicts, and how sure they are."""
        sentences = []
        if self.obstacles:
            obstacles = "; ".join(map(not_decided, self.obstacles))
            sentences += [f"Not comparable: {obstacles}.", words.OTHER_MACHINE]
        if not self.compared:
            sentences.append(words.NOT_ON_BOTH_SIDES)
        elif self.has_one_run and not self.obstacles:
            sentences += words.one_run(self._sides_of_one_run())
        if self.broken:
            sentences.append(words.more_failures(len(self.broken)))
        if self.compared and not self.has_one_run:
            sentences += self._verdict_sentences()
        elif len(self.compared) > 1 and not self.obstacles:
            sentences.append(words.median_change(self._median_change, self.unit))
        return tuple(filter(None, sentences))

    def _verdict_sentences(self) -> Iterator[str]:
        """Yield how many points have which verdict, and what these runs can detect."""
        rows, verdicts = self.compared, self.verdicts
        slower = verdicts[SLOWER]
        if len(rows) == 1:
            yield words.single_point(rows[0].verdict or UNCLEAR, _change_of(rows[0]), self.unit)
        else:
            first = words.verdict_count(verdicts, len(rows))
            if slower:
                worst = rows[0]
                first += f" {words.worst_point(self.name(worst), -_change_of(worst), worst.unit)}"
            yield first
            others = words.other_verdicts(verdicts, len(rows))
            yield f"{others} {words.median_change(self._median_change)}".strip()
        unseen = self._unseen()
        finite = [share for share in unseen if share != math.inf]
        if (most := max(finite, default=0.0)) > _BLIND:
            yield words.not_excluded(most, has_slower=bool(slower))
        if unknown := len(unseen) - len(finite):
            yield words.not_judged(unknown)
        if shares := [row.least_seen for row in rows if row.least_seen is not None]:
            yield words.detectable(shares, self.unit)

    @property
    def _median_change(self) -> float:
        """Return the median change of the rates of `compared`, which is not empty."""
        return float(np.median([row.ratio for row in self.compared])) - 1

    def _sides_of_one_run(self) -> list[str]:
        """Return the sides, BASE or NEW, on which no point has two ok runs."""
        counts = {
            "BASE": [row.base_runs for row in self.compared],
            "NEW": [row.new_runs for row in self.compared],
        }
        return [side for side, runs in counts.items() if max(runs) < LEAST_RUNS]

    def name(self, row: ComparedPoint) -> str:
        """Return the distinguishing settings of a compared point: `fp32, batch 64, 4 GPUs`."""
        return short_name(row, self._distinguishing, self.ranks) or row.point_id

    @cached_property
    def _distinguishing(self) -> list[str]:
        return distinguishing_settings(self.compared)

    def blocks(self) -> Iterator[Block]:
        """Yield runs, answer, differences, points and failures; fewer of them if `is_short`."""
        terms = Line(text=point_and_round([]), tone="aside")
        lines = [*(Line(text=text) for text in self.runs), terms, *self._answer_lines()]
        advice = [Line(text=text) for text in self._advice()]
        if self.is_short:
            yield from self._short(lines, advice)
            return
        yield from lines
        yield from advice
        if self.compared:
            table = self._table(max(len(self.compared) - self.verdicts[SAME], _MOST_ROWS))
            yield table
            if hidden := len(self.compared) - len(table.rows):
                yield hidden_line(hidden)
        reasons = Counter(not_decided(row.why) for row in self.compared if row.why is not None)
        if reasons and not self.obstacles and not self.has_one_run:
            pairs = [(counted(count, "point"), text) for text, count in reasons.items()]
            yield Listing(title="Why points are undecided", lines=pairs)
        yield changes_listing("Environment differences", self.changes)
        parts = []
        for row in self.compared:
            changes = self.beside.get(row.point_id)
            if changes and abs(_change_of(row)) > self.threshold:
                parts.append((self.name(row), "; ".join(map(words.point_change, changes))))
        if parts:
            title = "Parts of the step with the largest changes"
            yield Listing(title=title, lines=parts, is_quoted=True)
        if failed := self._failed():
            yield failed
        if self.impossible:
            yield Listing(title="Impossible values", lines=self.impossible, is_quoted=True)
        if len(self.base) > 1 or len(self.new) > 1:
            ids = []
            for side, runs in (("BASE", self.base), ("NEW", self.new)):
                ids.append((side, ", ".join(run.run_id for run in runs)))
            yield Listing(title="Runs", lines=ids, is_quoted=True)
        yield Legend()

    def _short(self, lines: Sequence[Line], advice: Sequence[Line]) -> Iterator[Block]:
        """Yield `lines`, the points that changed most, failures, advice and the next command."""
        yield from lines
        failed = self._failed()
        if failed:
            failed = Listing(title=failed.title, lines=failed.lines[:3], is_quoted=True)
            yield failed
        # Blank lines, the title and the head of the table, and the last line.
        used = [line.text for line in (*lines, *advice)]
        free = _SCREEN - sum(-(-len(text) // WIDTH) for text in used) - 7
        free -= 2 + len(failed.lines) if failed else 0
        if self.compared:
            yield self._table(max(_LEAST_IN_SHORT, min(_MOST_IN_SHORT, free)))
        for index, line in enumerate(advice):
            yield Line(text=line.text, is_apart=index == 0)
        following = formatting.command("compare", *self.words, *self.options, "--full")
        if len(f"Next: {following}") > WIDTH:
            following = "repeat this command with --full"
        text = f"Next: {following}"
        yield Line(text=text, tone="aside", is_apart=not advice, is_whole=True)

    @cached_property
    def runs(self) -> tuple[str, ...]:
        """Return a line for the runs of each side, and for the machines on which they ran."""
        lines = []
        sides = (("BASE", self.base, self.words[0]), ("NEW", self.new, self.words[1]))
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

    def _answer_lines(self) -> Iterator[Line]:
        """Yield the answer, the points of one side alone, and the environment."""
        tone: Tone = "alarm" if self.obstacles or self.is_regression else "strong"
        for index, text in enumerate(self.answer):
            first = index == 0
            yield Line(text=text, tone=tone if first else "plain", is_apart=first)
        yield from (Line(text=text) for text in self._one_sided())
        if self.is_short:
            yield Line(text=words.environment(self.changes))
            if self.impossible:
                text = words.impossible(*self.impossible[0], len(self.impossible) - 1)
                yield Line(text=text, tone="advice")

    def _failed(self) -> Listing | None:
        """Return how points ended that fail more often in NEW, or have no rate on one side."""
        broken = self.broken
        failed = [row for row in self.rows if row in broken or not (row.verdict or _lacks(row))]
        if not failed:
            return None
        ends = [
            f"BASE: {_status_words(row.status_base)}; NEW: {_status_words(row.status_new)}"
            for row in failed
        ]
        pairs = list(zip(point_names(failed), ends, strict=True))
        return Listing(title="Failed on one side", lines=pairs, is_quoted=True)

    @property
    def unit(self) -> str:
        """Return the unit of the rates of `compared`."""
        return " or ".join(sorted({row.unit for row in self.compared}))

    @cached_property
    def _lone(self) -> dict[str, list[ComparedPoint]]:
        """Return the points that exist on a single side, by the side that lacks them."""
        lone: dict[str, list[ComparedPoint]] = {"new": [], "base": []}
        for row in self.rows:
            if side := _lacks(row):
                lone[side].append(row)
        return lone

    @cached_property
    def _apart(self) -> list[str]:
        """Return the settings in which the points without a partner differ between the sides."""
        only_base, only_new = self._lone["new"], self._lone["base"]
        if not only_base or not only_new:
            return []
        apart = []
        for name in varying([*only_base, *only_new], params_first=True):
            base_values = {str(setting_of(row, name)) for row in only_base}
            if base_values.isdisjoint(str(setting_of(row, name)) for row in only_new):
                apart.append(name)
        return apart

    def _one_sided(self) -> list[str]:
        """Return why points are not compared, and in what the points of one side differ.

        Empty where all points are compared.
        """
        lone, apart = self._lone, list(map(formatting.heading, self._apart))
        failed = [row for row in self.rows if not (row.verdict or _lacks(row))]
        counts = words.PointCounts(
            compared=len(self.compared),
            only_base=len(lone["new"]),
            only_new=len(lone["base"]),
            failed=len(failed),
        )
        return words.missing_points(counts, apart)

    def _advice(self) -> Iterator[str]:
        """Yield what would decide points that are undecided, and which runs are left out."""
        if self.verdicts[UNCLEAR] and not self.obstacles:
            runs = max(_ENOUGH_RUNS, min(len(self.base), len(self.new)) + 2)
            tags = self.words if self.are_tags else None
            yield from words.more_runs(runs, tags)
        most = _MOST_OTHERS_IN_SHORT if self.is_short else _MOST_LEFT_OUT
        for run_id, facts in [*self.left_out.items()][:most]:
            yield words.left_out(run_id, facts)
        if (more := len(self.left_out) - most) > 0:
            verb = "is" if more == 1 else "are"
            yield f"{counted(more, 'more run')} of these tags {verb} left out."

    def _table(self, most: int) -> Table:
        """Return the table of the first `most` points of `compared`."""
        rows = self.compared[:most]
        unit = self.unit
        has_intervals = any(row.interval_low is not None for row in rows)

        def verdict(row: ComparedPoint) -> Cell:
            name = row.verdict or UNCLEAR
            is_sure = row.why is None or row.interval_low is not None
            return Cell(
                text=VERDICT_WORDS[name], tone=_TONES.get(name, "plain") if is_sure else "plain"
            )

        columns: list[ColumnOf[ComparedPoint]] = [
            *self._setting_columns(),
            column(f"BASE {unit}", lambda row: formatting.number(row.base), drop=1),
            column("NEW", lambda row: formatting.number(row.new), drop=2),
            column("change", _change),
            column("verdict", verdict, is_text=True),
        ]
        if not self.is_short:
            columns.insert(-1, column("detectable", _detectable, meaning=_SEEN, drop=0))
        hidden = len(self.compared) - len(rows)
        which = f", {len(rows)} largest of {len(self.compared)}" if hidden else ""
        interval = ", ± half its 95 % interval between runs" if has_intervals else ""
        kind = f"Change of {unit}{interval}{which}"
        note = _EXPLANATION.format(f"{100 * self.threshold:g} %")
        return make_table(rows, columns, kind=kind, note=note)

    def _setting_columns(self) -> list[ColumnOf[Any]]:
        """Return the settings that vary, and settings that keep points from having a partner."""
        columns = setting_columns(self.compared, ranks=self.ranks)
        varied = varying(self.compared)
        apart = [name for name in self._apart if name not in varied]
        return [*columns, *setting_columns(self.compared, apart, self.ranks)]

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        Runs are in the order of time. `obstacles` and `why` of a point are a `NotDecided` with its
        text; `verdicts` are counts above 0.
        """
        points = []
        for row in self.points:
            why = None if row.why is None else _members_of(row.why)
            beside = [asdict(change) for change in self.beside.get(row.point_id, ())]
            points.append({**vars(row), "why": why, "beside": beside})
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
            "obstacles": list(map(_members_of, self.obstacles)),
            "changes": [asdict(change) for change in self.changes],
            "verdicts": dict(self.verdicts),
            "impossible": [{"point": name, "text": text} for name, text in self.impossible],
            "points": points,
        }


def _members_of(why: NotDecided) -> dict[str, Any]:
    return {**asdict(why), "text": not_decided(why)}


_SEEN = "the slowdown of this point alone that such runs find in 95 % of cases"
_EXPLANATION = (
    "For each side, the mean of its runs is compared. samples/s are computed from the mean step; "
    "a workload without samples is compared by steps/s. Slower and faster: the change is larger "
    "than {0}, and chance alone is an unlikely cause. If nothing changed, in about 2 of 100 "
    "such comparisons of all points, some point would be called slower by mistake, and in about 2 "
    "some point would be called faster. "
    "Same: the change lies within ±{0}, at 95 % certainty. Undecided: none of these is certain."
)


def changes_listing(title: str, changes: Sequence[Change]) -> Listing:
    """Return a listing of each change, its values cut to 60 characters."""
    lines = [(fact_name(change.fact), before_and_now(change, _MOST_CHARS)) for change in changes]
    return Listing(title=title, lines=lines, is_quoted=True, otherwise=words.SAME_AROUND)


def _urgency(row: ComparedPoint) -> tuple[Any, ...]:
    """Return the sort key of `Comparison.rows`."""
    rank = _ORDER.index(row.verdict) if row.verdict in _ORDER else len(_ORDER)
    has_changed = row.verdict != SAME and row.ratio is not None and row.verdict is not None
    size = -abs(_change_of(row)) if has_changed else 0
    return (rank, size, *(setting_order(setting_of(row, name)) for name in (*_NAMES, "batch")))


def change_percent(relative: float | None) -> str:
    """Return a relative change (0.0213) as `+2.13%`, from 9.95 % on `+12.3%`; "" for None."""
    return "" if relative is None else f"{relative:+.{1 if abs(relative) >= 0.0995 else 2}%}"


_TONES: dict[str, Tone] = {SLOWER: "alarm", FASTER: "good", UNCLEAR: "advice"}


def _change_of(row: ComparedPoint) -> float:
    """Return the relative change of the rate, below 0 if slower; 0 if unknown."""
    return 0.0 if row.ratio is None else row.ratio - 1


def _change(row: ComparedPoint) -> str:
    """Write the change of the rate and half its 95 % interval, as `+2.1% ±0.4%`."""
    if row.interval_low is None or row.interval_high is None:
        return change_percent(_change_of(row))
    half = formatting.half_width((row.interval_high - row.interval_low) / 2)
    return f"{change_percent(_change_of(row))} {half}"


def _detectable(row: ComparedPoint) -> str:
    return formatting.percent(row.least_seen)


def _status_words(status: Status | None) -> str:
    return "not measured" if status is None else status.label


def _lacks(row: ComparedPoint) -> str:
    """Return the side, `base` or `new`, that has no row of the point, or ""."""
    return "base" if row.status_base is None else "new" if row.status_new is None else ""


def hidden_line(hidden: int) -> Line:
    """Return the line that counts hidden points without a change."""
    return Line(text=f"and {hidden} more that are the same; `--format json` has all")
