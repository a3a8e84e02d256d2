"""What the driver itself needs for 1,000 nodes x 8 devices, from its start to the last row.

    python -m benchmarks.driver_scale [--nodes 1000] [-o FILE.json]

Simulated: the devices are made up, and the in-process cluster answers at once, with 5 warm-up, 30
timed and 20 instrumented steps of each rank, and 5 samples of telemetry of each device while a
point runs. The job, the decisions, the checks of answers, the rows and the files are as in a real
run. What Ray needs to start so many processes, and what its network costs, is not in it.

All times are processor seconds of the driver's process, which nobody else lengthens. start_s: from
its start to the first point on its workers, and the same by the clock. A decision is all that
scheduler and allocator do for a point: look at the cluster, choose workers, take them back; the
first look counts the devices, so the longest call is told beside the mean. after_s: from the
answers of all ranks to the files of the point, of the slowest point of each world size.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.common import options, write_result
from benchmarks.made_up import devices, measurement, telemetry
from raybench.job.loading import load_job
from raybench.job.model import Job
from raybench.job.plan import make_plan
from raybench.records.device import Device
from raybench.records.devices import DeviceSample
from raybench.records.measurement import RankAnswer
from raybench.records.task import Task
from raybench.results.writer import RunStore, compact_run
from raybench.sweep.interrupts import Interrupts
from raybench.sweep.loop import PointFinished, PointStarted, SweepSettings
from raybench.sweep.run_rows import RunRows
from raybench.sweep.run_state import start_run
from raybench.sweep.runner import record_run
from raybench.sweep.scheduler import Schedule, workers_needed
from tests.local_cluster import LocalCluster

JOB = """version: 1
name: driver_scale
workload: {{kind: mlp, hidden: 4096, layers: 8}}
matrix:
  world_size: {world_sizes}
  precision: [tf32, bf16]
  batch_size: [64, 256]
measure: {{warmup: 5, iterations: 30, max_seconds: 6}}
"""
PER_NODE, SAMPLES = 8, 5


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_result(measured(chosen.nodes, Path(folder)), chosen.output)


def measured(nodes: int, folder: Path) -> dict[str, Any]:
    """Run the job on so many simulated nodes and return all figures of it."""
    watch = Watch()
    run_id = sweep_on(
        SimulatedCluster(devices(nodes), watch), job_for(folder, nodes), folder, watch
    )
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = list(folder.glob(f"*/{run_id}/*.parquet"))
    merged = compact_run(folder, run_id)
    return {
        "nodes": nodes,
        "workers": nodes * PER_NODE,
        "points": len(watch.worlds),
        "start_s": {name: round(took, 2) for name, took in watch.start_s.items()},
        "decision_ms": {
            "mean": round(1e3 * sum(watch.decisions_s) / len(watch.worlds), 3),
            "longest_call": round(1e3 * max(watch.decisions_s), 3),
        },
        "after_s": {world: round(max(took), 2) for world, took in sorted(watch.after_s.items())},
        "peak_memory_gib": round(peak_kib / 2**20, 2),
        "parts": len(parts),
        "mib": round(merged.bytes_before / 2**20, 1),
        "compacted_parts": merged.parts_after,
        "compacted_mib": round(merged.bytes_after / 2**20, 1),
    }


def job_for(folder: Path, nodes: int) -> Job:
    most = nodes * PER_NODE
    sizes = sorted({size for size in (1, 8, 64, 512, 1024, 4096, most) if size <= most})
    path = folder / "job.yaml"
    path.write_text(JOB.format(world_sizes=sizes))
    return load_job(path)


class Watch:
    """Notes how long what takes, and is the listener to whom nothing is shown."""

    def __init__(self) -> None:
        self.start_s: dict[str, float] = {}
        self.decisions_s: list[float] = []
        self.after_s: defaultdict[int, list[float]] = defaultdict(list)
        self.worlds: list[int] = []
        self.answered_s = 0.0

    def tell(self, line: str) -> None:
        """Do nothing: nobody reads it."""

    def waiting(self, what: str) -> nullcontext[None]:
        return nullcontext()

    def show_cursor(self) -> None:
        """Do nothing: it was never hidden."""

    @contextmanager
    def progress(self, plan: object, trials: object) -> Iterator[Watch]:
        yield self

    def show(self, event: object) -> None:
        now_s = time.process_time()
        if isinstance(event, PointStarted):
            since_s = time.time() - psutil.Process().create_time()
            self.start_s = self.start_s or {"processor": now_s, "clock": since_s}
            self.worlds.append(event.point.world_size)
        elif isinstance(event, PointFinished):
            assert event.record.status == "ok", event.record.error_message
            self.after_s[event.record.point.world_size].append(now_s - self.answered_s)


class SimulatedCluster(LocalCluster):
    """Devices that are made up; each answers at once, and all are sampled meanwhile."""

    def __init__(self, offered: Sequence[Device], watch: Watch) -> None:
        worker = SimpleNamespace(run=lambda task, place, group: measurement(place.rank))
        super().__init__(offered, lambda _: worker)
        self._watch = watch

    def run(self, task: Task, worker_ids: Sequence[int]) -> tuple[RankAnswer, ...]:
        answers = super().run(task, worker_ids)
        self._watch.answered_s = time.process_time()
        return answers

    def telemetry(self) -> tuple[DeviceSample, ...]:
        return tuple(telemetry(self.devices, range(SAMPLES)))


def sweep_on(cluster: SimulatedCluster, job: Job, output: Path, watch: Watch) -> str:
    """Record a whole run, as the command does behind its connection to Ray; its id."""
    start = start_run(job, make_plan(job), argv=(), tags={}, resume_command=str)
    settings = SweepSettings(
        measure=job.measure, strategy="pack", stop_on_error=False, code=start.code
    )
    workers = workers_needed(start.rounds.plan, cluster.capacity)
    store = RunStore.create(output, start.run, job.measure, start.code)
    with Interrupts(watch) as interrupts, timed_decisions(watch):
        rows = RunRows(start, store, watch)
        return record_run(settings, cluster, workers, rows, interrupts).run_id


@contextmanager
def timed_decisions(watch: Watch) -> Iterator[None]:
    """Time each look at the cluster, each decision and each return of workers while it lasts."""
    plain = {name: getattr(Schedule, name) for name in ("update_cluster", "next", "free")}

    def timed(name: str) -> Any:
        def act(*args: object) -> object:
            began_s = time.thread_time()
            answer = plain[name](*args)
            watch.decisions_s.append(time.thread_time() - began_s)
            return answer

        return act

    for name in plain:
        setattr(Schedule, name, timed(name))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(Schedule, name, method)


if __name__ == "__main__":
    main()
