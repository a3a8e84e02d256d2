"""Figures that cannot be are marked, and no sound run has one."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from builders import make_row, make_run

from raybench.analysis.references import (
    SHIPPED,
    References,
    format_references,
    impossible_among,
    impossible_figures,
    load_files,
    shipped,
)
from raybench.analysis.rows import ScaledRow
from raybench.errors import ResultsWarning
from raybench.records import Status
from raybench.report.summary import Summary, load_summary

EXAMPLES = Path(__file__).parents[3] / "results" / "examples"
GIB = 2**30
SOUND = {
    "workload": "mlp",
    "device_name": "NVIDIA H200",
    "status": Status.OK,
    "world_size": 8,
    "precision": "bf16",
    "scaling": "weak",
    "speed_up": 7.6,
    "efficiency": 0.95,
    "efficiency_low": 0.94,
    "batch_size": 64,
    "global_batch_size": 512,
    "step_ms_mean": 10.0,
    "step_ms_p50": 10.0,
    "throughput": 51_200.0,
    "iterations": 1000,
    "achieved_tflops_per_device": 600.0,
    "mfu_pct": 60.0,
    "peak_mem_allocated_bytes": 20 * GIB,
    "memory_gb_s": 4000.0,
    "busbw_gb_s": 350.0,
}


def marks(**changes):
    """What is said of a sound point of two rounds with these changes."""
    row = ScaledRow(**{**vars(make_row()), **SOUND, **changes})
    return impossible_figures(row, SHIPPED, attempts_s=(7.0, 5.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"efficiency": 1.12, "efficiency_low": 1.08, "speed_up": 8.96}, "efficiency 112%"),
        # As published for BERT on 8 H200s: 38 of 100 steps ran, and all were counted.
        ({"speed_up": 20.0, "efficiency": 2.5, "efficiency_low": None}, "20.00 on 8 devices"),
        ({"achieved_tflops_per_device": 950.0, "mfu_pct": 96.0}, "more than large bf16 products"),
        ({"device_name": "NVIDIA H201", "mfu_pct": 164.0}, "MFU 164%"),
        ({"memory_gb_s": 4700.0}, "more than the triad reaches on NVIDIA H200"),
        ({"busbw_gb_s": 900.0}, "more than a copy over the links"),
        ({"throughput": 134_000.0}, "1,340 samples a step, of a batch of 512"),
        ({"iterations": 2600}, "2,600 iterations of 10 ms take 26 s"),
    ],
)
def test_each_figure_that_cannot_be_is_marked_with_the_likeliest_reason(changes, words):
    assert marks() == []
    (found,) = marks(**changes)
    assert words in found
    assert "; likeliest " in found
    assert impossible_among(["other", found]) == [found]
    assert marks(**{**changes, "status": Status.ERROR}) == []


def test_iterations_of_a_long_and_a_short_round_are_held_against_the_time_of_both():
    def marks_of(iterations):
        long, short = ({"iterations": iterations, "duration_s": 16.0}, {"iterations": 500})
        rounds = [
            make_row(
                step_ms_p50=10.0, step_ms_mean=10.0, **{"duration_s": 6.0, **one}, round=number
            )
            for number, one in enumerate((long, short), 1)
        ]
        [row] = Summary(run=make_run("run-a"), devices=pd.DataFrame(), points=rounds).rows
        return impossible_among(row.warnings)

    assert marks_of(1500) == []
    assert "3,500 iterations of 10 ms take 35 s" in marks_of(3000)[0]


@pytest.mark.parametrize(
    "changes",
    [
        # Small arrays stay in the cache.
        {"workload": "memory", "params": {"size_bytes": "8388608"}, "memory_gb_s": 9000.0},
        # The switch adds up.
        {"busbw_gb_s": 470.0},
        # A smaller share may fit a cache, and an interval may hold 100%.
        {"scaling": "strong", "efficiency_low": 1.3, "peak_mem_allocated_bytes": GIB // 4},
        {"efficiency": 1.03, "efficiency_low": 0.99},
        # A device that draws less clocks higher.
        {"efficiency_low": 1.05, "clock_ratio": 1.06},
    ],
)
def test_lawful_exceptions_are_known(changes):
    assert marks(**changes) == []


def test_no_sound_run_is_marked():
    runs = [path.name for path in (EXAMPLES / "points").iterdir()]
    rows = [row for run in runs for row in load_summary(EXAMPLES, run).rows]
    assert len(rows) > 100
    assert [text for row in rows for text in impossible_among(row.warnings)] == []


def test_a_reference_that_cannot_be_is_left_out_with_a_warning(tmp_path):
    file = shipped("NVIDIA H200")
    assert file is not None
    entry = next(one for one in file.quantities if one.of.get("test") == "gemm bf16 8192")
    wrong = entry.model_copy(update={"value": 1500.0, "high": 1600.0, "measured": {}})
    path = tmp_path / "own.yaml"
    path.write_text(format_references(file.model_copy(update={"quantities": [wrong]})))
    with pytest.warns(ResultsWarning, match="above the peak of NVIDIA H200, 990"):
        found = References(load_files(path)).find("NVIDIA H200", entry)
    assert found is not None
    assert found.value == entry.value
