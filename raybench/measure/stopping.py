"""How many iterations to run next: the decisions that one rank takes between blocks. Pure.

All durations are the point's step times over its ranks, `raybench.stats.summary.step_series`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raybench.job.model import Measure
from raybench.stats.steady import LevelChange, level_change
from raybench.stats.summary import median_interval, student_t

# Warm-up may not eat the whole budget: the samples are what is wanted.
_WARMUP_SHARE = 0.5
# Clocks that are not held back for so long are taken for free.
_STILL_S = 0.3
# Between looks at it warm-up grows by half: many looks would find a steady moment by chance.
_WARMUP_GROWTH = 1.5
_MIN_GROWTH, _MAX_GROWTH = 1.25, 2
# In place of a number of samples: those timed so far were warm-up.
AGAIN = -1
# Fewer samples only where the budget ends.
_ENOUGH = 30
# A level that changes by more, and by so many standard errors, is still that of the warm-up. By
# chance in 1 of 3 looks at noise of 1 %, which costs a second; a change that is missed costs more.
_CHANGE, _LIKELY = 0.003, 1.0
# Standard errors beyond which a change is no chance, so that it is held against a point.
_PLAIN = 3.0
# Of a budget too small for min_seconds and half of it as warm-up.
_MIN_SHARE = 2 / 3
# A time that is reached but for so much is reached: no block of a single step for the rest.
_NEARLY = 0.97
# Steps that are shorter than 1 ms go on warming up in the loops in which they are timed.
_MAX_SINGLE_STEPS = 1000
# The ranks meet between blocks, and a hang is noticed there.
_MAX_BLOCK_S = 5.0
_MIN_LOOP_NS, _MAX_LOOP = 1_000_000, 1000
_MAX_GRAPH_LOOP = 100
# After two steps the host is ahead of the device again; slow steps hide how it began.
_LEAD_IN, _SLOW_NS = 2, 250_000_000
_BREAKDOWN_SHARE = 0.1
_MIN_BREAKDOWN_STEPS, _MAX_BREAKDOWN_STEPS = 3, 10
# The pace of a host wanders within tenths of a second.
_MAX_LOCAL_STEPS = 100
# An instrumented step is run in about this many variants.
_BREAKDOWN_VARIANTS = 4
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a repeat took so far, in nanoseconds, as the point's step time.

    warmup_ns: eager steps, the cold one first. drifted_ns: samples that turned out to be warm-up.
    sample_ns: samples, means of `inner` steps each. is_graph: whether samples replay a CUDA graph.
    """

    warmup_ns: Sequence[float]
    drifted_ns: Sequence[float] = ()
    sample_ns: Sequence[float] = ()
    inner: int = 1
    is_graph: bool = False

    @property
    def warm_s(self) -> float:
        """How long the warm-up took so far, without the cold step."""
        return (sum(self.warmup_ns[1:]) + self.inner * sum(self.drifted_ns)) / _NS_PER_S

    @property
    def timed_s(self) -> float:
        """Of the samples."""
        return self.inner * sum(self.sample_ns) / _NS_PER_S

    @property
    def expected_ns(self) -> Sequence[float]:
        """Durations of what comes next, as far as they are known: of samples, else of steps."""
        known_ns = self.sample_ns or self.drifted_ns or self.warmup_ns[1:]
        return [self.inner * ns for ns in known_ns]

    @property
    def before_ns(self) -> Sequence[float]:
        """What preceded the samples and was measured as they are: not single steps before loops."""
        is_alike = self.inner == 1 and not self.is_graph
        return [*(self.warmup_ns[1:] if is_alike else ()), *self.drifted_ns]

    def level_change(self) -> LevelChange | None:
        """Return the change of level over warm-up and samples; None where they are too few."""
        return level_change([*self.before_ns, *self.sample_ns])


def load_decisions() -> None:
    """Load scipy, which the first decision between two blocks needs; again it costs nothing."""
    student_t(1.0)


