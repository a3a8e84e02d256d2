"""The benchmark of scripts beside bare torchrun, whose starts step in turns, on CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.fault_runs import REPOSITORY

pytestmark = pytest.mark.long


def test_starts_of_both_sides_are_timed_and_compared(tmp_path: Path) -> None:
    output = tmp_path / "parity.json"
    asked = ["--starts", "2", "--at-once", "1", "--only", "python_bound", "-o"]
    program = [sys.executable, "-m", "benchmarks.script_parity", *asked, str(output)]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))["python_bound"]
    counts = {side: len(times) for side, times in found["step_ms"].items()}
    assert counts == {"torchrun": 2, "raybench": 2, "torchrun_alone": 1}
    assert min(min(times) for times in found["step_ms"].values()) > 0
    interval = found["ratio"]["interval"]
    assert interval["low"] < found["ratio"]["value"] < interval["high"]
