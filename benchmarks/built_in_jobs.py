"""How long each built-in job takes on this machine, typed by name in an empty folder.

    python -m benchmarks.built_in_jobs [JOB ...] [-o FILE.json]

For each job `raybench init --template JOB` and `raybench sweep JOB.yaml` are typed. The table has
the seconds until the first line of progress, until the first point ended, and until the report,
beside the estimate that the sweep began with. A job that needs a GPU has its line instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import options, run_raybench, write_result
from raybench.cli.jobs import templates

_ESTIMATE = re.compile(r": about (?:(\d+) min ?)?(?:(\d+) s)?,")
_POINT_ENDED = re.compile(r"\[ *\d+/\d+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSweep:
    """A sweep as a user sees it: seconds since its start, and its last line on stderr."""

    exit_code: int
    first_line_s: float
    # None if the sweep printed no such line.
    estimate_line_s: float | None
    estimated_s: float | None
    first_point_s: float | None
    total_s: float
    first_line: str
    last_line: str


def time_sweep(folder: Path, job: str) -> TimedSweep:
    """Type `raybench init --template` and `raybench sweep` in an empty folder."""
    init = [sys.executable, "-m", "raybench", "init", "--template", job]
    subprocess.run(init, cwd=folder, check=True, capture_output=True)
    command = [sys.executable, "-m", "raybench", "sweep", f"{job}.yaml"]
    began_s = time.monotonic()
    with (
        (folder / "report.txt").open("w") as report,
        subprocess.Popen(
            command, cwd=folder, stdout=report, stderr=subprocess.PIPE, text=True, bufsize=1
        ) as process,
    ):
        assert process.stderr is not None
        lines = [(time.monotonic() - began_s, line.rstrip()) for line in process.stderr]
        exit_code = process.wait()
    estimate_line_s = estimated_s = first_point_s = None
    for seconds, line in lines:
        if first_point_s is None and _POINT_ENDED.match(line):
            first_point_s = seconds
        if estimated_s is None and (match := _ESTIMATE.search(line)):
            estimate_line_s = seconds
            estimated_s = 60.0 * int(match[1] or 0) + int(match[2] or 0)
    return TimedSweep(
        exit_code=exit_code,
        first_line_s=lines[0][0],
        estimate_line_s=estimate_line_s,
        estimated_s=estimated_s,
        first_point_s=first_point_s,
        total_s=time.monotonic() - began_s,
        first_line=lines[0][1],
        last_line=lines[-1][1],
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    chosen = parser.parse_args()
    timed = {}
    print(
        f"{'job':24}{'exit':>5}{'first line':>12}{'first point':>13}{'report':>8}{'estimate':>10}"
    )
    for job in chosen.jobs or templates():
        with tempfile.TemporaryDirectory() as folder:
            sweep = timed[job] = time_sweep(Path(folder), job)
        point, estimate = sweep.first_point_s, sweep.estimated_s
        print(
            f"{job:24}{sweep.exit_code:5}{sweep.first_line_s:10.1f} s"
            f"{'' if point is None else f'{point:.1f} s':>13}{sweep.total_s:6.1f} s"
            f"{'' if estimate is None else f'{estimate:.0f} s':>10}",
            flush=True,
        )
        if sweep.exit_code:
            print(f"    {sweep.last_line}", flush=True)
    if chosen.output:
        version = run_raybench("--version").strip()
        result = {"version": version, "jobs": {job: asdict(t) for job, t in timed.items()}}
        write_result(result, chosen.output)


if __name__ == "__main__":
    main()
