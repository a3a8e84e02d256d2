"""The runs of a results folder, and what their ranks wrote, as text for a terminal.

Without pandas, which is slow to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import RenderableType

from raybench.report import formatting, plain_text
from raybench.report.text.terminal import WIDTH, Column, grid, hanging, line, render
from raybench.results.reader import RankLog
from raybench.results.run import Run, RunStatus

_TAGS_CHARS = 30


def format_runs(
    runs: Sequence[Run],
    machines: Mapping[str, str],
    *,
    width: int = WIDTH,
    color: bool = False,
) -> str:
    """Write a line per run, the newest last. What was done of a run is known when it has ended.

    machines: what each run was measured on, by run_id. Where there is no room, tags, the machine,
    the time that it took and the start are left out in turn. An id is never broken: it is copied.
    """
    columns = {
        Column("run"): [run.run_id for run in runs],
        Column("started, UTC"): [f"{run.started_at:%Y-%m-%d %H:%M}" for run in runs],
        Column("status"): [run.status.value for run in runs],
        Column("ok", side="right"): [_count(run, run.points_ok) for run in runs],
        Column("fail", side="right"): [_count(run, run.points_failed) for run in runs],
        Column("skip", side="right"): [_count(run, run.points_skipped) for run in runs],
        Column("took", side="right"): [_took(run) for run in runs],
        Column("on"): [machines.get(run.run_id, "") for run in runs],
        Column("tags"): [plain_text.shorten(tags(run), _TAGS_CHARS) for run in runs],
    }
    dropped: list[str] = []
    for name in ("", "tags", "on", "took", "started, UTC"):
        dropped.append(name)
        shown = {c: cells for c, cells in columns.items() if c.name not in dropped and any(cells)}
        cells = [
            [plain_text.plain(cell) for cell in row] for row in zip(*shown.values(), strict=True)
        ]
        table = grid(list(shown), cells)
        if (table.min_width or 0) <= width:
            break
    return render([table], width, color)


def format_runs_long(
    runs: Sequence[Run],
    machines: Mapping[str, str],
    leads: Mapping[str, str],
    *,
    width: int = WIDTH,
    color: bool = False,
) -> str:
    """Write for each run how it ended, on what, its tags and what it found (leads, by run_id)."""
    parts: list[RenderableType] = []
    for run in runs:
        parts.append(line(plain_text.plain(run.run_id), "bold"))
        phrases = (
            f"{formatting.when(run.started_at)}, {_end_of(run)}",
            machines.get(run.run_id, ""),
            tags(run),
            leads.get(run.run_id, ""),
        )
        parts += [hanging("  ", plain_text.plain(text)) for text in phrases if text]
    return render(parts, width, color)


def tags(run: Run) -> str:
    """Write the tags of a run, as `--tag` takes them."""
    return formatting.settings(run.tags)


def _end_of(run: Run) -> str:
    if run.status is RunStatus.RUNNING:
        return run.status.value
    done = f"{run.points_ok} ok, {run.points_failed} failed, {run.points_skipped} skipped"
    return f"{run.status.value} after {formatting.run_time(run)}; {done}"


def _count(run: Run, count: int) -> str:
    return "" if run.status is RunStatus.RUNNING else str(count)


def _took(run: Run) -> str:
    # Compact: at 80 columns the run_id needs the room.
    return formatting.run_time(run).replace(" min", "m").replace(" h", "h").replace(" s", "s")


def format_logs(logs: Sequence[RankLog]) -> str:
    """Write what ranks wrote, under a heading for each attempt and rank.

    Ranks that wrote the same share one.
    """
    blocks = []
    for (point_id, attempt), of_attempt in groupby(logs, lambda log: (log.point_id, log.attempt)):
        by_text: dict[str, list[int]] = {}
        for log in of_attempt:
            by_text.setdefault(log.text, []).append(log.rank)
        for text, ranks in by_text.items():
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            lines = [f"== {point_id}, attempt {attempt}, {who}", *plain_text.plain_lines(text), ""]
            blocks.append("\n".join(lines))
    return "\n".join(blocks)
