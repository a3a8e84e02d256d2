"""Sweeps over faults: what ranks are made to have, the job, and what rows and marks say of it."""

import json
import math
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import raybench
from tests.integration.fault_marks import memory_cgroups

REPOSITORY = Path(__file__).parents[2]
FAULTY_SCRIPT = Path(__file__).with_name("fault_script.py")
FAULTY = "tests.integration.fault_workloads:Faulty"
_STEPS = 6
# Of the script; each is an axis.
_ARGUMENTS = ("number", "fault", "faulty-rank")


# All ranks wait in a communication: no row can tell whose is the wrong one.
NOBODYS_FAULT = ("mismatch", "skip")
_ANSWERED_S, _KILLED_S, _HUNG_S = 2.0, 6.0, 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """A fault of one rank, or of all (-1), and what is asked of it.

    wanted: the statuses that are right. limit_s: from the fault to the next point, or from the
    deadline of the point where that is what ends it.
    """

    fault: str
    what: str
    wanted: frozenset[str]
    limit_s: float
    rank: int = 1


def _case(fault: str, what: str, wanted: str, limit_s: float, rank: int = 1) -> Case:
    return Case(fault, what, frozenset(wanted.split()), limit_s, rank)


CASES = (
    _case("raise_init", "exception in __init__", "error", _ANSWERED_S),
    _case("raise", "exception in step", "error", _ANSWERED_S),
    _case("unpicklable", "exception that cannot be pickled", "error", _ANSWERED_S),
    _case("oom", "out of device memory, one rank", "oom", _ANSWERED_S),
    _case("oom", "out of device memory, all ranks", "oom", _ANSWERED_S, rank=-1),
    _case("host_memory", "out of host memory (killed by the kernel)", "lost oom", _KILLED_S),
    _case("exit_init", "os._exit in __init__", "lost", _KILLED_S),
    _case("exit", "os._exit in step", "lost", _KILLED_S),
    _case("sys_exit", "sys.exit in step", "lost error", _KILLED_S),
    _case("kill", "SIGKILL of one rank", "lost", _KILLED_S),
    _case("kill", "SIGKILL of all ranks", "lost", _KILLED_S, rank=-1),
    _case("segfault", "segmentation fault", "lost", _KILLED_S),
    _case("child_kill", "SIGKILL of a rank that has a child", "lost", _KILLED_S),
    _case("child", "child process left behind", "ok", _KILLED_S),
    _case("stop", "SIGSTOP of one rank", "timeout", _HUNG_S),
    _case("loop", "endless Python loop", "timeout", _HUNG_S),
    _case("hold_gil", "endless C code that holds the GIL", "timeout", _HUNG_S),
    _case("sleep", "endless wait, all ranks", "timeout", _HUNG_S, rank=-1),
    _case("hang_init", "hang in __init__", "timeout", _HUNG_S),
    _case("mismatch", "one rank receives what nobody sends", "timeout", _HUNG_S),
    # gloo ends a process that gets another collective than its own; NCCL hangs.
    _case("skip", "one rank skips a collective", "timeout error lost", _KILLED_S),
)
IMPORT_ERROR = _case("import", "one rank cannot import the workload", "error", _ANSWERED_S)
IMPORT_HANG = _case("import", "one rank never joins: it hangs in the import", "timeout", _HUNG_S)
CUDA_CASES = (
    _case("device_error", "index error on the device", "error", _KILLED_S),
    _case("device_hang", "endless kernel", "timeout", _HUNG_S),
)


def possible(device: str) -> list[Case]:
    """Those that can be made real on this machine."""
    cases = [*CASES, *(CUDA_CASES if device == "cuda" else ())]
    return [case for case in cases if case.fault != "host_memory" or memory_cgroups()]


def between_good_points(cases: Sequence[Case]) -> list[tuple[str, int]]:
    """Faults for `write_job`: a good point, a case, a good point, and so on."""
    faults = [("none", 0)]
    for case in cases:
        faults += [(case.fault, case.rank), ("none", 0)]
    return faults


def write_job(
    folder: Path,
    faults: Sequence[tuple[str, int]],
    world_sizes: Sequence[int] | int = 3,
    *,
    kind: str = FAULTY,
    timeout_s: float = 10.0,
    rest_s: float = 0.0,
    more: str = "placement: {oversubscribe: true}\n",
) -> Path:
    """A job of one point for each fault and rank; `number` is the point's place in it.

    rest_s: the least that a good point takes.
    """
    if isinstance(world_sizes, int):
        world_sizes = [world_sizes] * len(faults)
    axis: dict[str, list[Any]] = {
        "number": list(range(len(faults))),
        "world_size": list(world_sizes),
        "fault": [fault for fault, _ in faults],
        "faulty_rank": [rank for _, rank in faults],
    }
    batches = "{batch_size: 1}"
    if kind == "script":
        arguments = " ".join(f"--{name} {{{name.replace('-', '_')}}}" for name in _ARGUMENTS)
        own = f"path: '{FAULTY_SCRIPT}', args: '--folder {folder} {arguments}'"
        batches = "{}"
    else:
        own = f"folder: '{folder}'"
        axis["pause_s"] = [0.0 if fault != "none" else rest_s / _STEPS for fault, _ in faults]
    job = folder / "job.yaml"
    job.write_text(
        "version: 1\nname: faults\n"
        f"workload: {{kind: '{kind}', {own}}}\n"
        f"matrix: {batches}\nzip: [{json.dumps(axis)}]\n"
        f"measure: {{warmup: 2, iterations: {_STEPS - 2}, max_seconds: {5.0 + rest_s}, "
        f"timeout_s: {timeout_s}, breakdown: false}}\n{more}"
    )
    return job


