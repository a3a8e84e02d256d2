"""The search for the largest batch that fits: decided from how its points ended, and resumed so."""

import json
from dataclasses import replace

import pytest
from builders import START
from hypothesis import given
from hypothesis import strategies as st

from jobs import MLP, plan
from raybench.errors import UsageError
from raybench.records.record import Record, TrialKey
from raybench.records.status import Status
from raybench.sweep.batch_search import check_bounded, next_batch, with_probes
from raybench.sweep.point_source import BatchSearches
from raybench.sweep.rounds import Rounds

MOST = 2**31 - 1


def searched(limit, *, start=64, most=MOST):
    """The batch sizes that are tried where `limit` is the largest that fits, and the end."""
    outcomes = {}
    while isinstance(step := next_batch(start, most, outcomes), int):
        assert step not in outcomes
        outcomes[step] = Status.OK if step <= limit else Status.OOM
    return list(outcomes), step


DOUBLED = [64, 128, 256, 512, 1024, 2048]
NO_LARGER = "batch_size 200 fits, and no larger one may be tried"


@pytest.mark.parametrize(
    ("limit", "most", "tried", "end"),
    [
        (1475, MOST, [*DOUBLED, 1536, 1280, 1408, 1472, 1504, 1488, 1480], None),
        (77, MOST, [64, 128, 96, 80, 72, 76, 78, 77], None),
        (5, MOST, [64, 32, 16, 8, 4, 6, 5], None),
        (0, MOST, [64, 32, 16, 8, 4, 2, 1], "not even batch_size 1 fits"),
        (10_000, 200, [64, 128, 200], NO_LARGER),
    ],
)
def test_the_search_doubles_or_halves_then_bisects(limit, most, tried, end):
    assert searched(limit, most=most) == (tried, end)


@pytest.mark.parametrize("status", [Status.ERROR, Status.TIMEOUT, Status.LOST, Status.SKIPPED])
def test_a_failure_without_oom_ends_the_search(status):
    end = next_batch(64, MOST, {64: Status.OK, 128: status})
    assert end == f"batch_size 128 ended {status.value}"


@given(limit=st.integers(0, 10**7), start=st.integers(1, 10**5), most=st.integers(10**5, 10**6))
def test_the_result_is_within_one_percent_of_limit(limit, start, most):
    tried, end = searched(limit, start=start, most=most)
    assert len(tried) <= 2 * most.bit_length()
    assert max(tried) <= most
    if end is None:
        largest = max(batch for batch in tried if batch <= limit)
        ran_out = min(batch for batch in tried if batch > limit)
        assert ran_out - largest <= max(1, 0.01 * largest)
    else:
        assert limit >= most or limit == 0


def plan_of(matrix):
    return plan(f"{MLP}matrix: {{{matrix}}}\n")


@pytest.fixture
def two_series():
    return plan_of("precision: [fp32, bf16], world_size: 2, batch_size: {start: 8}")


def record(point, status):
    return Record(point=point, attempt=1, status=status, started_at=START, duration_s=1.0)


def outcome(point):
    """fp32 needs twice the memory of bf16."""
    fits = point.batch_size <= {"fp32": 20, "bf16": 40}[point.precision]
    return Status.OK if fits else Status.OOM


def searches_of(plan, statuses):
    kept = {TrialKey(point_id): status for point_id, status in statuses.items()}
    return BatchSearches(Rounds(plan=plan, kept=kept))


def run_all(plan, statuses, most=1000):
    """Run what is left of the plan and what follows; `statuses` takes how the points ended."""
    follow = searches_of(plan, statuses).follow_ups
    waiting = [point for point in plan.points if point.point_id not in statuses]
    ran = []
    while waiting and len(ran) < most:
        point = waiting.pop(0)
        ran.append(point)
        statuses[point.point_id] = outcome(point)
        waiting += follow(record(point, outcome(point)))
    return ran


def batches(points, precision):
    return [point.batch_size for point in points if point.precision == precision]


def test_each_series_has_its_own_search(two_series):
    ran = run_all(two_series, {})
    assert batches(ran, "fp32") == [8, 16, 32, 24, 20, 22, 21]
    assert batches(ran, "bf16") == [8, 16, 32, 64, 48, 40, 44, 42, 41]
    assert all(point.global_batch_size == 2 * point.batch_size for point in ran)
    assert len({point.point_id for point in ran}) == len(ran)


