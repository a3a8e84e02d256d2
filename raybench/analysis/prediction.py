"""What a data-parallel step would take on more devices than it was measured on. Pure.

Each rank does the same step whatever their number, so all that grows is communication: the step at
the largest measured world, longer by what a longer all_reduce adds to it. How much longer it gets
is read from measured all_reduces or a given link; without them, and within the nodes that were
measured only, the exposed communication of the run itself is fitted to the bytes that a device
sends.

The 95 % interval adds three errors as squares of logarithms: what the run leaves open of the step
that it measured, what of the additional communication is hidden, and
ERROR_OF_A_DOUBLING for each doubling of the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import Any

from raybench.analysis.rounds import Trials, mean_of_rounds
from raybench.analysis.settings import EXECUTION, batch_column
from raybench.errors import ResultsError
from raybench.records import Status
from raybench.results.metrics.parts import why_no_breakdown
from raybench.results.metrics.steps import WIDEST_INTERVAL, half_interval, is_imprecise
from raybench.results.point_row import PointRow
from raybench.stats.communication import Exposure, Link, ReduceTimes, fit_growth, wire_factor
from raybench.stats.summary import student_t
from raybench.workloads.base import parameter_count

# What 27 of 28 committed points that the GPU bounds were missed by at most when 4 H200s of one node
# were predicted from 1 and 2, by benchmarks/prediction_accuracy.py. Other models, machines and
# links were not tried. Errors of further doublings are taken to be independent of each other.
ERROR_OF_A_DOUBLING = 0.05
# Of the forward and backward pass: the backward pass computes two products for each of the forward.
_BACKWARD_SHARE = 2 / 3
_BYTES_PER_GRADIENT = 4
_MIB = 2**20
# Torch's default, for workloads that do not say how large their buckets are.
_BUCKET_MIB = 25
_SETTINGS = ("workload", "scaling", *EXECUTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What all_reduces cost, as far as it is known beside the run.

    devices_per_node: of the run. times: all_reduces within a node. between: those over several
    nodes. link: figures of the network between nodes, used in place of `between`.
    """

    devices_per_node: int
    times: ReduceTimes | None = None
    between: ReduceTimes | None = None
    link: Link | None = None

    def nodes(self, world_size: int) -> int:
        """Return the number of nodes that so many devices need."""
        return -(-world_size // self.devices_per_node)


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
        return self.base_ms / step_of(self.measured)

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
    points: Sequence[PointRow], world_sizes: Sequence[int], network: Network
) -> list[Prediction]:
    """Return the predictions of every series that can be predicted, in the order of its points.

    points: rows of that table of one run.
    Raises ResultsError where no series can be predicted, and where a world size needs more nodes
    than were measured and `network` does not tell what lies between them, with the reason.
    """
    trials = Trials(points)
    series = list(_series(mean_of_rounds(points)))
    reasons = dict.fromkeys(filter(None, map(_why_not, series)))
    models = [_Model.of(rows, network) for rows in series if _why_not(rows) is None]
    if not models:
        raise ResultsError(next(iter(reasons), "no point is ok"))
    _check_nodes([model.last for model in models], world_sizes, network)
    return [
        model.predict(world, _own_error(model.last, trials))
        for model in models
        for world in world_sizes
    ]


def _check_nodes(
    measured: Sequence[PointRow], world_sizes: Sequence[int], network: Network
) -> None:
    """Raise ResultsError for worlds of more nodes than were measured, over an unknown network."""
    largest = max(row.world_size for row in measured)
    between = network.between
    if network.link is not None or (between and between.largest_world >= largest):
        return
    nodes = max(_nodes(row) for row in measured)
    beyond = [world for world in world_sizes if network.nodes(world) > nodes]
    if beyond:
        first, last = (network.nodes(world) for world in (min(beyond), max(beyond)))
        needed = f"{first} nodes" if first == last else f"{first} to {last} nodes"
        raise ResultsError(
            f"measured up to {largest} devices on {nodes} node{'s' * (nodes > 1)} of "
            f"{network.devices_per_node}; {', '.join(map(str, beyond))} devices need {needed}, "
            "and nothing measured the network between them: add --network GB/s@µs, as in 45@30 "
            "(busbw of a large all_reduce and time of a tiny one between nodes), or --network RUN, "
            "a run of jobs/collectives.yaml over several nodes"
        )


def _nodes(row: PointRow) -> int:
    return max(1, row.node_count or 1)


def omissions(points: Sequence[PointRow]) -> dict[str, str]:
    """Return point_id of the first point -> why, of each series that cannot be predicted."""
    found = {rows[0].point_id: _why_not(rows) for rows in _series(mean_of_rounds(points))}
    return {point_id: why for point_id, why in found.items() if why is not None}


