"""The plan several times, each in fresh workers: order, controls, and what a resumed run does."""

from dataclasses import replace
from itertools import groupby

import pytest
from fakes import ScriptedSource, make_devices, make_measurement, make_point, make_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.job.model import BatchSearch, Measure
from raybench.job.plan import Plan
from raybench.job.point import Precision
from raybench.records.measurement import Failure
from raybench.records.record import TrialKey
from raybench.records.status import Status
from raybench.sweep import loop
from raybench.sweep.rounds import Rounds
from tests.local_cluster import LocalCluster

BASELINE = {"world_size": 1}


def rounds_of(count=2, seed=7, sizes=(1, 2, 4)):
    points = tuple(make_point(world_size=n, batch_size=b) for n in sizes for b in (8, 16, 32))
    return Rounds(plan=Plan(points=points, baseline=BASELINE), count=count, seed=seed)


def blocks(attempts):
    return [block for block, _ in groupby(attempts, key=lambda attempt: attempt.block)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), number=st.integers(1, 4))
def test_each_round_runs_all_points_with_controls(seed, number):
    rounds = rounds_of(count=4, seed=seed)
    attempts = rounds.attempts(number, {})
    assert blocks(attempts) == ([1, 2, 4] if number % 2 else [4, 2, 1])
    ids = [attempt.point.point_id for attempt in attempts if not attempt.control_of]
    assert sorted(ids) == sorted(point.point_id for point in rounds.plan.points)
    for _, block in groupby(attempts, key=lambda attempt: attempt.block):
        *points, control = block
        assert control.control_of
        assert not any(attempt.control_of for attempt in points)
    assert len({attempt.point.point_id for attempt in attempts if attempt.control_of}) == 1
    assert len({attempt.index for attempt in attempts}) == len(attempts)
    assert len({attempt.key for attempt in attempts}) == len(attempts)


def test_the_seed_determines_the_order_of_each_round():
    def order(seed, number):
        return [t.key._replace(round=1) for t in rounds_of(5, seed).attempts(number, {})]

    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(seed, 1)) for seed in range(10)}) > 5
    assert order(1, 1) != order(1, 3)


def test_the_control_is_the_steadiest_baseline_point():
    fast = [make_point(precision=p, batch_size=b) for p in (Precision.FP16,) for b in (8, 64)]
    sure = [make_point(batch_size=b) for b in (8, 16)]
    plan = Plan(points=(*fast, *sure, make_point(world_size=2)), baseline=BASELINE)
    controls = [t.point for t in Rounds(plan=plan, count=2).attempts(1, {}) if t.control_of]
    assert controls == [sure[1]] * 2


@pytest.mark.parametrize("status", [Status.OOM, Status.ERROR, Status.TIMEOUT, Status.SKIPPED])
def test_later_rounds_omit_failed_points(status):
    rounds = rounds_of()
    failed = rounds.plan.points[4].point_id
    assert failed not in {t.point.point_id for t in rounds.attempts(2, {TrialKey(failed): status})}
    lost = rounds.attempts(2, {TrialKey(failed): Status.LOST})
    assert failed in {attempt.point.point_id for attempt in lost}


def test_later_rounds_measure_the_batch_that_was_found():
    plan = Plan(points=(make_point(batch_size=8),), batch_search=BatchSearch(start=8))
    ended = {8: Status.OK, 16: Status.OK, 32: Status.OOM, 24: Status.OOM, 20: Status.OK}
    first = {TrialKey(make_point(batch_size=b).point_id): ended[b] for b in ended}
    rounds = Rounds(plan=plan, count=2)
    assert [attempt.point.batch_size for attempt in rounds.attempts(1, first)] == [8]
    assert [attempt.point.batch_size for attempt in rounds.attempts(2, first)] == [20]
    # So do those of a run that goes on, also where it is found only then.
    follow = {8: [make_point(batch_size=16)]}
    resumed = replace(rounds, chosen={plan.points[0].point_id})
    swept = Swept(resumed, follow_ups=lambda r: follow.get(r.point.batch_size, ()))
    assert [record.point.batch_size for record in swept.records] == [8, 16, 16]


class Swept:
    """A sweep on workers of this process. processes: of each record, which start ran it."""

    def __init__(self, rounds, fail=(), measure=None, stopping=lambda: False, **source):
        self.tasks, self.records, self.processes, self.starts = [], [], [], 0
        cluster = LocalCluster(make_devices(a=4), lambda _: self)
        restart = cluster.restart

        def counted():
            self.starts += 1
            restart()

        cluster.restart = counted
        cluster.start(4, "pack")
        self._fail = fail
        chosen = make_settings(measure=measure or Measure())
        scripted = ScriptedSource(**source)
        self.events = list(loop.sweep(rounds, chosen, cluster, self._write, scripted, stopping))

    def run(self, task, place, _):
        self.tasks.append(task)
        if task.point.point_id in self._fail:
            return Failure(rank=place.rank, status=Status.ERROR, error_type="X", message="no")
        return make_measurement(place.rank)

    def _write(self, batch):
        self.records += [record for _, record in batch]
        self.processes += [self.starts] * len(batch)

    @property
    def rounds(self):
        return [event for event in self.events if isinstance(event, loop.RoundStarted)]