def test_a_resumed_search_tries_only_missing_batches(two_series):
    whole = run_all(two_series, {})
    for stop_after in range(len(whole) + 1):
        statuses = {}
        before = run_all(two_series, statuses, most=stop_after)
        resumed = with_probes(two_series, statuses)
        assert list(resumed.points[2:])[: len(before) - 2] == before[2:]
        after = run_all(resumed, dict(statuses))
        assert {p.point_id for p in [*before, *after]} == {p.point_id for p in whole}
        assert len(before) + len(after) == len(whole)


def test_a_resumed_search_continues_below_a_skipped_batch(two_series):
    statuses = {}
    whole = run_all(two_series, statuses)
    skipped = next(p for p in whole if p.precision == "fp32" and p.batch_size == 32)
    resumed = with_probes(two_series, statuses | {skipped.point_id: Status.SKIPPED})
    assert {p.point_id for p in resumed.points} == {p.point_id for p in whole}


def test_retried_points_add_no_duplicate_points(two_series):
    statuses = {}
    whole = run_all(two_series, statuses)
    failed = {id_: status for id_, status in statuses.items() if status is Status.OK}
    again = run_all(with_probes(two_series, statuses), failed)
    assert [p.point_id for p in again] == [p.point_id for p in whole if outcome(p) is Status.OOM]


def test_a_search_without_result_names_its_settings(two_series):
    searches = searches_of(two_series, {})
    fp32, bf16 = two_series.points
    assert searches.follow_ups(record(fp32, Status.TIMEOUT)) == ()
    assert len(searches.follow_ups(record(bf16, Status.OK))) == 1
    (ending,) = searches.last_lines()
    assert ending == "batch_size: auto precision=fp32: batch_size 8 ended timeout"
    found = searches_of(two_series, {fp32.point_id: Status.OK})
    assert list(found.last_lines()) == []


def test_strong_scaling_doubles_the_global_batch(two_series):
    shared = [replace(p, scaling="strong", global_batch_size=8) for p in two_series.points]
    plan = replace(two_series, points=tuple(shared))
    following = searches_of(plan, {}).follow_ups(record(shared[1], Status.OK))
    assert [(p.batch_size, p.global_batch_size) for p in following] == [(16, 16)]


def test_without_a_search_nothing_follows():
    plan = plan_of("batch_size: [8, 16]")
    searches = searches_of(plan, {})
    assert searches.follow_ups(record(plan.points[0], Status.OK)) == ()
    assert list(searches.last_lines()) == []
    assert with_probes(plan, {plan.points[0].point_id: Status.OK}) is plan


def test_a_batch_search_on_cpu_needs_a_maximum(two_series):
    check_bounded(two_series, "cuda")
    with pytest.raises(UsageError, match=r"batch_size: auto on CPU .* give a maximum.* max: 128"):
        check_bounded(two_series, "cpu")
    check_bounded(plan_of("batch_size: {max: 128}"), "cpu")
    check_bounded(plan_of("batch_size: 128"), "cpu")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("auto", "batch_size: 64, 128, ... until memory runs out, then"),
        ("{start: 8, max: 512}", "batch_size: 8, 16, ... until memory runs out or 512 is reached,"),
        ("{start: 8, max: 9}", "batch_size: 8, ... until memory runs out or 9 is reached,"),
    ],
)
def test_a_plan_with_search_leaves_the_duration_open(tmp_path, command, given, told):
    job = tmp_path / "job.yaml"
    job.write_text(f"{MLP}matrix: {{world_size: [1, 2], batch_size: {given}}}\n")
    planned = command("plan", job, results=None).out
    text = " ".join(planned.split())
    assert told in text
    assert "2 series; the largest needs 2 devices" in text
    assert "the number of points is known when the sweep has ended" in text
    assert max(map(len, planned.splitlines())) <= 80
    as_json = json.loads(command("plan", job, "--json", results=None).out)
    assert as_json["time_at_most_s"] is None
    assert as_json["batch_search"]["start"] in (8, 64)
