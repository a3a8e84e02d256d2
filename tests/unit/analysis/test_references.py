"""Reference values: how sure a range is, where it is from, and how files are pooled and read."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from builders import make_row, make_run
from commands import EXAMPLES, REPOSITORY

from raybench.analysis import references
from raybench.analysis.rows import ScaledRow
from raybench.analysis.run_data import RunData, load_run_data
from raybench.errors import UsageError
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.status import Status

H200 = "NVIDIA H200"
GEMM = references.Quantity(
    of={"test": "gemm bf16 8192", "where": "device"}, metric="value", unit="TFLOP/s"
)


def file_of(run, uuids, values, host="alpha", day=1):
    """The references of a run in which each of these devices had these starts."""
    rows = [
        {"uuid": uuid, "host": host, "index": int(uuid[4:]) % 2, "versions": {"torch": "2.11.0"}}
        | {"driver_version": "580.1"}
        for uuid in uuids
    ]
    started = make_run(run).started_at.replace(day=day)
    measured = [
        references.MeasuredValue(**GEMM.model_dump(), model=H200, devices=uuid, value=value)
        for uuid, starts in zip(uuids, values, strict=True)
        for value in starts
    ]
    (file,) = references.reference_files(replace(make_run(run), started_at=started), rows, measured)
    return file


def test_predicted_range_covers_99_percent_of_new_devices():
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(2000):
        devices = 700 * np.exp(rng.normal(0, 0.03, 6))
        starts = devices[:, None] * np.exp(rng.normal(0, 0.01, (6, 2)))
        _, low, high = references.predict_range(starts[:5].tolist())
        inside.append(low <= starts[5, 0] <= high)
    assert 0.98 <= np.mean(inside) < 0.998


def test_range_has_floor_and_widens_with_few_devices():
    _, low, high = references.predict_range([[100.0], [100.0], [100.0]])
    assert (low, high) == (pytest.approx(100 / 1.01), pytest.approx(101))
    _, low, high = references.predict_range([[100.0, 100.0]])
    assert (low, high) == (pytest.approx(100 / 1.1), pytest.approx(110))
    _, _, few = references.predict_range([[100.0], [103.0]])
    _, _, more = references.predict_range([[100.0], [103.0], [100.0], [103.0]])
    assert few > 200 > 115 > more


def test_files_are_pooled_by_their_starts():
    first = file_of("run-1", ["GPU-1", "GPU-2"], [[700.0], [710.0]])
    second = file_of("run-2", ["GPU-2"], [[720.0, 721.0]], day=2)
    (pooled,) = references.pool([first, second, file_of("run-3", ["GPU-3"], [[705.0]]), second])
    (entry,) = pooled.quantities
    assert (entry.devices, entry.hosts, entry.starts, entry.days) == (3, 2, 5, 2)
    expected = references.predict_range([[700.0], [710.0, 720.0, 721.0], [705.0]])
    assert (entry.value, entry.low, entry.high) == pytest.approx(expected, rel=1e-5)
    assert entry.observed == (700.0, 721.0)
    assert entry.provenance == "3 devices, 2 hosts, August 2026"
    entry.of["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    assert references.parse_references(references.format_references(pooled), "again") == pooled


def test_pairs_count_as_groups_on_their_hosts():
    runs = {"run-1": (0, 1), "run-2": (0, 1), "run-3": (0, 0)}
    files = []
    for run, indices in runs.items():
        uuids = [f"GPU-{run}-{place}" for place in range(2)]
        rows = [
            {"uuid": uuid, "host": "vm", "index": index, "versions": {}, "driver_version": "580.1"}
            for uuid, index in zip(uuids, indices, strict=True)
        ]
        pair = references.MeasuredValue(
            **GEMM.model_dump(), model=H200, devices="+".join(uuids), value=380.0
        )
        files += references.reference_files(make_run(run), rows, [pair])
    [[entry]] = [file.quantities for file in references.pool(files)]
    assert entry.provenance == "6 devices in 3 groups, 3 hosts, August 2026"


def test_a_site_goes_before_what_is_shipped(tmp_path):
    known = references.SHIPPED.find(H200, GEMM)
    assert known.low < known.value < known.high
    own = tmp_path / "own.yaml"
    own.write_text(references.format_references(file_of("run-1", ["GPU-1"], [[300.0]])))
    for path in (own, tmp_path):
        found = references.References(references.load_files(path)[0]).find(H200, GEMM)
        assert found.value == 300
    assert references.SHIPPED.find("NVIDIA H201", GEMM) is None
    sums = {"test": "all_reduce 1 GiB", "where": "4 on a node"}
    for fabric, is_known in (("NVLink x18, 1:PHB", True), ("1:PHB", False)):
        quantity = references.Quantity(of=sums, metric="value", unit="GB/s", fabric=fabric)
        assert (references.SHIPPED.find(H200, quantity) is not None) == is_known


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("low: ", "lowest: ", "required, but not given"),
        ("value: 300", "value: .nan", "quantities[0].value: must be"),
        ("value: 300", "value: 900", "must have low <= value <= high"),
        ("    GPU-1", "    GPU-7", "must list the run and devices"),
        ("model:", "model", "is not YAML"),
        ("model:", "at: 2026-13-45\nmodel:", "is not YAML: month must be"),
        ("model:", 'at: "\\Uffffffff"\nmodel:', "is not YAML"),
        ("model:", "at: !!bool z\nmodel:", "is not YAML"),
        ("model:", "%YAML 1.0\n---\nmodel:", "is not YAML"),
        ("model:", "? [at, {a: 1}]\n: b\nmodel:", "is not YAML"),
        ("model:", f"at: {'[' * 5000}\nmodel:", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path, old, new, problem):
    text = references.format_references(file_of("run-1", ["GPU-1"], [[300.0]]))
    (path := tmp_path / "own.yaml").write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=r"own\.yaml") as caught:
        references.load_files(path)
    assert problem in str(caught.value)
    for name in ("none.yaml", f"{'n' * 300}one.yaml"):
        with pytest.raises(UsageError, match=r"^[^-].*none\.yaml: cannot be read"):
            references.load_files(tmp_path / name)
    with pytest.raises(UsageError, match=r"^own\.yaml: the file: must be a mapping"):
        references.parse_references("[]", "own.yaml")


def test_what_is_shipped_follows_from_its_own_starts():
    for path in (REPOSITORY / "raybench" / "references").glob("*.yaml"):
        file = references.parse_references(path.read_text(), path.name)
        assert references.pool([file]) == [references.shipped(file.model)]


def test_a_datasheet_is_known_without_a_run():
    a100 = "NVIDIA A100-SXM4-80GB"
    peaks = {"gemm bf16 8192": 312, "memory 500 MB": 2039, "gemm": None, "launch": None}
    assert {test: references.peak_of(a100, {"test": test}) for test in peaks} == peaks
    assert references.peak_of(a100, {"workload": "gemm", "precision": "bf16"}) == 312


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
    return references.impossible_figures(row, references.SHIPPED, attempts_s=(7.0, 5.0))


@pytest.mark.parametrize(
    ("changes", "figure", "value"),
    [
        ({"efficiency": 1.12, "efficiency_low": 1.08, "speed_up": 8.96}, "efficiency", 1.12),
        # As published for BERT on 8 H200s: 38 of 100 steps ran, and all were counted.
        ({"speed_up": 20.0, "efficiency": 2.5, "efficiency_low": None}, "efficiency", 2.5),
        (
            {"achieved_tflops_per_device": 950.0, "mfu_pct": 96.0},
            "achieved_tflops_per_device",
            950.0,
        ),
        ({"device_name": "NVIDIA H201", "mfu_pct": 164.0}, "mfu_pct", 164.0),
        ({"memory_gb_s": 4700.0}, "memory_gb_s", 4700.0),
        ({"busbw_gb_s": 900.0}, "busbw_gb_s", 900.0),
        ({"throughput": 134_000.0}, "items", 1340.0),
        ({"iterations": 2600}, "iterations", 26.0),
    ],
)
def test_each_impossible_figure_is_marked_and_named(changes, figure, value):
    assert marks() == []
    (found,) = marks(**changes)
    assert (found.kind, found.subject) == (DoubtKind.IMPOSSIBLE, figure)
    assert found.value == pytest.approx(value)
    assert found.limit < value
    assert marks(**{**changes, "status": Status.ERROR}) == []


def test_impossible_mfu_is_told_once():
    of_mfu = Doubt(kind=DoubtKind.IMPOSSIBLE, value=104.0, limit=100.0, subject="mfu_pct")
    of_tflops = marks(achieved_tflops_per_device=1030.0, mfu_pct=104.0)
    assert references.without_repeated_mfu([of_mfu, *of_tflops]) == of_tflops
    assert references.without_repeated_mfu([of_mfu]) == [of_mfu]


def test_iterations_are_checked_against_time_of_all_rounds():
    def marks_of(iterations):
        long, short = ({"iterations": iterations, "duration_s": 16.0}, {"iterations": 500})
        rounds = [
            make_row(
                step_ms_p50=10.0, step_ms_mean=10.0, **{"duration_s": 6.0, **one}, round=number
            )
            for number, one in enumerate((long, short), 1)
        ]
        [row] = RunData(run=make_run("run-a"), devices=pd.DataFrame(), points=rounds).rows
        return [doubt for doubt in row.doubts or () if doubt.kind is DoubtKind.IMPOSSIBLE]

    assert marks_of(1500) == []
    (found,) = marks_of(3000)
    assert (found.subject, found.limit) == ("iterations", 22.0)
    assert found.value == pytest.approx(35.0)


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
    rows = [row for run in runs for row in load_run_data(EXAMPLES, run).rows]
    assert len(rows) > 100
    assert not any(map(references.has_impossible, rows))


def test_a_reference_above_the_peak_is_left_out(tmp_path, command):
    file = references.shipped("NVIDIA H200")
    entry = next(one for one in file.quantities if one.of.get("test") == "gemm bf16 8192")
    wrong = entry.model_copy(update={"value": 1500.0, "high": 1600.0, "measured": {}})
    path = tmp_path / "own.yaml"
    path.write_text(references.format_references(file.model_copy(update={"quantities": [wrong]})))
    files, [left_out] = references.load_files(path)
    assert references.References(files).find("NVIDIA H200", entry).value == entry.value
    assert (left_out.entry.value, round(left_out.peak)) == (1500, 990)
    run = "ddp_scaling-20261122-142621-6209"
    told = command("report", run, "--references", path, results=EXAMPLES).err
    assert "1,500 TFLOP/s is above the peak of NVIDIA H200, 990" in " ".join(told.split())
