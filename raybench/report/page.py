"""Reports of a run or a comparison as pages, which load nothing from elsewhere.

The Content-Security-Policy of a page allows its own style and script by their hashes, and nothing
else: a text from the results that escapes the templates can neither run nor fetch anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import takewhile
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from raybench.analysis.answer import RunAnswer
from raybench.analysis.rows import (
    RATES,
    SCALING,
    ScaledRow,
    is_numeric,
    setting_of,
    value_of,
    varying,
    workload_metrics,
)
from raybench.records.metrics import Metric
from raybench.report import formatting
from raybench.report.charts import ChartData, in_order, main_figure, other_figures, why_no_figure
from raybench.report.charts.comparison import change_figures
from raybench.report.charts.gate import gate_figures
from raybench.report.charts.grammar import Figure, Panel, draw
from raybench.report.charts.lines import speed_up_words
from raybench.report.comparison import Comparison
from raybench.report.documents import (
    MARKS_TITLE,
    Cell,
    ColumnOf,
    Line,
    Listing,
    ShownColumn,
    Table,
    legend_paragraphs,
    make_table,
    metric_column,
    text_of,
)
from raybench.report.formatting import cut_end, half_width, step_uncertainty
from raybench.report.gate_report import GateReport
from raybench.report.messages import marks
from raybench.report.point_settings import setting_columns
from raybench.report.run_report import RunReport
from raybench.report.words import answer as words
from raybench.report.words import run as run_words
from raybench.report.words.compare import environment
from raybench.report.words.doubts import mark_words
from raybench.report.words.failures import failure_of_row
from raybench.report.words.reasons import not_compared_words
from raybench.version import __version__

# Software whose version the first screen shows -> its name there.
_VERSIONS = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}
# Longest tooltip.
_HINT_CHARS = 300
# Height of a screen below the head of the page, and of axes, legend and title of a panel.
_SCREEN_PX, _AROUND_PX = 640, 100
# page.css has classes for up to nine leading text columns.
_MOST_TEXT_COLUMNS = 9
_FOLD_AFTER = re.compile(r"([=_])(?=\w)")
_PERCENT = re.compile(r"(\d) %")
_QUOTED = re.compile(r"`([^`]+)`")


def format_run_page(data: ChartData) -> str:
    """Return the page of a run as HTML."""
    answer, run_data = data.answer, data.answer.data
    report, run = RunReport(answer=answer), run_data.run
    points = _point_table(in_order(data.rows), answer)
    first_figure = main_figure(data)
    # Name -> text, for the list at the end of the page; empty texts are left out.
    facts = {
        "run": run.run_id,
        "started": formatting.when(run.started_at),
        "took": formatting.course(run),
        "points": run_words.counts(run_data),
        "machine": run_words.machine_of_run(run_data),
        "cluster": run.cluster,
        "driver ran on": run.host,
        "command": " ".join(run.argv),
        "versions": formatting.versions(run_data.versions),
        "git commit": run.git_commit or "",
        "variables": formatting.settings(run.environment),
        "tags": formatting.settings(run.tags),
        "in all points": run_words.in_all_points(run_data),
        "job file's SHA-256": run.job_sha256,
        "nodes lost": ", ".join(run_data.lost_nodes),
    }
    versions = []
    for name, label in _VERSIONS.items():
        if name in run_data.versions:
            versions.append((label, run_data.versions[name]))
    meanings = []
    for column in points.columns:
        if column.meaning:
            meanings.append((column.title, _as_sentence(column.meaning)))
    return render_template(
        "page.html",
        counts=run_words.counts(run_data),
        course=run_words.course_of_run(run_data),
        more_rounds=words.more_rounds(answer.more_rounds) if answer.more_rounds else "",
        report=report,
        run=run,
        title=run.job_name,
        versions=versions,
        facts_line=run_words.facts_of_first_screen(run_data),
        trained=run_words.model(run_data),
        layout=_layout_class(first_figure.panels) if first_figure else "",
        first=first_figure,
        why_none=why_no_figure(run_data),
        figures=other_figures(data, first_figure),
        points=points,
        meanings=meanings,
        # The page has its own table of the points, which can be sorted.
        sections_with_tables=[table for table in report.tables if table[0].anchor != "points"],
        facts=[(name, text) for name, text in facts.items() if text],
        devices=device_table(data.devices),
        job_lines=formatting.plain_lines(run.job_text),
    )


def _layout_class(panels: Sequence[Panel]) -> str:
    """Return the CSS class that places the charts of the first screen."""
    if len(panels) == 1:
        return "single"
    # Charts are below each other if all of them fit one screen.
    height_px = sum(panel.height + _AROUND_PX for panel in panels)
    return "stacked" if height_px <= _SCREEN_PX else "broad"


def format_comparison(comparison: Comparison) -> str:
    """Return the page of a comparison as HTML."""
    blocks = list(replace(comparison, is_short=False).blocks())
    lines = [block for block in blocks if isinstance(block, Line)]
    tables = [block for block in blocks if isinstance(block, Table)]
    runs = [line for line in lines if line.text in comparison.runs]
    return render_template(
        "comparison.html",
        title=comparison.title,
        name=f"{comparison.new[-1].job_name}: compared",
        runs=runs,
        lead=comparison.answer[0],
        lines=[line for line in lines if line not in runs and line.text != comparison.answer[0]],
        environment=environment(comparison.changes),
        notes=legend_paragraphs(tables),
        listings=[block for block in blocks if isinstance(block, Listing)],
        tables=tables,
        figures=change_figures(comparison),
        version=__version__,
    )


def format_gate(report: GateReport) -> str:
    """Return the page of a gate as HTML."""
    verdict = report.verdict
    return render_template(
        "comparison.html",
        title=report.title,
        name=f"{verdict.gate.job.stem}: old and new in turns",
        runs=[Line(text=text) for text in report.sides],
        lead=report.answer[0],
        # The last remark says what else the machine did.
        lines=[Line(text=text) for text in (*report.answer[1:], *report.remarks[:-1])],
        environment=report.remarks[-1],
        notes=legend_paragraphs([report.table]) if report.points else (),
        listings=[block for block in report.blocks() if isinstance(block, Listing)],
        tables=[report.table] if report.points else [],
        figures=gate_figures(report),
        version=__version__,
    )


def render_template(template: str, **values: Any) -> str:
    """Return the HTML of a template, with the style, script and policy of all pages.

    Args:
        template: the name of a file in html/.
        values: the other names that the template uses; they are escaped, except Markup.
    """
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "draw": _drawn,
        "texts": _leading_text_columns,
        "breaks": _with_breaks,
        "capital": _as_sentence,
        "code": _with_code,
    }
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash_source(style)}; script-src {_hash_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    shared = {"policy": Markup(policy), "style": Markup(style), "script": Markup(script)}
    return environment.get_template(template).render(**shared, **values)


def _hash_source(text: str) -> str:
    """Return the entry of a Content-Security-Policy that allows this style or script."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest())
    return f"'sha256-{digest.decode()}'"


