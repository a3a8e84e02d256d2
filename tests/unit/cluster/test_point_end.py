"""When what may replace a point's processes is started, with Ray's calls replaced by fakes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes import make_devices, make_measurement

from raybench.cluster.ray_cluster import point_end
from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.liveness import HeadMonitor
from raybench.cluster.ray_cluster.point_end import when_late_s
from raybench.job.model import Measure
from raybench.records import Failure, Group, Status

SETTINGS = Measure(max_seconds=0.1, timeout_s=0.3)
GROUP = Group(name="group-0", store_address="10.0.0.1", store_port=1)


@pytest.fixture
def settled(monkeypatch):
    """Settles a point whose ranks' answers are there at once, in this order, or never (None)."""

    def settle(*answers: object, group: Group | None = None) -> tuple[point_end.Outcome, list[str]]:
        calls: list[str] = []

        def wait(refs, num_returns, timeout):
            there = [ref for ref in refs if answers[ref] is not None]
            if not there:
                point_end.time.sleep(timeout)
            return there[:1], there[1:]

        monkeypatch.setattr(point_end, "ray", SimpleNamespace(wait=wait))
        monkeypatch.setattr(point_end, "answer_of", lambda ref, *_: answers[ref])
        monkeypatch.setattr(point_end, "_GRACE_S", 0.05)
        agents = SimpleNamespace(
            silent_nodes=frozenset,
            log_tails=lambda _: {},
            kill=lambda _: calls.append("kill"),
            wait_until_free=lambda *_: (),
        )
        devices = make_devices(a=len(answers))
        outcome = point_end.finish_point(
            range(len(answers)),
            devices,
            group,
            SETTINGS,
            lambda _: calls.append("abort"),
            agents,
            lambda _: calls.append("prepare"),
        )
        return outcome, calls

    return settle


def test_processes_are_prepared_before_those_of_a_late_point_are_killed(settled):
    outcome, calls = settled(None)
    assert calls[:2] == ["prepare", "kill"]
    assert calls.count("prepare") == 1
    assert (outcome.was_late, outcome.unfit) == (True, {0})


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_group_of_which_one_rank_failed_is_given_up_whenever_the_others_answered(
    settled, failing_rank
):
    answers = [make_measurement(0), make_measurement(1)]
    answers[failing_rank] = Failure(
        rank=failing_rank,
        status=Status.ERROR,
        error_type="ValueError",
        message="not even closed",
        worker_reusable=True,
    )
    outcome, calls = settled(*answers, group=GROUP)
    assert outcome.group_is_gone
    assert calls == ["abort"]
    assert outcome.unfit == frozenset()
    assert outcome.answers[failing_rank] is answers[failing_rank]


def test_a_group_whose_ranks_all_measured_is_kept(settled):
    outcome, calls = settled(make_measurement(0), make_measurement(1), group=GROUP)
    assert (outcome.group_is_gone, calls) == (False, [])


def test_nothing_is_prepared_for_a_point_that_ends_in_time(settled):
    outcome, calls = settled(make_measurement())
    assert (outcome.was_late, outcome.unfit, calls) == (False, frozenset(), [])


@pytest.mark.parametrize(
    ("max_seconds", "timeout_s", "late_s"),
    [(30, 300, 290), (5, 10, 5), (295, 300, 295), (400, 300, 300)],
)
def test_a_point_is_late_before_its_deadline_but_not_while_it_may_measure(
    max_seconds, timeout_s, late_s
):
    settings = Measure(max_seconds=max_seconds, timeout_s=timeout_s)
    assert when_late_s(settings) == late_s
    assert when_late_s(settings.model_copy(update={"repeats": 2})) == min(
        timeout_s, max(2 * max_seconds, timeout_s - 10)
    )


@pytest.mark.parametrize(("count", "begun"), [(2, ["store", "workers"]), (1, ["workers"])])
def test_the_store_starts_before_the_workers_where_points_can_have_a_group(count, begun):
    calls: list[str] = []
    cluster = object.__new__(RayCluster)
    cluster._groups = SimpleNamespace(start=lambda: calls.append("store"))
    cluster._workers = SimpleNamespace(start=lambda *_: calls.append("workers"))
    cluster._lifelines, cluster._end = HeadMonitor({}), calls.append
    cluster.start(count, "pack")
    assert calls == begun
