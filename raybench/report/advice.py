"""What to do, from what a run has measured: which devices, which shares, which precision and batch.

Each advice names the rows that it is from. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raybench.analysis.rows import ScaledRow
from raybench.job.point import BY_SPEED, FAST
from raybench.report import formatting
from raybench.report.blocks import Block, Line, Listing
from raybench.report.documents import Document
from raybench.report.lead import ranking
from raybench.report.sections.uneven import fleet_name, verdict
from raybench.report.summary import Summary
from raybench.results.breakdown import is_slowed_by_one_rank
from raybench.stats.shares import fast_devices

# Less is not worth a change.
_WORTHWHILE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """about: what is to be chosen. rows: point_ids, or tests of a health check."""

    about: str
    text: str
    rows: tuple[str, ...]


def advise_run(summary: Summary) -> list[Advice]:
    """Return what the points of a run advise; empty where nothing follows from them."""
    rows = summary.rows
    measured = sum(row.status == "ok" for row in rows)
    of_fleets = (
        Advice(
            about="shares",
            text=f"{fleet_name(fleet, summary.ranks)}: {verdict(fleet)}",
            rows=tuple(str(scenario.row.point_id) for scenario in fleet.scenarios.values()),
        )
        for fleet in summary.fleets
    )
    of_choice = (
        Advice(about="choice", text=text, rows=(f"all {measured} points that are ok",))
        for text in ([ranking(summary)] if summary.contested and not summary.fleets else [])
    )
    return [*of_fleets, *_from_slow_ranks(rows, summary.ranks), *of_choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceList(Document):
    """What a run or a health check advises: a document (see `raybench.report.documents`)."""

    run_id: str
    advice: Sequence[Advice]

    @property
    def title(self) -> str:
        """Return the run's id."""
        return self.run_id

    def blocks(self) -> Iterator[Block]:
        """Yield each advice with the rows that it rests on."""
        for one in self.advice:
            lines = [(one.about, one.text), ("from", ", ".join(one.rows))]
            yield Listing(lines=lines, is_quoted=True)
        if not self.advice:
            text = "nothing to advise: no choice was measured, and no device stands out"
            yield Line(text=text)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object: run_id and advice (about, text, rows)."""
        return {"run_id": self.run_id, "advice": [asdict(one) for one in self.advice]}


def _from_slow_ranks(rows: Sequence[ScaledRow], ranks: str) -> Iterator[Advice]:
    """Yield what other shares would gain at points where one rank slowed equal shares down.

    Of the point with the most samples on each number of ranks.
    """
    slowed: dict[int, ScaledRow] = {}
    for row in rows:
        if row.status == "ok" and not row.share_by_rank and is_slowed_by_one_rank(row):
            best = slowed.setdefault(row.world_size, row)
            if (row.global_batch_size or 0) > (best.global_batch_size or 0):
                slowed[row.world_size] = row
    for row in slowed.values():
        local_ms = row.local_step_ms_by_rank or ()
        speeds = [1 / ms for ms in local_ms]
        exchange_ms = max(0.0, (row.step_ms_p50 or 0.0) - max(local_ms))
        text = estimate_gains(speeds, exchange_ms / max(local_ms))
        if text:
            about = formatting.ranks_words(row.world_size, ranks)
            slowest = local_ms.index(max(local_ms))
            text = f"{about}, of which rank {slowest} is slow: {text}"
            yield Advice(about="shares", text=text, rows=(str(row.point_id),))


def estimate_gains(speeds: Sequence[float], exchange: float) -> str:
    """Return what shares by speed and the fast devices alone would gain at most, in words.

    speeds: relative. exchange: over the slowest device's own step. Steps without fixed costs are
    taken for granted, so that gains are upper bounds; empty where none is worthwhile.
    """
    are_fast = fast_devices(speeds)
    fast = [speed for speed, is_fast in zip(speeds, are_fast, strict=True) if is_fast]
    slowest, count = min(speeds), len(speeds)
    own = {
        BY_SPEED: count * slowest / sum(speeds),
        FAST: count * slowest / (len(fast) * min(fast)),
    }
    gains = {shares: (1 + exchange) / (step + exchange) - 1 for shares, step in own.items()}
    best = max(gains, key=lambda shares: gains[shares])
    if gains[best] < _WORTHWHILE:
        return ""
    words = ", ".join(f"shares={shares} {gain:+.1%}" for shares, gain in gains.items())
    return f"an estimate, at most: {words} over equal shares; jobs/uneven_gpus.yaml measures it"
