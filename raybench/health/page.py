"""A health check as one page: verdict, findings, the map of pairs and a strip for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raybench.health.charts import health_figures
from raybench.health.report import HealthReport
from raybench.health.tables import blocks
from raybench.report import formatting
from raybench.report.blocks import Line, Listing, Table
from raybench.report.html.page import device_table, render

if TYPE_CHECKING:
    import pandas as pd


def format_page(report: HealthReport, devices: pd.DataFrame) -> str:
    """Write the whole page. devices: the table of the run."""
    found = list(blocks(report))
    run = report.run
    return render(
        "health.html",
        report=report,
        run=run,
        lines=[one.text for one in found if isinstance(one, Line)],
        cases=[one for one in found if isinstance(one, Listing)],
        figures=health_figures(report),
        tables=[one for one in found if isinstance(one, Table)],
        facts=[
            ("run", run.run_id),
            ("started", formatting.when(run.started_at)),
            ("took", formatting.course(run)),
            ("cluster", run.cluster),
            ("command", " ".join(run.argv)),
            ("versions", formatting.versions(run.versions)),
            ("variables", formatting.settings(run.environment)),
        ],
        devices=device_table(devices),
        course=formatting.course(run),
    )
