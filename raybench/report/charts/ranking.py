"""Which layout or setting is best: sorted bars with intervals and short names, the best first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from raybench.analysis.settings import is_numeric, number_of, setting
from raybench.report import formatting
from raybench.report.charts.data import ChartData, Row, distinguishing_settings, point_name
from raybench.report.charts.grammar import Figure, Mark, axis, bar_panels
from raybench.report.charts.registry import Chart

_MOST = 12
# Settings by which several devices share the work of a step, and their names in the field.
_DEGREES = {
    **{"dp_replicate": "DDP", "dp_shard": "FSDP", "tp": "TP", "cp": "CP", "pp": "PP"},
    **{"ulysses": "Ulysses", "ring": "ring"},
}
_WORDS = {"compile": "compiled", "activation_checkpointing": "checkpointing"}
# Values that say that something is not used.
_UNUSED = ("none", "false", "off", "1", "")
# Settings that are read along the bars of one panel.
_ALONG = ("batch", "world_size", "size_bytes")


def ranking_figure(data: ChartData) -> Figure | None:
    """Draw the fastest points first; None where they differ in numbers alone, as a batch size."""
    known = data.measured
    names = distinguishing_settings(known)
    rest = [name for name in names if name not in (*_ALONG, "workload")]
    if not any(name in _DEGREES or not is_numeric(known, name) for name in rest):
        return None
    has_rates = all(row.throughput is not None for row in known)
    column = "throughput" if has_rates else "step_ms_p50"
    known.sort(key=lambda row: getattr(row, column), reverse=has_rates)
    bars = [("", short_name(row, names, data), [_mark(row, names, data)]) for row in known[:_MOST]]
    what = "samples per second" if has_rates else "step time"
    note = f"The best first, by {what}. Thin lines: 95 % intervals, where they are known."
    if len(known) > _MOST:
        note += f" The first {_MOST} of {len(known)} points are drawn; the table has all."
    return Figure(
        anchor="ranking",
        title="Samples per second, the most first" if has_rates else "Step time, the least first",
        note=note,
        panels=bar_panels(bars, axis("samples/s", format="~s") if has_rates else axis("ms")),
    )


CHARTS = (Chart(draw=ranking_figure, place=25, answers=60, is_only_first=True),)


def short_name(row: Row, names: Sequence[str], data: ChartData) -> str:
    """Return settings in short, as in `FSDP 2, full checkpointing`, without those that are unused.

    The number of ranks is left out where the layout says it already.
    """
    degrees = {name: number_of(setting(row, name)) or 1 for name in _DEGREES if name in names}
    is_said = degrees and math.prod(degrees.values()) == row.world_size > 1
    words = []
    for name in sorted(names, key=lambda name: name not in (*_DEGREES, "world_size")):
        value = setting(row, name)
        if name == "world_size":
            words += [] if is_said else [formatting.ranks_words(int(value), data.ranks)]
        elif name in degrees:
            words += [f"{_DEGREES[name]} {value}"] if degrees[name] > 1 else []
        elif str(value).lower() == "true":
            words.append(_WORDS.get(name, name))
        elif name in _WORDS:
            words += [] if str(value).lower() in _UNUSED else [f"{value} {_WORDS[name]}"]
        elif str(value).lower() != "false":
            words.append(formatting.settings_words(row, [name], data.ranks))
    return ", ".join(filter(None, words)) or formatting.settings_words(row, names, data.ranks)


def bar_names(rows: Sequence[Row], data: ChartData) -> list[tuple[str, str]]:
    """Return the title of the panel and the name of the bar of each point.

    Batches, numbers of ranks and sizes are read along the bars of a panel, and all other settings
    tell the panels; where that leaves fewer than two bars a panel, there is one panel for all.
    """
    names = distinguishing_settings(rows)
    along = [name for name in names if name in _ALONG]
    rest = [name for name in names if name not in along]
    titles = [formatting.settings_words(row, rest, data.ranks) for row in rows]
    if len(rows) < 2 * len(set(titles)):
        return [("", short_name(row, names, data)) for row in rows]
    bars = [formatting.settings_words(row, along, data.ranks) for row in rows]
    return list(zip(titles, bars, strict=True))


def _mark(row: Row, names: Sequence[str], data: ChartData) -> Mark:
    step_ms, rate = row.step_ms_p50 or 0.0, row.throughput
    tip = f"{point_name(row, names, data.ranks)}\n{formatting.step_time(row)}"
    if rate is not None:
        tip += f", {formatting.number(rate)} samples/s"
    value = step_ms if rate is None else rate
    mark: Mark = {"x": value, "text": formatting.number(value), "tip": tip}
    low, high = row.step_ms_low, row.step_ms_high
    if low and high:
        ends = (low, high) if rate is None else (rate * step_ms / high, rate * step_ms / low)
        mark["low"], mark["high"] = ends
    return mark
