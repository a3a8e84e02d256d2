"""The report of a run as one page: it needs nothing beside itself, and asks nobody for anything.

Its policy (Content-Security-Policy) allows the one style and the one script that are in it, by
their hashes, and nothing else: should a text from the results ever come through as markup, it can
still neither run nor fetch. The template escapes all that is not a chart drawn here.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from raybench.report import document, formatting, plain_text
from raybench.report.charts.bars import products_figure
from raybench.report.charts.batch import memory_figure, throughput_figure
from raybench.report.charts.figure import WIDE, Figure, Panel, Table
from raybench.report.charts.figures import main_figure, rows_laid_over, rows_of, why_none
from raybench.report.charts.gains import gains_figure
from raybench.report.charts.parts import parts_figure
from raybench.report.charts.rates import rate_figures
from raybench.report.charts.scaling import efficiency_figure, speed_up_figure
from raybench.report.charts.series import Row, is_other
from raybench.report.charts.steps import PointSteps, heat_figure, spread_figure
from raybench.report.charts.svg import draw, key
from raybench.report.charts.telemetry import telemetry_figure
from raybench.report.document import HOW_TO_ADD_ROUNDS
from raybench.report.html.points import point_table
from raybench.report.key_figures import key_figures
from raybench.report.summary import Summary
from raybench.report.what_ran import what_ran

# A strip that can be pointed at and is not seen.
_STRIP = re.compile(r'<path aria-label="[^"]*" d="[^"]*"/>')
# Software that a reader asks for first; the rest is in the environment.
_VERSIONS = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "driver": "driver"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """What the page shows besides the summary.

    devices: the table of the run. telemetry: its TELEMETRY_COLUMNS. steps: of the points that
    `spread_points` and `heat_points` ask for. against: a run that this one is laid over.
    """

    summary: Summary
    devices: pd.DataFrame
    telemetry: pd.DataFrame
    steps: Sequence[PointSteps]
    against: Summary | None = None


def format_page(data: PageData) -> str:
    """Write the whole page."""
    summary = data.summary
    rows = rows_laid_over(summary, data.against)
    first = main_figure(rows, summary, data.devices)
    figures = [one for one in _figures(data, rows) if first is None or one.anchor != first.anchor]
    own, others = (
        {row["point_id"] for row in rows if is_other(row) == of_other} for of_other in (False, True)
    )
    return render(
        "page.html",
        summary=summary,
        run=summary.run,
        title=plain_text.plain(summary.run.job_name),
        lead=formatting.sentence(summary.lead) if summary.lead else "",
        how_to_add_rounds=HOW_TO_ADD_ROUNDS,
        versions=[
            (label, summary.versions[name])
            for name, label in _VERSIONS.items()
            if name in summary.versions
        ],
        against=data.against,
        shares_points=not own.isdisjoint(others),
        trained=what_ran(rows_of(summary), summary.ranks),
        key_figures=key_figures(summary, rows_of(summary)),
        first=first,
        why_none=why_none(summary),
        figures=figures,
        points=point_table(rows, summary, data.against.run.run_id if data.against else ""),
        marks=formatting.MARKS,
        uneven=plain_tables(summary.uneven_tables),
        scopes=plain_tables(summary.scope_tables),
        ranks=plain_tables(summary.rank_tables),
        regions=plain_tables(summary.region_tables),
        facts=[(name, text) for name, text in facts(summary) if text],
        devices=device_table(data.devices),
        job_lines=plain_text.plain_lines(summary.run.job_text),
    )


def render(template: str, **values: Any) -> str:
    """Fill a template of a page, which has the style, the script and the policy beside `values`."""
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


def _figures(data: PageData, rows: Sequence[Row]) -> list[Figure]:
    """In the order of the page; those without data are left out."""
    summary = data.summary
    found = [
        *rate_figures(rows, summary),
        speed_up_figure(rows, summary),
        efficiency_figure(rows, summary),
        gains_figure(rows, summary),
        products_figure(rows, summary),
        throughput_figure(rows, summary),
        memory_figure(rows, summary, data.devices),
        parts_figure(rows, summary),
        spread_figure(data.steps, rows_of(summary), summary),
        heat_figure(data.steps, summary),
        telemetry_figure(data.telemetry, summary.run.started_at, rows_of(summary), summary.ranks),
    ]
    return [one for one in found if one is not None]


def plain_tables(tables: Sequence[document.Table]) -> list[tuple[str, Table]]:
    """List each table under what its points have in common."""
    return [
        (one.title, Table(columns=one.columns, rows=one.rows, texts=one.settings + 1))
        for one in tables
    ]


def _charts(panel: Panel, figure: Figure) -> Markup:
    """Draw a chart; where there is room for it, drawn wide too: the style shows one of them."""
    name = ": ".join(filter(None, (figure.title, panel.title)))
    small = draw(panel.spec, name)
    if not figure.is_large:
        return Markup(small)
    if figure.is_wide:
        # Strips that are pointed at are too many to have them twice, and too narrow on a phone.
        small = _STRIP.sub("", small)
    wide = draw(panel.spec, name, (WIDE[0], max(WIDE[1], panel.spec["height"])))
    return Markup(f'<div class="small">{small}</div><div class="large">{wide}</div>')


def _finish(value: Any) -> Any:
    """No character of the results turns the direction of writing."""
    return value if isinstance(value, Markup) else plain_text.printable(str(value))


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finish,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["charts"] = _charts
    environment.filters["key"] = lambda entry: Markup(key(entry.shape, entry.color))
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
    """Names and what is known of each."""
    run = summary.run
    yield "run", run.run_id
    yield "started", formatting.when(run.started_at)
    yield "took", formatting.course(run)
    yield "points", summary.counts
    yield "machine", summary.machine
    yield "cluster", plain_text.plain(run.cluster)
    yield "driver ran on", plain_text.plain(run.host)
    yield "command", plain_text.plain(" ".join(run.argv))
    yield "versions", formatting.versions(summary.versions)
    yield "git commit", plain_text.plain(run.git_commit or "")
    yield "variables", formatting.settings(run.environment)
    yield "tags", formatting.settings(run.tags)
    yield "in all points", formatting.settings(summary.shared)
    yield "job file's SHA-256", run.job_sha256
    yield "nodes lost", ", ".join(summary.lost_nodes)


def device_table(devices: pd.DataFrame) -> Table:
    """List what is known of each device, a row each."""
    used = [name for name in _HEADS if name in devices and devices[name].notna().any()]
    ordered = devices.sort_values(["host", "index"]) if len(devices) else devices
    rows = [[_cell(name, row[name]) for name in used] for row in ordered[used].to_dict("records")]
    return Table(columns=[_HEADS[name] for name in used], rows=rows, texts=len(used))


def _cell(name: str, value: object) -> str:
    if not formatting.has_value(value):
        return ""
    if name.endswith("_bytes"):
        return formatting.size(float(str(value)))
    return f"{value:g}" if isinstance(value, float) else plain_text.plain(value)
