"""Points that a cluster runs, as the records and rows that a sweep would make of them."""

from raybench.cluster import Cluster
from raybench.records.measurement import Measurement
from raybench.records.record import Record
from raybench.records.task import Task
from raybench.results.point_row import PointRow
from raybench.results.record_rows import point_row
from tests.unit.builders import make_record


def measure_record(cluster: Cluster, task: Task) -> Record:
    """Run a point on the first workers, on which no rank may fail."""
    world_size = task.point.world_size
    answers = cluster.run(task, tuple(range(world_size)))
    measurements = tuple(answer for answer in answers if isinstance(answer, Measurement))
    assert len(measurements) == len(answers) == world_size, answers
    return make_record(
        task.point,
        devices=tuple(cluster.devices[:world_size]),
        measurements=measurements,
        doubts=tuple(doubt for one in measurements for doubt in one.doubts),
    )


def measure_row(cluster: Cluster, task: Task) -> PointRow:
    """Run a point on the first workers; its row in the table `points`."""
    return point_row("run-a", measure_record(cluster, task), task.settings)
