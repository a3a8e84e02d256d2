"""The predicted step of a data-parallel workload on more devices of the same node.

Each rank does the same step at any number of devices, so only communication grows. The prediction
is the step at the largest measured world size, plus the growth of its exposed communication. The
growth is fitted to the bytes that a device sends in an all_reduce of s bytes over n devices,
2 (n - 1) / n s, as nccl-tests computes busbw.

The 95 % interval adds the squares of three errors, as logarithms: of the measured step, of the
hidden part of the additional communication, and ERROR_OF_A_DOUBLING for each doubling of devices.

Steps over several nodes are not predicted. They depend on the algorithm that NCCL chooses, and no
steps over a network were measured to check an interval. On 64 instead of
16 devices in nodes of 8, a flat ring sends 5 % more between nodes, a hierarchical all_reduce 75 %
more.
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

# The largest error of 22 of 24 committed GPU-bound points, when 4 H200s of one node were predicted
# from 1 and 2 (benchmarks/prediction_accuracy.py). Other models and links were not tested. Errors
# of several doublings are assumed to be independent.
ERROR_OF_A_DOUBLING = 0.05
_SETTINGS = ("workload", "scaling", *EXECUTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A point at a number of devices that was not measured."""

    # The point of the series with the most devices, among points that `predict` uses.
    measured: PointRow
    world_size: int
    step_ms: float
    # 95 % interval.
    step_ms_low: float
    step_ms_high: float
    # Exposed communication in `step_ms`; without a breakdown, all time beyond `base_ms`.
    comm_exposed_ms: float
    # The smallest world size of the series, and its step.
    base_world: int
    base_ms: float

    @property
    def half_interval(self) -> float:
        """Half of the step's 95 % interval over the step."""
        return (self.step_ms_high - self.step_ms_low) / 2 / self.step_ms

    @property
    def measured_efficiency(self) -> float:
        """The efficiency of the largest measured world size over the smallest."""
        return self.base_ms / _step_ms(self.measured)

    @property
    def efficiency(self) -> float:
        """base_ms / step_ms, at most `max(1, measured_efficiency)`."""
        return self._efficiency(self.step_ms)

    @property
    def efficiency_low(self) -> float:
        """The low end of the 95 % interval of `efficiency`, with an exact base_ms."""
        return self._efficiency(self.step_ms_high)

    @property
    def efficiency_high(self) -> float:
        """The high end of the 95 % interval of `efficiency`, with an exact base_ms."""
        return self._efficiency(self.step_ms_low)

    def _efficiency(self, step_ms: float) -> float:
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
    """Why a series cannot be predicted. Fields of other kinds are empty."""

    kind: Unpredictable
    # SEVERAL_NODES: the largest requested number of devices, and the devices of a node.
    world_size: int | None = None
    devices_per_node: int | None = None
    # NO_GRADIENTS.
    workload: str = ""
    # IMPRECISE: world sizes of the imprecise points; FEW_WORLDS: of the usable points.
    world_sizes: tuple[int, ...] = ()
    # IMPRECISE: half of each step's 95 % interval, relative to the step; None with too few samples.
    half_intervals: tuple[float | None, ...] = ()
    # SEVERAL_MODELS.
    models: tuple[str, ...] = ()


