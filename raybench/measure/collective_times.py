"""How long each collective of a step takes on a GPU, by the flight recorder of torch's NCCL groups.

Torch can be told to time the collectives of a group, and not to leave it off again. So only a
process that has no other point to run may do this.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raybench.measure.timing import Step

# (kind, ranks of the group) -> the ms of each call of a step, in their order.
CallTimes = Mapping[tuple[str, int], tuple[float, ...]]
Entry = Mapping[str, Any]

# The kind of calls that are issued as one.
COALESCED = "coalesced"
# By how the recorder's names begin, without their underscores: `_all_gather_base`, `send 0->1`.
_KINDS = {
    "allreducebarrier": "barrier",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "coalesced": COALESCED,
}
# The watchdog, which takes the times, looks ten times a second.
_LOOK_S, _LOOKS = 0.05, 60


def time_collectives(step: Step, steps: int) -> CallTimes:
    """Run steps with their collectives; the time of each call in ms, waits for peers included.

    Calls that are issued as one have one time, of kind COALESCED. Medians over the steps. Empty
    where torch records nothing, as with gloo. All ranks must call it together.
    """
    groups = [group for group in _world().pg_map if isinstance(group, dist.ProcessGroup)]
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is not None:
        for group in groups:
            group._enable_collectives_timing()  # type: ignore[attr-defined]
    step()
    issued = _last_id(_entries(dump))
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    entries = _ended_entries(dump)
    calls, rest = divmod(_last_id(entries) - issued, steps)
    if not calls or rest:
        return {}
    return call_times(entries, {group.group_name: group.size() for group in groups}, calls)


def call_times(entries: Sequence[Entry], sizes: Mapping[str, int], calls: int) -> CallTimes:
    """Sort the calls of equal steps by kind, and take medians over the steps.

    entries: of the recorder, in the order of issue, as many as it has kept; the last ones are whole
    steps of so many calls. sizes: of the groups by name.
    """
    ends = range(len(entries), calls - 1, -calls)
    steps = [_by_kind(entries[end - calls : end], sizes) for end in ends]
    return {
        kind: tuple(map(statistics.median, zip(*(one[kind] for one in steps), strict=True)))
        for kind, last in (steps[0] if steps else {}).items()
        if all(len(one[kind]) == len(last) for one in steps)
    }


def _by_kind(
    entries: Sequence[Entry], sizes: Mapping[str, int]
) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for entry in entries:
        duration_ms, name = entry.get("duration_ms"), entry["process_group"][0]
        # Calls that were issued as one have none of their own.
        if duration_ms is not None and name in sizes:
            found[_kind(entry["profiling_name"]), sizes[name]].append(duration_ms)
    return found


def _kind(name: str) -> str:
    plain = name.partition(":")[2].replace("_", "").lower()
    return next((kind for start, kind in _KINDS.items() if plain.startswith(start)), plain)


def _ended_entries(dump: Any) -> list[Entry]:
    """Return what is recorded, as soon as the last call has its time."""
    for _ in range(_LOOKS):
        entries = _entries(dump)
        if not entries or entries[-1]["retired"]:
            break
        time.sleep(_LOOK_S)
    return entries


def _last_id(entries: Sequence[Entry]) -> int:
    return int(entries[-1]["record_id"]) if entries else -1


def _entries(dump: Any) -> list[Entry]:
    if dump is None:
        return []
    recorded = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    entries: list[Entry] = pickle.loads(recorded).get("entries", [])
    return entries


def _world() -> Any:
    return dist.distributed_c10d._world
