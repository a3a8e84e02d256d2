"""Runs of a results folder, as commands and functions read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import ResultsError

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.compare import Fact
    from raybench.analysis.references import References
    from raybench.health.report import HealthReport
    from raybench.results.tables import Run


@dataclass(frozen=True, kw_only=True)  # no slots, which cached_property needs
class StoredRun:
    """A run of the results folder `root`, whose row and facts are read once."""

    root: Path
    run_id: str

    @cached_property
    def run(self) -> Run:
        """Return the row of the run in `runs`."""
        from raybench.results import reader

        return reader.read_run(self.root, self.run_id)

    @cached_property
    def facts(self) -> dict[Fact, str]:
        """Return the hardware and software of the run, which may change a measured time."""
        from raybench.analysis.compare import facts
        from raybench.results import reader

        return facts(self.run, reader.load_table(self.root, "devices", self.run_id))

    def points(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return these columns of the table `points`, with all attempts."""
        from raybench.results import reader

        table = reader.read_table(self.root, "points", self.run_id, columns)
        frame: pd.DataFrame = table.to_pandas(maps_as_pydicts="strict")
        return frame

    def has_tag(self, name: str, value: str) -> bool:
        """Return whether the run has this tag and can be read."""
        try:
            return self.run.tags.get(name) == value
        except ResultsError:
            return False


def find_stored(results: Path, text: str) -> StoredRun:
    """Return the run that `text` names; see `find_run`."""
    from raybench.results.reader import find_run

    root, run_id = find_run(results, text)
    return StoredRun(root=root, run_id=run_id)


def load_health(
    results: Path, run: str, references: References | None = None
) -> HealthReport | None:
    """Return the report of a health check; None if the run is not a health check.

    Args:
        run: a name of a run, as for `raybench report`.
        references: by default, the references that come with raybench.

    Raises:
        ResultsError: there is no such run, or it cannot be read.
    """
    from raybench.analysis.references import SHIPPED
    from raybench.health.references import grades, measurements, read_findings
    from raybench.health.report import HealthReport
    from raybench.records.device import Device
    from raybench.report import formatting
    from raybench.results import reader
    from raybench.results.columns import from_row

    root, run_id = reader.find_run(results, run)
    row = reader.read_run(root, run_id)
    # A check that was interrupted early has no findings, and another run has none either.
    has_findings = (root / "health" / run_id).is_dir()
    if not row.is_health_check and not has_findings:
        return None
    rows = reader.read_table(root, "devices", run_id).to_pylist(maps_as_pydicts="strict")
    devices = [from_row(Device, row) for row in rows]
    findings = [finding for _, finding in read_findings(root, run_id)]
    gpus = {device.uuid: device for device in devices if device.uuid}
    return HealthReport(
        run=row,
        machine=formatting.machine(rows) if rows else row.cluster,
        devices=devices,
        findings=findings,
        grades=grades(findings, gpus, references or SHIPPED, run_id),
        measurements=measurements(findings, gpus),
    )
