"""Random faults: any process of a sweep, any signal, any moment; then the run is resumed.

    python -m benchmarks.fault_trial [--trials 500] [--seconds 3600] [--seed N] [--jobs 2]
        [--only K] [-o FILE.json]

A trial is a real sweep of real points on CPU workers, with a HOME, a temporary folder and a lock
folder of its own. The victims take turns: the driver, a rank, a worker that starts, the raylet, the
head (gcs_server), the agent, the store, an agent of Ray's, a watcher. First as many sweeps as there
are jobs run undisturbed, twice; the moments are drawn over the life of such a sweep: while it
starts, while its points run (after a number of rows), and while it ends.

Afterwards: the exit code fits what has happened, nothing of the sweep lives, HOME and the temporary
folder are as they were, nothing of it lies unused in /dev/shm, stderr holds no traceback, every
part can be read; the resumed run ends with each point ok exactly once, and no point that was ok has
run again. What is not so is a finding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.machine import commit, machine, without_paths
from benchmarks.sweep_family import VICTIMS, Family, shared_memory, uses
from raybench.cluster import proc
from raybench.cluster.device_locks import FOLDER_VARIABLE
from raybench.results.schema import TABLES

_REPOSITORY = Path(__file__).parents[1]
_JOB = """\
version: 1
name: trial
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2], batch_size: [4, 8, 16]}
measure: {warmup: 3, iterations: 5000, max_seconds: 0.4, timeout_s: 20, breakdown: false}
placement: {oversubscribe: true}
"""
_POINTS = 6
# Before, Python itself starts.
_FIRST_S = 1.0
_PHASES = {"starts": 4, "runs": 5, "ends": 1}
# What is stopped goes on after so long, as after a debugger or a pause of the machine.
_STOPPED_S = 5.0
_LIMIT_S = 300.0
# From the fault to the end of a sweep that cannot go on.
_SHOWN_EVERY_S = 30.0
# docs/reliability.md: watchers and all; a busy machine takes its time.
_GONE_S = 75.0
# These live for a moment each, and the first of them come when so much of the start is over.
_EARLY, _EARLY_SHARE = "starting worker", 0.5
_LOOK_S = 0.05
# torch makes a folder for what it compiles, and keeps it.
_TORCHS = "torchinductor_"
_SIGNALS = (
    *(signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV),
    *(signal.SIGABRT, signal.SIGHUP, signal.SIGINT, signal.SIGFPE),
)
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When an undisturbed sweep has its first row and its last one, and ends; from its start."""

    first_row_s: float
    last_row_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Trial:
    """What was done and what came of it.

    phase: of the sweep, when the victim was looked for: when it had after_rows rows, and wait_s
    more had gone by. struck_s: when it got the signal, from the start of the sweep. ended_s: how
    long the sweep went on. rows_before: points that were ok when it had ended. gone_s: how long
    after it something of it lived. findings: what is not as it must be.
    """

    number: int
    victim: str
    signal: str
    phase: str
    after_rows: int
    wait_s: float
    struck_s: float | None = None
    ended_s: float = 0.0
    code: int = 0
    rows_before: int = 0
    gone_s: float = 0.0
    resumed_code: int | None = None
    findings: list[str] = field(default_factory=list)
    said: str = ""


def make_trial(number: int, seed: int, pace: Pace) -> Trial:
    """Choose what is to be done in the trial of this number."""
    chance = random.Random(f"{seed}:{number}")
    victim = VICTIMS[number % len(VICTIMS)]
    [phase] = chance.choices(list(_PHASES), list(_PHASES.values()))
    if victim == _EARLY:
        phase = "starts"
    rows, longest_s = {
        "starts": (0, pace.first_row_s),
        "runs": (chance.randrange(1, _POINTS), (pace.last_row_s - pace.first_row_s) / _POINTS),
        "ends": (_POINTS, pace.end_s - pace.last_row_s),
    }[phase]
    if victim == _EARLY:
        longest_s *= _EARLY_SHARE
    least_s = _FIRST_S if phase == "starts" else 0.0
    return Trial(
        number=number,
        victim=victim,
        signal=chance.choice(_SIGNALS).name,
        phase=phase,
        after_rows=rows,
        wait_s=round(chance.uniform(least_s, max(least_s, longest_s)), 2),
    )


