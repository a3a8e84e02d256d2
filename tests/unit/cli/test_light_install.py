"""The commands without the packages of the extra `run`, as `pip install raybench` leaves them."""

import subprocess
import sys

import pytest

# A finder ahead of all others, which finds these nowhere.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("ray", "torch", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from raybench.cli import main
main()
"""
RUN = "ddp_scaling-20261122-142621-6209"


def raybench(*words):
    command = [sys.executable, "-c", WITHOUT, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "jobs/ddp_scaling.yaml"),
        ("workloads", "mlp"),
        ("report", RUN, "--results", "results/examples"),
        ("compare", "ddp_scaling-20261121", RUN, "--results", "results/examples"),
    ],
    ids=lambda words: words[0],
)
def test_planning_and_reading_need_neither_ray_nor_torch(words):
    done = raybench(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("words", [("sweep", "jobs/ddp_scaling.yaml"), ("doctor",), ("health",)])
def test_measuring_without_them_says_in_one_line_what_to_install(words, tmp_path):
    done = raybench(*words, *(("-o", str(tmp_path)) if words[0] == "sweep" else ()))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "pip install 'raybench[run]'" in done.stderr.splitlines()[-1]


def test_a_notebook_completes_the_public_names():
    import raybench

    assert {"load", "units", "Workload", "Answer"} <= set(dir(raybench)) == set(raybench.__all__)
