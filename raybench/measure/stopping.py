"""How many iterations to run next: the decisions of rank 0 between blocks. Pure.

Durations come from `raybench.stats.summary.step_series`. docs/explanation/numbers.md has the
reasons for the rules, and simulations of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raybench.conversion import NS_PER_S
from raybench.job.model import ENOUGH_SAMPLES, Measure
from raybench.stats.summary import LevelChange, level_change, student_t

# Sentinel instead of a number of samples: the samples so far were warm-up.
RESTART = -1

# The step time drifts if its level changes by more than this share and by more than this many
# standard errors. Noise of 1 % causes a false alarm in 1 of 3 checks, which costs less than a drift
# that is missed.
DRIFT_CHANGE, DRIFT_ERRORS = 0.003, 1.0
# A point is marked unsteady if noise does not explain the change.
UNSTEADY_CHANGE, UNSTEADY_ERRORS = 0.01, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingProgress:
    """The step times of a repeat so far, in ns."""

    # Eager steps; the first step is cold.
    warmup_ns: Sequence[float]
    # Samples that were timed, but drifted and so became warm-up.
    drifted_ns: Sequence[float] = ()
    # Timed samples, each the mean of `inner` steps.
    sample_ns: Sequence[float] = ()
    # Steps in each drifted or timed sample.
    inner: int = 1
    # Whether samples replay a CUDA graph.
    is_graph: bool = False

    @property
    def warm_s(self) -> float:
        """Seconds of warm-up steps and drifted samples, without the cold step."""
        return (sum(self.warmup_ns[1:]) + self.inner * sum(self.drifted_ns)) / NS_PER_S

    @property
    def timed_s(self) -> float:
        """Seconds of the timed samples."""
        return self.inner * sum(self.sample_ns) / NS_PER_S

    @property
    def expected_ns(self) -> Sequence[float]:
        """Durations of the latest samples in ns, from which to predict the next samples."""
        latest_ns = self.sample_ns or self.drifted_ns or self.warmup_ns[1:]
        return [self.inner * ns for ns in latest_ns]

    def level_change(self) -> LevelChange | None:
        """Return how the last third of the step times differs from the third before it.

        The result is None for fewer than 25 step times. The cold step does not count.
        """
        # Eager single steps are not comparable with loops or CUDA graphs.
        warmup_ns = self.warmup_ns[1:] if self.inner == 1 and not self.is_graph else ()
        return level_change([*warmup_ns, *self.drifted_ns, *self.sample_ns])


def import_scipy() -> None:
    """Load scipy now, so that the first decision does not wait for it."""
    student_t(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingPolicy:
    """Decides how long a point warms up, is timed and is instrumented."""

    # Section `measure` of the job. The other fields are the same for all jobs.
    settings: Measure

    # Warm-up grows by half between checks: many checks would find a steady moment by chance.
    warmup_growth: float = 1.5
    # Most warm-up steps to fill a duration; shorter steps continue their warm-up in loops.
    max_single_steps: int = 1000
    # Clocks that were not limited for this long count as unlimited.
    unlimited_s: float = 0.3

    # A wanted time or count is complete at this share, so that no block of a single step follows.
    enough_share: float = 0.97
    # Limits the memory of a repeat: 17 minutes of loops of 1 ms.
    most_samples: int = 1_000_000
    # Ranks meet between blocks, where a hang is noticed.
    max_block_s: float = 5.0

    # Shortest sample. Shorter steps are timed in loops of at most so many steps.
    min_loop_ns: int = 1_000_000
    max_loop: int = 1000
    # A graph holds the kernels of all its steps, so its loops are shorter.
    max_graph_loop: int = 100
    # After two steps the host is ahead of the device again. Steps above `slow_ns` need no lead-in.
    lead_in_samples: int = 2
    slow_ns: int = 250_000_000

    # Share of the budget for instrumented steps, which are of about so many variants.
    breakdown_share: float = 0.1
    breakdown_variants: int = 4
    min_breakdown_steps: int = 3
    max_breakdown_steps: int = 10
    # More steps do not help, because the speed of a host fluctuates within tenths of a second.
    max_local_steps: int = 100

    def next_warmup(
        self, step_ns: Sequence[float], *, at_least: int = 1, is_limited: bool = False
    ) -> int:
        """Return the number of iterations of the next warm-up block; 0 ends the warm-up.

        A block takes at most 5 s or has one iteration. If the job fixes the number of iterations,
        only `at_least` can raise it.

        Args:
            step_ns: durations of the iterations so far. The first, cold iteration is ignored.
            at_least: number of iterations needed in all, even if job and budget allow fewer.
            is_limited: whether heat or a fault limited the clocks in the last block; another block
                follows then.
        """
        settings, warmup, done = self.settings, self.settings.warmup, len(step_ns)
        if done == 0:
            return 1  # the cold iteration, in a block of its own
        warm_ns = step_ns[1:]
        # First run `warmup.min` iterations, and at least one after the cold iteration.
        wanted = max(warmup.min, min(2, warmup.max))
        if done >= warmup.min and not warmup.is_fixed:
            # Then fill `least_warmup_s`, with up to 1000 iterations.
            fitting = _iterations_in(settings.least_warmup_s, warm_ns)
            count_to_fill = 1 + min(self.max_single_steps, fitting)
            if done < self.enough_share * count_to_fill:
                wanted = count_to_fill
            elif _drifts(level_change(warm_ns)):
                # Then grow by half until the step time is steady, up to `warmup.max`.
                grown = max(done + 1, round(done * self.warmup_growth))
                wanted = min(max(warmup.max, count_to_fill), grown)
        left_s = settings.most_warmup_s - sum(warm_ns) / NS_PER_S
        required = max(0, at_least - done)
        missing = max(required, wanted - done)
        # Limited clocks make steps slower, so run for a moment until they are unlimited.
        if is_limited and missing <= 0 and not warmup.is_fixed:
            missing = max(1, _iterations_in(self.unlimited_s, warm_ns))
        return self._limit(missing, warm_ns, left_s, at_least=required)

    def next_timed(self, progress: TimingProgress) -> int:
        """Return the number of samples of the next timed block; 0 ends the phase.

        A block takes at most 5 s or has one sample. RESTART means that the samples so far were
        warm-up: move them to `drifted_ns` and ask again. A fixed count and the first 5 samples
        exceed the budget if necessary.
        """
        settings, done = self.settings, len(progress.sample_ns)
        left_s = settings.max_seconds - progress.warm_s - progress.timed_s
        # The first samples complete the warm-up, once, and then move to `drifted_ns`.
        warmup_samples = self._missing_warmup(progress)
        wanted = warmup_samples if warmup_samples > 0 else self._wanted_samples(progress)
        is_complete = done >= self.enough_share * wanted
        if done and is_complete:
            are_warmup = warmup_samples > 0 or self._is_drift(progress, left_s)
            if are_warmup:
                return RESTART
        if is_complete and done >= settings.fewest_samples:
            return 0
        at_least = max(0, settings.fewest_samples - done)
        return self._limit(wanted - done, progress.expected_ns, left_s, at_least=at_least)

    def has_settled(self, progress: TimingProgress) -> bool | None:
        """Return whether the step time stayed at one level; None for fewer than 25 step times."""
        change = progress.level_change()
        return None if change is None else not change.exceeds(UNSTEADY_CHANGE, UNSTEADY_ERRORS)

    def lead_in(self, progress: TimingProgress) -> int:
        """Return the number of untimed samples at the beginning of a block, 2 or 0.

        They fill the empty queue of the device. Samples above 0.25 s need none.

        Raises:
            StatisticsError: `progress` has no iteration.
        """
        expected_ns = progress.expected_ns or progress.warmup_ns
        return self.lead_in_samples if statistics.median(expected_ns) <= self.slow_ns else 0

    def inner_iterations(self, step_ns: Sequence[float], *, graph: bool) -> int:
        """Return how many steps make a sample of 1 ms, at most 1000, or 100 in a CUDA graph.

        Args:
            step_ns: durations of earlier steps, not empty; the later half counts.
            graph: whether the steps are captured in one CUDA graph.
        """
        later_half = step_ns[(len(step_ns) + 1) // 2 :] or step_ns
        typical_ns = max(1.0, statistics.median(later_half))
        most_steps = self.max_graph_loop if graph else self.max_loop
        return min(most_steps, math.ceil(self.min_loop_ns / typical_ns))

    def breakdown_steps(self, step_ns: Sequence[float]) -> int:
        """Return how many steps of each of four kinds fit into a tenth of `max_seconds`, 3 to 10.

        Args:
            step_ns: durations of earlier steps on the slowest rank, not empty.
        """
        budget_ns = self.settings.max_seconds * self.breakdown_share * NS_PER_S
        fitting = int(budget_ns / self.breakdown_variants / max(1.0, statistics.median(step_ns)))
        return min(self.max_breakdown_steps, max(self.min_breakdown_steps, fitting))

    def most_local_steps(self, step_ns: Sequence[float]) -> int:
        """Return how many steps without communication fit into a twentieth of `max_seconds`.

        The result is at most 100, and at least `breakdown_steps`.

        Args:
            step_ns: durations of earlier steps on the slowest rank, not empty.
        """
        breakdown_ns = self.settings.max_seconds * self.breakdown_share * NS_PER_S
        # Steps without communication may take half of the breakdown's time.
        fitting = int(breakdown_ns / 2 / max(1.0, statistics.median(step_ns)))
        return max(self.breakdown_steps(step_ns), min(self.max_local_steps, fitting))

    def _missing_warmup(self, progress: TimingProgress) -> int:
        """Return how many samples must still run as warm-up; 0 if the warm-up is complete."""
        # The single steps of the warm-up are at most 1000, so short steps fill too little time.
        missing_s = self.settings.least_warmup_s - progress.warm_s
        # A short missing time is not worth a block of its own.
        is_complete = missing_s <= (1 - self.enough_share) * self.settings.timed_s
        # Samples complete the warm-up only once: then they are in `drifted_ns`.
        if is_complete or self.settings.warmup.is_fixed or progress.drifted_ns:
            return 0
        samples = _iterations_in(missing_s, progress.expected_ns)
        most_samples = self.settings.iterations or self.most_samples
        return min(samples, most_samples)

    def _wanted_samples(self, progress: TimingProgress) -> int:
        """Return the total number of timed samples that the job asks for."""
        if self.settings.iterations:
            return self.settings.iterations
        fitting = _iterations_in(self.settings.timed_s, progress.expected_ns)
        return min(self.most_samples, max(ENOUGH_SAMPLES, fitting))

    def _is_drift(self, progress: TimingProgress, left_s: float) -> bool:
        """Return whether the samples drift and the budget allows to time as many samples again."""
        is_fixed = self.settings.warmup.is_fixed or self.settings.iterations
        return not is_fixed and progress.timed_s <= left_s and _drifts(progress.level_change())

    def _limit(
        self, missing: int, expected_ns: Sequence[float], left_s: float, *, at_least: int
    ) -> int:
        """Return how many of the missing iterations fit into `left_s` and into a block of 5 s."""
        # `at_least` iterations run even if no time is left, unless the block becomes too long.
        if missing <= 0:
            return 0
        if not expected_ns:  # run one iteration, to learn its duration
            return 1 if left_s > 0 else min(1, at_least)
        iteration_s = max(1.0, statistics.median(expected_ns)) / NS_PER_S
        affordable = max(at_least, int(left_s / iteration_s))
        most_in_block = max(1, int(self.max_block_s / iteration_s))
        return min(missing, affordable, most_in_block)


def _drifts(change: LevelChange | None) -> bool:
    return change is not None and change.exceeds(DRIFT_CHANGE, DRIFT_ERRORS)


def _iterations_in(seconds: float, expected_ns: Sequence[float]) -> int:
    """Return how many iterations fill this time, rounded up; 0 if no duration is known."""
    if not expected_ns:
        return 0
    return math.ceil(seconds * NS_PER_S / max(1.0, statistics.fmean(expected_ns)))
