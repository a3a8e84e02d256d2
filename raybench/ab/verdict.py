"""The verdict of a gate, as values; `raybench.report` has the words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from raybench.ab.decision import Decision, Decisions, decide
from raybench.ab.plan import Gate, Side
from raybench.ab.starts import PairedPoint, PairedStarts, Start, rate_of
from raybench.analysis.rows import ScaledRow
from raybench.records.doubts import Doubt, DoubtKind, Harm
from raybench.results.point_row import PointRow


class GateOutcome(StrEnum):
    """Outcome of a point, and of a gate; the most urgent first."""

    # The exit code of the command.
    exit_code: int

    SLOWER = "slower", 1
    NOT_MEASURED = "not_measured", 5
    UNDECIDED = "undecided", 5
    FASTER = "faster", 0
    SAME = "same", 0

    def __new__(cls, value: str, exit_code: int) -> GateOutcome:
        """Make a member; JSON holds its value."""
        member = str.__new__(cls, value)
        member._value_, member.exit_code = value, exit_code
        return member


class WhyOpen(StrEnum):
    """Why a point is undecided or not measured."""

    # The starts scatter too much for the last look.
    CHANCE = "chance"
    # Slower at a look, but not in the fresh pairs after it.
    UNCONFIRMED = "unconfirmed"
    # --max-minutes has passed.
    TIME = "time"
    # A side could not be set up or started.
    STOPPED = "stopped"
    # The point fails on a side.
    FAILED = "failed"
    # Only one side has the point.
    ONE_SIDED = "one_sided"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReason:
    """Why a point, or the whole gate, is undecided or not measured."""

    kind: WhyOpen
    # STOPPED, FAILED: the side that fails; ONE_SIDED: the side that has the point.
    side: Side | None = None
    # STOPPED, FAILED: the error.
    text: str = ""
    # STOPPED: output of the command that failed.
    log: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointVerdict:
    """A point with its verdict. Unknown rates and shares are None."""

    # With the settings of the point.
    row: ScaledRow
    outcome: GateOutcome
    why: OpenReason | None = None
    # Number of pairs in which both sides are ok.
    pairs: int
    # "samples/s" or "steps/s".
    unit: str
    # Geometric means over the starts.
    old_rate: float | None = None
    new_rate: float | None = None
    # Relative change of the rate, below 0 if slower, and its interval.
    change: float | None = None
    low: float | None = None
    high: float | None = None
    # The slowdown, above 0, that this gate would find in about 95 % of cases.
    detectable: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Something that may have changed the times of some starts."""

    # The worst doubt of this kind and subject, and the row that has the doubt.
    doubt: Doubt
    row: PointRow
    # Number of starts in which any point has the doubt.
    starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """The verdict of a gate, and what disturbed the measurement."""

    gate: Gate
    # The folder of the gate, with the tables of all starts.
    folder: Path
    points: Sequence[PointVerdict]
    # Number of complete pairs, and of all starts.
    pairs: int
    starts: int
    # Total duration of all starts.
    minutes: float
    # Number of hosts of the devices.
    hosts: int
    # Why measuring ended before all points were decided.
    stopped: OpenReason | None = None
    disturbances: Sequence[Disturbance] = ()
    # Largest relative difference between the SM clocks of a point in two starts; None: unknown.
    clock_spread: float | None = None

    @property
    def outcome(self) -> GateOutcome:
        """The most urgent outcome of any point; NOT_MEASURED without points."""
        outcomes = {point.outcome for point in self.points}
        # GateOutcome has the most urgent member first.
        by_urgency = [outcome for outcome in GateOutcome if outcome in outcomes]
        return by_urgency[0] if by_urgency else GateOutcome.NOT_MEASURED

    @property
    def exit_code(self) -> int:
        """0: decided and not slower; 1: slower; 5: undecided or not measured."""
        return self.outcome.exit_code

    @property
    def detectable(self) -> float | None:
        """The slowdown that this gate would find at any point in about 95 % of cases."""
        slowdowns = [point.detectable for point in self.points if point.detectable is not None]
        return max(slowdowns, default=None)


_OUTCOMES = {
    Decision.SLOWER: GateOutcome.SLOWER,
    Decision.FASTER: GateOutcome.FASTER,
    Decision.SAME: GateOutcome.SAME,
}
_WHY = {Decision.UNDECIDED: WhyOpen.CHANCE, Decision.UNCONFIRMED: WhyOpen.UNCONFIRMED}


def decisions_of(pairs: PairedStarts, gate: Gate) -> Decisions:
    """Decide about the points after these pairs."""
    return decide(pairs.log_ratios, gate.settings.threshold)


def open_points(pairs: PairedStarts, decisions: Decisions) -> list[PairedPoint]:
    """Return the points that need another pair."""
    return [
        point
        for point, decision in zip(pairs.points, decisions.decision.tolist(), strict=True)
        if decision == Decision.GO_ON and pairs.can_be_measured(point)
    ]


