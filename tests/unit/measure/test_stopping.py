"""How many iterations come next, and what the whole procedure makes of noisy series."""

from typing import Any

import numpy as np
import pytest

from benchmarks.simulations.looks import NOISES, Cell, Look, looks
from raybench.job.model import Measure, Span
from raybench.measure.stopping import RESTART, StoppingPolicy, TimingProgress

MS = 1_000_000
S = 1000 * MS


def policy(**settings: Any) -> StoppingPolicy:
    return StoppingPolicy(settings=Measure(**settings))


def test_cuda_graph_warm_up_overrides_job_and_budget():
    chosen = policy(warmup=2, max_seconds=0.001)
    assert chosen.next_warmup([S], at_least=12) == 1
    assert chosen.next_warmup([S, MS], at_least=12) == 10
    assert chosen.next_warmup([S] * 12, at_least=12) == 0
    assert policy(warmup=1).next_warmup([S]) == 0


def test_adaptive_warm_up_stops_when_steady_or_longest():
    chosen = policy(warmup=Span(min=20, max=60), seconds=0.03, max_seconds=1000.0)
    climbing = [S] + [MS + 20_000 * i for i in range(100)]
    assert chosen.next_warmup([S] + [MS] * 29) == 0
    assert policy(warmup=Span(min=1, max=9)).next_warmup([S]) == 1, "one beside the cold step"
    assert chosen.next_warmup(climbing[:30]) == 15
    assert chosen.next_warmup(climbing[:50]) == 10
    assert chosen.next_warmup(climbing[:60]) == 0


def course(sample_ns=(), warmup_ns=(S,), **changes) -> TimingProgress:
    return TimingProgress(sample_ns=sample_ns, warmup_ns=warmup_ns, **changes)


WARM = [S] + [10 * MS] * 100


def noisy(count: int, sd: float, step_ns: int = 10 * MS) -> list[int]:
    rng = np.random.default_rng(3)
    return [int(step_ns * (1 + sd * x)) for x in rng.standard_normal(count)]


def test_a_start_is_timed_for_three_seconds():
    assert policy().next_timed(course([10 * MS] * 100, WARM)) == 200
    assert policy().next_timed(course([10 * MS] * 299, WARM)) == 0, "no block for the last 1 %"
    assert policy(seconds=1).next_timed(course([], WARM)) == 100
    assert policy(seconds=1).next_timed(course([MS] * 10, WARM, inner=50)) == 20
    small = policy(warmup=1, seconds=4, max_seconds=4)
    assert (small.settings.least_s, small.next_timed(course([10 * MS] * 300))) == (3.0, 0)


def test_noise_does_not_prolong_timing():
    for sd in (0.001, 0.3):
        assert policy(warmup=1).next_timed(course(noisy(310, sd))) == 0


@pytest.mark.parametrize(
    ("step_s", "samples"), [(0.1, 30), (0.3, 30), (1.0, 20), (3.0, 6), (5.0, 5), (30.0, 5)]
)
def test_the_budget_limits_samples_of_slow_steps(step_s, samples):
    chosen, timed = policy(warmup=1), []
    while count := chosen.next_timed(course(timed)):
        timed += [step_s * S] * count
    assert len(timed) == samples


@pytest.mark.parametrize(
    "settings",
    [{}, {"warmup": 10}, {"max_seconds": 5}, {"warmup": Span(min=3, max=20)}, {"seconds": 12}],
)
def test_plan_knows_which_steps_have_thirty_samples(settings):
    chosen = policy(**settings)
    limit_s = chosen.settings.longest_step_s
    for step_s, is_enough in ((0.99 * limit_s, True), (1.02 * limit_s, False)):
        warmup, timed = [], []
        while count := chosen.next_warmup(warmup):
            warmup += [step_s * S] * count
        while count := chosen.next_timed(course(timed, warmup)):
            timed += [step_s * S] * count
        assert (len(timed) >= 30) is is_enough, len(timed)


def test_a_fixed_count_is_timed_as_it_is():
    chosen, timed = policy(iterations=50, max_seconds=1.0), []
    while count := chosen.next_timed(course(timed, WARM)):
        timed += noisy(count, 0.3, 100 * MS)
    assert len(timed) == 50


