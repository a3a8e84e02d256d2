"""How many iterations come next, and what the whole procedure makes of noisy series."""

from typing import Any

import numpy as np
import pytest

from benchmarks.simulations.looks import NOISES, Cell, Look, looks
from raybench.job.model import Measure, Span
from raybench.measure.stopping import RESTART, Progress, StoppingPolicy
from raybench.stats.summary import median_interval

MS = 1_000_000
S = 1000 * MS


def policy(**settings: Any) -> StoppingPolicy:
    return StoppingPolicy(settings=Measure(**settings))


def test_a_warm_up_that_a_cuda_graph_needs_is_done_whatever_job_and_budget_say():
    chosen = policy(warmup=2, max_seconds=0.001)
    assert chosen.next_warmup([S], at_least=12) == 1
    assert chosen.next_warmup([S, MS], at_least=12) == 10
    assert chosen.next_warmup([S] * 12, at_least=12) == 0
    assert policy(warmup=1).next_warmup([S]) == 0


def test_an_adaptive_warm_up_ends_when_steady_and_else_grows_to_its_maximum():
    chosen = policy(warmup=Span(min=20, max=60), min_seconds=0.0, max_seconds=1000.0)
    climbing = [S] + [MS + 20_000 * i for i in range(100)]
    assert chosen.next_warmup([S] + [MS] * 29) == 0
    assert policy(warmup=Span(min=1, max=9)).next_warmup([S]) == 1, "one beside the cold step"
    assert chosen.next_warmup(climbing[:30]) == 15
    assert chosen.next_warmup(climbing[:50]) == 10
    assert chosen.next_warmup(climbing[:60]) == 0


def course(sample_ns=(), warmup_ns=(S,), **changes) -> Progress:
    return Progress(sample_ns=sample_ns, warmup_ns=warmup_ns, **changes)


WARM = [S] + [10 * MS] * 100


def noisy(count: int, sd: float, step_ns: int = 10 * MS) -> list[int]:
    rng = np.random.default_rng(3)
    return [int(step_ns * (1 + sd * x)) for x in rng.standard_normal(count)]


def test_at_least_two_seconds_are_timed():
    assert policy().next_timed(course([10 * MS] * 100, WARM)) == 100
    assert policy().next_timed(course([10 * MS] * 199, WARM)) == 0, "no block for the last 1 %"
    chosen = policy(warmup=1, iterations=Span(min=5, max=1000), max_seconds=1.0)
    assert chosen.next_timed(course([MS] * 10, inner=50)) == 10, "loops count against the budget"
    small = policy(warmup=1, min_seconds=3.0, max_seconds=3.0)
    assert (small.settings.least_s, small.next_timed(course([10 * MS] * 200))) == (2.0, 0)


def test_samples_are_added_until_the_median_is_known_within_the_target():
    chosen = policy(target_ci=0.01, max_seconds=1000.0)
    assert chosen.next_timed(course(noisy(200, 0.001), WARM)) == 0
    assert chosen.next_timed(course(noisy(200, 0.3), WARM)) == 200, "no more than as many again"
    assert chosen.next_timed(course(noisy(9900, 0.9), WARM)) == 100, "no more than the maximum"


def test_a_quick_look_ends_when_the_median_is_known_within_the_target():
    chosen = policy(min_seconds=0.0, target_ci=0.01, max_seconds=1000.0)
    assert chosen.next_timed(course([], [S] + [MS] * 9)) == 30
    assert chosen.next_timed(course(noisy(30, 0.001))) == 0
    assert chosen.next_timed(course(noisy(30, 0.3))) == 30, "no more than twice as many in all"
    samples = noisy(100, 0.05)
    interval = median_interval([samples])
    half = (interval.high - interval.low) / 2 / float(np.median(samples))
    asked = chosen.settings.model_copy(update={"target_ci": half / 1.3})
    assert StoppingPolicy(settings=asked).next_timed(course(samples)) == 69