def tried(number: int, seed: int, pace: Pace) -> Trial:
    """One trial, in a folder of its own."""
    trial = make_trial(number, seed, pace)
    chance = random.Random(f"{seed}:{number}:who")
    folder = _made_folder()
    try:
        shared = _harm(trial, chance, folder)
        _check_readable(trial, folder)
        before = _rows(folder)
        trial.rows_before = len(_ok(before))
        _check_end(trial, before)
        _check_traces(trial, folder)
        shared |= _resume(trial, folder)
        _check_whole(trial, folder, before)
        _check_traces(trial, folder)
        _check_shared_memory(trial, shared)
    except Exception as error:
        trial.findings.append(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    trial.said = without_paths(trial.said)
    trial.findings = [*map(without_paths, trial.findings)]
    return trial


def undisturbed(_: int) -> Pace | None:
    """Measure the pace of one sweep; None, and a line about it, where it does not end well."""
    folder = _made_folder()
    begun_s = time.monotonic()
    times_s: list[float] = []
    process = _started(folder)
    while process.poll() is None:
        now_s = time.monotonic() - begun_s
        times_s += [now_s] * (_count(folder) - len(times_s))
        time.sleep(_LOOK_S)
    end_s = time.monotonic() - begun_s
    said = (folder / "said").read_text(errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    if process.returncode or len(times_s) < _POINTS:
        print(f"an undisturbed sweep ended with {process.returncode}: {said}", flush=True)
        return None
    return Pace(first_row_s=times_s[0], last_row_s=times_s[-1], end_s=end_s)


def usual(paces: Sequence[Pace]) -> Pace:
    """Take the median of each."""
    every = [asdict(pace) for pace in paces]
    names = ("first_row_s", "last_row_s", "end_s")
    return Pace(**{n: round(statistics.median(one[n] for one in every), 2) for n in names})


def _made_folder() -> Path:
    # A short name: Ray makes its sockets far below.
    folder = Path(tempfile.mkdtemp(prefix="ft"))
    (folder / "home").mkdir()
    (folder / "t").mkdir()
    (folder / "job.yaml").write_text(_JOB)
    return folder


def _command(*more: str) -> list[str]:
    where = ["--address", "local", "--device", "cpu", "-o", "r"]
    return [sys.executable, "-m", "raybench", "sweep", "job.yaml", *where, *more]


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "t")}
    # What is on the path already are the packages.
    path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**kept, **own, FOLDER_VARIABLE: str(folder / "locks"), "PYTHONPATH": path}


def _started(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            _command(*more),
            cwd=folder,
            env=_environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=said,
        )


def _harm(trial: Trial, chance: random.Random, folder: Path) -> set[str]:
    """Start the sweep, send the signal, wait for its end and for that of all it started.

    What of /dev/shm it had.
    """
    begun_s = time.monotonic()
    process = _started(folder)
    family = Family(process.pid)
    try:
        while process.poll() is None and _count(folder) < trial.after_rows:
            time.sleep(_LOOK_S)
        time.sleep(trial.wait_s)
        _strike(trial, chance, process, family, begun_s)
        trial.code = _waited(trial, process)
        if trial.struck_s is not None:
            trial.ended_s = round(time.monotonic() - begun_s - trial.struck_s, 1)
    finally:
        family.stop()
    _await_gone(trial, family)
    _read_said(trial, folder, "sweep")
    return family.shared_memory


