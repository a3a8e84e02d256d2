"""A whole check on workers of this process: passes, a device that is lost, what follows."""

from dataclasses import replace
from unittest.mock import Mock

import fakes
import pytest
from commands import refusal_of
from fakes import ChangingCluster

from raybench.cluster import Cluster
from raybench.errors import ClusterError
from raybench.health.check import CheckSettings, Examiner, examine, health_job
from raybench.health.verdicts import Judgement, judge
from raybench.job.point import Point
from raybench.records.devices import Stage, Verdict
from raybench.records.judgement import ProblemKind
from raybench.records.measurement import Failure, RankAnswer
from raybench.records.record import Record
from raybench.records.status import Cause, RunStatus
from raybench.sweep.loop import PointFinished, PointRetried, SweepSettings, sweep
from raybench.workloads.kernels import SameBits

STAGES: tuple[Stage, ...] = ("alone", "together")


def run_check(
    cluster: Cluster, count: int, stages: tuple[Stage, ...] = STAGES
) -> tuple[Examiner, list[Record]]:
    job = health_job()
    examiner = Examiner(CheckSettings(stages=stages), job.measure)
    cluster.start(count, "pack")
    settings = SweepSettings(measure=job.measure, strategy="pack", stop_on_error=False)
    records = []
    events = sweep(examiner.rounds(cluster), settings, cluster, lambda _: None, examiner)
    for event in events:
        if isinstance(event, PointFinished | PointRetried):
            examiner.note(event.record)
            records.append(event.record)
    return examiner, records


def verdicts(examiner: Examiner) -> dict[tuple[str, str], Judgement]:
    found = judge(examiner.readings, examiner.devices)
    return {(one.subject.name, one.test.name): one for one in found}


def measure(point: Point, rank: int) -> RankAnswer:
    return replace(
        fakes.make_measurement(rank),
        flops_per_step=1e9,
        memory_bytes=10**6,
        message_bytes=10**6,
        busbw_factor=1.0,
        workload_metrics=dict.fromkeys(SameBits.metrics, 0.0),
    )


def on_cpus(count: int) -> list[fakes.Device]:
    return [fakes.make_device(index=index, kind="cpu") for index in range(count)]


def test_probes_run_in_three_passes():
    examiner, records = run_check(ChangingCluster(on_cpus(2), measure), 2)
    rounds = [record.round for record in records]
    assert rounds == sorted([1, 2, 3] * (len(rounds) // 3))
    told = {one.verdict for one in verdicts(examiner).values()}
    assert told <= {Verdict.HEALTHY, Verdict.UNKNOWN}


def test_environment_is_checked_once_before_the_passes():
    cluster = ChangingCluster(on_cpus(2), measure)
    examiner, records = run_check(cluster, 2, ("environment", "alone"))
    ran = [record.point.workload.rpartition(":")[2] for record in records]
    assert ran[:2] == ["collective", "TransportProbe"]
    assert ran.count("collective") == ran.count("TransportProbe") == 1
    assert ran.count("launch") == 3
    found = {one.test.name: one.finding for one in examiner.environment}
    assert found["first collective"].value > 0
    assert found["transport"].verdict is Verdict.NOTE
    assert found["versions"].verdict is Verdict.HEALTHY
    assert not [one for one in examiner.readings if one.test.stage == "environment"]


@pytest.mark.parametrize(("is_private", "program"), [(True, "nice"), (False, "ray")])
def test_advice_of_niceness_fits_the_cluster(is_private, program):
    cluster = ChangingCluster([fakes.make_device(kind="cpu", niceness=5)], measure)
    cluster.is_private = is_private
    examiner, _ = run_check(cluster, 1, ("environment",))
    [command] = [one.finding.command for one in examiner.environment if one.test.name == "niceness"]
    assert command.split()[0] == program


def test_others_are_checked_after_devices_are_lost():
    def script(point: Point, rank: int) -> RankAnswer:
        if {"memory": 4, "launch": 3}.get(point.workload) == point.world_size and rank == 0:
            cluster.gone.add(4 - point.world_size)
            return Failure.of(Cause.WORKER_LOST, rank=rank, message="gone")
        return measure(point, rank)

    cluster = ChangingCluster(on_cpus(4), script)
    examiner, records = run_check(cluster, 4)
    assert {record.point.world_size for record in records} == {2, 3, 4}
    found = verdicts(examiner)
    lost = [found[f"host-a worker {rank}", "worker"] for rank in (0, 1)]
    told = {(one.verdict, *(problem.kind for problem in one.reason.problems)) for one in lost}
    assert told == {(Verdict.BAD, ProblemKind.WORKER_LOST)}
    left = [one for (name, _), one in found.items() if name.endswith(("worker 2", "worker 3"))]
    assert {one.verdict for one in left} <= {Verdict.HEALTHY, Verdict.UNKNOWN}
    assert all(one.value is not None for one in left)


def test_stages_without_tests_for_cpus_start_no_workers(monkeypatch, tmp_path):
    monkeypatch.setattr("raybench.health.check.run_sweep", Mock(side_effect=AssertionError))
    where = Mock(output=tmp_path, address="local", device="cpu")
    settings = CheckSettings(stages=("facts", "host-links"))
    refusal = refusal_of(ClusterError, examine, where, Mock(), settings, ())
    assert refusal.startswith("--only facts --only host-links: only GPUs have such tests")
    for tested in (CheckSettings(stages=("facts", "alone")), replace(settings, burn_in_s=60.0)):
        with pytest.raises(AssertionError):
            examine(where, Mock(), tested, ())


def test_burn_in_begins_anew_without_a_lost_device(monkeypatch, tmp_path):
    def run_sweep(_job, start, where, _listener, examiner):
        (where.output / "runs" / start.run.run_id).mkdir(parents=True)
        cluster = ChangingCluster(on_cpus(3), measure)
        cluster.start(3, "pack")
        examiner.rounds(cluster)
        assert [point.world_size for point in examiner.further_round(4)] == [3, 3]
        cluster.gone.add(2)
        assert [point.world_size for point in examiner.further_round(5)] == [2, 2]
        return replace(start.run, status=RunStatus.INTERRUPTED)

    monkeypatch.setattr("raybench.health.check.run_sweep", run_sweep)
    settings = CheckSettings(stages=("burn-in",), burn_in_s=600.0)
    found = examine(Mock(output=tmp_path), Mock(), settings, ())
    assert [device.index for device in found.healthy_devices] == [0, 1]
