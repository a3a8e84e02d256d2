"""Is a script as fast below raybench as by bare torchrun, where it times itself?

    python -m benchmarks.script_parity [--device cpu|cuda] [--world-size 2] [--starts 12]
        [--at-once 6] [--only gpu_bound|python_bound] [-o FILE.json]

benchmarks/self_timed_train.py by `torchrun` and by `raybench sweep`, as a user types them, each
start in fresh processes. So many starts of each side load their libraries together. Then they step
in turns, one start alone at a time, a slice of its steps in each round, in an order that is drawn
anew each round: what slows the host down for a second slows all of them. The time of a start is the
median of its steps, by the script itself and by raybench's row; the ratio of the two sides has a
95 % interval over the starts, beside what their waves differ by. The
script records an event of its own in each step on both sides. Ray is beside both; a last wave by
torchrun alone has no Ray beside. FILE is written after each wave.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import raybench
from raybench.stats.equivalence import Ratio, agreement, ratio
from raybench.stats.summary import Interval, step_series, student_t

TRAIN = Path(__file__).with_name("self_timed_train.py")
WARMUP = 20
# Steps after the last turn, when all run: so no start ends while another steps.
TAIL = 10
# Starts by torchrun when the sweeps have ended, and their Ray with them.
ALONE = "torchrun_alone"
ENDLESS = 10_000_000
READY_WITHIN_S, ENDED_WITHIN_S = 90.0, 60.0
_LOOK_S = 0.2


class Wave(NamedTuple):
    """Step times of the starts that stepped in turns, in ms; as many of each side."""

    torchrun: Sequence[float]
    raybench: Sequence[float]


class Step(NamedTuple):
    """What a start does. margin: of the ratio of both sides."""

    arguments: str
    slice_steps: int
    rounds: int
    margin: float

    @property
    def timed(self) -> int:
        return self.slice_steps * self.rounds - WARMUP + TAIL


STEPS = {
    "cuda": {
        "gpu_bound": Step("--hidden 4096 --layers 8 --batch-size 1024", 12, 5, 0.01),
        "python_bound": Step("--hidden 64 --layers 24 --batch-size 64", 32, 5, 0.05),
    },
    "cpu": {
        "compute_bound": Step("--hidden 256 --layers 4 --batch-size 64", 20, 4, 0.01),
        "python_bound": Step("--hidden 16 --layers 8 --batch-size 4", 40, 6, 0.05),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is compared, where, and how many starts of each side load together in how many waves."""

    step: Step
    device: str
    world_size: int
    at_once: int
    waves: int
    folder: Path

    def arguments(self, side: str, lane: int, wave: object) -> str:
        """Return what the script is given in a start, but for the number of its steps."""
        turns = f"--turns {self.folder}/turns --slice {self.step.slice_steps}"
        return f"{self.step.arguments} {turns} --name {side}-{lane}-{wave} --warmup {WARMUP}"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--world-size", type=int, default=2)
    options.add_argument("--starts", type=int, default=12, help="of each side")
    options.add_argument("--at-once", type=int, default=6, help="of each side")
    options.add_argument("--only", help="one of the steps")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Any] = {"machine": machine(chosen.device, chosen.world_size)}
    for name, step in STEPS[chosen.device].items():
        if chosen.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="parity") as folder:
            trial = Trial(
                step=step,
                device=chosen.device,
                world_size=chosen.world_size,
                at_once=chosen.at_once,
                waves=-(-chosen.starts // chosen.at_once),
                folder=Path(folder),
            )
            for times_ms in compare(trial):
                found[name] = told(trial, times_ms)
                if chosen.output:
                    chosen.output.write_text(json.dumps(found, indent=2) + "\n")
        print(name, json.dumps(found[name]), flush=True)


def machine(device: str, world_size: int) -> dict[str, object]:
    import torch

    is_cuda = device == "cuda"
    name = torch.cuda.get_device_name(0) if is_cuda else platform.machine()
    return {
        "devices": f"{world_size} x {name}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
        "ray": version("ray"),
    }


def told(trial: Trial, times_ms: dict[str, list[float]]) -> dict[str, Any]:
    """Return the times of the starts so far and, from two on, their ratio."""
    step = trial.step
    facts = {
        "arguments": step.arguments,
        "world_size": trial.world_size,
        "timed_steps": step.timed,
        "slice_steps": step.slice_steps,
        "at_once": trial.at_once,
        "step_ms": times_ms,
    }
    if len(times_ms["torchrun"]) < 2:
        return facts
    of_torchrun = ratio_within(waves_of(times_ms, trial.at_once))
    verdict = agreement(of_torchrun, step.margin)
    facts |= {"ratio": asdict(of_torchrun), "margin": step.margin, "is": verdict}
    if len(times_ms[ALONE]) < 2:
        return facts
    return facts | {f"ratio_to_{ALONE}": asdict(ratio(times_ms["raybench"], times_ms[ALONE]))}


def waves_of(times_ms: Mapping[str, Sequence[float]], at_once: int) -> list[Wave]:
    """Return the starts of each wave, by side."""
    torchrun, raybench = times_ms["torchrun"], times_ms["raybench"]
    places = range(0, len(torchrun), at_once)
    return [Wave(torchrun[at:][:at_once], raybench[at:][:at_once]) for at in places]


def ratio_within(waves: Sequence[Wave]) -> Ratio:
    """Estimate raybench's step over torchrun's, with a 95 % t interval over the starts.

    Of logarithms, less the mean of their wave, which has as many starts of each side. The waves and
    the ratio take a degree of freedom each.
    """
    halves, counts, squares = [], [], 0.0
    for wave in waves:
        logs = [[math.log(time) for time in side] for side in wave]
        means = [statistics.fmean(side) for side in logs]
        halves.append(means[1] - means[0])
        counts.append(len(logs[0]))
        squares += sum((log - statistics.fmean(means)) ** 2 for side in logs for log in side)
    starts = sum(counts)
    difference = sum(map(mul, halves, counts)) / starts
    freedom = 2 * starts - len(waves) - 1
    error = math.sqrt((squares - starts * difference**2 / 2) / freedom * 2 / starts)
    half_width = student_t(freedom) * error
    low, high = math.exp(difference - half_width), math.exp(difference + half_width)
    return Ratio(value=math.exp(difference), interval=Interval(low=low, high=high))


def compare(trial: Trial) -> Iterator[dict[str, list[float]]]:
    """Run all waves; after each, the step times of all starts so far, in ms, by side."""
    times_ms: dict[str, list[float]] = {"torchrun": [], "raybench": [], ALONE: []}
    lanes = range(trial.at_once)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(trial.folder / "turns"))
        server.listen(4 * trial.at_once * trial.world_size)
        with ExitStack() as stack:
            sweeps = [stack.enter_context(raybench_sweep(trial, lane)) for lane in lanes]
            for wave in range(trial.waves):
                times_ms["torchrun"] += run_wave(server, trial, str(wave), beside=sweeps)
                times_ms["raybench"] += [by_row(trial, lane, wave) for lane in lanes]
                yield times_ms
            for sweep in sweeps:
                sweep.wait(ENDED_WITHIN_S)
        times_ms[ALONE] += run_wave(server, trial, ALONE, beside=())
        yield times_ms


