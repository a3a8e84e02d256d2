"""Where does a step that waits for Python lose time: in an actor, in a fresh process, in the loop?

    python benchmarks/python_bound.py [--device cpu|cuda] [--world-size 2] [--rounds 5]
        [-o FILE.json]

The Python-bound step of `raybench doctor --parity`, measured in turn
    by torchrun                 fresh processes, a bare loop
    in fresh actors             fresh processes, raybench's loop
    in hot actors               the same processes as long as the run takes, raybench's loop
    without Ray                 fresh processes of multiprocessing, raybench's worker and loop
and, of each, the ratio to torchrun with its 95 % interval over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from queue import Queue

from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.connection import connect
from raybench.doctor import parity
from raybench.records import Answer, Group, Measurement, RankInfo, Task
from raybench.stats.equivalence import ratio
from raybench.stats.summary import step_time
from raybench.worker.rendezvous import StoreHost


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--world-size", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5, help="at least 2")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    step = parity.steps(is_cuda=True)[1]
    cluster = RayCluster(connect("local", chosen.device, chosen.world_size))
    try:
        cluster.start(chosen.world_size, "pack")
        ways = make_ways(cluster, step, chosen.device, chosen.world_size)
        times_ms: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(chosen.rounds):
            # The order turns round, so that a drift of the machine favours none.
            for name in list(ways) if number % 2 == 0 else reversed(ways):
                times_ms[name].append(round(ways[name](), 4))
                print(f"{name}: {times_ms[name][-1]} ms", flush=True)
    finally:
        cluster.close()
    bare = times_ms["torchrun"]
    ratios = {name: asdict(ratio(ms, bare)) for name, ms in times_ms.items() if ms is not bare}
    text = json.dumps({"step_ms": times_ms, "ratio_to_torchrun": ratios}, indent=2)
    print(text)
    if chosen.output:
        chosen.output.write_text(text + "\n")


def make_ways(
    cluster: RayCluster, step: parity.Step, device: str, world_size: int
) -> dict[str, Callable[[], float]]:
    worker_ids = range(world_size)
    fresh = parity.task_of(step, world_size)
    hot = replace(fresh, settings=fresh.settings.model_copy(update={"fresh_workers": False}))
    return {
        "torchrun": lambda: parity.by_torchrun(cluster, worker_ids, step).step_ms_p50,
        "fresh actors": lambda: step_ms(cluster.run(fresh, worker_ids)),
        "hot actors": lambda: step_ms(cluster.run(hot, worker_ids)),
        "without Ray": lambda: step_ms(without_ray(hot, device, world_size)),
    }


def without_ray(task: Task, device: str, world_size: int) -> list[Answer]:
    address, port = (host := StoreHost("127.0.0.1")).endpoint()
    group = Group(name="bare", store_address=address, store_port=port)
    spawned = get_context("spawn")
    answers: Queue[Answer] = spawned.Manager().Queue()
    ranks = [
        spawned.Process(target=run_rank, args=(task, rank, world_size, device, group, answers))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found = [answers.get() for _ in ranks]
    for process in ranks:
        process.join()
    del host
    return sorted(found, key=lambda answer: answer.rank)


def run_rank(
    task: Task, rank: int, world_size: int, device: str, group: Group, answers: Queue[Answer]
) -> None:
    from raybench.worker.worker import Worker

    worker = Worker("cuda" if device == "cuda" else "cpu", rank)
    place = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
    )
    answers.put(worker.run(task, place, group))
    worker.leave()


def step_ms(answers: Sequence[Answer]) -> float:
    measured = [answer for answer in answers if isinstance(answer, Measurement)]
    if len(measured) < len(answers):
        raise SystemExit(str([one for one in answers if not isinstance(one, Measurement)]))
    return step_time([answer.step_ns for answer in measured]) / 1e6


if __name__ == "__main__":
    main()
