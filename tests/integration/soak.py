"""Many points with seeded faults in one sweep: is every row there, and does nothing leak?"""

import random
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.integration.fault_runs import marks, rows, start_sweep, write_job
from tests.integration.sweeps import count_rows, descendants, sweep_command, title_of

WORKERS, TIMEOUT_S, SETTLED_POINTS = 4, 5.0, 50
FAULTS = ("raise_init", "raise", "unpicklable", "oom", "exit", "kill", "segfault", "sleep", "stop")


def soaked(folder: Path, points: int, seed: int, isolation: str) -> dict[str, Any]:
    """Sweep points of 1 to 4 ranks, the last of every ten faulty; `checks` says what is right.

    Flat: the driver's median memory in the last fifth is within 10 % of that after 50 points.
    """
    chance = random.Random(seed)
    world_sizes = [chance.randint(1, WORKERS) for _ in range(points)]
    faults = [
        (chance.choice(FAULTS), chance.randrange(size)) if number % 10 == 9 else ("none", 0)
        for number, size in enumerate(world_sizes)
    ]
    more = f"placement: {{isolation: {isolation}, oversubscribe: true}}\n"
    write_job(folder, faults, world_sizes, timeout_s=TIMEOUT_S, more=more)
    started_s = time.monotonic()
    process = start_sweep(sweep_command(folder, "--device", "cpu"), folder)
    looks: list[dict[str, float]] = []
    looking = threading.Thread(target=look, args=(process, folder, looks))
    looking.start()
    _, said = process.communicate()
    looking.join()
    last = {row["number"]: row for row in rows(folder)}
    ok = {number for number, row in last.items() if row["status"] == "ok"}
    settled = [each for each in looks if each["rows"] >= SETTLED_POINTS] or looks
    late = settled[-max(1, len(settled) // 5) :]
    middle = {name: statistics.median(each[name] for each in late) for name in late[0]}
    titles = {title_of(each["pid"]) or "" for each in marks(folder)}
    return {
        "wall_s": round(time.monotonic() - started_s, 1),
        "ok": len(ok),
        "first_look": settled[0],
        "last_look": late[-1],
        "checks": {
            "a row for every point": len(last) == points,
            "exactly the good points are ok": ok
            == {number for number, (fault, _) in enumerate(faults) if fault == "none"},
            "driver memory flat within 10 %": abs(middle["mib"] / settled[0]["mib"] - 1) <= 0.10,
            "no open files more": middle["files"] - settled[0]["files"] <= 5,
            "no worker more": late[-1]["workers"] <= WORKERS,
            "no process left": not any(title.startswith("ray::") for title in titles),
            "no traceback": "Traceback" not in said,
        },
    }


def look(process: subprocess.Popen[str], folder: Path, looks: list[dict[str, float]]) -> None:
    """Look at the driver after every ten rows until it ends."""
    driver = psutil.Process(process.pid)
    while process.poll() is None:
        written = count_rows(folder)
        if written >= (looks[-1]["rows"] + 10 if looks else 1):
            try:
                looks.append(look_at(driver, written))
            except psutil.Error:
                return
        time.sleep(0.2)


def look_at(driver: psutil.Process, written: int) -> dict[str, float]:
    titles = descendants(driver.pid).values()
    return {
        "rows": written,
        "mib": driver.memory_info().rss / 2**20,
        "files": driver.num_fds(),
        "workers": sum(title.startswith("ray::_Worker") for title in titles),
    }
