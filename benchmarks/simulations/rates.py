"""How right the ± of a rate and the winner of a report are, where steps stall now and then.

    python -m benchmarks.simulations.rates [--reports 400]

Two equal settings are measured in rounds of 200 steps of 10 ms. The medians of a round scatter by
0.1 %, and a number of its steps, between 0 and 7, takes `stall` times as long. The runs are written
by the real writer, and `raybench report --json` reads them. `sd` is the scatter of the medians in
the cells without stalls.

held: share of the printed 95 % intervals of samples/s that hold the true rate. from: the lower end
of the one-sided 95 % interval of `held`. step: the same share of the printed intervals of the step.
half: the median of half an interval of samples/s. best: share of the reports that name a best
setting; fastest: that name one as the fastest in this run.
"""

from __future__ import annotations

import json
import math
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.common import options
from benchmarks.made_up import START, devices, measurement, run
from benchmarks.simulations.commands import run_command
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records.measurement import Repetition, Samples
from raybench.records.record import Record
from raybench.records.status import Status
from raybench.results.writer import RunStore

STEPS, STEP_MS, MOST_STALLS = 200, 10.0, 7
BATCH = 64
JOB = "answer: {metric: throughput, over: [hidden]}\nworkload: {kind: mlp}\n"
DEVICES = devices(1, per_node=1)
Z_95 = 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Rounds of which some steps take `stall` times as long; the medians scatter by `sd`."""

    rounds: int
    stall: float
    sd: float

    def steps_ms(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return the steps of a round."""
        steps = np.full(STEPS, STEP_MS * math.exp(self.sd * rng.standard_normal()))
        steps[rng.permutation(STEPS)[: rng.integers(MOST_STALLS + 1)]] *= self.stall
        return steps

    @property
    def true_rate(self) -> float:
        """Return the samples/s of the geometric mean over many rounds."""
        stalls = np.arange(MOST_STALLS + 1)
        means_ms = STEP_MS * (1 + stalls * (self.stall - 1) / STEPS)
        return 1000 * BATCH / math.exp(np.log(means_ms).mean())


def cells() -> Iterator[Cell]:
    """Yield the cells of the table."""
    yield Cell(rounds=3, stall=6.0, sd=0.001)
    yield Cell(rounds=3, stall=1.5, sd=0.001)
    yield Cell(rounds=3, stall=1.0, sd=0.01)
    yield from (Cell(rounds=1, stall=1.0, sd=sd) for sd in (0.004, 0.01, 0.03))


def write(root: Path, cell: Cell, rng: np.random.Generator) -> None:
    """Write a run of two settings as a sweep does."""
    made = replace(run("run", 2), job_text=JOB, baseline={})
    store = RunStore.create(root, made, Measure(rounds=cell.rounds))
    store.write_devices(DEVICES)
    records = []
    for number in range(1, cell.rounds + 1):
        for hidden in (64, 128):
            step_ns = tuple(map(round, 1e6 * cell.steps_ms(rng)))
            start_ns = tuple(np.cumsum((0, *step_ns[:-1])).tolist())
            timed = Samples(start_ns=start_ns, step_ns=step_ns, host_ns=step_ns)
            warmup = Samples(start_ns=(0,), step_ns=step_ns[:1], host_ns=step_ns[:1])
            measured = replace(
                measurement(0),
                repetitions=(Repetition(warmup=warmup, timed=timed, settled=True),),
                items_per_step=BATCH,
                breakdown=None,
            )
            point = Point(
                workload="mlp",
                params={"hidden": hidden},
                world_size=1,
                precision=Precision.FP32,
                batch_size=BATCH,
                global_batch_size=BATCH,
                scaling="weak",
            )
            record = Record(
                point=point,
                attempt=number,
                round=number,
                status=Status.OK,
                started_at=START + timedelta(minutes=number),
                duration_s=5.0,
                devices=DEVICES,
                measurements=(measured,),
            )
            records.append(record)
    store.write_records(list(enumerate(records)))


def reports(cell: Cell, count: int) -> dict[str, object]:
    """Return a row of the table."""
    rng = np.random.default_rng(zlib.crc32(repr(cell).encode()))
    held, of_steps, halves, leads = [], [], [], []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), cell, rng)
            found = json.loads(run_command("report", "run", "--json", "--results", folder)[1])
        leads.append(found["lead"])
        [case] = found["answer"]["cases"]
        if cell.rounds == 1:
            continue
        ranked, points = case["ranked"], found["points"]
        held.append(np.mean([one["low"] <= cell.true_rate <= one["high"] for one in ranked]))
        halves += [(one["high"] - one["low"]) / 2 / one["value"] for one in ranked]
        of_steps += [one["step_ms_low"] <= STEP_MS <= one["step_ms_high"] for one in points]
    row: dict[str, object] = {"rounds": cell.rounds, "stall": cell.stall, "sd": cell.sd}
    if held:
        # Both points of a report share what is known of their scatter.
        error = np.std(held) / math.sqrt(count)
        row["held"] = np.mean(held).round(3)
        row["from"] = (np.mean(held) - Z_95 * error).round(3)
        row["step"] = np.mean(of_steps).round(3)
        row["half"] = np.median(halves).round(4)
    for name, words in (("best", "has the most"), ("fastest", "was the fastest in this run")):
        named = [lead.startswith("hidden=") and words in lead for lead in leads]
        row[name] = np.mean(named).round(3)
    return row


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--reports", type=int, default=400)
    chosen = parser.parse_args()
    print(pd.DataFrame([reports(cell, chosen.reports) for cell in cells()]).to_string(index=False))


if __name__ == "__main__":
    main()