def next_warmup(
    step_ns: Sequence[float], settings: Measure, *, at_least: int = 1, is_limited: bool = False
) -> int:
    """Decide how many iterations the next block of warm-up has; 0 ends it.

    step_ns: durations of the iterations so far. The first is cold (loading, compiling): it runs
    alone, counts as one iteration and neither against the budget nor in what is steady.
    at_least: iterations that are needed whatever the job and the budget say. is_limited: whether
    heat or a fault held clocks back in the last block: then it goes on while the budget lasts.
    """
    done = len(step_ns)
    if done == 0:
        return 1
    left_s = settings.max_seconds * _WARMUP_SHARE - sum(step_ns[1:]) / _NS_PER_S
    needed = max(0, at_least - done)
    missing = max(needed, _warmup_wanted(step_ns, settings) - done)
    if is_limited and missing <= 0 and not (settings.warmup.is_fixed or settings.is_quick):
        missing = max(1, _count_in(_STILL_S, step_ns[1:]))
    return _limit(missing, step_ns[1:], left_s, at_least=needed)


def has_settled(course: Course, settings: Measure) -> bool | None:
    """Whether the step time stayed where it is; None where too few steps tell nothing.

    It did not where its level changes by more than `target_ci` and than noise seldom does.
    """
    change = course.level_change()
    return None if change is None else not change.exceeds(settings.target_ci, _PLAIN)


def next_timed(course: Course, settings: Measure) -> int:
    """Decide how many samples the next timed block has; 0 ends the phase, which has one at least.

    AGAIN: the samples so far were warm-up, and timing begins anew.
    """
    done, left_s = len(course.sample_ns), settings.max_seconds - course.warm_s - course.timed_s
    owed = _warmup_owed(course, settings)
    if done and (done >= _NEARLY * owed if owed else _was_warmup(course, settings, left_s)):
        return AGAIN
    wanted = owed or _samples_wanted(course, settings)
    # The budget never cuts what the job asks for at least.
    at_least = max(0, settings.iterations.min - done)
    return _limit(wanted - done, course.expected_ns, left_s, at_least=at_least)


def lead_in(course: Course) -> int:
    """Untimed samples at the beginning of a block, when the queue of the device is empty."""
    expected_ns = course.expected_ns or course.warmup_ns
    return _LEAD_IN if statistics.median(expected_ns) <= _SLOW_NS else 0


