"""Collectives, pairs and a small training on gloo: three ranks are started once for all."""

import itertools
from typing import Any

import pytest
import torch
from builders import make_context, outcome_of_check
from forked import answers_of_ranks, gloo
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from raybench.errors import UsageError
from raybench.workloads.base import WrongResultError
from raybench.workloads.collective import (
    Collective,
    GroupedCollective,
    Payload,
    busbw_factor,
    groups_text,
    parse_groups,
)
from raybench.workloads.kernels import SameBits
from raybench.workloads.networks import Smoke
from raybench.workloads.pairs import Pairs, pairs_of_turn, parse_pairs, turns

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv",
)  # fmt: skip
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64")
CASES: dict[str, dict[str, Any]] = {
    **{operation: {"operation": operation} for operation in OPERATIONS},
    **{
        f"{operation} {dtype}": {"operation": operation, "dtype": dtype}
        for operation, dtype in itertools.product(("all_reduce", "reduce_scatter"), DTYPES[2:])
    },
    # More than is compared at a time, and no multiple of it.
    **{
        f"{operation} large": {"operation": operation, "dtype": "int8", "size_bytes": 3 * 2**20}
        for operation in ("all_reduce", "all_gather")
    },
}
DIRECTIONS = ("forward", "backward", "both", "round_trip")


class BentGradients(Smoke):
    """One rank changes a gradient after all have reduced them."""

    def step(self) -> None:
        super().step()
        if torch.distributed.get_rank() == 2:
            next(self.model.parameters()).grad[0, 0] += 1


class Idle(Collective):
    """Moves nothing."""

    def step(self) -> None: ...


class Spoiled(Collective):
    """Changes one element on its way to rank 1."""

    def step(self) -> None:
        super().step()
        if torch.distributed.get_rank() == 1:
            self.output[5] += 1


def observe_collective(case: str, rank: int, world_size: int) -> dict[str, Any]:
    context, parameters = make_context(rank, world_size), {"size_bytes": 768, **CASES[case]}
    workload = Collective(context, **parameters)
    checks = []
    for steps in (1, 3, 9):
        for _ in range(steps):
            workload.step()
        checks.append(outcome_of_check(workload))
    return {
        "checks": checks,
        "idle": outcome_of_check(Idle(context, **parameters)),
        "zeros": int((workload.input == 0).sum()),
        "bytes": workload.message_bytes,
        "factor": workload.busbw_factor,
    }


def outcome_of_training(training: Smoke) -> tuple[str, str]:
    """Step and check 20 times; return what the last check says, and its error where none are equal.

    Keep no name of the workload: its model in DDP has to end before gloo (see `tests.forked.gloo`).
    """
    for _ in range(20):
        training.step()
        told = outcome_of_check(training)
    next(training.model.parameters()).grad[0, 0] += 3 * torch.distributed.get_rank()
    with pytest.raises(WrongResultError) as raised:
        training.check()
    return told, raised.typename


def observe(rank: int, world_size: int, store: str) -> dict[str, Any]:
    with gloo(rank, world_size, store):
        here = make_context(rank, world_size)
        seen: dict[str, Any] = {case: observe_collective(case, rank, world_size) for case in CASES}
        seen["spoiled"] = []
        for operation in OPERATIONS:
            spoiled = Spoiled(here, operation=operation, size_bytes=768, dtype="int32")
            spoiled.step()
            seen["spoiled"].append(outcome_of_check(spoiled))
        grouped = GroupedCollective(here, groups="0+2", size_bytes=4096)
        grouped.step()
        seen["grouped"] = outcome_of_check(grouped), grouped.busbw_factor
        for direction, turn in itertools.product(DIRECTIONS, range(3)):
            pairs = Pairs(here, turn=turn, direction=direction, size_bytes=4096)
            untouched = outcome_of_check(pairs)
            pairs.step()
            seen[direction, turn] = (pairs.pair, untouched, outcome_of_check(pairs))
        for kind in (Smoke, BentGradients):
            seen[kind.__name__] = outcome_of_training(kind(here))
        same = SameBits(here, size=64)
        same.step()
        same.check()
        seen["digest"] = same.digest
        named = Pairs(here, partners="0-2", size_bytes=64)
        named.step()
        seen["named"] = (named.pair, outcome_of_check(named))
        return seen


ranks = answers_of_ranks(observe, 3, 3)


@pytest.mark.parametrize("case", CASES)
def test_payloads_are_right_after_every_block(case, ranks):
    assert [rank[case]["checks"] for rank in ranks] == [["right"] * 3] * len(ranks)
    # No element that is sent is zero.
    assert [rank[case]["zeros"] for rank in ranks] == [0] * len(ranks)


@pytest.mark.parametrize("case", CASES)
def test_every_receiving_rank_detects_an_idle_step(case, ranks):
    receivers = ranks[1:] if case.startswith("broadcast") else ranks
    for rank, seen in enumerate(receivers, start=len(ranks) - len(receivers)):
        assert seen[case]["idle"].startswith(f"rank {rank}: {case.split()[0]} of ")
        assert "left a wrong payload: element " in seen[case]["idle"]


