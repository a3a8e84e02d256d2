"""Checks by one all_reduce over all devices: that it works, its first time, its bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from raybench.cluster.point_end import cause_of
from raybench.doctor.facts import Check, Facts, Verdict
from raybench.job.model import Measure, Span
from raybench.job.point import Point, Precision
from raybench.records import Answer, Measurement, Task
from raybench.stats import summary

_MIB = 2**20
_SIZE_BYTES = {"cuda": 256 * _MIB, "cpu": 64 * _MIB}
_SLOW_S = 10.0
_NS_PER_S = 1e9
_NAME = "collective"
_SETTINGS = Measure(
    warmup=Span(min=5, max=5),
    iterations=Span(min=20, max=20),
    max_seconds=10.0,
    timeout_s=120.0,
    breakdown=False,
)


def all_reduce(kind: Literal["cuda", "cpu"], world_size: int) -> Task:
    """Return the task of all workers."""
    point = Point(
        workload="collective",
        params={
            "operation": "all_reduce",
            "size_bytes": _SIZE_BYTES[kind],
            "dtype": "float32",
        },
        world_size=world_size,
        precision=Precision.FP32,
        batch_size=None,
        global_batch_size=None,
        scaling=None,
    )
    return Task(point=point, settings=_SETTINGS)


def not_run(facts: Facts) -> Check | None:
    """Return the check that stands in for the collective where none is run; None where one is."""
    if facts.refusal:
        advice = f"raybench measures nothing here: {facts.refusal}"
        return Check(name=_NAME, verdict=Verdict.FAIL, found="not run", advice=advice)
    if len(facts.devices) == 1:
        return Check(name=_NAME, verdict=Verdict.OK, found="none: there is one device")
    return None


def judge(answers: Sequence[Answer]) -> list[Check]:
    """Return the checks of the workers' answers: a failed one, or first time and bandwidth."""
    if cause := cause_of(answers):
        failed = Check(
            name=_NAME,
            verdict=Verdict.FAIL,
            found=f"rank {cause.rank}: {cause.error_type}: {cause.message}",
            advice="nothing that communicates can be measured: read the whole error in --json; run "
            "again with NCCL_DEBUG=WARN on GPUs; look at the network between the nodes and at the "
            "variables above",
            details={"rank": cause.rank, "error_type": cause.error_type, "detail": cause.detail},
        )
        return [failed]
    measurements = [answer for answer in answers if isinstance(answer, Measurement)]
    return [_first(measurements), _bandwidth(measurements)]


def _first(measurements: Sequence[Measurement]) -> Check:
    """Return the check of the time to form the group, with NCCL's set-up in the first call."""
    first_s = max(
        (m.setup_s or 0.0) + m.repetitions[0].warmup.step_ns[0] / _NS_PER_S for m in measurements
    )
    slow = first_s > _SLOW_S
    return Check(
        name="first collective",
        verdict=Verdict.WARN if slow else Verdict.OK,
        found=f"{first_s:.2f} s to form the group of {len(measurements)} and finish one all_reduce",
        advice="slow to connect: look at name resolution, and at interfaces that the other nodes "
        "do not reach (NCCL_SOCKET_IFNAME)"
        if slow
        else "",
        details={"first_collective_s": first_s},
    )


def _bandwidth(measurements: Sequence[Measurement]) -> Check:
    size_bytes, factor = measurements[0].message_bytes, measurements[0].busbw_factor
    assert size_bytes is not None
    assert factor is not None
    step_s = summary.step_time([m.step_ns for m in measurements]) / _NS_PER_S
    algbw = size_bytes / step_s / 1e9
    return Check(
        name="all_reduce",
        verdict=Verdict.OK,
        found=f"{size_bytes // _MIB} MiB, payload right, {step_s * 1e3:.3g} ms: "
        f"busbw {algbw * factor:.4g} GB/s",
        details={
            "size_bytes": size_bytes,
            "step_ms": step_s * 1e3,
            "algbw_gb_s": algbw,
            "busbw_gb_s": algbw * factor,
        },
    )
