"""Devices and workers of the in-process cluster, for tests without Ray and without a GPU."""

from collections.abc import Callable, Iterable
from pathlib import Path

from raybench.job.model import Measure
from raybench.job.plan import Plan
from raybench.job.point import Point
from raybench.records.device import Device
from raybench.records.measurement import Measurement, RankAnswer
from raybench.records.task import RankInfo
from raybench.sweep.loop import SweepSettings, sweep
from raybench.sweep.point_source import PointSource
from raybench.sweep.rounds import Rounds
from tests.local_cluster import LocalCluster, this_process
from tests.unit import builders

ALONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)


def make_device(node: str = "a", index: int = 0, **changes) -> Device:
    facts = {
        "node_id": node,
        "host": f"host-{node}",
        "address": f"10.0.0.{ord(node[0]) - ord('a') + 1}",
        "uuid": f"GPU-{node}{index}",
        "name": "Test GPU",
        "cpu_count": 8,
    }
    return builders.make_device(index, **facts | changes)


def make_devices(**devices_by_node: int) -> list[Device]:
    return [make_device(node, index) for node, n in devices_by_node.items() for index in range(n)]


def make_point(**changes) -> Point:
    return builders.make_point(**{"params": {"hidden": 64}, "batch_size": 8, **changes})


def make_measurement(rank: int = 0, step_ns: tuple[int, ...] = (1_000_000,) * 6) -> Measurement:
    return builders.make_measurement(rank, [step_ns], warmup=0, items_per_step=8)


class ScriptedWorker:
    """A worker that answers with what `script(point, rank)` returns or raises."""

    def __init__(self, script: Callable[[Point, int], RankAnswer]) -> None:
        self._script = script

    def run(self, task, place, group) -> RankAnswer:
        return self._script(task.point, place.rank)


def make_cluster(devices: list[Device], script: Callable[[Point, int], RankAnswer]) -> LocalCluster:
    return LocalCluster(devices, lambda _: ScriptedWorker(script))


class ChangingCluster(LocalCluster):
    """Some of its workers come late, and some of its workers get lost.

    late: devices of which one joins at each refresh that may wait. lost: changed by the test.
    """

    def __init__(
        self,
        devices: list[Device],
        script: Callable[[Point, int], RankAnswer],
        late: list[Device] | None = None,
    ) -> None:
        super().__init__(devices, lambda _: ScriptedWorker(script))
        self._worker = ScriptedWorker(script)
        self.late = late or []
        self.gone: set[int] = set()

    @property
    def capacity(self) -> int:
        return len(self.devices) + len(self.late)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(self.gone)

    @property
    def pending(self) -> int:
        return len(self.late)

    def refresh(self, timeout_s: float) -> None:
        if timeout_s and self.late:
            device = self.late.pop(0)
            self._devices = (*self._devices, device)
            self._workers[device.uuid] = self._worker


def measured(_, rank):
    """A script of workers that measure each point."""
    return make_measurement(rank)


def make_started(devices: list[Device], script: Callable[[Point, int], RankAnswer] = measured):
    """A cluster with a worker on each device."""
    cluster = make_cluster(devices, script)
    cluster.start(len(devices), "pack")
    return cluster


def make_plan_of(*world_sizes: int, **changes) -> Plan:
    """A plan of points of these sizes, of which the first has batch size 1, the second 2."""
    sized = enumerate(world_sizes, start=1)
    points = tuple(make_point(world_size=size, batch_size=batch) for batch, size in sized)
    return Plan(points=points, **changes)


def measure_here(root: Path, points: Iterable[Point], **measure) -> Path:
    """Measure these points in this process, as run-a of the results in `root`."""
    cluster = this_process()
    cluster.start(1, "pack")
    store = builders.write_run(root, "run-a", devices=cluster.devices)
    rounds, settings = Rounds(plan=Plan(points=tuple(points))), Measure(**measure)
    list(sweep(rounds, make_settings(measure=settings), cluster, store.write_records))
    cluster.close()
    return root


class ScriptedSource(PointSource):
    def __init__(self, follow_ups=lambda _: (), further_round=lambda _: ()) -> None:
        self.follow_ups = follow_ups
        self.further_round = further_round


def make_settings(**changes) -> SweepSettings:
    usual = {"measure": Measure(), "strategy": "pack", "stop_on_error": False}
    return SweepSettings(**{**usual, **changes})