def predict(
    points: Sequence[PointRow], world_sizes: Sequence[int], devices_per_node: int
) -> tuple[list[Prediction], list[NotPredicted]]:
    """Return the predictions of all series, and why other series cannot be predicted.

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
        names = (*_SETTINGS, *filter(None, [batch_column(row)]))
        settings = (str(getattr(row, name)) for name in names)
        series.setdefault((*settings, *sorted(row.params.items())), []).append(row)
    predictions: list[Prediction] = []
    left_out: list[NotPredicted] = []
    for unordered in series.values():
        rows = sorted(unordered, key=lambda row: row.world_size)
        timed = [row for row in rows if _is_timed(row) and is_on_one_node(row)]
        usable = [row for row in timed if _is_precise(row, trials)]
        largest = max(world_sizes)
        if largest > devices_per_node:
            left_out.append(
                NotPredicted(
                    kind=Unpredictable.SEVERAL_NODES,
                    world_size=largest,
                    devices_per_node=devices_per_node,
                )
            )
        elif why := _why_not(rows, timed, usable):
            left_out.append(why)
        else:
            predictions += [_predict_series(usable, world, trials) for world in world_sizes]
    return predictions, left_out


def is_on_one_node(row: PointRow) -> bool:
    """Return whether a point ran on a single node; True if unknown."""
    return (row.node_count or 1) == 1


def _is_timed(row: PointRow) -> bool:
    return row.status is Status.OK and bool(row.step_ms_p50)


def _is_precise(row: PointRow, trials: Trials) -> bool:
    """Return whether the interval of the step is known, and narrow enough."""
    is_known = half_interval(row) is not None or len(trials.rounds(row)) > 1
    return is_known and not is_imprecise(row)


def _step_ms(row: PointRow) -> float:
    assert row.step_ms_p50 is not None
    return row.step_ms_p50


def _why_not(
    rows: Sequence[PointRow], timed: Sequence[PointRow], usable: Sequence[PointRow]
) -> NotPredicted | None:
    """Return why a series cannot be predicted; None if it can.

    Args:
        rows: all points of the series.
        timed: its ok points on one node.
        usable: timed points whose step is known precisely.
    """
    # DDP reduces gradients if a built-in model is trained, or if `comm_ms` is known, which is timed
    # for buckets of gradients alone.
    if rows[0].params.get("mode") == "inference" or not any(
        parameter_count(row.workload, row.params) is not None or row.comm_ms is not None
        for row in rows
    ):
        return NotPredicted(kind=Unpredictable.NO_GRADIENTS, workload=rows[0].workload)
    if len({row.world_size for row in usable}) < 2:
        if wide := [row for row in timed if row not in usable]:
            return NotPredicted(
                kind=Unpredictable.IMPRECISE,
                world_sizes=tuple(row.world_size for row in wide),
                half_intervals=tuple(map(half_interval, wide)),
            )
        worlds = tuple(row.world_size for row in usable)
        return NotPredicted(kind=Unpredictable.FEW_WORLDS, world_sizes=worlds)
    if rows[0].scaling == "strong":
        return NotPredicted(kind=Unpredictable.STRONG_SCALING)
    if len(models := dict.fromkeys(str(row.device_name) for row in usable)) > 1:
        return NotPredicted(kind=Unpredictable.SEVERAL_MODELS, models=tuple(models))
    if any(row.crowded is True for row in usable):
        return NotPredicted(kind=Unpredictable.CROWDED)
    return None


def _predict_series(rows: Sequence[PointRow], world_size: int, trials: Trials) -> Prediction:
    """Return the predicted step of a series, whose usable points have the fewest devices first."""
    from scipy.optimize import nnls

    first, last = rows[0], rows[-1]
    with_peers = [row for row in rows if row.world_size > 1]
    exposed_ms = []
    for row in with_peers:
        if row.comm_exposed_ms is None or why_no_breakdown(row):
            # All time beyond the step of the first point counts as communication.
            exposed_ms.append(_step_ms(row) - _step_ms(first))
        else:
            exposed_ms.append(row.comm_exposed_ms)
    # Fit exposed = constant + slope x factor, without negative coefficients. A single point cannot
    # show the constant, so it is 0.
    factors = [_bytes_sent(row.world_size) for row in with_peers]
    constants = np.full(len(factors), 0.0 if len(factors) == 1 else 1.0)
    positive_ms = np.maximum(0.0, np.array(exposed_ms, np.float64))
    fitted, _ = nnls(np.column_stack([constants, factors]), positive_ms)
    constant_ms, slope_ms = map(float, fitted)
    more_bytes = _bytes_sent(world_size) - factors[-1]
    added_ms = slope_ms * more_bytes
    # Upper bound: all communication grows, and none of the growth is hidden.
    whole_ms = constant_ms + slope_ms * factors[-1]
    if why_no_breakdown(last) is None and last.comm_ms:
        whole_ms = max(last.comm_ms, exposed_ms[-1])
    measured_ms = _step_ms(last)
    step_ms = measured_ms + added_ms
    most_ms = measured_ms + max(added_ms, whole_ms * more_bytes / factors[-1])
    doublings = max(0.0, math.log2(world_size / last.world_size))
    noise = math.hypot(_log_half_interval(last, trials), ERROR_OF_A_DOUBLING * math.sqrt(doublings))
    return Prediction(
        measured=last,
        world_size=world_size,
        step_ms=step_ms,
        step_ms_low=step_ms * math.exp(-math.hypot(math.log(step_ms / measured_ms), noise)),
        step_ms_high=step_ms * math.exp(math.hypot(math.log(most_ms / step_ms), noise)),
        comm_exposed_ms=max(0.0, exposed_ms[-1]) + added_ms,
        base_world=first.world_size,
        base_ms=_step_ms(first),
    )


def _bytes_sent(world_size: int) -> float:
    """Return the bytes that a device sends for each byte of an all_reduce."""
    return 2 * (world_size - 1) / world_size


def _log_half_interval(row: PointRow, trials: Trials) -> float:
    """Return half of the 95 % interval of a measured step, as a logarithm; 0 if unknown.

    The interval is over the rounds. A single round gives an interval over its samples, which
    ignores the scatter of starts.
    """
    attempts = trials.rounds(row).values()
    steps_ms = [attempt.step_ms_p50 for attempt in attempts if attempt.step_ms_p50]
    if len(steps_ms) > 1:
        error = stdev(map(math.log, steps_ms)) / math.sqrt(len(steps_ms))
        return student_t(len(steps_ms) - 1) * error
    ends = (row.step_ms_ci_low, row.step_ms_ci_high)
    return max((abs(math.log(end / _step_ms(row))) for end in ends if end), default=0.0)
