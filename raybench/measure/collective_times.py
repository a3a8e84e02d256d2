"""How long each collective of a step takes on a GPU: NCCL's kernels in the trace of a profile."""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raybench.records import Breakdown, Traffic

# (kind, ranks of the group) -> the ms of each call of a step, in their order.
CallTimes = Mapping[tuple[str, int], tuple[float, ...]]
Event = Mapping[str, Any]

_RECORDED = "NCCL's kernel of each call in the profile, minimum over ranks"
# One kernel for sends and receives that were issued together, and for all_to_all.
_EXCHANGE = "exchange"
# By how torch names a collective (`_allgather_base`) and NCCL its kernel (`AllGather_RING_LL`),
# without underscores and in small letters.
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": _EXCHANGE,
}


def with_call_times(breakdown: Breakdown, trace: bytes, steps: int, world_size: int) -> Breakdown:
    """Add to what a step sends how long its calls took in the profile.

    trace: of so many equal steps, as `Profile.trace`.
    """
    if not breakdown.traffic:
        return breakdown
    events: Sequence[Event] = json.loads(gzip.decompress(trace))["traceEvents"]
    times = call_times(events, steps, world_size)
    traffic = tuple(replace(one, call_ms=_of_calls(one, times)) for one in breakdown.traffic)
    if not any(one.call_ms for one in traffic):
        return breakdown
    methods = {**breakdown.methods, "comm_busbw_gb_s": _RECORDED}
    return replace(breakdown, traffic=traffic, methods=methods)


def _of_calls(sent: Traffic, times: CallTimes) -> tuple[float, ...]:
    """Return the times of these calls, or of the groups of them that had one kernel each."""
    own = times.get((sent.kind, sent.ranks), ())
    if own:
        return own if len(own) == sent.calls else ()
    groups = times.get((_EXCHANGE, sent.ranks), ())
    return groups if groups and sent.calls % len(groups) == 0 else ()


def call_times(events: Sequence[Event], steps: int, world_size: int) -> CallTimes:
    """Sort NCCL's kernels by kind; the time of each call of a step in ms, waits for peers included.

    Medians over the steps. What is left of the step before them comes first, and is left out.
    """
    kernels = [one for one in events if one.get("cat") == "kernel" and "nccl" in one["name"]]
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for kernel in sorted(kernels, key=lambda one: one["ts"]):
        args = kernel.get("args", {})
        name = args.get("Collective name") or kernel["name"].partition("_")[2]
        found[_kind(name), args.get("Group size", world_size)].append(kernel["dur"] / 1e3)
    return {key: _medians(ms, len(ms) // steps) for key, ms in found.items() if len(ms) >= steps}


def _medians(ms: Sequence[float], calls: int) -> tuple[float, ...]:
    """Take the median of each call over the steps, of the last whole ones."""
    steps = zip(*[iter(ms[len(ms) % calls :])] * calls, strict=True)
    return tuple(map(statistics.median, zip(*steps, strict=True)))


def _kind(name: str) -> str:
    plain = name.replace("_", "").lower()
    return next((kind for start, kind in _KINDS.items() if plain.startswith(start)), _EXCHANGE)
