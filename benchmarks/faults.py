"""What each fault costs a sweep: the row it leaves, and the time to the next point.

    python -m benchmarks.faults [--device cpu|cuda] [--world-size 3]
        [--only processes imports scripts nodes driver] [--faults kill exit ...] [--shared]
        [-o FILE.json] [--markdown FILE.md]

Every fault is a real one, through a real `raybench sweep`: a point that works, the faulty point, a
point that works. The workload writes down when it strikes. "Next point" is from there to the start
of the next attempt, "next step" to the end of its first step on the last rank; where the deadline
of the point (measure.timeout_s) ends it, both are from that deadline. "Kept" are the processes of
the other ranks that went on with the next attempt. The files are written anew while a sweep runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import cluster_faults, driver_faults
from tests.integration.fault_cases import (
    CASES,
    CUDA_CASES,
    IMPORT_ERROR,
    IMPORT_HANG,
    Case,
    between_good_points,
    possible,
)
from tests.integration.fault_runs import (
    Outcome,
    marks,
    outcomes,
    rank_right,
    rows,
    start_sweep,
    sweep_command,
    title_of,
    write_failing_import,
    write_job,
)
from tests.integration.fault_workloads import CGROUP_PREFIX, memory_cgroups

TIMEOUT_S = 10.0
# With GPUs each node has two processes ready, and new ones 10 s later; without there are none.
_REST_S = {"cpu": 0.0, "cuda": 8.0}
_MESSAGE_CHARACTERS = 90
# Of a script, whose start is longer.
SCRIPT_TIMEOUT_S = 12.0
# How often the rows of a sweep that runs are read.
_LOOK_S = 5.0
_PARTS = ("processes", "imports", "scripts", "nodes", "driver")
Found = list[dict[str, Any]]
# What a script can do to itself; the rest is the workload's, or the same to its process.
_OF_SCRIPTS = ("raise", "oom", "exit", "sys_exit", "kill", "segfault", "stop", "loop", "sleep")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--world-size", type=int, default=3)
    options.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS)
    names = sorted({case.fault for case in (*CASES, *CUDA_CASES)})
    options.add_argument("--faults", nargs="+", choices=names, help="of `processes` and `scripts`")
    options.add_argument("--shared", action="store_true", help="beside other sweeps")
    options.add_argument("-o", "--output", type=Path)
    options.add_argument("--markdown", type=Path)
    chosen = options.parse_args()
    sweep_options = ["--device", chosen.device, *(["--shared"] if chosen.shared else [])]
    parts = {
        "processes": lambda: processes(
            chosen.device, chosen.world_size, chosen.faults, sweep_options
        ),
        "imports": lambda: imports(chosen.world_size, sweep_options),
        "scripts": lambda: scripts(chosen.device, chosen.world_size, chosen.faults, sweep_options),
        "nodes": lambda: [cluster_faults.measured()],
        "driver": lambda: [driver_faults.measured()],
    }
    found: Found = []
    for name in chosen.only:
        part: Found = []
        for part in parts[name]():
            keep(chosen, found + part)
        found += part
    print(table(found), flush=True)


def keep(chosen: argparse.Namespace, found: Found) -> None:
    """Write what is known so far."""
    text = json.dumps({"machine": machine(chosen.device), "faults": found}, indent=2)
    if chosen.output:
        chosen.output.write_text(text + "\n")
    if chosen.markdown:
        chosen.markdown.write_text(table(found))


def machine(device: str) -> dict[str, object]:
    import ray
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else platform.machine()
    return {
        "device": f"{torch.cuda.device_count()} x {name}" if device == "cuda" else f"CPU, {name}",
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
    }


def processes(
    device: str, world_size: int, names: list[str] | None, options: Sequence[str]
) -> Iterator[Found]:
    """All faults of ranks in one sweep, or those named."""
    cases = [case for case in possible(device) if not names or case.fault in names]
    numbered = {2 * place + 1: case for place, case in enumerate(cases)}
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        points = between_good_points(cases)
        write_job(folder, points, world_size, timeout_s=TIMEOUT_S, rest_s=_REST_S[device])
        for _ in sweep(folder, options):
            yield told(folder, numbered)
        remove_cgroups()


def scripts(
    device: str, world_size: int, names: list[str] | None, options: Sequence[str]
) -> Iterator[Found]:
    """Faults of the ranks of a script, one point after the other, and a good one at the end."""
    cases = [
        as_of_script(case) for case in possible(device) if case.fault in (names or _OF_SCRIPTS)
    ]
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        points = [*((case.fault, case.rank) for case in cases), ("none", 0)]
        write_job(folder, points, world_size, kind="script", timeout_s=SCRIPT_TIMEOUT_S)
        for _ in sweep(folder, options):
            yield told(folder, dict(enumerate(cases)), SCRIPT_TIMEOUT_S, worker="ppid")


def as_of_script(case: Case) -> Case:
    """Of a script the worker sees an exit code, where a workload takes its worker along."""
    return replace(case, wanted=frozenset({"error"})) if case.fault == "exit" else case


def imports(world_size: int, options: Sequence[str]) -> Iterator[Found]:
    """Let imports fail once, so that the next point of the same sweep can show what is left."""
    found: Found = []
    for case in (IMPORT_ERROR, IMPORT_HANG):
        with tempfile.TemporaryDirectory(prefix="faults") as name:
            folder = Path(name)
            kind = write_failing_import(folder, case)
            points = [("none", 0), ("none", 0)]
            write_job(folder, points, world_size, kind=kind, timeout_s=TIMEOUT_S)
            for _ in sweep(folder, options):
                yield found + told(folder, {0: case})
            found += told(folder, {0: case})


def sweep(folder: Path, options: Sequence[str]) -> Iterator[None]:
    """Run the sweep; pauses now and then while it has rows, and once at its end."""
    process = start_sweep(sweep_command(folder, *options), folder)
    while True:
        try:
            _, said = process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if any((folder / "results" / "points").rglob("*.parquet")):
                yield
            continue
        break
    print(said, flush=True)
    if process.returncode != 1:
        print(f"THE SWEEP ENDED WITH {process.returncode}, NOT 1", flush=True)
    yield


def told(
    folder: Path, cases: dict[int, Case], timeout_s: float = TIMEOUT_S, worker: str = "pid"
) -> Found:
    """One entry per faulty point so far: its first attempt, and the worst time of all attempts."""
    written = rows(folder)
    good = [row for row in written if row["number"] not in cases]
    wrong = sum(row["status"] != "ok" for row in good)
    pids = {pid for each in marks(folder) for pid in (each["pid"], each.get("child", 0)) if pid}
    left = {pid: title for pid in pids if (title := title_of(pid)) and is_ours(title)}
    found = []
    ended = outcomes(folder, cases, timeout_s, worker=worker)
    for number, case in cases.items():
        attempts = [each for each in ended if each.number == number]
        if attempts:
            found.append(entry(case, attempts) | {"other_points_wrong": wrong, "left": left})
    return found


def is_ours(title: str) -> bool:
    return title.startswith(("ray::", "sleep 3602"))


def entry(case: Case, attempts: Sequence[Outcome]) -> dict[str, Any]:
    first = attempts[0]
    next_row_s = max((each.next_row_s for each in attempts if each.next_row_s), default=None)
    right = all(each.status in case.wanted for each in attempts)
    in_time = next_row_s is not None and next_row_s <= case.limit_s
    return {
        "fault": case.what,
        "statuses": [each.status for each in attempts],
        "error_type": first.error_type,
        "message": first.message,
        "rank_right": rank_right(case, first),
        "from": "deadline" if first.after_deadline else "fault",
        "next_row_s": [each.next_row_s for each in attempts],
        "next_step_s": [each.next_step_s for each in attempts],
        "limit_s": case.limit_s,
        "kept": [each.kept for each in attempts],
        "as_wanted": right and in_time,
    }


def remove_cgroups() -> None:
    if found := memory_cgroups():
        for group in found[0].glob(f"{CGROUP_PREFIX}*"):
            group.rmdir()


def table(found: Sequence[dict[str, Any]]) -> str:
    head = "| fault | status | error_type | message | rank named | next point s | next step s | "
    lines = [f"{head}limit s | kept | as wanted |", "|" + "---|" * 10]
    for each in found:
        cells = [
            each["fault"],
            ", ".join(each["statuses"]),
            each.get("error_type") or "",
            shortened(each.get("message") or ""),
            {True: "yes", False: "NO", None: ""}[each.get("rank_right")],
            time_to_next(each),
            seconds(each.get("next_step_s", [])),
            f"{each['limit_s']:g}" if each.get("limit_s") else "",
            ", ".join(f"{kept[0]}/{kept[1]}" for kept in each.get("kept", []) if kept),
            "yes" if each["as_wanted"] else "NO",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n\\* from the deadline of the point\n"


def time_to_next(each: dict[str, Any]) -> str:
    if "end_s" in each:
        return f"ended {each['end_s']:.1f}, gone {seconds([each['gone_s']])}"
    return seconds(each["next_row_s"]) + ("*" if each["from"] == "deadline" else "")


def shortened(message: str) -> str:
    line = message.replace("|", "/").splitlines()[0] if message else ""
    return line if len(line) <= _MESSAGE_CHARACTERS else f"{line[:_MESSAGE_CHARACTERS]}…"


def seconds(values: Sequence[float | None]) -> str:
    return ", ".join("-" if value is None else f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main()