def test_samples_that_drift_were_warm_up_and_timing_begins_anew():
    sinking = [10 * MS * (1 - 0.02 * i / 200) for i in range(200)]
    assert policy().next_timed(course(sinking, WARM)) == RESTART
    anew = course([], WARM, drifted_ns=sinking)
    assert policy().next_timed(anew) > 0
    assert anew.warm_s == pytest.approx(1 + sum(sinking) / 1e9)
    assert policy(max_seconds=4.0).next_timed(course(sinking, WARM)) != RESTART, "no time is left"
    assert policy(warmup=100).next_timed(course(sinking, WARM)) != RESTART, "the job fixes it"
    assert policy(min_seconds=0.0).next_timed(course(sinking, WARM)) != RESTART, "a quick look"


def test_a_drift_shows_against_the_end_of_the_warm_up_too():
    warm = [S, *(1.01 * x for x in noisy(200, 0.002))]
    assert policy().next_timed(course(noisy(200, 0.002), warm)) == RESTART
    for other in ({"inner": 2}, {"is_graph": True}):
        assert policy().next_timed(course(noisy(200, 0.002), warm, **other)) != RESTART, (
            "single steps tell nothing of loops and graphs"
        )


def test_what_warm_up_lacks_in_time_is_done_in_loops():
    short = [S] + [100_000] * 1000
    owing = course([], short, inner=10)
    assert policy().next_timed(owing) == 900
    assert policy().next_timed(course([100_000] * 900, short, inner=10)) == RESTART
    assert policy().next_timed(course([], short, inner=10, drifted_ns=[100_000] * 900)) == 2000


def test_a_step_time_has_settled_where_its_level_changes_no_more():
    chosen = policy()
    assert chosen.has_settled(course(noisy(200, 0.001), WARM)) is True
    drifting = course([10 * MS * (1 + i / 5000) for i in range(200)], WARM)
    assert chosen.has_settled(drifting) is False
    assert policy(target_ci=0.1).has_settled(drifting) is True, "as much as the job cares for"
    assert chosen.has_settled(course([S] * 4, [S] * 5)) is None, "nobody can tell by eight steps"


def test_two_steps_lead_into_a_block_unless_they_are_slow():
    for quick in (course([10 * MS]), course([], [S, 10 * MS])):
        assert policy().lead_in(quick) == 2
    for slow in (course([300 * MS]), course([10 * MS], inner=30), course([], [S])):
        assert policy().lead_in(slow) == 0


@pytest.mark.parametrize(
    ("step_ns", "graph", "expected"),
    [(2 * MS, False, 1), (MS, False, 1), (300_000, False, 4), (100, False, 1000), (0, False, 1000),
     (2 * MS, True, 1), (20_000, True, 50), (100, True, 100)],
)  # fmt: skip
def test_short_steps_are_timed_in_loops_of_a_millisecond(step_ns, graph, expected):
    slow_start = [S] + [5 * MS] * 5
    assert policy().inner_iterations(slow_start + [step_ns] * 10, graph=graph) == expected
    assert policy().inner_iterations([step_ns], graph=graph) == expected


@pytest.mark.parametrize(("step_ns", "steps"), [(MS, 10), (100 * MS, 5), (10 * S, 3)])
def test_a_breakdown_costs_about_a_tenth_of_the_budget(step_ns, steps):
    assert policy(max_seconds=20.0).breakdown_steps([step_ns] * 3) == steps


def look(name: str, step_s: float, runs: int = 60) -> list[Look]:
    return looks(Cell(name=name, draw=NOISES[name], step_s=step_s), runs, Measure())


@pytest.mark.parametrize("step_s", [0.005, 0.3, 3.0])
@pytest.mark.parametrize("name", ["iid 1 %", "AR .6 1 %"])
def test_the_median_is_right_its_interval_honest_and_clean_noise_not_marked(name, step_s):
    found = look(name, step_s)
    assert abs(np.mean([o.bias for o in found])) <= 0.004
    assert np.mean([o.is_covered for o in found]) >= 0.85
    assert np.mean([o.is_stable is False for o in found]) <= 0.05
