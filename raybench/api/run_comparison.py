"""A comparison of runs in Python: changes, their intervals and verdicts."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from raybench.api.sides import ComparedSide, check_apart, compare_sides
from raybench.api.stored_runs import load_health
from raybench.errors import UsageError
from raybench.job.problems import quote
from raybench.report.formatting import counted

if TYPE_CHECKING:
    import pandas as pd

    from raybench.report.comparison import Comparison


ReportFormat = Literal["text", "md", "html", "json"]


def check_format(format: str) -> None:
    """Raise UsageError for an unknown format."""
    if format not in get_args(ReportFormat):
        known = ", ".join(get_args(ReportFormat))
        raise UsageError(f"format: must be one of {known}, given {quote(format)}")


def compare_runs(base: ComparedSide, new: ComparedSide, threshold: float) -> RunComparison:
    """Compare two sides of runs.

    Raises:
        ResultsError: a run is on both sides, or cannot be read.
        UsageError: one of the runs is a health check, or the threshold is not from 0 to 1.
    """
    if not 0 <= threshold < 1:
        raise UsageError(f"threshold: must be a share, as in 0.015, given {threshold}")
    check_apart(base, new)
    for run in (*base.runs, *new.runs):
        if load_health(run.root, run.run_id) is not None:
            raise UsageError(
                f"{run.run_id} is a health check; `raybench compare` compares health checks"
            )
    return RunComparison(document=compare_sides((base, new), threshold))


@dataclass(frozen=True, kw_only=True)  # no slots, which cached_property needs
class RunComparison:
    """The changes from one side of runs to another."""

    document: Comparison

    @cached_property
    def points(self) -> pd.DataFrame:
        """One row per point: settings, both rates, the change and its verdict.

        `change` is relative, 0.05 for 5 % more samples/s than the base, with the ends of its 95 %
        interval. `verdict` is slower, faster, same or unclear, and `reason` says why a point is
        unclear; a point that was not measured on both sides has no verdict and no reason.
        """
        from raybench.analysis.frames import compared_frame
        from raybench.report.words.compare import not_decided

        reasons = {
            row.point_id: not_decided(row.why)
            for row in self.document.points
            if row.why is not None
        }
        return compared_frame(self.document.rows, reasons)

    @property
    def verdicts(self) -> dict[str, int]:
        """Number of points for each verdict."""
        return dict(self.document.verdicts)

    def report(self, format: ReportFormat = "text", *, full: bool = False) -> str:
        """Return the report of `raybench compare`; for the arguments see `RunResult.report`."""
        from raybench.report.documents import format_document

        check_format(format)
        if format == "html":
            from raybench.report.page import format_comparison

            return format_comparison(self.document)
        kind = "terminal" if format == "text" else format
        is_short = format == "text" and not full
        return format_document(replace(self.document, is_short=is_short), kind)

    def save_page(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of the comparison as HTML and return its path.

        Raises:
            ResultsError: the file cannot be written.
        """
        from raybench.api.files import write_file

        write_file(Path(path), self.report("html").encode())
        return Path(path)

    def __repr__(self) -> str:
        """Return the two sides, then the answer of the comparison."""
        sides = []
        for runs in (self.document.new, self.document.base):
            more = f" and {counted(len(runs) - 1, 'more run')}" if len(runs) > 1 else ""
            sides.append(f"{runs[-1].run_id}{more}")
        head = f"<RunComparison of {' with '.join(sides)}>"
        return "\n".join([head, *textwrap.wrap(" ".join(self.document.answer), 80)])

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        from raybench.report.notebook import format_output

        return format_output(replace(self.document, is_short=True))
