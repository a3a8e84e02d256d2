"""Runs in Python: tables, reports, pages, charts and comparisons of committed and made-up runs."""

import json
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from builders import make_steady, make_sweep, write_run
from commands import EXAMPLES, REPOSITORY, refusal_of

import raybench
from raybench.errors import ResultsError, UsageError

SCALING, GEMM = "ddp_scaling-20261122-142621-6209", "gemm-20261121-113145-0e78"


@pytest.fixture(scope="module")
def scaling():
    return raybench.open_run(SCALING, EXAMPLES)


@pytest.mark.parametrize(
    ("named", "folder", "run_id"),
    [
        (SCALING, EXAMPLES, SCALING),
        ("gemm", EXAMPLES, GEMM),
        (EXAMPLES / "runs" / GEMM, "results", GEMM),
        (EXAMPLES / "gemm", "results", GEMM),
    ],
)
def test_runs_open_by_id_job_and_folder(named, folder, run_id):
    opened = raybench.open_run(named, folder)
    assert (opened.run_id, opened.results.resolve()) == (run_id, EXAMPLES)


def test_latest_is_newest_run_of_folder(tmp_path):
    for run_id in ("a-20260101-000000-aaaa", "b-20260102-000000-bbbb"):
        write_run(tmp_path, run_id, make_sweep())
    by_name, by_folder = raybench.open_run("latest", tmp_path), raybench.open_run(tmp_path)
    assert by_name == by_folder
    assert by_name.run_id == "b-20260102-000000-bbbb"


def test_a_missing_run_is_an_error(tmp_path):
    told = refusal_of(ResultsError, raybench.open_run, "gemmm", EXAMPLES)
    assert told.endswith("no run 'gemmm'; did you mean 'gemm'?")
    assert "no such folder" in refusal_of(ResultsError, raybench.open_run, "latest", tmp_path / "x")


def test_tables_are_those_that_load_returns(scaling):
    for name in ("summary", "points", "samples"):
        loaded = raybench.load(EXAMPLES, name, SCALING)
        pd.testing.assert_frame_equal(getattr(scaling, name), loaded)
    assert scaling.points is scaling.points
    assert len(scaling.table("devices")) == 4


def test_reports_are_those_of_the_command(scaling, command, monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    opened = raybench.open_run(SCALING, "results/examples")
    for format, options in (("text", ()), ("md", ("--format", "md")), ("json", ("--json",))):
        printed = command("report", SCALING, *options, results="results/examples").out
        assert opened.report(format) == printed
    full = command("report", SCALING, "--full", results="results/examples").out
    assert opened.report(full=True) == full
    assert json.loads(scaling.report("json"))["run"]["run_id"] == SCALING


def test_page_and_chart_become_files(scaling, tmp_path):
    page = scaling.save_page(tmp_path / "page.html")
    assert page.read_text() == scaling.report("html")
    picture = scaling.chart()
    assert picture.save(tmp_path / "a.svg").read_text().startswith("<svg")
    assert picture.save(str(tmp_path / "a.PNG")).read_bytes().startswith(b"\x89PNG")
    told = refusal_of(UsageError, picture.save, tmp_path / "a.pdf")
    assert told.startswith("path: must end in .svg or .png, given")
    told = refusal_of(ResultsError, scaling.save_page, tmp_path / "no" / "page.html")
    assert told.endswith("cannot be written: No such file or directory")


def test_an_unknown_format_is_refused(scaling):
    told = refusal_of(UsageError, scaling.report, "pdf")
    assert told == "format: must be one of text, md, html, json, given 'pdf'"


class Shown(HTMLParser):
    """The elements of a piece of HTML, and its texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def test_notebooks_show_report_and_chart(scaling):
    shown = Shown(scaling._repr_html_())
    assert shown.tags.count("img") == 1
    assert not {"script", "style", "link", "iframe"} & set(shown.tags)
    words = " ".join(shown.text.split())
    for line in scaling.report().splitlines()[:2]:
        assert line in words


def test_notebooks_show_hostile_texts_as_texts(tmp_path):
    hostile = "<script>alert(1)</script>"
    records = [make_steady(1, 8.0), make_steady(2, 8.0)]
    text = f'version: 1\nname: x\nquestion: "{hostile}"\nworkload: {{kind: mlp}}\n'
    write_run(tmp_path, "run-a", records, job_text=text)
    opened = raybench.open_run("run-a", tmp_path)
    assert hostile in opened.report()
    assert "<script" not in opened._repr_html_()


def test_repr_names_run_and_finding(scaling):
    head, *found = repr(scaling).split("\n")
    assert re.fullmatch(rf"<RunResult {SCALING}: ok, 36 of 36 points ok; 3 rounds>", head)
    assert max(map(len, found)) <= 80
    assert " ".join(found) == json.loads(scaling.report("json"))["lead"]


def test_a_health_check_opens_too(tmp_path):
    check = raybench.open_run("health-20261122-222544-c2db", EXAMPLES)
    assert check.report().splitlines()[0] == check.report("md").splitlines()[0].removeprefix("## ")
    assert "health-20261122-222544-c2db: ok" in repr(check)
    assert "<table" in check._repr_html_()
    told = refusal_of(UsageError, check.compare, "gemm")
    assert told.endswith("is a health check; `raybench compare` compares health checks")


@pytest.fixture
def sides(tmp_path):
    """Three runs, then three that need 10 % more time at one of two points."""
    runs = []
    for day in range(6):
        slow = 1.1 if day >= 3 else 1.0
        wobble = 1 + 0.001 * (day % 3)
        records = [make_steady(1, 8.0 * wobble), make_steady(2, 8.0 * wobble * slow)]
        run_id = f"a-2026010{day + 1}-000000-aaaa"
        write_run(tmp_path, run_id, records)
        runs.append(raybench.open_run(run_id, tmp_path))
    return runs[:3], runs[3:]


def test_comparison_has_changes_intervals_and_verdicts(sides):
    old, (new, *repeats) = sides
    compared = new.compare(old, repeats=repeats)
    points = compared.points.set_index("world_size")
    assert points["verdict"].to_dict() == {1: "same", 2: "slower"}
    slower = points.loc[2]
    assert slower["change"] == pytest.approx(1 / 1.1 - 1, abs=0.002)
    assert slower["change_low"] < slower["change"] < slower["change_high"] < 0
    assert compared.verdicts == {"slower": 1, "same": 1}
    assert "1 of 2 points is slower" in compared.report()
    assert compared.report("md") in (compared.report("md", full=True),)
    assert "<svg" in compared.report("html")
    assert "slower" in Shown(compared._repr_html_()).text
    assert repr(compared).startswith("<RunComparison of ")


def test_single_runs_have_changes_without_verdicts(sides):
    (old, *_), (new, *_) = sides
    compared = new.compare(old).points
    assert set(compared["verdict"]) == {"unclear"}
    assert compared["reason"].str.contains("run").all()
    # By name, in the folder of the run.
    pd.testing.assert_frame_equal(new.compare(old.run_id).points, compared)


def test_a_run_on_both_sides_is_refused(sides):
    (old, *_), _ = sides
    assert "is on both sides" in refusal_of(ResultsError, old.compare, old)
    assert "given an empty list" in refusal_of(UsageError, old.compare, [])
