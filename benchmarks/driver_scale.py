"""What the driver itself needs for 1,000 nodes x 8 devices, from its start to the last row.

    python benchmarks/driver_scale.py [--nodes 1000] [-o FILE.json]

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

import argparse
import json
import pickle
import platform
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
from machine import machine

from raybench.cluster.local import LocalCluster
from raybench.job.model import Job, load_job
from raybench.job.plan import make_plan
from raybench.records import (
    Answer,
    Breakdown,
    Device,
    DeviceSample,
    Measurement,
    RankInfo,
    Repetition,
    Samples,
    Task,
)
from raybench.results.compaction import compact_run
from raybench.results.writer import RunStore
from raybench.sweep.interrupts import Interrupts
from raybench.sweep.loop import PointFinished, PointStarted, SweepSettings
from raybench.sweep.run_state import RunRows, start_run
from raybench.sweep.runner import record_run
from raybench.sweep.scheduler import Schedule, workers_needed

JOB = """version: 1
name: driver_scale
workload: {{kind: mlp, hidden: 4096, layers: 8}}
matrix:
  world_size: {world_sizes}
  precision: [tf32, bf16]
  batch_size: [64, 256]
measure: {{warmup: 5, iterations: 30, max_seconds: 6}}
"""
PER_NODE, WARMUP, TIMED, INSTRUMENTED, SAMPLES = 8, 5, 30, 20, 5
_START = datetime(2026, 11, 22, tzinfo=UTC)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--nodes", type=int, default=1000)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(chosen.nodes, Path(folder))
    content = {"machine": machine() | {"python": platform.python_version()}, **found}
    text = json.dumps(content, indent=2)
    print(text)
    if chosen.output:
        chosen.output.write_text(text + "\n")


def measured(nodes: int, folder: Path) -> dict[str, Any]:
    """Run the job on so many simulated nodes and return all figures of it."""
    job = written_job(folder, nodes)
    watch = Watch()
    cluster = SimulatedCluster(devices(nodes), watch)
    run = sweep_on(cluster, job, folder / "results", watch)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
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
        "wire_mib": wire_mib(cluster, job),
        "files": files(folder / "results", run),
    }


def written_job(folder: Path, nodes: int) -> Job:
    most = nodes * PER_NODE
    sizes = sorted({size for size in (1, 8, 64, 512, 1024, 4096, most) if size <= most})
    path = folder / "job.yaml"
    path.write_text(JOB.format(world_sizes=sizes))
    return load_job(path)


def devices(nodes: int) -> tuple[Device, ...]:
    """With all that a real worker says of itself, variables and versions included."""
    environment = {f"NCCL_VARIABLE_{number}": "a value as long as usual" for number in range(20)}
    return tuple(
        Device(
            kind="cuda",
            node_id=f"{node:056x}",
            host=f"node-{node:04d}",
            address=f"10.{node // 256}.{node % 256}.1",
            index=index,
            uuid=f"GPU-{node:08x}-0000-0000-0000-{index:012x}",
            name="NVIDIA H200",
            topology="NV18 to all",
            process_id=1000 + index,
            cpu_count=192,
            niceness=0,
            omp_num_threads=1,
            versions={"torch": "2.11.0", "ray": "2.60.0", "nccl": "2.28.9"},
            environment=environment,
        )
        for node in range(nodes)
        for index in range(PER_NODE)
    )


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
        super().__init__(offered, lambda _: SimulatedWorker())
        self._watch = watch

    def run(self, task: Task, worker_ids: Sequence[int]) -> tuple[Answer, ...]:
        answers = super().run(task, worker_ids)
        self._watch.answered_s = time.process_time()
        return answers

    def telemetry(self) -> tuple[DeviceSample, ...]:
        times = [_START + timedelta(seconds=second) for second in range(SAMPLES)]
        return tuple(
            DeviceSample(
                node_id=device.node_id,
                index=device.index,
                uuid=device.uuid,
                time=at,
                sm_clock_mhz=1980,
                power_w=512.3,
                temperature_c=51.0,
                memory_used_bytes=5 * 10**9,
            )
            for device in self.devices
            for at in times
        )


class SimulatedWorker:
    """Answers with samples that differ from rank to rank, as those of a real one."""

    def run(self, task: Task, place: RankInfo, group: object) -> Measurement:
        return measurement(place.rank)


def measurement(rank: int) -> Measurement:
    return Measurement(
        rank=rank,
        repetitions=(Repetition(warmup=steps(rank, WARMUP), timed=steps(rank, TIMED)),),
        items_per_step=64,
        setup_s=0.1,
        peak_mem_allocated_bytes=3 * 10**9,
        flops_per_step=2.1e12,
        gemm_tflops=700.0,
        transports=("NET/IB on mlx5_0 (IB), GPUDirect", "P2P/CUMEM"),
        breakdown=Breakdown(
            local_ms=(milliseconds(rank, INSTRUMENTED // 2), milliseconds(rank, INSTRUMENTED // 2)),
            device_ms=7.5,
            optimizer_ms=0.4,
            hooked_ms=milliseconds(rank, INSTRUMENTED),
            comm_ms=milliseconds(rank, INSTRUMENTED),
            tail_ms=milliseconds(rank, INSTRUMENTED),
        ),
    )


def steps(rank: int, count: int) -> Samples:
    step_ns = tuple(8_000_000 + (7919 * (rank + 31 * step)) % 80_000 for step in range(count))
    start_ns = tuple(8_040_000 * step for step in range(count))
    return Samples(start_ns=start_ns, step_ns=step_ns, host_ns=step_ns)


def milliseconds(rank: int, count: int) -> tuple[float, ...]:
    return tuple(8 + (7919 * (rank + 31 * step) % 800) / 10_000 for step in range(count))


def sweep_on(cluster: SimulatedCluster, job: Job, output: Path, watch: Watch) -> str:
    """Record a whole run, as the command does behind its connection to Ray; its id."""
    start = start_run(job, make_plan(job), argv=(), tags={}, resume_command=str)
    settings = SweepSettings(
        measure=job.measure, strategy="pack", stop_on_error=False, code=start.code
    )
    workers = workers_needed(start.plan, cluster.capacity)
    store = RunStore.create(output, start.run, job.measure, start.code)
    with Interrupts(watch) as interrupts, timed_decisions(watch):
        rows = RunRows(start, store, watch)
        return record_run(settings, cluster, workers, rows, interrupts).run_id


@contextmanager
def timed_decisions(watch: Watch) -> Iterator[None]:
    """Time each look at the cluster, each decision and each return of workers while it lasts."""
    plain = {name: getattr(Schedule, name) for name in ("see", "next", "free")}

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


def wire_mib(cluster: SimulatedCluster, job: Job) -> dict[str, float]:
    """Weigh what travels for a point of all workers, by pickle: tasks there, answers back."""
    point = max(make_plan(job).points, key=lambda one: one.world_size)
    task = Task(point=point, settings=job.measure)
    workers = point.world_size
    return {
        "tasks": round(workers * len(pickle.dumps(task)) / 2**20, 2),
        "answers": round(workers * len(pickle.dumps(measurement(0))) / 2**20, 2),
    }


def files(results: Path, run_id: str) -> dict[str, Any]:
    """How many there are by table, their size, and what `raybench compact` leaves of them."""
    parts = [path for path in results.rglob("*.parquet") if run_id in path.parts]
    by_table: defaultdict[str, int] = defaultdict(int)
    for path in parts:
        by_table[path.parts[-3]] += 1
    began_s = time.process_time()
    merged = compact_run(results, run_id)
    return {
        "parts": dict(sorted(by_table.items())),
        "mib": round(merged.bytes_before / 2**20, 1),
        "compacted_parts": merged.parts_after,
        "compacted_mib": round(merged.bytes_after / 2**20, 1),
        "compact_s": round(time.process_time() - began_s, 1),
    }


if __name__ == "__main__":
    main()
