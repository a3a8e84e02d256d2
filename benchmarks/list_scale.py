"""How `raybench list` and the completion of run ids grow with the runs in a results folder.

    python benchmarks/list_scale.py [--runs 10 100 1000] [-o FILE.json]

Seconds of a whole process, the median of `--times` calls. Each run has one point; every hundredth
was killed: `list` then looks at its points.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from builders import START, make_measure, make_record, make_run
from sizes import tell_sizes

from raybench.results.run import RunStatus
from raybench.results.writer import RunStore

PROGRAM = str(Path(sys.executable).parent / "raybench")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, nargs="+", default=[10, 100, 1000])
    options.add_argument("--times", type=int, default=5)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    sizes = [measured(count, chosen.times) for count in chosen.runs]
    tell_sizes(sizes, chosen.output)


def measured(runs: int, times: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), runs)
        words = f"raybench show --results {folder} "
        completing = {
            "_RAYBENCH_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": "4",
        }
        found = {
            "list_s": seconds(["list", "--results", folder], {}, times),
            "list_all_s": seconds(["list", "--all", "--results", folder], {}, times),
            "complete_run_s": seconds([], completing, times),
        }
    return {"runs": runs, **found}


def write(root: Path, runs: int) -> None:
    for number in range(runs):
        started_at = START + timedelta(minutes=number)
        status = RunStatus.RUNNING if number % 100 == 99 else RunStatus.OK
        run = make_run(
            f"ddp_scaling-{started_at:%Y%m%d-%H%M%S}-{number:04x}",
            started_at=started_at,
            finished_at=started_at + timedelta(seconds=50),
            status=status,
            host=os.uname().nodename,
        )
        store = RunStore.create(root, run, make_measure())
        store.write_records([(0, make_record())])
        if status is RunStatus.RUNNING:
            # Its driver is gone: nobody holds the lock.
            (root / "runs" / run.run_id / ".driver").touch()


def seconds(arguments: Sequence[str], variables: dict[str, str], times: int) -> float:
    taken = []
    for _ in range(times):
        started_s = time.perf_counter()
        done = subprocess.run(
            [PROGRAM, *arguments], env=os.environ | variables, capture_output=True, text=True
        )
        taken.append(time.perf_counter() - started_s)
        assert done.returncode == 0, done.stderr
        assert "ddp_scaling-" in done.stdout
    return statistics.median(taken)


if __name__ == "__main__":
    main()
