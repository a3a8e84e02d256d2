"""The largest batch that fits into memory, where a run has found it. Pure, over the rows of
`raybench.analysis.scaling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.analysis.settings import setting, setting_order, varying
from raybench.report import formatting
from raybench.sweep.batch_search import is_found

Row = Mapping[str, Any]

TITLE = "Largest batch that fits, per device"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """What a search came to.

    settings: those that tell its series from the others. ran_out: the smallest batch size that
    does not fit. peak_mem_allocated_bytes: of the largest batch that fits, on the rank that needs
    most; None on a CPU.
    """

    settings: Mapping[str, Any]
    batch_size: int
    ran_out: int
    peak_mem_allocated_bytes: int | None


def largest_batches(rows: Sequence[Row]) -> tuple[LargestBatch, ...]:
    """One per series in which a batch ran out of memory just above one that is ok.

    A list of batch sizes in a job leaves a wider gap: there, the largest is not known.
    """
    series: dict[tuple[str, ...], list[Row]] = {}
    names = varying(rows, ("scaling", "batch"), always=("precision", "world_size"))
    for row in rows:
        if row["scaling"] == "weak":
            series.setdefault(tuple(str(setting(row, name)) for name in names), []).append(row)
    found = [_largest(members, names) for members in series.values()]
    known = [one for one in found if one is not None]
    return tuple(sorted(known, key=lambda one: [setting_order(v) for v in one.settings.values()]))


def _largest(rows: Sequence[Row], names: Sequence[str]) -> LargestBatch | None:
    ran_out = min((int(r["batch_size"]) for r in rows if r["status"] == "oom"), default=None)
    if ran_out is None:
        return None
    fits = [row for row in rows if row["status"] == "ok" and row["batch_size"] < ran_out]
    if not fits:
        return None
    row = max(fits, key=lambda row: row["batch_size"])
    if not is_found(int(row["batch_size"]), ran_out):
        return None
    peak = row["peak_mem_allocated_bytes"]
    return LargestBatch(
        settings={name: setting(row, name) for name in names},
        batch_size=int(row["batch_size"]),
        ran_out=ran_out,
        peak_mem_allocated_bytes=int(peak) if formatting.has_value(peak) else None,
    )


def list_largest(found: Sequence[LargestBatch], ranks: str) -> tuple[tuple[str, str], ...]:
    """List (the series, its largest batch) as the formats list it."""
    return tuple((label(one.settings, ranks), _describe(one)) for one in found)


def label(settings: Mapping[str, Any], ranks: str) -> str:
    """Write `bf16, 1 GPU`; other settings with their names."""
    return ", ".join(formatting.setting_words(n, value, ranks) for n, value in settings.items())


def _describe(one: LargestBatch) -> str:
    peak = one.peak_mem_allocated_bytes
    memory = "" if peak is None else f" ({formatting.gib(peak)} GiB)"
    return f"{one.batch_size:,}{memory}; {one.ran_out:,} runs out of memory"