def _finalized(value: Any) -> str:
    """Return a value on one line without control characters; Markup stays unchanged."""
    return value if isinstance(value, Markup) else formatting.one_line(str(value))


def _drawn(panel: Panel, figure: Figure) -> Markup:
    """Return a panel as SVG; its name for screen readers includes the title of the figure."""
    name = ": ".join(filter(None, (figure.title, panel.title)))
    return Markup(draw(panel, name))


def _leading_text_columns(table: Table) -> int:
    """Return the number of text columns before the first column of numbers, at most 9."""
    leading = takewhile(lambda column: column.is_text, table.columns)
    return min(len(list(leading)), _MOST_TEXT_COLUMNS)


def _with_code(text: str) -> Markup:
    """Return a text whose parts in backticks are code; `5 %` is never folded."""
    with_code = _QUOTED.sub(r"<code>\1</code>", str(escape(formatting.one_line(text))))
    return Markup(_PERCENT.sub("\\1\u00a0%", with_code))


def _with_breaks(text: str, most_whole: int = 0) -> Markup:
    """Return a text in which words of more than `most_whole` letters may fold after = or _."""
    words = []
    for word in formatting.one_line(text).split(" "):
        escaped = str(escape(word))
        may_fold = len(word) > most_whole
        words.append(_FOLD_AFTER.sub(r"\1<wbr>", escaped) if may_fold else escaped)
    return Markup(" ".join(words))


def _as_sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def _asset(name: str) -> str:
    """Return the text of a file in html/."""
    return resources.files("raybench.report").joinpath("html", name).read_text(encoding="utf-8")


# Column of the table `devices` -> its heading.
_DEVICE_HEADINGS = {
    "host": "host",
    "index": "index",
    "name": "model",
    "memory_bytes": "memory",
    "driver_version": "driver",
    "sm_clock_max_mhz": "SM clock at most, MHz",
    "power_cap_w": "power limit, W",
    "pcie_link": "PCIe",
    "numa_node": "NUMA",
    "cpu_count": "usable CPU cores",
    "omp_num_threads": "OMP threads",
    "uuid": "UUID",
}