_FAILS_ONCE = """\
import os
import time
from pathlib import Path

from tests.integration.fault_marks import mark
from tests.integration.fault_workloads import Faulty

struck = Path({folder!r}, "struck")
if os.environ.get("RANK") == "1" and not struck.exists():
    struck.touch()
    mark({folder!r}, "fault", number=0, rank=1)
    {fault}
"""


def write_failing_import(folder: Path, case: Case) -> str:
    """A module that fails where rank 1 imports it for the first time; the workload's kind."""
    fault = "time.sleep(3600)" if case is IMPORT_HANG else "import no_such_package"
    (folder / "at_import.py").write_text(_FAILS_ONCE.format(folder=str(folder), fault=fault))
    return "at_import:Faulty"


def environment(folder: Path) -> dict[str, str]:
    """Workers find the tests' workloads from the repository, and generated ones in the folder."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = [str(folder), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def start_sweep(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def marks(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote down, oldest first; see `fault_marks.mark`."""
    path = folder / "marks.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((json.loads(line) for line in lines), key=lambda each: each["time_ns"])


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all attempts in the order of their starts; `number` is the job's."""
    found = raybench.load(folder / "results", "points").sort_values("started_at", kind="stable")
    keys = [str(name) for name in found.columns]
    told = [dict(zip(keys, row, strict=True)) for row in found.itertuples(index=False)]
    return [
        {key: None if is_null(value) else value for key, value in row.items()}
        | {"number": int(row["params"]["number"]), "start_ns": row["started_at"].value}
        for row in told
    ]


def is_null(value: object) -> bool:
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one attempt at a faulty point came to.

    next_row_s, next_step_s: from the fault, or from the deadline if that ended the attempt, to the
    start of the next attempt and to the end of its first step on the last rank.
    kept: how many other ranks' processes went on to the next attempt, as any rank, and of how many.
    """

    number: int
    attempt: int
    status: str
    error_type: str | None
    message: str | None
    error_rank: int | None
    after_deadline: bool
    next_row_s: float | None
    next_step_s: float | None
    kept: tuple[int, int] | None


def outcomes(
    folder: Path, cases: Mapping[int, Case], timeout_s: float, *, worker: str = "pid"
) -> list[Outcome]:
    """Of all attempts at the points with these numbers.

    worker: which process of a mark is the worker; of a script it is the parent.
    """
    told, written = rows(folder), marks(folder)
    ran = [row for row in told if row["status"] != "skipped"]
    nexts = dict(zip(map(_key, ran), [*ran[1:], None], strict=True))
    return [
        _outcome(row, nexts[_key(row)], cases[row["number"]], written, timeout_s, worker)
        for row in ran
        if row["number"] in cases
    ]


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["number"], row["attempt"]


def _outcome(row, later, case: Case, written, timeout_s: float, worker: str) -> Outcome:
    here = list(_of(row, written, later))
    there = list(_of(later, written, None)) if later else []
    struck_ns = min((each["time_ns"] for each in here if each["event"] == "fault"), default=None)
    after_deadline = row["status"] == "timeout"
    from_ns = row["start_ns"] + int(timeout_s * 1e9) if after_deadline else struck_ns
    steps_ns = [each["time_ns"] for each in there if each["event"] == "step"]
    by_rank = ({e["rank"]: e[worker] for e in s if e["event"] == "built"} for s in (here, there))
    first, second = by_rank
    others = [rank for rank in first if case.rank not in (rank, -1)]
    return Outcome(
        number=row["number"],
        attempt=row["attempt"],
        status=row["status"],
        error_type=row["error_type"],
        message=row["error_message"],
        error_rank=row.get("error_rank"),
        after_deadline=after_deadline,
        next_row_s=_seconds(from_ns, later["start_ns"] if later else None),
        next_step_s=_seconds(from_ns, max(steps_ns, default=None)),
        kept=(sum(first[r] in second.values() for r in others), len(others)) if later else None,
    )


def _of(row, written, later) -> Iterator[Mapping[str, Any]]:
    """The marks of one attempt: a second one begins where the next row does."""
    end_ns = later["start_ns"] if later and later["number"] == row["number"] else None
    for each in written:
        is_in_time = row["start_ns"] <= each["time_ns"] < (end_ns or math.inf)
        if each.get("number") == row["number"] and is_in_time:
            yield each


def _seconds(from_ns: int | None, to_ns: int | None) -> float | None:
    return None if from_ns is None or to_ns is None else (to_ns - from_ns) / 1e9


def rank_right(case: Case, outcome: Outcome) -> bool | None:
    """Whether the row names the faulty rank; None where there is none to name."""
    if outcome.status == "ok" or case.rank < 0 or case.fault in NOBODYS_FAULT:
        return None
    told = re.match(r"rank (\d+)", outcome.message or "")
    rank = outcome.error_rank if outcome.error_rank is not None else told and int(told[1])
    return bool(rank == case.rank)
