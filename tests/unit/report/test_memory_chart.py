"""The largest batch that fits, as reports tell it, and the picture of memory over batch size."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from builders import make_failed, make_measurement, make_point, make_record
from test_reports import report

from raybench.job.point import Precision
from raybench.records import Record
from raybench.report.charts.figures import main_figure, rows_of
from raybench.report.export import as_json
from raybench.report.summary import Summary
from raybench.report.text import markdown, terminal

GIB = 2**30
MODEL_BYTES = 7 * GIB
LIMITS = {
    ("bf16", 1): (1472, 1480, [64, 128, 256, 512, 1024, 1280, 1408]),
    ("fp32", 1): (736, 740, [64, 128, 256, 512, 640, 704]),
    ("fp32", 2): (736, 740, [64, 128, 256, 512, 640, 704]),
}


def probe(precision: str, world_size: int, batch_size: int, *, fits: bool = True) -> Record:
    point = make_point(precision=Precision(precision), world_size=world_size, batch_size=batch_size)
    if not fits:
        return make_failed(point)
    per_item = int((124 if precision == "bf16" else 248) * GIB / 1472)
    peak = MODEL_BYTES + per_item * batch_size
    return make_record(
        point,
        measurements=tuple(
            make_measurement(rank, [[8_000_000] * 6], peak_mem_allocated_bytes=peak)
            for rank in range(world_size)
        ),
    )


@pytest.fixture(scope="module")
def searched() -> Summary:
    records = []
    for (precision, world_size), (largest, ran_out, before) in LIMITS.items():
        records += [probe(precision, world_size, batch) for batch in (*before, largest)]
        records += [
            probe(precision, world_size, batch, fits=False)
            for batch in (2048, ran_out + 100, ran_out)
        ]
    return report(records)


def test_the_largest_batch_of_each_series_is_a_sentence(searched: Summary) -> None:
    text = terminal.format_report(searched)
    assert "Largest batch that fits, per device" in text
    words = " ".join(text.split())
    assert "bf16, 1 GPU 1,472 (131.00 GiB); 1,480 runs out of memory" in words
    assert "fp32, 2 GPUs 736 (131.00 GiB); 740 runs out of memory" in words
    assert max(map(len, text.splitlines())) <= 80
    assert "* bf16, 1 GPU: 1,472 (131.00 GiB); 1,480 runs out of memory" in (
        markdown.format_report(searched)
    )
    first = json.loads(as_json.format_report(searched))["largest_batches"][0]
    assert first["settings"] == {"precision": "fp32", "world_size": 1}
    assert (first["batch_size"], first["ran_out"]) == (736, 740)
    assert first["peak_mem_allocated_bytes"] == pytest.approx(131 * GIB, rel=1e-6)


def test_a_list_of_batch_sizes_does_not_tell_the_largest() -> None:
    records = [probe("bf16", 1, 64), probe("bf16", 1, 128, fits=False)]
    summary = report(records)
    assert summary.largest_batches == ()
    assert "Largest batch" not in terminal.format_report(summary)


def test_a_series_that_never_fits_has_no_largest_batch() -> None:
    assert report([probe("bf16", 1, 1, fits=False)]).largest_batches == ()


def test_the_picture_has_a_line_per_series_and_where_its_memory_runs_out(
    searched: Summary,
) -> None:
    devices = pd.DataFrame({"memory_bytes": [140 * GIB]})
    figure = main_figure(rows_of(searched), searched, devices)
    assert figure is not None
    assert figure.title == "Memory over the batch size"
    labels = [entry.label for entry in figure.legend]
    assert labels == [
        "fp32, 1 GPU",
        "fp32, 2 GPUs",
        "bf16, 1 GPU",
        "out of memory",
        "memory of a device, 140.0 GiB",
    ]
    [panel] = figure.panels
    points = panel.spec["data"]["values"]
    bf16 = [(value["x"], value["y"]) for value in points if value["line"] == "bf16, 1 GPU"]
    assert [batch for batch, _ in bf16] == [64, 128, 256, 512, 1024, 1280, 1408, 1472]
    assert bf16[-1][1] == pytest.approx(131, abs=0.001)
    crosses = panel.spec["layer"][-1]["data"]["values"]
    ends = {line: min(c["x"] for c in crosses if c["line"] == line) for line in labels[:3]}
    assert ends == {"fp32, 1 GPU": 740, "fp32, 2 GPUs": 740, "bf16, 1 GPU": 1480}
    # The crosses of one series are apart from those of another.
    assert len({cross["y"] for cross in crosses}) == 3


def test_lines_that_lie_on_each_other_are_told_by_their_width(searched: Summary) -> None:
    figure = main_figure(rows_of(searched), searched, pd.DataFrame())
    assert figure is not None
    [line] = [one for one in figure.panels[0].spec["layer"] if one["mark"]["type"] == "line"]
    scale = line["encoding"]["strokeWidth"]["scale"]
    widths = dict(zip(scale["domain"], scale["range"], strict=True))
    assert widths["fp32, 1 GPU"] > widths["fp32, 2 GPUs"] == widths["bf16, 1 GPU"]
