"""How `raybench compare` does as a gate, in simulated histories, through the real command.

    python benchmarks/compare_gate.py [--histories 1000] [--minutes 60] [-o FILE.json]

A history is a results folder of nights: each night one node of a pool (`NODE_SD`: they differ),
runs of four points whose starts differ with heavy tails (Student's t with 3 degrees of freedom and
the median of the A/A pair on H200s), whose levels move together from run to run (`RUN_SD`), on a
machine that drifts (`DRIFT` over 30 nights, one way). Samples have AR(1) noise of 1 % and 1 % of
outliers. The code is outside git, so the tables tell no difference between any two runs. In the
last night some or all points become slower by twice the threshold. Each history is judged twice:
before the slowdown (a false alarm is an exit code of 1) and after it (exit code 1 is right).

FORMS says which runs the gate takes. A slower point is `same` where the command says so of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from numpy.typing import NDArray
from store_scale import device

from raybench.cli.compare import compare_command
from raybench.job.model import Measure
from raybench.job.point import Point, Precision
from raybench.records import Device, Measurement, Record, Repetition, Samples, Status
from raybench.results.run import Run, RunStatus
from raybench.results.writer import RunStore

THRESHOLD = 0.015
SLOWDOWN = 2 * THRESHOLD
POINTS = 4
NIGHTS = 8
NODES, NODE_SD = 6, 0.004
RUN_SD = 0.001
START_SCALE = 0.0038 * 0.674 / 0.765
DRIFT = 0.01 / 30
SAMPLES, NOISE, PHI = 54, 0.01, 0.5
START = datetime(2026, 11, 1, tzinfo=UTC)
MEASURE = Measure(warmup=5, iterations=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a gate measures.

    a_night: runs in each night before. base, new: runs in the last night; base: of the old code
    beside the new one, on the same node; 0: the last night before is BASE.
    """

    a_night: int
    base: int
    new: int


