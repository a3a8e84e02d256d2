"""What the devices and the libraries did while a point was timed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from raybench.records import Device, Measurement, Record
from raybench.records.metric import Column


@dataclass(frozen=True, kw_only=True)
class ConditionColumns:
    """What devices and libraries did meanwhile."""

    throttled: Annotated[bool | None, Column("", "clocks were held down")] = None
    throttle_reasons: Annotated[tuple[str, ...] | None, Column("", "why, as NVML names it")] = None
    sm_clock_mhz_p50: Annotated[
        float | None, Column("MHz", "median while timed, slowest device")
    ] = None
    transports: Annotated[
        tuple[str, ...] | None, Column("", "ways of the bytes between ranks, as NCCL names them")
    ] = None
    nccl_choices: Annotated[
        tuple[str, ...] | None,
        Column(
            "",
            "what NCCL ran for collectives, by its log",
            heading="NCCL ran",
            meaning="algorithm and protocol of the collectives of a step, by NCCL's own log",
            format="choices",
        ),
    ] = None
    attention_kernels: Annotated[
        tuple[str, ...] | None, Column("", "of torch's, those that a step ran")
    ] = None


def condition_columns(measurements: Sequence[Measurement]) -> ConditionColumns:
    """Compute the columns; clocks that no rank read are None."""
    marks = [repetition.timed.throttled for m in measurements for repetition in m.repetitions]
    is_known = any(marks)
    reasons = dict.fromkeys(reason for m in measurements for reason in m.throttle_reasons)
    clocks = [statistics.median(m.sm_clocks_mhz) for m in measurements if m.sm_clocks_mhz]
    return ConditionColumns(
        throttled=any(map(any, marks)) if is_known else None,
        throttle_reasons=tuple(reasons) if is_known else None,
        # The slowest device sets the pace.
        sm_clock_mhz_p50=min(clocks) if clocks and len(clocks) == len(measurements) else None,
        transports=tuple(sorted({way for m in measurements for way in m.transports})) or None,
        nccl_choices=tuple(dict.fromkeys(c for m in measurements for c in m.nccl_choices)) or None,
        attention_kernels=tuple(sorted({k for m in measurements for k in m.attention_kernels}))
        or None,
    )


def throttling_warnings(row: ConditionColumns, record: Record) -> Iterator[str]:
    """Yield in how many of the samples the clocks were limited, and why."""
    if row.throttled:
        timed = [r.timed.throttled for m in record.measurements for r in m.repetitions]
        marks = [mark for marks in timed for mark in marks]
        reasons = ", ".join(row.throttle_reasons or ()) or "reason unknown"
        yield f"clocks were limited in {sum(marks) / len(marks):.0%} of the samples: {reasons}"


def crowding(devices: Sequence[Device]) -> Iterator[str]:
    """Yield a sentence for each host whose CPU workers have less than a core each.

    Nodes of Ray may be of one host: its cores count once.
    """
    hosts: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        if device.kind == "cpu":
            hosts.setdefault((device.host, device.address), []).append(device)
    for (host, _), workers in hosts.items():
        cores = max(worker.cpu_count for worker in workers)
        if len(workers) > cores:
            yield f"{len(workers)} CPU workers share {cores} core{'s' * (cores != 1)} of {host}"
