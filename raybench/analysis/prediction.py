"""The predicted step of a data-parallel workload on more devices of the same node.

Each rank does the same step at any number of devices, so only communication grows. The prediction
is the step at the largest measured world size, plus the growth of its exposed communication. The
growth is fitted to the bytes that a device sends in an all_reduce of s bytes over n devices,
2 (n - 1) / n s, as nccl-tests computes busbw.

The 95 % interval adds the squares of three errors, as logarithms: the error of the measured step,
the unknown part of the additional communication that computation hides, and ERROR_OF_A_DOUBLING for
each doubling of devices.

Steps over several nodes are not predicted, because they depend on the algorithm that NCCL chooses,
and no steps over a network were measured to check an interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import stdev
from typing import Any

import numpy as np

from raybench.analysis.rounds import Trials, mean_of_rounds
from raybench.analysis.rows import EXECUTION, batch_column
from raybench.records.status import Status
from raybench.results.metrics import half_interval, is_imprecise
from raybench.results.point_row import PointRow, why_no_breakdown
from raybench.stats.summary import student_t
from raybench.workloads.base import parameter_count

# Relative error. 22 of 24 committed GPU-bound points had at most this error, when 4 H200s of one
# node were predicted from 1 and 2 (benchmarks/prediction_accuracy.py). Errors of several doublings
# are assumed to be independent.
ERROR_OF_A_DOUBLING = 0.05
_SETTINGS = ("workload", "scaling", *EXECUTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A point at a number of devices that was not measured."""

    # The usable point of the series with the most devices.
    measured: PointRow
    # Predicted number of devices.
    world_size: int
    step_ms: float
    # 95 % interval of `step_ms`.
    step_ms_low: float
    step_ms_high: float
    # Exposed communication in `step_ms`; without a breakdown, all time beyond `base_ms`.
    comm_exposed_ms: float
    # The smallest world size of the series.
    base_world: int
    # Measured step at the smallest world size.
    base_ms: float

    @property
    def half_interval(self) -> float:
        """Half the width of the 95 % interval of the step / the step."""
        return (self.step_ms_high - self.step_ms_low) / 2 / self.step_ms

    @property
    def measured_efficiency(self) -> float:
        """The efficiency of the largest measured world size, relative to the smallest."""
        return self.base_ms / _step_ms(self.measured)

    @property
    def efficiency(self) -> float:
        """The predicted efficiency, relative to the smallest world size."""
        return self._efficiency(self.step_ms)

    @property
    def efficiency_low(self) -> float:
        """The low end of the 95 % interval of `efficiency`; `base_ms` counts as exact."""
        return self._efficiency(self.step_ms_high)

    @property
    def efficiency_high(self) -> float:
        """The high end of the 95 % interval of `efficiency`; `base_ms` counts as exact."""
        return self._efficiency(self.step_ms_low)

    def _efficiency(self, step_ms: float) -> float:
        # An efficiency above 1 is not predicted unless one was measured.
        return min(self.base_ms / step_ms, max(1.0, self.measured_efficiency))

    @property
    def speed_up(self) -> float:
        """The speed-up over base_world."""
        return self.efficiency * self.world_size / self.base_world


class Unpredictable(StrEnum):
    """Why the points of a series cannot be predicted."""

    SEVERAL_NODES = "several_nodes"
    # DistributedDataParallel is not known to reduce gradients.
    NO_GRADIENTS = "no_gradients"
    # The intervals of the steps are too wide.
    IMPRECISE = "imprecise"
    # Fewer than two world sizes on one node are usable.
    FEW_WORLDS = "few_worlds"
    STRONG_SCALING = "strong_scaling"
    SEVERAL_MODELS = "several_models"
    CROWDED = "crowded"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPredicted:
    """Why a series cannot be predicted; a field is empty unless its kind is named above it."""

    kind: Unpredictable
    # SEVERAL_NODES: the largest requested number of devices, and the devices of a node.
    world_size: int | None = None
    devices_per_node: int | None = None
    # NO_GRADIENTS.
    workload: str = ""
    # IMPRECISE: world sizes of the imprecise points; FEW_WORLDS: world sizes of the usable points.
    world_sizes: tuple[int, ...] = ()
    # IMPRECISE: half the width of each step's 95 % interval / the step; None with too few samples.
    half_intervals: tuple[float | None, ...] = ()
    # SEVERAL_MODELS.
    models: tuple[str, ...] = ()


