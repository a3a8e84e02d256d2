"""What `raybench ab` says."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.ab.decision import CONFIRMING_PAIRS, LOOKS
from raybench.ab.gate import Begun, Event, Prepared, SettingUp, Waiting
from raybench.ab.plan import WORKTREE, Gate, Side
from raybench.ab.verdict import (
    Disturbance,
    GateOutcome,
    GateVerdict,
    OpenReason,
    PointVerdict,
    WhyOpen,
)
from raybench.conversion import S_PER_MIN
from raybench.report.formatting import command, counted, cut_end
from raybench.report.words.compare import percent_words
from raybench.report.words.doubts import doubt_words

QUESTION = "Is NEW slower than OLD?"
OUTCOME_WORDS = {
    GateOutcome.SLOWER: "slower",
    GateOutcome.NOT_MEASURED: "not measured",
    GateOutcome.UNDECIDED: "undecided",
    GateOutcome.FASTER: "faster",
    GateOutcome.SAME: "same",
}
_PREDICATES = OUTCOME_WORDS | {GateOutcome.SAME: "the same"}
DETECTABLE = "the slowdown of this point that such starts find in about 95 % of cases"
_ERROR_CHARS = 400
# A larger spread of the clocks is worth a sentence.
_CLOCK_SPREAD = 0.02


def side_line(gate: Gate, side: Side) -> str:
    """Return what a side measures, as `OLD: main (1a2b3c4d)`."""
    return f"{side.upper()}: {side_words(gate, side)}"


def side_words(gate: Gate, side: Side) -> str:
    """Return what a side measures, as `main (1a2b3c4d)`."""
    version = gate.version(side)
    parts = []
    if commit := gate.commits.get(side):
        code = "working tree" if version.revision == WORKTREE else version.revision
        parts.append(f"{code} ({commit[:8]})")
    elif not version.revision:
        parts.append(str(gate.cwd))
    if version.job:
        parts.append(str(version.job))
    if version.python:
        parts.append(version.python)
    parts += [f"{name}={value}" for name, value in version.env.items()]
    parts += [f"--set {text}" for text in version.overrides]
    return ", ".join(parts)


def effort(verdict: GateVerdict) -> str:
    """Return how much was measured."""
    pairs = counted(verdict.pairs, "pair")
    return f"Job {verdict.gate.job.name}: {pairs} of fresh starts, {_minutes(verdict.minutes)}"


def _minutes(minutes: float) -> str:
    return f"{minutes:.0f} minutes" if minutes >= 2 else f"{S_PER_MIN * minutes:.0f} s"


def answer(verdict: GateVerdict, worst_name: str) -> list[str]:
    """Return the verdict: its first sentence has the number of slower points and the worst one.

    Args:
        worst_name: the point that became slower most, or "".
    """
    points = verdict.points
    if not points:
        return ["No point was measured."]
    if len(points) == 1:
        return [_single(points[0])]
    counts = {outcome: 0 for outcome in GateOutcome}
    for point in points:
        counts[point.outcome] += 1
    # OLD works there, so the change is to blame.
    failing = sum(map(_fails_on_new_alone, points))
    fail = "fails" if failing == 1 else "fail"
    if failing == len(points):
        return [f"All {len(points)} points fail on NEW."]
    slower = counts[GateOutcome.SLOWER]
    if slower:
        worst = worst_point(points)
        verb = "is" if slower == 1 else "are"
        first = f"{slower} of {len(points)} points {verb} slower, the worst by {_change(worst)}"
        first += f": {worst_name}." if worst_name else "."
    elif counts[GateOutcome.NOT_MEASURED] == len(points):
        return [f"None of the {len(points)} points was measured."]
    elif max(counts.values()) == len(points):
        return [f"All {len(points)} points are {_PREDICATES[points[0].outcome]}."]
    elif failing:
        first = f"{failing} of {len(points)} points {fail} on NEW; no point is slower."
    else:
        first = f"No point of {len(points)} is slower."
    phrases = []
    if slower and failing:
        phrases.append(f"{failing} {fail} on NEW")
    counts[GateOutcome.NOT_MEASURED] -= failing
    for outcome, count in counts.items():
        if count and outcome is not GateOutcome.SLOWER:
            phrases.append(f"{count} {'is' if count == 1 else 'are'} {_PREDICATES[outcome]}")
    return [first, f"{'; '.join(phrases)}."] if phrases else [first]


def worst_point(points: Sequence[PointVerdict]) -> PointVerdict:
    """Return the slower point with the largest change; the first point if none is slower."""
    slower = [point for point in points if point.outcome is GateOutcome.SLOWER]
    if not slower:
        return points[0]
    # The change of a slower point is below 0.
    return min(slower, key=lambda point: point.change or 0.0)


def _single(point: PointVerdict) -> str:
    if point.outcome in (GateOutcome.SLOWER, GateOutcome.FASTER):
        return f"The point is {_PREDICATES[point.outcome]} by {_change(point)}."
    if _fails_on_new_alone(point):
        return "The point fails on NEW."
    return f"The point is {_PREDICATES[point.outcome]}."


def _fails_on_new_alone(point: PointVerdict) -> bool:
    has_failed = point.why is not None and point.why.kind is WhyOpen.FAILED
    return has_failed and point.old_rate is not None and point.new_rate is None


def _change(point: PointVerdict) -> str:
    """Return the size of a change with its interval: `4.1 % (3.2 to 5.0 %)`."""
    size = percent_words(abs(point.change or 0.0))
    if point.low is None or point.high is None:
        return size
    # The ends of the interval have the sign of a size too.
    sign = -1 if (point.change or 0.0) < 0 else 1
    least, most = sorted((sign * point.low, sign * point.high))
    return f"{size} ({100 * least:.1f} to {100 * most:.1f} %)"


def no_difference(gate: Gate) -> str:
    """Return that the sides do not differ, or ""."""
    if gate.has_difference:
        return ""
    return "OLD and NEW do not differ: this gate shows what the machine detects."


def detectable(verdict: GateVerdict) -> str:
    """Return which slowdown this machine detects, or ""."""
    if verdict.detectable is None:
        return ""
    where = " at every point" if len(verdict.points) > 1 else ""
    return (
        f"In about 95 % of cases, this machine detects a slowdown of "
        f"{percent_words(verdict.detectable)}{where}."
    )


def open_reason(why: OpenReason) -> str:
    """Return why a point is undecided or not measured, as a clause."""
    side = (why.side or Side.NEW).upper()
    match why.kind:
        case WhyOpen.CHANCE:
            return f"after {LOOKS[-1]} pairs its interval is still too wide"
        case WhyOpen.UNCONFIRMED:
            return f"it was slower, but not again in {CONFIRMING_PAIRS} fresh pairs"
        case WhyOpen.TIME:
            return "the time limit ended the gate"
        case WhyOpen.STOPPED:
            return f"{side} cannot be measured: {cut_end(why.text, _ERROR_CHARS)}"
        case WhyOpen.FAILED:
            return f"it fails on {side}: {cut_end(why.text, _ERROR_CHARS)}"
        case WhyOpen.ONE_SIDED:
            return f"only {side} has it"


def why_stopped(why: OpenReason) -> str:
    """Return why a gate ended early, as a sentence."""
    reason = open_reason(why)
    # Without a full stop after the words of another program, which may be a command.
    end = "" if why.text else "."
    return f"{reason[:1].upper()}{reason[1:]}{end}"


def log_line(verdict: GateVerdict) -> str:
    """Return where the output of the command that failed is, or ""."""
    why = verdict.stopped
    return f"Log of {(why.side or Side.NEW).upper()}: {why.log}" if why and why.log else ""


def meanwhile(verdict: GateVerdict) -> list[str]:
    """Return what the machine did while the gate ran, a sentence for each disturbance."""
    if not verdict.starts:
        return ["No start has ended."]
    sentences = [_disturbance(disturbance, verdict.starts) for disturbance in verdict.disturbances]
    if verdict.clock_spread is not None and verdict.clock_spread > _CLOCK_SPREAD:
        spread = percent_words(verdict.clock_spread)
        sentences.append(f"The SM clock of a point differed by up to {spread} between starts.")
    return sentences or ["Nothing else was seen on the machine meanwhile."]


def _disturbance(disturbance: Disturbance, starts: int) -> str:
    text = doubt_words(disturbance.doubt, disturbance.row)
    return f"In {disturbance.starts} of {counted(starts, 'start')}, {text}."


def shared_folder(verdict: GateVerdict) -> str:
    """Return that the folder must be shared, where several hosts took part and points failed."""
    kinds = {point.why.kind for point in verdict.points if point.why is not None}
    if verdict.hosts < 2 or WhyOpen.FAILED not in kinds:
        return ""
    return f"The {verdict.hosts} nodes must share the folder of the gate: give it with -o FOLDER."


def go_on(verdict: GateVerdict) -> str:
    """Return the command that goes on with an open gate, or ""."""
    if verdict.stopped is None:
        return ""
    return f"Go on with: {command('ab', '--resume', str(verdict.folder))}"


EXPLANATION = (
    "Rates are geometric means over the starts. The change is that of pairs of starts. Slower and "
    "faster: the interval excludes 0, and the change is at least {threshold}; a slower point was "
    "slower again in 3 fresh pairs. Same: the interval lies within ±{limit}. If nothing changed, "
    "all intervals of the table hold in at least 90 % of gates, and fewer than 1 of 100 gates "
    "calls any point slower, by simulation."
)


def progress(event: Event) -> str:
    """Return a line of progress."""
    if isinstance(event, Waiting):
        return f"an earlier gate was killed; waiting for its run {event.run_id}"
    if isinstance(event, SettingUp):
        return f"setting up {event.side.upper()}: {cut_end(event.command, _ERROR_CHARS)}"
    if isinstance(event, Prepared):
        return f"{event.side.upper()} is measured in {event.folder}"
    if isinstance(event, Begun):
        points = "all points" if event.points is None else counted(event.points, "point")
        return f"pair {event.pair}, {event.side.upper()}: {points}"
    verdict = event.verdict
    counts = []
    for outcome in GateOutcome:
        count = sum(point.outcome is outcome for point in verdict.points)
        # Open points are undecided now, and are counted below.
        if outcome is GateOutcome.UNDECIDED:
            count -= event.open
        if count:
            counts.append(f"{count} {OUTCOME_WORDS[outcome]}")
    if event.open:
        counts.append(f"{event.open} open")
    text = f"after {counted(verdict.pairs, 'pair')}: {', '.join(counts)}"
    # The first look shows what this machine can detect.
    if verdict.pairs == LOOKS[0] and verdict.detectable is not None:
        text += f"; this machine detects a slowdown of {percent_words(verdict.detectable)}"
    return text
