"""What a data-parallel step would take on more devices than it was measured on. Pure.

Each rank does the same step whatever their number, so all that grows is communication: the step at
the largest measured world size, longer by what its exposed communication grows. That is fitted to
the bytes that a device sends in an all_reduce of s bytes over n devices, 2 (n - 1) / n s: what
nccl-tests divides by its time to get busbw.

The 95 % interval adds three errors as squares of logarithms: what the run leaves open of the step
that it measured, what of the additional communication is hidden, and ERROR_OF_A_DOUBLING for each
doubling of the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

import numpy as np

from raybench.analysis.rounds import Trials, mean_of_rounds
from raybench.analysis.rows import EXECUTION, batch_column
from raybench.errors import ResultsError
from raybench.records import Status
from raybench.results.breakdown import why_no_breakdown
from raybench.results.metrics import WIDEST_INTERVAL, half_interval, is_imprecise
from raybench.results.tables import PointRow
from raybench.stats.summary import student_t
from raybench.workloads.base import parameter_count

# What 23 of 24 committed points that the GPU bounds were missed by at most when 4 H200s of one node
# were predicted from 1 and 2, by benchmarks/prediction_accuracy.py. Other models, machines and
# links were not tried. Errors of further doublings are taken to be independent of each other.
ERROR_OF_A_DOUBLING = 0.05
# Of a run over several nodes: predictions end at this many times its devices. Of simulated steps 94
# to 100 % lie in the intervals up to there; of 32 times as many devices 77 to 100 %.
_FARTHEST = 4
_SETTINGS = ("workload", "scaling", *EXECUTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A point at a number of devices that was not measured; times in milliseconds.

    measured: the row of the largest measured world of its series, of which `point_id` is.
    low, high: a 95 % interval. speed_up and efficiency: over the smallest measured world, which is
    `base_world`. No efficiency is above 100 %, or above what was measured where that is more.
    """

    measured: PointRow
    world_size: int
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    comm_exposed_ms: float
    base_world: int
    base_ms: float

    @property
    def half_interval(self) -> float:
        """Return half of the step's interval, as a share of the step."""
        return (self.step_ms_high - self.step_ms_low) / 2 / self.step_ms

    @property
    def measured_efficiency(self) -> float:
        """Return the efficiency at the largest measured world size, which may be above 1."""
        return self.base_ms / _step_ms(self.measured)

    @property
    def efficiency(self) -> float:
        """Return the efficiency in weak scaling: the batch of a device is fixed."""
        return self._efficiency(self.step_ms)

    @property
    def efficiency_low(self) -> float:
        """Return the low end of the efficiency, by the step's interval alone."""
        return self._efficiency(self.step_ms_high)

    @property
    def efficiency_high(self) -> float:
        """Return the high end of the efficiency."""
        return self._efficiency(self.step_ms_low)

    def _efficiency(self, step_ms: float) -> float:
        return min(self.base_ms / step_ms, max(1.0, self.measured_efficiency))

    @property
    def speed_up(self) -> float:
        """Return the throughput over that of the smallest measured world size."""
        return self.efficiency * self.world_size / self.base_world


def predict(
    points: Sequence[PointRow], world_sizes: Sequence[int], devices_per_node: int
) -> tuple[list[Prediction], list[str]]:
    """Return a prediction for each series and world size, and why each other series has none.

    A series: points that differ in the number of devices alone, in the order of the points.
    points: rows of that table of one run. world_sizes: above the measured ones; the largest decides
    whether a series can be predicted. devices_per_node: of the run's cluster. Raises ResultsError,
    with the first reason, where no series can be predicted.
    """
    trials = Trials(points)
    largest = max(world_sizes)
    found: list[Prediction] = []
    left_out: list[str] = []
    for rows in _series(mean_of_rounds(points)):
        usable = [row for row in rows if _is_timed(row) and not is_imprecise(row)]
        why = _why_not(rows, usable) or _why_not_beyond(usable[-1], largest, devices_per_node)
        if why:
            left_out.append(why)
            continue
        own_error = _own_error(usable[-1], trials)
        found += [_predict_series(usable, world, own_error) for world in world_sizes]
    if not found:
        raise ResultsError(left_out[0] if left_out else "it has no points")
    return found, left_out


def _why_not_beyond(last: PointRow, world_size: int, devices_per_node: int) -> str | None:
    """Return why a series measured up to `last` tells nothing of so many devices; None if it does.

    devices_per_node: of the run's cluster.
    """
    if world_size <= devices_per_node:
        return None
    nodes = max(1, last.node_count or 1)
    if nodes > 1 and world_size <= _FARTHEST * last.world_size:
        return None
    measured = f"measured up to {last.world_size} devices on {nodes} node{'s' * (nodes > 1)}"
    if nodes > 1:
        return (
            f"{measured}, and over more nodes the waits of each message add up: ask for up to "
            f"{_FARTHEST * last.world_size} devices"
        )
    return (
        f"{measured} of {devices_per_node}; {world_size} devices need several nodes, and nothing "
        "measured the network between them: sweep world sizes over two nodes, or ask for no more "
        "devices than a node has"
    )


def _series(points: Sequence[PointRow]) -> Iterator[list[PointRow]]:
    """Yield points that differ in the number of devices alone, the fewest devices first."""
    found: dict[tuple[Any, ...], list[PointRow]] = {}
    for row in points:
        column = batch_column(row)
        settings = tuple(str(getattr(row, name)) for name in _SETTINGS)
        batch = None if column is None else str(getattr(row, column))
        key = (*settings, batch, tuple(sorted(row.params.items())))
        found.setdefault(key, []).append(row)
    for rows in found.values():
        yield sorted(rows, key=lambda row: row.world_size)