def predict(
    points: Sequence[PointRow], world_sizes: Sequence[int], devices_per_node: int
) -> tuple[list[Prediction], list[NotPredicted]]:
    """Return the predictions of the series that can be predicted, and why the others cannot.

    A series is all points that differ in the number of devices alone. Points that failed, are
    imprecise, or ran on several nodes are not used.

    Args:
        points: rows of the table `points` of one run.
        world_sizes: numbers of devices to predict, larger than the measured numbers. If the largest
            exceeds `devices_per_node`, no series can be predicted.
        devices_per_node: number of devices of the largest node.
    """
    trials = Trials(points)
    series: dict[tuple[Any, ...], list[PointRow]] = {}
    for row in mean_of_rounds(points):
        names = list(_SETTINGS)
        if batch_name := batch_column(row):
            names.append(batch_name)
        settings = (str(getattr(row, name)) for name in names)
        series.setdefault((*settings, *sorted(row.params.items())), []).append(row)
    predictions: list[Prediction] = []
    not_predicted: list[NotPredicted] = []
    largest_world = max(world_sizes)
    for series_rows in series.values():
        rows = sorted(series_rows, key=lambda row: row.world_size)
        timed = [row for row in rows if _is_timed(row) and is_on_one_node(row)]
        usable = [row for row in timed if _is_precise(row, trials)]
        if largest_world > devices_per_node:
            not_predicted.append(
                NotPredicted(
                    kind=Unpredictable.SEVERAL_NODES,
                    world_size=largest_world,
                    devices_per_node=devices_per_node,
                )
            )
        elif why := _why_not_predicted(rows, timed, usable):
            not_predicted.append(why)
        else:
            predictions += [_predict_series(usable, world, trials) for world in world_sizes]
    return predictions, not_predicted


def is_on_one_node(row: PointRow) -> bool:
    """Return whether a point ran on a single node; True if unknown."""
    return (row.node_count or 1) == 1


def _is_timed(row: PointRow) -> bool:
    """Return whether a point is ok and has a step time."""
    return row.status is Status.OK and bool(row.step_ms_p50)


def _is_precise(row: PointRow, trials: Trials) -> bool:
    """Return whether the interval of the step is known, and narrow enough."""
    is_known = half_interval(row) is not None or len(trials.rounds(row)) > 1
    return is_known and not is_imprecise(row)


def _step_ms(row: PointRow) -> float:
    """Return the median step of a timed point in ms."""
    assert row.step_ms_p50 is not None
    return row.step_ms_p50


def _why_not_predicted(
    rows: Sequence[PointRow],  # all points of the series
    timed: Sequence[PointRow],  # points on one node with a step time
    usable: Sequence[PointRow],  # timed points with a narrow interval
) -> NotPredicted | None:
    """Return why a series cannot be predicted; None if it can."""
    # Built-in models reduce gradients in training, and `comm_ms` is only timed for gradients.
    is_inference = rows[0].params.get("mode") == "inference"
    is_built_in_model = any(parameter_count(row.workload, row.params) is not None for row in rows)
    has_timed_gradients = any(row.comm_ms is not None for row in rows)
    if is_inference or not (is_built_in_model or has_timed_gradients):
        return NotPredicted(kind=Unpredictable.NO_GRADIENTS, workload=rows[0].workload)
    if len({row.world_size for row in usable}) < 2:
        if imprecise := [row for row in timed if row not in usable]:
            return NotPredicted(
                kind=Unpredictable.IMPRECISE,
                world_sizes=tuple(row.world_size for row in imprecise),
                half_intervals=tuple(map(half_interval, imprecise)),
            )
        world_sizes = tuple(row.world_size for row in usable)
        return NotPredicted(kind=Unpredictable.FEW_WORLDS, world_sizes=world_sizes)
    if rows[0].scaling == "strong":
        return NotPredicted(kind=Unpredictable.STRONG_SCALING)
    models = dict.fromkeys(str(row.device_name) for row in usable)
    if len(models) > 1:
        return NotPredicted(kind=Unpredictable.SEVERAL_MODELS, models=tuple(models))
    if any(row.crowded is True for row in usable):
        return NotPredicted(kind=Unpredictable.CROWDED)
    return None


