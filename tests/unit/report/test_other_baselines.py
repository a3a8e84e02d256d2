"""Baselines that name more than a number of devices: what has an ideal, and what has none."""

import json

import pytest
from builders import make_steady, write_run

from raybench.job.point import Precision

BASELINE = {"world_size": 1, "precision": "fp32"}
# bf16 does 2.98 times the work of fp32 on one device.
STEPS_MS = {
    (1, Precision.FP32): 8.0,
    (1, Precision.BF16): 8.0 / 2.98,
    (2, Precision.FP32): 8.4,
    (2, Precision.BF16): 8.4 / 2.98,
}


@pytest.fixture
def written(tmp_path):
    records = [
        make_steady(size, step_ms, precision=precision)
        for (size, precision), step_ms in STEPS_MS.items()
    ]
    write_run(tmp_path, "run-a", records, baseline=BASELINE)
    return tmp_path


def test_another_precision_has_no_impossible_speed_up(command, written):
    text = command("report", "run-a", "--full").out
    assert "2.98" in text
    assert "cannot be" not in text


def test_efficiency_is_of_devices_alone(command, written):
    found = json.loads(command("report", "run-a", "--json").out)["points"]
    by_point = {(one["world_size"], one["precision"]): one for one in found}
    assert by_point[1, "bf16"]["speed_up"] == pytest.approx(2.98, rel=1e-3)
    assert by_point[2, "fp32"]["efficiency"] == pytest.approx(8.0 / 8.4)
    assert [by_point[size, "bf16"]["efficiency"] for size in (1, 2)] == [None, None]


def test_lead_names_no_ideal_across_precisions(command, written):
    text = command("report", "run-a").out
    assert "Not known, because one round gives no 95 % interval over the rounds." in " ".join(
        text.split()
    )
    assert "(ideal" not in text
    assert "5.68" in text


def test_charts_draw_no_ideal_across_precisions(command, written):
    page = written / "page.html"
    assert command("report", "run-a", "--format", "html", "-o", page).code == 0
    text = page.read_text()
    assert "Scaling efficiency" in text
    assert "divided by those of the baseline (1 GPU, fp32)" in text
    assert text.count(">ideal<") == 1


def test_exports_have_no_efficiency_across_precisions(command, written):
    rows = command("export", "run-a", "--format", "json").out
    shares = [one.get("efficiency") for one in json.loads(rows)["points"]]
    assert sum(share is not None for share in shares) == 2
