"""What NCCL's kernels in a trace say of the calls of a step."""

from __future__ import annotations

import gzip
import json
from typing import Any

from raybench.measure.profiling import TraceEvent, call_times, with_call_times
from raybench.records import Breakdown, Traffic

# As torch writes them: the collective and its group, and NCCL's name alone.
NAMED = {"Collective name": "_allgather_base", "Group size": 2}
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def trace(*kernels: tuple[str, float], **args: Any) -> list[TraceEvent]:
    """Name and ms of each kernel, one after the other; what else a trace holds, besides."""
    events: list[TraceEvent] = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_sm90", "ts": 0, "dur": 10.0},
        {"ph": "X", "cat": "cpu_op", "name": "nccl:all_reduce", "ts": 0, "dur": 10.0},
        {"ph": "M", "name": "process_name"},
    ]
    for place, (name, ms) in enumerate(kernels):
        place_us = 1000 * place
        event = {"cat": "kernel", "name": name, "ts": place_us, "dur": 1e3 * ms, "args": args}
        # Not in the order of time.
        events.insert(0, event)
    return events


def test_the_kernels_of_calls_are_told_by_kind_with_medians_over_the_steps():
    kernels = [
        kernel
        for step in range(3)
        for kernel in (
            ("ncclDevKernel_AllGather_RING_LL(x)", 1.0 + step),
            ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 10.0),
            ("ncclDevKernel_AllGather_RING_LL(x)", 3.0),
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_SIMPLE(x)", 5.0 * step),
            (SEND_RECV, 7.0),
        )
    ]
    assert call_times(trace(*kernels), 3, 4) == {
        ("all_gather", 4): (2.0, 3.0),
        ("reduce_scatter", 4): (10.0,),
        ("all_reduce", 4): (5.0,),
        ("exchange", 4): (7.0,),
    }


def test_a_collective_that_the_trace_names_is_of_its_kind_and_group():
    assert call_times(trace((SEND_RECV, 2.0), **NAMED), 1, 4) == {("all_gather", 2): (2.0,)}


def test_what_is_left_of_the_step_before_is_left_out():
    kernels = [("ncclDevKernel_Broadcast_RING_LL(x)", ms) for ms in (9.0, 1.0, 2.0, 3.0, 4.0)]
    assert call_times(trace(*kernels), 2, 2) == {("broadcast", 2): (2.0, 3.0)}
    assert call_times(trace(kernels[0]), 2, 2) == {}


def sent(kind: str, calls: int) -> Traffic:
    return Traffic(kind=kind, ranks=2, calls=calls, message_bytes=10, bus_bytes=10.0)


def test_what_a_step_sends_gets_the_times_of_its_calls():
    events = trace((SEND_RECV, 2.0), (SEND_RECV, 4.0), ("ncclDevKernel_AllReduce_Sum(x)", 1.0))
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    # Four sends in two groups; two all_reduces where the trace has one.
    step = (sent("send", 4), sent("recv", 4), sent("all_reduce", 3))
    found = with_call_times(Breakdown(traffic=step, methods={"a": "b"}), packed, 1, 2)
    assert [one.call_ms for one in found.traffic] == [(2.0, 4.0), (2.0, 4.0), ()]
    assert found.methods["a"] == "b"
    assert "kernel" in found.methods["comm_busbw_gb_s"]


def test_nothing_is_told_where_the_calls_of_the_trace_are_not_those_that_were_counted():
    packed = gzip.compress(json.dumps({"traceEvents": trace((SEND_RECV, 2.0))}).encode())
    breakdown = Breakdown(traffic=(sent("all_reduce", 0),))
    none = gzip.compress(b'{"traceEvents": []}')
    assert with_call_times(breakdown, none, 1, 2) is breakdown
    other = Breakdown(traffic=(sent("send", 3),))
    two = gzip.compress(json.dumps({"traceEvents": trace(*[(SEND_RECV, 2.0)] * 2)}).encode())
    assert with_call_times(other, two, 1, 2) is other
    assert with_call_times(other, packed, 1, 2) != other
