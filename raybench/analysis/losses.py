"""What of a step is lost against perfect scaling, and to what. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]

# In the order in which they are told; together they are 1 - efficiency.
LOSSES = (
    "lost_comm",
    "lost_compute",
    "lost_wait",
    "lost_data",
    "lost_host",
    "lost_unexplained",
)


def lost_shares(row: Row, base: Row, efficiency: float) -> dict[str, float | None]:
    """The shares of the step that are lost, by cause; their sum is 1 - efficiency.

    row, base: rows of the table `points`, both with a throughput. A cause costs what it takes
    longer than in perfect scaling: than in the baseline point, times its share of the work (1 in
    weak scaling, the inverse ratio of devices in strong scaling). Less than 0: it became quicker.

    * lost_comm: communication that computing does not hide.
    * lost_compute: the device's own work takes longer, the optimizer's included; with DDP also
      what it does around the gradients.
    * lost_wait: the slowest rank is later than the others. What makes it late is in its compute
      time, else in exposed communication, and is taken out there.
    * lost_data: the next batch is late; on a GPU, as far as the device is idle.
    * lost_host: the device is idle because the host is late, other than for data.
    * lost_unexplained: the rest. The causes come from other steps than the step time, and each
      from the rank where it is longest, so the rest can be negative.

    None for a cause that was not measured; all but lost_unexplained, where nothing was.
    """
    step_ms = row["step_ms_p50"]
    work = efficiency * step_ms / base["step_ms_p50"]
    grown = {name: _growth(name, row, base, work) for name in _PARTS}
    lost_ms = _causes(grown, idles=row["device_type"] != "cpu")
    shares = {name: None if lost is None else lost / step_ms for name, lost in lost_ms.items()}
    rest = 1 - efficiency - sum(share for share in shares.values() if share is not None)
    return {**shares, "lost_unexplained": rest}


_PARTS = ("comm_exposed_ms", "compute_ms", "optimizer_ms", "wait_ms", "data_ms", "host_gap_ms")
# A lone rank neither communicates nor waits for others.
_NEEDS_PEERS = ("comm_exposed_ms", "wait_ms")


def _causes(grown: Mapping[str, float | None], *, idles: bool) -> dict[str, float | None]:
    """What each cause costs, in ms, no time counted twice."""
    comm, compute, optimizer, wait, data, gap = (grown[name] for name in _PARTS)
    if compute is not None:
        compute += optimizer or 0.0
    waited = None if wait is None else max(0.0, wait)
    in_compute = min(waited or 0.0, max(0.0, compute or 0.0))
    in_comm = min((waited or 0.0) - in_compute, max(0.0, comm or 0.0))
    if idles:
        # Data that comes while the device is busy costs nothing.
        data = None if data is None or gap is None else min(max(0.0, data), max(0.0, gap))
    return {
        "lost_comm": None if comm is None else comm - in_comm,
        "lost_compute": None if compute is None else compute - in_compute,
        "lost_wait": None if waited is None else in_compute + in_comm,
        "lost_data": data,
        "lost_host": None if gap is None else gap - (data or 0.0),
    }


def _growth(name: str, row: Row, base: Row, work: float) -> float | None:
    """What a part takes longer than its share of what it takes in the baseline point, in ms."""
    now, before = _part(name, row), _part(name, base)
    return None if now is None or before is None else now - work * before


def _part(name: str, row: Row) -> float | None:
    if name in _NEEDS_PEERS and row["world_size"] == 1:
        return 0.0
    value = row[name]
    return None if value is None or value != value else float(value)
