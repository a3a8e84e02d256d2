"""What of a step is lost against perfect scaling, and to what. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raybench.results.point_row import PointRow
from raybench.stats.outliers import slowest_and_other

# In the order in which they are told; together they are 1 - efficiency.
LOSSES = (
    "lost_comm",
    "lost_compute",
    "lost_wait",
    "lost_data",
    "lost_host",
    "lost_unexplained",
)

# In words.
CAUSES = {
    "lost_comm": "exposed communication",
    "lost_compute": "slower compute",
    "lost_wait": "waiting for the slowest rank",
    "lost_data": "waiting for data",
    "lost_host": "waiting for the host",
    "lost_unexplained": "unexplained",
}


def has_causes(row: object) -> bool:
    """Return whether any cause of what a step loses was measured."""
    return any(getattr(row, name, None) is not None for name in LOSSES[:-1])


def shares_of_loss(row: PointRow, base: PointRow, efficiency: float) -> dict[str, float | None]:
    """Return the shares of the step that are lost, by cause; their sum is 1 - efficiency.

    row, base: rows of the table `points`, both with a throughput. A cause costs what it takes
    longer than in perfect scaling: than in the baseline point, times its share of the work (1 in
    weak scaling, the inverse ratio of devices in strong scaling). Less than 0: it became quicker.

    * lost_comm: the step beyond the slowest rank's own step; of gradients, as far as the
      communication that was timed in other steps can explain it.
    * lost_wait: the slowest rank's own step beyond that of the others.
    * lost_compute: the device's own work takes longer on the others, the optimizer's included;
      with DDP also what it does around the gradients.
    * lost_data: the next batch is late; on a GPU, as far as the device is idle.
    * lost_host: the device is idle because the host is late, other than for data.
    * lost_unexplained: what no cause explains. The step beyond the slowest rank's own one that is
      more than was timed of communication, or less than none; a baseline step that is not the sum
      of its parts; own steps that were not taken apart; samples/s that the step times do not give.

    None for a cause that was not measured; all but lost_unexplained, where nothing was.
    """
    step_ms = _pace_ms(row)
    work = efficiency * step_ms / _pace_ms(base)
    now, before = _parts(row), _parts(base)
    grown = {name: _growth(getattr(now, name), getattr(before, name), work) for name in _NAMES}
    if row.device_type != "cpu":
        grown = _with_data_in_the_gap(grown)
    shares = {name: None if ms is None else ms / step_ms for name, ms in grown.items()}
    found = {name: shares[name.removeprefix("lost_")] for name in LOSSES[:-1]}
    rest = 1 - efficiency - sum(share for share in found.values() if share is not None)
    return {**found, "lost_unexplained": rest}


_NAMES = ("comm", "wait", "compute", "data", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What follows each other in the step of a point, in ms; None where it is not known.

    comm: exposed communication. wait: the slowest rank's excess. compute, data, host: of the rank
    that the slowest one is compared with.
    """

    comm: float | None = None
    wait: float | None = None
    compute: float | None = None
    data: float | None = None
    host: float | None = None


def _parts(row: PointRow) -> _Parts:
    local_ms = row.local_step_ms
    if local_ms is None:
        return _Parts(data=row.data_ms)
    is_alone = row.world_size == 1
    excess_ms = 0.0 if is_alone else row.straggler_ms
    own_ms, data_ms = local_ms - (excess_ms or 0.0), row.data_ms
    on_cpu, device_ms = row.device_type == "cpu", _device_ms(row)
    if is_alone and device_ms is not None:
        # Its timed step is its own one too: the device did not idle longer in it than that leaves.
        own_ms = min(own_ms, max(_pace_ms(row), device_ms))
    compute_ms = own_ms - (data_ms or 0.0) if on_cpu else device_ms
    host_ms = None if on_cpu or device_ms is None else own_ms - device_ms
    return _Parts(
        comm=0.0 if is_alone else _communication_ms(row),
        wait=excess_ms,
        compute=compute_ms,
        data=data_ms,
        host=host_ms,
    )


def _communication_ms(row: PointRow) -> float | None:
    """Return how much longer the step is than the slowest rank's own, as communication explains it.

    Between none and what was measured of communication, and of ranks that are late in turn. All of
    it where collectives were counted but not timed: the own step is then the same with local copies
    in their place, and nothing else differs. None where nothing was measured.

    Communication delays a rank for as long as it runs at most, whether it is waited for or takes
    from the computation beside it.
    """
    timed_ms, exposed_ms = row.comm_ms, row.comm_exposed_ms
    if exposed_ms is None:
        return None
    if timed_ms is None:
        return max(0.0, exposed_ms) if row.comm_calls else None
    most_ms = timed_ms + (row.late_in_turn_ms or 0.0)
    return min(max(0.0, exposed_ms), most_ms)


def _device_ms(row: PointRow) -> float | None:
    """Return the device's work, in ms, on the rank that the slowest one is compared with.

    None where it was not measured.
    """
    by_rank, local_ms = row.device_ms_by_rank or (), row.local_step_ms_by_rank or ()
    if len(by_rank) == 1:
        return by_rank[0]
    if by_rank and len(by_rank) == len(local_ms):
        return by_rank[slowest_and_other(local_ms)[1]]
    local, gap = row.local_step_ms, row.host_gap_ms
    return None if local is None or gap is None else local - gap


def _pace_ms(row: PointRow) -> float:
    """Return the step that the row's samples/s are of: the mean one where it was taken apart."""
    step_ms = row.step_ms_mean if row.local_step_ms_by_rank else row.step_ms_p50
    assert step_ms is not None  # both rows have a throughput
    return step_ms


def _growth(now: float | None, before: float | None, work: float) -> float | None:
    """Return what a part takes beyond its share of the time in the baseline point, in ms."""
    return None if now is None or before is None else now - work * before


def _with_data_in_the_gap(grown: Mapping[str, float | None]) -> dict[str, float | None]:
    """Count only data for which the device idles; what it idles for otherwise is the host's."""
    data, gap = grown["data"], grown["host"]
    if data is None or gap is None:
        return {**grown, "data": None}
    waited = min(max(0.0, data), max(0.0, gap))
    return {**grown, "data": waited, "host": gap - waited}