def _strike(
    trial: Trial,
    chance: random.Random,
    process: subprocess.Popen[bytes],
    family: Family,
    begun_s: float,
) -> None:
    """Send the signal to a process of the kind, as soon as there is one."""
    while process.poll() is None:
        if victims := family.of_kind(trial.victim):
            victim = chance.choice(victims)
            try:
                os.kill(victim, signal.Signals[trial.signal])
            except ProcessLookupError:
                continue
            trial.struck_s = round(time.monotonic() - begun_s, 2)
            if trial.signal == "SIGSTOP":
                _let_go_on(victim)
            return
        time.sleep(_LOOK_S)


def _let_go_on(victim: int) -> None:
    time.sleep(_STOPPED_S)
    try:
        os.kill(victim, signal.SIGCONT)
    except ProcessLookupError:
        return  # somebody has ended it meanwhile


def _waited(trial: Trial, process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        trial.findings.append(f"the driver had not ended after {_LIMIT_S:g} s")
        process.kill()
        return process.wait()


def _await_gone(trial: Trial, family: Family) -> None:
    begun_s = time.monotonic()
    while left := family.living():
        if time.monotonic() > begun_s + _GONE_S:
            trial.findings.append(f"alive after {_GONE_S:g} s: {sorted(left.values())}")
            for process in left:
                os.kill(process, signal.SIGKILL)
            return
        time.sleep(0.2)
    trial.gone_s = max(trial.gone_s, round(time.monotonic() - begun_s, 1))


def _read_said(trial: Trial, folder: Path, what: str) -> None:
    said = (folder / "said").read_text(errors="replace")
    trial.said += f"[{what}]\n{said}"
    if "Traceback (most recent call last)" in said:
        trial.findings.append(f"traceback of the {what}")


def _check_readable(trial: Trial, folder: Path) -> None:
    for table in TABLES:
        for path in (folder / "r" / table).glob("*/[!.]*.parquet"):
            try:
                pd.read_parquet(path)
            except Exception as error:
                trial.findings.append(f"{path.name} of {table} cannot be read: {error}")


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("r/points/*/[!.]*.parquet"))


def _count(folder: Path) -> int:
    return len(_parts(folder))


def _rows(folder: Path) -> pd.DataFrame:
    columns = ["point_id", "attempt", "status"]
    read = [pd.read_parquet(path, columns=columns) for path in _parts(folder)]
    return pd.concat(read) if read else pd.DataFrame({name: [] for name in columns})


def _ok(rows: pd.DataFrame) -> set[str]:
    return set(rows[rows["status"] == "ok"]["point_id"])


def _check_end(trial: Trial, rows: pd.DataFrame) -> None:
    """Check that the exit code says what has happened, in time, and stderr what to type then."""
    if why := wrong_code(trial, rows):
        trial.findings.append(f"exit {trial.code} {why}")
    if trial.code != 3:
        return
    if trial.ended_s > _SHOWN_EVERY_S:
        trial.findings.append(f"exit 3 came {trial.ended_s:g} s after the fault")
    is_left = len(_ok(rows)) < _POINTS
    if (
        is_left
        and "--resume " not in trial.said
        and "type the same command again" not in trial.said
    ):
        trial.findings.append("exit 3 without a word of what to type")


def wrong_code(trial: Trial, rows: pd.DataFrame) -> str:
    """Why a sweep that got this signal must not end so; empty where it may."""
    is_whole = len(_ok(rows)) == _POINTS
    is_of_driver = trial.struck_s is not None and trial.victim == "driver"
    if trial.code < 0:
        its_own = is_of_driver and trial.signal == signal.Signals(-trial.code).name
        return "" if its_own else "by a signal that it did not get"
    last = rows.sort_values("attempt").drop_duplicates("point_id", keep="last")
    has_failed = bool((last["status"] != "ok").any())
    allowed = {
        0: (is_whole, "without all points ok"),
        1: (has_failed, "without a failed point"),
        3: (
            trial.struck_s is not None and trial.victim not in ("driver", "watcher"),
            f"after {trial.signal} of a {trial.victim}",
        ),
        _INTERRUPTED: (
            is_of_driver and trial.signal in ("SIGINT", "SIGTERM"),
            f"after {trial.signal} of a {trial.victim}",
        ),
    }
    may, why = allowed.get(trial.code, (False, "whatever has happened"))
    return "" if may else why


