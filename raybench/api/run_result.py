"""A run in Python: its tables, its report, its page and its chart."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.api.run_comparison import (
    ReportFormat,
    RunComparison,
    check_format,
    compare_runs,
)
from raybench.api.sides import ComparedSide, find_side, side_of
from raybench.api.stored_runs import StoredRun
from raybench.errors import UsageError
from raybench.job.problems import quote

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.run_data import RunData
    from raybench.health.report import HealthReport
    from raybench.report.run_report import RunReport
    from raybench.results.tables import Run


def open_run(run: str | os.PathLike[str], results: str | os.PathLike[str] = "results") -> RunResult:
    """Return a stored run.

    >>> import raybench
    >>> run = raybench.open_run("ddp_scaling-20261122", "results/examples")
    >>> run.status
    'ok'

    Args:
        run: an id or its unique prefix, "latest", the name of a job or a results folder (meaning
            the newest run), or a run's folder of a table, such as `results/points/RUN`.
        results: the results folder, unless `run` is a folder.

    Raises:
        ResultsError: no run matches, or several runs do.
    """
    from raybench.results.reader import LATEST, find_run

    text = os.fspath(run)
    folder = Path(results)
    if os.path.isdir(os.path.join(text, "runs")):  # noqa: PTH112, PTH118 - any text is allowed
        folder, text = Path(text), LATEST
    root, run_id = find_run(folder, text)
    return RunResult(results=root, run_id=run_id)


@dataclass(frozen=True, kw_only=True)  # no slots, which cached_property needs
class RunResult:
    """A run and its results, which are read once, when they are first needed."""

    # The results folder.
    results: Path
    run_id: str

    @property
    def status(self) -> str:
        """Status of the run: running, ok, failed or interrupted."""
        return str(self._run.status)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per point, with the most important columns; see `raybench.load`."""
        return self.table("summary")

    @cached_property
    def points(self) -> pd.DataFrame:
        """The stored table `points`: one row per attempt at a point."""
        return self.table("points")

    @cached_property
    def samples(self) -> pd.DataFrame:
        """The stored table `samples`: one row per iteration and rank."""
        return self.table("samples")

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of this run, as `raybench.load` does.

        Args:
            name: a table, such as "devices", "telemetry" or "scaling".
        """
        from raybench.analysis.frames import load

        return load(self.results, name, self.run_id)

    def report(self, format: ReportFormat = "text", *, full: bool = False) -> str:
        """Return the report of the run, as `raybench report` prints it.

        >>> import raybench
        >>> run = raybench.open_run("gemm", "results/examples")
        >>> print(run.report().splitlines()[0])
        How many TFLOP/s does one GPU reach in the matrix products of training?

        Args:
            format: text for reading, md for a pull request, html for a page, json for programs.
            full: print all tables, findings and legends; only for text.
        """
        from raybench.api.pictures import page_of
        from raybench.report.documents import format_document

        check_format(format)
        if format == "html":
            return page_of(self.results, self._data)
        kind = "terminal" if format == "text" else format
        return format_document(self._document(is_short=format == "text" and not full), kind)

    def save_page(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of the run as one self-contained HTML file and return its path.

        Raises:
            ResultsError: the file cannot be written.
        """
        from raybench.api.files import write_file

        write_file(Path(path), self.report("html").encode())
        return Path(path)

    def chart(self) -> Picture:
        """Return the first chart of the page; a notebook shows the chart.

        Raises:
            UsageError: no point was measured, so there is nothing to draw.
        """
        return Picture(svg=self._draw("svg").decode(), png=self._draw("png"))

    def compare(
        self,
        base: RunResult | str | Sequence[RunResult | str],
        *,
        repeats: Sequence[RunResult | str] = (),
        threshold: float = 0.015,
    ) -> RunComparison:
        """Compare this run with a base: slower means that this run is slower than the base.

        A verdict needs two or more runs on each side; with one run there are only changes.

        Args:
            base: a run, a name as for `open_run`, a tag as in "driver=580", or several repeated
                runs.
            repeats: further runs of the same job and version as this run.
            threshold: smallest change that counts, as a share.

        Raises:
            ResultsError: there is no such run, or a run is on both sides.
            UsageError: one of the runs is a health check.
        """
        sides = _side(base, self.results), _side([*repeats, self], self.results)
        return compare_runs(*sides, threshold)

    def __repr__(self) -> str:
        """Return id, status and counts of points, then the answer of the run."""
        from raybench.report.run_report import RunReport
        from raybench.report.words.run import counts

        document, run = self._document(), self._run
        if not isinstance(document, RunReport):
            return f"<RunResult {run.run_id}: {run.status}>\n{document.headline}"
        head = f"<RunResult {run.run_id}: {run.status}, {counts(document.data)}>"
        return "\n".join([head, *textwrap.wrap(document.lead, 80)])

    def _repr_html_(self) -> str:
        """Return the report and the chart for a notebook."""
        from raybench.report.notebook import format_output

        return format_output(self._document(), self._svg_if_any())

    @cached_property
    def _run(self) -> Run:
        from raybench.results.reader import read_run

        return read_run(self.results, self.run_id)

    @cached_property
    def _data(self) -> RunData | HealthReport:
        """The data of a sweep, or the report of a health check."""
        from raybench.analysis.run_data import load_run_data
        from raybench.api.stored_runs import load_health

        return load_health(self.results, self.run_id) or load_run_data(self.results, self.run_id)

    def _document(self, *, is_short: bool = True) -> RunReport | HealthReport:
        """Return the report of a sweep, short or full, or of a health check."""
        from raybench.analysis.answer import decide
        from raybench.analysis.run_data import RunData
        from raybench.report.run_report import RunReport

        if isinstance(self._data, RunData):
            return RunReport(answer=decide(self._data), is_short=is_short)
        return self._data

    def _draw(self, kind: str) -> bytes:
        from raybench.api.pictures import draw_chart

        return draw_chart(self.results, self._data, kind)

    def _svg_if_any(self) -> str:
        """Return the chart as SVG; "" if there is nothing to draw."""
        try:
            return self._draw("svg").decode()
        except UsageError:
            return ""


def _side(runs: RunResult | str | Sequence[RunResult | str], results: Path) -> ComparedSide:
    """Return a side of a comparison; the folder `results` has the runs that are given by name."""
    if isinstance(runs, str):
        return find_side(results, runs)
    runs_or_names = [runs] if isinstance(runs, RunResult) else runs
    stored_runs: list[StoredRun] = []
    for run in runs_or_names:
        if isinstance(run, RunResult):
            stored_runs.append(StoredRun(root=run.results, run_id=run.run_id))
        else:
            stored_runs += find_side(results, run).runs
    if not stored_runs:
        raise UsageError("compare: a side needs a run, given an empty list")
    return side_of(stored_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A chart that a notebook shows."""

    svg: str
    png: bytes

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the chart to a file that ends in .svg or .png, and return its path.

        Raises:
            UsageError: the file has another ending.
            ResultsError: the file cannot be written.
        """
        from raybench.api.files import write_file

        content = {".svg": self.svg.encode(), ".png": self.png}.get(Path(path).suffix.lower())
        if content is None:
            raise UsageError(f"path: must end in .svg or .png, given {quote(os.fspath(path))}")
        write_file(Path(path), content)
        return Path(path)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture of {len(self.svg):,} characters as SVG; save(path) writes it>"
