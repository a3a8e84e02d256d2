"""Ways to share a step among fast and slow devices, compared.

A scenario is a value of the setting `shares`. A fleet is all points of a run that differ in
`shares` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from raybench.analysis.rows import EXECUTION, ScaledRow, batch_column, setting_of
from raybench.analysis.scaling import probe_speeds
from raybench.records.status import Status
from raybench.results.point_row import step_of_parts
from raybench.stats.shares import fast_devices


@dataclass(frozen=True, kw_only=True)
class RankInUnevenStep:
    """The part of a rank in an uneven step."""

    rank: int
    items: int
    # Wait for the slowest rank; None if unknown, or if the rank has no items.
    wait_ms: float | None
    # Measured speed of an emulated slow device / its full speed; None if not emulated.
    slow_ratio: float | None
    # Whether the device is not emulated as slow. If no device is emulated, the probes decide;
    # without probes all devices are fast.
    is_fast: bool


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A measured point with a value of `shares`."""

    row: ScaledRow
    # In samples/s.
    throughput: float
    # Median step.
    step_ms: float

    @property
    def shares(self) -> str:
        """The shares that the job asks for, as "equal", "by_speed" or "96/32"."""
        return self.row.shares

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % interval / the throughput; None for one round."""
        low, high = self.row.throughput_low, self.row.throughput_high
        return None if low is None or high is None else (high - low) / 2 / self.throughput

    @cached_property
    def ranks(self) -> tuple[RankInUnevenStep, ...]:
        """The part of each rank, in rank order; empty if the shares are unknown."""
        row = self.row
        shares = row.share_by_rank or ()
        slow_ratios = row.slow_ratio_by_rank or (None,) * len(shares)
        are_fast: Sequence[bool] = [ratio is None for ratio in slow_ratios]
        if all(are_fast) and (speeds := probe_speeds(row)):
            are_fast = fast_devices(speeds)
        # Only ranks with items have a local step.
        working = [rank for rank, items in enumerate(shares) if items]
        local_ms = dict(zip(working, row.local_step_ms_by_rank or (), strict=False))
        longest_ms = max(local_ms.values(), default=0.0)
        ranks = []
        for rank, items in enumerate(shares):
            ranks.append(
                RankInUnevenStep(
                    rank=rank,
                    items=items,
                    wait_ms=longest_ms - local_ms[rank] if rank in local_ms else None,
                    slow_ratio=slow_ratios[rank],
                    is_fast=are_fast[rank],
                )
            )
        return tuple(ranks)

    @property
    def idle_share_of_fast(self) -> float | None:
        """The mean wait of fast ranks with items / the step; None if unknown."""
        waits_ms = [
            rank.wait_ms for rank in self.ranks if rank.is_fast and rank.wait_ms is not None
        ]
        # The step of the rounds in which the waits were measured.
        step_ms = step_of_parts(self.row)
        if not waits_ms or not step_ms:
            return None
        return sum(waits_ms) / len(waits_ms) / step_ms


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Relative difference between the throughputs of two scenarios."""

    # 0.1 means 10 % more samples/s.
    gain: float
    # Half the width of the 95 % interval; None if a scenario has a single round.
    half_width: float | None


def gain_over(scenario: Scenario, other: Scenario) -> Gain:
    """Return the gain in throughput of `scenario` over `other`."""
    ratio = scenario.throughput / other.throughput
    if scenario.half_width is None or other.half_width is None:
        return Gain(gain=ratio - 1, half_width=None)
    half_width = ratio * math.hypot(scenario.half_width, other.half_width)
    return Gain(gain=ratio - 1, half_width=half_width)


