"""How far starts scatter, by the other runs of the same job in a results folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import ResultsError
from raybench.results import reader
from raybench.results.run_names import run_ids

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.start_noise import StartNoise
    from raybench.results.run import Run

# A folder may hold ten thousand runs; those near in time tell most of how the machine is now.
_MOST_READ = 10
_COLUMNS = (
    *("run_id", "point_id", "attempt", "round", "control_of", "status", "device_type"),
    *("precision", "host_bound", "step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
)


def known_starts(root: Path, run: Run) -> dict[str, StartNoise]:
    """Learn the noise of starts by kind of points; of kinds that no other run of the same tells,
    none.

    Runs count that the tables tell no difference of from `run`, on the same devices.
    """
    alike = list(_alike(root, run))
    if not alike:
        return {}
    from raybench.analysis.start_noise import noise_of_runs

    return noise_of_runs([_points(root, run_id) for run_id in (run.run_id, *alike)])


def _alike(root: Path, run: Run) -> Iterator[str]:
    ids = run_ids(root)
    of_job = [one for one in ids if one.startswith(f"{run.job_name}-") or one == run.run_id]
    if run.run_id not in of_job:
        return
    place = of_job.index(run.run_id)
    near = sorted(range(len(of_job)), key=lambda other: abs(other - place))[1 : _MOST_READ + 1]
    facts = _facts(root, run) if near else {}
    for run_id in (of_job[other] for other in near):
        with suppress(ResultsError):
            other = reader.read_run(root, run_id)
            if other.job_sha256 == run.job_sha256 and _facts(root, other) == facts:
                yield run_id


def _facts(root: Path, run: Run) -> Mapping[str, str]:
    from raybench.analysis.environment_changes import facts

    return facts(run, reader.load(root, "devices", run.run_id))


def _points(root: Path, run_id: str) -> pd.DataFrame:
    read = reader.read_table(root, "points", run_id, _COLUMNS)
    frame: pd.DataFrame = read.to_pandas()
    return frame