def test_each_round_starts_new_workers():
    rounds = rounds_of(count=3)
    swept = Swept(rounds)
    assert [record.round for record in swept.records] == swept.processes
    told = [(one.round, one.rounds, len(one.trials), one.later) for one in swept.rounds]
    assert told == [(1, 3, 12, 24), (2, 3, 12, 12), (3, 3, 12, 0)]
    attempts = {}
    for record in swept.records:
        attempts.setdefault(record.point.point_id, []).append(record.attempt)
    assert all(made == [*range(1, len(made) + 1)] for made in attempts.values())
    assert {len(made) for made in attempts.values()} == {3, 12}


def test_a_failed_point_runs_in_one_round_only():
    rounds = rounds_of()
    swept = Swept(rounds, fail=[rounds.plan.points[4].point_id])
    assert [r.round for r in swept.records if r.status is Status.ERROR] == [1]
    assert swept.rounds[1].later == 0
    finished = sum(isinstance(event, loop.PointFinished) for event in swept.events)
    assert finished == sum(len(one.trials) for one in swept.rounds) == 23


@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 23))
def test_a_resumed_run_measures_exactly_the_missing_attempts(count):
    rounds = rounds_of()
    whole = [attempt.key for number in (1, 2) for attempt in rounds.attempts(number, {})]
    kept = dict.fromkeys(whole[:count], Status.OK)
    made = {key.point_id: 5 for key in kept}
    swept = Swept(replace(rounds, kept=kept, attempts_before=made))
    left = [key for key in whole[count:] if key != whole[count] or not key.control_of]
    assert [record.key for record in swept.records] == left
    assert all(r.attempt > 5 for r in swept.records if r.point.point_id in made)
    assert swept.starts == max(1, len({key.round for key in left}))


def test_a_resumed_run_may_add_rounds():
    one, three = rounds_of(count=1), rounds_of(count=3)
    kept = {attempt.key: Status.OK for attempt in one.attempts(1, {})}
    swept = Swept(replace(three, kept=kept))
    assert [record.round for record in swept.records] == [2] * 12 + [3] * 12


def test_only_the_first_round_makes_a_breakdown():
    asked = [task.settings for task in Swept(rounds_of(), measure=Measure(seconds=2.0)).tasks]
    assert {settings.seconds for settings in asked} == {2.0}
    assert sum(settings.breakdown for settings in asked) == 3 * (1 + 2 + 4)


def test_rounds_may_keep_workers_and_plan_order():
    plan = rounds_of().plan
    rounds = Rounds(plan=plan, count=3, seed=None, has_controls=False, in_fresh_workers=False)
    swept = Swept(rounds)
    assert swept.starts == 1
    order = [point.point_id for point in rounds.plan.points]
    for number in (1, 2, 3):
        assert [r.point.point_id for r in swept.records if r.round == number] == order


def test_further_rounds_continue_until_no_point_is_requested():
    rounds = rounds_of(count=2, sizes=(1,))
    known, new = rounds.plan.points[0], make_point(batch_size=64)
    asked = {3: [known, new], 4: [new], 5: []}
    swept = Swept(rounds, further_round=asked.__getitem__)
    _, *later = [(r.round, r.point.point_id, r.attempt) for r in swept.records if r.round > 2]
    assert swept.records[-3].point == known
    assert later == [(3, new.point_id, 1), (4, new.point_id, 2)]
    added = {event.index for event in swept.events if isinstance(event, loop.PointAdded)}
    assert min(added) >= rounds.first_free_index
    assert len(added) == 3


def test_a_stopped_search_leaves_its_next_batch():
    records = []
    plan = Plan(points=(make_point(batch_size=8),))
    swept = Swept(
        Rounds(plan=plan),
        stopping=lambda: bool(records),
        follow_ups=lambda record: records.append(record) or [make_point(batch_size=16)],
    )
    assert [record.point.batch_size for record in swept.records] == [8]
    added = [event for event in swept.events if isinstance(event, loop.PointAdded)]
    assert [event.point.batch_size for event in added] == [16]


def test_a_stopped_sweep_requests_no_further_round():
    swept = Swept(
        rounds_of(count=2),
        stopping=lambda: True,
        further_round=lambda _: pytest.fail("it was asked"),
    )
    assert not swept.records
