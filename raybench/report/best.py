"""The precision and batch size with the most samples/s, and with the most per watt, in words. Pure,
over the rows of `raybench.analysis.best` and of `raybench.analysis.scaling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raybench.analysis.settings import varying
from raybench.report import formatting

Row = Mapping[str, Any]

TITLE = "Best precision and batch size"


def bests(best: Sequence[Row], rows: Sequence[Row], ranks: str) -> tuple[tuple[str, str], ...]:
    """List (what is sought on the most ranks, the settings that have the most of it).

    best: rows of `raybench.analysis.best`.
    """
    most = max((one["world_size"] for one in best), default=0)
    by_id = {row["point_id"]: row for row in rows}
    chosen = [one for one in best if one["world_size"] == most]
    apart = varying([by_id[one["point_id"]] for one in chosen], ("precision", "batch"))
    return tuple((_criterion(one, by_id, apart, ranks), _choice(one, by_id)) for one in chosen)


def _criterion(one: Row, by_id: Mapping[str, Row], apart: Sequence[str], ranks: str) -> str:
    where = formatting.settings_words(by_id[one["point_id"]], apart, ranks)
    named = f" with {where}" if where else ""
    return formatting.ranks_words(one["world_size"], ranks) + named


def _choice(one: Row, by_id: Mapping[str, Row]) -> str:
    unit = {"throughput": "samples/s", "samples_per_joule": "samples/s per watt"}[one["by"]]
    told = (
        f"{_precision_and_batch(by_id[one['point_id']])}: {formatting.number(one['value'])} {unit}"
    )
    if not formatting.has_value(one["rival_point_id"]):
        return told
    rival = by_id[one["rival_point_id"]]
    return f"{told}; {_precision_and_batch(rival)} may be as good"


def _precision_and_batch(row: Row) -> str:
    return formatting.settings_words(row, ("precision", "batch"), "")
