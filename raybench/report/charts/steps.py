"""How step times are spread: over the iterations of each point, and over ranks and iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raybench.analysis.step_times import join_rounds, rank_by_iteration, step_times
from raybench.report import formatting
from raybench.report.charts.bars import MOST_BARS, bar_panels, first_of
from raybench.report.charts.figure import (
    TIP,
    Entry,
    Figure,
    Panel,
    Spec,
    Table,
    Value,
    specification,
)
from raybench.report.charts.series import Row, in_order, telling_settings
from raybench.report.summary import Summary

# Cells of all heat maps together: each is an element of the page.
_MOST_CELLS = 1_200
_MOST_MAPS = 4
_MOST_RANKS = 64
_MOST_COLUMNS = 60
_PERCENTILES = (5, 25, 50, 75, 95)
# Differences from the median at which the colour of a cell changes, and the colours.
_STEPS = (-0.1, -0.03, -0.01, 0.01, 0.03, 0.1)
_HEAT = tuple(f"var(--h{place})" for place in range(1, len(_STEPS) + 2))
_HEAT_WORDS = (
    "10 % faster or more",
    "3 to 10 % faster",
    "1 to 3 % faster",
    "within 1 %",
    "1 to 3 % slower",
    "3 to 10 % slower",
    "10 % slower or more",
)
# Differences up to about this are drawn in proportion, larger ones by their logarithm.
_NEAR = 0.002
_TICKS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSteps:
    """The samples of one point, of all rounds.

    times_ms: step times in milliseconds, by round. by_rank: as `rank_by_iteration` has them, where
    they are to be drawn by rank.
    """

    row: Row
    times_ms: Sequence[NDArray[np.float64]]
    by_rank: pd.DataFrame | None

    @classmethod
    def of_rounds(
        cls, row: Row, samples: Sequence[pd.DataFrame], columns: int | None
    ) -> PointSteps:
        """Take them from the table `samples`, a frame a round; columns: of a map by rank."""
        by_rank = None if columns is None else rank_by_iteration(join_rounds(samples), columns)
        return cls(row=row, times_ms=[step_times(one) for one in samples], by_rank=by_rank)


def spread_points(rows: Sequence[Row]) -> list[Row]:
    """Select the points whose step times are drawn: all, or those that are spread most."""
    ok = [row for row in rows if row["status"] == "ok" and formatting.has_value(row["step_ms_p50"])]
    widest = sorted(ok, key=_spread, reverse=True)[:MOST_BARS]
    return in_order(widest, ("batch", "world_size"))


def heat_points(rows: Sequence[Row]) -> list[Row]:
    """Select the points that are drawn by rank and iteration.

    Of those with most ranks, the ones whose ranks differ or whose steps vary most.
    """
    ok = [row for row in rows if row["status"] == "ok" and row["world_size"] > 1]
    most = max((row["world_size"] for row in ok), default=0)
    ok = [
        row for row in ok if row["world_size"] == most and formatting.has_value(row["step_ms_p50"])
    ]
    return sorted(ok, key=lambda row: (_skew(row), _spread(row)), reverse=True)[:_MOST_MAPS]


def columns_of_a_map(rows: Sequence[Row]) -> int:
    """How many columns a heat map may have where these points are drawn."""
    ranks = sum(min(int(row["world_size"]), _MOST_RANKS) for row in rows)
    return max(8, min(_MOST_COLUMNS, _MOST_CELLS // max(1, ranks)))


def _spread(row: Row) -> float:
    return float((row["step_ms_p95"] - row["step_ms_p50"]) / row["step_ms_p50"])


def _skew(row: Row) -> float:
    known = formatting.has_value(row["skew_ms_p50"])
    return round(row["skew_ms_p50"] / row["step_ms_p50"], 2) if known else 0.0


def spread_figure(
    steps: Sequence[PointSteps], rows: Sequence[Row], summary: Summary
) -> Figure | None:
    """Draw the distribution of the step times; None where there are no samples."""
    ok = [row for row in rows if row["status"] == "ok" and formatting.has_value(row["step_ms_p50"])]
    found = {one.row["point_id"]: one for one in steps if sum(map(len, one.times_ms))}
    shown = [one.row for one in steps if one.row["point_id"] in found]
    if not shown:
        return None
    names = telling_settings(ok)
    cells = [
        [
            str(row["point_id"]),
            formatting.settings_words(row, names, summary.ranks),
            *(cell(row) for _, cell in _COLUMNS),
        ]
        for row in in_order(ok)
    ]
    return Figure(
        anchor="spread",
        title="Spread of the step times",
        note="Differences from the point's median, over iterations of the slowest rank. Box: the "
        "middle half. Line: from the 5th to the 95th percentile. Each chart has a scale of "
        "its own, which is finest around the median. A run of several rounds has a mark more "
        "for the median of each."
        + (" Widest ones:" if len(shown) < len(ok) else "")
        + first_of(len(shown), len(ok)),
        legend=[],
        panels=bar_panels(
            shown,
            summary.ranks,
            lambda row: _spread_values(found[row["point_id"]]),
            _spread_layers,
        ),
        table=Table(
            columns=["point", "settings", *(title for title, _ in _COLUMNS)], rows=cells, texts=2
        ),
    )


def _spread_values(steps: PointSteps) -> list[Value]:
    """Make the marks of one point: of all its rounds, and of the median of each of several."""
    values = np.percentile(np.concatenate(steps.times_ms), _PERCENTILES)
    spread = [float(value / values[2] - 1) for value in values]
    medians = [float(np.median(times)) for times in steps.times_ms if times.size]
    rounds = medians if len(medians) > 1 else []
    names = ("p5", "p25", "p50", "p75", "p95")
    text = ", ".join(
        f"{percentile} %: {value:+.2%}"
        for percentile, value in zip(_PERCENTILES, spread, strict=True)
        if percentile != 50
    )
    tip = f"median {formatting.duration(float(values[2]))}, percentiles\n{text}"
    return [
        {**dict(zip(names, spread, strict=True)), "tip": tip},
        *(
            {
                **dict.fromkeys(names, median / values[2] - 1),
                "tip": f"round {number}: median {formatting.duration(median)}",
            }
            for number, median in enumerate(rounds, 1)
        ),
    ]


def _spread_layers(y: Spec, marks: Sequence[Value]) -> list[Spec]:
    low, high = min(0.0, *(m["p5"] for m in marks)), max(0.0, *(m["p95"] for m in marks))
    domain = [min(low * 1.1, -_NEAR), max(high * 1.1, _NEAR)]
    both = [*(-tick for tick in reversed(_TICKS)), 0, *_TICKS]
    ticks = [tick for tick in both if domain[0] <= tick <= domain[1]]

    def x(field: str) -> Spec:
        return {
            "field": field,
            "type": "quantitative",
            "title": "difference from the median",
            "scale": {"type": "symlog", "constant": _NEAR, "domain": domain, "nice": False},
            "axis": {"format": "+.2~%", "values": ticks},
        }

    return [
        {
            "mark": {"type": "rule", "color": "var(--s1)", "strokeWidth": 1.5, "aria": False},
            "encoding": {"x": x("p5"), "x2": {"field": "p95"}, "y": y},
        },
        {
            "mark": {"type": "bar", "color": "var(--s1)", "stroke": "var(--s1)"},
            "encoding": {"x": x("p25"), "x2": {"field": "p75"}, "y": y, "description": TIP},
        },
        {
            "mark": {"type": "tick", "color": "var(--s2)", "thickness": 2, "aria": False},
            "encoding": {"x": x("p50"), "y": y},
        },
    ]


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("iterations", lambda row: f"{int(row['iterations']):,}"),
    *(
        (f"{title} ms", lambda row, name=name: formatting.number(row[f"step_ms_{name}"]))
        for name, title in (
            ("min", "least"),
            ("p50", "median"),
            ("p90", "p90"),
            ("p95", "p95"),
            ("p99", "p99"),
            ("max", "most"),
            ("std", "std. deviation"),
        )
    ),
)


def heat_figure(steps: Sequence[PointSteps], summary: Summary) -> Figure | None:
    """Ranks by iterations; None where no point with several ranks has samples."""
    mapped = [(one.row, one.by_rank) for one in steps if one.by_rank is not None]
    mapped = [(row, by_rank) for row, by_rank in mapped if not by_rank.empty]
    if not mapped:
        return None
    names = telling_settings([row for row, _ in mapped])
    cells = [
        [formatting.settings_words(row, names, summary.ranks), str(rank), *_rank_cells(times)]
        for row, by_rank in mapped
        for rank, times in zip(by_rank.index, by_rank.to_numpy(), strict=True)
    ]
    return Figure(
        anchor="ranks",
        title="Ranks and iterations",
        note="Each rank's step times against the point's median over all ranks, of the points "
        "with the most ranks that differ most. Where a column stands for several iterations, it "
        "shows the one farthest from the median. Rounds follow each other.",
        legend=[
            Entry(label=word, color=color) for word, color in zip(_HEAT_WORDS, _HEAT, strict=True)
        ],
        panels=[
            Panel(title=formatting.settings_words(row, names, summary.ranks), spec=_map(by_rank))
            for row, by_rank in mapped
        ],
        table=Table(
            columns=["point", "rank", "least ms", "median ms", "most ms"], rows=cells, texts=1
        ),
    )


def _rank_cells(times_ms: NDArray[np.float64]) -> list[str]:
    known = times_ms[~np.isnan(times_ms)]
    found = (known.min(), np.median(known), known.max()) if known.size else (float("nan"),) * 3
    return [formatting.number(float(value)) for value in found]


def _map(by_rank: pd.DataFrame) -> Spec:
    drawn = by_rank.iloc[:_MOST_RANKS]
    median = float(np.nanmedian(by_rank.to_numpy()))
    firsts = [int(first) for first in drawn.columns]
    ends = [*firsts[1:], firsts[-1] + max(1, firsts[-1] - firsts[-2] if len(firsts) > 1 else 1)]
    values = [
        {
            "x": first,
            "x2": end,
            "rank": int(rank),
            "ratio": round(float(time_ms) / median - 1, 4),
            "tip": f"rank {rank}, iteration {first + 1}{f' to {end}' if end - first > 1 else ''}\n"
            f"{formatting.duration(float(time_ms))}, {time_ms / median - 1:+.1%}",
        }
        for rank, times_ms in zip(drawn.index, drawn.to_numpy(), strict=True)
        for first, end, time_ms in zip(firsts, ends, times_ms, strict=True)
        if time_ms == time_ms
    ]
    # A row for each rank, as high as the panel allows.
    height = min(400, max(100, 24 * len(drawn)) + 48)
    return specification(values, [_heat_layer(drawn, firsts[0], ends[-1])], height=height)


def _heat_layer(drawn: pd.DataFrame, first: int, end: int) -> Spec:
    ranks = [int(rank) for rank in drawn.index]
    shown: Mapping[str, Any] = {"values": ranks[:: max(1, len(ranks) // 8)]}
    return {
        "mark": {"type": "rect", "stroke": None},
        "encoding": {
            "x": {
                "field": "x",
                "type": "quantitative",
                "title": "iteration",
                "scale": {"domain": [first, end], "nice": False, "zero": False},
                "axis": {"grid": False, "tickMinStep": 1},
            },
            "x2": {"field": "x2"},
            "y": {
                "field": "rank",
                "type": "ordinal",
                "title": "rank",
                "axis": {**shown, "ticks": False, "domain": False},
            },
            "color": {
                "field": "ratio",
                "type": "quantitative",
                "scale": {"type": "threshold", "domain": list(_STEPS), "range": list(_HEAT)},
                "legend": None,
            },
            "description": TIP,
        },
    }
