"""Charts as SVG that stands in a page: light, without styles of its own, and what it tells kept."""

from __future__ import annotations

import html
import re

from raybench.report.charts.figure import Spec
from raybench.report.plain_text import printable

_VEGA_LITE = "5.21"

# Vega's own words for a screen reader; the chart is one picture with a name, and the table under
# it says the rest.
_ROLES = re.compile(r' (?:role="graphics-[a-z]+"|aria-roledescription="[^"]*")')
_CLASSES = re.compile(r' class="mark-[^"]*"')
_UNSEEN = re.compile(r'<path class="(?:background|foreground)"[^>]*? d="(?:M0,0h0v0h0Z)?"[^>]*?/>')
_GEOMETRY = re.compile(r' (?:transform|d|x2|y2|width|height)="[^"]*"')
_DECIMALS = re.compile(r"(\.\d\d)\d+")
_ROOT = re.compile(r"^<svg [^>]*?(viewBox=\"[^\"]*\")>")
_WITHOUT_MEANING = re.compile(
    r' (?:opacity="1"|font-family="sans-serif"|stroke-width="1"|pointer-events="none")'
)

_KEYS = {
    "circle": "M4,0A4,4,0,1,1,-4,0A4,4,0,1,1,4,0Z",
    "square": "M-4,-4h8v8h-8Z",
    "triangle-up": "M0,-4.5L4.5,4H-4.5Z",
    "diamond": "M0,-5L4,0L0,5L-4,0Z",
    "cross": "M-5,-1.7h3.3v-3.3h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3Z",
    "triangle-down": "M0,4.5L4.5,-4H-4.5Z",
    "triangle-right": "M4.5,0L-4,4.5V-4.5Z",
}
_STROKES = {
    "dash": "M-6,0h3M-1.5,0h3M3,0h3",
    "line": "M-6,0h12",
    "cross-out": "M-4,-4l8,8M4,-4l-8,8",
}


def draw(spec: Spec, name: str, size: tuple[int, int] | None = None) -> str:
    """Draw the chart as an SVG element.

    name: what it is called where it cannot be seen. size: instead of that of the specification.
    """
    import vl_convert

    sized = spec if size is None else {**spec, "width": size[0], "height": size[1]}
    svg = str(vl_convert.vegalite_to_svg(sized, vl_version=_VEGA_LITE))
    # No character of the results turns the direction of writing.
    svg = "\n".join(map(printable, svg.split("\n")))
    for pattern in (_ROLES, _CLASSES, _UNSEEN):
        svg = pattern.sub("", svg)
    svg = _GEOMETRY.sub(lambda found: _DECIMALS.sub(r"\1", found[0]), svg)
    svg = _WITHOUT_MEANING.sub("", svg)
    label = html.escape(printable(name))
    return _ROOT.sub(rf'<svg class="chart" role="img" aria-label="{label}" \1>', svg, count=1)


def key(shape: str, color: str) -> str:
    """Draw the sign of a line in a legend, as an SVG element."""
    mark = key_mark(shape, color)
    return f'<svg class="key" viewBox="-7 -7 14 14" aria-hidden="true">{mark}</svg>'


def key_mark(shape: str, color: str) -> str:
    """Draw the same around the origin, to stand in another picture."""
    if shape in _STROKES:
        return f'<path d="{_STROKES[shape]}" stroke="{color}" stroke-width="2"/>'
    if shape == "hollow":
        return f'<path d="{_KEYS["circle"]}" fill="none" stroke="{color}" stroke-width="1.5"/>'
    return f'<path d="{_KEYS[shape]}" fill="{color}"/>'
