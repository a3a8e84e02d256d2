"""The largest batch that fits, as reports tell it, and the picture of memory over batch size."""

from __future__ import annotations

import json

import pytest
from builders import make_failed, make_measurement, make_point, make_record
from test_reports import report, sweep

from raybench.errors import UsageError
from raybench.point import Precision
from raybench.records import Record
from raybench.report import as_json, charts, markdown, terminal
from raybench.report.memory_chart import has_largest_batches, memory_chart
from raybench.report.summary import Summary

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
    assert not has_largest_batches(summary)
    assert not has_largest_batches(report(sweep()))


def test_a_series_that_never_fits_has_no_largest_batch() -> None:
    assert report([probe("bf16", 1, 1, fits=False)]).largest_batches == ()


def test_the_picture_has_a_line_per_series_and_where_its_memory_runs_out(
    searched: Summary,
) -> None:
    assert has_largest_batches(searched)
    spec = memory_chart(searched)
    ends, points = (layer["data"]["values"] for layer in spec["layer"])
    assert [(end["line"], end["batch_size"]) for end in ends] == [
        ("fp32, 1 GPU", 740),
        ("fp32, 2 GPUs", 740),
        ("bf16, 1 GPU", 1480),
    ]
    bf16 = [(p["batch_size"], p["peak_gib"]) for p in points if p["line"] == "bf16, 1 GPU"]
    assert [batch for batch, _ in bf16] == [64, 128, 256, 512, 1024, 1280, 1408, 1472]
    assert bf16[-1][1] == pytest.approx(131, abs=0.001)
    assert {p["line"] for p in points} == {end["line"] for end in ends}
    assert charts.render(spec, "png").startswith(b"\x89PNG\r\n")


def test_without_a_known_peak_there_is_no_picture() -> None:
    records = [make_failed(make_point(batch_size=2))]
    with pytest.raises(UsageError, match="of which the run knows nothing"):
        memory_chart(report(records))
