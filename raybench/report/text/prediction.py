"""Predictions as text: for a terminal, as Markdown, and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from raybench.analysis.settings import EXECUTION
from raybench.report.export import as_json
from raybench.report.prediction import Forecast
from raybench.report.text import markdown, terminal
from raybench.report.text.markdown import escape
from raybench.report.text.terminal import WIDTH, line, render

_OF_POINT = ("point_id", "workload", "params", *EXECUTION, "batch_size", "device_name")
_TIMES = ("step_ms", "step_ms_low", "step_ms_high", "comm_exposed_ms", "speed_up")
_SHARES = ("efficiency", "efficiency_low", "efficiency_high")


def format_terminal(forecast: Forecast, *, width: int = WIDTH, color: bool = False) -> str:
    """Write the predictions for a terminal."""
    blocks = terminal.lay_out(forecast.blocks)
    return render([line(forecast.title, "bold"), *blocks], width, color)


def format_markdown(forecast: Forecast) -> str:
    """Write the predictions, to be read in a pull request."""
    return markdown.join([f"## {escape(forecast.title)}", *markdown.lay_out(forecast.blocks)])


def format_json(forecast: Forecast) -> str:
    """Write the predictions for other programs.

    Members: run, assumptions, left_out (reasons), predictions: the settings of each point, its id
    and measured_world_size, and what is predicted at its world_size.
    """
    return as_json.format_object(
        run=asdict(forecast.run),
        assumptions=forecast.assumptions,
        left_out=list(forecast.left_out),
        predictions=[
            {
                **{name: one.measured[name] for name in _OF_POINT},
                "measured_world_size": one.measured["world_size"],
                "baseline_world_size": one.base_world,
                "world_size": one.world_size,
                **{name: getattr(one, name) for name in (*_TIMES, *_SHARES)},
            }
            for one in forecast.predictions
        ],
    )
