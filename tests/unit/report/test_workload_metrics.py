"""A metric that a workload declares in its class is in tables and reports, without another edit."""

import math
from dataclasses import replace

import pytest
from builders import make_measure, make_measurement, make_point, make_record
from fakes import measure_here

import raybench
from raybench import Metric
from raybench.analysis.rounds import mean_of_rounds
from raybench.results.record_rows import point_metrics, point_row

ONE_FILE = '''
from raybench import Context, Metric, Workload


class Pipeline(Workload):
    """Waits for its stages."""

    items_per_step = 8
    flops_per_step = 1.0
    metrics = (
        Metric(name="bubble_ms", unit="ms", description="idle time of a stage", over_ranks="max"),
        Metric(
            name="stages", description="stages that ran", meaning="how many of the {ranks} ran"
        ),
        Metric(name="unknown", description="what nobody knows"),
    )

    def __init__(self, context: Context) -> None:
        self.stages = 8

    def step(self) -> None:
        self.bubble_ms = 12.25
'''


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run of the workload, in one process."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "one_file_workload.py").write_text(ONE_FILE)
    point = make_point(workload="one_file_workload:Pipeline", params={})
    measure = {"warmup": 2, "iterations": 6, "breakdown": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return measure_here(folder / "results", [point], **measure)


def test_metric_values_are_stored_in_the_table(results):
    [row] = raybench.load(results, "points").to_dict("records")
    assert row["status"] == "ok", row["error_message"]
    assert row["workload_metrics"] == {"bubble_ms": 12.25, "stages": 8.0}
    assert row["workload_headings"]["bubble_ms"] == "bubble ms"


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("report run-a --full", ["bubble ms", "12.25", "bubble ms Idle time of a stage."]),
        ("report run-a --full", ["stages How many of the workers ran."]),
        ("report run-a --format md", ["bubble ms", "12.25"]),
        ("report run-a --format html", ['title="Idle time of a stage.">bubble ms', "<td>12.25"]),
        ("show run-a", ["bubble ms", "12.25"]),
        ("show run-a POINT", ["bubble ms 12.25", "bubble_ms idle time of a stage"]),
        ("export run-a --format csv", ["workload_metrics.bubble_ms"]),
        ("export run-a --format junit", ['<property name="bubble_ms" value="12.25"']),
        ("export run-a --format json", ['"bubble_ms": 12.25']),
    ],
)
def test_each_format_has_metric_with_unit_and_meaning(results, words, texts, command):
    [point_id] = raybench.load(results, "points")["point_id"]
    code, out, err = command(*words.replace("POINT", point_id).split(), results=results)
    assert (code, err) == (0, "")
    assert [text for text in texts if text not in " ".join(out.split())] == []


def of_ranks(*values, **declared):
    bubble = Metric(name="bubble_ms", description="idle", over_ranks="sum", **declared)
    return make_record(
        make_point(world_size=len(values)),
        measurements=tuple(
            make_measurement(
                rank, [[8_000_000] * 6], workload_metrics={} if value is None else {bubble: value}
            )
            for rank, value in enumerate(values)
        ),
    )


def test_the_ranks_become_a_point_as_it_declares():
    assert point_metrics(of_ranks(1.0, 2.5))["workload_metrics"] == {"bubble_ms": 3.5}
    assert point_metrics(of_ranks(1.0, None))["workload_metrics"] is None
    assert point_metrics(of_ranks(None, None))["workload_metrics"] is None


def test_metric_over_step_uses_sum_of_ranks():
    # Steps of 8 ms.
    rate = point_metrics(of_ranks(100.0, 60.0, over_step="per_second"))
    assert rate["workload_metrics"] == {"bubble_ms": pytest.approx(20_000)}
    each = point_metrics(of_ranks(3.0, 1.0, over_step="ms_each"))
    assert each["workload_metrics"] == {"bubble_ms": pytest.approx(2.0)}


def test_the_rounds_of_a_point_have_its_mean():
    rows = [
        replace(point_row("run-a", record, make_measure()), round=number, attempt=number)
        for number, record in ((1, of_ranks(1.0)), (2, of_ranks(2.0)))
    ]
    [row] = mean_of_rounds(rows)
    assert row.workload_metrics == {"bubble_ms": pytest.approx(math.sqrt(2))}
