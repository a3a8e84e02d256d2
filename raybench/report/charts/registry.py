"""The charts of a report: each module of this folder lists its own in CHARTS.

The page shows all that apply, in the order of their `place`; it begins with the one that answers
the question of the job, which `--chart` draws as a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from raybench.report import charts, formatting, plain_text
from raybench.report.answers import RATIOS
from raybench.report.charts.data import ChartData
from raybench.report.charts.grammar import Figure, draw_figure
from raybench.report.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of a run.

    draw: returns the figure, or None where the chart does not apply to the run. place: in the order
    of the page. answers: in the order in which charts are tried as the first picture; None where
    it never is. is_of_ratios: whether it is the first picture only where the answer is a speed-up.
    is_only_first: whether the chart is shown as the first picture or not at all.
    """

    draw: Callable[[ChartData], Figure | None]
    place: int
    answers: int | None = None
    is_of_ratios: bool = False
    is_only_first: bool = False


@cache
def all_charts() -> tuple[Chart, ...]:
    """Return all charts of this folder, in the order of the page."""
    names = (module.name for module in pkgutil.iter_modules(charts.__path__, f"{charts.__name__}."))
    found = [getattr(importlib.import_module(name), "CHARTS", ()) for name in names]
    return tuple(sorted((one for some in found for one in some), key=lambda one: one.place))


def main_figure(data: ChartData) -> Figure | None:
    """Return the picture that answers the question of the job; None where nothing was measured."""
    is_ratio = data.summary.answer.metric in RATIOS
    usable = (one for one in all_charts() if is_ratio or not one.is_of_ratios)
    tried = sorted((o for o in usable if o.answers is not None), key=lambda one: one.answers or 0)
    return next((figure for one in tried if (figure := one.draw(data))), None)


def other_figures(data: ChartData, first: Figure | None) -> list[Figure]:
    """Return all figures of the page that apply, in its order, without the first picture."""
    drawn = (one.draw(data) for one in all_charts() if not one.is_only_first)
    return [
        figure for figure in drawn if figure and (first is None or figure.anchor != first.anchor)
    ]


def draw_main_figure(data: ChartData, kind: str) -> bytes | None:
    """Return the first picture as the bytes of an `svg` or `png` file; None where there is none."""
    figure = main_figure(data)
    if figure is None:
        return None
    run, found = data.summary.run, data.summary.versions
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "nccl") if name in found)
    machine = (data.summary.machine, versions, plain_text.plain(run.run_id))
    return draw_figure(
        figure,
        kind,
        title=f"{figure.title} ({plain_text.plain(run.job_name)})",
        below="; ".join(filter(None, machine)),
    )


def why_no_figure(summary: Summary) -> str:
    """Return why a run has no first picture, in words that follow `because`."""
    if not summary.rows:
        return "no point of this run has been finished yet"
    ended = dict.fromkeys(formatting.STATUS_WORDS[row.status] for row in summary.rows)
    return f"no point of this run was measured ({', '.join(ended)})"
