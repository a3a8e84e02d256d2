"""What a shell offers after Tab, asked the way that click's scripts for the shells ask."""

import os

import pytest
from builders import START, make_point, make_record, write_run
from commands import run_python

from raybench.cli import COMMANDS
from raybench.job.registry import BUILTIN
from raybench.results.reader import LATEST
from raybench.results.writer import compact_run

RUNS = ["gemm-3", "mlp-2", "mlp-1"]
POINTS = [make_point(world_size=world_size) for world_size in (2, 1)]
IDS = [point.point_id for point in POINTS]


@pytest.fixture
def results(tmp_path):
    for age, run_id in enumerate(RUNS):
        write_run(tmp_path / "results", run_id, map(make_record, POINTS))
        when = START.timestamp() - 60 * age
        os.utime(tmp_path / "results" / "runs" / run_id, (when, when))
    return tmp_path / "results"


@pytest.fixture
def offered(results, command, monkeypatch):
    """What bash is told for a line whose last word is being written, beside the results."""
    monkeypatch.chdir(results.parent)
    # As click calls `pytest` and `python -m pytest`.
    for program in ("RAYBENCH", "PYTHON__M_PYTEST"):
        monkeypatch.setenv(f"_{program}_COMPLETE", "bash_complete")

    def told(line):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        done = command(results=None)
        assert done.err == ""
        return [told.partition(",")[2] for told in done.out.split()]

    return told


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", [*COMMANDS]),
        ("sh", [name for name in COMMANDS if name[:2] == "sh"]),
        # Runs, the newest first.
        ("report ", [LATEST, *RUNS]),
        ("show mlp", RUNS[1:]),
        ("export ", [LATEST, *RUNS]),
        ("sweep j --resume mlp", RUNS[1:]),
        ("report --results results m", RUNS[1:]),
        ("sweep j -o results --resume m", RUNS[1:]),
        # The shell completes paths by itself.
        ("report results/runs/", ["results/runs/"]),
        # Points, in the order of the plan.
        ("show mlp-1 ", IDS),
        ("show gemm ", IDS),
        (f"show latest {IDS[1][:4]}", IDS[1:]),
        (f"history --point {IDS[1][:5]}", IDS[1:]),
        ("show mlp ", []),
        ("show mlp-1/.. ", []),
        ("show --results nowhere ", [LATEST]),
        ("workloads ", [*BUILTIN]),
        ("swep ", [*COMMANDS]),
    ],
)
def test_what_a_word_can_become_is_offered(offered, line, wanted):
    assert offered(f"raybench {line}") == wanted


def test_nested_runs_are_offered_with_their_folder(results, offered):
    results.rename(results.parent / "examples")
    (results / "runs").mkdir(parents=True)
    (results / "circle").symlink_to(results / "circle")  # cannot be listed, and is left out
    (results.parent / "examples").rename(results / "examples")
    inside = [f"examples/{run_id}" for run_id in RUNS]
    assert offered("raybench report ") == [LATEST, *inside]
    assert offered("raybench report examples/m") == inside[1:]
    assert offered("raybench show examples/gemm ") == IDS


def test_points_of_a_compacted_run_are_offered(results, offered):
    compact_run(results, "mlp-1")
    assert len(list((results / "points" / "mlp-1").iterdir())) == 1
    assert offered("raybench show mlp-1 ") == IDS


def test_latest_started_run_is_offered_first(results, offered):
    early, late = (f"x-2026110{day}-101010-abcd" for day in (1, 2))
    for run_id in (late, early):
        write_run(results, run_id, map(make_record, POINTS))
    assert offered("raybench report x") == [late, early]


def test_completing_imports_none_of_the_slow_libraries(results):
    code = (
        "import sys, runpy; sys.argv = ['raybench']\n"
        "try: runpy.run_module('raybench', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "slow = {'ray', 'torch', 'pandas', 'pyarrow', 'numpy', 'pydantic', 'rich'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    # Run as a module, click takes the program for `python -m raybench`.
    variables = {
        "_PYTHON__M_RAYBENCH_COMPLETE": "bash_complete",
        "_RAYBENCH_COMPLETE": "bash_complete",
        "COMP_WORDS": "raybench show mlp-1 ",
        "COMP_CWORD": "3",
    }
    done = run_python(code, cwd=results.parent, **variables)
    *told, imported = done.stdout.splitlines()
    assert len(told) == 2, done.stderr
    assert imported == "[]"
