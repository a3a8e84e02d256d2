"""What a report says of the rounds of its run: what ± holds over, drifts, what more would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.analysis.rounds import LARGEST_DRIFT, Trials
from raybench.analysis.start_noise import (
    CPU,
    LOOSE_KIND,
    ROUNDS,
    RUNS,
    kind_of,
    of_ratio,
    prior_of,
)
from raybench.report import formatting
from raybench.stats.summary import student_t
from raybench.sweep.rounds import BETWEEN_ROUNDS_S, WORTHWHILE

Row = Mapping[str, Any]

_KINDS_WORDS = {CPU: "on CPUs", LOOSE_KIND: "in fp16 or where the host is the limit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreRounds:
    """What so many rounds in all would add: seconds, and half of the 95 % interval of a speed-up,
    relative, by kind of points."""

    rounds: int
    seconds: float
    half_widths: Mapping[str, float]

    @property
    def sentence(self) -> str:
        """`3 rounds would take about 2 min 40 s more and give ±0.5%`."""
        told = " and ".join(
            f"{formatting.half_width(width)} {_KINDS_WORDS.get(kind, '')}".rstrip()
            for kind, width in sorted(self.half_widths.items(), key=lambda one: one[1])
        )
        return (
            f"{self.rounds} rounds would take about {formatting.long_time(self.seconds)} more and "
            f"give about {told}"
        )


def meaning_of_plus_minus(rows: Sequence[Row]) -> str:
    """Say what the ± of a report holds over; empty where nothing has one."""
    known = [row for row in rows if formatting.has_value(row["step_ms_low"])]
    if not known:
        return ""
    sources = {row["starts_from"] for row in known}
    if ROUNDS in sources:
        return f"± holds over starts of the processes, by {max(r['rounds'] for r in known)} rounds."
    if RUNS in sources:
        return "± holds over starts of the processes, as other runs here show."
    return f"± holds over starts of the processes, as documented: {_documentation(known)}."


def _documentation(rows: Sequence[Row]) -> str:
    """`two starts on H200s differ by up to 1.4%`, and more where a kind scatters more."""
    kinds = dict.fromkeys(kind_of([row]) for row in rows)
    floors = {kind: prior_of(kind).floor for kind in kinds}
    if CPU in floors:
        return f"two starts on shared CPUs differ by up to {floors[CPU]:.0%}"
    told = " and ".join(
        f"{floor:.1%}" + (f" {_KINDS_WORDS[kind]}" if kind in _KINDS_WORDS else "")
        for kind, floor in sorted(floors.items(), key=lambda one: one[1])
    )
    return f"two starts on H200s differ by up to {told}"


def drift_warnings(trials: Trials, ranks: str) -> Iterator[str]:
    """Write a sentence for each control that moved."""
    for number, block, drift in trials.drifts():
        yield (
            f"round {number}: at the end of the block of {block} {ranks} the control took "
            f"{abs(drift):.1%} {'longer' if drift > 0 else 'less'} than at first, more than "
            f"{LARGEST_DRIFT:.0%}: the machine drifts; ratios are taken against the mean of both"
        )


def more_rounds(rows: Sequence[Row], trials: Trials) -> MoreRounds | None:
    """Estimate what WORTHWHILE rounds would add to a run with fewer; None where there is nothing to
    add.

    rows: of the scaling frame.
    """
    measured = [
        row for row in rows if row["status"] == "ok" and formatting.has_value(row["step_ms_low"])
    ]
    done = max((row["rounds"] for row in measured), default=WORTHWHILE)
    if done >= WORTHWHILE:
        return None
    more = WORTHWHILE - done
    a_round_s = sum(_round_s(one) for row in measured for one in trials.rounds(row).values()) / done
    return MoreRounds(
        rounds=WORTHWHILE,
        seconds=more * (a_round_s + BETWEEN_ROUNDS_S),
        half_widths=_half_widths(measured),
    )


def _round_s(row: Row) -> float:
    """How long a point takes in one of several rounds, which share its timed seconds."""
    timed_s = row["step_ms_mean"] * row["iterations"] * row["inner_iterations"] / 1000
    shared_s = 0.0 if formatting.is_set(row["quick"]) else timed_s * (1 - 1 / WORTHWHILE)
    return float(max(0.0, row["duration_s"] - shared_s))


def _half_widths(rows: Sequence[Row]) -> dict[str, float]:
    """Of a speed-up after WORTHWHILE rounds, by kind of points, by what is documented."""
    kinds = [kind_of([row]) for row in rows]
    found = {}
    for kind in dict.fromkeys(kinds):
        noise = of_ratio(prior_of(kind), prior_of(kind))
        degrees = kinds.count(kind) * (WORTHWHILE - 1)
        found[kind] = student_t(degrees) * noise.sd / WORTHWHILE**0.5
    return found
