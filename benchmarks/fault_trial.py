"""Random faults: any process of a sweep, any signal, any moment; then the run is resumed.

    python -m benchmarks.fault_trial [--trials 500] [--seconds 3600] [--seed N] [--jobs 2]
        [--only K] [-o FILE.json]

A trial is a real sweep of real points on CPU workers, with a HOME and a lock folder of its own. The
victim is the driver, a rank, the raylet, the head (gcs_server), an agent or a watcher. Afterwards:
nothing of the sweep lives, HOME is as it was, nothing new lies unused in /dev/shm, stderr holds no
traceback, every part can be read; the resumed run ends with each point ok exactly once, and no
point that was ok has run again. What is not so is a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.machine import machine
from raybench.cluster import proc
from raybench.device_locks import FOLDER_VARIABLE
from raybench.schemas import TABLES

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
_FIRST_S, _LAST_S = 1.0, 25.0
# What is stopped goes on after so long, as after a debugger or a pause of the machine.
_STOPPED_S = 5.0
_LIMIT_S = 300.0
# docs/reliability.md: watchers and all; a busy machine takes its time.
_GONE_S = 75.0
_SIGNALS = (
    *(signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV),
    *(signal.SIGABRT, signal.SIGHUP, signal.SIGINT, signal.SIGFPE),
)
_KINDS = {
    "raylet": "/raylet/raylet",
    "head": "gcs_server",
    "rank": "ray::_Seat",
    "agent": "ray::_Agent",
    "store": "ray::_Store",
    "agent of Ray": "agent",
    "log monitor": "log_monitor",
    "watcher": "leash.py",
}


@dataclass(slots=True, kw_only=True)
class Trial:
    """What was done and what came of it. findings: what is not as it must be."""

    number: int
    moment_s: float
    victim: str = "none"
    signal: str = ""
    code: int = 0
    rows_before: int = 0
    gone_s: float = 0.0
    resumed_code: int | None = None
    findings: list[str] = field(default_factory=list)
    said: str = ""


class Family:
    """All processes that a sweep ever had, by number and start."""

    def __init__(self, driver: int) -> None:
        self._driver = driver
        self._seen: dict[int, str] = {}
        self._ended = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def stop(self) -> None:
        self._ended.set()
        self._watching.join()

    def living(self) -> dict[int, str]:
        """Number -> command line."""
        known = {p: now for p, began in list(self._seen.items()) if (now := _began(p)) == began}
        return {process: _title(process) for process in known}

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self._look()

    def _look(self) -> None:
        parents = proc.parents()
        alive = {p for p, began in self._seen.items() if _began(p) == began}
        found = proc.with_descendants(alive | ({self._driver} & parents.keys()), parents)
        watched = {str(process) for process in found}
        found |= {p for p in parents if _watches(p) in watched}
        self._seen |= {p: began for p in found if (began := _began(p))}


def _began(process: int) -> str:
    """When a living process began; empty for one that is gone or waits to be buried."""
    stat = proc.read(process, "stat").rpartition(b")")[2].split()
    return stat[19].decode() if stat and stat[0] not in (b"Z", b"X") else ""


def _title(process: int) -> str:
    return proc.read(process, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _watches(process: int) -> str:
    """The number of the process that a watcher watches."""
    words = _title(process).split()
    places = [place for place, word in enumerate(words) if word.endswith("leash.py")]
    return words[places[0] + 2] if places and len(words) > places[0] + 2 else ""


def tried(number: int, seed: int) -> Trial:
    """One trial, in a folder of its own."""
    chance = random.Random(f"{seed}:{number}")
    trial = Trial(number=number, moment_s=round(chance.uniform(_FIRST_S, _LAST_S), 2))
    folder = Path(tempfile.mkdtemp(prefix="ft"))
    shared_before = _shared_memory()
    try:
        (folder / "home").mkdir()
        (folder / "job.yaml").write_text(_JOB)
        _harm(trial, chance, folder)
        _check_readable(trial, folder)
        ok_before = _ok(folder)
        trial.rows_before = len(ok_before)
        _resume(trial, folder, bool(list(folder.glob("r/runs/*/run.parquet"))))
        _check_whole(trial, folder, ok_before)
        _check_traces(trial, folder, shared_before)
    except Exception as error:
        trial.findings.append(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return trial


def _command(*more: str) -> list[str]:
    where = ["--address", "local", "--device", "cpu", "-o", "r"]
    return [sys.executable, "-m", "raybench", "sweep", "job.yaml", *where, *more]


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own = {"HOME": str(folder / "home"), FOLDER_VARIABLE: str(folder / "locks")}
    return {**kept, **own, "PYTHONPATH": str(_REPOSITORY)}


def _started(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            _command(*more),
            cwd=folder,
            env=_environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=said,
        )


def _harm(trial: Trial, chance: random.Random, folder: Path) -> None:
    """Start the sweep, send the signal, wait for its end and for that of all it started."""
    process = _started(folder)
    family = Family(process.pid)
    try:
        time.sleep(trial.moment_s)
        if process.poll() is None:
            _strike(trial, chance, process.pid, family)
        trial.code = _waited(trial, process)
    finally:
        family.stop()
    _await_gone(trial, family)
    _read_said(trial, folder, "sweep")


def _strike(trial: Trial, chance: random.Random, driver: int, family: Family) -> None:
    victims: dict[str, list[int]] = {"driver": [driver]}
    for process, title in sorted(family.living().items()):
        kind = next((kind for kind, part in _KINDS.items() if part in title), None)
        if kind is not None and process != driver:
            victims.setdefault(kind, []).append(process)
    trial.victim = chance.choice(sorted(victims))
    victim, number = chance.choice(victims[trial.victim]), chance.choice(_SIGNALS)
    trial.signal = number.name
    try:
        os.kill(victim, number)
        if number == signal.SIGSTOP:
            time.sleep(_STOPPED_S)
            os.kill(victim, signal.SIGCONT)
    except ProcessLookupError:
        trial.victim += " (gone)"


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
    if what == "sweep" and trial.code == 4:
        trial.findings.append("exit code 4")


def _check_readable(trial: Trial, folder: Path) -> None:
    for table in TABLES:
        for path in (folder / "r" / table).glob("*/[!.]*.parquet"):
            try:
                pd.read_parquet(path)
            except Exception as error:
                trial.findings.append(f"{path.name} of {table} cannot be read: {error}")


def _rows(folder: Path) -> pd.DataFrame:
    parts = sorted(folder.glob("r/points/*/[!.]*.parquet"))
    read = [pd.read_parquet(path, columns=["point_id", "attempt", "status"]) for path in parts]
    return pd.concat(read) if read else pd.DataFrame({"point_id": [], "attempt": [], "status": []})


def _ok(folder: Path) -> set[str]:
    rows = _rows(folder)
    return set(rows[rows["status"] == "ok"]["point_id"])


def _resume(trial: Trial, folder: Path, has_run: bool) -> None:
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


def _check_whole(trial: Trial, folder: Path, ok_before: set[str]) -> None:
    rows = _rows(folder)
    if rows.duplicated(["point_id", "attempt"]).any():
        trial.findings.append("an attempt has two rows")
    counts = rows[rows["status"] == "ok"]["point_id"].value_counts()
    if len(counts) != _POINTS or (counts != 1).any():
        trial.findings.append(f"ok points and their rows: {counts.to_dict()}")
    if again := {p for p in ok_before if len(rows[rows["point_id"] == p]) > 0 and counts[p] != 1}:
        trial.findings.append(f"ok points that ran again: {sorted(again)}")
    _check_readable(trial, folder)
    left = {path.name for path in folder.glob("r/**/.*")} - {".driver"}
    if left:
        trial.findings.append(f"left in the results: {sorted(left)}")


def _check_traces(trial: Trial, folder: Path, shared_before: set[str]) -> None:
    if left := sorted(path.name for path in (folder / "home" / ".ray").glob("*")):
        trial.findings.append(f"left in HOME/.ray: {left}")
    new = _shared_memory() - shared_before
    if unused := sorted(name for name in new if not _is_mapped(name)):
        time.sleep(5.0)  # of another sweep, which is just ending
        if unused := [name for name in unused if (Path("/dev/shm") / name).exists()]:
            trial.findings.append(f"left in /dev/shm: {unused}")


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _is_mapped(name: str) -> bool:
    part = f"/dev/shm/{name}".encode()
    return any(part in proc.read(process, "maps") for process in proc.parents())


def summary(trials: Sequence[Trial], seed: int, took_s: float) -> dict[str, Any]:
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=_REPOSITORY, capture_output=True, text=True).stdout.strip()
    struck = [trial for trial in trials if trial.signal and "gone" not in trial.victim]
    return {
        "commit": commit,
        "seed": seed,
        "trials": len(trials),
        "struck": len(struck),
        "victims": dict(sorted(Counter(trial.victim for trial in struck).items())),
        "signals": dict(sorted(Counter(trial.signal for trial in struck).items())),
        "exit_codes": {
            str(code): count for code, count in Counter(t.code for t in trials).most_common()
        },
        "rows_ok_before_resuming": dict(sorted(Counter(t.rows_before for t in trials).items())),
        "slowest_gone_s": max((trial.gone_s for trial in trials), default=0.0),
        "took_s": round(took_s, 1),
        "machine": machine(),
        "findings": [asdict(trial) for trial in trials if trial.findings],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, help="make this trial alone, and print what was said")
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    if chosen.only is not None:
        print(json.dumps(asdict(tried(chosen.only, chosen.seed)), indent=1))
        return
    print(f"seed {chosen.seed}", flush=True)
    begun_s, trials = time.time(), list[Trial]()
    numbers = iter(range(chosen.trials))
    lock = threading.Lock()

    def work() -> None:
        while time.time() < begun_s + chosen.seconds:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            trial = tried(number, chosen.seed)
            with lock:
                trials.append(trial)
                told = "; ".join(trial.findings) or "as it must be"
                at = f"{trial.victim:<14}{trial.signal:<9}{trial.moment_s:>6.2f} s"
                print(f"{number:>4}  {at}  exit {trial.code:>4}  {told}", flush=True)
                result = summary(trials, chosen.seed, time.time() - begun_s)
                if chosen.output:
                    chosen.output.write_text(json.dumps(result, indent=1) + "\n")

    with ThreadPoolExecutor(chosen.jobs) as pool:
        for done in [pool.submit(work) for _ in range(chosen.jobs)]:
            done.result()
    found = sum(bool(trial.findings) for trial in trials)
    print(f"{len(trials)} trials, {found} with a finding")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
