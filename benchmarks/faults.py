"""What each fault costs a sweep: the row it leaves, and the time to the next point.

    python -m benchmarks.faults [--device cpu|cuda] [--world-size 3] [-o FILE.json]
        [--only processes imports scripts soak] [--faults kill exit ...] [--points 500]

Every fault is a real one, through a real `raybench sweep`: a point that works, the faulty point, a
point that works. The workload writes down when it strikes. `next_row_s` is from there to the start
of the next attempt, `next_step_s` to the end of its first step on the last rank; where the deadline
of the point (measure.timeout_s) ends it, both are from that deadline. `kept` are the processes
of the other ranks that went on with the next attempt. `soak` has --points points of 1 to 4 ranks in
one sweep, the last of every ten with a random fault.

Faults of nodes, of Ray, of the driver and of the disk are tests: `make long`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.common import options, write_result
from tests.integration.fault_marks import CGROUP_PREFIX, memory_cgroups
from tests.integration.fault_runs import (
    CASES,
    CUDA_CASES,
    IMPORT_ERROR,
    IMPORT_HANG,
    Case,
    Outcome,
    between_good_points,
    outcomes,
    possible,
    rank_right,
    rows,
    start_sweep,
    write_failing_import,
    write_job,
)
from tests.integration.soak import soaked
from tests.integration.sweeps import sweep_command

TIMEOUT_S = 10.0
# Of a script, whose start is longer.
SCRIPT_TIMEOUT_S = 12.0
# With GPUs each node has two processes ready, and new ones 10 s later; without there are none.
REST_S = {"cpu": 0.0, "cuda": 8.0}
PARTS = ("processes", "imports", "scripts", "soak")
# What a script can do to itself; the rest is the workload's, or the same to its process.
OF_SCRIPTS = ("raise", "oom", "exit", "sys_exit", "kill", "segfault", "stop", "loop", "sleep")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS[:3])
    names = sorted({case.fault for case in (*CASES, *CUDA_CASES)})
    parser.add_argument("--faults", nargs="+", choices=names, help="of `processes` and `scripts`")
    parser.add_argument("--points", type=int, default=500, help="of `soak`")
    chosen = parser.parse_args()
    found: list[dict[str, Any]] = []
    parts = {"processes": processes, "imports": imports, "scripts": scripts}
    for name in chosen.only:
        with tempfile.TemporaryDirectory(prefix="faults") as folder:
            if name == "soak":
                found.append(soaked(Path(folder), chosen.points, 0, "cluster"))
                print(found[-1])
                continue
            part = list(parts[name](chosen, Path(folder)))
            print(pd.DataFrame(part).drop(columns="message").to_string(), flush=True)
            found += part
    if chosen.output:
        write_result({"faults": found}, chosen.output)


def processes(chosen: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """All faults of ranks in one sweep, or those named."""
    cases = [
        case for case in possible(chosen.device) if case.fault in (chosen.faults or case.fault)
    ]
    rest_s = REST_S[chosen.device]
    write_job(
        folder, between_good_points(cases), chosen.world_size, timeout_s=TIMEOUT_S, rest_s=rest_s
    )
    yield from swept(chosen, folder, {2 * place + 1: case for place, case in enumerate(cases)})
    if groups := memory_cgroups():
        for group in groups[0].glob(f"{CGROUP_PREFIX}*"):
            group.rmdir()


def imports(chosen: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """Let imports fail once, so that the next point of the same sweep can show what is left."""
    for name, case in (("error", IMPORT_ERROR), ("hang", IMPORT_HANG)):
        own = folder / name
        own.mkdir()
        kind = write_failing_import(own, case)
        write_job(own, [("none", 0)] * 2, chosen.world_size, kind=kind, timeout_s=TIMEOUT_S)
        yield from swept(chosen, own, {0: case})


def scripts(chosen: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """Faults of the ranks of a script, one point after the other, and a good one at the end."""
    wanted = chosen.faults or OF_SCRIPTS
    cases = [
        # Of a script the worker sees an exit code, where a workload takes its worker along.
        replace(case, wanted=frozenset({"error"})) if case.fault == "exit" else case
        for case in possible(chosen.device)
        if case.fault in wanted
    ]
    points = [*((case.fault, case.rank) for case in cases), ("none", 0)]
    write_job(folder, points, chosen.world_size, kind="script", timeout_s=SCRIPT_TIMEOUT_S)
    numbered = dict(enumerate(cases))
    yield from swept(chosen, folder, numbered, timeout_s=SCRIPT_TIMEOUT_S, worker="ppid")


def swept(
    chosen: Any,
    folder: Path,
    cases: Mapping[int, Case],
    *,
    timeout_s: float = TIMEOUT_S,
    worker: str = "pid",
) -> Iterator[dict[str, Any]]:
    """Sweep; what became of each fault. cases: by the numbers of their points."""
    process = start_sweep(sweep_command(folder, "--device", chosen.device), folder)
    _, said = process.communicate()
    if process.returncode not in (0, 1):
        raise SystemExit(said)
    good = [row for row in rows(folder) if row["number"] not in cases]
    if wrong := [row["number"] for row in good if row["status"] != "ok"]:
        print(f"OTHER POINTS THAT ARE NOT OK: {wrong}", flush=True)
    ended = outcomes(folder, cases, timeout_s, worker=worker)
    for number, case in cases.items():
        yield entry(case, [each for each in ended if each.number == number])


def entry(case: Case, attempts: Sequence[Outcome]) -> dict[str, Any]:
    first = attempts[0]
    next_row_s = [rounded(each.next_row_s) for each in attempts]
    in_time = all(each is not None and each <= case.limit_s for each in next_row_s)
    return {
        "fault": case.what,
        "statuses": [each.status for each in attempts],
        "error_type": first.error_type,
        "message": first.message,
        "rank_right": rank_right(case, first),
        "from": "deadline" if first.after_deadline else "fault",
        "next_row_s": next_row_s,
        "next_step_s": [rounded(each.next_step_s) for each in attempts],
        "limit_s": case.limit_s,
        "kept": [each.kept for each in attempts],
        "as_wanted": in_time and {each.status for each in attempts} <= case.wanted,
    }


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


if __name__ == "__main__":
    main()
