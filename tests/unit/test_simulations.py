"""The simulations that the documents cite still run."""

import subprocess
import sys

import pytest
from commands import REPOSITORY


@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [
        ("stragglers", ("--points", "1", "--jobs", "1"), ("clean", "host", "device", "wrong")),
        ("references", ("--ranges", "5"), ("held", "half")),
    ],
)
def test_a_simulation_prints_its_table(name, options, columns):
    script = [sys.executable, "-m", f"benchmarks.simulations.{name}", *options]
    done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    head, *rows = done.stdout.splitlines()
    assert set(columns) <= set(head.split())
    assert len(rows) > 5