FORMS = {
    "one run a side, nothing else": Form(a_night=0, base=1, new=1),
    "three runs a side on one node": Form(a_night=0, base=3, new=3),
    "five runs a side on one node": Form(a_night=0, base=5, new=5),
    "one run a night": Form(a_night=1, base=0, new=1),
    "three runs tonight against one a night": Form(a_night=1, base=0, new=3),
    "three runs a night": Form(a_night=3, base=0, new=3),
}
RECOMMENDED = "three runs a side on one node"
CHANGED = (POINTS, POINTS // 2, 1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--histories", type=int, default=1000, help="of the recommended form")
    options.add_argument("--others", type=int, default=100, help="of each other form")
    options.add_argument("--minutes", type=float, default=60.0, help="the most for that form")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    rows = []
    for name in sorted(FORMS, key=lambda name: name != RECOMMENDED):
        count = chosen.histories if name == RECOMMENDED else chosen.others
        minutes = chosen.minutes if name == RECOMMENDED else chosen.minutes / 5
        rows.append({"form": name, **judged(FORMS[name], count, minutes)})
        print(rows[-1], flush=True)
    if chosen.output:
        content = {"slowdown": SLOWDOWN, "threshold": THRESHOLD, "points": POINTS, "rows": rows}
        chosen.output.write_text(json.dumps(content, indent=2) + "\n")


def judged(form: Form, count: int, minutes: float) -> dict[str, Any]:
    """Shares of histories, by how many points became slower."""
    pairs: list[tuple[int, Verdict, Verdict]] = []
    until_s = time.monotonic() + 60 * minutes
    for number in range(count):
        changed = CHANGED[number % len(CHANGED)]
        pairs.append((changed, *History(form, number, changed).verdicts()))
        if time.monotonic() > until_s:
            break
    return {
        "histories": len(pairs),
        "exit_1_without_a_slowdown": share(quiet.code == 1 for _, quiet, _ in pairs),
        "exit_5_without_a_slowdown": share(quiet.code == 5 for _, quiet, _ in pairs),
        "exit_1": share(slow.code == 1 for _, _, slow in pairs),
        "exit_1_by_slower_points": {
            changed: share(slow.code == 1 for some, _, slow in pairs if some == changed)
            for changed in CHANGED
        },
        "exit_0": share(slow.code == 0 for _, _, slow in pairs),
        "slower_points_called_same": sum(slow.slower_called_same for _, _, slow in pairs),
        "slower_points": sum(changed for changed, _, _ in pairs),
    }


def share(answers: Iterator[bool]) -> float:
    known = list(answers)
    return round(sum(known) / max(1, len(known)), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one call of the command with --fail-on unclear."""

    code: int
    slower_called_same: int


class History:
    """Nights of one machine pool, drawn from a seed."""

    def __init__(self, form: Form, seed: int, changed: int) -> None:
        self.form, self.changed = form, changed
        self.rng = np.random.default_rng([seed, 20261122])
        self.nodes = np.exp(NODE_SD * self.rng.standard_normal(NODES))
        self.drift = float(self.rng.choice([-1, 1])) * DRIFT
        self.runs = 0

    def verdicts(self) -> tuple[Verdict, Verdict]:
        """Of the night before the slowdown, and of the one with it."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            last = ""
            for night in range(NIGHTS):
                for _ in range(self.form.a_night):
                    last = self.sweep(root, night, self.node(night), "night", 0.0)
            quiet = self.gate(root, NIGHTS, last, "quiet", 0)
            return quiet, self.gate(root, NIGHTS + 1, last, "slow", self.changed)

    def node(self, night: int) -> int:
        return int(self.rng.integers(NODES))

    def gate(self, root: Path, night: int, last: str, name: str, changed: int) -> Verdict:
        """Measure what the gate measures in a night and ask for the verdict."""
        node = self.node(night)
        for turn in range(max(self.form.base, self.form.new)):
            if turn < self.form.base:
                self.sweep(root, night, node, f"{name}-base", 0.0)
            if turn < self.form.new:
                self.sweep(root, night, node, f"{name}-new", SLOWDOWN, changed)
        base = f"side={name}-base" if self.form.base else last
        return ask(root, base, f"side={name}-new", changed)

    def sweep(
        self, root: Path, night: int, node: int, side: str, slowdown: float, changed: int = 0
    ) -> str:
        """Write a run; its id."""
        self.runs += 1
        started_at = START + timedelta(days=night, minutes=self.runs)
        run_id = f"gate-{started_at:%Y%m%d-%H%M%S}-{self.runs:04x}"
        level = self.nodes[node] * (1 + self.drift * night) * (1 + RUN_SD * self.rng.normal())
        starts = 1 + START_SCALE * self.rng.standard_t(3, POINTS)
        slower = np.where(np.arange(POINTS) < changed, 1 + slowdown, 1.0)
        devices = (replaced(device(0), node),)
        store = RunStore.create(root, run(run_id, started_at, side), MEASURE)
        store.write_devices(devices)
        steps = 5e6 * (level * starts * slower)[:, np.newaxis] * noise(self.rng)
        store.write_records(
            [(place, record(place, steps[place], devices, started_at)) for place in range(POINTS)]
        )
        return run_id


def ask(root: Path, base: str, new: str, changed: int) -> Verdict:
    """Ask what the command says of two sides."""
    arguments = [base, new, "--results", str(root), "--format", "json", "--fail-on", "unclear"]
    result = CliRunner().invoke(compare_command, arguments, standalone_mode=False)
    assert result.exception is None, result.exception
    slower = {point(place).point_id for place in range(changed)}
    points = json.loads(result.stdout)["points"]
    same = sum(one["point_id"] in slower and one["verdict"] == "same" for one in points)
    return Verdict(code=int(result.return_value), slower_called_same=same)


def noise(rng: np.random.Generator) -> NDArray[np.float64]:
    """Points x samples: AR(1) noise about 1, 1 % of the samples up to twice as long."""
    series = rng.standard_normal((POINTS, SAMPLES))
    for place in range(1, SAMPLES):
        series[:, place] = PHI * series[:, place - 1] + np.sqrt(1 - PHI**2) * series[:, place]
    outliers = np.where(rng.random(series.shape) < 0.01, 1 + rng.random(series.shape), 1.0)
    return (1 + NOISE * series) * outliers


def replaced(one: Device, node: int) -> Device:
    return replace(one, uuid=f"GPU-of-node-{node}", host=f"node-{node}")


def point(place: int) -> Point:
    return Point(
        workload="mlp",
        params={},
        world_size=1,
        precision=Precision.BF16,
        batch_size=2**place,
        global_batch_size=2**place,
        scaling="weak",
    )


def record(
    place: int, steps: NDArray[np.float64], devices: Sequence[Device], started_at: datetime
) -> Record:
    step_ns = tuple(int(ns) for ns in steps)
    starts_ns = tuple(int(ns) for ns in np.cumsum(steps))
    timed = Samples(start_ns=starts_ns, step_ns=step_ns, host_ns=step_ns)
    repetition = Repetition(warmup=Samples(start_ns=(), step_ns=(), host_ns=()), timed=timed)
    measurement = Measurement(rank=0, repetitions=(repetition,), items_per_step=64, setup_s=0.1)
    return Record(
        point=point(place),
        attempt=1,
        status=Status.OK,
        started_at=started_at,
        duration_s=1.0,
        devices=tuple(devices),
        measurements=(measurement,),
    )


def run(run_id: str, started_at: datetime, side: str) -> Run:
    return Run(
        run_id=run_id,
        job_name="gate",
        job_text="version: 1\n",
        job_sha256="0" * 64,
        argv=("raybench",),
        status=RunStatus.OK,
        started_at=started_at,
        finished_at=started_at,
        points_total=POINTS,
        baseline={},
        cluster="simulated",
        host="simulated",
        tags={"side": side},
    )


if __name__ == "__main__":
    main()
