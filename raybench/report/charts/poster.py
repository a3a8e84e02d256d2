"""A figure as a file of its own: its charts, put together as one SVG.

Its colours follow the reader's theme where the reader has one (a browser does); elsewhere, and as
PNG, it is light.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources

import pandas as pd

from raybench.report import plain_text
from raybench.report.charts.figure import WIDE, WIDTH, Entry, Figure, Panel
from raybench.report.charts.figures import main_figure, rows_of
from raybench.report.charts.svg import draw, key_mark
from raybench.report.summary import Summary

_MARGIN, _GAP, _LINE = 16, 20, 18
# How wide a character is at most, to break lines and to place the entries of a legend.
_CHAR = 6.4
_COLOR = re.compile(r"(--[a-z]+\d?): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")
_USED = re.compile(r"var\((--[a-z]+\d?)\)")
_FONT = "Arial, Liberation Sans, Helvetica, sans-serif"


def picture(summary: Summary, devices: pd.DataFrame, kind: str) -> bytes | None:
    """Draw the main figure of the run as `svg` or `png`; None where there is none."""
    figure = main_figure(rows_of(summary), summary, devices)
    if figure is None:
        return None
    title = f"{figure.title} ({plain_text.plain(summary.run.job_name)})"
    return draw_poster(figure, kind, title=title, below=_machine_line(summary))


def draw_poster(figure: Figure, kind: str, *, title: str = "", below: str = "") -> bytes:
    """Draw a figure as `svg` or `png`; a PNG has two pixels for each of the layout.

    title: instead of the figure's. below: a line under it.
    """
    svg = _compose(figure, title or figure.title, below)
    style = resources.files("raybench.report.html").joinpath("page.css").read_text("utf-8")
    colors = {name: (light, dark) for name, light, dark in _COLOR.findall(style)}
    light = _USED.sub(lambda found: colors[found[1]][0], svg)
    if kind == "png":
        import vl_convert

        return bytes(vl_convert.svg_to_png(light, scale=2))
    return light.replace("<defs/>", _dark(svg, colors), 1).encode()


def _dark(svg: str, colors: Mapping[str, tuple[str, str]]) -> str:
    """Write the colours for a dark theme, which stand above those that the elements have."""
    used = [colors[name] for name in dict.fromkeys(_USED.findall(svg))]
    rules = "".join(
        f'[{paint}="{light}"]{{{paint}:{dark}}}'
        for light, dark in used
        for paint in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"


def _compose(figure: Figure, title: str, below: str) -> str:
    """From above: what it is, legend, charts, and what is to be known to read them."""
    columns = min(len(figure.panels), 2 if figure.is_large else 4)
    each = WIDE[0] if figure.is_large else WIDTH
    inner = max(columns * each + (columns - 1) * _GAP, WIDE[0])
    sheet = _Sheet(width=inner)
    sheet.write(title, size=17, weight=600)
    sheet.write(below, color="--quiet")
    sheet.legend(figure.legend)
    for first in range(0, len(figure.panels), columns):
        sheet.charts(figure.panels[first : first + columns], figure, each)
    sheet.write(figure.note, color="--quiet")
    return sheet.svg()


class _Sheet:
    """An SVG that is written from above."""

    def __init__(self, width: int) -> None:
        self._width, self._y, self._parts = width, float(_MARGIN), [""]

    def write(self, text: str, *, size: int = 12, weight: int = 400, color: str = "--text") -> None:
        """Write a paragraph, as wide as the sheet."""
        self._y = self._lines(text, self._y, self._width, size, weight, color, 0) + 6

    def legend(self, entries: Sequence[Entry]) -> None:
        """Keys and labels, as many beside each other as fit."""
        x, y = 0.0, self._y + 12
        for entry in entries:
            needed = 24 + _CHAR * len(entry.label)
            if x and x + needed > self._width:
                x, y = 0.0, y + _LINE
            mark = key_mark(entry.shape, entry.color)
            self._parts.append(
                f'<g transform="translate({x + 7:.0f},{y - 4:.0f})">{mark}</g>'
                + _text(entry.label, x + 18, y, 12, 400, "--text")
            )
            x += needed
        self._y = y + 14 if entries else self._y

    def charts(self, panels: Sequence[Panel], figure: Figure, each: int) -> None:
        """Draw a row of charts with their titles above and what they lack below."""
        top, end = self._y, self._y
        for place, panel in enumerate(panels):
            x, y = place * (each + _GAP), top
            if panel.title:
                y = self._lines(panel.title, y, each, 13, 600, "--text", x) + 4
            height = max(WIDE[1], panel.spec["height"]) if figure.is_large else panel.spec["height"]
            name = ": ".join(filter(None, (figure.title, panel.title)))
            chart = draw(panel.spec, name, (each, height))
            at = f'<svg x="{x}" y="{y:.0f}" width="{each}" height="{height}" overflow="visible" '
            self._parts.append(chart.replace("<svg ", at, 1))
            below = self._lines(panel.missing, y + height, each, 12, 400, "--text", x)
            end = max(end, below)
        self._y = end + 10

    def _lines(
        self, text: str, y: float, width: int, size: int, weight: int, color: str, x: int
    ) -> float:
        """Write at `y`, and the lower end of it."""
        for line in textwrap.wrap(text, max(20, int(width / (_CHAR * size / 12)))):
            y += size + 5
            self._parts.append(_text(line, x, y - 4, size, weight, color))
        return y

    def svg(self) -> str:
        width, height = self._width + 2 * _MARGIN, round(self._y) + _MARGIN
        body = "".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{_FONT}"><defs/>'
            f'<rect width="{width}" height="{height}" fill="var(--page)"/>'
            f'<g transform="translate({_MARGIN},0)">{body}</g></svg>'
        )


def _text(text: str, x: float, y: float, size: int, weight: int, color: str) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}" '
        f'fill="var({color})">{html.escape(text)}</text>'
    )


def _machine_line(summary: Summary) -> str:
    """Machine, versions and run."""
    run, found = summary.run, summary.versions
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "nccl") if name in found)
    return "; ".join(filter(None, (summary.machine, versions, plain_text.plain(run.run_id))))
