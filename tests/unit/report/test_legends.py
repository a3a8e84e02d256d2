"""Each column of a report that is no setting has a legend, and its head has one meaning."""

from pathlib import Path

import pytest
from builders import make_point, make_record, make_summary
from commands import EXAMPLES

from raybench.analysis.answer import decide
from raybench.analysis.rows import with_most_ranks
from raybench.analysis.run_data import load_run_data
from raybench.report.documents import Legend, ShownColumn, Table, render_text
from raybench.report.point_settings import settings_words, short_name
from raybench.report.run_report import RunReport
from raybench.report.words.causes import causes_of
from raybench.report.words.run import counts

NOISY = Path(__file__).parent / "noisy_runs"
RUNS = sorted(path.name for path in (EXAMPLES / "points").iterdir())
JOBS = [run for run in RUNS if not run.startswith("health")]


def tables_of(run):
    report = RunReport(answer=decide(load_run_data(EXAMPLES, run)))
    return [table for _, tables in report.tables for table in tables]


@pytest.mark.parametrize("run", JOBS)
def test_each_column_has_a_legend(run):
    for table in tables_of(run):
        without = [one.title for one in table.columns if not (one.meaning or one.is_setting)]
        assert without == [], table.title


@pytest.mark.parametrize("run", JOBS)
def test_no_metric_has_the_head_of_a_setting(run):
    for table in tables_of(run):
        assert len(set(table.titles)) == len(table.titles), table.title


@pytest.mark.parametrize("run", JOBS)
def test_no_head_names_both_times_and_shares(run):
    kinds = {}
    for table in tables_of(run):
        cells = zip(*table.texts, strict=True)
        for title, texts in zip(table.titles, cells, strict=True):
            is_share = any(text.endswith("%") and "±" not in text for text in texts)
            assert kinds.setdefault(title, is_share) == is_share, (table.title, title)


def table(title, cell, meaning):
    return Table(columns=(ShownColumn(title=title, meaning=meaning),), rows=((cell,),))


def test_legend_stands_below_its_table_and_once():
    step = table("step ms", "1.0", "median time of one step")
    lines = render_text(
        [step, table("rows/s", "7", "rows per second"), step, Legend()]
    ).splitlines()
    assert [line for line in lines if line] == [
        "step ms",
        "    1.0",
        "step ms  Median time of one step.",
        "rows/s",
        "     7",
        "rows/s  Rows per second.",
        "step ms",
        "    1.0",
    ]


def test_no_legend_without_its_place():
    text = render_text([table("step ms", "1.0", "median time of one step")])
    assert "Median" not in text


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"preset": "175b", "layers": "8"}, "175b (8 layers)"),
        ({"preset": "175b", "layers": "96"}, "175b"),
        ({"preset": "175b"}, "175b"),
    ],
)
def test_preset_tells_when_layers_are_cut(params, told):
    [row] = make_summary([make_record(make_point(workload="transformer", params=params))]).rows
    assert settings_words(row, ["preset"], "GPUs") == f"preset={told}"
    assert short_name(row, ["preset"], "GPUs") == f"preset={told}"


@pytest.mark.parametrize(
    ("run", "most"),
    [
        ("ddp_scaling-20261122-142621-6209", "1.6 %"),
        ("dit_module_vs_pipeline-20261123-021029-9d5b", "1.1 %"),
    ],
    ids=["three rounds", "one round"],
)
def test_causes_within_noise_are_one_line(run, most):
    found = dict(causes_of(with_most_ranks(load_run_data(EXAMPLES, run).rows)))
    assert list(found) == ["exposed communication", "slower computation", "other causes"]
    assert found["other causes"] == f"Each is at most {most}, which may be noise."


def test_only_named_causes_below_zero_are_explained():
    data = load_run_data(EXAMPLES, "ddp_linear-20261122-231903-de3c")
    found = dict(causes_of([row for row in data.rows if row.speed_up and row.world_size == 2]))
    assert found["other time"].startswith("-14.4 to 4.3 %. ")
    assert "note" not in found
    data = load_run_data(NOISY, "ddp_scaling-20261129-162012-b1f2")
    found = dict(causes_of([row for row in data.rows if row.speed_up and row.world_size == 2]))
    assert found["slower computation"].startswith("-16.3 to 18.7 %. ")
    assert (
        found["note"]
        == "A value below 0 means that the part takes less time than in ideal scaling."
    )


def test_stored_run_shows_the_current_metric_description():
    table = tables_of("resnet50_amp-20261122-204651-f6b6")[0]
    assert (
        dict(table.legend())["output error"]
        == "Largest error against fp32 divided by the largest fp32 output."
    )


def test_interrupted_run_is_told_with_its_rounds():
    data = load_run_data(EXAMPLES, "mixed_precision-20261123-100621-6924")
    assert counts(data).startswith("12 of 16 points ok, 1 cancelled, 3 not run; ")
    data = load_run_data(EXAMPLES, "dit_module_vs_pipeline-20261123-100520-2205")
    assert "; 2 to 3 rounds; " in counts(data)
