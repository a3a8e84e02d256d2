"""Collectives on gloo: three ranks are started once and do everything."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import make_context, outcome_of_check
from forked import gloo, run_ranks

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads.communication.collective import Collective
from raybench.workloads.communication.collective_operations import (
    Payload,
    busbw_factor,
    output_expected,
)

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv",
)  # fmt: skip
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64")
IN_PLACE = ("all_gather", "reduce_scatter")
CASES: dict[str, dict[str, Any]] = {
    **{operation: {"operation": operation} for operation in OPERATIONS},
    **{
        f"{operation} {dtype}": {"operation": operation, "dtype": dtype}
        for operation, dtype in itertools.product(("all_reduce", "reduce_scatter"), DTYPES[2:])
    },
    **{f"{name} in place": {"operation": name, "in_place": True} for name in IN_PLACE},
    # More than is compared at a time, and no multiple of it.
    **{
        f"{operation} large": {"operation": operation, "dtype": "int8", "size_bytes": 3 * 2**20}
        for operation in ("all_reduce", "all_gather")
    },
}  # fmt: skip


def observe(case: str, rank: int, world_size: int) -> dict[str, Any]:
    parameters = {"size_bytes": 48 * 16, **CASES[case]}
    workload = Collective(make_context(rank, world_size), **parameters)
    untouched = "" if workload._grows else outcome_of_check(workload)
    checks = []
    for steps in (1, 3, 9):
        for _ in range(steps):
            workload.step()
        checks.append(outcome_of_check(workload))
    dist.barrier()
    workload._issue = lambda: None
    idle = outcome_of_check(workload)
    workload._fill()
    return {
        "untouched": untouched,
        "checks": checks,
        "idle": idle,
        "zeros": int((workload._buffers.input == 0).sum()),
        "bytes": workload.message_bytes,
        "factor": workload.busbw_factor,
    }


def spoiled(rank: int, world_size: int) -> list[str]:
    """What `check` says of each operation when one element was changed on its way to rank 1."""
    told = []
    for operation in OPERATIONS:
        workload = Collective(
            make_context(rank, world_size), operation=operation, size_bytes=48 * 16, dtype="int32"
        )
        issue = workload._issue

        def damage(workload=workload, issue=issue):
            issue()
            if rank == 1:
                workload._buffers.output[5] += 1

        workload._issue = damage
        workload.step()
        told.append(outcome_of_check(workload))
    return told


def run_rank(rank: int, world_size: int, store: str) -> dict[str, Any]:
    with gloo(rank, world_size, store):
        seen: dict[str, Any] = {case: observe(case, rank, world_size) for case in CASES}
        return {**seen, "spoiled": spoiled(rank, world_size)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(run_rank, 3, 3, str(tmp_path_factory.mktemp("group") / "store"))


@pytest.mark.parametrize("case", CASES)
def test_the_payload_is_right_after_every_block_of_steps(case, ranks):
    assert [rank[case]["checks"] for rank in ranks] == [["right"] * 3] * len(ranks)
    # No element that is sent is zero.
    assert [rank[case]["zeros"] for rank in ranks] == [0] * len(ranks)


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_moves_nothing_is_found_out_on_every_rank_that_receives(case, ranks):
    receivers = ranks[1:] if case.startswith("broadcast") else ranks
    for rank, seen in enumerate(receivers, start=len(ranks) - len(receivers)):
        operation = case.split()[0]
        assert seen[case]["idle"].startswith(f"rank {rank}: {operation} of "), seen[case]["idle"]
        assert "left a wrong payload: element " in seen[case]["idle"]
        if not (operation == "all_reduce" or case == "reduce_scatter in place"):
            assert "wrong payload" in seen[case]["untouched"]


def test_one_wrong_element_is_named_by_rank_operation_and_place(ranks):
    for operation, told in zip(OPERATIONS, ranks[1]["spoiled"], strict=True):
        assert told.startswith(
            f"rank 1: {operation} of 768 bytes left a wrong payload: element 5 of "
        ), told
    assert ranks[0]["spoiled"] == ["right"] * len(OPERATIONS)


@pytest.mark.parametrize("case", CASES)
def test_message_and_factor_are_those_of_nccl_tests(case, ranks):
    count = len(ranks)
    assert (busbw_factor("all_reduce", 8), busbw_factor("all_gather", 8)) == (1.75, 0.875)
    factors = {"all_reduce": 2 * (count - 1) / count, "broadcast": 1.0, "sendrecv": 1.0}
    for rank in ranks:
        assert rank[case]["bytes"] == CASES[case].get("size_bytes", 768)
        assert rank[case]["factor"] == factors.get(case.split()[0], (count - 1) / count)


def test_an_output_is_told_in_order_without_gaps():
    segments = output_expected("all_to_all", 12, rank=1, world_size=3)
    assert [(s.ranks, s.start, s.length) for s in segments] == [
        ((0,), 4, 4), ((1,), 4, 4), ((2,), 4, 4),
    ]  # fmt: skip
    (ring,) = output_expected("sendrecv", 12, rank=0, world_size=3)
    assert ring.ranks == (2,)


@pytest.mark.parametrize(
    ("parameters", "changes", "message"),
    [
        ({}, {"world_size": 1}, "needs at least 2 ranks, world_size is 1; raise world_size"),
        ({}, {"precision": Precision.BF16}, "precision bf16 means nothing to a message; leave"),
        ({"operation": "all_reduce", "in_place": False}, {}, "all_reduce in place only; leave in_"),
        ({"operation": "sendrecv", "in_place": True}, {}, "sendrecv out of place only; leave in_"),
        ({"operation": "broadcast", "size_bytes": 1002}, {}, "give a multiple of 4"),
        ({"operation": "all_gather", "size_bytes": 1000}, {"world_size": 3}, "a multiple of 12"),
    ],
)
def test_what_cannot_be_done_is_one_line(parameters, changes, message):
    with pytest.raises(UsageError) as caught:
        Collective(make_context(0, **{"world_size": 2, **changes}), **parameters)
    assert str(caught.value).startswith("workload collective: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 5, 64])
def test_sums_of_payloads_are_exact_in_any_order(dtype, world_size):
    payload = Payload(getattr(torch, dtype), torch.device("cpu"), world_size, seed=1)
    sent = [torch.empty(5000, dtype=getattr(torch, dtype)) for _ in range(world_size)]
    for rank, buffer in enumerate(sent):
        payload.fill(buffer, rank)
    exact = torch.stack(sent).double().sum(dim=0)
    backwards = sent[-1].clone()
    for buffer in reversed(sent[:-1]):
        backwards += buffer
    assert torch.equal(backwards.double(), exact)
    assert payload.first_mismatch(backwards, tuple(range(world_size)), 0) is None
    assert not torch.equal(sent[0], sent[1])


def test_a_payload_tells_data_that_landed_elsewhere():
    payload = Payload(torch.float32, torch.device("cpu"), 2, seed=1)
    sent = torch.empty(2**21)
    payload.fill(sent, 0)
    for shift in (1, 2**10, 2**20):
        moved = payload.first_mismatch(sent.roll(shift), (0,), 0)
        assert moved is not None
        assert moved.index < 10
    sent[-1] = torch.nan
    wrong = payload.first_mismatch(sent, (0,), 0)
    assert wrong is not None
    assert wrong.index == 2**21 - 1