def _predict_series(rows: Sequence[PointRow], world_size: int, trials: Trials) -> Prediction:
    """Predict the step of a series from its usable points, which are sorted by world size."""
    from scipy.optimize import nnls

    first, last = rows[0], rows[-1]
    with_communication = [row for row in rows if row.world_size > 1]
    exposed_ms = []
    for row in with_communication:
        if row.comm_exposed_ms is None or why_no_breakdown(row):
            # All time beyond the step of the first point counts as communication.
            exposed_ms.append(_step_ms(row) - _step_ms(first))
        else:
            exposed_ms.append(row.comm_exposed_ms)
    # Fit exposed time = constant + slope x bytes, without negative coefficients. A single point
    # cannot show the constant, so it is 0.
    bytes_sent = [_bytes_sent(row.world_size) for row in with_communication]
    constants = np.full(len(bytes_sent), 0.0 if len(bytes_sent) == 1 else 1.0)
    positive_ms = np.maximum(0.0, np.array(exposed_ms, np.float64))
    coefficients, _ = nnls(np.column_stack([constants, bytes_sent]), positive_ms)
    constant_ms, slope_ms = map(float, coefficients)
    added_bytes = _bytes_sent(world_size) - bytes_sent[-1]
    added_ms = slope_ms * added_bytes
    # Upper bound: all communication grows, and computation hides none of the growth.
    comm_ms = constant_ms + slope_ms * bytes_sent[-1]
    if why_no_breakdown(last) is None and last.comm_ms:
        comm_ms = max(last.comm_ms, exposed_ms[-1])
    most_added_ms = max(added_ms, comm_ms * added_bytes / bytes_sent[-1])
    # The errors are logarithms of ratios.
    measured_ms = _step_ms(last)
    step_ms = measured_ms + added_ms
    doublings = max(0.0, math.log2(world_size / last.world_size))
    error_of_doublings = ERROR_OF_A_DOUBLING * math.sqrt(doublings)
    noise = math.hypot(_log_half_interval(last, trials), error_of_doublings)
    # Lower bound: no communication is added.
    error_below = math.hypot(math.log(step_ms / measured_ms), noise)
    error_above = math.hypot(math.log((measured_ms + most_added_ms) / step_ms), noise)
    return Prediction(
        measured=last,
        world_size=world_size,
        step_ms=step_ms,
        step_ms_low=step_ms * math.exp(-error_below),
        step_ms_high=step_ms * math.exp(error_above),
        comm_exposed_ms=max(0.0, exposed_ms[-1]) + added_ms,
        base_world=first.world_size,
        base_ms=_step_ms(first),
    )


def _bytes_sent(world_size: int) -> float:
    """Return the bytes that a device sends for each byte of an all_reduce."""
    return 2 * (world_size - 1) / world_size


def _log_half_interval(row: PointRow, trials: Trials) -> float:
    """Return half the width of the 95 % interval of a step, as a logarithm; 0 if unknown."""
    attempts = trials.rounds(row).values()
    steps_ms = [attempt.step_ms_p50 for attempt in attempts if attempt.step_ms_p50]
    if len(steps_ms) > 1:
        error = stdev(map(math.log, steps_ms)) / math.sqrt(len(steps_ms))
        return student_t(len(steps_ms) - 1) * error
    # The samples of a single round give an interval that ignores the scatter of starts.
    ends_ms = (row.step_ms_ci_low, row.step_ms_ci_high)
    distances = [abs(math.log(end_ms / _step_ms(row))) for end_ms in ends_ms if end_ms]
    return max(distances, default=0.0)
