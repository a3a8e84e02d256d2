"""How many iterations to run next: the decisions that one rank takes between blocks. Pure.

All times are those of the slowest rank, so that the decision is about the point's step time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from raybench.job import Measure, Span
from raybench.measure.stats import median_interval
from raybench.measure.steady import is_steady

# Warm-up may not eat the whole budget: the samples are what is wanted.
_WARMUP_SHARE = 0.5
# Between looks at it warm-up grows by half: many looks would find a steady moment by chance.
_WARMUP_GROWTH = 1.5
_MAX_GROWTH = 2
# The ranks meet between blocks, and a hang is noticed there.
_MAX_BLOCK_S = 5.0
_MIN_LOOP_NS, _MAX_LOOP = 1_000_000, 1000
_MAX_GRAPH_LOOP = 100
_BREAKDOWN_SHARE = 0.1
_MIN_BREAKDOWN_STEPS, _MAX_BREAKDOWN_STEPS = 3, 10
# An instrumented step is run in about this many variants.
_BREAKDOWN_VARIANTS = 4
_NS_PER_S = 1e9


def next_warmup(step_ns: Sequence[int], settings: Measure, *, at_least: int = 1) -> int:
    """Iterations of the next block of warm-up; 0 ends it.

    step_ns: durations of the iterations so far. The first is cold (loading, compiling): it runs
    alone, counts as one iteration and neither against the budget nor in what is steady.
    at_least: iterations that are needed whatever the job and the budget say.
    """
    done = len(step_ns)
    if done == 0:
        return 1
    spent_s = sum(step_ns[1:]) / _NS_PER_S
    left_s = settings.max_seconds * _WARMUP_SHARE - spent_s
    needed = max(0, at_least - done)
    missing = max(needed, _wanted_warmup(step_ns, settings.warmup) - done)
    return _bounded(missing, step_ns[1:], left_s, at_least=needed)


def has_settled(step_ns: Sequence[int], span: Span) -> bool | None:
    """Whether warm-up ended in a steady state; None where the job fixes its length."""
    return None if span.min == span.max else is_steady(step_ns[1:])


def next_timed(
    sample_ns: Sequence[int], warmup_ns: Sequence[int], inner: int, settings: Measure
) -> int:
    """Samples of the next timed block; 0 ends the phase, which has at least one.

    sample_ns: step times measured so far in this phase, of `inner` steps each.
    warmup_ns: durations of the iterations of the warm-up.
    """
    done = len(sample_ns)
    spent_s = (sum(warmup_ns[1:]) + inner * sum(sample_ns)) / _NS_PER_S
    expected_ns = [inner * ns for ns in sample_ns or warmup_ns[1:]]
    return _bounded(
        _wanted_samples(sample_ns, settings) - done,
        expected_ns,
        settings.max_seconds - spent_s,
        at_least=1 if done == 0 else 0,
    )


def inner_iterations(step_ns: Sequence[int], *, graph: bool) -> int:
    """Steps to time as one sample, so that it takes about 1 ms, from the later half of `step_ns`.

    At most 1000, and 100 in a CUDA graph, which holds every kernel of all of them.
    """
    settled = step_ns[(len(step_ns) + 1) // 2 :] or step_ns
    typical_ns = max(1.0, statistics.median(settled))
    most = _MAX_GRAPH_LOOP if graph else _MAX_LOOP
    return min(most, math.ceil(_MIN_LOOP_NS / typical_ns))


def breakdown_steps(step_ns: Sequence[int], settings: Measure) -> int:
    """Instrumented steps of each kind that cost at most about a tenth of the budget; 3 to 10."""
    budget_ns = settings.max_seconds * _BREAKDOWN_SHARE * _NS_PER_S
    fits = int(budget_ns / _BREAKDOWN_VARIANTS / max(1.0, statistics.median(step_ns)))
    return min(_MAX_BREAKDOWN_STEPS, max(_MIN_BREAKDOWN_STEPS, fits))


def _wanted_warmup(step_ns: Sequence[int], span: Span) -> int:
    """Iterations of warm-up in all, as far as can be told now."""
    done = len(step_ns)
    if done < span.min:
        return span.min
    if span.min == span.max or is_steady(step_ns[1:]):
        return done
    return min(span.max, max(done + 1, round(done * _WARMUP_GROWTH)))


def _wanted_samples(sample_ns: Sequence[int], settings: Measure) -> int:
    """Samples in all, as far as can be told now: the error falls with the root of their count."""
    span, done = settings.iterations, len(sample_ns)
    if done < span.min or span.min == span.max:
        return span.min
    shortfall = _relative_half_width(sample_ns) / settings.target_ci
    if shortfall <= 1:
        return done
    return min(span.max, max(done + 1, round(done * min(shortfall**2, _MAX_GROWTH))))


def _relative_half_width(sample_ns: Sequence[int]) -> float:
    """Half the 95 % interval of the median over the median; infinite where there is none."""
    interval = median_interval([sample_ns])
    median = statistics.median(sample_ns)
    return (interval.high - interval.low) / 2 / median if interval and median else float("inf")


def _bounded(missing: int, expected_ns: Sequence[int], left_s: float, *, at_least: int) -> int:
    """As many of the missing iterations as fit the budget, and one block.

    expected_ns: what such iterations took so far; while nothing is known, one is run to learn it.
    """
    if missing <= 0:
        return 0
    if not expected_ns:
        return 1 if left_s > 0 else at_least
    iteration_s = max(1.0, statistics.median(expected_ns)) / _NS_PER_S
    fits = max(at_least, int(left_s / iteration_s))
    return min(missing, fits, max(1, int(_MAX_BLOCK_S / iteration_s)))
