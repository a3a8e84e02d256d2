"""What every cluster must hold, as tests, and small points with faults for those of Ray."""

from raybench.cluster import Cluster
from raybench.job.model import Measure
from raybench.records.measurement import Failure, Measurement, RankAnswer
from raybench.records.record import OtherUsers
from raybench.records.status import Status
from raybench.records.task import Task
from tests.unit.fakes import make_point

PROBE = "tests.integration.probe_workloads:Probe"


def run(
    cluster: Cluster,
    *worker_ids: int,
    fault: str = "none",
    rank: int = 1,
    workload: str = PROBE,
    **measure: float,
) -> tuple[RankAnswer, ...]:
    """The answers of a small point on these workers, of which one rank has the fault."""
    params = {"fault": fault, "faulty_rank": rank}
    point = make_point(workload=workload, params=params, world_size=len(worker_ids))
    settings = Measure(**{"warmup": 2, "iterations": 4, "breakdown": False, **measure})
    return cluster.run(Task(point=point, settings=settings), worker_ids)


def failures(answers: tuple[RankAnswer, ...]) -> list[str]:
    return [answer.detail or answer.message for answer in answers if isinstance(answer, Failure)]


def process_ids(cluster: Cluster) -> list[int]:
    return [device.process_id for device in cluster.devices]


def places(cluster: Cluster) -> list[tuple[str, int]]:
    """What a worker id stands for, whatever process it has."""
    return [(device.node_id, device.index) for device in cluster.devices]


class PointContract:
    """For a fixture `cluster` with at least one worker that was started.

    Those of Ray and the one in this process have a test class that inherits these tests.
    """

    def test_point_is_measured_and_workers_stay_known(self, cluster: Cluster):
        before = cluster.devices
        assert len(before) <= cluster.capacity
        assert {device.kind for device in before} == {cluster.kind}
        (answer,) = run(cluster, 0)
        assert isinstance(answer, Measurement)
        assert answer.rank == 0
        assert len(answer.repetitions[0].timed.step_ns) == 4
        cluster.refresh(0.0)
        assert (cluster.devices, cluster.lost, cluster.pending) == (before, frozenset(), 0)

    def test_raising_rank_keeps_its_process(self, cluster: Cluster):
        before = cluster.devices
        (answer,) = run(cluster, 0, fault="raise", rank=0)
        assert isinstance(answer, Failure)
        assert (answer.status, answer.error_type) == (Status.ERROR, "ValueError")
        assert answer.message.startswith("the workload says no, at ")
        assert "probe_workloads.py" in answer.detail
        assert failures(run(cluster, 0)) == []
        assert cluster.devices == before

    def test_all_workers_are_there_after_a_restart(self, cluster: Cluster):
        before = places(cluster)
        cluster.restart()
        assert places(cluster) == before
        assert failures(run(cluster, 0)) == []

    def test_empty_node_gives_an_empty_answer(self, cluster: Cluster):
        seen = cluster.watch_other_users([0])
        assert failures(run(cluster, 0)) == []
        assert isinstance(seen(), OtherUsers)
        assert isinstance(cluster.telemetry(), tuple)

    def test_facts_come_in_device_order(self, cluster: Cluster):
        facts = cluster.read_device_facts()
        assert tuple(one.device for one in facts) == cluster.devices
        assert {one.unread for one in facts} == {""}
