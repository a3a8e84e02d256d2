"""What planning and deciding cost on 1,000 nodes x 8 devices with 10,000 points.

    python benchmarks/schedule.py [--nodes 1000] [--points 10000] [--store DIR] [-o FILE.json]

Simulated: the devices are made up, and the in-process cluster answers at once. Planning is from
the job file to the points. A decision is one call of `Schedule.next`, and what tells it of the end
of a point; the first of each world size looks at all devices, so the longest is told beside the
mean. With --store a sweep of all points writes its rows there, and they are read back.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from fakes import make_cluster, make_measurement

from raybench.cluster.allocator import Isolation
from raybench.job.model import Job, load_job
from raybench.job.plan import Plan, make_plan
from raybench.records import Device
from raybench.sweep.loop import SweepSettings, sweep
from raybench.sweep.makespan import imagine_devices
from raybench.sweep.rounds import Rounds
from raybench.sweep.scheduler import Assign, Attempt, Schedule, workers_needed

JOB = """version: 1
name: scale
workload: {{kind: mlp, hidden: 64}}
matrix:
  precision: [fp32, bf16]
  batch_size: {batch_sizes}
  world_size: [1, 2, 4, 8, 16]
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--nodes", type=int, default=1000)
    options.add_argument("--points", type=int, default=10_000)
    options.add_argument("--store", type=Path)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    job, plan, plan_s = planned(chosen.points)
    devices = imagine_devices(8 * chosen.nodes, chosen.nodes)
    cpus = len(os.sched_getaffinity(0))
    found = {
        "cpus": cpus,
        "nodes": chosen.nodes,
        "points": len(plan.points),
        "plan_s": round(plan_s, 2),
    }
    for isolation in ("cluster", "node", "device"):
        found[isolation] = decisions_ms(plan, devices, isolation)
    found["sweep"] = swept(job, plan, devices, chosen.store)
    print(json.dumps(found, indent=2))
    if chosen.output:
        chosen.output.write_text(json.dumps(found, indent=2) + "\n")


def planned(points: int) -> tuple[Job, Plan, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(JOB.format(batch_sizes=list(range(1, points // 10 + 1))))
        began_s = time.perf_counter()
        job = load_job(path)
        plan = make_plan(job)
        return job, plan, time.perf_counter() - began_s


def decisions_ms(plan: Plan, devices: tuple[Device, ...], isolation: Isolation) -> dict[str, float]:
    """Milliseconds a decision, over a whole run by a counted clock."""
    rng = random.Random(0)
    took: list[float] = []

    def timed(act: Callable[[], object]) -> object:
        began_s = time.perf_counter()
        answer = act()
        took.append(1e3 * (time.perf_counter() - began_s))
        return answer

    began_s = time.perf_counter()
    attempts = [Attempt(index=i, point=point, number=1) for i, point in enumerate(plan.points)]
    schedule = Schedule(attempts, isolation)
    schedule.see(devices, len(devices), frozenset(), 0)
    start_ms = 1e3 * (time.perf_counter() - began_s)
    running: list[tuple[float, int, Attempt]] = []
    now_s = 0.0
    while True:
        while (decision := timed(schedule.next)) is not None:
            assert isinstance(decision, Assign)
            end_s = now_s + rng.lognormvariate(0, 0.6)
            heapq.heappush(running, (end_s, decision.attempt.index, decision.attempt))
        if not running:
            break
        now_s, _, attempt = heapq.heappop(running)
        timed(lambda attempt=attempt: schedule.free(attempt))
    return {
        "prepare_ms": round(start_ms, 1),
        "mean_ms": round(sum(took) / len(plan.points), 4),
        "longest_ms": round(max(took), 2),
    }


def swept(
    job: Job, plan: Plan, devices: tuple[Device, ...], folder: Path | None
) -> dict[str, float]:
    """Run a whole sweep with isolation `device`; memory is that of the process up to its end."""
    cluster = make_cluster(list(devices), lambda point, rank: make_measurement(rank))
    settings = SweepSettings(
        measure=job.measure, strategy="pack", stop_on_error=False, isolation="device"
    )
    cluster.start(workers_needed(plan, len(devices), "device"), "pack")
    write = nothing if folder is None else writer(job, folder)
    began_s = time.perf_counter()
    events = sum(1 for _ in sweep(Rounds(plan=plan), settings, cluster, write))
    sweep_s = time.perf_counter() - began_s
    assert events == 2 * len(plan.points)
    found = {"rows_are_written": folder is not None, "sweep_s": round(sweep_s, 2)}
    if folder is not None:
        found["read_s"] = round(read_s(folder, len(plan.points)), 2)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found | {"peak_memory_gib": round(peak_kib / 2**20, 3)}


def nothing(*_: object) -> None:
    pass


def writer(job: Job, folder: Path) -> Callable[..., None]:
    from builders import make_run

    from raybench.results.writer import RunStore

    return RunStore.create(folder, make_run("scale"), job.measure).write_records


def read_s(folder: Path, points: int) -> float:
    import raybench

    began_s = time.perf_counter()
    assert len(raybench.load(folder, "points")) == points
    raybench.load(folder, "samples")
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
