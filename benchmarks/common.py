"""What the benchmarks share: commands of raybench, facts of the machine, results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

import raybench

REPOSITORY = Path(__file__).parents[1]
_PACKAGES = ("torch", "ray", "pyarrow", "pandas", "numpy")


def options(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser that describes itself by the first line of `doc` and has `-o FILE.json`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json")
    return parser


def write_result(result: Mapping[str, Any], output: Path | None) -> None:
    """Write the result as JSON, with what made it; to stdout where `output` is None."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    made_by = {"command": " ".join(command), "commit": commit(), "machine": machine()}
    text = json.dumps({**made_by, **result}, indent=1)
    if output is None:
        print(text, flush=True)
    else:
        output.write_text(text + "\n", encoding="utf-8")


def machine() -> dict[str, object]:
    """Return processor, cores, versions and load, of which the benchmark itself is about 1."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores_used": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def commit() -> str:
    """Return the commit of this checkout; empty outside of git."""
    git = ["git", "rev-parse", "HEAD"]
    return subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


def run_raybench(*words: object, environment: Mapping[str, str] | None = None) -> str:
    """Run the command in a process of its own; its stdout. Raises SystemExit where it fails."""
    command = [sys.executable, "-m", "raybench", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def sweep(folder: Path, job: Mapping[str, Any], device: str, *words: object) -> pd.DataFrame:
    """Sweep the job on a private Ray; the rows of its points, in the order of their starts.

    The results lie in `folder`/results. Raises SystemExit where a point is not ok.
    """
    path = folder / "job.yaml"
    path.write_text(json.dumps({"version": 1, "name": "benchmark", **job}), encoding="utf-8")
    where = ("--address", "local", "--device", device)
    run_raybench("sweep", path, "-o", folder / "results", *where, *words)
    points: pd.DataFrame = raybench.load(folder / "results", "points").sort_values("started_at")
    failed = points[points["status"] != "ok"]
    if len(failed):
        raise SystemExit("\n".join(failed["error_message"]))
    return points
