"""Run what is left of a run to its end."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from raybench.errors import ResultsError
from raybench.records.status import RunStatus
from raybench.report.formatting import command

if TYPE_CHECKING:
    from pathlib import Path

    from raybench.job.model import Job
    from raybench.results.tables import Run
    from raybench.sweep.listener import Listener
    from raybench.sweep.run_state import RunState, RunTarget

# A report of 1,000 points takes 5.5 s with a part for each point and 1.5 s with one part; with
# fewer parts than this, the difference is below a second.
_MANY_PARTS = 200


def carry_out(job: Job, start: RunState, where: RunTarget, listener: Listener) -> Run:
    """Sweep the trials that are left, if any, and return the run as it ended.

    Raises:
        RaybenchError: as `run_sweep`.
    """
    from raybench.sweep.run_rows import end_of_run
    from raybench.sweep.run_state import nothing_left_message
    from raybench.sweep.runner import run_sweep

    for warning in start.rounds.plan.warnings:
        listener.tell(f"{warning} (warning)")
    if start.rounds.todo:
        run = run_sweep(job, start, where, listener)
    else:
        listener.tell(nothing_left_message(start))
        run = end_of_run(start, where.output, job.measure)
    # After an interrupt the process ends soon; the sweep that resumes the run compacts it.
    if run.status is not RunStatus.INTERRUPTED:
        _compact_points(start, where.output, listener)
    return run


def _compact_points(start: RunState, root: Path, listener: Listener) -> None:
    """Put the rows of a run with many points into one part."""
    from raybench.results.columns import parts_of
    from raybench.results.writer import compact_points, hold_run

    run_id = start.run.run_id
    if len(parts_of(root, "points", run_id)) < _MANY_PARTS:
        return
    try:
        # A resumed run is locked already.
        with nullcontext() if start.is_resumed else hold_run(root, run_id):
            compact_points(root, run_id)
    except ResultsError as error:
        again = command("compact", run_id, "--results", str(root))
        listener.tell(f"the points stay in many parts: {error}; put them together: {again}")
