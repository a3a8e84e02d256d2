"""How many iterations to run next: the decisions that rank 0 takes between blocks. Pure.

Durations are those of `raybench.stats.summary.step_series` where nothing else is said.
docs/explanation/numbers.md has the reasons and what simulation says of the rules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raybench.conversion import NS_PER_S
from raybench.job.model import ENOUGH_SAMPLES, Measure
from raybench.stats.summary import LevelChange, level_change, student_t

# In place of a number of samples: those timed so far were warm-up.
RESTART = -1

# The step time drifts if its level changes by more than this share, and by more than so many
# standard errors. Noise of 1 % does so in 1 of 3 looks, which costs the time of one look; a drift
# that is missed costs more.
DRIFT_CHANGE, DRIFT_ERRORS = 0.003, 1.0
# A point is marked unsteady where chance does not explain the change.
UNSTEADY_CHANGE, UNSTEADY_ERRORS = 0.01, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingProgress:
    """The step times of a repeat so far, in ns.

    warmup_ns: eager steps, the cold one first. drifted_ns: samples that turned out to be warm-up.
    sample_ns: timed samples. A sample is the mean of `inner` steps. is_graph: whether samples
    replay a CUDA graph.
    """

    warmup_ns: Sequence[float]
    drifted_ns: Sequence[float] = ()
    sample_ns: Sequence[float] = ()
    inner: int = 1
    is_graph: bool = False

    @property
    def warm_s(self) -> float:
        """Seconds of warm-up steps and drifted samples so far, without the cold step."""
        return (sum(self.warmup_ns[1:]) + self.inner * sum(self.drifted_ns)) / NS_PER_S

    @property
    def timed_s(self) -> float:
        """Seconds of the timed samples so far."""
        return self.inner * sum(self.sample_ns) / NS_PER_S

    @property
    def expected_ns(self) -> Sequence[float]:
        """How long each sample so far took as a whole: its `inner` steps together, in ns.

        Of the timed samples, else of those that drifted, else `inner` times each warm-up step
        after the cold one. Empty if no step but the cold one was run.
        """
        known_ns = self.sample_ns or self.drifted_ns or self.warmup_ns[1:]
        return [self.inner * ns for ns in known_ns]

    def level_change(self) -> LevelChange | None:
        """Return the change of level late in warm-up and samples; None for fewer than 25 left.

        Left out are the cold step and, where samples are loops or CUDA graphs, all warm-up steps.
        """
        warmup_ns = self.warmup_ns[1:] if self.inner == 1 and not self.is_graph else ()
        return level_change([*warmup_ns, *self.drifted_ns, *self.sample_ns])


def load_decisions() -> None:
    """Load scipy now, so that the first decision between two blocks does not wait for it."""
    student_t(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingPolicy:
    """Decides how long a point warms up, is timed and is taken apart.

    settings: what the job asks for. The constants below them are the same for all jobs.
    """

    settings: Measure

    # Between looks at it warm-up grows by half: many looks would find a steady moment by chance.
    warmup_growth: float = 1.5
    # Steps that are shorter than 1 ms go on warming up in the loops in which they are timed.
    max_single_steps: int = 1000
    # Clocks that are not held back for so long count as free.
    unlimited_s: float = 0.3

    # From this share on, a time or a count is reached: no block of a single step for the rest.
    nearly: float = 0.97
    # Bounds the memory of a repeat: a quarter of an hour of loops of 1 ms.
    most_samples: int = 1_000_000
    # The ranks meet between blocks, and a hang is noticed there.
    max_block_s: float = 5.0

    # Loops that are timed as one sample; a CUDA graph holds every kernel of all its steps.
    min_loop_ns: int = 1_000_000
    max_loop: int = 1000
    max_graph_loop: int = 100
    # After two steps the host is ahead of the device again; slow steps hide how it began.
    lead_in_samples: int = 2
    slow_ns: int = 250_000_000

    # Share of the budget for instrumented steps, which run in about this many variants.
    breakdown_share: float = 0.1
    breakdown_variants: int = 4
    min_breakdown_steps: int = 3
    max_breakdown_steps: int = 10
    # The pace of a host wanders within tenths of a second.
    max_local_steps: int = 100

    def next_warmup(
        self, step_ns: Sequence[float], *, at_least: int = 1, is_limited: bool = False
    ) -> int:
        """Return how many iterations the next warm-up block (at most 5 s, or one) has; 0 ends it.

        Unless the job fixes the count, `warmup.min` steps come first. More fill `least_warmup_s`
        (1000 at most, even beyond `warmup.max`), then go on up to `warmup.max` until the step time
        is steady. `most_warmup_s` cuts a fixed count too.

        Args:
            step_ns: durations of the iterations so far. The first, cold one counts neither in the
                budget nor as steady.
            at_least: iterations needed in all, whatever job and budget say.
            is_limited: whether clocks were limited in the last block. One more block follows then
                while the budget lasts, unless the job fixes the count.
        """
        settings, span, done = self.settings, self.settings.warmup, len(step_ns)
        if done == 0:
            return 1
        # How many the warm-up is to have in all so far: just the least where the job fixes that,
        # as many as there are where the step is steady, else some more.
        wanted = max(span.min, min(2, span.max))  # the cold one alone tells nothing of the others
        if done >= span.min and not span.is_fixed:
            in_time = _count_in(settings.least_warmup_s, step_ns[1:])
            least = 1 + min(self.max_single_steps, in_time)
            if done < self.nearly * least:
                wanted = least
            elif _drifts(level_change(step_ns[1:])):
                more = max(done + 1, round(done * self.warmup_growth))
                wanted = min(max(span.max, least), more)
        left_s = settings.most_warmup_s - sum(step_ns[1:]) / NS_PER_S
        needed = max(0, at_least - done)
        missing = max(needed, wanted - done)
        if is_limited and missing <= 0 and not span.is_fixed:
            missing = max(1, _count_in(self.unlimited_s, step_ns[1:]))
        return self._limit(missing, step_ns[1:], left_s, at_least=needed)

    def next_timed(self, progress: TimingProgress) -> int:
        """Return how many samples the next timed block (at most 5 s, or one) has; 0 ends the phase.

        RESTART: the samples so far were warm-up; move them to `drifted_ns` and ask again. The
        budget `max_seconds` includes `warm_s`. It never cuts a fixed count nor 5 samples.
        """
        settings, done = self.settings, len(progress.sample_ns)
        left_s = settings.max_seconds - progress.warm_s - progress.timed_s
        owed = self._owed_warmup(progress)
        wanted = owed or self._samples_wanted(progress)
        is_complete = done >= self.nearly * wanted
        if done and is_complete and (owed or self._is_drift(progress, left_s)):
            return RESTART
        if is_complete and done >= settings.fewest_samples:
            return 0
        at_least = max(0, settings.fewest_samples - done)
        return self._limit(wanted - done, progress.expected_ns, left_s, at_least=at_least)

    def has_settled(self, progress: TimingProgress) -> bool | None:
        """Return whether the step time stayed at one level; None where `level_change` is None.

        Only the last two thirds of the steps that count there are compared.
        """
        change = progress.level_change()
        return None if change is None else not change.exceeds(UNSTEADY_CHANGE, UNSTEADY_ERRORS)

    def lead_in(self, progress: TimingProgress) -> int:
        """Return how many untimed samples to run at the beginning of a block, 2 or 0.

        The device's queue is empty then. 0 if a sample is expected to take more than 0.25 s, by the
        cold step if that is all. Raises StatisticsError if `progress` has no iteration.
        """
        expected_ns = progress.expected_ns or progress.warmup_ns
        return self.lead_in_samples if statistics.median(expected_ns) <= self.slow_ns else 0

    def inner_iterations(self, step_ns: Sequence[float], *, graph: bool) -> int:
        """Return how many steps make a sample of 1 ms, at most 1000, or 100 with `graph`.

        With `graph` these steps are captured in one CUDA graph. step_ns: durations of earlier
        steps, of replays with `graph`; the later half counts. Raises StatisticsError for none.
        """
        settled = step_ns[(len(step_ns) + 1) // 2 :] or step_ns
        typical_ns = max(1.0, statistics.median(settled))
        most = self.max_graph_loop if graph else self.max_loop
        return min(most, math.ceil(self.min_loop_ns / typical_ns))

    def breakdown_steps(self, step_ns: Sequence[float]) -> int:
        """Return how many steps of each of four kinds fit a tenth of `max_seconds`, 3 to 10.

        step_ns: of earlier steps, each on its slowest rank. Raises StatisticsError for none.
        """
        budget_ns = self.settings.max_seconds * self.breakdown_share * NS_PER_S
        fits = int(budget_ns / self.breakdown_variants / max(1.0, statistics.median(step_ns)))
        return min(self.max_breakdown_steps, max(self.min_breakdown_steps, fits))

    def most_local_steps(self, step_ns: Sequence[float]) -> int:
        """Return how many steps without communication fit a twentieth of `max_seconds`.

        At most 100, at least `breakdown_steps`. step_ns, and what it raises: as there.
        """
        budget_ns = self.settings.max_seconds * self.breakdown_share * NS_PER_S / 2
        fits = int(budget_ns / max(1.0, statistics.median(step_ns)))
        return max(self.breakdown_steps(step_ns), min(self.max_local_steps, fits))

    def _owed_warmup(self, progress: TimingProgress) -> int:
        """Return how many loops must still warm up a workload with steps below 1 ms; else 0."""
        owed_s = self.settings.least_warmup_s - progress.warm_s
        is_complete = owed_s <= (1 - self.nearly) * self.settings.timed_s
        if is_complete or self.settings.warmup.is_fixed or progress.drifted_ns:
            return 0
        return self._at_most(_count_in(owed_s, progress.expected_ns))

    def _samples_wanted(self, progress: TimingProgress) -> int:
        """Return how many samples are to be timed in all, however long they take."""
        if self.settings.iterations:
            return self.settings.iterations
        in_time = _count_in(self.settings.timed_s, progress.expected_ns)
        return self._at_most(max(ENOUGH_SAMPLES, in_time))

    def _at_most(self, count: int) -> int:
        return min(count, self.settings.iterations or self.most_samples)

    def _is_drift(self, progress: TimingProgress, left_s: float) -> bool:
        """Return whether the samples drift and the budget allows as many again."""
        is_fixed = self.settings.warmup.is_fixed or self.settings.iterations
        return not is_fixed and progress.timed_s <= left_s and _drifts(progress.level_change())

    def _limit(
        self, missing: int, expected_ns: Sequence[float], left_s: float, *, at_least: int
    ) -> int:
        """Return how many of the missing iterations fit the budget and one block of 5 s, or 0.

        expected_ns: durations of earlier ones; while there are none, 1 is returned to learn it.
        left_s: what is left of the budget. at_least: so many of them the budget does not limit.
        """
        if missing <= 0:
            return 0
        if not expected_ns:
            return 1 if left_s > 0 else min(1, at_least)
        iteration_s = max(1.0, statistics.median(expected_ns)) / NS_PER_S
        fits = max(at_least, int(left_s / iteration_s))
        return min(missing, fits, max(1, int(self.max_block_s / iteration_s)))


def _drifts(change: LevelChange | None) -> bool:
    """Return whether the step time drifts; False if the change is unknown."""
    return change is not None and change.exceeds(DRIFT_CHANGE, DRIFT_ERRORS)


def _count_in(seconds: float, expected_ns: Sequence[float]) -> int:
    """Return how many iterations fill so many seconds, rounded up; 0 if `expected_ns` is empty."""
    if not expected_ns:
        return 0
    return math.ceil(seconds * NS_PER_S / max(1.0, statistics.fmean(expected_ns)))
