"""The runs of a results folder as text for a terminal; without pandas, which is slow to import."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.report import wording
from raybench.report.console import WIDTH, Column, grid, rendered
from raybench.run import Run, RunStatus

# A run's id is not folded below this, so that it can be copied.
_RUN_ID_CHARS = 40


def format_runs(runs: Sequence[Run], *, width: int = WIDTH, color: bool = False) -> str:
    """All runs, the newest last. What has been done of a run is known when it has ended."""
    columns = [
        Column("run", folds_to=_RUN_ID_CHARS),
        Column("status"),
        *(Column(name, side="right") for name in ("ok", "fail", "skip", "took")),
    ]
    rows = []
    for run in runs:
        ended = run.status is not RunStatus.RUNNING
        done = (run.points_ok, run.points_failed, run.points_skipped) if ended else ("", "", "")
        # Compact: at 80 columns the run_id needs the room.
        took = wording.lasted(run).replace(" min", "m").replace(" h", "h").replace(" s", "s")
        cells = (run.run_id, run.status.value, *done, took)
        rows.append([wording.plain(cell) for cell in cells])
    return rendered([grid(columns, rows)], width, color)