def reduce_times(points: Iterable[PointRow], *, between_nodes: bool = False) -> ReduceTimes | None:
    """Return the times of the all_reduces of a run; None where it has none of several devices.

    between_nodes: those over several nodes, else those within one.
    """
    return ReduceTimes.of(
        (row.world_size, float(row.params["size_bytes"]), row.step_ms_p50)
        for row in points
        if row.workload == "collective"
        and row.status is Status.OK
        and row.params.get("operation") == "all_reduce"
        and row.step_ms_p50
        and (_nodes(row) > 1) is between_nodes
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


def _usable(rows: Iterable[PointRow]) -> list[PointRow]:
    """Return the points that a prediction may rest on: ok, and known to 10 %."""
    return [row for row in rows if _is_timed(row) and not is_imprecise(row)]


def _is_timed(row: PointRow) -> bool:
    return row.status is Status.OK and bool(row.step_ms_p50)


def step_of(row: PointRow) -> float:
    """Return the step of a point that a prediction stands on, in ms."""
    assert row.step_ms_p50 is not None
    return row.step_ms_p50


def _why_not(rows: Sequence[PointRow]) -> str | None:
    """Return why a series cannot be predicted; None where it can."""
    ok = _usable(rows)
    if not any(map(_is_data_parallel, rows)):
        return (
            f"no step of DistributedDataParallel: {rows[0].workload} has no gradients that are "
            "known to be reduced"
        )
    if len({row.world_size for row in ok}) < 2:
        return _why_not_two(rows, ok)
    if rows[0].scaling == "strong":
        return (
            "scales strongly: with global_batch_size fixed a device has another batch at every "
            "world size, and none of the run's steps is that one; sweep batch_size instead"
        )
    if any(row.crowded is True for row in ok):
        return "its workers shared cores, which more devices would not"
    return None


def _why_not_two(rows: Sequence[PointRow], usable: Sequence[PointRow]) -> str:
    """Return which world sizes a series has, and what is wrong with the others."""
    wide = [row for row in rows if _is_timed(row) and is_imprecise(row)]
    if wide:
        known = ", ".join(f"{row.world_size} ±{half_interval(row):.1%}" for row in wide)
        return (
            f"needs two world sizes with steps known to ±{WIDEST_INTERVAL:.0%}, but has {known}; "
            "measure for longer, on devices that nothing else uses"
        )
    worlds = ", ".join(str(row.world_size) for row in usable) or "none"
    return f"needs ok points of two world sizes, has {worlds}; sweep world_size: [1, 2]"


def _is_data_parallel(row: PointRow) -> bool:
    """Return whether DDP reduces the gradients: of a built-in model, or where that was timed."""
    methods = row.methods or {}
    is_built_in = parameter_count(row.workload, row.params) is not None
    return is_built_in or "noop_hook" in methods.get("local_step_ms", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The step of one series. exposure: at its largest measured world, whose row is `last`.

    growth: (constant, slope) of its exposed communication over `wire_factor`.
    """

    first: PointRow
    last: PointRow
    exposure: Exposure
    growth: tuple[float, float]
    network: Network
    gradient_bytes: float | None

    @classmethod
    def of(cls, rows: Sequence[PointRow], network: Network) -> _Model:
        ok = _usable(rows)
        first, last = ok[0], ok[-1]
        several = [row for row in ok if row.world_size > 1]
        exposed = [_exposure_ms(row, first) for row in several]
        model = cls(
            first=first,
            last=last,
            exposure=_exposure(first, last, exposed[-1]),
            growth=fit_growth([row.world_size for row in several], exposed),
            network=network,
            gradient_bytes=_gradient_bytes(last),
        )
        return replace(model, exposure=model.with_known_communication())

    def with_known_communication(self) -> Exposure:
        """Return the exposure; untimed communication takes as long as measured all_reduces."""
        times, size_bytes = self.network.times, self.gradient_bytes
        if self.exposure.comm_ms > 0 or times is None or size_bytes is None:
            return self.exposure
        world = self.last.world_size
        whole_ms = times.time_ms(world, self.message_bytes) * size_bytes / self.message_bytes
        return replace(self.exposure, comm_ms=whole_ms)

    @property
    def message_bytes(self) -> float:
        mib = float(self.last.params.get("bucket_cap_mb", _BUCKET_MIB))
        return min(mib * _MIB, self.gradient_bytes or math.inf)

    def predict(self, world_size: int, own_error: float) -> Prediction:
        """Return the prediction. own_error: half of the measured interval, as a logarithm."""
        measured_ms = step_of(self.last)
        added_ms, least_ms, most_ms = self.increase_ms(world_size)
        step_ms, least, most = (measured_ms + ms for ms in (added_ms, least_ms, most_ms))
        doublings = max(0.0, math.log2(world_size / self.last.world_size))
        noise = math.hypot(own_error, ERROR_OF_A_DOUBLING * math.sqrt(doublings))
        return Prediction(
            measured=self.last,
            world_size=world_size,
            step_ms=step_ms,
            step_ms_low=step_ms * math.exp(-math.hypot(math.log(step_ms / least), noise)),
            step_ms_high=step_ms * math.exp(math.hypot(math.log(most / step_ms), noise)),
            comm_exposed_ms=max(0.0, self.exposure.exposed_ms) + added_ms,
            base_world=self.first.world_size,
            base_ms=step_of(self.first),
        )

    def increase_ms(self, world_size: int) -> tuple[float, float, float]:
        """Return by how many ms the step is longer than measured: expected, at least, at most."""
        comm_ms = self.comm_ms(world_size)
        if comm_ms is not None and self.exposure.comm_ms > 0:
            return (self.exposure.growth_ms(comm_ms), *self.exposure.bounds_ms(comm_ms))
        constant, slope = self.growth
        last = wire_factor(self.last.world_size)
        added_ms = slope * (wire_factor(world_size) - last)
        whole_ms = (self.exposure.comm_ms or constant + slope * last) / last
        most_ms = whole_ms * (wire_factor(world_size) - last) * max(1.0, self.exposure.share)
        return added_ms, 0.0, max(added_ms, most_ms)

    def comm_ms(self, world_size: int) -> float | None:
        """Return how many ms the gradients take; None where neither all_reduces nor a link tell.

        By the ratio of measured all_reduces of so many devices and of as many as the step had;
        where the latter are not known, and over a link, by the bytes of the gradients.
        """
        network, world = self.network, self.last.world_size
        nodes = network.nodes(world_size)
        if nodes > 1 and network.link is not None:
            size_bytes = self.bytes_between_nodes()
            messages = size_bytes / self.message_bytes
            whole_ms = network.link.time_ms(world_size, nodes, size_bytes, messages)
            return max(whole_ms, self.exposure.comm_ms)
        times = network.between if nodes > 1 else network.times
        # Within a node all_reduces of no more devices than the step tell nothing of growth.
        if times is None or times.largest_world < world + (nodes == 1):
            return None
        one_ms = times.time_ms(world_size, self.message_bytes)
        known = network.between if _nodes(self.last) > 1 else network.times
        if known is not None:
            return self.exposure.comm_ms * one_ms / known.time_ms(world, self.message_bytes)
        whole_ms = one_ms * self.bytes_between_nodes() / self.message_bytes
        return max(whole_ms, self.exposure.comm_ms)

    def bytes_between_nodes(self) -> float:
        """Return the bytes of its gradients. Raises ResultsError where they tell nothing."""
        if self.gradient_bytes is None:
            raise ResultsError(
                f"--network needs the bytes of the gradients, which are not known of "
                f"{self.last.workload}; name a run of all_reduces both within a node of "
                "these and over several"
            )
        if not self.exposure.comm_ms:
            raise ResultsError(
                "--network needs how much of its communication the step hides, and the run has no "
                "comm_ms; sweep it anew, or name a run that has all_reduces within its node too"
            )
        return self.gradient_bytes


def _exposure_ms(row: PointRow, first: PointRow) -> float:
    """Return what communication adds in ms; without a breakdown all beyond one device."""
    known = None if why_no_breakdown(row) else row.comm_exposed_ms
    return step_of(row) - step_of(first) if known is None else known


def _exposure(first: PointRow, last: PointRow, exposed_ms: float) -> Exposure:
    has_parts = why_no_breakdown(last) is None
    comm_ms = last.comm_ms if has_parts else None
    passes_ms = first.compute_ms or step_of(first)
    accumulation = max(1, int(last.params.get("grad_accumulation", 1)))
    return Exposure(
        comm_ms=comm_ms or 0.0,
        exposed_ms=exposed_ms,
        # The gradients of the last backward pass alone are reduced.
        hideable_ms=_BACKWARD_SHARE * passes_ms / accumulation,
        local_ms=step_of(last) - max(0.0, exposed_ms),
    )


def _gradient_bytes(row: PointRow) -> float | None:
    """Return the bytes that a step reduces: 4 for each parameter, also under autocast."""
    count = parameter_count(row.workload, row.params)
    return None if count is None else float(_BYTES_PER_GRADIENT * count)


def _own_error(row: PointRow, trials: Trials) -> float:
    """Return half of the 95 % interval of a measured step, as a logarithm.

    From the scatter of its rounds; of one round from its samples, which do not tell how far another
    start would be.
    """
    steps_ms = [one.step_ms_p50 for one in trials.rounds(row).values() if one.step_ms_p50]
    if len(steps_ms) > 1:
        scatter = stdev(map(math.log, steps_ms))
        return student_t(len(steps_ms) - 1) * scatter / math.sqrt(len(steps_ms))
    ends = (row.step_ms_ci_low, row.step_ms_ci_high)
    return max((abs(math.log(end / step_of(row))) for end in ends if end), default=0.0)
