"""How the step times of one point are spread, as bars of text."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from raybench.report import formatting
from raybench.report.text.console import Column, grid, line

Times = NDArray[np.float64]

# Fewer say nothing that their minimum, median and maximum do not say.
_LEAST = 8
_MOST_BARS = 12
_BAR_CHARS = 40
# Of the largest time; nearer ones leave no room for ranges between them.
_SAME = 1e-6
_EIGHTHS = " ▏▎▍▌▋▊▉"
# A few steps that are far slower than the rest would leave one bar for all others.
_FAR_QUARTILES = 4.0


def histogram(times_ms: Times) -> list[RenderableType]:
    """Draw a bar for each of at most 12 equal ranges of step times; empty for fewer than 8 times,
    and where all are the same, to a millionth.

    Times beyond the third quartile by four times the distance of the quartiles share the last bar,
    whose range is wider than the others: each range is shown with both of its ends.
    """
    if len(times_ms) < _LEAST or np.ptp(times_ms) <= _SAME * times_ms.max():
        return []
    is_short = formatting.is_short(float(np.median(times_ms)))
    times = times_ms * 1000 if is_short else times_ms
    starts, ends, counts = _bars(times)
    longest = counts.max()
    digits = _decimals(float(ends[0] - starts[0]))
    rows = [
        [f"{start:,.{digits}f}", f"{end:,.{digits}f}", str(count), _bar(count / longest)]
        for start, end, count in zip(starts, ends, counts, strict=True)
    ]
    unit = "µs" if is_short else "ms"
    columns = [
        *(Column(f"{word} {unit}", side="right") for word in ("from", "to")),
        Column("steps", side="right"),
        Column(""),
    ]
    return [line("Step times, per iteration of the slowest rank", "bold"), grid(columns, rows)]


def _bars(times: Times) -> tuple[Times, Times, NDArray[np.int64]]:
    """Find the lower and upper ends of the ranges, and how many times are in each."""
    first, third = np.percentile(times, [25, 75])
    limit = third + _FAR_QUARTILES * (third - first) if third > first else times.max()
    near, far = times[times <= limit], times[times > limit]
    bars = min(_MOST_BARS, math.ceil(2 * math.sqrt(len(times))))
    counts, edges = np.histogram(near, bins=bars)
    if not len(far):
        return edges[:-1], edges[1:], counts
    return (
        np.append(edges[:-1], far.min()),
        np.append(edges[1:], far.max()),
        np.append(counts, len(far)),
    )


def _decimals(step: float) -> int:
    """So many that the ends of neighbouring ranges differ."""
    return max(0, 1 - math.floor(math.log10(step)))


def _bar(share: float) -> str:
    """Never empty where there is anything."""
    eighths = math.ceil(share * _BAR_CHARS * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
