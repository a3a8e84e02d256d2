"""The committed runs follow the rules of this version."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import raybench
from benchmarks.derive_columns import derive_runs

EXAMPLES = Path("results/examples")
NOISY = Path("tests/unit/report/noisy_runs")
RUN = "gemm-20261121-113145-0e78"


def copy_runs(runs, folder, results=EXAMPLES):
    for table in ("points", "samples", "runs"):
        for source in results.glob(f"{table}/{runs}"):
            shutil.copytree(source, folder / table / source.name)


@pytest.mark.parametrize("results", [EXAMPLES, NOISY], ids=["examples", "noisy"])
def test_committed_columns_follow_their_samples(results, tmp_path):
    copy_runs("*", tmp_path, results)
    assert any(tmp_path.glob("points/*"))
    assert derive_runs(tmp_path) == {}


def test_wrong_columns_are_derived_again(tmp_path):
    copy_runs(RUN, tmp_path)
    (path,) = tmp_path.glob(f"points/{RUN}/*.parquet")
    right = pq.read_table(path)
    rows = right.to_pylist(maps_as_pydicts="strict")
    rows[0] |= {"stable": not rows[0]["stable"], "step_ms_ci_high": 1e6}
    # A rate over the median, as older versions wrote it.
    over_median = rows[1]["step_ms_mean"] / rows[1]["step_ms_p50"]
    for name in ("achieved_tflops_per_device", "mfu_pct", "gemm_share_pct"):
        rows[1][name] *= over_median
    pq.write_table(type(right).from_pylist(rows, right.schema), path)
    assert set(derive_runs(tmp_path)) == {RUN}
    derived = pq.read_table(path)
    for name in ("stable", "step_ms_ci_high", "doubts"):
        assert derived.column(name).equals(right.column(name))
    rates = (table.column("mfu_pct").to_pylist() for table in (derived, right))
    assert next(rates) == pytest.approx(next(rates))


def test_sound_committed_points_are_steady():
    points = raybench.load(EXAMPLES, "points")
    is_sound = (points["status"] == "ok") & ~points["quick"].fillna(False).astype(bool)
    is_sound &= ~points["host_bound"].fillna(False).astype(bool)
    is_unsteady = ~points.loc[is_sound, "stable"].fillna(True).astype(bool)
    assert is_sound.sum() > 250
    assert is_unsteady.mean() <= 0.02
