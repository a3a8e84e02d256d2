"""A sweep on a cluster that is there, all of whose slots are free."""

import subprocess
import sys

import pandas as pd
import pytest

from tests.integration.sweeps import raybench, sweep_command, table, write_text

JOB = """\
workload: {kind: mlp, hidden: 32}
matrix: {world_size: 3, batch_size: 4}
placement: {strategy: spread}
measure: {warmup: 2, iterations: 5}
"""


def test_a_sweep_joins_the_cluster_at_its_address(three_nodes, tmp_path):
    write_text(tmp_path, JOB)
    _, _, _, *words = sweep_command(tmp_path, "--device", "cpu", address=three_nodes)
    done = raybench(*words)
    assert done.returncode == 0, done.stderr
    assert f"Ray cluster at {three_nodes}, up to 6 CPU workers" in done.stderr
    (point,) = table(tmp_path).to_dict("records")
    assert (point["node_count"], point["strategy"]) == (3, "spread")
    assert sorted(table(tmp_path, "devices")["rack"]) == ["left", "left", "right"]


TOUR = """
import sys
from pathlib import Path
from raybench.cli.demo import Stop, run_tour
from raybench.sweep.run_state import RunTarget
small = Stop(name="memory_bandwidth", shorter=("zip=[{size_bytes: [1048576]}]", "measure=quick"))
large = Stop(name="ddp_linear", shorter=("matrix.world_size=64",))
where = RunTarget(
    address=sys.argv[1], device="cpu", output=Path(sys.argv[2]), profiled=frozenset()
)
sys.exit(run_tour(where, (large, small)))
"""


@pytest.mark.long
def test_a_tour_leaves_out_what_fits_nowhere_and_makes_a_page_of_the_rest(three_nodes, tmp_path):
    results = tmp_path / "results"
    command = [sys.executable, "-c", TOUR, three_nodes, str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "left out: no point fits: the smallest needs 64 devices" in done.stderr
    assert "1 of 2: What does DDP bring" in done.stderr
    assert "What bandwidth does the memory of one GPU reach?" in done.stdout
    (run,) = (results / "runs").iterdir()
    page = (results / "demo.html").read_text()
    assert f"report {run.name}" in page
    # The run can be taken up again by what its command line says.
    (row,) = pd.read_parquet(results / "runs").to_dict("records")
    assert list(row["argv"])[-2:] == ["--set", "measure=quick"]
