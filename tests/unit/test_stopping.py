"""How many iterations come next, and what the whole procedure makes of noisy series."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from series import autocorrelated, with_outliers

from raybench.job import Measure, Span
from raybench.measure import stats
from raybench.measure.stopping import (
    breakdown_steps,
    has_settled,
    inner_iterations,
    next_timed,
    next_warmup,
)

MS = 1_000_000
S = 1000 * MS


@pytest.mark.parametrize(
    ("done_ns", "expected", "why"),
    [
        ([], 1, "the cold iteration alone"),
        ([S], 1, "one to learn the step time: the cold one foretells nothing"),
        ([S, MS], 8, "the rest of them"),
        ([S] + [MS] * 9, 0, "all are done"),
        ([S] + [S] * 3, 1, "as many as fit half the budget"),
        ([S] + [S] * 4, 0, "half the budget is spent"),
    ],
)
def test_a_fixed_warm_up_is_done_within_half_the_budget(done_ns, expected, why):
    assert next_warmup(done_ns, Measure(warmup=10, max_seconds=8.0)) == expected, why


def test_a_warm_up_that_a_cuda_graph_needs_is_done_whatever_job_and_budget_say():
    settings = Measure(warmup=2, max_seconds=0.001)
    assert next_warmup([S], settings, at_least=12) == 1
    assert next_warmup([S, MS], settings, at_least=12) == 10
    assert next_warmup([S] * 12, settings, at_least=12) == 0


def test_an_adaptive_warm_up_ends_when_steady_and_else_grows_to_its_maximum():
    settings = Measure(warmup=Span(min=20, max=60), max_seconds=1000.0)
    climbing = [S] + [MS + 20_000 * i for i in range(100)]
    assert next_warmup([S] + [MS] * 29, settings) == 0
    assert next_warmup(climbing[:30], settings) == 15
    assert next_warmup(climbing[:50], settings) == 10
    assert next_warmup(climbing[:60], settings) == 0
    assert has_settled([S] + [MS] * 29, settings.warmup) is True
    assert has_settled(climbing[:60], settings.warmup) is False
    assert has_settled(climbing[:60], Span(min=60, max=60)) is None


@pytest.mark.parametrize(
    ("done", "iterations", "step_ns", "max_seconds", "expected", "why"),
    [
        (0, 50, 200 * MS, 20.0, 25, "a block of five seconds"),
        (0, 50, 10 * MS, 20.0, 50, "all of them fit"),
        (0, 50, S, 4.0, 3, "as many as fit the budget"),
        (4, 50, S, 4.0, 0, "the budget is spent"),
        (50, 50, MS, 20.0, 0, "nothing is missing"),
        (0, 50, 30 * S, 20.0, 1, "one sample, however slow"),
        (0, 5, 0, 20.0, 5, "a step too short for the clock"),
    ],
)
def test_a_fixed_count_of_samples_is_what_is_missing_and_fits(
    done, iterations, step_ns, max_seconds, expected, why
):
    settings = Measure(iterations=iterations, max_seconds=max_seconds)
    assert next_timed([step_ns] * done, [S, step_ns], 1, settings) == expected, why


def test_without_a_warm_step_one_sample_is_taken_first():
    assert next_timed([], [S], 1, Measure(iterations=5)) == 1


def test_inner_loops_count_against_the_budget():
    settings = Measure(iterations=1000, max_seconds=1.0)
    assert next_timed([MS] * 10, [S], 50, settings) == 10


def test_samples_are_added_until_the_median_is_known_within_the_target():
    settings = Measure(target_ci=0.01, max_seconds=1000.0)
    rng = np.random.default_rng(3)
    quiet, noisy = ([int(MS * (1 + s * x)) for x in rng.standard_normal(30)] for s in (0.001, 0.3))
    assert next_timed([], [S] + [MS] * 9, 1, settings) == 30
    assert next_timed(quiet, [S], 1, settings) == 0
    assert next_timed(noisy, [S], 1, settings) == 30, "no more than twice as many in all"
    assert next_timed(noisy * 32, [S], 1, settings) == 40, "no more than the maximum"


def test_the_next_block_is_sized_by_what_is_missing():
    settings = Measure(target_ci=0.01, max_seconds=1000.0)
    rng = np.random.default_rng(3)
    samples = [int(MS * (1 + 0.04 * x)) for x in rng.standard_normal(100)]
    interval = stats.median_interval([samples])
    assert interval is not None
    shortfall = (interval.high - interval.low) / 2 / float(np.median(samples)) / 0.01
    assert 1 < shortfall**2 < 2
    assert next_timed(samples, [S], 1, settings) == round(100 * shortfall**2) - 100


@pytest.mark.parametrize(
    ("step_ns", "graph", "expected"),
    [(2 * MS, False, 1), (MS, False, 1), (300_000, False, 4), (100, False, 1000), (0, False, 1000),
     (2 * MS, True, 1), (20_000, True, 50), (100, True, 100)],
)  # fmt: skip
def test_short_steps_are_timed_in_loops_of_a_millisecond(step_ns, graph, expected):
    slow_start = [S] + [5 * MS] * 5
    assert inner_iterations(slow_start + [step_ns] * 10, graph=graph) == expected
    assert inner_iterations([step_ns], graph=graph) == expected


@pytest.mark.parametrize(("step_ns", "steps"), [(MS, 10), (100 * MS, 5), (10 * S, 3)])
def test_a_breakdown_costs_about_a_tenth_of_the_budget(step_ns, steps):
    assert breakdown_steps([step_ns] * 3, Measure(max_seconds=20.0)) == steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    warmup: int
    timed: int
    bias: float
    covered: bool


def outcome(step_ns: list[int], settings: Measure) -> Outcome:
    """What measuring a workload with these step times gives; 10 ms is the true median."""
    warmup: list[int] = []
    while count := next_warmup(warmup, settings):
        warmup += step_ns[len(warmup) : len(warmup) + count]
    timed: list[int] = []
    rest = step_ns[len(warmup) :]
    while count := next_timed(timed, warmup, 1, settings):
        timed += rest[len(timed) : len(timed) + count]
    interval = stats.median_interval([timed])
    assert interval is not None
    return Outcome(
        warmup=len(warmup),
        timed=len(timed),
        bias=float(np.median(timed)) / (10 * MS) - 1,
        covered=interval.low <= 10 * MS <= interval.high,
    )


def outcomes(runs: int, *, phi: float, noise: float, hump: float) -> list[Outcome]:
    """Noise of a relative size, a warm-up hump that decays over 8 iterations, 1 % outliers."""
    rng = np.random.default_rng(12)
    decay = hump * np.exp(-np.arange(1300) / 8)
    series = 1 + noise * autocorrelated(rng, runs=runs, count=1300, phi=phi) + decay
    rows = (10 * MS * with_outliers(rng, series)).astype(int)
    return [outcome(row.tolist(), Measure()) for row in rows]


@pytest.mark.parametrize("phi", [0.0, 0.5])
def test_after_a_warm_up_hump_the_median_is_right_and_its_interval_honest(phi: float):
    found = outcomes(200, phi=phi, noise=0.01, hump=0.6)
    # A fixed warm-up of 20 leaves 0.003.
    assert abs(np.mean([o.bias for o in found])) <= 0.001
    assert np.mean([o.covered for o in found]) >= 0.90
    assert np.mean([o.warmup + o.timed for o in found]) < 200


def test_a_quiet_series_takes_fewer_than_a_hundred_iterations():
    found = outcomes(60, phi=0.0, noise=0.002, hump=0.0)
    assert np.mean([o.warmup + o.timed < 100 for o in found]) > 0.9
    assert np.median([o.warmup + o.timed for o in found]) <= 60
