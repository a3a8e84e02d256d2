"""Which other runs say the same as BASE and NEW of a comparison, and which tell of noise. Pure.

A run that the user named is believed. Any other one counts as a repeat only where the test of
`raybench.analysis.history` finds no shift between the two: a regression that the tables do not tell
must not pass for noise. So the runs of a point are split into levels, and noise is what differs
within a level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from raybench.analysis.history import find_steps, series_noise
from raybench.analysis.start_noise import prior_noise

# Runs farther away in time tell of another machine: it drifts.
MOST_REPEATS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One run's step time of a point.

    rounds_ms: where it is the mean of several rounds, that of each. node: names the devices.
    row: of `points`, with the columns that `documented` reads and the interval of the step time.
    """

    run_id: str
    node: str
    started_at: datetime
    time_ms: float
    rounds_ms: Sequence[float] = ()
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The starts of a point, sorted: a run of several rounds has one for each.

    base, new: those whose means are compared. others: groups of runs that differ by starts and
    nodes only. looks: among how many splits of the runs this one was found; 1 where it was given.
    is_step: whether BASE and NEW lie on levels of `history` that differ.
    """

    base: Sequence[Start]
    new: Sequence[Start]
    others: Sequence[Sequence[Start]] = ()
    looks: int = 1
    is_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The other runs that one of the two has at a point.

    own: of the run itself. named: what the user named as its repeats; None where nothing was said.
    alike: runs that differ from it in nothing that the tables tell, but in start and node.
    """

    own: Start
    named: Sequence[Start] | None = None
    alike: Sequence[Start] = ()


def sides(base: Known, new: Known, *, is_one_world: bool, threshold: float) -> Sides:
    """Sort the runs of a point by what they are to each other.

    is_one_world: whether the tables tell no difference between BASE and NEW either; the runs of
    both are then one series. A run that was named for both is of neither.
    """
    base, new = _name_once(base, new), _name_once(new, base)
    series = [_in_order(base, new)] * 2 if is_one_world else [_in_order(base), _in_order(new)]
    levels = [_levels(one, threshold) for one in series]
    ends = [levels[0].get(one.own.run_id) for one in (base, new)]
    is_split = is_one_world and ends[0] != ends[1]
    of_base, of_new = (
        _side(one, rival, runs, of_runs)
        for one, rival, runs, of_runs in zip((base, new), (new, base), series, levels, strict=True)
    )
    taken = {start.run_id for start in (*of_base, *of_new)}
    found: dict[tuple[int, int], list[Start]] = {}
    for world, (runs, of_runs) in enumerate(zip(series, levels, strict=True)):
        for start in runs:
            if start.run_id not in taken:
                taken.add(start.run_id)
                found.setdefault((world, of_runs[start.run_id]), []).append(start)
    is_found = is_split and (base.named is None or new.named is None)
    return Sides(
        base=_each_round(of_base),
        new=_each_round(of_new),
        others=[_each_round(starts) for starts in found.values()],
        looks=len(series[0]) - 1 if is_found else 1,
        is_step=is_split and _shift(series[0], levels[0], ends) > math.log1p(threshold),
    )


def _each_round(starts: Sequence[Start]) -> list[Start]:
    """Make a start of the processes of each round, where runs have several."""
    return [
        replace(start, time_ms=time_ms, rounds_ms=())
        for start in starts
        for time_ms in start.rounds_ms or (start.time_ms,)
    ]


def _name_once(one: Known, other: Known) -> Known:
    """Without what was named on the other side too: that tells of noise alone."""
    if one.named is None:
        return one
    of_other = {start.run_id for start in (other.own, *(other.named or ()))}
    named = [start for start in one.named if start.run_id not in of_other]
    shared = [start for start in one.named if start.run_id in of_other]
    return replace(one, named=named, alike=[*one.alike, *shared])


def _in_order(*known: Known) -> list[Start]:
    """All runs of these, each once, in order of time."""
    runs = [start for one in known for start in (one.own, *(one.named or ()), *one.alike)]
    unique = {start.run_id: start for start in reversed(runs)}
    return sorted(unique.values(), key=lambda start: (start.started_at, start.run_id))


def _levels(series: Sequence[Start], threshold: float) -> dict[str, int]:
    """run_id -> the number of its level."""
    values = np.log([start.time_ms for start in series])
    rows = [start.row for start in series]
    sd, degrees = series_noise(prior_noise(rows), rows, values)
    firsts = find_steps(values, sd, degrees, threshold)
    numbers = np.searchsorted(firsts, np.arange(len(series)), side="right")
    return {start.run_id: int(number) for start, number in zip(series, numbers, strict=True)}


def _shift(series: Sequence[Start], levels: Mapping[str, int], ends: Sequence[int | None]) -> float:
    """By how much two levels differ: what became slower may have become faster again."""
    means = [
        np.mean([math.log(run.time_ms) for run in series if levels[run.run_id] == end])
        for end in ends
    ]
    return abs(float(means[1] - means[0]))


def _side(
    one: Known, rival: Known, series: Sequence[Start], levels: Mapping[str, int]
) -> list[Start]:
    """Make the run and its repeats.

    Where no step lies between BASE and NEW, a run between them may be like either of them: only
    those on the far side count.
    """
    if one.named is not None:
        return [one.own, *(start for start in one.named if start.run_id != one.own.run_id)]
    foreign = {rival.own.run_id, *(start.run_id for start in rival.named or ())}
    mates = [
        start
        for start in series
        if levels[start.run_id] == levels[one.own.run_id] and start.run_id not in foreign
    ]
    if levels.get(rival.own.run_id) == levels[one.own.run_id]:
        place, of_rival = _place(one.own), _place(rival.own)
        is_earlier = place < of_rival
        mates = [start for start in mates if (_place(start) < place) == is_earlier]
    others = [start for start in mates if start.run_id != one.own.run_id]
    others.sort(key=lambda start: abs(start.started_at - one.own.started_at))
    return [one.own, *others][:MOST_REPEATS]


def _place(start: Start) -> tuple[datetime, str]:
    return start.started_at, start.run_id
