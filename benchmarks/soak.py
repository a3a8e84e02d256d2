"""Hundreds of points, a seeded fault in every tenth: is every row there, and does nothing leak?

    python -m benchmarks.soak [--points 500] [--seed 0] [--isolation cluster] [-o FILE.json]

One `raybench sweep` on four CPU workers, with points of 1, 2, 3 and 4 ranks. Of the driver its
resident memory and its open files are read after every ten points, and the processes below it. The
memory counts as flat when the median of its last fifth is within 10 % of that after 50 points.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.integration.fault_runs import (
    descendants,
    marks,
    rows,
    start_sweep,
    sweep_command,
    title_of,
    write_job,
)

WORKERS, TIMEOUT_S, SETTLED_POINTS = 4, 5.0, 50
FAULTS = ("raise_init", "raise", "unpicklable", "oom", "exit", "kill", "segfault", "sleep", "stop")
_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the driver uses once so many rows are written. below: processes under it, by title."""

    rows: int
    resident_mib: float
    open_files: int
    threads: int
    below: dict[str, int]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--points", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--isolation", choices=["cluster", "node", "device"], default="cluster")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak") as name:
        result = soaked(Path(name), chosen.points, chosen.seed, chosen.isolation)
    text = json.dumps(result, indent=2)
    print(text)
    if chosen.output:
        chosen.output.write_text(text + "\n")


def planned(points: int, seed: int) -> tuple[list[tuple[str, int]], list[int]]:
    """Faults with their ranks, and world sizes; the last of every ten points is faulty."""
    chance = random.Random(seed)
    world_sizes = [chance.randint(1, WORKERS) for _ in range(points)]
    faults = [
        (chance.choice(FAULTS), chance.randrange(world_sizes[number]))
        if number % 10 == 9
        else ("none", 0)
        for number in range(points)
    ]
    return faults, world_sizes


def soaked(folder: Path, points: int, seed: int, isolation: str = "cluster") -> dict[str, Any]:
    """Collect the figures of one soak; `as_wanted` says whether all of them are right."""
    faults, world_sizes = planned(points, seed)
    more = f"placement: {{isolation: {isolation}, oversubscribe: true}}\n"
    write_job(folder, faults, world_sizes, timeout_s=TIMEOUT_S, more=more)
    started_s = time.monotonic()
    process = start_sweep(sweep_command(folder, "--device", "cpu"), folder)
    looks: list[Look] = []
    looking = threading.Thread(target=look, args=(process, folder, looks))
    looking.start()
    _, said = process.communicate()
    looking.join()
    wall_s = time.monotonic() - started_s
    return {
        "points": points,
        "seed": seed,
        "isolation": isolation,
        "cores": os.cpu_count(),
        "exit_code": process.returncode,
        "wall_s": round(wall_s, 1),
    } | judged(folder, faults, looks, said)


def look(process: Any, folder: Path, looks: list[Look]) -> None:
    """Until the sweep ends, look at it after every ten rows."""
    while process.poll() is None:
        written = len(list((folder / "results").glob("points/*/[!.]*.parquet")))
        if written >= (looks[-1].rows + 10 if looks else 1):
            try:
                looks.append(look_at(process.pid, written))
            except (FileNotFoundError, ProcessLookupError):
                return
        time.sleep(0.2)


def look_at(process_id: int, written: int) -> Look:
    of = Path(f"/proc/{process_id}")
    pages = int((of / "statm").read_text().split()[1])
    below = descendants(process_id)
    return Look(
        rows=written,
        resident_mib=round(pages * os.sysconf("SC_PAGE_SIZE") / _MIB, 1),
        open_files=len(list((of / "fd").iterdir())),
        threads=len(list((of / "task").iterdir())),
        below=dict(Counter(title.split()[0].rsplit("/")[-1] for title in below.values())),
    )


def judged(
    folder: Path, faults: list[tuple[str, int]], looks: list[Look], said: str
) -> dict[str, Any]:
    written = rows(folder)
    last = {row["number"]: row for row in written}
    ok = {number for number, row in last.items() if row["status"] == "ok"}
    good = {number for number, (fault, _) in enumerate(faults) if fault == "none"}
    pids = {each["pid"] for each in marks(folder)}
    left = [t for pid in pids if (t := title_of(pid)) and t.startswith("ray::")]
    settled = [each for each in looks if each.rows >= SETTLED_POINTS] or looks
    late = settled[-max(1, len(settled) // 5) :]
    growth = statistics.median(each.resident_mib for each in late) / settled[0].resident_mib - 1
    files = statistics.median(each.open_files for each in late) - settled[0].open_files
    workers = sum(n for title, n in late[-1].below.items() if title.startswith("ray::_Worker"))
    checks = {
        "a row for every point": len(last) == len(faults),
        "exactly the good points are ok": ok == good,
        "driver memory flat within 10 %": abs(growth) <= 0.10,
        "no open files more": files <= 5,
        "no worker more": workers <= WORKERS,
        "no process left": not left,
        "no traceback": "Traceback" not in said,
    }
    return {
        "rows": len(written),
        "points_with_a_row": len(last),
        "points_ok": len(ok),
        "statuses": dict(Counter(row["status"] for row in written)),
        "wrong": sorted(good ^ ok),
        "resident_mib": [each.resident_mib for each in settled],
        "memory_growth": round(growth, 4),
        "open_files_growth": files,
        "processes_left": left,
        "first_look": asdict(settled[0]),
        "last_look": asdict(late[-1]),
        "checks": checks,
        "as_wanted": all(checks.values()),
    }


if __name__ == "__main__":
    main()
