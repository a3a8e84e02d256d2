"""The report of a run as one page: it needs nothing beside itself, and asks nobody for anything.

Its policy (Content-Security-Policy) allows the one style and the one script that are in it, by
their hashes, and nothing else: should a text from the results ever come through as markup, it can
still neither run nor fetch.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import pandas as pd

from raybench.report import best, largest_batches, wording
from raybench.report.html_batch import memory_figure, throughput_figure
from raybench.report.html_environment import environment_section
from raybench.report.html_figure import Figure
from raybench.report.html_parts import parts_figure
from raybench.report.html_rates import rate_figures
from raybench.report.html_scaling import efficiency_figure, speed_up_figure
from raybench.report.html_series import Row
from raybench.report.html_steps import PointSteps, heat_figure, spread_figure
from raybench.report.html_telemetry import telemetry_figure
from raybench.report.html_text import (
    definitions,
    escaped,
    figure,
    folded,
    listed,
    paragraph,
    section,
    table,
)
from raybench.report.said import in_short
from raybench.report.summary import OVER_FP32, Summary
from raybench.report.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """What the page shows besides the summary.

    devices: the table of the run. telemetry: its TELEMETRY_COLUMNS. steps: of the points that
    `html_steps.spread_points` and `heat_points` ask for.
    """

    summary: Summary
    devices: pd.DataFrame
    telemetry: pd.DataFrame
    steps: Sequence[PointSteps]


def rows_of(summary: Summary) -> list[Row]:
    """The latest attempt at each point, with what was derived."""
    return [{str(k): v for k, v in row.items()} for row in summary.scaling.to_dict("records")]


def format_page(data: PageData) -> str:
    """The whole page."""
    summary = data.summary
    figures = _figures(data)
    sections = [
        ("findings", "Findings", _findings(summary)),
        *((one.anchor, one.title, figure(one)) for one in figures),
        ("points", "All points", _points(summary)),
        ("environment", "Environment", environment_section(summary, data.devices)),
    ]
    links = "".join(
        f'<li><a href="#{name}">{escaped(title)}</a></li>' for name, title, _ in sections
    )
    body = "\n".join(content for _, _, content in sections)
    return _document(summary, f"<nav><ul>{links}</ul></nav>\n<main>\n{body}\n</main>")


def _figures(data: PageData) -> list[Figure]:
    """In the order of the page; those without data are left out."""
    summary, rows = data.summary, rows_of(data.summary)
    found = [
        speed_up_figure(rows, summary),
        efficiency_figure(rows, summary),
        throughput_figure(rows, summary),
        memory_figure(rows, summary, data.devices),
        *rate_figures(rows, summary),
        spread_figure(data.steps, rows, summary),
        parts_figure(rows, summary),
        heat_figure(data.steps, summary),
        telemetry_figure(data.telemetry, summary.run.started_at),
    ]
    return [one for one in found if one is not None]


def _findings(summary: Summary) -> str:
    baseline = summary.run.baseline
    largest = largest_batches.said(summary.largest_batches, summary.ranks)
    told = (
        (largest_batches.TITLE, largest),
        (wording.over(baseline), summary.findings),
        (wording.lost(baseline), summary.losses),
        (best.TITLE, summary.best),
        (wording.over(OVER_FP32), summary.precision),
    )
    content = (
        [f'<p class="lead">{escaped(wording.sentence(summary.lead))}</p>'] if summary.lead else []
    )
    content += [f"<h3>{escaped(title)}</h3>{definitions(lines)}" for title, lines in told if lines]
    said = (
        ("Failed and skipped points", summary.failures),
        ("Without speed-up", summary.without_speed_up),
        ("Warnings", summary.warnings),
    )
    for title, all_said in said:
        lines, more = in_short(all_said)
        content.append(listed(title, [lead + text for lead, text in lines] + [more] * bool(more)))
    return section("findings", "Findings", filter(None, content or [paragraph(summary.counts)]))


def _points(summary: Summary) -> str:
    content = [_report_table(one) for one in summary.tables]
    content += [paragraph(text) for text in summary.explanation]
    return section(
        "points", "All points", content or [paragraph("No point has been finished yet.")]
    )


def _report_table(shown: Table) -> str:
    what = f"{shown.workload} {wording.settings(shown.params)}".strip()
    title = ": ".join(filter(None, (what, shown.kind)))
    texts = sum(column in shown.texts for column in shown.columns[: shown.settings])
    return folded(title, table(shown.columns, shown.rows, texts))


def _document(summary: Summary, body: str) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    run = summary.run
    title = wording.plain(run.job_name)
    told = f"{summary.machine}; {wording.when(run.started_at)}, {wording.course(run)}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escaped(title)}: raybench</title>
<style>{style}</style>
</head>
<body>
<header>
<div><h1>{escaped(title)}</h1>
<p>{escaped(told)}<br>{escaped(summary.counts)}<br><code>{escaped(run.run_id)}</code></p></div>
<button type="button" id="theme" hidden>Light or dark</button>
</header>
{body}
<footer><p>Made by raybench {escaped(run.versions.get("raybench", ""))}.</p></footer>
<div id="tip" role="status" hidden></div>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("raybench.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