def test_wrong_elements_are_named_with_rank_and_operation(ranks):
    for operation, told in zip(OPERATIONS, ranks[1]["spoiled"], strict=True):
        assert told.startswith(
            f"rank 1: {operation} of 768 bytes left a wrong payload: element 5 of "
        ), told
    assert ranks[0]["spoiled"] == ["right"] * len(OPERATIONS)


@pytest.mark.parametrize("case", CASES)
def test_message_and_factor_are_those_of_nccl_tests(case, ranks):
    assert (busbw_factor("all_reduce", 8), busbw_factor("all_gather", 8)) == (1.75, 0.875)
    factors = {"all_reduce": 4 / 3, "broadcast": 1.0, "sendrecv": 1.0}
    for rank in ranks:
        assert rank[case]["bytes"] == CASES[case].get("size_bytes", 768)
        assert rank[case]["factor"] == pytest.approx(factors.get(case.split()[0], 2 / 3))


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
        assert moved[0] < 10
    sent[-1] = torch.nan
    assert payload.first_mismatch(sent, (0,), 0)[0] == 2**21 - 1


def test_a_group_leaves_the_other_ranks_alone(ranks):
    # 2 (n - 1) / n of a group of two.
    assert [rank["grouped"] for rank in ranks] == [("right", 1.0)] * 3


def test_an_idle_rank_declares_bandwidth_of_its_peers():
    # Rows take their bandwidth from rank 0.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # type: ignore[no-untyped-call]
    idle = GroupedCollective(make_context(0, 4), groups="1-3", size_bytes=48)
    dist.destroy_process_group()
    assert (idle.message_bytes, idle.busbw_factor) == (48, 4 / 3)


def test_groups_of_ranges_and_lists_round_trip():
    groups = parse_groups("0-3,4+6", 8)
    assert groups == ((0, 1, 2, 3), (4, 6))
    assert groups_text(groups) == "0-3,4+6"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_messages_reach_each_partner_and_one_rank_idles(direction, ranks):
    for turn in range(3):
        seen = [rank[direction, turn] for rank in ranks]
        assert [after for *_, after in seen] == ["right"] * 3
        assert sum(pair is None for pair, *_ in seen) == 1
        receives = {"forward": [1], "backward": [0]}.get(direction, [0, 1])
        for rank, (pair, untouched, _) in enumerate(seen):
            if pair is not None and pair.index(rank) in receives:
                assert untouched.startswith(f"ranks {pair[0]} and {pair[1]}: a message from rank")
                assert untouched.endswith("arrived with a wrong payload")
            else:
                assert untouched == "right"


def test_pairs_can_be_named(ranks):
    told = [rank["named"] for rank in ranks]
    assert told == [((0, 2), "right"), (None, "right"), ((0, 2), "right")]
    assert parse_pairs("3-0,1-2", 4) == ((0, 3), (1, 2))


def test_a_majority_identifies_the_rank_with_wrong_gradients(ranks):
    error = "NoMajorityError"
    assert [rank["Smoke"] for rank in ranks] == [("right", error)] * 3
    assert [rank["BentGradients"] for rank in ranks] == [
        ("right", error),
        ("right", error),
        ("rank 2: its gradients differ from those of 2 other ranks after the same step", error),
    ]


def test_equal_products_have_equal_digests_on_all_ranks(ranks):
    assert len({rank["digest"] for rank in ranks}) == 1


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 16, 33])
def test_turns_pair_all_ranks_exactly_once(size):
    met = [pairs_of_turn(size, turn) for turn in range(turns(size))]
    for pairs in met:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)) == size - size % 2
    everybody = itertools.combinations(range(size), 2)
    assert sorted(pair for pairs in met for pair in pairs) == list(everybody)
    assert pairs_of_turn(size, turns(size)) == met[0]


@pytest.mark.parametrize("text", ["0-0", "0-1,1-2", f"0-{10**20}", "0", "a-b", "0-1;2-3", "1+1"])
def test_overlapping_pairs_or_groups_are_refused(text):
    for parse, what in ((parse_pairs, "pairs"), (parse_groups, "groups")):
        with pytest.raises(UsageError, match=f"disjoint {what} of ranks") as raised:
            parse(text, 4)
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("workload", "parameters", "changes", "message"),
    [
        (Collective, {}, {"world_size": 1}, "needs at least 2 ranks, world_size is 1; raise"),
        (Collective, {"operation": "broadcast", "size_bytes": 1002}, {}, "give a multiple of 4"),
        (Collective, {"operation": "all_gather", "size_bytes": 1000}, {"world_size": 3}, "of 12"),
        (Pairs, {}, {"world_size": 1}, "needs at least 2 ranks"),
        (Pairs, {"transport": "copy"}, {}, "between the memories of two GPUs"),
    ],
)
def test_what_cannot_be_done_is_one_line(workload, parameters, changes, message):
    with pytest.raises(UsageError) as caught:
        workload(make_context(0, **{"world_size": 2, **changes}), **parameters)
    assert str(caught.value).startswith(f"workload {workload.__name__.lower()}: ")
    assert message in str(caught.value)
