"""The one picture that answers the question of a job: what the page and `--chart` show first."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from raybench.report import formatting
from raybench.report.charts.bars import products_figure, times_figure
from raybench.report.charts.batch import memory_figure, throughput_figure
from raybench.report.charts.figure import Figure
from raybench.report.charts.gains import gains_figure
from raybench.report.charts.rates import rate_figures
from raybench.report.charts.scaling import speed_up_figure
from raybench.report.charts.series import Row
from raybench.report.summary import Summary


def rows_of(summary: Summary) -> list[Row]:
    """List the latest attempt at each point, with what was derived."""
    return [*summary.scaling]


def rows_laid_over(summary: Summary, against: Summary | None) -> list[Row]:
    """List the points of a run, and those of another that it is laid over, which say so."""
    others = [] if against is None else rows_of(against)
    return [*rows_of(summary), *({**row, "other": True} for row in others)]


def main_figure(rows: Sequence[Row], summary: Summary, devices: pd.DataFrame) -> Figure | None:
    """None where no point was measured."""
    if summary.largest_batches:
        found = [memory_figure(rows, summary, devices)]
    else:
        found = [
            *rate_figures(rows, summary),
            speed_up_figure(rows, summary),
            gains_figure(rows, summary),
            products_figure(rows, summary),
        ]
    found += [throughput_figure(rows, summary), times_figure(rows, summary)]
    return next((figure for figure in found if figure is not None), None)


def why_none(summary: Summary) -> str:
    """Why there is no picture, for the user."""
    if not summary.scaling:
        return "no point of this run has been finished yet"
    ended = dict.fromkeys(formatting.STATUS_WORDS[row.status] for row in summary.scaling)
    return f"no point of this run was measured ({', '.join(ended)})"
