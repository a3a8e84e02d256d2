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
    FALSE_VERDICTS,
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
from raybench.analysis.rows import EXECUTION, setting, setting_order, varying
from raybench.records import Status
from raybench.report import formatting
from raybench.report.documents import (
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
from raybench.report.formatting import counted, plain, shorten, span
from raybench.report.point_settings import point_names, setting_columns
from raybench.report.words.compare import (
    SAME_AROUND,
    fact_name,
    not_decided,
    point_change,
    verdict_word,
)
from raybench.results.tables import Run

_ORDER = (SLOWER, FASTER, UNCLEAR, SAME)
_NAMES = (*EXECUTION, "world_size")
# A variable may hold a long list; JSON has all of it.
_MOST_CHARS = 60
_MOST_ROWS = 60
_MOST_LEFT_OUT = 3
# Runs a side with which a regression of 5 % is found on most machines:
# docs/explanation/statistics.md.
_ENOUGH_RUNS = 3
# Where a slow-down of so much could have been missed, that is said first.
_BLIND = 0.1


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps its rows
class Comparison(Document):
    """Two sides, compared: a document (see `raybench.report.documents`).

    base, new: the runs of each side, one or more, the newest last. words: how the user named each.
    threshold, points: as `raybench.analysis.compare.compare` takes and gives them. changes: of the
    environment, from the newest of `base` to the newest of `new`. beside: point_id -> what else
    changed there, between these two. left_out: id of a run that has the tag of a side, but is not
    compared, as more than its start differs -> what differs. impossible: figures of these two that
    cannot be true: ("base POINT_ID" or "new POINT_ID", why).
    """

    base: Sequence[Run]
    new: Sequence[Run]
    words: tuple[str, str]
    # Both sides were named by tags.
    are_tags: bool
    threshold: float
    points: Sequence[ComparedPoint]
    changes: Sequence[Change]
    beside: Mapping[str, Sequence[PointChange]]
    left_out: Mapping[str, Sequence[Fact]] = field(default_factory=dict)
    impossible: Sequence[tuple[str, str]] = ()

    @cached_property
    def rows(self) -> list[ComparedPoint]:
        """Return points: slower, faster, unclear (each largest change first), same, no verdict."""
        return sorted(self.points, key=_urgency)

    @cached_property
    def compared(self) -> list[ComparedPoint]:
        """Return the points that have a rate on both sides, in the order of `rows`."""
        return [row for row in self.rows if row.verdict is not None]

    @property
    def verdicts(self) -> Counter[str]:
        """Return how many of `compared` have each verdict; 0 for one that none has."""
        return Counter(row.verdict for row in self.compared if row.verdict)

    @property
    def broken(self) -> list[ComparedPoint]:
        """Return the points measured in base of which a larger share of the rounds fails in new.

        In the order of `rows`. A point that new does not have is not among them.
        """
        return [row for row in self.rows if row.base_runs and row.new_failed > row.base_failed]

    @property
    def is_regression(self) -> bool:
        """Return whether a point is slower in new, or fails more often there (`broken`)."""
        return bool(self.verdicts[SLOWER] or self.broken)

    @property
    def has_one_run(self) -> bool:
        """Return whether points are compared, but none with two ok runs a side: all are unclear."""
        counts = [min(row.base_runs, row.new_runs) for row in self.compared]
        return bool(counts) and max(counts) < LEAST_RUNS

    def is_blind(self, change: float) -> bool:
        """Return whether a point may be slower by more than `change` (0.1: 10 %) unseen.

        It may be if the interval of its rate allows it or is missing, as where NEW has no rate.
        What is called slower or is `broken` is seen; points that BASE did not measure do not count.
        """
        return any(share > change for share in self._unseen())

    def _unseen(self) -> list[float]:
        """Return by which share each point may be slower unseen; infinite without an interval."""
        return [
            math.inf if row.ratio_low is None else 1 - row.ratio_low
            for row in self.rows
            if row.base_runs and row.verdict != SLOWER and row.new_failed <= row.base_failed
        ]

    @property
    def obstacles(self) -> tuple[NotDecided, ...]:
        """Return how devices, else node counts, differ: each difference once."""
        reasons = (row.why for row in self.compared)
        return tuple(dict.fromkeys(why for why in reasons if why and why.kind.is_obstacle))

    @property
    def title(self) -> str:
        """Return the answer, "Blind" first if `is_blind(0.1)` and a point has two runs a side."""
        rows, verdicts = self.compared, self.verdicts
        broken = f"; {len(self.broken)} failing now" if self.broken else ""
        if not rows:
            return f"No point was measured on both sides{broken}."
        middle = percent(float(np.median([row.ratio for row in rows])) - 1)
        median = f"; the median change of {self.unit} is {middle}" if len(rows) > 1 else ""
        if self.has_one_run:
            ok = {"base": [r.base_runs for r in rows], "new": [r.new_runs for r in rows]}
            few = [side for side, runs in ok.items() if max(runs) < LEAST_RUNS]
            where = f"of {few[0]}" if len(few) == 1 else "a side"
            counts = Counter(_likely(row, self.threshold) for row in rows)
            likely = [f"{counts[one]} {one}?" for one in (SLOWER, FASTER) if counts[one]]
            found = f"; of {counted(len(rows), 'point')}: {', '.join(likely)}" if likely else ""
            return f"1 run {where}: no verdict{found}{broken}{median}."
        slower = [row for row in rows if row.verdict == SLOWER]
        lead = f"{len(slower)} of {counted(len(rows), 'point')} slower"
        if slower:
            worst = slower[0]
            lead += f", the worst with {-_relative_change(worst):.1%} fewer {worst.unit}"
        others = [f"{verdicts[name]} {name}" for name in (FASTER, SAME, UNCLEAR) if verdicts[name]]
        found = "; ".join(filter(None, (lead, ", ".join(others))))
        most, unknown = max(unseen := self._unseen(), default=0.0), unseen.count(math.inf)
        how = f"at {counted(unknown, 'point')} of BASE" if unknown else f"below {most:.0%}"
        blind = f"Blind {how}: " if most > _BLIND else ""
        return f"{blind}{found}{broken}{median}."

    def blocks(self) -> Iterator[Block]:
        """Yield the least change seen, advice, obstacles, runs, changes, points and failures."""
        rows = self.compared
        if known := [row for row in rows if row.least_seen is not None]:
            counts = zip(*((row.base_runs, row.new_runs) for row in known), strict=True)
            base, new = (span(str(min(runs)), str(max(runs))) for runs in counts)
            seen = sorted(row.least_seen or 0.0 for row in known)
            least = span(f"{seen[0]:.1%}", f"{seen[-1]:.1%}")
            slower = f"a point that alone does {least} fewer {self.unit} is found in 95% of cases."
            yield Line(text=f"By {base} runs of base and {new} runs of new, {slower}")
        if text := self._one_sided():
            yield Line(text=text)
        yield from (Line(text=text, tone="advice") for text in self._advice())
        for why in self.obstacles:
            told = "The changes below tell of that, not of the software."
            yield Line(text=f"NOT COMPARABLE: {not_decided(why)}. {told}", tone="alarm")
        pairs = [("base", _runs_words(self.base)), ("new", _runs_words(self.new))]
        yield Listing(lines=pairs, is_quoted=True)
        if self.impossible:
            yield Listing(title="Cannot be", lines=self.impossible, is_quoted=True)
        yield changes_listing("What changed around the points", self.changes)
        if rows:
            table = self._table()
            yield table
            if hidden := len(rows) - len(table.rows):
                yield hidden_line(hidden)
        beside = []
        for row, name in zip(rows, point_names(rows), strict=True):
            is_told = row.why is None or self.has_one_run
            phrases = [] if row.why is None or is_told else [not_decided(row.why)]
            phrases += map(point_change, self.beside.get(row.point_id, ()))
            if row.verdict != SAME and phrases:
                beside.append((name, "; ".join(phrases)))
        if beside:
            title = "What changed beside, or is missing for a verdict"
            yield Listing(title=title, lines=beside, is_quoted=True)
        broken = self.broken
        failed = [row for row in self.rows if row in broken or not (row.verdict or _lacks(row))]
        if failed:
            ends = [
                f"base: {_status_words(one.status_base)}; new: {_status_words(one.status_new)}"
                for one in failed
            ]
            pairs = list(zip(point_names(failed), ends, strict=True))
            yield Listing(title="Failed in one of the runs", lines=pairs, is_quoted=True)
        yield Legend()

    @property
    def unit(self) -> str:
        """Return the unit of the rates of `compared`."""
        return " or ".join(sorted({row.unit for row in self.compared}))

    def _one_sided(self) -> str:
        """Return how many points only one of the sides has, and in what all of them differ.

        Empty where both sides have all points.
        """
        lone = {side: [r for r in self.rows if _lacks(r) == side] for side in ("new", "base")}
        text = ", ".join(
            f"{counted(len(rows), 'point')} in {side} only"
            for side, rows in (("BASE", lone["new"]), ("NEW", lone["base"]))
            if rows
        )
        apart = [
            formatting.heading(name)
            for name in varying([*lone["new"], *lone["base"]], params_first=True)
            if all(lone.values())
            and set.isdisjoint(*({str(setting(r, name)) for r in rows} for rows in lone.values()))
        ]
        told = f"; they differ in {', '.join(apart)}" if apart else ""
        return f"{text}{told}." if text else ""

    def _advice(self) -> Iterator[str]:
        """Yield what would decide points that are unclear, and which runs are left out."""
        if self.verdicts[UNCLEAR] and not self.obstacles:
            runs = max(_ENOUGH_RUNS, min(len(self.base), len(self.new)) + 2)
            base, new = self.words
            if self.are_tags:
                how = f"with --tag {base} and --tag {new}, then `raybench compare {base} {new}`"
            else:
                how = f"then name them all: `raybench compare {base},RUN,… {new},RUN,…`"
            yield (
                f"To decide: sweep the job {self.new[-1].job_name} on both sides in turns "
                f"(`raybench sweep`) until each side has {runs} runs, {how}."
            )
        for run_id, facts in [*self.left_out.items()][:_MOST_LEFT_OUT]:
            yield f"{run_id} is left out, as it differs in {', '.join(map(fact_name, facts))}."
        if (more := len(self.left_out) - _MOST_LEFT_OUT) > 0:
            yield f"Runs that are left out likewise: {more}."

    def _table(self) -> Table:
        """Return the table of the points that changed, and of others up to 60 in all."""
        changed = sum(row.verdict != SAME for row in self.compared)
        rows = self.compared[: max(changed, _MOST_ROWS)]
        unit = self.unit

        def verdict(row: ComparedPoint) -> Cell:
            likely = _likely(row, self.threshold)
            tone = "plain" if likely or row.verdict is None else _TONES.get(row.verdict, "plain")
            return Cell(text=verdict_word(row.verdict, likely), tone=tone)

        columns: list[ColumnOf[ComparedPoint]] = [
            *setting_columns(self.compared),
            column(f"base {unit}", lambda row: formatting.number(row.base)),
            column("new", lambda row: formatting.number(row.new), drop=1),
            column("change", _change),
            column("seen from", lambda r: formatting.percent(r.least_seen), meaning=_SEEN, drop=0),
            column("verdict", verdict, is_text=True),
        ]
        counts = [len(side) for side in (self.base, self.new)]
        kind = "base: mean of {} runs, new: mean of {}".format(*counts) if max(counts) > 1 else ""
        note = _EXPLANATION.format(f"{100 * self.threshold:g}%")
        return make_table(rows, columns, kind=kind, note=note)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        base, new (runs, the newest last), threshold, left_out (a list of run_id and differs_in, a
        list of facts), comparable (false with obstacles), obstacles (as `why` of a point), changes,
        verdicts (counts above 0), impossible (list of point and text), points (in the order of
        `points`, each with `why`, its text in it, and `beside`).
        """
        points = []
        for row in self.points:
            why = None if row.why is None else _members_of(row.why)
            beside = [asdict(one) for one in self.beside.get(row.point_id, ())]
            points.append({**vars(row), "why": why, "beside": beside})
        return {
            "base": [asdict(run) for run in self.base],
            "new": [asdict(run) for run in self.new],
            "threshold": self.threshold,
            "left_out": [
                {"run_id": run_id, "differs_in": facts} for run_id, facts in self.left_out.items()
            ],
            "comparable": not self.obstacles,
            "obstacles": list(map(_members_of, self.obstacles)),
            "changes": [asdict(one) for one in self.changes],
            "verdicts": dict(self.verdicts),
            "impossible": [{"point": name, "text": text} for name, text in self.impossible],
            "points": points,
        }


def _members_of(why: NotDecided) -> dict[str, Any]:
    return {**asdict(why), "text": not_decided(why)}


_SEEN = "a slowdown of that point alone by so much is found in 95% of cases"
_EXPLANATION = (
    "samples/s (steps/s where a step has no samples) follow the mean step. base, new: the mean "
    "over the runs of a side. change: ± half its 90% interval. slower, faster: changed by more "
    "than {0}, and by more than chance (where nothing changed, at most "
    f"{FALSE_VERDICTS:.2%} of comparisons call a point slower, and as many faster). "
    "same: the interval is within {0}. unclear: neither; slower?, faster?: unclear, and changed "
    "by more than {0}."
)


def _runs_words(runs: Sequence[Run]) -> str:
    """Return the newest of the runs of a side with its start, and the ids of the others."""
    newest = f"{formatting.title(runs[-1])}, {formatting.when(runs[-1].started_at)}"
    others = ", ".join(run.run_id for run in runs[:-1])
    return f"mean of {len(runs)} runs: {newest}; and {others}" if others else newest


def changes_listing(title: str, changes: Sequence[Change]) -> Listing:
    """Return a listing of each change, its values cut to 60 characters."""
    lines = [(fact_name(one.fact), before_and_now(one, _MOST_CHARS)) for one in changes]
    return Listing(title=title, lines=lines, is_quoted=True, otherwise=SAME_AROUND)


def _urgency(row: ComparedPoint) -> tuple[Any, ...]:
    """Return the sort key of `Comparison.rows`."""
    place = _ORDER.index(row.verdict) if row.verdict in _ORDER else len(_ORDER)
    has_changed = row.verdict != SAME and row.ratio is not None and row.verdict is not None
    size = -abs(_relative_change(row)) if has_changed else 0
    batch = "global_batch_size" if row.scaling == "strong" else "batch_size"
    return (place, size, *(setting_order(setting(row, name)) for name in (*_NAMES, batch)))


def percent(relative: float | None) -> str:
    """Return a relative change (0.0213) as `+2.13%`, from 9.95 % on `+12.3%`; "" for None."""
    return "" if relative is None else f"{relative:+.{1 if abs(relative) >= 0.0995 else 2}%}"


_TONES: dict[str, Tone] = {SLOWER: "alarm", FASTER: "good", UNCLEAR: "advice"}


def _likely(row: ComparedPoint, threshold: float) -> str | None:
    """Return SLOWER or FASTER for an unclear change beyond the threshold."""
    change = _relative_change(row)
    if row.verdict != UNCLEAR or abs(change) <= threshold:
        return None
    return SLOWER if change < 0 else FASTER


def _relative_change(row: ComparedPoint) -> float:
    """Return the relative change of the rate, below 0 if slower; 0 if unknown."""
    return 0.0 if row.ratio is None else row.ratio - 1


def _change(row: ComparedPoint) -> str:
    """Write the change of the rate and half its interval, as `+2.1% ±0.4%`."""
    if row.ratio_low is None or row.ratio_high is None:
        return percent(_relative_change(row))
    half = formatting.half_width((row.ratio_high - row.ratio_low) / 2)
    return f"{percent(_relative_change(row))} {half}"


def _status_words(status: Status | None) -> str:
    return "not there" if status is None else status.label


def _lacks(row: ComparedPoint) -> str:
    """Return the side, `base` or `new`, that has no row of the point; empty where both have."""
    return "base" if row.status_base is None else "new" if row.status_new is None else ""


def before_and_now(change: Change, most: int) -> str:
    """Return `before -> now`, each at most `most` (4 or more) characters, cut so they differ."""
    values = [plain(value) for value in (change.base, change.new)]
    if values[0] == values[1]:  # but for blanks and control characters, which are written out
        values = [repr(value)[1:-1].replace(" ", "␣") for value in (change.base, change.new)]
    short = [shorten(value, most) for value in values]
    if short[0] == short[1]:
        pairs = enumerate(zip(*values, strict=False))
        alike = next((place for place, (a, b) in pairs if a != b), min(map(len, values)))
        short = [shorten(f"…{value[max(0, alike - most // 3) :]}", most) for value in values]
    return f"{short[0]} -> {short[1]}"


def hidden_line(hidden: int) -> Line:
    """Return the line that counts unchanged points or figures not shown. hidden: above 0."""
    return Line(text=f"and {hidden} more that are the same; `--format json` has all")