@dataclass(frozen=True, kw_only=True)
class UnevenFleet:
    """Scenarios that differ in the shares alone."""

    # The key is the value of `shares`, such as "by_speed".
    scenarios: Mapping[str, Scenario]

    @cached_property
    def first(self) -> ScaledRow:
        """The row of the first scenario, for settings that all scenarios share."""
        return next(iter(self.scenarios.values())).row

    @property
    def slow_count(self) -> int:
        """The number of slow devices: emulated, or slow by the probes."""
        if self.first.slow_ratio < 1:
            return min(self.first.slow_count, self.first.world_size)
        return sum(not rank.is_fast for rank in self._ranks)

    @property
    def probe_ratio(self) -> float:
        """The mean speed of slow devices / the mean speed of fast devices, by the probes.

        For emulated slow devices: their mean speed / their full speed. 1 if no device is slow, or
        without probes.
        """
        ratios = [rank.slow_ratio for rank in self._ranks if rank.slow_ratio is not None]
        if ratios:
            return fmean(ratios)
        # Take the first scenario that has probes.
        speeds_of_scenarios = (probe_speeds(scenario.row) for scenario in self.scenarios.values())
        speeds = next(filter(None, speeds_of_scenarios), [])
        fast: list[float] = []
        slow: list[float] = []
        for speed, rank in zip(speeds, self._ranks, strict=False):
            (fast if rank.is_fast else slow).append(speed)
        return fmean(slow) / fmean(fast) if slow and fast else 1.0

    @property
    def _ranks(self) -> Sequence[RankInUnevenStep]:
        """The ranks of the first scenario with known shares; empty without such a scenario."""
        ranks_of_scenarios = (scenario.ranks for scenario in self.scenarios.values())
        return next(filter(None, ranks_of_scenarios), ())

    @cached_property
    def best(self) -> Scenario:
        """The scenario with the most samples/s."""
        return max(self.scenarios.values(), key=lambda scenario: scenario.throughput)

    def tied_shares(self) -> list[str]:
        """Return the shares that may be as good as the best shares."""
        ties = []
        for scenario in self.scenarios.values():
            gain = gain_over(self.best, scenario)
            # A tie: 0 lies within the interval of the gain.
            if scenario is not self.best and abs(gain.gain) <= (gain.half_width or 0.0):
                ties.append(scenario.shares)
        return ties

    @property
    def is_sure(self) -> bool:
        """Whether each scenario has an interval, so that a best scenario can be named."""
        return all(scenario.half_width is not None for scenario in self.scenarios.values())

    @property
    def crossover_batch(self) -> float | None:
        """The global batch in samples above which by_speed should beat fast, by the probes.

        0 if by_speed should always win. None if by_speed should never win, if all devices are fast,
        or without probes.
        """
        batches = (scenario.row.crossover_batch for scenario in self.scenarios.values())
        return next((batch for batch in batches if batch is not None), None)


def fleets(rows: Sequence[ScaledRow]) -> list[UnevenFleet]:
    """Return the fleets of a run that have at least two scenarios.

    Fleets are sorted by their number of devices, then by their number of slow devices, then by
    `slow_ratio`, the largest first.

    Args:
        rows: rows of one run, as `scaling` returns them.
    """
    scenarios_by_fleet: dict[tuple[Any, ...], dict[str, Scenario]] = {}
    for row in rows:
        if row.status is not Status.OK or not row.throughput or not row.step_ms_p50:
            continue
        names = ["workload", "world_size", "scaling", *EXECUTION]
        if batch := batch_column(row):
            names.append(batch)
        settings = tuple(str(setting_of(row, name)) for name in names if name != "shares")
        key = (*settings, *sorted(row.params.items()))
        scenario = Scenario(row=row, throughput=row.throughput, step_ms=row.step_ms_p50)
        scenarios_by_fleet.setdefault(key, {})[row.shares] = scenario
    fleets_of_run = []
    for scenarios in scenarios_by_fleet.values():
        if len(scenarios) > 1:
            fleets_of_run.append(UnevenFleet(scenarios=scenarios))

    def order(fleet: UnevenFleet) -> tuple[int, int, float]:
        return fleet.first.world_size, fleet.slow_count, -fleet.first.slow_ratio

    return sorted(fleets_of_run, key=order)
