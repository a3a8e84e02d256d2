"""Sweeps over points that hang, or that are healthy: the job, and what its rows and lines say.

    python -m tests.hang_runs cuda class 2 --repeats 2 --seconds 480 --out FOLDER
    python -m tests.hang_runs cpu script 4 --repeats 10 --out FOLDER
    python -m tests.hang_runs cuda class 2 --healthy 500 --seconds 480 --out FOLDER
    python -m tests.hang_runs cuda class 2 --measure 'timeout_s: 40' --out FOLDER

FOLDER gets the table, the printed lines, and the tables of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raybench
from tests.hang_workloads import HEALTHY, KINDS, ONLY_NCCL, process_file

REPOSITORY = Path(__file__).parents[1]
_SCRIPT = Path(__file__).with_name("hang_script.py")
_CLASS = "tests.hang_workloads:Hanging"
_AXES = ("way", "hanging_rank", "at_step", "number", "pause_s")
_MEASURE = "warmup: 20, iterations: 200, hang_s: 1, timeout_s: 60"
_MEASURE_HEALTHY = "warmup: 2, iterations: 8, timeout_s: 300"
_BLAME = "hangs    "
# A sweep that was interrupted twice ends within this time.
_END_S = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A point: the way to hang, and of which rank."""

    kind: str
    rank: int = 1
    # In each step; of an evaluation its length.
    pause_s: float = 0.0
    at_step: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a case."""

    case: Case
    row: dict[str, Any]
    # Host and process id of the rank that hangs, as it wrote them; empty if it did not.
    process: str

    @property
    def hang(self) -> dict[str, Any]:
        """The verdict of the row; empty without one."""
        return self.row["hang"] or {}

    @property
    def is_healthy(self) -> bool:
        """Whether no rank hangs in the case."""
        return self.case.kind not in KINDS

    @property
    def is_rank_right(self) -> bool:
        """Whether the row names the rank, its host and its process."""
        if self.is_healthy:
            return self.row["status"] == "ok" and not self.hang
        named = f"{self.hang.get('host')} {int(self.hang.get('pid') or 0)}"
        is_process_right = self.process in ("", named)
        ranks = {self.hang.get("rank"), self.row["error_rank"]}
        return ranks == {self.case.rank} and is_process_right

    @property
    def is_cause_right(self) -> bool:
        """Whether the row has the cause of the case."""
        return self.is_healthy or self.hang.get("cause") == KINDS[self.case.kind]

    def __str__(self) -> str:
        told = "right" if self.is_rank_right else "WRONG RANK"
        told += "" if self.is_cause_right else ", WRONG CAUSE"
        hang = {
            name: value for name, value in self.hang.items() if f"{value}" not in ("None", "nan")
        }
        took_s = self.row["duration_s"]
        return f"{self.case.kind:8} rank {self.case.rank}: {told}, {took_s:.1f} s, {hang}"


def write_job(
    folder: Path,
    cases: Sequence[Case],
    *,
    world_size: int,
    is_script: bool = False,
    measure: str = _MEASURE,
) -> None:
    """Write a job of one point for each case, in order."""
    axes = {
        "way": [case.kind for case in cases],
        "hanging_rank": [case.rank for case in cases],
        "at_step": [case.at_step for case in cases],
        "number": [_first_number() + index for index in range(len(cases))],
        "pause_s": [case.pause_s for case in cases],
    }
    if is_script:
        arguments = " ".join(f"--{name.replace('_', '-')} {{{name}}}" for name in _AXES)
        workload, matrix = f"{{kind: script, path: '{_SCRIPT}', args: '{arguments}'}}", "{}"
    else:
        workload, matrix = f"{{kind: '{_CLASS}'}}", "{batch_size: 1}"
    (folder / "job.yaml").write_text(
        f"version: 1\nname: hangs\nworkload: {workload}\nmatrix: {matrix}\n"
        f"zip: [{json.dumps({**axes, 'world_size': [world_size] * len(cases)})}]\n"
        f"measure: {{breakdown: false, {measure}}}\n"
        "placement: {oversubscribe: true}\n"
    )


def _first_number() -> int:
    """Return a number that other processes of the tests do not use."""
    return os.getpid() * 1000


def run(folder: Path, device: str, timeout_s: float) -> str:
    """Sweep the job of this folder; after `timeout_s` interrupt it. Return what it printed."""
    command = [sys.executable, "-m", "raybench", "sweep", str(folder / "job.yaml")]
    command += ["-o", str(folder / "results"), "--address", "local", "--device", device]
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    log = folder / "sweep.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**kept, "PYTHONPATH": os.pathsep.join(path)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # The second interrupt cancels the points in flight.
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                time.sleep(1.0)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        finally:
            process.kill()
            process.wait()
    return log.read_text()


def results(folder: Path, cases: Sequence[Case]) -> list[Result]:
    """Return what came of the cases that have ended, in their order."""
    rows: dict[int, dict[str, Any]] = {}
    for row in raybench.load(folder / "results", "points").to_dict("records"):
        named = {str(name): value for name, value in row.items()}
        if named["status"] not in ("cancelled", "skipped"):
            rows[int(named["params"]["number"])] = named
    found = []
    for number, case in enumerate(cases, _first_number()):
        file = process_file(number)
        process = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        if number in rows:
            found.append(Result(case=case, row=rows[number], process=process))
    return found


def hanging_cases(kinds: Sequence[str], repeats: int, world_size: int) -> list[Case]:
    """Return each kind of hang so many times, each time on another rank."""
    cases = []
    for repeat in range(repeats):
        for index, kind in enumerate(kinds):
            name, _, pause_s = kind.partition("=")
            rank = (index + repeat + 1) % world_size
            cases.append(Case(kind=name, rank=rank, pause_s=float(pause_s or 0)))
    return cases


def healthy_cases(count: int) -> list[Case]:
    """Return so many healthy points, of which three of each slow kind come first."""
    slow = [Case(kind=kind, pause_s=pause_s, at_step=6) for kind, pause_s in HEALTHY.items()] * 3
    return (slow + [Case(kind="none")] * count)[:count]


def table(found: Sequence[Result], printed: str) -> Iterator[str]:
    """Yield lines: for each kind how often rank and cause were right, and the waits."""
    yield f"{'kind':10} {'points':>6} {'rank':>5} {'cause':>5}  waited until the verdict, s"
    for kind in dict.fromkeys(result.case.kind for result in found):
        yield _line(kind, [result for result in found if result.case.kind == kind])
    yield _line("all", found)
    yield f"lines that say that a rank hangs: {printed.count(_BLAME)}"


def _line(name: str, found: Sequence[Result]) -> str:
    waits_s = [result.hang.get("waited_s") for result in found]
    known_s = [wait_s for wait_s in waits_s if wait_s is not None and wait_s == wait_s]
    waited = f"{min(known_s):.1f} to {max(known_s):.1f}" if known_s else "-"
    ranks = sum(result.is_rank_right for result in found)
    causes = sum(result.is_cause_right for result in found)
    return f"{name:10} {len(found):6} {ranks:5} {causes:5}  {waited}"


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser()
    options.add_argument("device", choices=("cuda", "cpu"))
    options.add_argument("form", choices=("class", "script"))
    options.add_argument("world_size", type=int)
    options.add_argument("--kinds", nargs="+", help="KIND or KIND=SECONDS")
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--healthy", type=int, default=0, help="so many healthy points instead")
    options.add_argument("--seconds", type=float, default=3600.0, help="interrupt the sweep then")
    options.add_argument("--measure", help="in place of the settings of the job's measure")
    options.add_argument("--out", type=Path, required=True)
    return options.parse_args()


def main() -> None:
    """Run the points that are asked for, and print what came of them."""
    given = _options()
    kinds = given.kinds or [
        kind for kind in KINDS if given.device == "cuda" or kind not in ONLY_NCCL
    ]
    cases = hanging_cases(kinds, given.repeats, given.world_size)
    measure = given.measure or _MEASURE
    if given.healthy:
        cases, measure = healthy_cases(given.healthy), given.measure or _MEASURE_HEALTHY
    began_s = time.monotonic()
    folder = given.out / f"{given.device}-{given.form}-{'healthy' if given.healthy else 'hangs'}"
    folder.mkdir(parents=True)
    is_script = given.form == "script"
    write_job(folder, cases, world_size=given.world_size, is_script=is_script, measure=measure)
    printed = run(folder, given.device, given.seconds)
    found = results(folder, cases)
    lines = list(table(found, printed))
    lines.append(f"{len(found)} of {len(cases)} points in {time.monotonic() - began_s:.0f} s")
    for result in found:
        if not (result.is_rank_right and result.is_cause_right):
            lines += ["", str(result), str(result.row["error_message"])]
            lines.append(str(result.row["error_detail"])[-3000:])
    text = "\n".join(lines)
    (folder / "table.txt").write_text(f"{text}\n")
    print(printed[-3000:], text, sep="\n")


if __name__ == "__main__":
    main()
