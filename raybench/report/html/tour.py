"""A tour of several questions as one page: each with its answer, its picture and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raybench.report.blocks import legend_paragraphs
from raybench.report.charts.data import ChartData
from raybench.report.charts.registry import main_figure, why_no_figure
from raybench.report.html.page import render
from raybench.report.tour import NOTE, Answer


def format_page(answers: Sequence[Answer]) -> str:
    """Write the whole page, of one answer at least."""
    last = answers[-1].summary
    return render(
        "tour.html",
        machine=last.machine,
        answers=[_section(answer) for answer in answers],
        note=NOTE,
        version=last.run.versions.get("raybench", ""),
    )


def _section(answer: Answer) -> dict[str, Any]:
    summary = answer.summary
    data = ChartData(summary=summary, devices=answer.devices)
    found = dict((section.anchor, tables) for section, tables in answer.report.tables)
    tables = found.get("points", [])
    return {
        "anchor": answer.template,
        "question": answer.question,
        "lead": answer.lead,
        "trained": summary.model,
        "key_figures": answer.report.key_figures,
        "figure": main_figure(data),
        "why_none": why_no_figure(summary),
        "tables": tables,
        "explanations": list(legend_paragraphs(tables)),
        "commands": answer.commands,
    }
