"""Sweeps over points that hang: the job, and what its rows and lines say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raybench
from tests.hang_workloads import KINDS

REPOSITORY = Path(__file__).parents[1]
_SCRIPT = Path(__file__).with_name("hang_script.py")
_CLASS = "tests.hang_workloads:Hanging"
_AXES = ("way", "hanging_rank", "at_step", "number", "pause_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A point: the way to hang, and of which rank."""

    kind: str
    rank: int = 1
    # Of a step; of an evaluation its length.
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a case."""

    case: Case
    row: dict[str, Any]

    @property
    def hang(self) -> dict[str, Any]:
        return self.row["hang"] or {}

    @property
    def is_healthy(self) -> bool:
        return self.case.kind not in KINDS

    @property
    def is_rank_right(self) -> bool:
        if self.is_healthy:
            return self.row["status"] == "ok" and not self.hang
        return self.hang.get("rank") == self.case.rank and self.row["error_rank"] == self.case.rank

    @property
    def is_cause_right(self) -> bool:
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
    measure: str = "hang_s: 1, timeout_s: 60",
) -> None:
    """A job of one point for each case, in order."""
    axes = {
        "way": [case.kind for case in cases],
        "hanging_rank": [case.rank for case in cases],
        "at_step": [60] * len(cases),
        "number": list(range(len(cases))),
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
        f"measure: {{warmup: 20, iterations: 200, breakdown: false, {measure}}}\n"
        "placement: {oversubscribe: true}\n"
    )


def run(folder: Path, device: str, timeout_s: float) -> str:
    """Sweep the job of this folder; return what it printed."""
    command = [sys.executable, "-m", "raybench", "sweep", str(folder / "job.yaml")]
    command += ["-o", str(folder / "results"), "--address", "local", "--device", device]
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**kept, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.stdout + done.stderr


def results(folder: Path, cases: Sequence[Case]) -> list[Result]:
    """What came of the cases, in their order."""
    found = raybench.load(folder / "results", "points")
    rows = {}
    for row in found.to_dict("records"):
        rows[int(row["params"]["number"])] = row
    return [Result(case=case, row=rows[number]) for number, case in enumerate(cases)]


def main() -> None:
    """Run kinds that are named on the command line, and print what came of them."""
    from tempfile import TemporaryDirectory

    device, form, world_size, *kinds = sys.argv[1:]
    cases = []
    for kind in kinds or KINDS:
        name, _, pause_s = kind.partition("=")
        # Both ranks of the smallest point in turn.
        cases.append(Case(kind=name, rank=(len(cases) + 1) % 2, pause_s=float(pause_s or 0)))
    began_s = time.monotonic()
    with TemporaryDirectory() as folder:
        write_job(Path(folder), cases, world_size=int(world_size), is_script=form == "script")
        print(run(Path(folder), device, 600))
        for result in results(Path(folder), cases):
            print(result)
            if not (result.is_rank_right and result.is_cause_right):
                print(result.row["error_message"], result.row["error_detail"], sep="\n")
    print(f"{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