def _resume(trial: Trial, folder: Path) -> set[str]:
    """Go on with the run, or begin anew where there is none; what of /dev/shm that had."""
    has_run = bool(list(folder.glob("r/runs/*/run.parquet")))
    process = _started(folder, *(("--resume", "latest", "--retry-failed") if has_run else ()))
    family = Family(process.pid)
    try:
        trial.resumed_code = _waited(trial, process)
    finally:
        family.stop()
    _read_said(trial, folder, "resumed sweep")
    if trial.resumed_code != 0:
        trial.findings.append(f"the resumed sweep ended with {trial.resumed_code}")
    _await_gone(trial, family)
    return family.shared_memory


def _check_whole(trial: Trial, folder: Path, before: pd.DataFrame) -> None:
    rows = _rows(folder)
    if rows.duplicated(["point_id", "attempt"]).any():
        trial.findings.append("an attempt has two rows")
    counts = rows[rows["status"] == "ok"]["point_id"].value_counts()
    if len(counts) != _POINTS or (counts != 1).any():
        trial.findings.append(f"ok points and their rows: {counts.to_dict()}")
    were, are = (frame["point_id"].value_counts() for frame in (before, rows))
    if again := sorted(point for point in _ok(before) if were[point] != are.get(point, 0)):
        trial.findings.append(f"ok points that ran again: {again}")
    _check_readable(trial, folder)
    left = {path.name for path in folder.glob("r/**/.*")} - {".driver"}
    if left:
        trial.findings.append(f"left in the results: {sorted(left)}")


def _check_traces(trial: Trial, folder: Path) -> None:
    if left := sorted(path.name for path in (folder / "home" / ".ray").glob("*")):
        trial.findings.append(f"left in HOME/.ray: {left}")
    told = trial.said.split("its logs: ")[1:]
    kept = {part.name for line in told for part in Path(line.split("\n")[0]).parents}
    names = {path.name for path in (folder / "t").iterdir()} - kept
    if left := sorted(name for name in names if not name.startswith(_TORCHS)):
        trial.findings.append(f"left in the temporary folder: {left}")


def _check_shared_memory(trial: Trial, shared: set[str]) -> None:
    if left := sorted(shared & unused_memory()):
        trial.findings.append(f"left in /dev/shm: {left}")


def unused_memory() -> set[str]:
    """List what lies in /dev/shm, and no process has it."""
    processes = proc.parents()
    return {name for name in shared_memory() if not any(uses(p, name) for p in processes)}


