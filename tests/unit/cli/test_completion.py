"""What a shell offers after Tab, asked the way that click's scripts for the shells ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builders import START, make_measure, make_point, make_record, make_run

from raybench.cli import COMMANDS
from raybench.job.registry import BUILTIN
from raybench.results.writer import LATEST, RunStore

PROGRAM = str(Path(sys.executable).parent / "raybench")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for age, run_id in enumerate(("gemm-3", "mlp-2", "mlp-1")):
        store = RunStore.create(tmp_path / "results", make_run(run_id), make_measure())
        for index, world_size in enumerate((2, 1)):
            store.write_records([(index, make_record(make_point(world_size=world_size)))])
        when = START.timestamp() - 60 * age
        os.utime(tmp_path / "results" / "runs" / run_id, (when, when))
    return tmp_path / "results"


def offered(line: str, folder: Path) -> list[str]:
    """What bash is told for a line whose last word is being written."""
    words = line.split(" ")
    variables = {
        "_RAYBENCH_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [PROGRAM], env=os.environ | variables, cwd=folder, capture_output=True, text=True
    )
    assert done.stderr == ""
    return [told.partition(",")[2] for told in done.stdout.split()]


def test_all_commands_are_offered(tmp_path):
    assert offered("raybench ", tmp_path) == list(COMMANDS)
    assert offered("raybench sh", tmp_path) == [name for name in COMMANDS if name[:2] == "sh"]


@pytest.mark.parametrize(
    "line", ["raybench report ", "raybench show ", "raybench export ", "raybench sweep j --resume "]
)
def test_runs_are_offered_the_newest_first(results, line):
    assert offered(line, results.parent) == [LATEST, "gemm-3", "mlp-2", "mlp-1"]
    assert offered(f"{line}mlp", results.parent) == ["mlp-2", "mlp-1"]


def test_the_folder_of_the_results_may_be_given(results):
    assert offered(f"raybench report --results {results} m", Path("/")) == ["mlp-2", "mlp-1"]
    assert offered(f"raybench sweep j -o {results} --resume m", Path("/")) == ["mlp-2", "mlp-1"]


@pytest.mark.parametrize("run", ["mlp-1", "gemm", "latest"])
def test_points_of_the_run_are_offered_in_the_order_of_the_plan(results, run):
    ids = [make_point(world_size=world_size).point_id for world_size in (2, 1)]
    assert offered(f"raybench show {run} ", results.parent) == ids
    assert offered(f"raybench show {run} {ids[1][:4]}", results.parent) == ids[1:]


@pytest.mark.parametrize("run", ["mlp", "nothing", "mlp-1/.."])
def test_of_a_run_that_is_not_one_no_points_are_offered(results, run):
    assert offered(f"raybench show {run} ", results.parent) == []


def test_where_there_are_no_results_only_latest_is_offered(tmp_path):
    assert offered("raybench show ", tmp_path) == [LATEST]


def test_runs_of_a_results_folder_inside_are_offered_with_its_name(results):
    results.rename(results.parent / "examples")
    (results / "runs").mkdir(parents=True)
    (results.parent / "examples").rename(results / "examples")
    inside = [f"examples/{run_id}" for run_id in ("gemm-3", "mlp-2", "mlp-1")]
    assert offered("raybench report ", results.parent) == [LATEST, *inside]
    assert offered("raybench report examples/m", results.parent) == inside[1:]
    ids = [make_point(world_size=world_size).point_id for world_size in (2, 1)]
    assert offered("raybench show examples/gemm ", results.parent) == ids


def test_a_path_is_completed_by_the_shell(results):
    assert offered("raybench report results/runs/", results.parent) == ["results/runs/"]


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
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        cwd=results.parent,
        capture_output=True,
        text=True,
    )
    *told, imported = done.stdout.splitlines()
    assert len(told) == 2, done.stderr
    assert imported == "[]"


def test_bash_completes_with_the_script_that_the_docs_name(results):
    ask = (
        f'PATH="{Path(PROGRAM).parent}:$PATH"; eval "$(_RAYBENCH_COMPLETE=bash_source raybench)"; '
        "COMP_WORDS=(raybench show gem); COMP_CWORD=2; "
        '_raybench_completion raybench; echo "${COMPREPLY[@]}"'
    )
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run(
        [bash, "--norc", "-c", ask], cwd=results.parent, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("gemm-3\n", "")


def test_points_of_all_runs_are_offered_to_the_history(results: Path) -> None:
    ids = [make_point(world_size=world_size).point_id for world_size in (2, 1)]
    assert offered("raybench history --point ", results.parent) == ids
    assert offered(f"raybench history --point {ids[1][:5]}", results.parent) == [ids[1]]


def test_the_built_in_workloads_are_offered(tmp_path: Path) -> None:
    assert offered("raybench workloads ", tmp_path) == list(BUILTIN)
    assert offered("raybench workloads m", tmp_path) == ["memory", "mlp"]
