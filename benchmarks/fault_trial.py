"""Random faults: any process of a sweep, any signal, any moment; then the run is resumed.

    python -m benchmarks.fault_trial [--trials 100] [--seconds 3600] [--seed N] [--jobs 1]
        [--only K] [-o FILE.json]

A trial is a real sweep of real points on CPU workers, with a HOME, a temporary folder and a lock
folder of its own. The victims take turns. First a sweep runs undisturbed, twice: the first finds
nothing of torch and Ray in memory. The moments are drawn over the time that the second takes.

Afterwards: the exit code fits what has happened, nothing of the sweep lives, HOME and the temporary
folder are as they were, stderr holds no traceback, every part can be read; the resumed run ends
with each point ok exactly once, and no point that was ok has run again. What is not so is a
finding, and the exit code is 1.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import pandas as pd
import psutil

from benchmarks.common import REPOSITORY, options, write_result

JOB = """\
version: 1
name: trial
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2], batch_size: [4, 8, 16]}
measure: {warmup: 3, iterations: 1000, max_seconds: 0.4, timeout_s: 20, breakdown: false}
placement: {oversubscribe: true}
"""
POINTS = 6
# What a process is -> what the first four words of its command line have. A raylet has the command
# lines of Ray's agents further on.
KINDS = {
    "driver": (),
    "watcher": ("reaper.py",),
    "raylet": ("/raylet/raylet",),
    "head": ("gcs_server",),
    "rank": ("ray::_Worker",),
    "agent": ("ray::NodeAgent",),
    "store": ("ray::_Store",),
    "starting worker": ("setup_worker.py", "default_worker.py", "ray::IDLE"),
    "agent of Ray": ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "/agent.py", "/main.py"),
}
SIGNALS = (
    *("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP", "SIGSEGV"),
    *("SIGABRT", "SIGHUP", "SIGINT", "SIGFPE"),
)
# What is stopped goes on after so long, as after a debugger or a pause of the machine.
STOPPED_S = 5.0
# A sweep has ended, what it started is gone, and exit code 3 comes, within so long.
LIMIT_S, GONE_S, SHOWN_S = 300.0, 75.0, 30.0


@dataclass(slots=True, kw_only=True)
class Trial:
    """What was done and what came of it.

    wait_s: when the victim was looked for, from the start of the sweep. struck_s: when it got the
    signal. ended_s: how long the sweep went on after that. findings: what is not as it must be.
    said: on stderr.
    """

    number: int
    victim: str
    signal: str
    wait_s: float
    struck_s: float | None = None
    ended_s: float = 0.0
    code: int = 0
    findings: list[str] = field(default_factory=list)
    said: str = ""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, help="make this trial alone, and print what was said")
    chosen = parser.parse_args()
    until_s = time.time() + chosen.seconds
    # nohup and shells in the background have their children ignore some signals.
    for name in ("SIGHUP", "SIGINT", "SIGTERM"):
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    undisturbed_s()
    whole_s = undisturbed_s()
    print(f"seed {chosen.seed}; undisturbed: {whole_s:.1f} s", flush=True)
    numbers = range(chosen.trials) if chosen.only is None else [chosen.only]
    trials = []
    with ProcessPoolExecutor(chosen.jobs) as pool:
        make = partial(tried, seed=chosen.seed, whole_s=whole_s, until_s=until_s)
        for future in as_completed([pool.submit(make, number) for number in numbers]):
            if trial := future.result():
                trials.append(trial)
                told = "; ".join(trial.findings) or "as it must be"
                struck = f"{trial.victim} {trial.signal} at {trial.struck_s} s"
                print(f"{trial.number:>4} {struck}: exit {trial.code}, {told}", flush=True)
    if chosen.only is not None:
        print(trials[0].said)
    wrong = sum(bool(trial.findings) for trial in trials)
    print(f"{len(trials)} trials, {wrong} with a finding")
    if chosen.output:
        write_result({"seed": chosen.seed, "trials": list(map(asdict, trials))}, chosen.output)
    sys.exit(bool(wrong))


def tried(number: int, *, seed: int, whole_s: float, until_s: float) -> Trial | None:
    """Make one trial, in a folder of its own; None when the time is up."""
    if time.time() > until_s:
        return None
    chance = random.Random(f"{seed}:{number}")
    victim = list(KINDS)[number % len(KINDS)]
    # These live for a moment each, in the first half.
    share = 0.5 if victim == "starting worker" else 1.0
    wait_s = round(chance.uniform(1.0, share * whole_s), 2)
    trial = Trial(number=number, victim=victim, signal=chance.choice(SIGNALS), wait_s=wait_s)
    folder = made_folder()
    seen: set[psutil.Process] = set()
    try:
        harm(trial, chance, folder, seen)
        check_traces(trial, folder, seen)
        before = rows(folder)
        check_end(trial, before)
        has_run = bool(list(folder.glob("r/runs/*/run.parquet")))
        process = started(folder, *(("--resume", "latest", "--retry-failed") if has_run else ()))
        if code := waited(trial, process):
            trial.findings.append(f"the resumed sweep ended with {code}")
        check_traces(trial, folder, seen)
        check_whole(trial, folder, before)
    except Exception as error:
        trial.findings.append(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return trial


def undisturbed_s() -> float:
    """Measure how long a sweep takes."""
    folder = made_folder()
    began_s = time.monotonic()
    code = started(folder).wait()
    took_s = time.monotonic() - began_s
    if code:
        raise SystemExit(f"an undisturbed sweep ended with {code}; its files are in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    return took_s


def made_folder() -> Path:
    # A short name: Ray makes its sockets far below.
    folder = Path(tempfile.mkdtemp(prefix="ft"))
    for name in ("home", "t"):
        (folder / name).mkdir()
    (folder / "job.yaml").write_text(JOB)
    return folder


def started(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start the sweep; what it says on stderr goes to a file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "t"), "PYTHONPATH": str(REPOSITORY)}
    where = ["--address", "local", "--device", "cpu", "-o", "r"]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "raybench", "sweep", "job.yaml", *where, *more],
            cwd=folder,
            env={**kept, **own, "RAYBENCH_LOCK_DIR": str(folder / "locks")},
            stdout=subprocess.DEVNULL,
            stderr=said,
        )


def family(folder: Path, seen: set[psutil.Process]) -> set[psutil.Process]:
    """Find all living processes of the sweep in this folder, whoever adopted them.

    They have the folder in their command line, or in their HOME until they write their title over
    it, or are children of these. seen: those that were found before; more are added.
    """
    home = str(folder / "home")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            named = str(folder) in " ".join(process.cmdline())
            if named or process in seen or process.environ().get("HOME") == home:
                seen |= {process, *process.children(recursive=True)}
    living = set()
    for process in seen:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.add(process)
    return living


def is_kind(process: psutil.Process, kind: str) -> bool:
    with suppress(psutil.Error):
        beginning = " ".join(process.cmdline()[:4])
        return any(part in beginning for part in KINDS[kind])
    return False


def harm(trial: Trial, chance: random.Random, folder: Path, seen: set[psutil.Process]) -> None:
    """Start the sweep, send the signal to a victim as soon as there is one, wait for the end."""
    begun_s = time.monotonic()
    process = started(folder)
    while process.poll() is None and time.monotonic() < begun_s + trial.wait_s:
        family(folder, seen)
        time.sleep(0.05)
    while process.poll() is None and trial.struck_s is None:
        victims = [psutil.Process(process.pid)]
        if trial.victim != "driver":
            victims = [p for p in family(folder, seen) if is_kind(p, trial.victim)]
        if victims:
            victim = chance.choice(victims)
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.Signals[trial.signal])
                trial.struck_s = round(time.monotonic() - begun_s, 2)
                if trial.signal == "SIGSTOP":
                    time.sleep(STOPPED_S)
                    victim.resume()
        time.sleep(0.05)
    family(folder, seen)
    trial.code = waited(trial, process)
    if trial.struck_s is not None:
        trial.ended_s = round(time.monotonic() - begun_s - trial.struck_s, 1)


def waited(trial: Trial, process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        trial.findings.append(f"the driver had not ended after {LIMIT_S:g} s")
        process.kill()
        return process.wait()


def check_traces(trial: Trial, folder: Path, seen: set[psutil.Process]) -> None:
    """Check that nothing of the sweep lives or lies around, and that it said no traceback."""
    until_s = time.monotonic() + GONE_S
    while (left := family(folder, seen)) and time.monotonic() < until_s:
        time.sleep(0.2)
    if left:
        trial.findings.append(f"alive after {GONE_S:g} s: {left}")
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    said = (folder / "said").read_text(errors="replace")
    trial.said += said
    if "Traceback (most recent call last)" in said:
        trial.findings.append("traceback")
    # A private Ray that failed leaves its logs, and tells where; torch what it compiled.
    found = [*(folder / "home" / ".ray").glob("*"), *(folder / "t").iterdir()]
    lying = [
        p for p in found if p.name not in trial.said and not p.name.startswith("torchinductor")
    ]
    if lying:
        trial.findings.append(f"left behind: {lying}")


def check_end(trial: Trial, before: pd.DataFrame) -> None:
    """Check that the exit code says what has happened, in time, and stderr what to type then."""
    hit = trial.victim if trial.struck_s is not None else ""
    last = before.sort_values("attempt").drop_duplicates("point_id", keep="last")
    is_whole = len(ok(before)) == POINTS
    told = "--resume " in trial.said or "type the same command again" in trial.said
    may = {
        0: is_whole,
        1: bool((last["status"] != "ok").any()),
        3: hit not in ("", "driver", "watcher") and trial.ended_s <= SHOWN_S and (is_whole or told),
        130: hit == "driver" and trial.signal in ("SIGINT", "SIGTERM"),
        -signal.Signals[trial.signal]: hit == "driver",
    }
    if not may.get(trial.code):
        trial.findings.append(f"exit {trial.code} after {trial.ended_s:g} s, {len(ok(before))} ok")


def check_whole(trial: Trial, folder: Path, before: pd.DataFrame) -> None:
    """Check the rows of the resumed run."""
    for path in folder.glob("r/*/*/[!.]*.parquet"):
        pd.read_parquet(path)
    after = rows(folder)
    if after.duplicated(["point_id", "attempt"]).any():
        trial.findings.append("an attempt has two rows")
    counts = after[after["status"] == "ok"]["point_id"].value_counts()
    if len(counts) != POINTS or (counts != 1).any():
        trial.findings.append(f"ok points and their rows: {counts.to_dict()}")
    were, are = (frame["point_id"].value_counts() for frame in (before, after))
    if again := sorted(point for point in ok(before) if were[point] != are.get(point, 0)):
        trial.findings.append(f"ok points that ran again: {again}")


def rows(folder: Path) -> pd.DataFrame:
    columns = ["point_id", "attempt", "status"]
    paths = sorted(folder.glob("r/points/*/[!.]*.parquet"))
    read = [pd.read_parquet(path, columns=columns) for path in paths]
    return pd.concat(read) if read else pd.DataFrame({name: [] for name in columns})


def ok(frame: pd.DataFrame) -> set[str]:
    return set(frame[frame["status"] == "ok"]["point_id"])


if __name__ == "__main__":
    main()
