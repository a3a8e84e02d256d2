"""The starts of both sides as they are stored, and the points that they have in common."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raybench.ab.plan import Side
from raybench.analysis.rounds import mean_of_rounds
from raybench.analysis.rows import (
    ScaledRow,
    batch_column,
    point_rows,
    setting_of,
    typed_rows,
    varying,
)
from raybench.conversion import MS_PER_S
from raybench.records.device import Device
from raybench.records.status import RunStatus, Status
from raybench.results import reader
from raybench.results.point_row import PointRow
from raybench.results.tables import Run

# Tags of the runs of a gate.
SIDE_TAG, PAIR_TAG = "side", "pair"
# A point that has failed this often on a side is not measured again.
MOST_FAILURES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A sweep of one side of a gate."""

    side: Side
    # Number of the pair, from 1.
    pair: int
    run: Run
    # point_id -> row.
    rows: Mapping[str, PointRow]

    @property
    def age_s(self) -> float:
        """Seconds since the sweep ended; if its end is unknown, since its start."""
        end = self.run.finished_at or self.run.started_at
        return (datetime.now(UTC) - end).total_seconds()

    @property
    def is_finished(self) -> bool:
        """Whether all its points have ended; otherwise `sweep --resume` goes on with the run."""
        return self.run.status in (RunStatus.OK, RunStatus.FAILED)

    @property
    def is_running_here(self) -> bool:
        """Whether a driver of this host still runs the sweep."""
        return self.run.status is RunStatus.RUNNING and self.run.host == socket.gethostname()


def read_starts(results: Path) -> list[Start]:
    """Return the starts of a gate, interrupted starts included, the oldest first."""
    if not (results / "runs").is_dir():
        return []
    starts = []
    for run in reader.read_runs(results):
        if not {SIDE_TAG, PAIR_TAG} <= run.tags.keys():
            # The run is not of a gate.
            continue
        # The current time is a new key, so the cache never holds the rows of a run that goes on.
        finished_at = run.finished_at or datetime.now(UTC)
        start = Start(
            side=Side(run.tags[SIDE_TAG]),
            pair=int(run.tags[PAIR_TAG]),
            run=run,
            rows=_rows_of_run(results, run.run_id, finished_at),
        )
        starts.append(start)
    return starts


# A gate reads its starts again after each start. The rows of an ended run stay the same.
@lru_cache(maxsize=1000)
def _rows_of_run(results: Path, run_id: str, _finished_at: datetime) -> dict[str, PointRow]:
    """Return point_id -> row of a run; `_finished_at` is only a key of the cache."""
    rows = mean_of_rounds(point_rows(reader.load_table(results, "points", run_id)))
    return {row.point_id: row for row in rows}