def inner_iterations(step_ns: Sequence[float], *, graph: bool) -> int:
    """Choose the steps of one sample, so that it takes 1 ms, by the later half of `step_ns`.

    At most 1000, and 100 in a CUDA graph, which holds every kernel of all of them.
    """
    settled = step_ns[(len(step_ns) + 1) // 2 :] or step_ns
    typical_ns = max(1.0, statistics.median(settled))
    most = _MAX_GRAPH_LOOP if graph else _MAX_LOOP
    return min(most, math.ceil(_MIN_LOOP_NS / typical_ns))


def breakdown_steps(step_ns: Sequence[float], settings: Measure) -> int:
    """Instrumented steps of each kind that cost at most about a tenth of the budget; 3 to 10."""
    budget_ns = settings.max_seconds * _BREAKDOWN_SHARE * _NS_PER_S
    fits = int(budget_ns / _BREAKDOWN_VARIANTS / max(1.0, statistics.median(step_ns)))
    return min(_MAX_BREAKDOWN_STEPS, max(_MIN_BREAKDOWN_STEPS, fits))


def most_local_steps(step_ns: Sequence[float], settings: Measure) -> int:
    """Count the steps without communication that fit half of the breakdown's share of the budget.

    At most 100, and as many as of the other kinds at least.
    """
    budget_ns = settings.max_seconds * _BREAKDOWN_SHARE * _NS_PER_S / 2
    fits = int(budget_ns / max(1.0, statistics.median(step_ns)))
    return max(breakdown_steps(step_ns, settings), min(_MAX_LOCAL_STEPS, fits))


def _warmup_wanted(step_ns: Sequence[float], settings: Measure) -> int:
    """Estimate the iterations of warm-up in all."""
    span, done = settings.warmup, len(step_ns)
    if done < span.min or span.is_fixed:
        return span.min
    least_s = _least_s(settings) * _WARMUP_SHARE
    least = 1 + min(_MAX_SINGLE_STEPS, _count_in(least_s, step_ns[1:]))
    if done < _NEARLY * least:
        return least
    if not _changes(level_change(step_ns[1:])):
        return done
    return min(max(span.max, least), max(done + 1, round(done * _WARMUP_GROWTH)))


def _warmup_owed(course: Course, settings: Measure) -> int:
    """Count the samples that the warm-up still lacks; short steps go on in loops, once."""
    owed_s = _least_s(settings) * _WARMUP_SHARE - course.warm_s
    is_chosen = not settings.warmup.is_fixed and not course.drifted_ns
    if not is_chosen or owed_s <= (1 - _NEARLY) * _least_s(settings):
        return 0
    return min(settings.iterations.max, _count_in(owed_s, course.expected_ns))


def _changes(change: LevelChange | None) -> bool:
    """Whether a level seems to change still; what is not known is no reason to go on."""
    return change is not None and change.exceeds(_CHANGE, _LIKELY)


def _was_warmup(course: Course, settings: Measure, left_s: float) -> bool:
    """Whether the level changes still, and as much time is left to time anew."""
    if settings.is_quick or settings.warmup.is_fixed or settings.iterations.is_fixed:
        return False
    is_enough = len(course.sample_ns) >= _NEARLY * _least_samples(course, settings)
    return is_enough and course.timed_s <= left_s and _changes(course.level_change())


def _samples_wanted(course: Course, settings: Measure) -> int:
    """Estimate the samples in all: the error falls with the root of their count."""
    span, done = settings.iterations, len(course.sample_ns)
    if span.is_fixed:
        return span.min
    least = _least_samples(course, settings)
    if done < span.min or done < _NEARLY * least:
        return least
    shortfall = (_half_width(course.sample_ns) / settings.target_ci) ** 2
    if not settings.is_quick and _changes(course.level_change()):
        # What the budget leaves makes the part that still changes small.
        shortfall = max(shortfall, _MAX_GROWTH)
    if shortfall <= 1:
        return done
    growth = min(max(shortfall, _MIN_GROWTH), _MAX_GROWTH)
    return min(span.max, max(done + 1, round(done * growth)))


def _least_samples(course: Course, settings: Measure) -> int:
    """Count the samples below which no question is asked."""
    span = settings.iterations
    least = max(span.min, _ENOUGH, _count_in(_least_s(settings), course.expected_ns))
    return min(span.max, least)


def _least_s(settings: Measure) -> float:
    """Seconds that are timed at least; a small budget leaves two thirds of itself."""
    return min(settings.min_seconds, _MIN_SHARE * settings.max_seconds)


def _count_in(seconds: float, expected_ns: Sequence[float]) -> int:
    """How many iterations fill so many seconds, by what such iterations took."""
    if not expected_ns:
        return 0
    return math.ceil(seconds * _NS_PER_S / max(1.0, statistics.fmean(expected_ns)))


def _half_width(sample_ns: Sequence[float]) -> float:
    """Half the interval of the median over the median; infinite where there is none."""
    interval = median_interval([sample_ns])
    if interval is None:
        return float("inf")
    return (interval.high - interval.low) / 2 / statistics.median(sample_ns)


def _limit(missing: int, expected_ns: Sequence[float], left_s: float, *, at_least: int) -> int:
    """As many of the missing iterations as fit the budget, and one block.

    expected_ns: what such iterations took so far; while nothing is known, one is run to learn it.
    """
    if missing <= 0:
        return 0
    if not expected_ns:
        return 1 if left_s > 0 else min(1, at_least)
    iteration_s = max(1.0, statistics.median(expected_ns)) / _NS_PER_S
    fits = max(at_least, int(left_s / iteration_s))
    return min(missing, fits, max(1, int(_MAX_BLOCK_S / iteration_s)))
