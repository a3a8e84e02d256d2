"""What a scaling report comes to: per compared setting the least and the most speed-up, and what
the steps of the most ranks lose to not being alone.

Pure, over the rows of `raybench.analysis.scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raybench.analysis.losses import LOSSES
from raybench.analysis.settings import setting, setting_order, varying
from raybench.report import formatting
from raybench.results.quality import is_slowed_by_one_rank

CAUSES = {
    "lost_comm": "exposed communication",
    "lost_compute": "slower compute",
    "lost_wait": "waiting for the slowest rank",
    "lost_data": "waiting for data",
    "lost_host": "waiting for the host",
    "lost_unexplained": "unexplained",
}

# Less than this share of a step in every point is not worth a line.
_LEAST_SHARE = 0.01

Row = Mapping[str, Any]


def findings(
    rows: Sequence[Row], baseline: Mapping[str, Any], ranks: str
) -> tuple[tuple[str, str], ...]:
    """List (what is compared with the baseline, its speed-ups), ordered by what is compared."""
    compared: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows_compared(rows):
        compared.setdefault(tuple(setting(row, name) for name in baseline), []).append(row)
    apart = varying([row for members in compared.values() for row in members], baseline)
    ordered = sorted(compared, key=lambda values: [setting_order(value) for value in values])
    return tuple(
        (
            _label(dict(zip(baseline, values, strict=True)), ranks),
            _range(compared[values], apart, ranks),
        )
        for values in ordered
    )


def losses(
    rows: Sequence[Row], baseline: Mapping[str, Any], ranks: str
) -> tuple[tuple[str, str], ...]:
    """List (the most ranks, the shares of their steps that are lost, by cause); empty where no
    cause was measured, and where the baseline does not name world_size.
    """
    found = with_most_ranks(rows) if "world_size" in baseline else []
    if not any(has_causes(row) for row in found):
        return ()
    whom = _whom(found)
    spans = ((name, _span([row[name] for row in found])) for name in LOSSES)
    told = [
        f"{span} {whom if name == 'lost_wait' else CAUSES[name]}" for name, span in spans if span
    ]
    return ((f"{found[0]['world_size']} {ranks}", ", ".join(told)),) if told else ()


def with_most_ranks(rows: Sequence[Row]) -> list[Row]:
    """Select what is compared on the largest number of ranks."""
    compared = rows_compared(rows)
    most = max((row["world_size"] for row in compared), default=0)
    return [row for row in compared if row["world_size"] == most]


def rows_compared(rows: Sequence[Row]) -> list[Row]:
    """Select what has a speed-up, but for the baseline points."""
    return [r for r in rows if formatting.has_value(r["speed_up"]) and not r["is_baseline"]]


def has_causes(row: Row) -> bool:
    """Whether anything is known of what the step is lost to."""
    return any(formatting.has_value(row[name]) for name in LOSSES[:-1])


def _whom(rows: Sequence[Row]) -> str:
    slowest = {row["slowest_rank"] for row in rows if is_slowed_by_one_rank(row)}
    return f"waiting for rank {slowest.pop():.0f}" if len(slowest) == 1 else CAUSES["lost_wait"]


def _span(shares: Sequence[float]) -> str:
    known = [share for share in shares if formatting.has_value(share)]
    if not known or max(map(abs, known)) < _LEAST_SHARE:
        return ""
    least, most = (formatting.percent(choose(known)) for choose in (min, max))
    return most if least == most else f"{least} to {most}"


def _label(settings: Mapping[str, Any], ranks: str) -> str:
    if tuple(settings) == ("world_size",):
        return f"{settings['world_size']} {ranks}"
    return formatting.settings(settings)


def _range(rows: Sequence[Row], apart: Sequence[str], ranks: str) -> str:
    least, most = (choose(rows, key=lambda row: row["speed_up"]) for choose in (min, max))
    told = [_speed_up(least, apart, ranks), _speed_up(most, apart, ranks)]
    return (told[1] if len(rows) == 1 else " to ".join(told)) + memory_range(rows)


def memory_range(rows: Sequence[Row]) -> str:
    """`; 71.8% to 96.3% of its memory`, where it is not the number of ranks that is compared."""
    known = [row["memory_ratio"] for row in rows if formatting.has_value(row["memory_ratio"])]
    if not known or any(formatting.has_value(row["efficiency"]) for row in rows):
        return ""
    least, most = formatting.percent(min(known)), formatting.percent(max(known))
    return f"; {least if least == most else f'{least} to {most}'} of the memory"


def plus_minus(row: Row) -> float | None:
    """Half of the interval of a speed-up, over it; None where it is not known."""
    low, high = row["speed_up_low"], row["speed_up_high"]
    return (high - low) / 2 / row["speed_up"] if formatting.has_value(low) else None


def _speed_up(row: Row, apart: Sequence[str], ranks: str) -> str:
    sure = plus_minus(row)
    efficiency, serial = formatting.percent(row["efficiency"]), row["serial_fraction"]
    told = (
        f"{formatting.ratio(row['speed_up'])}x"
        + ("" if sure is None else f" {formatting.half_width(sure)}")
        + (f", {efficiency} efficiency" if efficiency else "")
        + (
            f", {formatting.percent(serial)} serial fraction"
            if formatting.has_value(serial)
            else ""
        )
    )
    where = formatting.settings_words(row, apart, ranks)
    return f"{told} ({where})" if where else told
