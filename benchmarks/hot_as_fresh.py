"""Does a point measure the same first, after fifty others, and in new processes?

And what does collecting the evidence cost the timed steps?

    python benchmarks/hot_as_fresh.py [--device cpu|cuda] [--world-size 2] [--rounds 3]
        [-o FILE.json]

In each round, on a new cluster of workers: every step first; then fifty other points of other
shapes, precisions and workloads; then every step again; then in new processes. On the hot workers
each step is then measured alternately with the breakdown and the telemetry on, and with both off.
The ratios are those of the medians over rounds, with a 95 % interval over the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from raybench.cluster.ray_cluster.cluster import RayCluster
from raybench.cluster.ray_cluster.connection import connect
from raybench.job.model import Measure
from raybench.job.point import Point, Precision, Scalar
from raybench.records import Measurement, Task
from raybench.stats.equivalence import ratio
from raybench.stats.summary import step_time

OTHERS, PAIRS = 50, 2
STEPS: dict[str, dict[str, dict[str, Scalar]]] = {
    "cuda": {
        "GPU-bound": {"hidden": 4096, "layers": 8, "batch_size": 1024},
        "Python-bound": {"hidden": 64, "layers": 24, "batch_size": 64},
    },
    "cpu": {
        "compute-bound": {"hidden": 512, "layers": 4, "batch_size": 64},
        "Python-bound": {"hidden": 64, "layers": 24, "batch_size": 64},
    },
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--world-size", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3, help="at least 2")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    rounds: list[dict[str, dict[str, list[float]]]] = []
    for _ in range(chosen.rounds):
        rounds.append(one_round(chosen.device, chosen.world_size))
        print(json.dumps(rounds[-1]), flush=True)
    result = {name: compared([found[name] for found in rounds]) for name in STEPS[chosen.device]}
    text = json.dumps(result, indent=2)
    print(text)
    if chosen.output:
        chosen.output.write_text(text + "\n")


def one_round(device: str, world_size: int) -> dict[str, dict[str, list[float]]]:
    """Step times in ms by step and by the state of the workers."""
    cluster = RayCluster(connect("local", device, world_size))  # type: ignore[arg-type]
    found: dict[str, dict[str, list[float]]] = {name: {} for name in STEPS[device]}

    def measure_all(state: str, **settings: bool) -> None:
        for name, step in STEPS[device].items():
            ms = step_ms(cluster, point(world_size, **step), **settings)
            found[name].setdefault(state, []).append(ms)

    try:
        cluster.start(world_size, "pack")
        measure_all("first")
        hot = [device.process_id for device in cluster.devices]
        for other in others(world_size):
            step_ms(cluster, other, warmup=2, iterations=3, breakdown=False)
            if hot != [device.process_id for device in cluster.devices]:
                raise SystemExit("the workers were replaced: these are not hot")
        measure_all("after fifty")
        measure_all("fresh workers", fresh_workers=True)
        for _ in range(PAIRS):
            measure_all("collecting")
            # There is no setting for it: a user has no reason to go without.
            cluster._agents.stop()
            measure_all("not collecting", breakdown=False)
            cluster._agents.watch(cluster.devices)
    finally:
        cluster.close()
    return found


def others(world_size: int) -> Iterator[Point]:
    """Fifty points that differ from the steps and from each other."""
    for number in range(OTHERS):
        precision = list(Precision)[number % 4]
        yield point(
            world_size,
            precision=precision,
            hidden=256 + 64 * (number % 7),
            layers=2 + number % 3,
            batch_size=16 + number,
            optimizer=("adam", "adamw", "sgd")[number % 3],
        )


def point(
    world_size: int, *, batch_size: int, precision: Precision = Precision.FP32, **params: Scalar
) -> Point:
    return Point(
        workload="mlp",
        params=params,
        world_size=world_size,
        precision=precision,
        batch_size=batch_size,
        global_batch_size=batch_size * world_size,
        scaling="weak",
    )


def step_ms(cluster: RayCluster, wanted: Point, **settings: object) -> float:
    task = Task(point=wanted, settings=Measure.model_validate(settings))
    answers = cluster.run(task, range(wanted.world_size))
    measured = [answer for answer in answers if isinstance(answer, Measurement)]
    if len(measured) < len(answers):
        raise SystemExit(f"{wanted}: {[a for a in answers if not isinstance(a, Measurement)]}")
    for warning in dict.fromkeys(text for answer in measured for text in answer.warnings):
        print(f"{wanted.point_id}: {warning}", file=sys.stderr, flush=True)
    return step_time([answer.step_ns for answer in measured]) / 1e6


def compared(rounds: list[dict[str, list[float]]]) -> dict[str, object]:
    ms = {state: [value for found in rounds for value in found[state]] for state in rounds[0]}
    pairs = {
        "after fifty / first": ("after fifty", "first"),
        "fresh workers / first": ("fresh workers", "first"),
        "collecting / not collecting": ("collecting", "not collecting"),
    }
    return {
        "step_ms": ms,
        "ratios": {name: asdict(ratio(ms[a], ms[b])) for name, (a, b) in pairs.items()},
    }


if __name__ == "__main__":
    main()
