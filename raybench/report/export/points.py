"""The points of a run as every export takes them: settings, figures, names and how each ended."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raybench.analysis.rows import EXECUTION, ScaledRow
from raybench.records import FAILURES, NOT_RUN
from raybench.report import formatting
from raybench.report.documents import jsonable
from raybench.report.plain_text import plain
from raybench.report.references import defining_settings
from raybench.report.summary import Summary

# Numbers that say which point it is, not what was measured.
_NOT_FIGURES = {
    "attempt",
    "error_rank",
    "world_size",
    "node_count",
    *EXECUTION,
    "batch_size",
    "global_batch_size",
    "batch",
    "grad_accumulation",
    "series",
    "is_baseline",
}


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class ExportedPoint:
    """The latest attempt at a point.

    point: its row. row: the same as JSON can hold it, by column.
    search_ok: whether running out of memory is an answer, as in a search for the largest batch.
    """

    point: ScaledRow
    row: dict[str, Any]
    search_ok: bool

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return all settings that define the point, the same in every run that has it."""
        return defining_settings(self.point)

    @property
    def name(self) -> str:
        """Return the settings in a line: `mlp hidden=4096 precision=bf16 world_size=2`."""
        named = dict(self.settings)
        return f"{named.pop('workload')} {formatting.settings(named)}"

    @property
    def figures(self) -> dict[str, int | float]:
        """Return what was measured and derived, as numbers; yes is 1, null is left out.

        A metric that the workload declares itself has its own name, unless a column has it.
        """
        return {
            name: int(value) if isinstance(value, bool) else value
            for name, value in ({**(self.row["workload_metrics"] or {}), **self.row}).items()
            if isinstance(value, int | float) and name not in _NOT_FIGURES
        }

    @property
    def is_failure(self) -> bool:
        """Return whether the point failed; a search for a batch size may run out of memory."""
        status = self.row["status"]
        return not self.search_ok if status == "oom" else status in FAILURES

    @property
    def was_not_run(self) -> bool:
        """Return whether the point was skipped or cancelled."""
        return self.row["status"] in NOT_RUN

    @property
    def error(self) -> str:
        """Return the message of the failure on one line; empty without one."""
        return plain(self.row["error_message"] or "")

    @property
    def warnings(self) -> str:
        """Return all warnings on one line."""
        return "; ".join(map(plain, self.row["warnings"] or []))


def exported_points(summary: Summary) -> list[ExportedPoint]:
    """Return the latest attempt at each point of a run."""
    search_ok = summary.run.status.value == "ok"
    return [
        ExportedPoint(point=point, row=row, search_ok=search_ok)
        for point, row in ((one, jsonable(vars(one))) for one in summary.rows)
    ]


def facts_of_run(summary: Summary) -> dict[str, str]:
    """Return what trackers keep of a run: machine, commit, versions and tags."""
    run = summary.run
    return {
        "machine": summary.machine,
        **({"git_commit": run.git_commit} if run.git_commit else {}),
        **{f"version.{name}": version for name, version in summary.versions.items()},
        **{f"tag.{name}": value for name, value in run.tags.items()},
    }
