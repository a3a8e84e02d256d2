"""The verdict of a gate as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raybench.ab.plan import Side
from raybench.ab.verdict import GateOutcome, GateVerdict, PointVerdict
from raybench.analysis.rows import distinguishing_settings, known_settings, varying
from raybench.report import formatting
from raybench.report.comparison import change_percent, hidden_line
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
    adapt_column,
    column,
    make_table,
)
from raybench.report.point_settings import setting_columns, short_name
from raybench.report.words import ab as words

# The most urgent outcome first.
_ORDER = list(GateOutcome)
_TONES: dict[GateOutcome, Tone] = {
    GateOutcome.SLOWER: "alarm",
    GateOutcome.NOT_MEASURED: "advice",
    GateOutcome.UNDECIDED: "advice",
    GateOutcome.FASTER: "good",
}
# Points that are the same are listed up to this number of rows.
_MOST_ROWS = 20


@dataclass(frozen=True, kw_only=True)  # no slots, which cached_property needs
class GateReport(Document):
    """The verdict of a gate: a document (see `raybench.report.documents`)."""

    verdict: GateVerdict

    @property
    def title(self) -> str:
        """Return the question."""
        return words.QUESTION

    @cached_property
    def points(self) -> list[PointVerdict]:
        """The points by outcome, the most urgent first, then by change, the largest first."""
        return sorted(
            self.verdict.points,
            key=lambda point: (_ORDER.index(point.outcome), -abs(point.change or 0.0)),
        )

    @cached_property
    def answer(self) -> list[str]:
        """Return the sentences that answer the question."""
        slower = any(point.outcome is GateOutcome.SLOWER for point in self.points)
        worst = self.name(words.worst_point(self.points)) if slower else ""
        return words.answer(self.verdict, worst)

    @property
    def sides(self) -> list[str]:
        """Return a line for each side, and for what was measured."""
        verdict = self.verdict
        return [
            *(words.side_line(verdict.gate, side) for side in Side),
            words.effort(verdict),
        ]

    @property
    def ranks(self) -> str:
        """Return what a rank is called in the plural."""
        is_cuda = any(point.row.device_type == "cuda" for point in self.points)
        return "GPUs" if is_cuda else "workers"

    def name(self, point: PointVerdict) -> str:
        """Return the settings that tell a point apart: `fp32, batch 64`."""
        names = distinguishing_settings([other.row for other in self.points])
        return short_name(point.row, names, self.ranks) or point.row.point_id

    def blocks(self) -> Iterator[Block]:
        """Yield sides, verdict, what the machine did, and the points."""
        yield from (Line(text=text) for text in self.sides)
        tone: Tone = _TONES.get(self.verdict.outcome, "strong")
        for index, text in enumerate(self.answer):
            yield Line(text=text, tone=tone if index == 0 else "plain", is_apart=index == 0)
        yield from (Line(text=text) for text in self.remarks)
        if log_line := words.log_line(self.verdict):
            yield Line(text=log_line, is_whole=True)
        if open_points := self._open_points():
            yield Listing(title="Why points are open", lines=open_points, is_quoted=True)
        if self.points:
            yield self.table
            if hidden := len(self.points) - len(self.table.rows):
                yield hidden_line(hidden)
        if following := words.go_on(self.verdict):
            yield Line(text=following, tone="aside", is_apart=True, is_whole=True)
        yield Legend()

    @property
    def why_stopped(self) -> str:
        """Return why measuring ended before all points were decided, or ""."""
        return words.why_stopped(self.verdict.stopped) if self.verdict.stopped else ""

    @cached_property
    def remarks(self) -> list[str]:
        """Return sentences about equal sides, the detectable slowdown, the end and disturbances."""
        verdict = self.verdict
        # Each of these sentences may be empty.
        remarks = [
            words.no_difference(verdict.gate),
            words.detectable(verdict),
            self.why_stopped,
            words.shared_folder(verdict),
        ]
        return [*filter(None, remarks), *words.meanwhile(verdict)]

    def _open_points(self) -> list[tuple[str, str]]:
        """Return (point, why it is undecided or not measured)."""
        # `remarks` gives the reason that ended the whole gate; leave out points with this reason.
        return [
            (self.name(point), words.open_reason(point.why))
            for point in self.points
            if point.why is not None and point.why != self.verdict.stopped
        ]

    @cached_property
    def table(self) -> Table:
        """Return the table of the points."""
        # Points with the outcome SAME come last.
        not_same = [point for point in self.points if point.outcome is not GateOutcome.SAME]
        shown = self.points[: max(len(not_same), _MOST_ROWS)]

        def row_of(point: PointVerdict) -> Any:
            return point.row

        rows = [point.row for point in self.points]
        columns: list[ColumnOf[PointVerdict]] = []
        for setting_column in setting_columns(rows, ranks_noun=self.ranks):
            columns.append(adapt_column(setting_column, row_of))
        unit = " or ".join(sorted({point.unit for point in self.points}))
        # A table that is too wide loses the column with the lowest `drop` first.
        columns += [
            column(f"OLD {unit}", lambda point: formatting.number(point.old_rate), drop=0),
            column("NEW", lambda point: formatting.number(point.new_rate), drop=1),
            column("change", lambda point: change_percent(point.change)),
            column("interval", _interval),
            column("pairs", lambda point: str(point.pairs), drop=2),
            column(
                "detectable",
                lambda point: formatting.percent(point.detectable),
                meaning=words.DETECTABLE,
            ),
            column("verdict", _verdict, is_text=True),
        ]
        threshold = self.verdict.gate.settings.threshold
        note = words.EXPLANATION.format(
            threshold=f"{100 * threshold:g} %", limit=f"{200 * threshold:g} %"
        )
        return make_table(shown, columns, kind=f"Change of {unit}", note=note)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object."""
        verdict, gate = self.verdict, self.verdict.gate
        return {
            "gate_id": gate.gate_id,
            "verdict": verdict.outcome,
            "exit_code": verdict.exit_code,
            "answer": " ".join(self.answer),
            "remarks": self.remarks,
            "sides": {side: words.side_words(gate, side) for side in Side},
            "commits": dict(gate.commits),
            "threshold": gate.settings.threshold,
            "detectable": verdict.detectable,
            "pairs": verdict.pairs,
            "starts": verdict.starts,
            "minutes": verdict.minutes,
            "stopped": _reason_members(verdict.stopped),
            "disturbances": [
                {"doubt": disturbance.doubt, "starts": disturbance.starts}
                for disturbance in verdict.disturbances
            ],
            "clock_spread": verdict.clock_spread,
            "points": self.point_members,
        }

    @property
    def point_members(self) -> list[dict[str, Any]]:
        """Return the members of each point in the JSON object."""
        rows = [point.row for point in self.points]
        names = varying(rows) if rows else []
        points = []
        for point in self.points:
            points.append(
                {
                    "point_id": point.row.point_id,
                    "settings": known_settings(point.row, names),
                    "verdict": point.outcome,
                    "why": _reason_members(point.why),
                    **{name: getattr(point, name) for name in _POINT_MEMBERS},
                }
            )
        return points


_POINT_MEMBERS = (
    *("pairs", "unit", "old_rate", "new_rate"),
    *("change", "low", "high", "detectable"),
)


def _reason_members(why: Any) -> dict[str, Any] | None:
    if why is None:
        return None
    log = None if why.log is None else str(why.log)
    return {"kind": why.kind, "side": why.side, "text": words.open_reason(why), "log": log}


def _interval(point: PointVerdict) -> str:
    """Write the interval of a change as `-5.0 to -3.2%`."""
    if point.low is None or point.high is None:
        return ""
    return f"{100 * point.low:+.1f} to {100 * point.high:+.1f}%"


def _verdict(point: PointVerdict) -> Cell:
    return Cell(text=words.OUTCOME_WORDS[point.outcome], tone=_TONES.get(point.outcome, "plain"))
