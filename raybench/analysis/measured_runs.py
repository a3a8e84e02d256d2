"""The two runs of a comparison and those beside them, as the tables tell of them. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raybench.analysis.repeats import Known, Start
from raybench.analysis.resampling import Series
from raybench.analysis.rounds import (
    ATTEMPT_COLUMNS,
    Trials,
    latest_trials,
    mean_of_rounds,
    records,
    without_controls,
)
from raybench.analysis.settings import EXECUTION
from raybench.analysis.step_times import SAMPLE_COLUMNS, repeat_step_times

SETTINGS = ("workload", "params", "scaling", *EXECUTION, "world_size")
BATCH = ("batch_size", "global_batch_size", "grad_accumulation")
# A pair that differs here is another experiment, not a change of the same one.
_WORLD = {"device_type": "device", "device_name": "device", "node_count": "nodes"}
# What `compare` needs of the table `points`.
POINT_COLUMNS = (
    *ATTEMPT_COLUMNS,
    "host_bound",
    *("step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
    *SETTINGS,
    *BATCH,
    *_WORLD,
)
_ATTEMPT = ("point_id", "attempt")
# What it needs of the table `samples`.
STEP_COLUMNS = (*_ATTEMPT, *SAMPLE_COLUMNS)
Row = dict[str, Any]
# Its named repeats, None where nothing was said, and the runs that are alike.
Others = tuple[list[Start] | None, list[Start]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Another run. points: its rows of that table. node: names the devices that it ran on."""

    points: pd.DataFrame
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One of the two runs, as `raybench.load` gives it.

    points, samples: its rows of these tables; of `points` POINT_COLUMNS are enough, of `samples`
    STEP_COLUMNS. node: names the devices that it ran on.
    named: the runs that the user says to be repeats of this one; None where nothing was said.
    alike: the runs that differ from it in nothing that the tables tell, but in start and devices
    of the same model.
    """

    points: pd.DataFrame
    samples: pd.DataFrame
    node: str = ""
    named: Sequence[Other] | None = None
    alike: Sequence[Other] = ()


def step_times(measured: Measured) -> dict[str, list[list[Series]]]:
    """point_id -> for each round the step times of each repeat, in milliseconds."""
    latest = without_controls(latest_trials(measured.points))
    ok = latest.loc[latest["status"] == "ok", ["point_id", "attempt"]]
    samples = measured.samples.merge(ok, on=list(_ATTEMPT))
    found: dict[str, dict[Hashable, list[Series]]] = {}
    for (point_id, attempt, _), times_ms in repeat_step_times(samples, _ATTEMPT):
        found.setdefault(str(point_id), {}).setdefault(attempt, []).append(times_ms)
    return {point_id: list(rounds.values()) for point_id, rounds in found.items()}


def starts_beside(measured: Measured) -> dict[str, Others]:
    """point_id -> what is known of it from the named runs and from those that are alike."""
    named = _starts(measured.named or ())
    alike = _starts(measured.alike)
    return {
        point_id: (
            None if measured.named is None else named.get(point_id, []),
            alike.get(point_id, []),
        )
        for point_id in measured.points["point_id"].unique()
    }


def _starts(others: Sequence[Other]) -> dict[str, list[Start]]:
    """point_id -> its step times in these runs."""
    if not others:
        return {}
    points = pd.concat([other.points for other in others], ignore_index=True)
    latest, trials = mean_of_rounds(points), Trials(points)
    known = latest[(latest["status"] == "ok") & latest["step_ms_p50"].notna()]
    nodes = {run_id: one.node for one in others for run_id in one.points["run_id"].unique()}
    found: dict[str, list[Start]] = {}
    for row in records(known):
        times_ms = [float(one["step_ms_p50"]) for one in trials.rounds(row).values()]
        start = _start(row, nodes[row["run_id"]], times_ms)
        found.setdefault(row["point_id"], []).append(start)
    return found


def _start(row: Row, node: str, times_ms: Sequence[float]) -> Start:
    return Start(
        run_id=row["run_id"],
        node=node,
        started_at=row["started_at"],
        time_ms=float(np.exp(np.mean(np.log(times_ms)))),
        rounds_ms=tuple(times_ms),
        row=row,
    )


def summarize_side(
    own: Row, measured: Measured, times_ms: Sequence[float], others: Others | None
) -> Known:
    """Collect what is known of a side; runs on other devices or node counts are no repeats."""
    named, alike = others or (None, [])
    return Known(
        own=_start(own, measured.node, times_ms),
        named=None if named is None else [one for one in named if _is_of_world(one.row, own)],
        alike=[one for one in alike if _is_of_world(one.row, own)],
    )


def _is_of_world(row: Mapping[str, Any], own: Row) -> bool:
    return other_world((own, row)) is None


def other_world(pair: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the two rows are not of the same experiment."""
    for column, what in _WORLD.items():
        base, new = (one[column] for one in pair)
        if not (base == new or (pd.isna(base) and pd.isna(new))):
            before, now = (f"{one:g}" if isinstance(one, float) else one for one in (base, new))
            return f"other {what}: {before}, then {now}"
    return None
