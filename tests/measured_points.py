"""Points that a cluster runs, as the records and rows that a sweep would make of them."""

from datetime import UTC, datetime

from raybench.cluster import Cluster
from raybench.records import Measurement, Record, Status, Task
from raybench.results.tables import PointRow, point_row


def measure_record(cluster: Cluster, task: Task) -> Record:
    """Run a point on the first workers, on which no rank may fail."""
    world_size = task.point.world_size
    answers = cluster.run(task, tuple(range(world_size)))
    measurements = tuple(answer for answer in answers if isinstance(answer, Measurement))
    assert len(measurements) == len(answers) == world_size, answers
    return Record(
        point=task.point,
        attempt=1,
        status=Status.OK,
        started_at=datetime.now(UTC),
        duration_s=1.0,
        devices=tuple(cluster.devices[:world_size]),
        measurements=measurements,
        warnings=tuple(warning for one in measurements for warning in one.warnings),
    )


def measure_row(cluster: Cluster, task: Task) -> PointRow:
    """Run a point on the first workers; its row in the table `points`."""
    return point_row("run-a", measure_record(cluster, task), task.settings)
