"""How long a sweep takes, by its settings alone."""

import pytest

from jobs import HEAD, load
from raybench.job.estimate import START_S, estimate_time
from raybench.job.plan import make_plan

SHORT = HEAD + "workload: {kind: mlp}\nmatrix: {batch_size: [1, 2]}\n"


def seconds(text, trials=2):
    job = load(text)
    return estimate_time(job, make_plan(job), trials)


def test_time_grows_with_trials_seconds_and_repeats():
    short = seconds(SHORT + "measure: {seconds: 1, max_seconds: 2}\n")
    assert short.total_s == START_S + short.trials_s
    assert short.trials_s == pytest.approx(2 * short.trial_s)
    # A third of the seconds is warm-up.
    assert 4 / 3 < short.trial_s < 3
    assert seconds(SHORT + "measure: {seconds: 1, max_seconds: 2}\n", 4).trials_s == pytest.approx(
        2 * short.trials_s
    )
    repeated = seconds(SHORT + "measure: {seconds: 1, max_seconds: 2, repeats: 3}\n")
    assert repeated.trial_s - short.trial_s > 2 * 4 / 3


def test_new_processes_and_rounds_add_time():
    quick = seconds(SHORT + "measure: quick\n")
    fresh = seconds(SHORT + "measure: {seconds: 0.5, fresh_workers: true}\n")
    assert fresh.trial_s > quick.trial_s + 2
    rounds = seconds(SHORT + "measure: {seconds: 0.5, rounds: 3}\n")
    assert rounds.trials_s > quick.trials_s + 2


def test_counted_iterations_are_bounded_by_their_budget():
    counted = seconds(SHORT + "measure: {iterations: 1000, max_seconds: 8}\n")
    assert 1 < counted.trial_s < 9


@pytest.mark.parametrize(
    ("search", "batches"), [("{start: 8, max: 64}", 4), ("{start: 8, max: 8}", 1)]
)
def test_search_counts_its_doublings(search, batches):
    text = HEAD + f"workload: {{kind: mlp}}\nmatrix: {{batch_size: {search}}}\n"
    estimate = seconds(text, trials=1)
    assert estimate.trials_s == pytest.approx(batches * estimate.trial_s)
    open_end = seconds(text.replace(search, "auto"), trials=1)
    assert open_end.trials_s > 5 * open_end.trial_s
