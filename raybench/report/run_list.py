"""The runs of a results folder, and what their ranks wrote. Nothing here loads pandas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from raybench.report import formatting
from raybench.report.blocks import Block, Column, ColumnOf, Listing, Table, make_table
from raybench.report.documents import Document
from raybench.report.plain_text import plain_lines, shorten
from raybench.results.reader import RankLog
from raybench.results.run import Run, RunStatus

_TAGS_CHARS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList(Document):
    """Runs, the newest last: a document (see `raybench.report.documents`).

    machines: what each run was measured on, by run_id. leads: what each run found; None for the
    short form, a line per run.
    """

    runs: Sequence[Run]
    machines: Mapping[str, str]
    leads: Mapping[str, str] | None = None

    @property
    def title(self) -> str:
        """Return nothing: the table speaks for itself."""
        return ""

    def blocks(self) -> Iterator[Block]:
        """Yield the table of the runs, or a paragraph for each."""
        if self.leads is None:
            yield self._table()
            return
        for run in self.runs:
            phrases = (
                f"{formatting.when(run.started_at)}, {_end_of(run)}",
                self.machines.get(run.run_id, ""),
                formatting.settings(run.tags),
                self.leads.get(run.run_id, ""),
            )
            lines = [("", text) for text in phrases if text]
            yield Listing(title=run.run_id, lines=lines, is_quoted=True)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object: runs, the oldest first."""
        return {"runs": [asdict(run) for run in self.runs]}

    def _table(self) -> Table:
        """Return a line per run. What was done of a run is known when it has ended."""

        def count(name: str) -> ColumnOf[Run]:
            return (
                Column(title=_COUNTS[name]),
                lambda run: "" if run.status is RunStatus.RUNNING else str(getattr(run, name)),
            )

        columns: list[ColumnOf[Run]] = [
            (
                Column(title="run", is_text=True, is_setting=True),
                lambda run: run.run_id,
            ),
            (
                Column(title="started, UTC", is_text=True, drop=3),
                lambda run: f"{run.started_at:%Y-%m-%d %H:%M}",
            ),
            (Column(title="status", is_text=True), lambda run: run.status.value),
            *map(count, _COUNTS),
            (Column(title="took", drop=2), _took),
            (
                Column(title="on", is_text=True, drop=1),
                lambda run: self.machines.get(run.run_id, ""),
            ),
            (
                Column(title="tags", is_text=True, drop=0),
                lambda run: shorten(formatting.settings(run.tags), _TAGS_CHARS),
            ),
        ]
        return make_table(self.runs, columns)


_COUNTS = {"points_ok": "ok", "points_failed": "fail", "points_skipped": "skip"}


def _end_of(run: Run) -> str:
    if run.status is RunStatus.RUNNING:
        return run.status.value
    done = f"{run.points_ok} ok, {run.points_failed} failed, {run.points_skipped} skipped"
    return f"{run.status.value} after {formatting.run_time(run)}; {done}"


def _took(run: Run) -> str:
    # Compact: at 80 columns the run_id needs the room.
    return formatting.run_time(run).replace(" min", "m").replace(" h", "h").replace(" s", "s")


def format_logs(logs: Sequence[RankLog]) -> str:
    """Return what ranks wrote, under a heading for each attempt and rank.

    Ranks that wrote the same share one.
    """
    blocks = []
    for (point_id, attempt), of_attempt in groupby(logs, lambda log: (log.point_id, log.attempt)):
        by_text: dict[str, list[int]] = {}
        for log in of_attempt:
            by_text.setdefault(log.text, []).append(log.rank)
        for text, ranks in by_text.items():
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            lines = [f"== {point_id}, attempt {attempt}, {who}", *plain_lines(text), ""]
            blocks.append("\n".join(lines))
    return "\n".join(blocks)