def device_table(devices: pd.DataFrame) -> Table:
    """Return the table of devices, sorted by host and index, without empty columns."""
    names = [name for name in _DEVICE_HEADINGS if name in devices]
    ordered = devices.sort_values(["host", "index"]) if len(devices) else devices

    def value_text(name: str, device: Mapping[Any, Any]) -> str:
        value = device[name]
        if not formatting.has_value(value):
            return ""
        if name.endswith("_bytes"):
            return formatting.size(float(value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    columns: list[ColumnOf[Any]] = []
    for name in names:
        shown_column = ShownColumn(title=_DEVICE_HEADINGS[name], is_text=True)
        columns.append((shown_column, partial(value_text, name)))
    return make_table(ordered[names].to_dict("records"), columns)


def _point_table(rows: Sequence[ScaledRow], answer: RunAnswer) -> Table:
    """Return the table of all points, with tooltips and values to sort by."""
    data = answer.data
    metrics = dict.fromkeys((*SCALING.metrics, *RATES.metrics, *workload_metrics(rows)))
    placeholders = run_words.placeholder_texts(data, answer.asked)
    width_meaning = "half of the 95 % interval of the step time, relative to it. "
    # Settings of names come before settings of numbers.
    settings = sorted(varying(rows), key=lambda name: is_numeric(rows, name))
    columns: list[ColumnOf[ScaledRow]] = [
        (
            ShownColumn(title="point", is_text=True, meaning="for `raybench show RUN POINT`"),
            lambda row: str(row.point_id),
        ),
        *(_setting_column(rows, name, data.ranks) for name in settings),
        (ShownColumn(title="step", meaning=run_words.step_meaning(data)), _step_cell),
        (
            ShownColumn(title="±", meaning=width_meaning + run_words.plus_minus(data)),
            lambda row: _sortable_cell(step_uncertainty(row), half_width, digits=4),
        ),
        (
            ShownColumn(title=MARKS_TITLE, meaning=run_words.marks_meaning(data)),
            lambda row: Cell(text=marks(row), hint="; ".join(map(mark_words, marks(row)))),
        ),
        *(_metric_column(metric, placeholders) for metric in metrics),
    ]
    return make_table(rows, columns)


def _sortable_cell(value: float | None, to_text: Callable[[float], str], digits: int) -> Cell:
    """Return a cell that is sorted by `digits` digits of its value; an empty cell for None."""
    if value is None:
        return Cell(text="")
    return Cell(text=to_text(value), sort=f"{value:.{digits}g}")


def _setting_column(
    rows: Sequence[ScaledRow], name: str, ranks_heading: str
) -> ColumnOf[ScaledRow]:
    """Return the column of a setting; sizes are sorted by their bytes.

    Args:
        ranks_heading: heading of the column of `world_size`.
    """
    [(column, make_plain_cell)] = setting_columns(rows, [name], ranks_heading)

    def cell(row: ScaledRow) -> Cell:
        value = setting_of(row, name)
        # The text `4 KiB` is not sorted as a number.
        sort = str(value) if name.endswith("_bytes") and value is not None else ""
        return Cell(text=text_of(make_plain_cell(row)), sort=sort)

    return column, cell


def _step_cell(row: ScaledRow) -> Cell:
    """Return the step time of a point, or its status with the error as tooltip."""
    if row.status == "ok":
        return _sortable_cell(row.step_ms_p50, formatting.duration, digits=6)
    hint = cut_end(failure_of_row(row), _HINT_CHARS)
    return Cell(text=formatting.STATUS_WORDS[row.status], hint=hint)


def _metric_column(metric: Metric, placeholders: dict[str, str]) -> ColumnOf[ScaledRow]:
    """Return the column of a metric; shares and speed-ups have more digits to sort by than to show.

    Args:
        placeholders: placeholder in the meaning of the metric -> text.
    """
    # The value that means 100 %; None for metrics that are no shares.
    hundred_percent = {"share": 1.0, "percent": 100.0}.get(metric.format)

    def value_cell(row: ScaledRow) -> Cell:
        value = value_of(row, metric)
        text = formatting.metric(metric, value)
        # As a share of 1, whatever the unit of the metric.
        sort = f"{value / hundred_percent:.5g}" if text and hundred_percent else ""
        return Cell(text=text, sort=sort)

    def speed_up_cell(row: ScaledRow) -> Cell:
        if row.speed_up is None and row.why is not None:
            return Cell(text="–", hint=not_compared_words(row.why))
        return _sortable_cell(row.speed_up, lambda _: speed_up_words(row), digits=6)

    column = metric_column(metric, formatting.MILLISECONDS, placeholders, None)
    return column, speed_up_cell if metric.name == "speed_up" else value_cell