def test_drifting_samples_restart_timing_unless_the_job_forbids():
    sinking = [10 * MS * (1 - 0.02 * i / 300) for i in range(300)]
    assert policy().next_timed(course(sinking, WARM)) == RESTART
    anew = course([], WARM, drifted_ns=sinking)
    assert policy().next_timed(anew) > 0
    assert anew.warm_s == pytest.approx(1 + sum(sinking) / 1e9)
    assert policy(max_seconds=6.0).next_timed(course(sinking, WARM)) != RESTART, "no time is left"
    assert policy(warmup=100).next_timed(course(sinking, WARM)) != RESTART, "the job fixes it"
    fixed = policy(iterations=300)
    assert fixed.next_timed(course(sinking, WARM)) != RESTART, "the job fixes the count"


def test_drift_is_also_measured_against_the_warm_up():
    warm = [S, *(1.01 * x for x in noisy(200, 0.002))]
    assert policy(seconds=2).next_timed(course(noisy(200, 0.002), warm)) == RESTART
    for other in ({"inner": 2}, {"is_graph": True}):
        timed = course(noisy(200, 0.002), warm, **other)
        assert policy(seconds=2).next_timed(timed) != RESTART, (
            "single steps tell nothing of loops and graphs"
        )


def test_missing_warm_up_time_is_spent_in_loops():
    short = [S] + [100_000] * 1000
    owing = course([], short, inner=10)
    assert policy().next_timed(owing) == 900
    assert policy().next_timed(course([100_000] * 900, short, inner=10)) == RESTART
    assert policy().next_timed(course([], short, inner=10, drifted_ns=[100_000] * 900)) == 3000


def test_step_time_has_settled_when_its_level_stays():
    chosen = policy()
    assert chosen.has_settled(course(noisy(200, 0.001), WARM)) is True
    drifting = course([10 * MS * (1 + i / 5000) for i in range(200)], WARM)
    assert chosen.has_settled(drifting) is False
    assert chosen.has_settled(course([S] * 4, [S] * 5)) is None, "nobody can tell by eight steps"


def test_two_steps_lead_in_unless_they_are_slow():
    for quick in (course([10 * MS]), course([], [S, 10 * MS])):
        assert policy().lead_in(quick) == 2
    for slow in (course([300 * MS]), course([10 * MS], inner=30), course([], [S])):
        assert policy().lead_in(slow) == 0


@pytest.mark.parametrize(
    ("step_ns", "graph", "expected"),
    [(2 * MS, False, 1), (MS, False, 1), (300_000, False, 4), (100, False, 1000), (0, False, 1000),
     (2 * MS, True, 1), (20_000, True, 50), (100, True, 100)],
)  # fmt: skip
def test_short_steps_are_timed_in_millisecond_loops(step_ns, graph, expected):
    slow_start = [S] + [5 * MS] * 5
    assert policy().inner_iterations(slow_start + [step_ns] * 10, graph=graph) == expected
    assert policy().inner_iterations([step_ns], graph=graph) == expected


@pytest.mark.parametrize(("step_ns", "steps"), [(MS, 10), (100 * MS, 5), (10 * S, 3)])
def test_a_breakdown_costs_a_tenth_of_the_budget(step_ns, steps):
    assert policy(max_seconds=20.0).breakdown_steps([step_ns] * 3) == steps


def look(name: str, step_s: float, runs: int = 60) -> list[Look]:
    return looks(Cell(name=name, draw=NOISES[name], step_s=step_s), runs, Measure())


@pytest.mark.parametrize("step_s", [0.005, 0.3, 1.0])
@pytest.mark.parametrize("name", ["independent 1 %", "AR 0.6 5 %"])
def test_noise_leaves_medians_unbiased_covered_and_stable(name, step_s):
    found = look(name, step_s)
    noise = 0.01 if "1 %" in name else 0.05
    assert abs(np.mean([o.bias for o in found])) <= 0.4 * noise
    assert np.mean([o.is_covered for o in found if o.half is not None]) >= 0.85
    assert np.mean([o.is_stable is False for o in found]) <= 0.05
