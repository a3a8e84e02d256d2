"""What is best done with slow devices: scenarios of one step, set beside each other.

A scenario is a value of the setting `shares`; a fleet is all points of a run that are equal but for
that. Pure, over the rows of `raybench.analysis.scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raybench.analysis.rows import EXECUTION, ScaledRow, batch_column, setting_of
from raybench.analysis.scaling import probe_speeds
from raybench.records.status import Status
from raybench.results.point_row import step_of_parts
from raybench.stats.shares import fast_devices


@dataclass(frozen=True, kw_only=True)
class RankOfStep:
    """One rank's part of an uneven step, in ms.

    wait_ms: for the rank whose own step is longest; None where not known, and without a share.
    slow_ratio: measured speed of an emulated device, as a share of its own; None: not emulated.
    is_fast: not emulated; where none is, by the probes (`fast_devices`), True without them.
    """

    rank: int
    items: int
    wait_ms: float | None
    slow_ratio: float | None
    is_fast: bool


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A measured point: its throughput in samples/s, and its median step."""

    row: ScaledRow
    throughput: float
    step_ms: float

    @property
    def shares(self) -> str:
        """Return the shares that the job asks for, as "equal", "by_speed" or "96/32"."""
        return self.row.shares

    @property
    def half_width(self) -> float | None:
        """Return half of the 95 % interval of the throughput, as a share; None for one round."""
        low, high = self.row.throughput_low, self.row.throughput_high
        return None if low is None or high is None else (high - low) / 2 / self.throughput

    @cached_property
    def ranks(self) -> tuple[RankOfStep, ...]:
        """Return the part of each rank, in rank order; empty where the shares are not known."""
        row = self.row
        items = row.share_by_rank or ()
        ratios = row.slow_ratio_by_rank or (None,) * len(items)
        are_fast: Sequence[bool] = [ratio is None for ratio in ratios]
        if all(are_fast) and (speeds := probe_speeds(row)):
            are_fast = fast_devices(speeds)
        working = [rank for rank, share in enumerate(items) if share]
        own_ms = dict(zip(working, row.local_step_ms_by_rank or (), strict=False))
        last_ms = max(own_ms.values(), default=0.0)
        return tuple(
            RankOfStep(
                rank=rank,
                items=share,
                wait_ms=last_ms - own_ms[rank] if rank in own_ms else None,
                slow_ratio=ratios[rank],
                is_fast=are_fast[rank],
            )
            for rank, share in enumerate(items)
        )

    @property
    def idle_share_of_fast(self) -> float | None:
        """Return the mean share of a step that fast ranks with samples wait; None if unknown."""
        waits = [r.wait_ms for r in self.ranks if r.is_fast and r.wait_ms is not None]
        return sum(waits) / len(waits) / (step_of_parts(self.row) or 1.0) if waits else None


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Throughput of one scenario / another's - 1, with half of its 95 % interval."""

    gain: float
    # None where one of the scenarios has a single round.
    half_width: float | None


def gain_over(one: Scenario, other: Scenario) -> Gain:
    """Return by what share the throughput of `one` is above that of `other` (0.1: 10 % more)."""
    ratio = one.throughput / other.throughput
    if one.half_width is None or other.half_width is None:
        return Gain(gain=ratio - 1, half_width=None)
    return Gain(gain=ratio - 1, half_width=ratio * math.hypot(one.half_width, other.half_width))


@dataclass(frozen=True, kw_only=True)
class UnevenFleet:
    """Scenarios whose settings differ in the shares alone: shares, as "by_speed" -> scenario."""

    scenarios: Mapping[str, Scenario]

    @cached_property
    def first(self) -> ScaledRow:
        """Return the row of the first scenario: for the settings that all have in common."""
        return next(iter(self.scenarios.values())).row

    @property
    def slow_count(self) -> int:
        """Return how many devices are slow: emulated, else by probes (`fast_devices`); else 0."""
        if self.first.slow_ratio < 1:
            return min(self.first.slow_count, self.first.world_size)
        return sum(not rank.is_fast for rank in self._ranks)

    @property
    def probe_ratio(self) -> float:
        """Return the mean speed of a slow device over that of a fast one, as probed.

        For emulated devices over their own full speed. 1 if no device is slow or was probed.
        """
        found = [rank.slow_ratio for rank in self._ranks if rank.slow_ratio is not None]
        if found:
            return sum(found) / len(found)
        speeds = next(filter(None, (probe_speeds(s.row) for s in self.scenarios.values())), [])
        fast, slow = (
            [s for s, rank in zip(speeds, self._ranks, strict=False) if rank.is_fast is one]
            for one in (True, False)
        )
        return (sum(slow) / len(slow)) / (sum(fast) / len(fast)) if slow and fast else 1.0

    @property
    def _ranks(self) -> Sequence[RankOfStep]:
        return next((s.ranks for s in self.scenarios.values() if s.ranks), ())

    @cached_property
    def best(self) -> Scenario:
        """Return the scenario with the most samples/s."""
        return max(self.scenarios.values(), key=lambda scenario: scenario.throughput)

    def as_good(self) -> list[str]:
        """Return the other shares that may be as good as the best, as "by_speed".

        Their difference to the best is within its 95 % interval (`gain_over`), or is 0.
        """
        others = [one for one in self.scenarios.values() if one is not self.best]
        gains = [gain_over(self.best, one) for one in others]
        return [
            other.shares
            for other, gain in zip(others, gains, strict=True)
            if abs(gain.gain) <= (gain.half_width or 0.0)
        ]

    @property
    def is_sure(self) -> bool:
        """Return whether each scenario has an interval, so that a best scenario can be named."""
        return all(one.half_width is not None for one in self.scenarios.values())

    @property
    def crossover_batch(self) -> float | None:
        """Return the global batch in samples above which by_speed should beat fast, by the probes.

        0: at any batch. None if it never does, if all devices are fast, or it is not known.
        """
        rows = (one.row for one in self.scenarios.values())
        return next((r.crossover_batch for r in rows if r.crossover_batch is not None), None)


def fleets(rows: Sequence[ScaledRow]) -> list[UnevenFleet]:
    """Return the fleets that were measured with at least two kinds of shares.

    The fewest devices come first, then the fewest slow ones, then the largest `slow_ratio`. Points
    not ok, or without throughput or step time, are left out. rows: of one run, by `scaling`.
    """
    groups: dict[tuple[Any, ...], dict[str, Scenario]] = {}
    for row in rows:
        if row.status is not Status.OK or not row.throughput or not row.step_ms_p50:
            continue
        names = ("workload", "world_size", "scaling", *EXECUTION, batch_column(row) or "status")
        alike = tuple(str(setting_of(row, name)) for name in names if name != "shares")
        group = groups.setdefault((*alike, *sorted(row.params.items())), {})
        group[row.shares] = Scenario(row=row, throughput=row.throughput, step_ms=row.step_ms_p50)
    found = [UnevenFleet(scenarios=group) for group in groups.values() if len(group) > 1]
    return sorted(found, key=lambda f: (f.first.world_size, f.slow_count, -f.first.slow_ratio))
