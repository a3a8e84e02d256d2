"""The report of a run as one page: it needs nothing beside itself, and asks nobody for anything.

Its policy (Content-Security-Policy) allows the one style and the one script that are in it, by
their hashes, and nothing else: should a text from the results ever come through as markup, it can
still neither run nor fetch. The template escapes all that is not a chart drawn here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from importlib import resources
from itertools import takewhile
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from raybench.report import formatting, plain_text
from raybench.report.blocks import HOW_TO_ADD_ROUNDS, Column, ColumnOf, Table, make_table
from raybench.report.charts.chart import ChartData, main_figure, other_figures, why_no_figure
from raybench.report.charts.grammar import Figure, Panel, draw
from raybench.report.html.points import point_table
from raybench.report.run_report import RunReport
from raybench.report.summary import Summary

# Software that a reader asks for first; the rest is in the environment.
_VERSIONS = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}


def format_page(data: ChartData) -> str:
    """Return the page of a run as HTML."""
    summary = data.summary
    report = RunReport(summary=summary)
    points = point_table(data.rows, summary)
    first = main_figure(data)
    return render(
        "page.html",
        summary=summary,
        report=report,
        run=summary.run,
        title=summary.run.job_name,
        lead=formatting.sentence(report.lead) if report.lead else "",
        how_to_add_rounds=HOW_TO_ADD_ROUNDS,
        versions=[
            (label, summary.versions[name])
            for name, label in _VERSIONS.items()
            if name in summary.versions
        ],
        trained=summary.model,
        key_figures=report.key_figures,
        first=first,
        why_none=why_no_figure(summary),
        figures=other_figures(data, first),
        points=points,
        meanings=[(one.title, _capital(one.meaning)) for one in points.columns if one.meaning],
        # The points have a table of their own, which can be sorted.
        sections_with_tables=[one for one in report.tables if one[0].anchor != "points"],
        facts=[(name, text) for name, text in facts(summary) if text],
        devices=device_table(data.devices),
        job_lines=plain_text.plain_lines(summary.run.job_text),
    )


def render(template: str, **values: Any) -> str:
    """Return a page of a template, with `values` and the style, script and policy of all pages."""
    style, script = _asset("page.css"), _asset("page.js")
    page: str = (
        _environment()
        .get_template(template)
        .render(
            policy=Markup(
                f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
                "base-uri 'none'; form-action 'none'"
            ),
            style=Markup(style),
            script=Markup(script),
            **values,
        )
    )
    return page


def _texts(table: Table) -> int:
    """Return with how many columns of text a table begins, at most 9."""
    found = takewhile(lambda column: column.is_text, table.columns)
    return min(len(list(found)), 9)


def _capital(text: str) -> str:
    """Return a sentence of a text that has neither capital nor full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def _draw(panel: Panel, figure: Figure) -> Markup:
    return Markup(draw(panel, ": ".join(filter(None, (figure.title, panel.title)))))


def _finish(value: Any) -> Any:
    """Return a value for the page; no text in it turns the direction of writing."""
    return value if isinstance(value, Markup) else plain_text.one_line(str(value))


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finish,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"draw": _draw, "texts": _texts, "capital": _capital}
    return environment


def _asset(name: str) -> str:
    return resources.files("raybench.report.html").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


_HEADS = {
    "host": "host",
    "index": "index",
    "name": "model",
    "memory_bytes": "memory",
    "driver_version": "driver",
    "sm_clock_max_mhz": "SM clock at most, MHz",
    "power_cap_w": "power limit, W",
    "pcie_link": "PCIe",
    "numa_node": "NUMA",
    "cpu_count": "CPU cores of the node",
    "omp_num_threads": "OMP threads",
    "uuid": "UUID",
}


def facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each fact about a run; the text of an unknown one is empty."""
    run = summary.run
    yield "run", run.run_id
    yield "started", formatting.when(run.started_at)
    yield "took", formatting.course(run)
    yield "points", summary.counts
    yield "machine", summary.machine
    yield "cluster", run.cluster
    yield "driver ran on", run.host
    yield "command", " ".join(run.argv)
    yield "versions", formatting.versions(summary.versions)
    yield "git commit", run.git_commit or ""
    yield "variables", formatting.settings(run.environment)
    yield "tags", formatting.settings(run.tags)
    shared = (summary.alike, formatting.settings(summary.shared))
    yield "in all points", "; ".join(filter(None, shared))
    yield "job file's SHA-256", run.job_sha256
    yield "nodes lost", ", ".join(summary.lost_nodes)


def device_table(devices: pd.DataFrame) -> Table:
    """Return the table of devices, a row each; columns that are empty for all are left out."""
    used = [name for name in _HEADS if name in devices]
    ordered = devices.sort_values(["host", "index"]) if len(devices) else devices

    def column(name: str) -> ColumnOf[Any]:
        return Column(title=_HEADS[name], is_text=True), lambda row: _cell(name, row[name])

    return make_table(ordered[used].to_dict("records"), map(column, used))


def _cell(name: str, value: object) -> str:
    if not formatting.has_value(value):
        return ""
    if name.endswith("_bytes"):
        return formatting.size(float(str(value)))
    return f"{value:g}" if isinstance(value, float) else str(value)
