"""The reports that docs/README.md shows are those of the committed tables, and what they lead with
is true: it is worked out again here, from the Parquet files alone.
"""

import html
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from commands import EXAMPLES, REPOSITORY

from raybench.analysis.answer import decide
from raybench.analysis.run_data import load_run_data
from raybench.api.pictures import page_of
from raybench.api.stored_runs import load_health
from raybench.health.report import format_page as format_health_page
from raybench.health.report import health_figures
from raybench.report.charts import ChartData, draw_main_figure
from raybench.report.charts.grammar import draw_figure
from raybench.report.documents import format_document
from raybench.report.run_report import RunReport
from raybench.results import reader

LIST = REPOSITORY / "docs" / "README.md"
REPORTS = REPOSITORY / "docs" / "examples" / "reports"
RUNS = {
    run_id.partition("-")[0]: run_id
    for run_id in re.findall(r"^\| `([a-z_]+-\d{8}-\d{6}-[0-9a-f]{4})`", LIST.read_text(), re.M)
}
CHARTS = {
    "ddp_scaling": LIST.parent / "ddp_scaling.svg",
    "collectives": REPORTS / "collectives.svg",
    "largest_batch": REPORTS / "largest_batch.svg",
}
PAGE = REPORTS / "ddp_scaling.html"
AGAIN = "make it again with the commands in docs/README.md"


def points(job):
    """The last attempt at each point in each round, without raybench."""
    rows = pd.read_parquet(EXAMPLES / "points" / RUNS[job]).sort_values("attempt")
    trial = [name for name in ("point_id", "round", "control_of") if name in rows]
    return rows.drop_duplicates(trial, keep="last")


def answer_of(job):
    """The rows of the table that the committed report begins with, and the lines below it."""
    _, _, text = (REPORTS / f"{job}.md").read_text().partition("\n### ")
    _, table, *others = text.split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: cells for name, *cells in rows}, " ".join(others[:3])


def visible(page):
    """The words of a page outside its charts, one blank between them."""
    for element in ("style", "script", "svg"):
        page = re.sub(rf"<{element}\b.*?</{element}>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def marks(svg):
    """What the points and lines of a chart stand for, wherever its fonts put them."""
    labels = [element.get("aria-label") for element in ElementTree.fromstring(svg).iter()]
    return sorted(str(label) for label in labels if label)


@pytest.mark.parametrize("job", ["ddp_scaling", "collectives", "largest_batch", "gemm"])
def test_committed_markdown_matches_the_tables(job):
    today = format_document(RunReport(answer=decide(load_run_data(EXAMPLES, RUNS[job]))), "md")
    assert (REPORTS / f"{job}.md").read_text() == today, AGAIN


def test_committed_health_check_matches_the_tables():
    report = load_health(EXAMPLES, RUNS["health"])
    today = format_document(report, "md")
    assert (REPORTS / "health.md").read_text() == today, AGAIN
    drawn = draw_figure(health_figures(report)[0], "svg", below=report.machine)
    assert marks((REPORTS / "health.svg").read_text()) == marks(drawn.decode()), AGAIN
    today = format_health_page(report, reader.load_table(EXAMPLES, "devices", RUNS["health"]))
    assert visible((REPORTS / "health.html").read_text()) == visible(today), AGAIN


@pytest.mark.parametrize("job", CHARTS)
def test_committed_charts_match_the_tables(job):
    devices = reader.load_table(EXAMPLES, "devices", RUNS[job])
    data = ChartData(answer=decide(load_run_data(EXAMPLES, RUNS[job])), devices=devices)
    today = draw_main_figure(data, "svg")
    found = marks(CHARTS[job].read_text())
    assert len(found) > 10
    assert found == marks(today.decode()), AGAIN


def test_committed_page_matches_the_tables():
    committed = PAGE.read_text()
    today = page_of(EXAMPLES, load_run_data(EXAMPLES, RUNS["ddp_scaling"]))
    assert visible(committed) == visible(today), AGAIN
    assert committed.count("<svg") == today.count("<svg"), AGAIN


def over_rounds(rows):
    """One row a point: the geometric mean of its rounds, and the parts of its first one."""
    rows = rows[rows.control_of.isna()]
    first = rows[rows["round"] == 1].set_index("point_id")
    means = {
        name: np.exp(np.log(rows[name]).groupby(rows.point_id).mean())
        for name in ("throughput", "step_ms_p50")
    }
    return first.assign(**means).reset_index()


def test_scaling_report_leads_with_speed_ups_and_communication():
    key = ["precision", "batch_size"]
    rows = over_rounds(points("ddp_scaling"))
    alone = rows[rows.world_size == 1].set_index(key)[["throughput", "step_ms_p50"]]
    several = rows[rows.world_size > 1].join(alone.add_suffix("_alone"), on=key)
    four = several[several.world_size == 4].assign(
        speed_up=lambda one: one.throughput / one.throughput_alone,
        # Parts are of the first round.
        exposed_ms=lambda one: one.comm_exposed_ms / one.parts_step_ms * one.step_ms_p50,
        share=lambda one: one.exposed_ms / (one.step_ms_p50 - one.step_ms_p50_alone),
    )
    told, below = answer_of("ddp_scaling")
    for precision, found in four.groupby("precision"):
        speed_ups = [float(cell) for cell in told[precision]]
        assert speed_ups == pytest.approx(list(found.sort_values("batch_size").speed_up), abs=0.01)
    share = f"{100 * four.share.min():.0f} to {100 * four.share.max():.0f} %"
    assert f"{share} of the lost time is communication that computation does not hide." in below


def test_search_report_leads_with_largest_working_batches():
    rows = points("largest_batch")
    recomputes = rows.params.map(lambda params: dict(params)["activation_checkpointing"])
    for flag, is_ok in recomputes.groupby(recomputes).groups.items():
        tried = rows.loc[is_ok].set_index("batch_size").status
        largest = tried[tried == "ok"].index.max()
        assert tried[largest + 1] == "oom"
        told, _ = answer_of("largest_batch")
        assert told["checkpointing" if flag == "true" else "plain"][0] == str(largest)