def verdict_of(
    gate: Gate, folder: Path, pairs: PairedStarts, hosts: int, stopped: OpenReason | None = None
) -> GateVerdict:
    """Return the verdict after these pairs.

    Args:
        folder: the folder of the gate.
        hosts: number of hosts of the devices.
        stopped: why open points are not measured again; None if no point is open.
    """
    decisions = decisions_of(pairs, gate)
    points = [
        _point_verdict(pairs, index, decisions, stopped) for index in range(len(pairs.points))
    ]
    return GateVerdict(
        gate=gate,
        folder=folder,
        points=points,
        pairs=len(pairs.complete_pairs),
        starts=len(pairs.starts),
        minutes=sum(map(_duration_s, pairs.starts)) / 60,
        hosts=hosts,
        stopped=stopped,
        disturbances=_disturbances(pairs.starts),
        clock_spread=_clock_spread(pairs.starts),
    )


def _point_verdict(
    pairs: PairedStarts, index: int, decisions: Decisions, stopped: OpenReason | None
) -> PointVerdict:
    """Return the verdict of `pairs.points[index]`."""
    point = pairs.points[index]
    outcome, why = _outcome(pairs, point, Decision(decisions.decision[index]), stopped)
    ok_rows = {side: pairs.ok_rows(point, side) for side in Side}
    # Without throughput in each row, compare steps/s.
    has_samples = all(row.throughput for side in Side for row in ok_rows[side])
    # Geometric mean of the rates of each side.
    rates = {}
    for side, rows in ok_rows.items():
        logs = [math.log(rate_of(row, has_samples)) for row in rows]
        rates[side] = math.exp(np.mean(logs)) if logs else None
    return PointVerdict(
        row=point.row,
        outcome=outcome,
        why=why,
        pairs=int(decisions.pairs[index]),
        unit="samples/s" if has_samples else "steps/s",
        old_rate=rates[Side.OLD],
        new_rate=rates[Side.NEW],
        change=_none_if_nan(decisions.change[index]),
        low=_none_if_nan(decisions.low[index]),
        high=_none_if_nan(decisions.high[index]),
        detectable=_none_if_nan(decisions.detectable[index]),
    )


def _outcome(
    pairs: PairedStarts, point: PairedPoint, decision: Decision, stopped: OpenReason | None
) -> tuple[GateOutcome, OpenReason | None]:
    """Return the outcome of a point, and why the point has no decision."""
    if decision in _OUTCOMES:
        return _OUTCOMES[decision], None
    if decision in _WHY:
        return GateOutcome.UNDECIDED, OpenReason(kind=_WHY[decision])
    if len(point.ids) < len(Side):
        [side] = point.ids
        return GateOutcome.NOT_MEASURED, OpenReason(kind=WhyOpen.ONE_SIDED, side=side)
    if not pairs.can_be_measured(point):
        # The point has failed too often on this side.
        side = max(Side, key=lambda side: len(pairs.failures(point, side)))
        last_failure = pairs.failures(point, side)[-1]
        text = f"{last_failure.status.label}: {last_failure.error_message or 'no reason known'}"
        return GateOutcome.NOT_MEASURED, OpenReason(kind=WhyOpen.FAILED, side=side, text=text)
    reason = stopped or OpenReason(kind=WhyOpen.CHANCE)
    if reason.kind in (WhyOpen.TIME, WhyOpen.CHANCE):
        return GateOutcome.UNDECIDED, reason
    # A side could not be set up or started.
    return GateOutcome.NOT_MEASURED, reason


def _none_if_nan(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _duration_s(start: Start) -> float:
    """Return how long a sweep took; 0 if its end is unknown."""
    end = start.run.finished_at or start.run.started_at
    return (end - start.run.started_at).total_seconds()


def _disturbances(starts: Sequence[Start]) -> list[Disturbance]:
    """Return the doubts that say the machine was disturbed, the most frequent first."""
    # (kind, subject) -> doubts with their rows.
    groups: dict[tuple[DoubtKind, str], list[tuple[Doubt, PointRow]]] = {}
    for start in starts:
        for row in start.rows.values():
            for doubt in row.doubts or ():
                if doubt.kind.harm is Harm.DISTURBED:
                    # Some kinds count as one disturbance, whatever their subjects are.
                    subject = "" if doubt.kind.merges_subjects else doubt.subject
                    groups.setdefault((doubt.kind, subject), []).append((doubt, row))
    disturbances = []
    for doubts_and_rows in groups.values():
        worst_doubt, row = max(doubts_and_rows, key=lambda doubt_and_row: doubt_and_row[0].excess)
        run_ids = {disturbed_row.run_id for _, disturbed_row in doubts_and_rows}
        disturbances.append(Disturbance(doubt=worst_doubt, row=row, starts=len(run_ids)))
    return sorted(disturbances, key=lambda disturbance: -disturbance.starts)


def _clock_spread(starts: Sequence[Start]) -> float | None:
    """Return the largest relative difference of the SM clocks of a point between two starts."""
    # point_id -> SM clock in MHz in each start.
    clocks_mhz: dict[str, list[float]] = {}
    for start in starts:
        for point_id, row in start.rows.items():
            if row.sm_clock_mhz_p50:
                clocks_mhz.setdefault(point_id, []).append(row.sm_clock_mhz_p50)
    spreads = [max(clocks) / min(clocks) - 1 for clocks in clocks_mhz.values()]
    return max(spreads, default=None)