def run_wave(
    server: socket.socket, trial: Trial, wave: str, *, beside: Sequence[subprocess.Popen[bytes]]
) -> list[float]:
    """Let starts by torchrun, and as many of the sweeps beside, step in turns; torchrun's times."""
    began_s = time.perf_counter()
    lanes = range(trial.at_once)
    with ExitStack() as stack:
        torchruns = [stack.enter_context(torchrun(trial, lane, wave)) for lane in lanes]
        starts = gather(server, trial, [*beside, *torchruns])
        ready_s = time.perf_counter()
        take_turns(starts, trial.step.rounds)
        stepped_s = time.perf_counter()
        for process in torchruns:
            process.wait(ENDED_WITHIN_S)
    took = f"loading {ready_s - began_s:.1f} s, turns {stepped_s - ready_s:.1f} s"
    print(f"wave {wave}: {took}", file=sys.stderr, flush=True)
    return [by_itself(trial, lane, wave) for lane in lanes]


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process whose output goes to a file; end it if it has not."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(ENDED_WITHIN_S)


@contextmanager
def torchrun(trial: Trial, lane: int, wave: str) -> Iterator[subprocess.Popen[bytes]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    times = trial.folder / f"times-{lane}-{wave}.json"
    own = f"{trial.arguments('torchrun', lane, wave)} --steps {trial.step.timed} --times {times}"
    command = [*launcher, f"--nproc-per-node={trial.world_size}", str(TRAIN), *own.split()]
    with running(command, trial.folder / f"torchrun-{lane}-{wave}.log") as process:
        yield process


@contextmanager
def raybench_sweep(trial: Trial, lane: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a sweep of a point for each wave."""
    args = f"{trial.arguments('raybench', lane, '{wave}')} --steps {ENDLESS}"
    job = {
        "version": 1,
        "name": f"lane-{lane}",
        "workload": {"kind": "script", "path": str(TRAIN), "args": args},
        "matrix": {"world_size": [trial.world_size], "wave": list(range(trial.waves))},
        "placement": {"oversubscribe": trial.device == "cpu"},
        "measure": {
            "warmup": WARMUP,
            "iterations": trial.step.timed,
            "breakdown": False,
            # Those of the others' turns are in it.
            "max_seconds": 1000,
            "timeout_s": 1000,
        },
    }
    path = trial.folder / f"lane-{lane}.yaml"
    path.write_text(json.dumps(job))
    where = ["--address", "local", "--device", trial.device, "--shared"]
    sweep = [sys.executable, "-m", "raybench", "sweep", str(path), *where]
    command = [*sweep, "-o", str(trial.folder / f"results-{lane}")]
    with running(command, trial.folder / f"raybench-{lane}.log") as process:
        yield process


class Rank:
    """The end of a rank's turns that is here."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")
        self.start = self._file.readline().decode().rpartition(" ")[0]

    def go(self) -> None:
        self._connection.sendall(b".")

    def wait(self) -> None:
        """Until its turn has ended, or its process."""
        self._file.read(1)

    def release(self) -> None:
        """Let it go on for good."""
        self._file.close()
        self._connection.close()


def gather(
    server: socket.socket, trial: Trial, processes: Sequence[subprocess.Popen[bytes]]
) -> list[list[Rank]]:
    """Wait until the ranks of a start of each process are at their first step; ranks by start."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    starts: dict[str, list[Rank]] = {}
    for _ in range(len(processes) * trial.world_size):
        while not select.select([server], [], [], _LOOK_S)[0]:
            if time.monotonic() > deadline_s or any(process.poll() for process in processes):
                raise SystemExit(f"a start never came to its first step:\n{logs(trial)}")
        connection, _ = server.accept()
        connection.settimeout(READY_WITHIN_S)
        rank = Rank(connection)
        rank.wait()
        starts.setdefault(rank.start, []).append(rank)
    return list(starts.values())


def take_turns(starts: list[list[Rank]], rounds: int) -> None:
    for _ in range(rounds):
        for ranks in random.sample(starts, len(starts)):
            for rank in ranks:
                rank.go()
            for rank in ranks:
                rank.wait()
    for ranks in starts:
        for rank in ranks:
            rank.release()


def by_itself(trial: Trial, lane: int, wave: str) -> float:
    """Return the median step in ms that the script found; the last words of all where it failed."""
    times = [trial.folder / f"times-{lane}-{wave}.{rank}" for rank in range(trial.world_size)]
    if not all(path.exists() for path in times):
        raise SystemExit(logs(trial))
    ranks_ns = [json.loads(path.read_text()) for path in times]
    return round(float(statistics.median(step_series(ranks_ns))) / 1e6, 4)


def by_row(trial: Trial, lane: int, wave: int) -> float:
    """Return the median step in ms of raybench's row, when there is one."""
    deadline_s = time.monotonic() + ENDED_WITHIN_S
    results = trial.folder / f"results-{lane}"
    while time.monotonic() < deadline_s:
        if any(results.glob("points/**/*.parquet")):
            points = raybench.load(results, "points")
            row = points[[params["wave"] == str(wave) for params in points["params"]]]
            if len(row) and row["status"].iloc[-1] != "ok":
                raise SystemExit(f"{row['error_message'].iloc[-1]}\n{row['error_detail'].iloc[-1]}")
            if len(row):
                return round(float(row["step_ms_p50"].iloc[-1]), 4)
        time.sleep(_LOOK_S)
    raise SystemExit(logs(trial))


def logs(trial: Trial) -> str:
    """Return the end of what each process said."""
    ends = [f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(trial.folder.glob("*.log"))]
    return "\n".join(ends)


if __name__ == "__main__":
    main()
