"""The simulations that the documents cite still run."""

import importlib
import subprocess
import sys

import pytest
from commands import REPOSITORY

SCRIPTS = sorted((REPOSITORY / "benchmarks").rglob("[!_]*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_can_be_imported(path):
    module = path.relative_to(REPOSITORY).with_suffix("")
    importlib.import_module(".".join(module.parts))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [
        ("stragglers", ("--points", "1", "--jobs", "1"), ("clean", "host", "device", "wrong")),
        ("references", ("--ranges", "5"), ("held", "half")),
        ("gate", ("--only", "noisy", "--comparisons", "1"), ("noisy", "false")),
        ("ab", ("--jobs", "3"), ("scatter", "found")),
    ],
)
def test_a_simulation_prints_its_table(name, options, columns):
    script = [sys.executable, "-m", f"benchmarks.simulations.{name}", *options]
    done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    title_or_head, head, *rows = done.stdout.splitlines()
    assert set(columns) <= {*title_or_head.split(), *head.split()}
    assert len(rows) > 4