def devices_of(results: Path, start: Start) -> list[Device]:
    """Return the devices on which a start ran."""
    return typed_rows(reader.load_table(results, "devices", start.run.run_id), Device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedPoint:
    """A point that both sides have, or only one side."""

    # Id on each side that has the point. A setting that differs between the sides changes the id.
    ids: Mapping[Side, str]
    # A row with the settings of the point; from the new side if that side has the point.
    row: ScaledRow


@dataclass(frozen=True, kw_only=True)  # no slots, which cached_property needs
class PairedStarts:
    """The finished starts of a gate, in pairs."""

    # The oldest first.
    starts: Sequence[Start]

    @cached_property
    def by_pair(self) -> dict[int, dict[Side, Start]]:
        """Pair -> its starts; if a side has two starts, the newer start."""
        pairs: dict[int, dict[Side, Start]] = {}
        for start in self.starts:
            pairs.setdefault(start.pair, {})[start.side] = start
        return dict(sorted(pairs.items()))

    @property
    def complete_pairs(self) -> list[dict[Side, Start]]:
        """The pairs that have both starts."""
        return [pair for pair in self.by_pair.values() if len(pair) == len(Side)]

    @cached_property
    def points(self) -> list[PairedPoint]:
        """The points of both sides, in the order of the job."""
        # Side -> point_id -> row.
        rows = {side: self._first_rows(side) for side in Side}
        # Side -> key -> point_id. A point has the same key on both sides.
        ids_by_key: dict[Side, dict[object, str]] = {}
        if rows[Side.OLD].keys() & rows[Side.NEW].keys():
            for side in Side:
                ids_by_key[side] = {point_id: point_id for point_id in rows[side]}
        else:
            ids_by_key = _ids_by_settings(rows)
        points = []
        for key in dict.fromkeys((*ids_by_key[Side.NEW], *ids_by_key[Side.OLD])):
            ids = {side: ids_by_key[side][key] for side in Side if key in ids_by_key[side]}
            side = Side.NEW if Side.NEW in ids else Side.OLD
            points.append(PairedPoint(ids=ids, row=_with_batch(rows[side][ids[side]])))
        return points

    def _first_rows(self, side: Side) -> dict[str, PointRow]:
        """Return point_id -> first row of each point of a side."""
        rows: dict[str, PointRow] = {}
        for start in self.starts:
            if start.side is side:
                for point_id, row in start.rows.items():
                    rows.setdefault(point_id, row)
        return rows

    @cached_property
    def log_ratios(self) -> NDArray[np.float64]:
        """Logarithms of new rate / old rate, points x pairs; NaN where a side is not ok."""
        values = np.full((len(self.points), len(self.complete_pairs)), math.nan)
        for number, point in enumerate(self.points):
            for column, pair in enumerate(self.complete_pairs):
                # A side may lack the point, or this start of the side.
                old, new = (pair[side].rows.get(point.ids.get(side, "")) for side in Side)
                if old and new and _is_measured(old) and _is_measured(new):
                    has_samples = bool(old.throughput and new.throughput)
                    ratio = rate_of(new, has_samples) / rate_of(old, has_samples)
                    values[number, column] = math.log(ratio)
        return values

    def _all_rows(self, point: PairedPoint, side: Side) -> list[PointRow]:
        """Return the rows of a point on one side, in the order of the starts."""
        point_id = point.ids.get(side, "")
        starts = [start for start in self.starts if start.side is side]
        return [start.rows[point_id] for start in starts if point_id in start.rows]

    def ok_rows(self, point: PairedPoint, side: Side) -> list[PointRow]:
        """Return the ok rows of a point on one side."""
        return [row for row in self._all_rows(point, side) if _is_measured(row)]

    def failures(self, point: PairedPoint, side: Side) -> list[PointRow]:
        """Return the rows of a point on one side that are not ok."""
        return [row for row in self._all_rows(point, side) if not _is_measured(row)]

    def can_be_measured(self, point: PairedPoint) -> bool:
        """Return whether both sides have the point, and no side has failed too often."""
        most_failures = max(len(self.failures(point, side)) for side in Side)
        return len(point.ids) == len(Side) and most_failures < MOST_FAILURES


def _with_batch(row: PointRow) -> ScaledRow:
    """Return the row with the batch size that the job fixes, as reports need the row."""
    values = {field.name: getattr(row, field.name) for field in fields(PointRow)}
    # batch_size, global_batch_size, or None for a workload without batches.
    column = batch_column(row)
    return ScaledRow(**values, batch=getattr(row, column) if column else None)


def _is_measured(row: PointRow) -> bool:
    """Return whether a row is ok and has a step time."""
    return row.status is Status.OK and bool(row.step_ms_mean)


def rate_of(row: PointRow, in_samples: bool) -> float:
    """Return the rate of an ok row; NaN without a step time.

    Args:
        in_samples: return samples/s, which all compared rows must have; otherwise steps/s.
    """
    if in_samples and row.throughput:
        return row.throughput
    return MS_PER_S / (row.step_ms_mean or math.nan)


def _ids_by_settings(
    rows: Mapping[Side, Mapping[str, PointRow]],
) -> dict[Side, dict[object, str]]:
    """Return key -> point_id of each side, for sides that share no point_id."""
    # The sides differ in a setting that does not vary within a side. So the key of a point has only
    # the settings that vary within a side.
    varying_names: dict[str, None] = {}
    for side in Side:
        varying_names |= dict.fromkeys(varying([*rows[side].values()]))
    ids: dict[Side, dict[object, str]] = {}
    for side in Side:
        ids[side] = {}
        for point_id, row in rows[side].items():
            key = tuple(str(setting_of(row, name)) for name in varying_names)
            ids[side][key] = point_id
    return ids