def by_victim(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Make a row for each victim and signal: what came of it."""
    groups: defaultdict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.struck_s is not None:
            groups[trial.victim, trial.signal].append(trial)
    return [
        {"victim": victim, "signal": name} | _outcome(group)
        for (victim, name), group in sorted(groups.items())
    ]


def _outcome(group: Sequence[Trial]) -> dict[str, Any]:
    return {
        "trials": len(group),
        "exit_codes": _counted(group, lambda trial: trial.code),
        "rows_ok_before_resuming": _counted(group, lambda trial: trial.rows_before),
        "resumed_ok": sum(trial.resumed_code == 0 for trial in group),
        "slowest_ended_s": max(trial.ended_s for trial in group),
        "slowest_gone_s": max(trial.gone_s for trial in group),
        "with_a_finding": sum(bool(trial.findings) for trial in group),
    }


def _counted(trials: Sequence[Trial], of: Callable[[Trial], object]) -> dict[str, int]:
    return {str(key): number for key, number in sorted(Counter(map(of, trials)).items(), key=str)}


def summary(
    trials: Sequence[Trial], seed: int, jobs: int, pace: Pace, took_s: float
) -> dict[str, Any]:
    """All that is told of the trials so far."""
    struck = [trial for trial in trials if trial.struck_s is not None]
    return {
        "commit": commit(),
        "seed": seed,
        "jobs": jobs,
        "undisturbed": asdict(pace),
        "trials": len(trials),
        "struck": len(struck),
        "phases": _counted(struck, lambda trial: trial.phase),
        "victims": _counted(struck, lambda trial: trial.victim),
        "signals": _counted(struck, lambda trial: trial.signal),
        "exit_codes": _counted(trials, lambda trial: trial.code),
        "rows_ok_before_resuming": _counted(trials, lambda trial: trial.rows_before),
        "resumed_ok": sum(trial.resumed_code == 0 for trial in trials),
        "slowest_gone_s": max((trial.gone_s for trial in trials), default=0.0),
        "took_s": round(took_s, 1),
        "machine": machine(),
        "by_victim": by_victim(trials),
        "findings": [asdict(trial) for trial in trials if trial.findings],
    }


def all_tried(
    pool: ProcessPoolExecutor, numbers: Iterator[int], chosen: argparse.Namespace, pace: Pace
) -> Iterator[Trial]:
    """Yield the trials as they end. None begins when the time is up."""
    until_s = time.time() + chosen.seconds
    running: set[Future[Trial]] = set()
    while True:
        if time.time() < until_s:
            more = islice(numbers, chosen.jobs - len(running))
            running |= {pool.submit(tried, number, chosen.seed, pace) for number in more}
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)


def _heed_signals() -> None:
    """Ignore no signal that nohup and shells in the background have their children ignore."""
    for name in ("SIGHUP", "SIGINT", "SIGTERM"):
        signal.signal(signal.Signals[name], signal.SIG_DFL)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, help="make this trial alone, and print what was said")
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args()


def main() -> None:
    chosen = _parsed()
    begun_s, names_before = time.time(), shared_memory()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.jobs, spawn, initializer=_heed_signals) as pool:
        # The first ones find nothing of torch and Ray in memory.
        list(pool.map(undisturbed, range(chosen.jobs)))
        paces = [pace for pace in pool.map(undisturbed, range(chosen.jobs)) if pace]
        pace = usual(paces)
        print(f"seed {chosen.seed}; {len(paces)} undisturbed: {pace}", flush=True)
        if chosen.only is not None:
            print(json.dumps(asdict(tried(chosen.only, chosen.seed, pace)), indent=1))
            return
        trials: list[Trial] = []
        for trial in all_tried(pool, islice(count(), chosen.trials), chosen, pace):
            trials.append(trial)
            _tell(trial)
            told = summary(trials, chosen.seed, chosen.jobs, pace, time.time() - begun_s)
            if chosen.output:
                chosen.output.write_text(json.dumps(told, indent=1) + "\n")
    # Also what no trial could be seen to have.
    left = sorted((shared_memory() - names_before) & unused_memory())
    found = sum(bool(trial.findings) for trial in trials)
    print(f"{len(trials)} trials, {found} with a finding; left in /dev/shm: {left or 'nothing'}")
    sys.exit(1 if found or left else 0)


def _tell(trial: Trial) -> None:
    told = "; ".join(trial.findings) or "as it must be"
    at = "no moment" if trial.struck_s is None else f"{trial.struck_s:.2f} s"
    who = f"{trial.victim:<16}{trial.signal:<9}{trial.phase:<7}{at:>9}"
    rows = f"{trial.rows_before} ok"
    print(f"{trial.number:>4}  {who}  exit {trial.code:>4}  {rows}  {told}", flush=True)


if __name__ == "__main__":
    main()
