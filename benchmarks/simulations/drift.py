"""How right speed-ups are on a machine that drifts, and what the correction costs elsewhere.

    python -m benchmarks.simulations.drift [--runs 40] [--jobs 2]

Runs of 1, 2 and 4 devices with three batch sizes, in the order and with the controls of a sweep
(`raybench.sweep.rounds.Rounds`), are written by the real writer, and `raybench report --format
json` reads them. All points take the same step, so the true speed-ups are 2 and 4. ln(step) grows
by `drift` for each block of points, and each trial has noise of its own (`noise`, normal).

error: speed-up / truth - 1, mean over runs and points, the larger of 2 and 4 devices. worst: the
same of the single point that is farthest off. scatter: standard deviation of ln(speed-up / truth).
without: all three of the same runs without their controls, which are not corrected.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.common import options
from benchmarks.made_up import START, devices, run
from benchmarks.simulations.commands import run_command
from raybench.job.model import Measure
from raybench.job.plan import Plan
from raybench.job.point import Point
from raybench.records.measurement import Measurement, Repetition, Samples
from raybench.records.record import Record
from raybench.records.status import Status
from raybench.results.writer import RunStore
from raybench.sweep.rounds import Attempt, Rounds

SIZES, BATCHES = (1, 2, 4), (64, 256, 1024)
ROUNDS = (2, 3, 4)
# Drift of ln(step) for each block, and noise of a trial.
CASES = ((0.01, 0.0), (0.01, 0.003), (0.01, 0.01), (0.0, 0.003), (0.0, 0.01))
STEP_MS, SAMPLES = 10.0, 10
# Seconds of an attempt: the group of a block is formed, warm-up, timed steps, and the breakdown
# after them, which the first round alone has.
FORM_S, WARMUP_S, TIMED_S, BREAKDOWN_S = 3.0, 1.5, 3.0, 1.0
BETWEEN_ROUNDS_S = 5.0
DEVICES = devices(1)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    cells = list(itertools.product(ROUNDS, CASES))
    with ProcessPoolExecutor(chosen.jobs) as pool:
        found = pd.DataFrame(pool.map(partial(simulate, chosen.runs), cells))
    print(found.to_string(index=False))


def simulate(count: int, cell: tuple[int, tuple[float, float]]) -> dict[str, float]:
    """Report so many runs of a cell with and without their controls. Shares are in %."""
    rounds, (drift, noise) = cell
    rng = np.random.default_rng(zlib.crc32(repr(cell).encode()))
    corrected, plain = [], []
    for seed in range(count):
        records = list(sweep(rng, rounds, drift, noise, seed))
        corrected.append(errors(records))
        plain.append(errors([record for record in records if not record.control_of]))
    found = {"rounds": rounds, "drift": 100 * drift, "noise": 100 * noise}
    for name, values in (("", corrected), (" without", plain)):
        logs = np.array(values)
        by_point = 100 * np.expm1(logs.mean(axis=0))
        by_size = by_point.reshape(len(SIZES) - 1, len(BATCHES)).mean(axis=1)
        found[f"error{name}"] = by_size[np.abs(by_size).argmax()].round(3)
        found[f"worst{name}"] = by_point[np.abs(by_point).argmax()].round(3)
        found[f"scatter{name}"] = 100 * logs.std(axis=0).mean().round(5)
    return found


def sweep(
    rng: np.random.Generator, rounds: int, drift: float, noise: float, seed: int
) -> Iterator[Record]:
    """Yield the records of a run in the order in which a sweep makes them."""
    points = tuple(
        Point(
            workload="mlp",
            params={"hidden": 4096, "layers": 8},
            world_size=size,
            batch_size=batch,
            global_batch_size=batch * size,
            scaling="weak",
        )
        for size, batch in itertools.product(SIZES, BATCHES)
    )
    order = Rounds(plan=Plan(points=points, baseline={"world_size": 1}), count=rounds, seed=seed)
    block_s = (len(BATCHES) + 1) * (WARMUP_S + TIMED_S) + FORM_S
    at_s = 0.0
    for number in range(1, rounds + 1):
        last = None
        for attempt in order.attempts(number, {}):
            setup_s = FORM_S if attempt.point.world_size != last else 0.0
            last = attempt.point.world_size
            # Restarts make some attempts longer.
            timed_s = TIMED_S * rng.uniform(1, 2)
            apart_s = BREAKDOWN_S if number == 1 and not attempt.control_of else 0.0
            middle_s = at_s + setup_s + WARMUP_S + timed_s / 2
            log = drift * middle_s / block_s + noise * rng.standard_normal()
            took_s = setup_s + WARMUP_S + timed_s + apart_s
            yield record(attempt, STEP_MS * np.exp(log), at_s, took_s, setup_s)
            at_s += took_s
        at_s += BETWEEN_ROUNDS_S


def record(attempt: Attempt, step_ms: float, at_s: float, took_s: float, setup_s: float) -> Record:
    """Make the record of an attempt whose steps all take `step_ms`."""
    step_ns = (round(step_ms * 1e6),) * SAMPLES
    samples = Samples(
        start_ns=tuple(place * step_ns[0] for place in range(SAMPLES)),
        step_ns=step_ns,
        host_ns=step_ns,
    )
    point = attempt.point
    return Record(
        point=point,
        attempt=attempt.round,
        round=attempt.round,
        control_of=attempt.control_of,
        status=Status.OK,
        started_at=START + timedelta(seconds=at_s),
        duration_s=took_s,
        devices=DEVICES[: point.world_size],
        measurements=tuple(
            Measurement(
                rank=rank,
                repetitions=(Repetition(warmup=samples, timed=samples),),
                items_per_step=point.batch_size,
                setup_s=setup_s,
            )
            for rank in range(point.world_size)
        ),
    )


def errors(records: list[Record]) -> list[float]:
    """Return ln(speed-up / truth) of each point but the baselines, as the report has it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        made = replace(run("run", len(SIZES) * len(BATCHES)), baseline={"world_size": 1})
        store = RunStore.create(root, made, Measure())
        store.write_devices(DEVICES)
        store.write_records(list(enumerate(records)))
        _, text = run_command("report", "run", "--format", "json", "--results", folder)
    found = {(one["world_size"], one["batch_size"]): one for one in json.loads(text)["points"]}
    pairs = itertools.product(SIZES[1:], BATCHES)
    return [float(np.log(found[size, batch]["speed_up"] / size)) for size, batch in pairs]


if __name__ == "__main__":
    main()