def _is_timed(row: PointRow) -> bool:
    return row.status is Status.OK and bool(row.step_ms_p50)


def _step_ms(row: PointRow) -> float:
    """Return the step of a point that a prediction stands on, in ms."""
    assert row.step_ms_p50 is not None
    return row.step_ms_p50


def _why_not(rows: Sequence[PointRow], usable: Sequence[PointRow]) -> str | None:
    """Return why a series cannot be predicted; None where it can.

    rows: all its points; usable: those that are ok and known to 10 %.
    """
    if not any(map(_is_data_parallel, rows)):
        return (
            f"no step of DistributedDataParallel: {rows[0].workload} has no gradients that are "
            "known to be reduced"
        )
    if len({row.world_size for row in usable}) < 2:
        if wide := [row for row in rows if _is_timed(row) and is_imprecise(row)]:
            known = ", ".join(f"{row.world_size} ±{half_interval(row):.1%}" for row in wide)
            return (
                f"needs two world sizes with steps known to ±{WIDEST_INTERVAL:.0%}, but has "
                f"{known}; measure for longer, on devices that nothing else uses"
            )
        worlds = ", ".join(str(row.world_size) for row in usable) or "none"
        return f"needs ok points of two world sizes, has {worlds}; sweep world_size: [1, 2]"
    if rows[0].scaling == "strong":
        return (
            "scales strongly: with global_batch_size fixed a device has another batch at every "
            "world size, and none of the run's steps is that one; sweep batch_size instead"
        )
    if any(row.crowded is True for row in usable):
        return "its workers shared cores, which more devices would not"
    return None


def _is_data_parallel(row: PointRow) -> bool:
    """Return whether DDP reduces the gradients: of a built-in model, or where that was timed."""
    methods = row.methods or {}
    is_built_in = parameter_count(row.workload, row.params) is not None
    return is_built_in or "noop_hook" in methods.get("local_step_ms", "")


def _predict_series(rows: Sequence[PointRow], world_size: int, own_error: float) -> Prediction:
    """Return the step of a series at a world size that was not measured.

    rows: its usable points, the fewest devices first. own_error: half of the 95 % interval of the
    step of the last one, as a logarithm.
    """
    first, last = rows[0], rows[-1]
    # Between nodes communication takes longer: the smaller worlds within a node do not tell of it.
    is_one_node = (last.node_count or 1) == 1
    several = [
        row for row in rows if row.world_size > 1 and ((row.node_count or 1) == 1) is is_one_node
    ]
    exposed_ms = [_exposed_ms(row, first) for row in several]
    factors = [_bytes_sent(row.world_size) for row in several]
    constant_ms, slope_ms = _fit_line(factors, exposed_ms)
    more_bytes = _bytes_sent(world_size) - factors[-1]
    added_ms = slope_ms * more_bytes
    # At least nothing is added, at most all communication grows and none of the growth is hidden.
    whole_ms = constant_ms + slope_ms * factors[-1]
    if why_no_breakdown(last) is None and last.comm_ms:
        whole_ms = max(last.comm_ms, exposed_ms[-1])
    measured_ms = _step_ms(last)
    step_ms = measured_ms + added_ms
    most_ms = measured_ms + max(added_ms, whole_ms * more_bytes / factors[-1])
    doublings = max(0.0, math.log2(world_size / last.world_size))
    noise = math.hypot(own_error, ERROR_OF_A_DOUBLING * math.sqrt(doublings))
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
    """Return the bytes that a device sends for each byte of an all_reduce: from 1 to below 2."""
    return 2 * (world_size - 1) / world_size


def _exposed_ms(row: PointRow, first: PointRow) -> float:
    """Return by how many ms communication makes the step of a point longer.

    Without a breakdown all by which it is longer than the step of `first`.
    """
    known = None if why_no_breakdown(row) else row.comm_exposed_ms
    return _step_ms(row) - _step_ms(first) if known is None else known


def _fit_line(factors: Sequence[float], exposed_ms: Sequence[float]) -> tuple[float, float]:
    """Return (constant, slope) in ms of exposed = constant + slope x factor, neither below 0.

    With one point the constant is 0.
    """
    known = np.maximum(0.0, np.asarray(exposed_ms, dtype=np.float64))
    if len(factors) == 1:
        return 0.0, float(known[0] / factors[0])
    from scipy.optimize import nnls

    (constant, slope), _ = nnls(np.column_stack([np.ones(len(factors)), factors]), known)
    return float(constant), float(slope)


def _own_error(row: PointRow, trials: Trials) -> float:
    """Return half of the 95 % interval of a measured step, as a logarithm; 0 where it is not known.

    From the scatter of its rounds; of one round from its samples, which do not tell how far another
    start would be.
    """
    steps_ms = [one.step_ms_p50 for one in trials.rounds(row).values() if one.step_ms_p50]
    if len(steps_ms) > 1:
        scatter = stdev(map(math.log, steps_ms))
        return student_t(len(steps_ms) - 1) * scatter / math.sqrt(len(steps_ms))
    ends = (row.step_ms_ci_low, row.step_ms_ci_high)
    return max((abs(math.log(end / _step_ms(row))) for end in ends if end), default=0.0)
