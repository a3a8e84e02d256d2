"""Points as panels of lines: which settings tell the panels apart, and which the lines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.analysis.settings import OPTIONAL, batch_column, setting, setting_order, varying
from raybench.report import formatting, plain_text
from raybench.report.charts.figure import MOST_LINES, MOST_PANELS

Row = Any

# Up to so many lines are told apart in one panel.
_LINES_OF_A_LONE_PANEL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Rows of points as panels and lines.

    panels: title -> the (line, row) in it; the panels that are drawn. lines: of all panels, in
    order. left_out, lines_left_out: how many more panels and lines there are.
    """

    panels: Mapping[str, Sequence[tuple[str, Row]]]
    lines: Sequence[str]
    left_out: int
    lines_left_out: int


def arrange(
    rows: Sequence[Row], *, over: Collection[str], lines_by: Sequence[str], ranks: str
) -> Series:
    """Arrange points as panels and lines.

    over: settings along the axis, and those that tell nothing. lines_by: settings that tell lines
    from each other; the others that vary tell the panels.
    """
    ordered = in_order(rows, over)
    apart = varying(ordered, over)
    of_lines = [name for name in apart if name in lines_by]
    of_panels = [name for name in apart if name not in lines_by]
    combinations = {tuple(str(setting(row, name)) for name in apart) for row in ordered}
    if len(combinations) <= _LINES_OF_A_LONE_PANEL:
        of_lines, of_panels = apart, []
    found: dict[str, list[tuple[str, Row]]] = {}
    for row in ordered:
        title = formatting.settings_words(row, of_panels, ranks)
        found.setdefault(title, []).append((line_name(row, of_lines, ranks), row))
    by_size = sorted(ordered, key=lambda row: [setting_order(setting(row, n)) for n in of_lines])
    lines = dict.fromkeys(line_name(row, of_lines, ranks) for row in by_size)
    drawn = list(lines)[:MOST_LINES]
    panels = {
        title: [(line, row) for line, row in members if line in drawn]
        for title, members in list(found.items())[:MOST_PANELS]
    }
    return Series(
        panels=panels,
        lines=drawn,
        left_out=max(0, len(found) - MOST_PANELS),
        lines_left_out=len(lines) - len(drawn),
    )


def line_name(row: Row, names: Sequence[str], ranks: str) -> str:
    """Name the line of a point: its settings, or the workload where none varies."""
    return formatting.settings_words(row, names, ranks) or plain_text.plain(row["workload"])


def in_order(rows: Sequence[Row], last: Collection[str] = ()) -> list[Row]:
    """By their settings; those of `last` vary fastest."""
    names = sorted(telling_settings(rows), key=lambda name: name in last)
    return sorted(rows, key=lambda row: [setting_order(setting(row, name)) for name in names])


def telling_settings(rows: Sequence[Row]) -> list[str]:
    """List the settings that are needed to tell the rows apart.

    Small messages are replayed from a graph and large ones not, but their size tells them apart.
    """
    names = varying(rows)
    rest = [name for name in names if name not in OPTIONAL]
    is_enough = len({tuple(str(setting(row, n)) for n in rest) for row in rows}) == len(rows)
    return rest if is_enough else names


def is_other(row: Row) -> bool:
    """Whether it is of the run that this one is laid over."""
    return bool(row.get("other"))


def named(row: Row, names: Sequence[str], ranks: str) -> str:
    """Write a point as the tip of its mark begins: its settings, and its id."""
    of = " of the other run" if is_other(row) else ""
    return f"{formatting.settings_words(row, names, ranks)}\npoint {row['point_id']}{of}".strip()


def missing(
    members: Sequence[tuple[str, Row]],
    is_drawn: Callable[[Row], bool],
    over: Sequence[str],
    ranks: str,
) -> str:
    """Say what a panel does not show, and why, as in `Not drawn: batch 256: out of memory`."""
    lines = dict.fromkeys(line for line, _ in members)
    reasons: dict[str, list[str]] = {}
    for line in lines:
        own = [row for found, row in members if found == line and not is_other(row)]
        lacking = [row for row in own if not is_drawn(row)]
        for why in dict.fromkeys(_why(row) for row in lacking):
            rows = [row for row in lacking if _why(row) == why]
            places = (formatting.settings_words(row, over, ranks) for row in rows)
            where = "" if len(lacking) == len(own) else ", ".join(places)
            name = line if len(lines) > 1 or not where else ""
            reasons.setdefault(why, []).append(", ".join(filter(None, (name, where))))
    text = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    return f"Not drawn: {text}." if text else ""


def _why(row: Row) -> str:
    if row["status"] != "ok":
        return formatting.STATUS_WORDS[row["status"]]
    return plain_text.plain(row["why"]) if formatting.has_value(row["why"]) else "was not measured"


def batch_title(rows: Sequence[Row]) -> str:
    """Name what the batch of these rows counts."""
    found = {batch_column(row) for row in rows}
    return "global batch size" if found == {"global_batch_size"} else "batch size per device"


def lines_of(series: Series, is_drawn: Callable[[Row], bool]) -> list[str]:
    """Select the lines of which anything is drawn."""
    used = {line for found in series.panels.values() for line, row in found if is_drawn(row)}
    return [line for line in series.lines if line in used]


def drawing_note(series: Series) -> str:
    """Say where not all is drawn."""
    counts = (
        (len(series.panels), series.left_out, "charts"),
        (len(series.lines), series.lines_left_out, "lines of a chart"),
    )
    phrases = [f"{shown} of {shown + more} {noun}" for shown, more, noun in counts if more]
    return (
        f" The first {' and '.join(phrases)} are drawn; the table of the points has all."
        if phrases
        else ""
    )
